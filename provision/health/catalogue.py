"""The catalogue: every check with its number, what it reads, what it accepts and what is done about it.

A check is a pure function from readings and limits to what was found. It takes values without asking whether they
are there: one that does not exist here makes a skip, one that could not be read an unknown, each with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Callable, NamedTuple

from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN, Finding
from provision.health.limits import Limits
from provision.health.readings import Device, Missing, NotApplicable, Untold, Unwanted

MODULES = ("gpu", "events", "link", "node", "network")


class Found(NamedTuple):
    """What a check found about one subject; left out, action and subject are the check's and the device's."""

    verdict: str
    read: str | None = None
    expected: str | None = None
    advice: str | None = None
    why: str | None = None
    action: str | None = None
    subject: str | None = None


Run = Callable[[Device, Limits], Iterable[Found]]


@dataclass(frozen=True)
class Check:
    """One row of the catalogue."""

    number: int
    name: str  # kebab-case
    title: str
    reads: str
    accepts: str
    action: str  # the usual one of ACTIONS
    run: Run
    each: str | None = None  # the devices that it looks at one by one: "gpus"; None: the node as a whole
    slow: bool = False  # starts other programs or uses the GPU: not in the quick set
    fixable: bool = False
    thresholds: tuple[str, ...] = ()  # names in the limits
    needs: str | None = None  # skipped where the node cannot do this, as its limits.json says


_REGISTRY: list[Check] = []


def check(
    number: int,
    name: str,
    title: str,
    *,
    reads: str,
    accepts: str,
    action: str,
    each: str | None = None,
    slow: bool = False,
    fixable: bool = False,
    thresholds: tuple[str, ...] = (),
    needs: str | None = None,
) -> Callable[[Run], Check]:
    """Make a function a check of the catalogue."""

    def decorate(run: Run) -> Check:
        row = Check(number, name, title, reads, accepts, action, run, each, slow, fixable, thresholds, needs)
        _REGISTRY.append(row)
        return row

    return decorate


@cache
def catalogue() -> tuple[Check, ...]:
    """All checks, by number."""
    for module in MODULES:
        import_module(f"provision.health.checks.{module}")
    return tuple(sorted(_REGISTRY, key=lambda row: row.number))


def judge(
    node: Device,
    limits: Limits,
    *,
    quick: bool = False,
    partial: bool = False,
    only: Iterable[str] | None = None,
) -> list[Finding]:
    """What all checks find in the readings of `node`.

    quick: without the slow ones. partial: the readings are a recording of something, so what they do not tell is
    not judged; otherwise it is unknown.
    """
    names = None if only is None else set(only)
    return [
        finding
        for row in catalogue()
        if not (quick and row.slow) and (names is None or row.name in names)
        for finding in _judge_one(row, node, limits, partial)
    ]


def _judge_one(row: Check, node: Device, limits: Limits, partial: bool) -> Iterator[Finding]:
    cannot = limits.site.get("cannot", {}).get(row.needs)
    if cannot is not None:
        yield Finding(SKIP, row.name, node.subject, why=cannot, source="limits.json")
        return
    devices: Iterable[Device] = [node]
    if row.each is not None:
        try:
            devices = node[row.each]
        except Missing as missing:
            yield from _missing(row, node, missing, partial)
            return
        if not devices and not partial:
            yield Finding(
                SKIP, row.name, node.subject, why=f"no {row.each.rpartition('.')[2]} here", source=row.reads
            )
            return
    for device in devices:
        try:
            for found in row.run(device, limits):
                yield _finding(row, device, found)
        except Missing as missing:
            yield from _missing(row, device, missing, partial)


def _missing(row: Check, device: Device, missing: Missing, partial: bool) -> Iterator[Finding]:
    if isinstance(missing, (Untold, Unwanted)) and partial:
        return
    verdict = SKIP if isinstance(missing, NotApplicable) else UNKNOWN
    yield Finding(
        verdict,
        row.name,
        device.subject,
        why=str(missing),
        expected=None if verdict == SKIP else row.accepts,
        source=device.source or row.reads,
    )


def _finding(row: Check, device: Device, found: Found) -> Finding:
    bad = found.verdict in (WARN, FAIL)
    return Finding(
        found.verdict,
        row.name,
        found.subject or device.subject,
        read=found.read,
        expected=found.expected,
        action=(found.action or row.action) if bad else None,
        advice=found.advice if found.verdict not in (PASS, SKIP) else None,
        why=found.why,
        source=device.source or row.reads,
    )


# ---- what checks say


def judged(
    fine: bool,
    read: object,
    expected: object,
    *,
    verdict: str = FAIL,
    advice: str | None = None,
    why: str | None = None,
    action: str | None = None,
    subject: str | None = None,
) -> Found:
    """PASS where it is `fine`, otherwise `verdict` with advice, reason and action."""
    if fine:
        return Found(PASS, str(read), str(expected), subject=subject)
    return Found(verdict, str(read), str(expected), advice, why, action, subject)


def passed(
    read: object, expected: object = None, *, why: str | None = None, subject: str | None = None
) -> Found:
    return Found(PASS, str(read), None if expected is None else str(expected), why=why, subject=subject)


def skipped(why: str, *, subject: str | None = None) -> Found:
    return Found(SKIP, why=why, subject=subject)


def unknown(
    why: str, *, read: str | None = None, advice: str | None = None, subject: str | None = None
) -> Found:
    return Found(UNKNOWN, read=read, why=why, advice=advice, subject=subject)


def wanted(site: Mapping[str, Any], name: str) -> Any:
    """What the site expects under `name`. Raises Unwanted where it says nothing."""
    if site.get(name) is None:
        raise Unwanted(f"the site does not say {name}")
    return site[name]
