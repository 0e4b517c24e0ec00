"""Services that systemd starts again where they end by a mistake, whatever their package says."""

from __future__ import annotations

from provision.engine import ops
from provision.engine.units import DIRECTORY

# A shared /home whose server is away keeps a sandboxed daemon (chronyd, MariaDB: ProtectHome) from starting: "Failed to
# set up mount namespacing". Debian's units are not tried again then, nor where a daemon ends because what it needs
# comes later: a head that has booted would lack its time or its scheduler for hours, until somebody looks.
RESTARTS = "[Service]\nRestart=on-failure\nRestartSec=5\n"


def restarting(unit: str) -> str:
    """Let the service `unit` be started again; the file that says so, which the unit then reads."""
    path = f"{DIRECTORY}/{unit}.service.d/provision.conf"
    ops.file(path, RESTARTS)
    return path
