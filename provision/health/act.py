"""What changes the node or its state in Slurm. Everything here is thin; `decide` says what is to be done.

`fix` disturbs nobody: it starts services, switches persistence mode on, sets power limits and governor back,
loads peer memory, removes shared memory of ended jobs. Nothing here resets, reboots, flashes, changes MIG, ECC, ACS.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Callable

from provision.health import budget, decide
from provision.health.agent import OFF, Config, Outcome
from provision.health.finding import FAIL, WARN, Finding
from provision.health.sources.programs import Failed, Run, run, said

Fix = Callable[[Outcome, Finding, Run], str]  # what was done, in words


def _start(outcome: Outcome, finding: Finding, run_: Run) -> str:
    unit = (finding.read or "").partition(":")[0]
    said(run_, ["systemctl", "start", unit])
    return f"started {unit}"


def _fabric_manager(outcome: Outcome, finding: Finding, run_: Run) -> str:
    # a restart under running jobs breaks their collectives: only one that is down is started
    said(run_, ["systemctl", "start", "nvidia-fabricmanager"])
    return "started nvidia-fabricmanager"


def _persistence(outcome: Outcome, finding: Finding, run_: Run) -> str:
    said(run_, ["nvidia-smi", "-pm", "1"])
    return "persistence mode on"


def _power(outcome: Outcome, finding: Finding, run_: Run) -> str:
    index = finding.subject.rpartition(" ")[2]
    watts = re.sub(r"[^\d.]", "", finding.expected or "")
    said(run_, ["nvidia-smi", "-i", index, "-pl", watts])
    return f"power limit of GPU {index} set to {watts} W"


def _governor(outcome: Outcome, finding: Finding, run_: Run) -> str:
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"):
        path.write_text(finding.expected or "")
    return f"governor {finding.expected}"


def _peermem(outcome: Outcome, finding: Finding, run_: Run) -> str:
    said(run_, ["modprobe", "nvidia_peermem"])
    return "loaded nvidia_peermem"


def _shared_memory(outcome: Outcome, finding: Finding, run_: Run) -> str:
    removed = 0
    in_use = _mapped()
    for path in Path("/dev/shm").rglob("*"):
        about = path.lstat()
        # only what a user left, that nobody maps any more, and not what was made a moment ago
        if (
            about.st_uid >= 1000
            and path.is_file()
            and str(path) not in in_use
            and time.time() - about.st_mtime > 60
        ):
            path.unlink()
            removed += 1
    return f"removed {removed} files in /dev/shm"


def _mapped() -> set[str]:
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found |= set(re.findall(r"/dev/shm/\S+", maps.read_text(errors="replace")))
        except OSError:
            continue  # it has ended meanwhile
    return found


FIXES: dict[str, Fix] = {
    "services": _start,
    "fabric-manager": _fabric_manager,
    "persistence": _persistence,
    "power-limit": _power,
    "governor": _governor,
    "peer-memory": _peermem,
    "shared-memory": _shared_memory,
}


def fix(outcome: Outcome, run_: Run = run) -> list[str]:
    """Mend what can be mended without disturbing anybody; what was done, or why it could not be, a line each."""
    done = []
    for finding in outcome.findings:
        if finding.action != "fix" or finding.verdict not in (WARN, FAIL) or finding.check not in FIXES:
            continue
        try:
            done.append(f"{finding.check}: {FIXES[finding.check](outcome, finding, run_)}")
        except (OSError, Failed) as error:
            done.append(f"{finding.check}: could not be mended: {error}")
    return done


def may(config: Config, off: Path = OFF) -> bool:
    """Whether this agent acts at all: the site says so, and nobody pulled the switch."""
    return config.act and not off.exists()


def slurm(config: Config, outcome: Outcome, run_: Run = run, now: Callable[[], float] = time.time) -> str:
    """Drain or resume this node in Slurm as decided; what was done, in words. Raises Failed, OSError."""
    decision = outcome.decision
    if decision.resume:
        _update(run_, config.node, "State=RESUME")
        _verify(run_, config.node, drained=False)
        return "resumed: all is well again"
    if not decision.drain:
        return ""
    size = _partition_size(run_, config.node)
    if budget.used_up(_drained(run_), size, now()):
        return f"ALERT: not drained, the budget of {budget.budget(size)} nodes an hour is used up: {decision.reason}"
    _update(run_, config.node, "State=DRAIN", f"Reason={decision.reason_marked}")
    _verify(run_, config.node, drained=True)
    if not budget.stays(config.node, lambda: (_drained(run_), size), now):
        _update(run_, config.node, "State=RESUME")
        return (
            f"ALERT: resumed, the budget of {budget.budget(size)} nodes an hour is used up: {decision.reason}"
        )
    return f"drained: {decision.reason}"


def _update(run_: Run, node: str, *words: str) -> None:
    said(run_, ["scontrol", "update", f"NodeName={node}", *words])


def _verify(run_: Run, node: str, *, drained: bool) -> None:
    """A drain that did not take effect is an alarm of its own. Raises Failed."""
    answer = said(run_, ["scontrol", "-o", "show", "node", node])
    if ("DRAIN" in answer.partition("State=")[2].split(" ")[0]) != drained:
        raise Failed(f"ALERT: {node} should be {'drained' if drained else 'resumed'} and is not")


def _drained(run_: Run) -> dict[str, float]:
    answer = said(run_, ["sinfo", "-h", "-N", "-o", "%N|%E|%H"])
    found = {}
    for node, moment in decide.drained_by_agents(answer.splitlines()):
        try:
            found[node] = time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            found[node] = (
                time.time()
            )  # a moment that cannot be read counts: the budget errs on the careful side
    return found


def _partition_size(run_: Run, node: str) -> int:
    """Nodes of the smallest partition that `node` is in."""
    names = said(run_, ["sinfo", "-h", "-N", "-n", node, "-o", "%R"]).split()
    if not names:
        raise Failed(f"{node} is in no partition")
    return min(
        len(set(said(run_, ["sinfo", "-h", "-N", "-p", name, "-o", "%N"]).split()))
        for name in sorted(set(names))
    )
