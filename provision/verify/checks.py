"""Checks of a node as a whole, which no component owns."""

from __future__ import annotations

from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, unknown

FAILED_UNITS = "systemctl list-units --failed --plain --no-legend --full"


@check("units-failed")
def units_failed(at: Target) -> Found:
    """systemd has no failed unit."""
    answer = at.host.run(FAILED_UNITS)
    if answer.rc:
        return unknown(
            answer.stderr.strip() or f"systemctl exited with {answer.rc}",
            source=FAILED_UNITS,
            action="look with `systemctl status` whether systemd answers",
        )
    failed = unit_names(answer.stdout)
    if not failed:
        return Found(Verdict.PASS, read="none", expected="none", source=FAILED_UNITS)
    return Found(
        Verdict.FAIL,
        read=", ".join(failed),
        expected="none",
        action=f"read `journalctl -b -u {failed[0]}`; when it is mended, `systemctl reset-failed`",
        source=FAILED_UNITS,
    )


def unit_names(listing: str) -> list[str]:
    """The units that `systemctl list-units --plain --no-legend` lists, sorted."""
    return sorted(line.split()[0] for line in listing.splitlines() if line.strip())
