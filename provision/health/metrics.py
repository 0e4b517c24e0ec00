"""Metrics for node_exporter's textfile collector. Only numbers are samples: what is not there makes none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from provision.health.finding import PASS, SKIP, Finding, worst
from provision.health.readings import Device

VERDICTS = ("pass", "warn", "fail", "skip", "unknown")
GPU_VALUES = {
    "temperature.gpu": ("provision_gpu_temperature_celsius", "Core temperature"),
    "temperature.gpu.tlimit": (
        "provision_gpu_temperature_margin_celsius",
        "Margin to the GPU's thermal limit",
    ),
    "power.draw": ("provision_gpu_power_watts", "Power draw"),
    "clocks.sm": ("provision_gpu_sm_clock_megahertz", "SM clock"),
    "utilization.gpu": ("provision_gpu_utilization_percent", "Time in which a kernel ran"),
    "memory.used": ("provision_gpu_memory_used_mebibytes", "Memory used"),
    "ecc.errors.uncorrected.volatile.total": (
        "provision_gpu_ecc_uncorrected",
        "Uncorrected errors since the last reset",
    ),
    "remapped_rows.uncorrectable": ("provision_gpu_remapped_rows", "Rows remapped for uncorrectable errors"),
    "pcie.replays": ("provision_gpu_pcie_replays", "PCIe replays"),
}


def text(
    node: Device, findings: Sequence[Finding], seconds: float, now: float, told: Mapping[str, bool]
) -> str:
    """The whole file; told: scheduler -> whether it knows what was decided."""
    lines: list[str] = []
    verdict = worst(finding.verdict for finding in findings)
    _metric(
        lines,
        "provision_health",
        "1 for the verdict of this node",
        [({"verdict": v}, int(v == verdict)) for v in VERDICTS],
    )
    bad = [f for f in findings if f.verdict not in (PASS, SKIP)]
    labels = [
        ({"check": f.check, "subject": f.subject, "verdict": f.verdict, "action": f.action or ""}, 1)
        for f in bad
    ]
    _metric(lines, "provision_health_finding", "What is not well", labels)
    counts = [({"verdict": v}, sum(f.verdict == v for f in findings)) for v in VERDICTS]
    _metric(lines, "provision_health_findings", "Findings by verdict", counts)
    _metric(lines, "provision_health_seconds", "How long the last reading took", [({}, round(seconds, 3))])
    _metric(lines, "provision_health_timestamp_seconds", "When it was", [({}, round(now, 3))])
    _metric(
        lines,
        "provision_health_scheduler_told",
        "1 where the scheduler knows what was decided",
        [({"scheduler": name}, int(known)) for name, known in told.items()],
    )
    unsupported = 0
    for name, (metric, help_) in GPU_VALUES.items():
        samples = []
        for gpu in node.get("gpus", ()):
            value = gpu.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                samples.append(({"gpu": gpu.get("index", gpu.subject), "uuid": gpu.get("uuid", "")}, value))
            else:
                unsupported += 1
        if samples:
            _metric(lines, metric, help_, samples)
    _metric(lines, "provision_health_unsupported_values", "Values that GPUs do not tell", [({}, unsupported)])
    return "\n".join(lines) + "\n"


def _metric(
    lines: list[str], name: str, help_: str, samples: Iterable[tuple[Mapping[str, object], float]]
) -> None:
    lines.append(f"# HELP {name} {help_}.")
    lines.append(f"# TYPE {name} gauge")
    seen = set()
    for labels, value in samples:
        told = ",".join(f'{key}="{_escaped(str(each))}"' for key, each in labels.items())
        if told not in seen:  # one sample a series: a second would make the exporter refuse the file
            seen.add(told)
            lines.append(f"{name}{{{told}}} {value:g}" if told else f"{name} {value:.15g}")


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
