"""Runs components' checks on nodes: all nodes at once, each by itself, none holding up or hiding another.

Site file and ssh are enough: nothing that this tool keeps is read, so a cluster built by other means is
checked in the same way. Whatever cannot be told (a node out of reach, a check that raises or takes too long,
an unknown distribution) is a finding UNKNOWN with its reason.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from testinfra.host import Host

from provision.components import registry
from provision.engine import limits
from provision.engine.remote import DeadlineExceeded, RemoteError, RootShell, connect
from provision.profiles import Distribution, UnsupportedDistribution, of_os_release
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.report.text import sentence, worst_first
from provision.site.lock import Lock
from provision.site.models import Node, Site
from provision.verify.backend import Session, target_host
from provision.verify.check import Check, Found, Target, unknown
from provision.verify.checks import units_failed
from provision.verify.missing import judged

GENERIC = "verify"  # the name that stands for the checks of a node as a whole
GENERIC_CHECKS = (units_failed,)
WORKERS = 32  # nodes at a time
CHECK_SECONDS = 20.0  # for one check
_WHY_LENGTH = 400

Connect = Callable[[Site, Node, str | None], RootShell]
Progress = Callable[[str, Finding | None], None]  # (node, a finding), at last (node, None): done


def components_of(site: Site) -> list[str]:
    """What has checks in `site`: the components that it names, and "verify" for the node as a whole."""
    return [GENERIC, *(name for name in registry.COMPONENTS if site.enabled(name))]


def checks_for(site: Site, node: Node, components: Collection[str] | None = None) -> list[Check]:
    """The checks of the named components (None: all) that apply to `node`, by component, as written."""
    return [
        check
        for component in components_of(site)
        if components is None or component in components
        for check in (GENERIC_CHECKS if component == GENERIC else registry.checks(component))
        if node.has(check.role)
    ]


def verify(
    site: Site,
    lock: Lock,
    nodes: Sequence[Node],
    *,
    components: Collection[str] | None = None,
    sudo_password: str | None = None,
    timeout: float = 60.0,
    progress: Progress = lambda node, finding: None,
    reach: Connect = lambda site, node, password: connect(site, node, sudo_password=password),
) -> list[Finding]:
    """Run the checks of `components` (None: all named in the site file) on `nodes`.

    Each node may take `timeout` seconds. Findings come by node in the order given, then as checks are
    written; `progress` is called from several threads.
    """

    def session(node: Node) -> Session:
        return Session(node.name, lambda: reach(site, node, sudo_password))

    # Every check is loaded before any node is touched.
    wanted = {node.name: checks_for(site, node, components) for node in nodes}
    sessions = {node.name: session(node) for node in [*site.nodes.values(), *nodes]}
    waiting: queue.SimpleQueue[Node] = queue.SimpleQueue()
    for node in nodes:
        waiting.put(node)
    done: queue.SimpleQueue[tuple[str, list[Finding] | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                node = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                found = []
                deadline = time.monotonic() + timeout
                for finding in _verify_node(site, lock, node, wanted[node.name], sessions, deadline):
                    found.append(finding)
                    progress(node.name, finding)
                progress(node.name, None)
                done.put((node.name, found))
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
                done.put((node.name, error))

    # Daemon threads: an interrupt need not wait for a node that is just being connected to.
    for number in range(min(WORKERS, len(nodes))):
        threading.Thread(target=work, name=f"verify-{number}", daemon=True).start()
    results: dict[str, list[Finding]] = {}
    try:
        for _ in nodes:
            name, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            results[name] = outcome
    except BaseException:
        for opened in sessions.values():
            opened.interrupt()
        raise
    for opened in sessions.values():
        opened.close()
    return [finding for node in nodes for finding in results[node.name]]


def document(site: Site, nodes: Sequence[Node], findings: Sequence[Finding], seconds: float) -> Document:
    """What `provision verify` answers. Pure."""
    results = {
        node.name: node_result([finding for finding in findings if finding.subject == node.name])
        for node in nodes
    }
    return Document(
        verb="verify",
        site=site.cluster,
        verdict=worst(result.verdict for result in results.values()),
        seconds=round(seconds, 3),
        nodes=results,
        findings=list(findings),
        details={"digest": site.digest},
    )


def node_result(findings: Sequence[Finding]) -> NodeResult:
    """A node's result from its findings; the reason is the first of the worst. Pure."""
    verdict = worst(finding.verdict for finding in findings)
    reason = None
    if findings and verdict not in (Verdict.PASS, Verdict.SKIP):
        first = worst_first(findings)[0]
        reason = f"{first.check}: {sentence(first)}"
    failed = sum(finding.verdict is Verdict.FAIL for finding in findings)
    return NodeResult(verdict=verdict, failed=failed, reason=reason)


def _verify_node(
    site: Site,
    lock: Lock,
    node: Node,
    wanted: Sequence[Check],
    sessions: Mapping[str, Session],
    deadline: float,
) -> Iterator[Finding]:
    session = sessions[node.name]
    try:
        session.open()
        host = target_host(session, node.name)
        host.backend.deadline = min(deadline, time.monotonic() + CHECK_SECONDS)
        profile, cannot = _profile(host), _limits(host)
    except (RemoteError, UnsupportedDistribution, limits.LimitsError) as error:
        yield _not_checked(node, error, wanted)
        return
    yield Finding(verdict=Verdict.PASS, check="node-reachable", subject=node.name, read="root by ssh")
    for number, check in enumerate(wanted, start=1):
        until = min(deadline, time.monotonic() + CHECK_SECONDS)
        host.backend.deadline = until
        other = partial(_other, sessions, until)
        found, lost = _run(
            check, Target(site, node, check.component, lock, profile, host, cannot, other), until
        )
        yield check.finding(node.name, found)
        if lost:
            try:
                session.open()
            except RemoteError as error:
                yield _not_checked(node, error, wanted[number:])
                return


def _run(check: Check, at: Target, until: float) -> tuple[Found, bool]:
    """What `check` found, and whether a connection was lost on the way."""
    if check.limit is not None and (reason := at.limited(check.limit)) is not None:
        return Found(Verdict.SKIP, why=reason, source=limits.PATH), False
    begin = time.monotonic()
    if begin >= until:
        return unknown("not run: this node's time was over before", action="give more with --timeout"), False
    try:
        at.host.backend.said.clear()
        found: Any = check.run(at)
        if isinstance(found, Found):
            return judged(found, at), False
    except DeadlineExceeded as error:
        return (
            unknown(
                f"no answer within {until - begin:.0f} s: {_short(str(error))}",
                action=error.advice or "look at the node's load and disks, or give more with --timeout",
            ),
            True,
        )
    except RemoteError as error:
        return unknown(_short(str(error)), action=error.advice), True
    except Exception as error:  # noqa: BLE001
        # A check is code of any component run against a node in any state; testinfra itself raises
        # AssertionError, RuntimeError, ValueError and more. One that raises could not tell, and must
        # neither end the run nor hide the other checks of this and all other nodes.
        return (
            unknown(
                f"{type(error).__name__}: {_short(str(error))}",
                action=f"see what {check.name} reads in checks.py of {check.component}",
            ),
            False,
        )
    return unknown(f"the check {check.name} answered {type(found).__name__}, not Found"), False


def _other(sessions: Mapping[str, Session], until: float, name: str) -> Host | None:
    """Another node for a cross check; None where it cannot be reached."""
    try:
        sessions[name].open()
    except RemoteError:
        return None
    host = target_host(sessions[name], name)
    host.backend.deadline = until
    return host


def _not_checked(node: Node, error: Exception, left: Sequence[Check]) -> Finding:
    """Why the checks `left` could not run on `node`: one finding for all of them."""
    if isinstance(error, UnsupportedDistribution):
        check, source = "node-distribution", "/etc/os-release"
        action: str | None = "install a supported one, or add it to provision/profiles/distributions.yml"
    elif isinstance(error, limits.LimitsError):
        check, source = "node-limits", limits.PATH
        action = 'write it as {"limits": [{"what": "...", "reason": "..."}]}, or remove it'
    else:
        check, source = "node-reachable", "ssh"
        action = getattr(error, "advice", None)
    why = _short(str(error).removeprefix(f"{node.name}: "))
    return Finding(
        verdict=Verdict.UNKNOWN,
        check=check,
        subject=node.name,
        why=f"{why}; {len(left)} check{'' if len(left) == 1 else 's'} did not run",
        source=source,
        action=action,
    )


def _profile(host: Host) -> Distribution:
    return of_os_release(_text(host.run("cat /etc/os-release").stdout_bytes))


def _limits(host: Host) -> dict[str, str]:
    answer = host.run(limits.command())
    if answer.rc:
        raise limits.LimitsError(f"{limits.PATH} cannot be read: {_text(answer.stderr_bytes)}")
    return limits.parse(_text(answer.stdout_bytes))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _short(text: str) -> str:
    """`text` in one line of bearable length."""
    line = " ".join(text.split())
    return line if len(line) <= _WHY_LENGTH else f"{line[:_WHY_LENGTH]} ..."
