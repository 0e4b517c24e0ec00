"""Checks of the packet filter."""

from __future__ import annotations

import difflib

from provision.components.firewall.exports import LIVE, NORMALISED, ruleset
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, unknown
from provision.verify.systemd import unit_runs


@check("firewall-rules")
def rules(at: Target) -> Found:
    """The rules in the kernel are those that the site file asks for, no more and no fewer."""
    answer = at.host.run(f"{NORMALISED} <<'EOF'\n{ruleset(at.site, at.node)}EOF\n")
    if answer.rc != 0:
        return unknown(
            answer.stderr.strip() or f"exit {answer.rc}", source="nft -f, in a namespace of its own"
        )
    live = at.host.run(LIVE)
    if live.rc != 0 and "No such file or directory" not in live.stderr:
        return unknown(live.stderr.strip() or f"exit {live.rc}", source=LIVE)
    added, lost = differences(answer.stdout, live.stdout)
    same = not added and not lost
    return Found(
        Verdict.PASS if same else Verdict.FAIL,
        "as wanted"
        if same
        else "; ".join([*(f"+ {rule}" for rule in added), *(f"- {rule}" for rule in lost)]),
        "the rules of the site file",
        None if same else "`provision apply` loads them again",
        source=LIVE,
    )


@check("firewall-at-boot")
def at_boot(at: Target) -> Found:
    return unit_runs(at, "provision-firewall")


def differences(wanted: str, live: str) -> tuple[list[str], list[str]]:
    """Rules that are live and not wanted, and rules that are wanted and not live."""
    changes = list(difflib.ndiff(wanted.splitlines(), live.splitlines()))
    return (
        [line[2:].strip() for line in changes if line.startswith("+ ")],
        [line[2:].strip() for line in changes if line.startswith("- ")],
    )
