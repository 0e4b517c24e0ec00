"""The result document of the burn-in job, as the controller reads it. A contract: docs/burnin.md.

Rates are in 10**9 bytes a second (gbs) or 10**12 operations a second (tflops), times in seconds. What a run did
not measure is absent (an empty list, None) and `skipped` says why; the recordings of older versions lack what
came later. Tables by rank are lists whose index is the rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError


class ResultError(Exception):
    """A result document that cannot be used; the message says why."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Part):
    name: str  # the product name, as the driver spells it
    uuid: str | None
    memory_bytes: int
    bus: str | None = None  # PCI address, "0000:00:06.0"
    numa_node: int | None = None  # None: the kernel does not say


class Rank(_Part):
    """One process of the job."""

    rank: int
    host: str
    local_rank: int
    pid: int
    address: str
    interface: str
    gpu: Gpu | None


class Missing(_Part):
    """A rank that the others had to do without."""

    rank: int
    host: str | None
    why: str


class Failure(_Part):
    """Why a run did not finish."""

    message: str
    missing: list[Missing]
    reported_by: int  # rank


class Collective(_Part):
    """One collective at one size; `seconds`: the slowest rank's median."""

    operation: str
    bytes: int
    dtype: str
    iterations: int
    seconds: float | None
    algbw_gbs: float | None
    busbw_gbs: float | None
    wrong: list[int]  # wrong elements, by rank
    unsupported: str | None  # the backend's own words
    rank_seconds: list[float] = []  # each rank's own median


class Pair(_Part):
    """One GPU sends to another, nothing else on either: an entry of the peer-to-peer matrix."""

    source: int  # rank
    target: int  # rank
    bytes: int
    seconds: float  # median
    gbs: float
    wrong: int  # elements


class Copy(_Part):
    """One way of moving data on one rank. Device copies and triads count what is read and what is written."""

    rank: int
    kind: Literal["device_copy", "triad", "host_to_device", "device_to_host"]
    place: Literal["near", "far"] | None  # the NUMA node of the host memory, seen from the GPU
    numa_node: int | None  # of the host memory
    bytes: int
    seconds: float  # median
    gbs: float
    wrong: int  # elements


class Compute(_Part):
    """Matrix products on one rank."""

    rank: int
    dtype: str
    size: int
    products: int
    tflops: float
    relative_error: float
    tolerance: float
    seconds: float | None = None  # under load, warm-up included
    burst_tflops: float | None = None  # the first products, before power and heat limit the clocks
    differing_products: int | None = None  # later products whose bits are not those of the first
    checksum: str | None = None  # of a product from the same data on every rank


class Disagreement(_Part):
    """Gradient checksums by rank of a step where not all were equal, and of the step done again."""

    step: int
    first: list[str]
    replay: list[str]


class Training(_Part):
    """The data-parallel training."""

    steps: int
    parameters: int
    global_batch: int
    tokens_per_second: float
    losses: list[float]  # mean over the ranks, by step
    loss_spread: float  # largest difference between two ranks' idea of that mean
    reference_error: list[float]  # gradient against a one-process run, relative L2 error by rank
    reference_tolerance: float
    disagreements: list[Disagreement]


class Mesh(_Part):
    """How a training run spreads the model; their product is the number of ranks."""

    replicate: int = 1  # data parallel, every rank the whole model (DDP, and the outer part of hybrid FSDP2)
    shard: int = 1  # FSDP2
    pipeline: int = 1
    tensor: int = 1


class TrainingRun(_Part):
    """A decoder trained by one strategy, for speed: `tflops_per_gpu` counts matrix products and causal attention.

    Recomputation for activation checkpointing is no useful work and not counted.
    """

    strategy: str  # "ddp", "fsdp2", "tp", "pp", "fsdp2+tp" ...
    mesh: Mesh
    dtype: str
    parameters: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int  # sequences
    accumulation: int  # micro batches a step
    global_batch: int  # sequences
    activation_checkpointing: bool
    compiled: bool
    steps: int  # measured, after the warm-up
    step_seconds: list[float]  # the slowest rank's, by step
    rank_step_seconds: list[float]  # each rank's median
    tokens_per_second: float
    flops_per_token: float
    tflops_per_gpu: float
    memory_bytes: list[int]  # most that was allocated, by rank
    losses: list[float]  # mean over the ranks, by step, warm-up included
    loss_spread: float  # largest difference between two ranks' idea of that mean


class Checkpoint(_Part):
    """A distributed checkpoint, a rank killed, and the job resumed from it."""

    folder: str
    filesystem: str | None  # its type, "nfs4"
    bytes: int
    save_seconds: float
    load_seconds: float
    step: int  # the first step after the checkpoint
    killed: int  # rank
    losses: list[float]  # from `step` on, before the rank was killed
    resumed_losses: list[float]  # the same steps after the restart


class Rotation(_Part):
    """One deterministic training step, each rank's share of the batch moved on by `shift` ranks.

    `checksums[rank]` is that of the gradients this rank's GPU computed from share (rank + shift) modulo the number
    of ranks. The same share must give the same bits on every GPU of one model.
    """

    step: int
    shift: int
    checksums: list[str]


class Connection(_Part):
    """How NCCL reaches a peer, in its own words: "P2P/CUMEM", "SHM/direct/direct", "NET/IB/0/GDRDMA"."""

    peer: int  # rank
    direction: Literal["send", "receive"]
    via: str
    channels: int


class Choice(_Part):
    """What NCCL chose for a call: "RING" with "SIMPLE"."""

    operation: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int


class Transport(_Part):
    """What one rank's NCCL log says of the communicator of all ranks."""

    rank: int
    network: str | None  # "IB", "Socket", a plug-in's name; None: the log does not say
    devices: list[str]  # "mlx5_0:1/IB", "eth0:10.0.0.1<0>"
    nvls: bool | None  # whether NVLink SHARP is used; None: the log does not say
    collective_channels: int | None
    nvls_channels: int | None
    p2p_channels: int | None
    connections: list[Connection]
    choices: list[Choice]  # rank 0 alone tells
    warnings: list[str]
    why: str | None = None  # there is no log, or none that says anything: why


class Series(_Part):
    """One device's readings at 1 Hz, thinned for the document; the node's telemetry file has every one.

    Of the readings that became one, gauges give the mean, counters the last, slowdown reasons all bits that were
    set. NVML's units: MHz, W, degrees Celsius; `slowdown_reasons` is its bit mask of clock event reasons.
    """

    host: str
    subject: str  # "gpu 0", "mlx5_0/1"
    uuid: str | None
    rank: int | None  # that uses the GPU
    source: str  # "nvml", "nvidia-smi", "sysfs"
    seconds: list[float]  # since the job's start
    values: dict[str, list[float | None]]  # reading -> one for each of `seconds`; None: could not be read
    unavailable: dict[str, str]  # reading -> why


class KernelMessages(_Part):
    """What the kernel of one node said during the run."""

    host: str
    source: str | None  # "/dev/kmsg"; None: could not be read
    why: str | None
    before: list[str]  # of graphics driver, network and memory errors, since the node's boot
    during: list[str]


class Tool(_Part):
    """An external tool on one node; its whole output is in `raw`."""

    host: str
    tool: str  # "dcgmi diag -r 3"
    subject: str | None  # a rail "mlx5_0", a folder
    skipped: str | None  # why it was not run
    exit: int | None
    seconds: float | None
    numbers: dict[str, float]  # "write_gbs": 46.2
    raw: str | None  # file


class Host(_Part):
    """What a node ran the job with."""

    host: str
    os: str | None
    kernel: str
    driver: str | None
    container: str | None  # image or kind of container; None: none is visible
    python: str
    cpus: int
    numa_nodes: int
    busy: dict[str, list[str]]  # GPU uuid -> processes of others that held it before the run: "51220 python3"
    networks: dict[str, list[str]] = {}  # interface -> its addresses, "10.0.0.5/24"
    odd_routes: dict[
        str, str
    ] = {}  # node that is reached from another address than this node's -> "eth1 10.0.1.5"


class Phase(_Part):
    """When a part of the run was at work, in seconds since the job's start."""

    name: str
    start: float
    end: float


class Skipped(_Part):
    """Something that was not measured."""

    what: str
    why: str
    host: str | None = None  # None: everywhere


class BurninResult(_Part):
    """What a run measured; not complete when ranks died or hung."""

    format: Literal[1]
    complete: bool
    failure: Failure | None
    started: str
    seconds: float
    job: str | None
    launcher: str
    level: str
    world_size: int
    nodes: list[str]
    backend: str
    device: Literal["cpu", "cuda"]
    injected: str | None  # a fault made on purpose, "flip-bit:1"
    software: dict[str, str | None]
    environment: dict[str, str]  # what steered NCCL, gloo and OpenMP
    ranks: list[Rank]  # empty when not all ranks came together
    collectives: list[Collective]
    compute: list[Compute]
    training: Training | None
    pairs: list[Pair] = []
    copies: list[Copy] = []
    training_runs: list[TrainingRun] = []
    checkpoint: Checkpoint | None = None
    rotations: list[Rotation] = []
    transports: list[Transport] = []
    telemetry: list[Series] = []
    kernel: list[KernelMessages] = []
    tools: list[Tool] = []
    hosts: list[Host] = []
    phases: list[Phase] = []
    skipped: list[Skipped] = []

    def host(self, rank: int) -> str:
        """The node of a rank."""
        return self.ranks[rank].host

    @classmethod
    def parse(cls, text: str, source: str | Path) -> BurninResult:
        """Read a document; `source` is named in errors."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "document"
            raise ResultError(f"{source}: {where}: {first['msg']}") from error
