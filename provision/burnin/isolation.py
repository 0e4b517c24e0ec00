"""Finds which node, GPU, NIC, link or switch makes a group of nodes slow. Pure: measurements in, experiments out.

All nodes at once; if that is short or cannot be told, random disjoint pairs at the same time; then each node of a
short pair with a node known to be good; what is short there too is looked at rail by rail, over NVLink only and
with peer-to-peer copies off, down to pairs of its GPUs. Nodes that are good elsewhere and short only with each
other have a bad path between them. In the end the nodes that are left are measured all at once again.

"Short" is relative: a fault only makes slower, so the reference is what the best tenth of alike experiments reach
(as many as three quarters of the pairs are short behind a bad leaf switch, and a median would be too). Where a
lowest number is known for a shape, it counts as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from provision.site.hostlist import fold

MATCHINGS = 6  # random ways to pair all nodes before "short only with more than two" is believed
CONTROLS = 3  # good nodes or pairs that every experiment on a suspect is compared with
PARTNERS = 3  # good nodes that a suspect must be short with, where the switches are not known
SWITCH_NICS = 3  # as many bad links at one switch, and no good one, are the switch

Pair = tuple[str, str]


class Path(StrEnum):
    """What the GPUs of one node reach each other by."""

    ALL = "all paths"  # whatever NCCL chooses
    NVLINK = "NVLink only"
    HOST = "P2P off"  # through PCIe and the host's memory


@dataclass(frozen=True)
class Shape:
    """Experiments of one shape can be compared."""

    nodes: int
    path: Path = Path.ALL
    one_rail: bool = False
    gpus: int | None = None  # of each node; None: all


@dataclass(frozen=True)
class Experiment:
    """A short burn-in on some nodes, over some of what they have."""

    nodes: tuple[str, ...]
    path: Path = Path.ALL
    rail: str | None = None  # the only NIC that may be used; None: all
    gpus: tuple[int, ...] | None = None  # local numbers; None: all
    attempt: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(
            len(self.nodes), self.path, self.rail is not None, None if self.gpus is None else len(self.gpus)
        )

    def __str__(self) -> str:
        many = len(self.nodes) > 2
        parts = [f"{len(self.nodes)} nodes at once" if many else " with ".join(self.nodes)]
        if self.path is not Path.ALL:
            parts.append(self.path)
        if self.rail is not None:
            parts.append(f"rail {self.rail}")
        if self.gpus is not None:
            parts.append(f"GPUs {' and '.join(map(str, self.gpus))}")
        if self.attempt > 1:
            parts.append("again")
        return ", ".join(parts)


@dataclass(frozen=True)
class Measurement:
    """What an experiment gave."""

    experiment: Experiment
    busbw_gbs: Mapping[str, float] = field(default_factory=dict)  # by operation; empty: it did not run
    why: str | None = None  # it did not run
    tflops: Mapping[tuple[str, int], float] = field(default_factory=dict)  # by node and local GPU

    @property
    def rate(self) -> float | None:
        """Bus bandwidth of the all-reduce, GB/s; None where it did not run."""
        return self.busbw_gbs.get("all_reduce")


@dataclass(frozen=True)
class Cluster:
    """The nodes under test, all alike."""

    nodes: tuple[str, ...]
    gpus: int  # of each node
    rails: tuple[str, ...] = ()  # a node's NICs by name, in the order of the GPUs beside them
    switches: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (node, rail) -> leaf switch

    def rail_of(self, gpu: int) -> str | None:
        """The NIC beside a GPU."""
        return self.rails[gpu * len(self.rails) // self.gpus] if self.rails else None

    def leaves(self, node: str) -> frozenset[str]:
        """The leaf switches that a node hangs on, as far as they are known."""
        known = (self.switches.get((node, rail)) for rail in self.rails)
        return frozenset(switch for switch in known if switch)


@dataclass(frozen=True)
class Limits:
    """What is short."""

    whole: Mapping[str, float] = field(default_factory=dict)  # all nodes at once: operation -> lowest GB/s
    floors: Mapping[Shape, float] = field(default_factory=dict)  # lowest GB/s of an all-reduce
    tolerance: float = 0.1  # of what alike experiments reach
    compute_tolerance: float = 0.15  # GPUs of one model differ by as much as 0.08 in a burst


class Kind(StrEnum):
    """What a fault is in."""

    NODE = "node"
    GPU = "gpu"
    NIC = "nic"
    LINK = "link"  # a NIC's link, or one between switches
    SWITCH = "switch"


@dataclass(frozen=True)
class Fault:
    """What is slow, and the measurements that say so."""

    kind: Kind
    name: str  # "n7 GPU 3", "n7 rail mlx5_3", "leaf-0-3 to leaf-1-3"
    nodes: tuple[str, ...]  # that it makes slow
    evidence: tuple[str, ...]
    own: bool = True  # in the nodes themselves, so that the others are good without them

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


@dataclass(frozen=True)
class Conclusion:
    """What was found. `unexplained` says what stayed short without a fault that explains it."""

    faults: tuple[Fault, ...] = ()
    unexplained: str | None = None
    proven: tuple[str, ...] = ()  # nodes that were not short when all of them ran at once
    notes: tuple[str, ...] = ()  # what was short once and not again


Round = tuple[Experiment, ...]  # on disjoint nodes: they run at the same time
Plan = Generator[Round, Sequence[Measurement], Conclusion]
_Step = Generator[Round, Sequence[Measurement], None]
_Faults = Generator[Round, Sequence[Measurement], list[Fault]]


def plan(cluster: Cluster, limits: Limits, seed: int) -> Plan:
    """Yields rounds, is sent their measurements, returns the conclusion. The same seed and answers: the same plan."""
    return _Isolation(cluster, limits, seed).run()


def decide(cluster: Cluster, limits: Limits, seed: int, known: Iterable[Measurement]) -> Round | Conclusion:
    """What to run next after the measurements that are known, or what follows from them."""
    found = {measurement.experiment: measurement for measurement in known}
    steps = plan(cluster, limits, seed)
    try:
        wanted = next(steps)
        while all(experiment in found for experiment in wanted):
            wanted = steps.send([found[experiment] for experiment in wanted])
    except StopIteration as end:
        conclusion: Conclusion = end.value
        return conclusion
    return tuple(experiment for experiment in wanted if experiment not in found)


def isolate(
    cluster: Cluster,
    limits: Limits,
    seed: int,
    run: Callable[[Round], Sequence[Measurement]],
) -> tuple[Conclusion, list[Measurement]]:
    """Follow the plan to its end; `run` measures one round. Also gives all measurements, in order."""
    steps, measured = plan(cluster, limits, seed), list[Measurement]()
    try:
        wanted = next(steps)
        while True:
            answers = run(wanted)
            measured += answers
            wanted = steps.send(answers)
    except StopIteration as end:
        return end.value, measured


def disjoint(experiments: Iterable[Experiment]) -> Iterator[Round]:
    """Rounds of experiments that share no node; the order is kept where it can be."""
    left = list(dict.fromkeys(experiments))
    while left:
        busy: set[str] = set()
        now, later = [], []
        for experiment in left:
            if busy.isdisjoint(experiment.nodes):
                busy.update(experiment.nodes)
                now.append(experiment)
            else:
                later.append(experiment)
        yield tuple(now)
        left = later


def reference(values: Collection[float]) -> float:
    """What the best tenth reaches; of fewer than ten the best one."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


class _Isolation:
    def __init__(self, cluster: Cluster, limits: Limits, seed: int) -> None:
        self.cluster = cluster
        self.limits = limits
        self.seed = seed
        self.readings: dict[Experiment, Measurement] = {}
        self.rates: dict[Shape, list[float]] = {}
        self.notes: list[str] = []

    def run(self) -> Plan:
        nodes, faults = self.cluster.nodes, list[Fault]()
        while True:
            whole = Experiment(nodes)
            yield from self._ask([whole])
            found = yield from self._slow_gpus(whole)
            short, why = self._whole_short(whole)
            if short is not False:
                found += yield from (
                    self._between(nodes, sure=bool(short)) if len(nodes) > 1 else self._inside(nodes, ())
                )
            new = [fault for fault in found if str(fault) not in map(str, faults)]
            faults += new
            own = {node for fault in new if fault.own for node in fault.nodes}
            left = tuple(node for node in nodes if node not in own)
            if short is False or not new:
                explained = any(not fault.own for fault in faults)
                proven = left if short is False else ()
                return Conclusion(tuple(faults), None if explained else why, proven, tuple(self.notes))
            if left == nodes or len(left) < 2:
                return Conclusion(tuple(faults), None, (), tuple(self.notes))
            nodes = left

    def _ask(self, wanted: Iterable[Experiment]) -> _Step:
        for experiments in disjoint(each for each in wanted if each not in self.readings):
            for measurement in (yield experiments):
                self.readings[measurement.experiment] = measurement
                if measurement.rate is not None:
                    self.rates.setdefault(measurement.experiment.shape, []).append(measurement.rate)

    # What is short

    def _whole_short(self, whole: Experiment) -> tuple[bool | None, str | None]:
        """Whether all at once is short, None where it cannot be told, and why."""
        rates = self.readings[whole].busbw_gbs
        if not rates:
            return True, f"{whole}: did not run: {self.readings[whole].why}"
        untold = None
        for operation, rate in rates.items():
            lowest = self.limits.whole.get(operation)
            if lowest is None:
                untold = f"{whole}: {operation} {rate:.1f} GB/s, and no lowest number is known"
            elif rate < lowest:
                return True, f"{whole}: {operation} {rate:.1f} GB/s, expected at least {lowest:.1f}"
        return (None, untold) if untold else (False, None)

    def _lowest(self, shape: Shape) -> float:
        alike = self.rates.get(shape)
        lowest = [self.limits.floors.get(shape, 0.0)]
        if alike:
            lowest.append((1 - self.limits.tolerance) * reference(alike))
        if shape == Shape(len(self.cluster.nodes)):
            lowest.append(self.limits.whole.get("all_reduce", 0.0))
        return max(lowest)

    def _short(self, experiment: Experiment) -> bool:
        rate = self.readings[experiment].rate
        return rate is None or rate < self._lowest(experiment.shape)

    def _told(self, experiment: Experiment) -> str:
        measurement = self.readings[experiment]
        if measurement.rate is None:
            return f"{experiment}: did not run: {measurement.why}"
        lowest = self._lowest(experiment.shape)
        return f"{experiment}: {measurement.rate:.1f} GB/s, alike at least {lowest:.1f}"

    # GPUs that compute slowly

    def _slow_gpus(self, whole: Experiment) -> _Faults:
        """Told by the matrix products of all at once; each is seen again on its node alone before it counts."""
        rates = self.readings[whole].tflops
        if not rates:
            return []
        lowest = (1 - self.limits.compute_tolerance) * reference(rates.values())
        slow = [place for place, rate in rates.items() if rate < lowest]
        alone = {node: Experiment((node,), Path.NVLINK) for node, _ in slow}
        yield from self._ask(alone.values())
        found = []
        for node, gpu in slow:
            again = self.readings[alone[node]].tflops.get((node, gpu))
            said = f"{node} GPU {gpu}: {rates[node, gpu]:.0f} TFLOP/s, alike at least {lowest:.0f}"
            if again is None or again >= lowest:
                self.notes.append(f"{said}; alone {'not measured' if again is None else f'{again:.0f}'}")
                continue
            evidence = (said, f"{node} alone: {again:.0f} TFLOP/s")
            found.append(Fault(Kind.GPU, f"{node} GPU {gpu}", (node,), evidence))
        return found

    # Between nodes

    def _between(self, nodes: Sequence[str], *, sure: bool) -> _Faults:
        """`sure`: all at once is short; else it only cannot be told, and pairs that agree are enough."""
        pairs, good, short = list[Pair](), list[str](), list[Pair]()
        for number in range(MATCHINGS if sure else 2):
            pairs += self._matching(nodes, number)
            yield from self._ask(map(Experiment, pairs))
            short = [pair for pair in dict.fromkeys(pairs) if self._short(Experiment(pair))]
            good = [node for node in nodes if any(node in pair for pair in pairs if pair not in short)]
            if short and good:
                break
        if not short and not sure:
            return []
        if not short:
            return (yield from self._alike(self._matching(nodes, 0)))
        suspects = [node for node in nodes if node not in good and any(node in pair for pair in short)]
        if good:
            faulty = yield from self._with_good(suspects, good)
            good += [node for node in suspects if node not in faulty]
        else:
            faulty = {node: pair for pair in short for node in pair}
        found = yield from self._examine(faulty, good)
        if not good and len(nodes) == 2:
            found = _either_end(found)
        named = {node for fault in found for node in fault.nodes}
        for node, pair in faulty.items():
            if good and node not in named:
                kind, name = (Kind.NODE, node) if self.cluster.rails else (Kind.LINK, f"{node} network")
                said = "no rail by itself is short, nor the inside of the node"
                found.append(Fault(kind, name, (node,), (self._told(Experiment(pair)), said)))
        for pair in short:
            if faulty.keys().isdisjoint(pair):
                found += yield from self._path(pair, good)
        return found

    def _alike(self, pairs: Sequence[Pair]) -> _Faults:
        """All pairs are equally good, or equally bad: what all have in common, seen rail by rail."""
        found = yield from self._examine({node: pair for pair in pairs for node in pair}, ())
        return [fault for fault in found if fault.kind is not Kind.LINK]

    def _matching(self, nodes: Sequence[str], number: int) -> list[Pair]:
        """Pairs of all nodes, disjoint but for one of an odd number; every second time across leaf switches."""
        chance = random.Random(f"{self.seed}/{len(nodes)}/{number}")
        order = chance.sample(nodes, len(nodes))
        if number % 2:
            order.sort(key=lambda node: sorted(self.cluster.leaves(node)))
        half = (len(order) + 1) // 2
        return [_pair(a, b) for a, b in zip(order[:half], order[-half:], strict=True)]

    def _with_good(
        self, suspects: Sequence[str], good: Sequence[str]
    ) -> Generator[Round, Sequence[Measurement], dict[str, Pair]]:
        """The suspects that are short with good nodes too, each with the last pair it was short in.

        A partner below the same leaf switches leaves no path between switches in the experiment. Where they are not
        known, a path is told from a node by several partners.
        """
        others = random.Random(f"{self.seed}/partners").sample(good, len(good))
        uses = dict.fromkeys(others, 0)
        faulty: dict[str, Pair] = {}
        left = list(suspects)
        for number in range(PARTNERS):
            tried = {}
            for node in left:
                leaves = self.cluster.leaves(node)
                if leaves and number:
                    continue
                near = [other for other in others if leaves and self.cluster.leaves(other) == leaves]
                free = [other for other in near or others if _pair(node, other) != faulty.get(node)]
                if free:
                    partner = min(free, key=lambda other: uses[other])
                    uses[partner] += 1
                    tried[node] = _pair(node, partner)
            yield from self._ask(Experiment(pair) for pair in tried.values())
            for node, pair in tried.items():
                faulty[node] = pair
                if not self._short(Experiment(pair)):
                    left.remove(node)
        return {node: faulty[node] for node in left}

    def _examine(self, faulty: Mapping[str, Pair], good: Sequence[str]) -> _Faults:
        """What is wrong with each node that is short in its pair."""
        if not faulty:
            return []
        yield from self._ask(self._by_rail([*faulty.values(), *_control_pairs(good)]))
        inside = yield from self._inside(tuple(faulty), good)
        found: list[Fault] = []
        for node, pair in faulty.items():
            found += self._of_node(node, pair, [fault for fault in inside if node in fault.nodes])
        return self._switches(found, good)

    def _by_rail(self, pairs: Iterable[Pair]) -> Iterator[Experiment]:
        return (Experiment(pair, rail=rail) for pair in pairs for rail in self.cluster.rails)

    def _of_node(self, node: str, pair: Pair, inside: list[Fault]) -> Iterator[Fault]:
        rails = {rail: Experiment(pair, rail=rail) for rail in self.cluster.rails}
        bad = [rail for rail, experiment in rails.items() if self._short(experiment)]
        combined = self._told(Experiment(pair))
        yield from inside
        if len(bad) == len(rails) > 1:
            if not any(fault.kind is Kind.NODE for fault in inside):
                yield Fault(Kind.NODE, node, (node,), (combined, *(self._told(rails[rail]) for rail in bad)))
            return
        slow = {fault.name for fault in inside}
        beside = {self.cluster.rail_of(g) for g in range(self.cluster.gpus) if f"{node} GPU {g}" in slow}
        for rail in bad:
            if rail not in beside:
                dead = self.readings[rails[rail]].rate is None
                evidence = (combined, self._told(rails[rail]))
                yield Fault(Kind.NIC if dead else Kind.LINK, f"{node} rail {rail}", (node,), evidence)

    def _switches(self, found: Sequence[Fault], good: Collection[str]) -> list[Fault]:
        """Bad links that share a switch without a good one are the switch; unknown switches are told by rail."""
        healthy = {self.cluster.switches.get((node, rail)) for node in good for rail in self.cluster.rails}
        behind: dict[tuple[str | None, str], list[Fault]] = {}
        for fault in found:
            node, _, rail = fault.name.partition(" rail ")
            switch = self.cluster.switches.get((node, rail))
            if rail and (switch is None or switch not in healthy):
                behind.setdefault((switch, rail), []).append(fault)
        merged = {place: links for place, links in behind.items() if len(links) >= SWITCH_NICS}
        gone = {fault.name for links in merged.values() for fault in links}
        kept = [fault for fault in found if fault.name not in gone]
        for (switch, rail), links in merged.items():
            nodes = tuple(node for fault in links for node in fault.nodes)
            name = switch or f"of {fold(nodes)}, rail {rail}"
            kept.append(
                Fault(Kind.SWITCH, name, nodes, tuple(dict.fromkeys(fault.evidence[-1] for fault in links)))
            )
        return kept

    def _path(self, pair: Pair, good: Sequence[str]) -> _Faults:
        """Two nodes that are good with others and short with each other: by which rail, if it stays so."""
        again = Experiment(pair, attempt=2)
        yield from self._ask([again])
        if not self._short(again):
            self.notes.append(f"{self._told(Experiment(pair))}; {self._told(again)}")
            return []
        yield from self._ask(self._by_rail([pair, *_control_pairs(good)]))
        bad = [rail for rail in self.cluster.rails if self._short(Experiment(pair, rail=rail))]
        evidence = (self._told(Experiment(pair)), self._told(again))
        if not bad:
            return [Fault(Kind.LINK, f"{pair[0]} to {pair[1]}", pair, evidence, own=False)]
        return [
            Fault(
                Kind.LINK,
                self._between_switches(pair, rail),
                pair,
                (*evidence, self._told(Experiment(pair, rail=rail))),
                own=False,
            )
            for rail in bad
        ]

    def _between_switches(self, pair: Pair, rail: str) -> str:
        ends = [self.cluster.switches.get((node, rail)) for node in pair]
        if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
            return f"{pair[0]} to {pair[1]}, rail {rail}"
        return " to ".join(sorted(map(str, ends)))

    # Inside a node

    def _inside(self, suspects: Sequence[str], good: Sequence[str]) -> _Faults:
        """NVLink only, and P2P off; what is short is looked for in pairs of GPUs."""
        controls = good[:CONTROLS]
        alone = [
            Experiment((node,), path) for node in (*suspects, *controls) for path in (Path.NVLINK, Path.HOST)
        ]
        if self.cluster.gpus < 2:
            return []
        yield from self._ask(alone)
        lone = len(suspects) == 1 and not controls  # and short as a whole: nothing to compare it with
        short = [each for each in alone if each.nodes[0] in suspects and (lone or self._short(each))]
        yield from self._ask(
            Experiment((node,), path, gpus=gpus)
            for path in dict.fromkeys(each.path for each in short)
            for node in (*(each.nodes[0] for each in short if each.path is path), *controls)
            for gpus in self._gpu_pairs()
        )
        found: list[Fault] = []
        for whole in short:
            found += yield from self._gpus(whole)
        gpus = [fault for fault in found if fault.kind is Kind.GPU]
        return gpus if lone and gpus else found

    def _gpu_pairs(self) -> list[tuple[int, int]]:
        gpus = range(self.cluster.gpus)
        pairs = list(zip(gpus[::2], gpus[1::2], strict=False))
        return [*pairs, (gpus[-2], gpus[-1])] if len(gpus) % 2 else pairs

    def _gpus(self, whole: Experiment) -> _Faults:
        """The GPUs that make their node short; the node itself where it is none, or all of them."""
        by_pair = {gpus: Experiment(whole.nodes, whole.path, gpus=gpus) for gpus in self._gpu_pairs()}
        short = [gpus for gpus, experiment in by_pair.items() if self._short(experiment)]
        fine = [gpu for gpus in by_pair if gpus not in short for gpu in gpus]
        suspects = sorted({gpu for gpus in short for gpu in gpus if gpu not in fine})
        (node,) = whole.nodes
        named = []
        if fine:
            each = {
                gpu: Experiment(whole.nodes, whole.path, gpus=(min(gpu, fine[0]), max(gpu, fine[0])))
                for gpu in suspects
            }
            yield from self._ask(each.values())
            named = [gpu for gpu, experiment in each.items() if self._short(experiment)]
        if not named:
            evidence = (self._told(whole), *(self._told(by_pair[gpus]) for gpus in short))
            return [Fault(Kind.NODE, node, (node,), evidence)]
        return [
            Fault(Kind.GPU, f"{node} GPU {gpu}", (node,), (self._told(whole), self._told(each[gpu])))
            for gpu in named
        ]


def _pair(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)


def _either_end(found: Iterable[Fault]) -> list[Fault]:
    """Of two nodes without a third the bad link's end cannot be told: both ends of a rail are one link."""
    links: dict[str, list[Fault]] = {}
    for fault in found:
        _, _, rail = fault.name.partition(" rail ")
        links.setdefault(rail or fault.name, []).append(fault)
    return [
        ends[0]
        if len(ends) == 1
        else Fault(
            Kind.LINK,
            f"{' to '.join(end.nodes[0] for end in ends)}, rail {rail}",
            tuple(end.nodes[0] for end in ends),
            ends[0].evidence,
            own=False,
        )
        for rail, ends in links.items()
    ]


def _control_pairs(good: Sequence[str]) -> list[Pair]:
    return [_pair(a, b) for a, b in pairwise(good[: 2 * CONTROLS])][::2]
