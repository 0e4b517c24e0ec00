"""Checks of the clock."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

from provision.components.time.exports import OTHERS, parse_sources, parse_tracking, where
from provision.components.time.settings import TimeSettings
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, unknown
from provision.verify.systemd import unit_runs

T = TypeVar("T")
CHRONYC = "timeout 4 chronyc -n -c"  # by itself it waits 7 s for a chronyd that does not answer
# A daemon that has just started gets a few seconds for its first answers; one that does not answer is asked once.
SETTLED = (
    f'for i in 1 2 3 4 5 6 7 8 9 10; do t=$({CHRONYC} tracking) || {{ rc=$?; echo "$t"; exit $rc; }}; '
    "case $t in *'Not synchronised') sleep 1;; *) break;; esac; done; "
)


@check("time-daemon-runs")
def runs(at: Target) -> Found:
    return unit_runs(at, at.profile.unit("time"))


@check("time-synchronised")
def synchronised(at: Target) -> Found:
    """chronyd follows a source, or leads by itself as an isolated head does."""
    command = f"{CHRONYC} tracking"
    tracking = _settled(at, command, parse_tracking)
    if isinstance(tracking, Found):
        return tracking
    if not tracking.synchronised:
        action = "chronyc sources: is a source reachable, is UDP port 123 open?"
        return Found(Verdict.FAIL, "not synchronised", "synchronised", action, source=command)
    follows = f"follows {tracking.source or 'itself'}, stratum {tracking.stratum}"
    return Found(Verdict.PASS, follows, "synchronised", source=command)


@check("time-offset")
def offset(at: Target) -> Found:
    """The clock is near that of a head; on heads, of their own source."""
    command = f"{CHRONYC} sources"
    sources = _settled(at, command, parse_sources)
    if isinstance(sources, Found):
        return sources
    if at.node.has("head"):
        sources = [source for source in sources if source.selected]
        if not sources:
            return Found(Verdict.PASS, "leads by itself", "near its source", source=command)
    else:
        heads = {where(head) for head in at.site.with_role("head")} | _addresses(at)
        sources = [source for source in sources if source.name in heads and source.reach]
        if not sources:
            return unknown("no head among the sources that answer", source=command)
    largest = max(sources, key=lambda source: abs(source.offset))
    most = at.settings(TimeSettings).max_offset
    return Found(
        Verdict.PASS if abs(largest.offset) <= most else Verdict.FAIL,
        f"{largest.offset:+.6f} s to {largest.name}",
        f"within {most:g} s",
        "chronyc makestep, after draining the node: jobs see the jump"
        if abs(largest.offset) > most
        else None,
        source=command,
    )


@check("time-one-daemon")
def one_daemon(at: Target) -> Found:
    """Two daemons that steer one clock fight."""
    command = f"systemctl is-active {shlex.join(OTHERS)}"
    answer = at.host.run(command)
    states = answer.stdout.split()
    if len(states) != len(OTHERS):
        return unknown(_said(answer), source=command)
    running = [unit for unit, state in zip(OTHERS, states, strict=True) if state in ("active", "activating")]
    return expect(
        ", ".join(running) or "none beside chrony",
        "none beside chrony",
        action=f"systemctl disable --now {' '.join(running)}",
        source=command,
    )


def _settled(at: Target, command: str, parse: Callable[[str], T]) -> T | Found:
    """What chronyd answers to `command` once it has settled; why that could not be told otherwise."""
    answer = at.host.run(SETTLED + command)
    if answer.rc != 0:
        return unknown(_said(answer), source=command)
    try:
        return parse(answer.stdout)
    except ValueError as error:
        return unknown(str(error), source=command)


def _addresses(at: Target) -> set[str]:
    """The heads' addresses as this node resolves their names."""
    names = shlex.join(where(head) for head in at.site.with_role("head"))
    return {
        line.split()[0] for line in at.host.run(f"getent ahosts {names}").stdout.splitlines() if line.split()
    }


def _said(answer: Any) -> str:
    if answer.rc == 124:
        return "chronyd does not answer"
    return f"{answer.stderr}{answer.stdout}".strip() or f"exit {answer.rc}"
