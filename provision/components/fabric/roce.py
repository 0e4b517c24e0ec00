"""RoCE: what is set on the adapters at every boot, and the GID that NCCL is told of. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.components.fabric.settings import RoceSettings
from provision.engine.deploy import render
from provision.tune.decide import gid_indexes
from provision.tune.wiring import Wiring, parse_gids

if TYPE_CHECKING:
    from provision.components.fabric.settings import FabricSettings

SCRIPT = "/usr/local/lib/provision/roce"
UNIT = "provision-roce.service"


def script(wanted: FabricSettings) -> str:
    """The program that checks and sets the adapters' knobs."""
    roce, doca = wanted.roce or RoceSettings(), wanted.stack == "doca"
    ecn = doca if roce.ecn is None else roce.ecn
    return render("fabric", "roce.j2", roce=roce, ecn=ecn, hcas=wanted.hcas, doca=doca)


def unit() -> str:
    """At every boot: adapters keep none of it. Once the network is set up, which may have an MTU of its own."""
    return (
        "[Unit]\nDescription=RoCE's priority, flow control and congestion notification\n"
        "After=network.target openibd.service systemd-modules-load.service\n"
        "Before=slurmd.service kubelet.service\n\n"
        f"[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart={SCRIPT} apply\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def gid_index(wanted: FabricSettings, table: str) -> int | None:
    """The index at which all named adapters have RoCE v2 with an IPv4 address; None: NCCL looks for itself.

    `table` is what tune.wiring.GIDS printed. Raises ValueError for any other text.
    """
    found = gid_indexes({"": Wiring(gids=parse_gids(table))}, wanted.hcas)
    return found[0] if found else None
