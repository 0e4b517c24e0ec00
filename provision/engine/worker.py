"""The process in which pyinfra runs: brings a share of the nodes to what the site describes.

    python -m provision.engine.worker <job

Each node's steps run in a greenlet of their own: operations take effect when they are called, and a slow, frozen or
failing node holds up nobody but those that need it. gevent patches this whole process, which is why it is one.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

# The patch must come before anything that opens sockets, hence imports after code.
import base64  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Collection, Mapping  # noqa: E402
from contextlib import suppress  # noqa: E402
from typing import IO, Any, Literal  # noqa: E402

import gevent  # noqa: E402
from gevent.fileobject import FileObject  # noqa: E402
from pyinfra.api import Config, Inventory, State  # noqa: E402
from pyinfra.api.state import StateStage  # noqa: E402
from pyinfra.context import ctx_host, ctx_state  # noqa: E402

from provision.components import registry  # noqa: E402
from provision.engine import audit, headstate, preflight, reboot  # noqa: E402
from provision.engine.board import Blocked, Board, Done, Hooked, LateSecrets  # noqa: E402
from provision.engine.connector import NodeConnector  # noqa: E402
from provision.engine.deploy import Context, Step  # noqa: E402
from provision.engine.job import Job, own_output, take_over  # noqa: E402
from provision.engine.manifest import merged, remove_stale, united, write_manifest  # noqa: E402
from provision.engine.plan import Plan, hindrance, make_plan, not_yet  # noqa: E402
from provision.engine.playbook import hook_nodes  # noqa: E402
from provision.engine.record import OperationFailed, Recorder, Stopped  # noqa: E402
from provision.engine.remote import RemoteError, RootShell, connect  # noqa: E402
from provision.profiles import UnsupportedDistribution  # noqa: E402
from provision.site.hidden import SecretMissing  # noqa: E402
from provision.site.models import Hardware  # noqa: E402

_FAILURES = (RemoteError, preflight.PreflightError, headstate.HeadError, OperationFailed, SecretMissing)
EMIT_GATHER = 0.02  # seconds in which events are gathered into one write


class Worker:
    """One run's share of nodes."""

    def __init__(self, job: Job, out: IO[str]) -> None:
        self.job = job
        self._out = out
        self.plan: Plan = make_plan(
            job.site, [job.site.nodes[name] for name in job.all_nodes], job.components
        )
        self.board = Board()
        self.lock = job.lock
        self._lines: list[str] = []  # events not told yet
        self._telling: gevent.Greenlet | None = None
        self._ended = False
        self._stopped = ("interrupted", "run it again: it goes on from here")  # why, and what to do about it
        self._lease: RootShell | None = None  # the head's session, which holds it until all nodes are done
        self._nodes: dict[str, gevent.Greenlet] = {}
        self._head: gevent.Greenlet | None = None  # where it is outside of this run
        hosts: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in job.nodes]
        inventory = Inventory((hosts, {}))
        for host in inventory:
            host.connector_cls = NodeConnector
        self.state = State(
            inventory,
            Config(FAIL_PERCENT=None, PARALLEL=max(len(hosts), 1)),
            check_for_changes=job.forecast,
        )
        for stage in (
            StateStage.Connect,
            StateStage.Prepare,
            *([] if job.forecast else [StateStage.Execute]),
        ):
            self.state.set_stage(stage)
        self.state.is_executing = not job.forecast

    def run(self) -> None:
        """Bring all nodes of the share as far as they come; their outcomes are told as events."""
        listener = gevent.spawn(self._listen)
        gevent.signal_handler(signal.SIGTERM, self._end)
        with ctx_state.use(self.state):
            self._nodes = {host.name: gevent.spawn(self._node, host) for host in self.state.inventory}
            work = list(self._nodes.values())
            if self.job.with_secrets and self.job.site.head.name not in self.job.nodes:
                self._head = gevent.spawn(self._head_only)
                work.append(self._head)
            gevent.joinall(work, raise_error=True)
            if self._lease is not None:
                self._await_others()
                self._lease.close()
        self._tell()
        listener.kill()

    def _end(self) -> None:
        """End all sessions at once; what runs on a node is not killed, but nobody waits for it."""
        self._ended = self.board.stopping = True
        for host in self.state.inventory:
            shell = host.connector.__dict__.get("shell")
            if shell is not None and shell.alive:
                shell.kill()
            elif host.name in self._nodes:  # it is just being connected to
                self._nodes[host.name].kill(Stopped, block=False)
        if self._head is not None:
            self._head.kill(Stopped, block=False)

    def emit(self, event: dict[str, Any]) -> None:
        """One line of JSON to the controller, with others that come within some milliseconds."""
        self._lines.append(json.dumps(event))
        if self._telling is None:
            self._telling = gevent.spawn_later(EMIT_GATHER, self._tell)

    def _tell(self) -> None:
        lines, self._lines, self._telling = self._lines, [], None
        if lines:
            try:
                self._out.write("\n".join(lines) + "\n")
                self._out.flush()
            except BrokenPipeError:
                self.board.stopping = True  # nobody is left to hear it; what runs is let end

    def _listen(self) -> None:
        """Take in what the controller says: outcomes of other workers' nodes, and the wish to stop."""
        for line in FileObject(sys.stdin.fileno(), "rb", close=False):  # one that lets other greenlets run
            word = json.loads(line)
            if "done" in word:
                node, step, ok, changed = word["done"]
                self.board.settle(node, step, Done(ok, changed))
            elif "seen" in word:
                self._learn(word["seen"], word["hardware"])
            elif "hooked" in word:
                index, node, changed, failure = word["hooked"]
                self.board.give_hook(index, node, Hooked(changed, failure))
            elif "secrets" in word:
                self._take_secrets(word["secrets"])
            elif "admitted" in word:
                self._take_admitted(word["admitted"])
            elif "gone" in word:
                self._lose(word["gone"], word["with_secrets"])
            elif "stop" in word:
                self.board.stopping = True
        self.board.stopping = True
        self.board.close("the controller is gone")

    def _lose(self, nodes: Collection[str], with_secrets: bool) -> None:
        """Another worker process has ended: what it has not told of its nodes will not be told any more.

        The one that holds the lease ends last; where it has not, no operation is begun that another run may contradict.
        """
        if with_secrets and not self.job.forecast and not self.board.stopping and self._busy():
            self._stopped = (
                f"the lease on {self.job.site.head.name} ended with its worker process",
                "another run may have begun: look at `provision status`, then run it again",
            )
            self.board.stopping = True
        for name in nodes:
            self.board.seen(name)
            for step in self.plan.steps[name]:
                self.board.settle(name, step.name, Done(False))
        if with_secrets:
            reason = f"blocked by {self.job.site.head.name}: its worker process has ended"
            self.board.give_secrets(reason)
            self.board.give_admitted(reason)

    def _take_secrets(self, word: dict[str, str] | str) -> None:
        if isinstance(word, str):
            self.board.give_secrets(word)
        else:
            self.board.give_secrets({name: base64.b64decode(value) for name, value in word.items()})

    def _take_admitted(self, word: list[str] | str) -> None:
        self.board.give_admitted(word if isinstance(word, str) else frozenset(word))

    def _learn(self, node: str, hardware: dict[str, int] | None) -> None:
        """Note a node's hardware where the lock has none; a lock that says otherwise wins and is contradicted aloud."""
        if hardware is not None and node not in self.lock.hardware:
            known = {**self.lock.hardware, node: Hardware.model_validate(hardware)}
            self.lock = self.lock.model_copy(update={"hardware": known})
        self.board.seen(node)

    def _node(self, host: Any) -> None:
        """Everything that is done on one node, whatever happens told as an event."""
        name: str = host.name
        recorder = Recorder(name, self.emit, self.job.forecast, lambda: self.board.stopping)
        started = time.monotonic()
        verdict: dict[str, Any] = {"verdict": "pass", "reason": None, "advice": None}
        blocked: str | None = None
        try:
            with ctx_host.use(host):
                blocked = self._converge(host, recorder)
            if blocked:
                verdict = {"verdict": "fail", "reason": blocked, "advice": None}
        except Stopped:
            verdict = {"verdict": "fail", "reason": self._stopped[0], "advice": self._stopped[1]}
        except _FAILURES as error:
            message, advice = str(error), getattr(error, "advice", None)
            if self._ended:
                message, advice = (
                    "interrupted",
                    "what was running may still end on the node; then run it again",
                )
            # the node is named beside it: what many nodes answer alike is then said once
            verdict = {"verdict": "fail", "reason": message.removeprefix(f"{name}: "), "advice": advice}
        except Exception as error:
            logging.getLogger(__name__).exception("%s", name)
            verdict = {
                "verdict": "fail",
                "reason": f"{type(error).__name__}: {error}",
                "advice": "this is a bug",
            }
        if verdict["verdict"] == "fail":
            self._give_up(name, str(verdict["reason"]))
        self.emit(
            {
                "event": "node",
                "node": name,
                "changed": recorder.changed,
                "seconds": round(time.monotonic() - started, 3),
                "asked": list(host.connector.asked),
                "blocked": blocked is not None,
                **verdict,
            }
        )

    def _give_up(self, name: str, reason: str) -> None:
        """Nobody waits for a node that has failed."""
        self._tell_seen(name, None)
        for step in self.plan.steps[name]:
            self._settle(name, step.name, Done(False))
        if self.job.with_secrets and name == self.job.site.head.name:
            self._tell_silent_head(reason)

    def _converge(self, host: Any, recorder: Recorder) -> str | None:
        """All steps of a node in order; the reason why some were blocked, None when all ran.

        Raises the first failure, once everything that does not need what failed is done.
        """
        job, name = self.job, host.name
        conn: NodeConnector = host.connector
        self.emit({"event": "connect", "node": name})
        conn.shell = connect(job.site, job.site.nodes[name], sudo_password=job.sudo_password)
        try:
            if not job.forecast:
                preflight.take_lock(conn.shell, job.holder, job.run)
            facts = preflight.look(conn.shell)
            self._tell_seen(name, facts.hardware.model_dump())
            self._contradict(name, facts)
            if job.forecast:
                facts = preflight.as_planned(facts)
            else:
                preflight.require_systemd(name, facts)
            if job.with_secrets and name == job.site.head.name:
                self._tell_what_head_holds(conn.shell)
            conn.longest = job.timeout
            conn.attach(recorder, facts.profile, facts.limits)
            conn.foretell(job.questions.get(name, ()))
            self.board.await_seen(n for n in job.all_nodes if self._hardware_unknown(n))
            blocked = self._steps(host, recorder, facts)
        except BaseException:
            with suppress(RemoteError):  # what went wrong before is what is told
                self._audit(conn, recorder)
            raise
        else:
            self._audit(conn, recorder)
            return blocked
        finally:
            if job.with_secrets and name == job.site.head.name and conn.shell.alive:
                self._lease = conn.shell
            else:
                conn.shell.close()

    def _audit(self, conn: NodeConnector, recorder: Recorder) -> None:
        """Tell the node's own journal what was changed. Raises RemoteError."""
        if not self.job.forecast and conn.shell.alive:
            audit.write(conn.shell, "apply", self.job.run, self.job.holder, recorder.changes)

    def _hardware_unknown(self, name: str) -> bool:
        return name not in self.job.lock.hardware and self.job.site.nodes[name].hardware is None

    def _steps(self, host: Any, recorder: Recorder, facts: preflight.Facts) -> str | None:
        job, name = self.job, host.name
        node = job.site.nodes[name]
        conn: NodeConnector = host.connector
        undone: dict[str, str] = {}  # component -> why what needs it is blocked
        failed: OperationFailed | None = None
        reasons: list[str] = []
        asking: list[Step] = []  # for a reboot
        steps = self.plan.steps[name]

        def lose(step: Step, failure: OperationFailed) -> None:
            nonlocal failed
            failure.advice = self._with_what_lacks(failure.advice, name, step, facts)
            failed = failed or failure
            undone[step.component] = f"blocked by {step.name}: it failed on this node"
            self._settle(name, step.name, Done(False))

        def block(step: Step, reason: Blocked) -> None:
            undone[step.component] = str(reason)
            self._settle(name, step.name, Done(False))
            self.emit(
                {
                    "event": "step",
                    "node": name,
                    "step": step.name,
                    "outcome": "blocked",
                    "reason": str(reason),
                }
            )

        for index, step in enumerate(steps):
            try:
                if hindered := hindrance(step, undone):
                    raise Blocked(hindered)
                if self.board.await_steps(self.plan.prerequisites(job.site, node, step)):
                    conn.forget()  # what was changed elsewhere may show here
                asked = len(reasons)
                changed = self._step(step, host, recorder, facts, reasons)
                self._settle(name, step.name, Done(True, changed))
                if len(reasons) > asked:
                    asking.append(step)
            except Blocked as reason:
                block(step, reason)
            except OperationFailed as failure:
                lose(step, failure)
            last_of_stage = index + 1 == len(steps) or _stage(steps[index + 1]) != _stage(step)
            if reasons and last_of_stage and not job.forecast:
                for again in asking if self._reboot(host, reasons) else ():
                    try:
                        self._finish(again, host, recorder, facts)
                    except Blocked as reason:
                        block(again, reason)
                    except OperationFailed as failure:
                        lose(again, failure)
                reasons.clear()
                asking.clear()
        ran = {step.component for step in steps}
        if not undone:
            remove_stale(job, facts, recorder, ran)
        whole = job.components is None
        made = (
            united(facts.manifest, recorder.owned)
            if undone
            else merged(facts.manifest, recorder.owned, ran, whole=whole)
        )
        self._write_manifest(conn, made)
        if failed is not None:
            raise failed
        return next(iter(undone.values()), None)

    def _with_what_lacks(
        self, advice: str | None, name: str, step: Step, facts: preflight.Facts
    ) -> str | None:
        """The advice on a step that has failed, with the components that a run of some was begun without."""
        site = self.job.site
        lacking = not_yet(site, site.nodes[name], step, facts.manifest, self.job.components)
        if not lacking:
            return advice
        wanted = " ".join(f"--component {each}" for each in lacking)
        said = (
            f"{step.component} comes after {', '.join(lacking)}, not brought to this node yet: add {wanted}"
        )
        return f"{said}; {advice}" if advice else said

    def _hooks(self, component: str, when: Literal["before", "after"], host: Any, recorder: Recorder) -> None:
        """Have the site file's playbooks around `component` run on this node, by the controller."""
        node = self.job.site.nodes[host.name]
        for index, hook in enumerate(self.job.site.file.hooks):
            if getattr(hook, when) != component or not hook_nodes(self.job.site, hook, [node]):
                continue
            title = f"playbook {hook.playbook} {when} {component}"
            with recorder.operation(title):
                self.emit({"private": {"hook": index, "node": host.name}})
                hooked = self.board.await_hook(index, host.name)
                host.connector.forget()
                if hooked.failure is not None:
                    raise OperationFailed(title, hooked.failure)
                recorder.finish(hooked.changed > 0)

    def _write_manifest(
        self, conn: NodeConnector, components: Mapping[str, Mapping[str, Collection[str]]]
    ) -> None:
        if not self.job.forecast:
            write_manifest(conn.shell, self.job.site.digest, components)

    def _step(
        self, step: Step, host: Any, recorder: Recorder, facts: preflight.Facts, reasons: list[str]
    ) -> int:
        """Run one step; the number of its changes."""
        before, started = recorder.changed, time.monotonic()
        own = [s for s in self.plan.steps[host.name] if s.component == step.component]
        recorder.component, recorder.step = step.component, step.name
        node = self.job.site.nodes[host.name]
        context = Context(
            self.job.site,
            node,
            step.component,
            self.lock,
            facts.profile,
            LateSecrets(self.board),
            facts.limits,
            reasons,
        )
        self.emit({"event": "step", "node": host.name, "step": step.name, "outcome": "running"})
        try:
            if step is own[0]:
                self._hooks(step.component, "before", host, recorder)
            step.run(context)
            if step is own[-1]:
                self._hooks(step.component, "after", host, recorder)
        except (OperationFailed, Stopped, UnsupportedDistribution, SecretMissing) as failure:
            self.emit({"event": "step", "node": host.name, "step": step.name, "outcome": "failed"})
            self._write_manifest(host.connector, united(facts.manifest, recorder.owned))
            if isinstance(failure, UnsupportedDistribution):
                advice = "add it to provision/profiles/distributions.yml, or leave the component out"
                raise OperationFailed(step.name, str(failure), advice) from failure
            if isinstance(failure, SecretMissing):
                raise OperationFailed(step.name, str(failure)) from failure
            raise
        changed = recorder.changed - before
        self.emit(
            {
                "event": "step",
                "node": host.name,
                "step": step.name,
                "outcome": "done",
                "changed": changed,
                "seconds": round(time.monotonic() - started, 3),
            }
        )
        return changed

    def _finish(self, step: Step, host: Any, recorder: Recorder, facts: preflight.Facts) -> None:
        """Run again a step that asked for the reboot: what needed it is done now, or will not be."""
        reasons: list[str] = []
        self._step(step, host, recorder, facts, reasons)
        if reasons:
            raise OperationFailed(step.name, f"asks for another reboot after the first: {'; '.join(reasons)}")

    def _reboot(self, host: Any, reasons: list[str]) -> bool:
        """One reboot for all reasons, and whether it was done; a node that is, or may be, in use is only told of it."""
        name = host.name
        text = "; ".join(dict.fromkeys(reasons))
        if (why_not := self._why_no_reboot(name)) is not None:
            self.emit({"event": "warning", "node": name, "text": f"must be rebooted ({why_not}): {text}"})
            return False
        self.emit({"event": "reboot", "node": name, "text": text})
        conn: NodeConnector = host.connector

        def again() -> RootShell:
            if self._ended:
                raise Stopped
            return connect(self.job.site, self.job.site.nodes[name], sudo_password=self.job.sudo_password)

        conn.shell = reboot.reboot(conn.shell, again)
        preflight.take_lock(conn.shell, self.job.holder, self.job.run)
        conn.forget()
        return True

    def _why_no_reboot(self, name: str) -> str | None:
        if not self.job.reboot:
            return "--no-reboot"
        try:
            return "it is admitted: drain it first" if self.board.admitted(name) else None
        except Blocked as reason:
            return f"whether it is in use is not known: {reason}"

    def _head_only(self) -> None:
        """The head is outside of this run, but what it holds is needed: facts only, and the lease."""
        site = self.job.site
        self.emit({"event": "connect", "node": site.head.name, "only": "facts"})
        try:
            shell = connect(site, site.head, sudo_password=self.job.sudo_password)
        except (RemoteError, Stopped) as error:
            self._tell_silent_head(str(error) or "interrupted")
            return
        try:
            if not self.job.forecast:
                preflight.take_lock(shell, self.job.holder, self.job.run)
            self._tell_what_head_holds(shell)
            self._await_others()
        except (RemoteError, preflight.PreflightError, headstate.HeadError, Stopped) as error:
            self._tell_silent_head(str(error) or "interrupted")
        finally:
            shell.close()

    def _await_others(self) -> None:
        """Until all nodes of the run are done, those of other workers too."""
        while self._busy():
            gevent.sleep(0.1)

    def _busy(self) -> bool:
        return not all(
            self.board.finished(name, [s.name for s in self.plan.steps[name]]) for name in self.job.all_nodes
        )

    def _gather_secrets(self, shell: RootShell) -> dict[str, bytes]:
        """Adopt what exists, make what does not; a plan makes nothing and shows what would be made."""
        wanted = registry.secrets(self.job.site)
        stored, adopted = headstate.read_secrets(shell, wanted)
        escrow = {name: value for name, value in self.job.escrow.items() if name in wanted}
        secrets = {**escrow, **adopted, **stored}
        for name, secret in wanted.items():
            if name in stored:
                continue
            outcome = "adopted" if name in secrets else "made"
            secrets.setdefault(name, secret.make())
            self.emit({"event": "secret", "node": shell.name, "name": name, "outcome": outcome})
            if not self.job.forecast:
                headstate.write_secret(shell, name, secrets[name])
        return secrets

    def _contradict(self, name: str, facts: preflight.Facts) -> None:
        node = self.job.site.nodes[name]
        for text in preflight.contradictions(node, self.job.lock.hardware_of(self.job.site, node), facts):
            self.emit({"event": "warning", "node": name, "text": text})

    def _settle(self, node: str, step: str, done: Done) -> None:
        self.board.settle(node, step, done)
        self.emit({"private": {"done": [node, step, done.ok, done.changed]}})

    def _tell_seen(self, node: str, hardware: dict[str, int] | None) -> None:
        self._learn(node, hardware)
        self.emit({"private": {"seen": node, "hardware": hardware}})
        if hardware is not None:
            self.emit({"event": "hardware", "node": node, "hardware": hardware})

    def _tell_what_head_holds(self, shell: RootShell) -> None:
        """What all nodes may need of the head: which of them are in use, and the secrets."""
        try:
            known = headstate.read_acceptance(shell)
        except headstate.HeadError as error:
            self._tell_admitted(str(error))  # then no node is rebooted
        else:
            self._tell_admitted([name for name, entry in known.items() if entry.state == "admitted"])
        self._tell_secrets(self._gather_secrets(shell))

    def _tell_silent_head(self, reason: str) -> None:
        """Nobody waits for what a head that has failed would have told."""
        told = f"blocked by {self.job.site.head.name}: {reason}"
        self._tell_secrets(told)
        self._tell_admitted(told)

    def _tell_admitted(self, nodes: list[str] | str) -> None:
        self._take_admitted(nodes)
        self.emit({"private": {"admitted": nodes}})

    def _tell_secrets(self, secrets: dict[str, bytes] | str) -> None:
        self.board.give_secrets(secrets)
        word = (
            secrets
            if isinstance(secrets, str)
            else {k: base64.b64encode(v).decode() for k, v in secrets.items()}
        )
        self.emit({"private": {"secrets": word}})


def _stage(step: Step) -> str:
    return registry.COMPONENTS[step.component]


def main() -> None:
    """Read the job, run it, tell the events."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("pyinfra").setLevel(logging.CRITICAL)
    out = own_output()
    job = take_over()
    if job is None:
        return
    assert isinstance(job, Job)
    os.umask(0o077)
    Worker(job, out).run()


if __name__ == "__main__":
    main()
