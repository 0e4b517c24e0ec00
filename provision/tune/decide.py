"""Which settings are worth a measurement, and which of them proved better. Pure.

Only four are ever chosen: interface, adapters, GID index, traffic class. Algorithm, protocol, channels and buffers
are NCCL's own choice for each size and topology: they are for finding faults, and are told where somebody set them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from provision.burnin.judge.machine import BRIDGES
from provision.components.fabric.settings import FabricSettings
from provision.hardware.rdma import Port
from provision.site.models import Fabric, merge
from provision.tune.wiring import Wiring

Key = tuple[str, ...]  # below `fabric` in the site file

INTERFACES: Key = ("interfaces",)
HCAS: Key = ("hcas",)
GID: Key = ("nccl", "NCCL_IB_GID_INDEX")
TRAFFIC_CLASS: Key = ("nccl", "NCCL_IB_TC")
KEYS = (HCAS, GID, TRAFFIC_CLASS, INTERFACES)  # in this order: adapters first, the rest is of them

# NVIDIA's manual of NCCL has them under "debugging", or says that they are not for production.
DEBUGGING = {
    "NCCL_ALGO": "algorithm",
    "NCCL_PROTO": "protocol",
    "NCCL_MIN_NCHANNELS": "channels",
    "NCCL_MAX_NCHANNELS": "channels",
    "NCCL_MIN_CTAS": "channels",
    "NCCL_MAX_CTAS": "channels",
    "NCCL_MIN_NRINGS": "channels",
    "NCCL_MAX_NRINGS": "channels",
    "NCCL_NCHANNELS_PER_NET_PEER": "channels",
    "NCCL_MIN_P2P_NCHANNELS": "channels",
    "NCCL_MAX_P2P_NCHANNELS": "channels",
    "NCCL_BUFFSIZE": "buffers",
    "NCCL_LL_BUFFSIZE": "buffers",
    "NCCL_LL128_BUFFSIZE": "buffers",
    "NCCL_P2P_NET_CHUNKSIZE": "buffers",
    "NCCL_NTHREADS": "threads",
}

REPEATS = 3  # of every setting, in turn with the others: what drifts meanwhile is in all of them
# Three runs of a setting beat three others by chance in 1 of 20 cases: a gain must also be worth a line in a file.
# The same all-reduce above 1 GiB repeats within 1 to 2 % on a quiet fabric.
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Trial:
    """What a setting reached."""

    wanted: FabricSettings
    rates: tuple[float, ...] = ()  # bus bandwidth of each repetition, GB/s
    why: str = ""  # it could not be measured

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def with_(self, other: Trial) -> Trial:
        """Both measurements of one setting as one."""
        return Trial(self.wanted, self.rates + other.rates, self.why or other.why)

    def __str__(self) -> str:
        return self.why or f"{self.rate:.4g} GB/s ({min(self.rates):.4g} to {max(self.rates):.4g})"


@dataclass(frozen=True)
class Decision:
    """One key: what stood there, what was tried, and the value that proved better, if one did."""

    key: Key
    now: Trial | None  # None: nothing was tried
    others: tuple[Trial, ...] = ()
    chosen: Trial | None = None
    why: str = ""  # nothing was tried


Measure = Callable[[Sequence[FabricSettings]], Sequence[Trial]]


def value(wanted: FabricSettings, key: Key) -> Any:
    """What stands at `key`; None where NCCL chooses."""
    found: Any = wanted.model_dump(exclude_unset=True)
    for part in key:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found or None if isinstance(found, list) else found


def changed(wanted: FabricSettings, key: Key, new: Any) -> FabricSettings:
    """`wanted` with `new` at `key`, the rest as it is."""
    for part in reversed(key):
        new = {part: new}
    return FabricSettings.model_validate(merge(wanted.model_dump(exclude_unset=True), new))


def better(trial: Trial, than: Trial) -> bool:
    """Whether `trial` is faster beyond noise: its slowest run beats the other's fastest, by a gain worth having.

    What could not be measured is neither better nor beaten.
    """
    if trial.why or than.why or min(len(trial.rates), len(than.rates)) < REPEATS:
        return False
    return min(trial.rates) > max(than.rates) and trial.rate >= (1 + LEAST_GAIN) * than.rate


def search(
    now: FabricSettings,
    choices: Callable[[Key, FabricSettings], tuple[Sequence[Any], str]],
    measure: Measure,
) -> list[Decision]:
    """Try the choices of one key after the other, each beside what is best so far.

    What proves better must do so twice: of many comparisons the one that chance made comes out first.
    """
    decisions = []
    for key in KEYS:
        values, why = choices(key, now)
        others = [changed(now, key, each) for each in values if each != value(now, key)]
        if not others:
            decisions.append(Decision(key, None, why=why or "there is nothing else to choose"))
            continue
        first, *trials = measure([now, *others])
        winners = [trial for trial in trials if better(trial, first)]
        best = max(winners, key=lambda trial: trial.rate, default=None)
        chosen = None
        if best is not None:
            again = measure([now, best.wanted])
            confirmed = better(again[1], again[0])
            first, both = first.with_(again[0]), best.with_(again[1])
            trials[trials.index(best)] = both
            chosen = both if confirmed else None
        decisions.append(Decision(key, first, tuple(trials), chosen))
        now = chosen.wanted if chosen else now
    return decisions


def choices(
    nodes: Mapping[str, Wiring], fabric: Fabric | None, key: Key, wanted: FabricSettings
) -> tuple[Sequence[Any], str]:
    """The values for `key` that all of `nodes` have, and why there is none."""
    kind = fabric.kind if fabric else "ethernet"
    if key == INTERFACES:
        return [
            [name] for name in interfaces(nodes)
        ], "no other interface with a network that all nodes are in"
    if fabric is None or kind == "ethernet":
        return [], "the site file says Ethernet: no adapters"
    if key == HCAS:
        found = adapters(nodes, fabric)
        return [found] if found else [], f"no {fabric.rails} fast ports of the same names on all nodes"
    if kind != "roce":
        return [], "InfiniBand has no GIDs of IP addresses; its lanes are the subnet manager's"
    used = value(wanted, HCAS) or adapters(nodes, fabric)
    if key == GID:
        return gid_indexes(nodes, used), "no index at which all adapters have RoCE v2 with an IPv4 address"
    return traffic_classes(nodes, used), "no traffic class is set on the adapters"


def interfaces(nodes: Mapping[str, Wiring]) -> list[str]:
    """Names that every node has, up, in one and the same network, each node with an address of its own."""
    found = []
    for name in _common(wiring.interfaces for wiring in nodes.values()):
        if BRIDGES.match(name):
            continue
        held = [address for wiring in nodes.values() for address in wiring.interfaces[name][:1]]
        own, networks = {each.ip for each in held}, {each.network for each in held}
        if len(own) == len(nodes) and len(networks) == 1:
            found.append(name)
    return found


def adapters(nodes: Mapping[str, Wiring], fabric: Fabric) -> list[str]:
    """The fastest ports that are up, where every node has as many of the same names as the fabric has rails."""
    layer = "InfiniBand" if fabric.kind == "infiniband" else "Ethernet"
    sets = [_fastest(wiring.ports, layer) for wiring in nodes.values()]
    if not sets or len(set(sets)) != 1 or len(sets[0]) != fabric.rails:
        return []
    return list(sets[0])


def _fastest(ports: Sequence[Port], layer: str) -> tuple[str, ...]:
    fitting = [port for port in ports if port.up and not port.nvswitch and port.layer == layer]
    rate = max((port.rate or 0 for port in fitting), default=0)
    several = {name for name, count in Counter(port.device for port in ports).items() if count > 1}
    return tuple(
        f"{port.device}:{port.number}" if port.device in several else port.device
        for port in fitting
        if port.rate == rate
    )


def gid_indexes(nodes: Mapping[str, Wiring], hcas: Sequence[str]) -> list[int]:
    """Indexes at which every one of `hcas` has RoCE v2 with an IPv4 address, on every node."""
    tables = [
        {
            gid.index
            for gid in wiring.gids
            if gid.routable and f"{gid.device}:{gid.port}" == f"{name}:{port or 1}"
        }
        for wiring in nodes.values()
        for name, _, port in (hca.partition(":") for hca in hcas)
    ]
    return sorted(set.intersection(*tables)) if tables else []


def traffic_classes(nodes: Mapping[str, Wiring], hcas: Sequence[str]) -> list[int]:
    """The traffic classes that the nodes' administrators gave to `hcas`, where all of them have the same."""
    devices = {hca.partition(":")[0] for hca in hcas}
    given = [{wiring.traffic_classes.get(device) for device in devices} for wiring in nodes.values()]
    common = set().union(*given)
    return [each for each in common if each is not None] if len(common) == 1 else []


def _common(each: Iterable[Mapping[str, object]]) -> list[str]:
    """The keys that all have, in the order of the first."""
    first, *others = list(each) or [{}]
    return [key for key in first if all(key in other for other in others)]


def debugging(places: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Place -> debugging variables that are set there; `places` is where variables were found."""
    found = {
        place: {name: text for name, text in variables.items() if name in DEBUGGING}
        for place, variables in places.items()
    }
    return {place: variables for place, variables in found.items() if variables}
