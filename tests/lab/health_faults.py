"""Faults of a node, what the agent must say of each, and the table of how it did: `make faults`.

Each fault is injected alone into a node that is well; the agent reads the node once before (its baselines) and once
after. Found: the right check with the right verdict and action. False: any other check that is not well and that the
fault does not bring with it. What a fault hides (no NVML, no systemd) may be unknown, never well.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.lab import Lab
from tests.lab.cluster import brought_up

AGENT = "/usr/local/lib/provision/provision-health"
STATE = "/var/lib/provision/health/state.json"
OFF = "/etc/provision/health.off"
TIMER = "provision-health.timer"
COMPONENTS = ("ssh", "firewall", "time", "storage", "munge", "slurm", "health")
SECONDS = 30.0  # for one reading, that of a hanging GPU included


@dataclass(frozen=True)
class Case:
    """One fault, and what must be said of it."""

    kind: str
    check: str | None  # None: nothing may be said
    verdict: str = "fail"
    action: str | None = "drain"
    options: dict[str, Any] = field(default_factory=dict)
    real: bool = False  # below the reader: nothing is simulated
    also: tuple[str, ...] = ()  # checks that the same fault speaks to, too
    hides: bool = False  # other checks may be unknown for it
    full: bool = False  # found by the full set alone
    readings: int = 1

    @property
    def name(self) -> str:
        told = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.kind} {told}".strip()


def gpu(kind: str, check: str, verdict: str = "fail", action: str | None = "drain", **more: Any) -> Case:
    return Case(kind, check, verdict, action, **more)


def says(message: str, check: str, verdict: str = "fail", action: str = "drain", **more: Any) -> Case:
    return Case("kernel-message", check, verdict, action, {"message": message}, **more)


def xid(number: int, verdict: str = "fail", action: str | None = "reset", check: str | None = "xid") -> Case:
    return Case("xid", check, verdict, action, {"xid": number})


def stopped(unit: str) -> Case:
    return Case("unit-stopped", "services", "fail", "fix", {"unit": unit}, real=True)


CASES: tuple[Case, ...] = (
    gpu("gpu-gone", "gpu-count"),
    gpu("gpu-lost", "gpu-count"),
    gpu("gpu-hang", "nvml", "unknown", None, hides=True),
    gpu("gpu-unreadable", "temperature", "unknown", None, hides=True),
    gpu("gpu-ecc", "ecc-uncorrected", action="reset"),
    gpu("gpu-sram", "sram-uncorrected", action="rma", also=("sram-threshold",)),
    gpu("gpu-ecc-off", "ecc-mode", action="reboot"),
    gpu("gpu-remap", "remap-pending", action="reset", also=("recovery-action",)),
    gpu("gpu-remap-failed", "remap-failure", action="rma", also=("remap-banks",)),
    gpu("gpu-repair", "repair-pending", action="reset", also=("recovery-action",)),
    gpu("gpu-inforom", "inforom", action="rma", full=True),
    gpu("gpu-nvlink-down", "nvlink-count"),
    gpu("gpu-nvlink-errors", "nvlink-errors"),
    gpu("gpu-fabric", "fabric-state"),
    gpu("gpu-hot", "temperature", also=("slowdown",)),
    gpu("gpu-throttle", "slowdown"),
    gpu("gpu-power-limit", "power-limit", "warn", "fix"),
    gpu("gpu-pcie", "pcie-link", action="reboot"),
    gpu("gpu-mig", "gpu-modes", "warn", "warn", hides=True),
    gpu("gpu-compute-mode", "gpu-modes", "warn", "warn"),
    gpu("gpu-persistence-off", "persistence", "warn", "fix"),
    gpu("gpu-vbios", "uniform", "warn", "warn"),
    gpu("gpu-process", "left-over"),
    gpu("gpu-driver", "nvml", action="reboot", also=("driver-library",), hides=True),
    gpu("gpu-no-driver", "nvml", hides=True),
    xid(13, check=None),
    xid(31, check=None),
    xid(48),
    xid(63, "warn", "warn"),
    xid(64),
    xid(74),
    xid(79, action="reboot"),
    xid(94, "warn", "warn"),
    xid(95),
    xid(119),
    says("sxid", "sxid", action="reboot"),
    says("off-bus", "off-bus", action="reboot"),
    says("rm-init", "driver-start", action="reboot"),
    says("downtrain", "downtrain", action="reboot"),
    says("aer", "aer"),
    says("peermem", "peermem", action="reboot"),
    says("io-error", "filesystems"),
    says("read-only", "filesystems"),
    says("lockup", "stuck", action="reboot"),
    says("hung-task", "stuck"),
    says("oom", "oom-panic", "warn", "warn"),
    says("machine-check", "machine-check"),
    says("module-power", "transceiver"),
    says("module-hot", "transceiver"),
    says("carrier", "link-flaps", "warn", "warn"),
    says("userns", "user-namespaces", "warn", "warn"),
    Case("kernel-message", "sxid", "fail", "reboot", {"message": "sxid", "count": 20_000}),
    stopped("ssh"),
    stopped("munge"),
    stopped("slurmd"),
    stopped("chrony"),
    Case("unit-crashes", "services", "fail", "drain", {"unit": "chrony"}, real=True),
    Case("read-only", "filesystems", "fail", "drain", {"path": "/home"}, real=True),
    Case("unmounted", "filesystems", "fail", "drain", {"path": "/shared"}, real=True),
    Case("fill-disk", "filesystems", "fail", "drain", {"path": "/home"}, real=True),
    Case("unmounted", "filesystems", options={"path": "/home"}, real=True),
    Case("read-only", "filesystems", options={"path": "/shared"}, real=True),
    Case("no-inodes", "filesystems", real=True),
    Case("no-device", "device-files", real=True),
    Case("held-device", "device-holders", real=True),
    Case("empty-library", "nvml", real=True, also=("libraries",), hides=True),
    Case("garbage-library", "nvml", real=True, also=("libraries",), hides=True),
    Case("link-flap", "link-flaps", options={"times": 4}, real=True),
    Case("zombie", "stuck", "warn", "warn", real=True, readings=5),
    Case("no-systemctl", "services", "unknown", None, real=True, also=("fabric-manager",)),
    Case("no-kernel-messages", "xid", "unknown", None, real=True, hides=True),
    Case("own-name", "own-name", real=True),
)


@dataclass
class Result:
    """How the agent did with one fault."""

    case: Case
    found: bool
    false: list[str]
    seconds: float
    said: str

    @property
    def good(self) -> bool:
        return self.found and not self.false and self.seconds <= SECONDS


def read(lab: Lab, node: str, *, full: bool = False) -> dict[str, Any]:
    """One reading of the agent, as JSON."""
    document = json.loads(lab.inside(node, f"{AGENT} check --json{' --full' if full else ''} || [ $? = 1 ]"))
    assert isinstance(document, dict)
    return document


def bad(document: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """(check, verdict, action) of all that is not well."""
    return [
        (each["check"], each["verdict"], (each["action"] or "").partition(":")[0] or None)
        for each in document["findings"]
        if each["verdict"] not in ("pass", "skip")
    ]


def judge(
    case: Case, document: dict[str, Any], before: Sequence[tuple[str, str, str | None]], seconds: float
) -> Result:
    """Compare what was said after the fault with what must be said and what was said before."""
    new = [each for each in bad(document) if each not in before]
    wanted = [each for each in new if each[0] == case.check and each[1] == case.verdict]
    if case.verdict != "unknown":
        wanted = [each for each in wanted if each[2] == case.action]
    own = {case.check, *case.also}
    false = [
        f"{check} {verdict}"
        for check, verdict, _ in new
        if check not in own and not (case.hides and verdict == "unknown")
    ]
    said = next(
        (
            f"{e['check']}: {e['read'] or e['why']}"
            for e in document["findings"]
            if e["check"] == case.check and e["verdict"] == case.verdict
        ),
        "nothing",
    )
    return Result(case, bool(wanted) or case.check is None, sorted(set(false)), seconds, said)


def attempt(lab: Lab, node: str, case: Case) -> Result:
    """Inject, read, take back. The node is as it was afterwards."""
    lab.inside(node, f"rm -f {STATE}; touch {OFF}")  # Slurm's own call of the agent would mend it meanwhile
    before = bad(read(lab, node, full=case.full))
    lab.fault(case.kind, node, **case.options)
    try:
        began = time.monotonic()
        for _ in range(case.readings):
            document = read(lab, node, full=case.full)
        seconds = (time.monotonic() - began) / case.readings
    finally:
        _undo(lab, node, case)
    return judge(case, document, before, seconds)


def _undo(lab: Lab, node: str, case: Case) -> None:
    if case.kind == "xid":
        lab.fault("kernel-message", node, undo=True)
    elif case.kind != "link-flap":
        lab.fault(case.kind, node, undo=True)
    lab.inside(node, f"rm -f {STATE} {OFF}")


def attempts(lab: Lab, node: str, cases: Sequence[Case] = CASES) -> Iterator[Result]:
    """All faults, one after another."""
    lab.inside(node, f"systemctl stop {TIMER}")
    try:
        for case in cases:
            yield attempt(lab, node, case)
    finally:
        lab.inside(node, f"systemctl start {TIMER}")


def site_file(lab: Lab, folder: Path) -> Path:
    """The site of inventories/lab.yml, for the workers that this lab has, with agents."""
    workers = [node for node in lab.nodes.values() if node.role == "worker"]
    text = Path("inventories/lab.yml").read_text()
    for pattern, value in (
        (r"(ssh_config:).*", lab.paths.ssh_config),
        (r"(hosts:) lab-gpu.*", f'"{",".join(node.name for node in workers)}"'),
        (r"(addresses:) 10.77.0.\[11.*", f'"{",".join(str(node.address) for node in workers)}"'),
    ):
        text, found = re.subn(rf"(?m)^(\s*){pattern}$", rf"\1\2 {value}", text)
        assert found == 1, pattern
    path = folder / "lab.yml"
    # the agent needs no monitoring
    text = re.sub(r"(?ms)^(?:monitoring|logs):.*?\n(?=\S|\Z)", "", text).replace("[head, monitor]", "[head]")
    path.write_text(f"{text}health: {{mig: none, compute_mode: Default}}\n")
    return path


def main(words: Sequence[str]) -> int:
    """The table, for the checkout's lab; `words` are names of faults, none: all. Exit status 1 for a miss."""
    lab = Lab()
    lab.up(workers=max(1, sum(node.role == "worker" for node in lab.nodes.values())))
    with (
        tempfile.TemporaryDirectory() as folder,
        brought_up(*COMPONENTS, site=str(site_file(lab, Path(folder)))),
    ):
        return table(lab, "lab-gpu-1", set(words))


def table(lab: Lab, node: str, names: Set[str]) -> int:
    """Print it, a row as soon as a fault was tried; 1 where one was missed, late, or others were accused."""
    cases = [case for case in CASES if not names or case.name in names or case.kind in names]
    print(f"{'fault':42} {'below':7} {'expected':36} {'result':8} {'s':>5}  said")
    results = []
    for result in attempts(lab, node, cases):
        results.append(result)
        case = result.case
        wanted = f"{case.check} {case.verdict} {case.action or ''}" if case.check else "nothing"
        word = (
            "found" if result.good else "MISSED" if not result.found else "FALSE" if result.false else "LATE"
        )
        more = f"; also: {', '.join(result.false)}" if result.false else ""
        print(
            f"{case.name:42.42} {'reader' if case.real else 'nvml' if case.kind.startswith('gpu') else 'kmsg':7} "
            f"{wanted:36.36} {word:8} {result.seconds:5.1f}  {result.said[:80]}{more}",
            flush=True,
        )
    missed = sum(not result.found for result in results)
    false = sum(bool(result.false) for result in results)
    print(
        f"{len(results)} faults ({sum(r.case.real for r in results)} below the reader): "
        f"{sum(r.good for r in results)} found, {missed} missed, {false} with false alarms"
    )
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
