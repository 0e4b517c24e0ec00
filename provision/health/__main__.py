"""`provision-health VERB`: what it is called as on the node.

provision-health check [--full] [--json]      read and judge; exit status 0 well (or warnings), 1 not, 2 wrong input
provision-health slurm                        the same for Slurm's HealthCheckProgram: mends, drains, resumes
provision-health prolog | epilog              before and after a job: quick, never asks slurmctld
provision-health watch                        for a timer: reads, mends, writes metrics
provision-health follow                       waits for kernel messages; one that tells of a fault starts a reading
provision-health acknowledge [reset]          what was reported is dealt with (reset: GPUs were reset for it)
provision-health history                      past verdicts, a line each time one changed
provision-health kubernetes                   what the API server has of this node's condition, as JSON
provision-health record FILE                  write what can be read of this node to a file
provision-health judge FILE                   judge such a file, here or elsewhere
provision-health compile FILE                 write this program with byte code for this Python
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

PROLOG = (
    "gpu-count",
    "nvml",
    "ecc-uncorrected",
    "remap-pending",
    "remap-failure",
    "recovery-action",
    "xid",
    "off-bus",
    "nvlink-count",
    "fabric-state",
    "pcie-link",
    "slowdown",
    "port",
    "filesystems",
    "device-files",
    "libraries",
)
READ = ("systemctl", "start", "--no-block", "provision-health.service")
VERBS = (
    "check",
    "slurm",
    "prolog",
    "epilog",
    "watch",
    "acknowledge",
    "history",
    "kubernetes",
    "record",
)
EPILOG = (*PROLOG, "left-over", "device-holders", "shared-memory", "slurm-memory")


def main(words: Sequence[str] | None = None) -> int:
    """Run a verb; the exit status."""
    given = list(sys.argv[1:] if words is None else words)
    verb, options = (given[0], given[1:]) if given else ("", [])
    if verb == "compile" and len(options) == 1:
        from provision.health import bundle

        bundle.compiled(sys.argv[0], options[0])
        return 0
    if verb == "cuda-memory":
        from provision.health import cuda

        print("\n".join(f"{gpu}: {state}" for gpu, state in cuda.memory().items()))
        return 0
    if verb == "judge" and len(options) == 1:
        return _judge(options[0])
    if verb == "follow":
        return _follow()
    if verb not in VERBS:
        print(__doc__, file=sys.stdout if verb in ("--help", "-h", "help") else sys.stderr)
        return 0 if verb in ("--help", "-h", "help") else 2
    from provision.health import agent

    try:
        return _verb(verb, options, agent.configured())
    except agent.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except agent.BusyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 0 if verb in ("prolog", "epilog") else 1  # nothing was found: no reason to drain


def _verb(verb: str, options: list[str], config: Any) -> int:
    from provision.health import act, agent, memory

    if verb == "record" and len(options) == 1:
        return _record(agent.read(config, full=True, scheduler=True), options[0])
    if verb == "kubernetes":
        return _kubernetes(config)
    with agent.remembered() as state:
        if verb == "acknowledge":
            fresh = memory.acknowledge(state, options[0] if options else "look")
            state.clear()
            state.update(fresh)
            return 0
        if verb == "history":
            _history(state.get("history", []))
            return 0
        full = "--full" in options
        only = {"prolog": list(PROLOG), "epilog": list(EPILOG)}.get(verb)
        outcome = agent.examine(config, state, full=full, scheduler=verb == "slurm", only=only)
        if verb == "epilog":
            outcome = _settled(config, state, outcome, only)
        said: list[str] = []
        if verb in ("slurm", "watch", "epilog") and act.may(config):
            said = act.fix(outcome)
            if said:
                outcome = agent.examine(config, state, full=full, scheduler=verb == "slurm", only=only)
        state["refused"] = (
            outcome.decision.drain if verb in ("prolog", "epilog") else state.get("refused", False)
        )
    scheduler = _scheduler(config, verb)
    told = "" if scheduler is None else _tell(config, scheduler, outcome)
    said += [told] if told else []
    for line in said:
        print(f"provision-health: {line}", file=sys.stderr)
    if scheduler is not None:
        with agent.remembered() as state:
            state.update(memory.told(state, scheduler, told))
    if config.textfile is not None and verb in ("slurm", "watch"):
        agent.write_metrics(config.textfile, outcome, agent.schedulers(config, state))
    _print(outcome, said, as_json="--json" in options)
    if verb in ("prolog", "epilog"):
        # an exit status makes Slurm drain the node: a failure does, and a node that was unreadable too often
        return int(outcome.decision.drain)
    return 0 if outcome.decision.verdict in ("pass", "warn", "skip") else 1


def _settled(config: Any, state: dict[str, Any], outcome: Any, only: Any) -> Any:
    """The driver frees what a job held a moment after its last process: look again before anybody is accused."""
    from provision.health import agent

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(
        each.verdict == "fail" and each.check in ("left-over", "device-holders") for each in outcome.findings
    ):
        time.sleep(1)
        outcome = agent.examine(config, state, only=only)
    return outcome


def _scheduler(config: Any, verb: str) -> str | None:
    """The scheduler that `verb` is for, where the node has it."""
    if verb == "slurm" and config.slurm:
        return "slurm"
    if verb == "watch" and config.kubernetes is not None:
        return "kubernetes"
    return None


def _tell(config: Any, scheduler: str, outcome: Any) -> str:
    """Tell it what was decided; what was done, in words.

    Not to be called while the state is held: prologs wait for that, and the scheduler may take its time.
    """
    from provision.health import act, kubeconfig, kubernetes
    from provision.health.sources.programs import Failed

    acting = act.may(config)
    try:
        if scheduler == "kubernetes":
            return kubernetes.tell(config.kubernetes, outcome.decision, acting=acting)
        return act.slurm(config, outcome) if acting else ""
    except (Failed, OSError, kubernetes.ApiError, kubeconfig.KubeconfigError) as error:
        return f"ALERT: {scheduler} could not be told: {error}"


def _follow() -> int:
    from provision.health import agent, follow
    from provision.health.sources.programs import run

    try:
        follow.follow(agent.kernel_messages(), lambda: print(run(READ).stderr, end="", file=sys.stderr))
    except OSError as error:
        print(f"error: kernel messages: {error}", file=sys.stderr)
    return 1


def _kubernetes(config: Any) -> int:
    from provision.health import kubeconfig, kubernetes

    if config.kubernetes is None:
        print("error: the site file names no Kubernetes for this node: health.kubernetes", file=sys.stderr)
        return 2
    try:
        print(json.dumps(kubernetes.asked(config.kubernetes, time.time())))
    except (kubernetes.ApiError, kubeconfig.KubeconfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _print(outcome: Any, said: list[str], *, as_json: bool) -> None:
    if as_json:
        decision = outcome.decision
        print(
            json.dumps(
                {
                    "verb": "health",
                    "site": None,
                    "verdict": decision.verdict,
                    "seconds": round(outcome.seconds, 3),
                    "nodes": {
                        outcome.node.subject: {
                            "verdict": decision.verdict,
                            "state": None,
                            "changed": len(said),
                            "failed": 0,
                            "reason": None if decision.verdict == "pass" else decision.reason,
                        }
                    },
                    "findings": [finding.document() for finding in outcome.findings],
                    "details": {"action": decision.action, "done": said, "about": _about(outcome.node)},
                }
            )
        )
        return
    counts = dict.fromkeys(("fail", "unknown", "warn", "pass", "skip"), 0)
    for finding in outcome.findings:
        counts[finding.verdict] += 1
        if finding.verdict not in ("pass", "skip"):
            print(finding.line())
    print(
        f"{outcome.decision.verdict}: "
        + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
        + f"; {outcome.seconds:.2f} s"
    )


def _about(node: Any) -> dict[str, Any]:
    """What the whole cluster is compared by."""
    gpus = []
    for gpu in node.get("gpus", ()):
        loaded = (
            gpu.get("utilization.gpu", 0) >= 95
            and gpu.get("clocks_event_reasons.sw_power_cap") == "Not Active"
        )
        gpus.append(
            {
                "index": gpu.get("index"),
                "name": gpu.get("name"),
                "vbios": gpu.get("vbios_version"),
                "clock": gpu.get("clocks.sm") if loaded else None,
            }
        )
    return {"driver": node.get("driver_version"), "gpus": gpus}


def _history(entries: list[Any]) -> None:
    last = None
    for at, verdict, reason in entries:
        if (verdict, reason) != last:
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(at))} {verdict} {reason}")
        last = (verdict, reason)


def _record(node: Any, path: str) -> int:
    from dataclasses import asdict

    from provision.health.readings import Device, plain

    values = dict(node.values)
    if isinstance(values.get("kernel.events"), list):
        values["kernel.events"] = [asdict(event) for event in values["kernel.events"]]
    with open(path, "w") as file:
        json.dump({"provision-health": 1, "node": plain(Device(node.subject, values))}, file, indent=1)
    return 0


def recorded(text: str) -> Any:
    """The readings that `record` wrote. Raises ValueError for anything else."""
    from provision.health.kernel import Event
    from provision.health.readings import Device, revived

    told = json.loads(text)
    if not isinstance(told, dict) or told.get("provision-health") != 1:
        raise ValueError("not a recording of provision-health")
    node = revived(told.get("node"))
    if not isinstance(node, Device):
        raise ValueError("a recording of provision-health without a node")
    events = node.values.get("kernel.events")
    if isinstance(events, list):
        node.values["kernel.events"] = [Event(**{**each, "pids": tuple(each["pids"])}) for each in events]
    return node


def _judge(path: str) -> int:
    from provision.health import decide
    from provision.health.agent import Outcome
    from provision.health.catalogue import judge
    from provision.health.limits import load

    try:
        with open(path) as file:
            node = recorded(file.read())
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 2
    findings = judge(node, load(), partial=True)
    decision = decide.decide(findings, 0, "", None)
    _print(Outcome(node, findings, decision, 0.0), [], as_json=False)
    return 0 if decision.verdict in ("pass", "warn", "skip") else 1


def run() -> None:
    """`main`, then the end of the process, not held up by a thread that hangs in the driver."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
