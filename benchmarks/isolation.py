"""How often isolation names what was planted, on a simulated cluster of 64 nodes.

python -m benchmarks.isolation [--seeds 200]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.simulated_cluster import Faults, SimulatedCluster, leaf
from provision.burnin.isolation import Conclusion, Fault, Kind, isolate, plan

SEEDS = 200
Planted = set[str]  # as isolation names faults


@dataclass(frozen=True)
class Tried:
    """One simulated cluster, and what isolation made of it."""

    seed: int
    planted: Planted
    named: Planted
    conclusion: Conclusion
    rounds: int
    experiments: int

    @property
    def missed(self) -> Planted:
        return self.planted - self.named

    @property
    def false(self) -> Planted:
        return self.named - self.planted


Plant = Callable[[SimulatedCluster, random.Random, int], Planted]


def nothing(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """No fault."""
    return set()


def nothing_and_no_limit(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """No fault, and no lowest number for all at once: pairs are always tried."""
    cluster.limits_known = False
    return set()


def slow_link(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A NIC's link at 0.3 to 0.8."""
    return _slow_link(cluster, chance.choice(cluster.nodes), chance, 0.3, 0.8)


def slightly_slow_link(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A NIC's link at 0.8 to 0.95: partly above what counts as short."""
    return _slow_link(cluster, chance.choice(cluster.nodes), chance, 0.8, 0.95)


def _slow_link(
    cluster: SimulatedCluster, node: str, chance: random.Random, low: float = 0.3, high: float = 0.8
) -> Planted:
    rail = chance.randrange(cluster.rails)
    cluster.faults.links[node, rail] = chance.uniform(low, high)
    return {f"link: {node} rail mlx5_{rail}"}


def dead_rail(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A NIC that is not there."""
    node, rail = chance.choice(cluster.nodes), chance.randrange(cluster.rails)
    cluster.faults.links[node, rail] = 0.0
    return {f"nic: {node} rail mlx5_{rail}"}


def slow_gpu(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A GPU that computes at 0.5 to 0.8, or has NVLink at 0.4 to 0.7, or PCIe at 0.25 to 0.5."""
    return _slow_gpu(cluster, chance.choice(cluster.nodes), chance)


def _slow_gpu(cluster: SimulatedCluster, node: str, chance: random.Random) -> Planted:
    gpu = chance.randrange(cluster.rails)
    rates, low, high = chance.choice(
        [
            (cluster.faults.compute, 0.5, 0.8),
            (cluster.faults.nvlink, 0.4, 0.7),
            (cluster.faults.pcie, 0.25, 0.5),
        ]
    )
    rates[node, gpu] = chance.uniform(low, high)
    return {f"gpu: {node} GPU {gpu}"}


def slow_node(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """PCIe and memory of a whole node at 0.4 to 0.8."""
    node = chance.choice(cluster.nodes)
    cluster.faults.hosts[node] = chance.uniform(0.4, 0.8)
    return {f"node: {node}"}


def bad_cable(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A cable between switches at 0.1 to 0.45."""
    return _bad_cable(cluster, chance, 0.1, 0.45)


def worn_cable(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A cable between switches at 0.45 to 0.8: all at once may not need what it lacks."""
    return _bad_cable(cluster, chance, 0.45, 0.8)


def _bad_cable(cluster: SimulatedCluster, chance: random.Random, low: float, high: float) -> Planted:
    node, rail = chance.choice(cluster.nodes), chance.randrange(cluster.rails)
    cluster.faults.cables[1 - cluster.group[node], rail, node] = chance.uniform(low, high)
    return {f"link: {leaf(0, rail)} to {leaf(1, rail)}"}


def slow_switch(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """A leaf switch at 0.3 to 0.8."""
    group, rail = chance.randrange(2), chance.randrange(cluster.rails)
    cluster.faults.switches[group, rail] = chance.uniform(0.3, 0.8)
    return {f"switch: {leaf(group, rail)}"}


def paired_suspects(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """Slow links on the two nodes of one of the first random pairs."""
    steps = plan(cluster.cluster, cluster.limits, seed)
    whole = next(steps)
    first_pairs = steps.send([*SimulatedCluster(_short_everywhere(cluster), random.Random(0)).run(whole)])
    a, b = chance.choice(first_pairs).nodes
    return _slow_link(cluster, a, chance) | _slow_link(cluster, b, chance)


def _short_everywhere(cluster: SimulatedCluster) -> Faults:
    return Faults(hosts=dict.fromkeys(cluster.nodes, 0.5))


def three_faults(cluster: SimulatedCluster, chance: random.Random, seed: int) -> Planted:
    """Three of: slow link, slow GPU, on nodes of their own."""
    nodes = chance.sample(cluster.nodes, 3)
    planted = [chance.choice([_slow_link, _slow_gpu])(cluster, node, chance) for node in nodes]
    return set.union(*planted)


# What a map of the switches makes a difference for.
BETWEEN_SWITCHES = (
    "slow link, 0.3 to 0.8",
    "cable between switches, 0.1 to 0.45",
    "slow leaf switch",
)
KINDS: dict[str, Plant] = {
    "none": nothing,
    "none, no limit known": nothing_and_no_limit,
    "slow link, 0.3 to 0.8": slow_link,
    "slow link, 0.8 to 0.95": slightly_slow_link,
    "dead rail": dead_rail,
    "slow GPU": slow_gpu,
    "slow node": slow_node,
    "cable between switches, 0.1 to 0.45": bad_cable,
    "cable between switches, 0.45 to 0.8": worn_cable,
    "slow leaf switch": slow_switch,
    "two suspects paired": paired_suspects,
    "three faults at once": three_faults,
}


def attempt(plant: Plant, seed: int, *, switches_known: bool = True) -> Tried:
    """Plant faults by `seed` in a new cluster and isolate them."""
    chance = random.Random(f"{plant.__name__}/{seed}")
    empty = SimulatedCluster(Faults(), chance, switches_known=switches_known)
    planted = plant(empty, chance, seed)
    cluster = replace(empty, rounds=0, experiments=0)
    conclusion, _ = isolate(cluster.cluster, cluster.limits, seed, cluster.run)
    named = {_located(cluster, fault) for fault in conclusion.faults}
    return Tried(seed, planted, named, conclusion, cluster.rounds, cluster.experiments)


def _located(cluster: SimulatedCluster, fault: Fault) -> str:
    """A fault as it was planted: isolation names switches that it does not know by the nodes behind them."""
    rail = fault.name.partition(", rail mlx5_")[2]
    groups = sorted({cluster.group[node] for node in fault.nodes})
    if not rail:
        return str(fault)
    if fault.kind is Kind.SWITCH and len(fault.nodes) == cluster.group_size and len(groups) == 1:
        return f"switch: {leaf(groups[0], int(rail))}"
    if fault.kind is Kind.LINK and len(groups) == 2:
        return f"link: {' to '.join(leaf(group, int(rail)) for group in groups)}"
    return str(fault)


def main() -> None:
    """Print a table; the seeds of all that went wrong below it."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"clusters of each kind; {SEEDS} by default")
    seeds = range(parser.parse_args().seeds)
    table = Table(box=None, title=f"64 nodes, 8 rails, seeds 0 to {len(seeds) - 1}", title_justify="left")
    for column in ("planted", "switches", "faults", "missed", "false", "rounds", "experiments"):
        table.add_column(
            column, justify="left" if column in ("planted", "switches") else "right", no_wrap=True
        )
    wrong = []
    start = time.monotonic()
    for known, kinds in ((True, tuple(KINDS)), (False, BETWEEN_SWITCHES)):
        for kind in kinds:
            print(f"{kind} ...", file=sys.stderr, flush=True)
            plant = KINDS[kind]
            tried = [attempt(plant, seed, switches_known=known) for seed in seeds]
            faults = sum(len(each.planted) for each in tried)
            missed, false = (sum(len(getattr(each, what)) for each in tried) for what in ("missed", "false"))
            table.add_row(
                kind,
                "known" if known else "unknown",
                str(faults),
                _share(missed, faults),
                _share(false, len(tried)),
                f"{sum(each.rounds for each in tried) / len(tried):.0f}",
                f"{sum(each.experiments for each in tried) / len(tried):.0f}",
            )
            wrong += [(kind, known, each) for each in tried if each.missed or each.false]
    Console(width=120).print(table)
    for kind, known, each in wrong:
        print(
            f"seed {each.seed}, {kind}, switches {'known' if known else 'unknown'}: planted {sorted(each.planted)}, "
            f"named {sorted(each.named)}, unexplained: {each.conclusion.unexplained}"
        )
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)" if whole else f"{part}"


if __name__ == "__main__":
    main()
