"""Checks of the ssh server."""

from __future__ import annotations

from provision.components.ssh.exports import effective, options, same_value
from provision.components.ssh.settings import SshSettings
from provision.verify.check import Found, Target, check, expect, unknown
from provision.verify.systemd import unit_runs


@check("sshd-runs")
def runs(at: Target) -> Found:
    return unit_runs(at, at.profile.unit("ssh"))


@check("sshd-settings")
def settings(at: Target) -> Found:
    """What sshd would do for a new connection, whichever file says so."""
    command = "sshd -T"
    answer = at.host.run(command)
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source=command)
    now = effective(answer.stdout)
    differ = {
        keyword: (now.get(keyword.lower()), wanted)
        for keyword, wanted in options(at.settings(SshSettings)).items()
        if not same_value(now.get(keyword.lower()), wanted)
    }
    return expect(
        ", ".join(f"{keyword} {read}" for keyword, (read, _) in differ.items()) or "as wanted",
        ", ".join(f"{keyword} {wanted}" for keyword, (_, wanted) in differ.items()) or "as wanted",
        action="another file comes first, or sshd_config does not include /etc/ssh/sshd_config.d",
        source=command,
    )
