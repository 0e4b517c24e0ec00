"""A cluster that answers experiments of `provision.burnin.isolation` from a model of its links, with planted faults.

Nodes have as many GPUs as NICs; NIC r of each node of a group hangs on that group's leaf switch of rail r, leaf
switches hang on spines. Routes are static, by destination, as InfiniBand's are: one cable from a leaf switch upwards
carries all that the leaf's nodes send to one node of another group.

Rates are in GB/s. Noise is drawn from how far repeated measurements of the same thing lay apart on a real node.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from provision.burnin.isolation import Cluster, Experiment, Limits, Measurement, Path

# 8 x H100 SXM with 8 x 400 Gbit/s, as measured in public; P2P off as host copies through PCIe 5.0 give it.
WIRE = 48.0  # one NIC
NVLINK = 478.0  # one node
HOST = 50.0
TFLOPS = (669.0, 687.0)  # bf16 of the two GPUs of one host at the power cap, recorded

# Two measurements of the same collective at the same size on 2 x H200 (nccl-tests 2.19.6 out of place and in place,
# 256 MiB and 2 GiB; PyTorch and nccl-tests at 256 MiB), GB/s.
REPEATED = (
    (302.18, 303.36), (339.33, 340.53), (245.95, 256.06), (283.90, 304.71), (229.79, 232.01), (286.44, 283.89),
    (285.04, 291.38), (335.43, 359.62), (305.49, 305.49), (364.16, 362.91), (301.82, 302.18), (245.21, 245.95),
    (230.44, 229.79), (285.91, 285.04), (304.61, 305.49),
)  # fmt: skip
NOISE = tuple(rate / ((a + b) / 2) for a, b in REPEATED for rate in (a, b))


@dataclass
class Faults:
    """How much of its rate each faulty part still has, 0 to 1; a NIC at 0 is not there at all."""

    links: dict[tuple[str, int], float] = field(default_factory=dict)  # (node, rail)
    cables: dict[tuple[int, int, str], float] = field(default_factory=dict)  # (group, rail, destination)
    switches: dict[tuple[int, int], float] = field(default_factory=dict)  # (group, rail)
    compute: dict[tuple[str, int], float] = field(default_factory=dict)  # (node, gpu)
    nvlink: dict[tuple[str, int], float] = field(default_factory=dict)
    pcie: dict[tuple[str, int], float] = field(default_factory=dict)
    hosts: dict[str, float] = field(default_factory=dict)  # PCIe and memory of a whole node


@dataclass
class SimulatedCluster:
    """Measures rounds of experiments; counts them."""

    faults: Faults
    chance: random.Random
    size: int = 64
    rails: int = 8
    group_size: int = 32
    switches_known: bool = True
    limits_known: bool = True
    rounds: int = 0
    experiments: int = 0

    def __post_init__(self) -> None:
        self.nodes = tuple(f"n{number:02d}" for number in range(1, self.size + 1))
        self.group = {node: number // self.group_size for number, node in enumerate(self.nodes)}
        self._tflops = {  # of each GPU
            node: {
                (node, gpu): self.chance.uniform(*TFLOPS) * self.faults.compute.get((node, gpu), 1.0)
                for gpu in range(self.rails)
            }
            for node in self.nodes
        }

        self._nics = {
            (node, rail): self._nic(node, rail) for node in self.nodes for rail in range(self.rails)
        }

    def _nic(self, node: str, rail: int) -> float:
        """What a node can send over a rail. Where its NIC is gone, NCCL shares the next one."""
        kept = self.faults.links.get((node, rail), 1.0) or 0.5
        return WIRE * min(
            kept,
            self.faults.pcie.get((node, rail), 1.0),
            self.faults.switches.get((self.group[node], rail), 1.0),
            self.faults.hosts.get(node, 1.0),
        )

    @property
    def cluster(self) -> Cluster:
        """What an isolation is told of it."""
        names = tuple(f"mlx5_{rail}" for rail in range(self.rails))
        switches = {
            (node, name): leaf(self.group[node], rail)
            for node in self.nodes
            for rail, name in enumerate(names)
        }
        return Cluster(self.nodes, self.rails, names, switches if self.switches_known else {})

    @property
    def limits(self) -> Limits:
        """Nine tenths of what this cluster reaches when it is whole."""
        if not self.limits_known:
            return Limits()
        return Limits(whole={"all_reduce": 0.9 * WIRE * self.rails, "all_to_all": 0.9 * WIRE})

    def run(self, experiments: Sequence[Experiment]) -> list[Measurement]:
        """Measure one round."""
        self.rounds += 1
        self.experiments += len(experiments)
        return [self._measure(experiment) for experiment in experiments]

    def _measure(self, experiment: Experiment) -> Measurement:
        rail = None if experiment.rail is None else int(experiment.rail.removeprefix("mlx5_"))
        gone = [
            node for node in experiment.nodes if rail is not None and self.faults.links.get((node, rail)) == 0
        ]
        if gone:
            return Measurement(experiment, why=f"{gone[0]}: no device {experiment.rail}")
        if len(experiment.nodes) == 1:
            rates = {"all_reduce": self._inside(experiment)}
        elif rail is not None:
            rates = {"all_reduce": self._ring(experiment.nodes, rail)}
        else:
            slowest = min(self._ring(experiment.nodes, rail) for rail in range(self.rails))
            inside = min(self._nvlink(node, range(self.rails)) for node in experiment.nodes)
            rates = {"all_reduce": min(slowest * self.rails, inside)}
        if len(experiment.nodes) == len(self.nodes):
            rates["all_to_all"] = self._all_to_all(experiment.nodes)
        measured = {operation: rate * self.chance.choice(NOISE) for operation, rate in rates.items()}
        tflops = {
            place: rate * self.chance.uniform(0.995, 1.005)
            for node in (experiment.nodes if experiment.gpus is None else ())
            for place, rate in self._tflops[node].items()
        }
        return Measurement(experiment, measured, tflops=tflops)

    def _inside(self, experiment: Experiment) -> float:
        (node,) = experiment.nodes
        gpus = range(self.rails) if experiment.gpus is None else experiment.gpus
        if experiment.path is Path.HOST:
            slowest = min(self.faults.pcie.get((node, gpu), 1.0) for gpu in gpus)
            return HOST * slowest * self.faults.hosts.get(node, 1.0)
        return self._nvlink(node, gpus)

    def _nvlink(self, node: str, gpus: Sequence[int]) -> float:
        return NVLINK * min(self.faults.nvlink.get((node, gpu), 1.0) for gpu in gpus)

    def _ring(self, nodes: Sequence[str], rail: int) -> float:
        """The slowest hop of a ring over the nodes in their order."""
        return min(self._hop(a, b, rail) for a, b in pairwise((*nodes, nodes[0])))

    def _hop(self, a: str, b: str, rail: int) -> float:
        """From a to b."""
        rate = min(self._nics[a, rail], self._nics[b, rail])
        if self.faults.cables and self.group[a] != self.group[b]:
            rate = min(rate, WIRE * self.faults.cables.get((self.group[a], rail, b), 1.0))
        return rate

    def _all_to_all(self, nodes: Sequence[str]) -> float:
        """Every node's NIC receives from all others; a cable upwards carries the share of its group's nodes."""
        slowest = min(self._nics[node, rail] for node in nodes for rail in range(self.rails))
        for (group, _, node), kept in self.faults.cables.items():
            through = [other for other in nodes if self.group[other] == group]
            if node in nodes and through:
                slowest = min(slowest, WIRE * kept * (len(nodes) - 1) / len(through))
        return slowest


def leaf(group: int, rail: int) -> str:
    """The name of a leaf switch."""
    return f"leaf-{group}-{rail}"
