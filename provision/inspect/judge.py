"""Recordings to a document: recognise, split, parse, judge by the catalogue, compare with what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.health.catalogue import judge
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, Finding, worst
from provision.health.limits import load
from provision.health.readings import Device, plain
from provision.inspect import dcgm, facts, kernel_log, nccl, network, slurm, smi, system, together
from provision.inspect.recording import Kind, Recording
from provision.inspect.split import Part, is_report, parts, report_is_whole, report_sections
from provision.inspect.text import clean, dedented

KINDS: tuple[Kind, ...] = (
    *dcgm.KINDS,
    *nccl.KINDS[:1],
    *smi.KINDS[:4],
    *network.KINDS,
    *smi.KINDS[4:],
    *nccl.KINDS[1:],
    *facts.KINDS,
    *system.KINDS,
    *slurm.KINDS,
    *kernel_log.KINDS,
)
SAMPLE = 200_000  # characters: the beginning of a large file tells its kind, without dozens of ways through all of it
_NUMBERS = ("gpus", "ports", "rate")


@dataclass
class Judged:
    """One file, judged."""

    name: str
    parts: list[Recording] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return ", ".join(dict.fromkeys(part.kind for part in self.parts)) or "not recognised"


def recognise(text: str) -> Kind | None:
    """The kind of a recording, by what only this kind has; None for what is none of them."""
    if len(text) > SAMPLE and (known := recognise(text[: text.rfind("\n", 0, SAMPLE) + 1])):
        return known
    return next((kind for kind in KINDS if kind.is_it(text)), None)


def read(text: str) -> list[Recording]:
    """The recordings in a text: one, those of a shell's session or a bug report, or several one after another."""
    if is_report(text):
        return _report(text)
    pieces = parts(text)
    found = [recording for piece in pieces for recording in _read_part(piece, alone=len(pieces) == 1)]
    return found if any(each.findings or each.node.values for each in found) else []


def _read_part(part: Part, *, alone: bool) -> list[Recording]:
    text = part.text
    kind = recognise(text)
    if kind is None and (kind := recognise(dedented(text))):
        text = dedented(text)
    if kind:
        found = [_parsed(kind, text)]
        if found[0].kind not in ("kernel messages", "fabric manager's log"):
            found += _among(text)
    else:
        found = _among(text)
        for recording in found:
            recording.cut("lines of the kernel among others that are no recording")
        if not found and not alone and text.strip():
            words = f"$ {part.command}" if part.command else text.strip().splitlines()[0]
            other = Recording(words[:60])
            other.find(SKIP, "recording", other.kind, why="of a kind that is not judged")
            found = [other]
    return [replace(recording, host=part.host) for recording in found]


def _among(text: str) -> list[Recording]:
    """What the kernel reported, from its lines among those of something else."""
    lines = kernel_log.reports(text)
    return [kernel_log.parse_log("".join(f"{line}\n" for line in lines))] if lines else []


def _parsed(kind: Kind, text: str) -> Recording:
    try:
        return kind.parse(text)
    except Exception as error:  # noqa: BLE001 - whatever a parser stumbles over is a recording that cannot be told
        found = Recording(kind.name)
        found.cut(f"cannot be read as {kind.name}: {error!r}"[:200])
        return found


_IN_REPORTS = {
    "nvidia-smi -q",
    "nvidia-smi -q -x",
    "nvidia-smi",
    "kernel messages",
    "fabric manager's log",
    "nvidia-smi nvlink",
    "nvidia-smi's error",
    "lspci",
    "nvidia-smi topo",
}


def _report(text: str) -> list[Recording]:
    whole = Recording("nvidia-bug-report")
    sections = report_sections(text)
    found = []
    for section in sections:
        kind = recognise(section) if len(section.strip()) > 20 else None
        if kind and kind.name in _IN_REPORTS:
            found.append(_parsed(kind, section))
    if not report_is_whole(text):
        whole.cut("the report has no end: cut off?")
    whole.about = f"{len(sections)} sections, {len(found)} judged"
    if not found:
        whole.find(UNKNOWN, "recording", whole.kind, why="no section in it is of a kind that is judged")
    return [whole, *found]


def expectations(text: str | None) -> dict[str, Any]:
    """What "gpus=8,model=H100,mark=hc:" says. Raises ValueError for anything else."""
    found: dict[str, Any] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        key, equals, told = part.strip().partition("=")
        if not equals or key not in (*_NUMBERS, "model", "mark", "driver", "mig") or not told:
            raise ValueError(
                f"{part.strip()!r}: expected gpus=8, model=H100, driver=580.95.05, ports=8, "
                "rate=400 (Gbit/s), mig=none or mark=TEXT"
            )
        if key in _NUMBERS and not told.isdigit():
            raise ValueError(f"{part.strip()!r}: {key} is a number")
        found[key] = int(told[:9]) if key in _NUMBERS else told
    return found


def inspect(files: Sequence[tuple[str, str]], expect: dict[str, Any]) -> list[Judged]:
    """Judge (name, text) of all files of one call; what they tell together is the last one's."""
    judged = [Judged(name, read(clean(text))) for name, text in files]
    wishes = {
        key: told
        for each in judged
        for part in each.parts
        if part.kind == "expectation"
        for key, told in part.data.items()
    }
    wanted = {**wishes, **expect}
    limits = load({key: told for key, told in wanted.items() if key not in ("mark", "ports", "rate")})
    for each in judged:
        for part in each.parts:
            told = [*part.findings, *judge(part.node, limits, partial=True), *_expected(part, wanted)]
            each.findings += [_on_host(one, part.host) for one in told]
        each.findings = [replace(one, source=each.name) for one in each.findings]
        if not any(one.verdict != SKIP or one.check == "expectation" for one in each.findings):
            why = (
                "not a recording of a kind that is known"
                if not each.parts
                else "nothing in it could be judged"
            )
            if (
                not all(
                    part.findings and all(one.verdict == SKIP for one in part.findings) for part in each.parts
                )
                or not each.parts
            ):
                each.findings.append(
                    Finding(
                        UNKNOWN,
                        "recording",
                        each.name,
                        why=why,
                        expected="nvidia-smi, kernel messages, ibstat, dcgmi, nccl-tests, Slurm's files",
                        source=each.name,
                    )
                )
    parts = [part for each in judged for part in each.parts]
    both = together.judge(parts, wanted)
    if both:
        for each in judged:
            each.findings = [one for one in each.findings if not together.settled(one, both)]
        judged.append(Judged("together", [Recording("all files together")], both))
    return judged


def _on_host(one: Finding, host: str | None) -> Finding:
    if host is None:
        return one
    return replace(one, subject=host if one.subject == "node" else f"{host} {one.subject}")


_NEXT = {
    "gpus": "see nvidia-smi -L and the kernel's messages for the one that is missing",
    "ports": "see ibstat or ip -br link for the one that is missing, then lspci and the kernel's messages",
    "rate": "look at the cable, the transceiver and the switch's port",
}


def _expected(part: Recording, expect: dict[str, Any]) -> list[Finding]:
    """What the catalogue's checks do not compare: rows of a topology, ports."""
    found = []
    for key, name in (("gpus", "gpu.count"), ("ports", "port.count")):
        count = part.node.get(name)
        if count is None and key == "ports" and part.node.told("ports"):
            count = len(part.node["ports"])
        if count is not None and key in expect:
            fine = count == expect[key]
            found.append(
                Finding(
                    PASS if fine else FAIL,
                    "gpu-count" if key == "gpus" else "port",
                    part.kind,
                    str(count),
                    str(expect[key]),
                    None if fine else "drain",
                    None if fine else _NEXT[key],
                )
            )
    for name, rate in _rates(part):
        if "rate" in expect and rate != expect["rate"]:
            read = f"{rate:g} Gbit/s"
            found.append(
                Finding(FAIL, "port", name, read, f"{expect['rate']} Gbit/s", "drain", _NEXT["rate"])
            )
    return found


def _rates(part: Recording) -> list[tuple[str, float]]:
    """Ports that are up, with their rates in Gbit/s."""
    if part.kind == "network interfaces (JSON)" and part.data:
        return [
            (name, speed / 1000)
            for name, speed in part.data["speeds"].items()
            if name not in part.data["bonds"]
        ]
    return [
        (port.subject, port["rate"]) for port in part.node.get("ports", ()) if port.get("rate") is not None
    ]


def verdict(judged: Sequence[Judged]) -> str:
    """Of the whole: each file's worst; a file with skips alone is no reason for or against."""
    found = [one.verdict for each in judged for one in each.findings]
    return worst(found)


def details(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """For JSON: what each file was taken for, and the readings."""
    return [
        {"file": each.name, "kind": part.kind, "about": part.about, "readings": _readings(part.node)}
        for each in judged
        for part in each.parts
    ]


def _readings(node: Device) -> Any:
    values = {name: told for name, told in node.values.items() if name != "kernel.events"}
    events = node.get("kernel.events")
    found = plain(values)
    if events:
        found["events"] = [
            {
                "kind": e.kind,
                "device": e.device,
                "number": e.number,
                "count": e.count,
                "first": e.first,
                "last": e.last,
                "text": e.text[:200],
            }
            for e in events
        ]
    return found
