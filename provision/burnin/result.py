"""The result document of the burn-in job, as the controller reads it. A contract: docs/burnin.md."""

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
    """One collective at one size. Rates in 10**9 bytes a second; `seconds`: the slowest rank's median."""

    operation: str
    bytes: int
    dtype: str
    iterations: int
    seconds: float | None
    algbw_gbs: float | None
    busbw_gbs: float | None
    wrong: list[int]  # wrong elements, by rank
    unsupported: str | None  # the backend's own words


class Compute(_Part):
    """Matrix products on one rank."""

    rank: int
    dtype: str
    size: int
    products: int
    tflops: float
    relative_error: float
    tolerance: float


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
