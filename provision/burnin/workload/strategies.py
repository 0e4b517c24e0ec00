"""A decoder as large as the GPU holds, trained for speed by every strategy that fits the job, in bfloat16.

Weights and moments are float32, products bfloat16. FSDP2 gathers the next layer while one is computed and reduces
gradients of each micro batch behind the backward pass; data-parallel replicas reduce with the last one only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from . import model
from .device import Marks, release, synchronise
from .document import RankLog
from .group import Group
from .meshes import ACCUMULATION, AXES, Strategy, loss_spread, out_of_reach, strategies
from .shapes import TINY, Shape, shape_for

WARM_UP = 3  # steps
LEAST_STEPS = 5
CHUNK_SECONDS = 10.0  # between two looks at the clock
LEARNING_RATE = 0.2  # for a width of one: wider layers add up more changes
BATCHES = 4  # different steps' data, used again in turn


class Unavailable(Exception):
    """This PyTorch, or the backend, does not have what a strategy needs; the message says what."""


def measure(
    group: Group, log: RankLog, device: Any, seconds: float, thorough: bool, collectives: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every strategy for its share of `seconds`: rows for `TrainingRun`, and what could not be run for `Skipped`.

    `collectives` are this run's rows of `Collective`: what they show to be impossible is not tried.
    """
    place = group.placement
    shape = (
        shape_for(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else TINY
    )
    wanted = strategies(place.world_size, place.local_world_size, shape.layers, shape.heads, thorough)
    if not thorough and lacks_sharding(device):
        wanted.append(Strategy("ddp", replicate=place.world_size))
    rows, skipped = [], []
    for strategy in wanted:
        try:
            why = lacks_sharding(device) if strategy.name != "ddp" else None
            if why := why or out_of_reach(strategy, shape, collectives):
                raise Unavailable(why)
            rows.append(train(group, log, device, strategy, shape, seconds / len(wanted)))
        except Unavailable as error:
            skipped.append({"what": f"training by {strategy.name}", "why": str(error), "host": None})
            log.progress(f"training by {strategy.name}: skipped, {error}")
        release(device)
    return rows, skipped


def lacks_sharding(device: Any) -> str | None:
    """Why FSDP2 cannot be used here; None: it can."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        return f"PyTorch {torch.__version__} has no fully_shard; 2.6 has"
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        return f"PyTorch {torch.__version__} shards on GPUs only"
    return None


def train(
    group: Group, log: RankLog, device: Any, strategy: Strategy, shape: Shape, seconds: float
) -> dict[str, Any]:
    """One strategy for about `seconds`."""
    place = group.placement
    label = f"training by {strategy.name}" + (", recomputing" if strategy.activation_checkpointing else "")
    group.step(f"{label}: set-up")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with group.collective(f"{label}: set-up"):
        run = Trainer(strategy, shape, place.rank, device)
    losses: list[Any] = []
    with group.collective(f"{label}: warm-up"):
        for step in range(WARM_UP):
            losses.append(run.step(step))
        synchronise(device)
        start = time.perf_counter()
        losses.append(run.step(WARM_UP))
        synchronise(device)
    each = max(group.gather(f"{label} pace", time.perf_counter() - start))
    steps = max(LEAST_STEPS, int((seconds - (WARM_UP + 1) * each) / each))
    chunk = max(1, int(CHUNK_SECONDS / each))
    times: list[float] = []
    while len(times) < steps:
        marks = Marks(device)
        with group.collective(f"{label} step {len(times)}"):
            marks.set()
            for _ in range(min(chunk, steps - len(times))):
                losses.append(run.step(len(losses)))
                marks.set()
            synchronise(device)
        times += marks.seconds()
        log.progress(f"{label}: step {len(times)} of {steps}, {marks.seconds()[-1]:.3f} s each")
    with group.collective(f"{label} losses"):
        own = torch.stack(losses).double()
        mean = own * (1 / (strategy.shares * strategy.tensor) if run.last else 0)
        dist.all_reduce(mean)
    results = group.gather(
        f"{label} results",
        {
            "seconds": times,
            "loss": own.tolist() if run.last else None,
            "mean": mean.tolist(),
            "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        },
    )
    run.close()
    by_step = [max(result["seconds"][step] for result in results) for step in range(steps)]
    micro_batches = strategy.pipeline * strategy.tensor * ACCUMULATION
    batch = shape.micro_batch * micro_batches * strategy.shares
    rate = batch * shape.sequence * steps / sum(by_step)
    row = {
        "strategy": strategy.name,
        "mesh": dict(zip(AXES, strategy.sizes)),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "parameters": shape.parameters,
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "vocabulary": shape.vocabulary,
        "sequence": shape.sequence,
        "micro_batch": shape.micro_batch,
        "accumulation": micro_batches,
        "global_batch": batch,
        "activation_checkpointing": strategy.activation_checkpointing,
        "compiled": False,
        "steps": steps,
        "step_seconds": by_step,
        "rank_step_seconds": [statistics.median(result["seconds"]) for result in results],
        "tokens_per_second": rate,
        "flops_per_token": shape.flops_per_token,
        "tflops_per_gpu": rate * shape.flops_per_token / place.world_size / 1e12,
        "memory_bytes": [result["memory"] for result in results],
        "losses": results[0]["mean"],
        "loss_spread": loss_spread(strategy, [r["mean"] for r in results], [r["loss"] for r in results]),
    }
    log.event("training", **{**row, "own_seconds": times})
    log.progress(
        f"{label}: {row['parameters'] / 1e9:.2f}e9 parameters, {rate:.0f} tokens/s, "
        f"{row['tflops_per_gpu']:.3g} TFLOP/s a GPU"
    )
    return row


class Trainer:
    """One rank's part of the model, wrapped as the strategy says, and its optimizer."""

    def __init__(self, strategy: Strategy, shape: Shape, rank: int, device: Any) -> None:
        self.strategy, self.shape, self.device = strategy, shape, device
        self.share = strategy.share(rank)
        self.micro_batches = strategy.pipeline * strategy.tensor * ACCUMULATION
        stage = strategy.coordinates(rank)["pipeline"]
        self.last = stage == strategy.pipeline - 1
        per_stage = shape.layers // strategy.pipeline
        layers = (stage * per_stage, (stage + 1) * per_stage)
        self.data = [
            [
                model.tokens(shape, self.share, step * self.micro_batches + part, device)
                for part in range(self.micro_batches)
            ]
            for step in range(BATCHES)
        ]
        self.model = model.build(shape, device, *layers)
        if strategy.activation_checkpointing:
            recompute(self.model)
        if strategy.name == "ddp":
            self._replicate()
        else:
            self._shard(stage)

    def _replicate(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        cuda = self.device.type == "cuda"
        self.optimizer: Any = None
        if cuda:
            self.optimizer = MasterWeights(self.model, self.shape.width)
        self.model = DistributedDataParallel(
            self.model, device_ids=[self.device.index] if cuda else None, gradient_as_bucket_view=True
        )
        self.optimizer = self.optimizer or adamw(self.model.parameters(), self.shape.width, fused=False)
        self._step = self._step_replicated

    def _shard(self, stage: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        strategy = self.strategy
        mesh = init_device_mesh(self.device.type, strategy.sizes, mesh_dim_names=AXES)
        if strategy.tensor > 1:
            parallelize(self.model, mesh["tensor"])
        data = mesh["replicate", "shard"] if strategy.replicate > 1 else mesh["shard"]
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if self.device.type == "cuda"
            else MixedPrecisionPolicy()
        )
        # A pipeline's stage has many micro batches in flight: it would gather its layers again for each of them.
        reshard = strategy.shard > 1 and strategy.pipeline == 1
        for part in (*self.model.layers.values(), self.model):
            fully_shard(part, mesh=data, mp_policy=policy, reshard_after_forward=reshard)
        self.optimizer = adamw(self.model.parameters(), self.shape.width, fused=self.device.type == "cuda")
        self._step = self._step_sharded
        if strategy.pipeline > 1:
            self._pipeline(stage, mesh["pipeline"].get_group())

    def _pipeline(self, stage: int, group: Any) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stages = self.strategy.pipeline
        part = PipelineStage(self.model, stage, stages, self.device, group=group)
        self.schedule = Schedule1F1B(part, self.micro_batches, loss_fn=model.loss_of)
        self._step = self._step_pipelined

    def step(self, number: int) -> Any:
        """Train one step; the mean loss of this rank's share, a tensor on the device.

        Of a pipeline only the last stage knows it.
        """
        with model.fast_attention(self.device):
            loss = self._step(self.data[number % BATCHES])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _step_sharded(self, batches: list[Any]) -> Any:
        total = torch.zeros((), device=self.device)
        with parallel_loss(self.strategy.tensor > 1):
            for batch in batches:
                loss = model.loss_of(self.model(batch[:, :-1]), batch[:, 1:]) / len(batches)
                loss.backward()
                total += whole(loss.detach())
        return total

    def _step_replicated(self, batches: list[Any]) -> Any:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self.model.no_sync():
                loss = model.loss_of(self.model(batch[:, :-1]), batch[:, 1:]) / len(batches)
                loss.backward()
            total += loss.detach()
        return total

    def _step_pipelined(self, batches: list[Any]) -> Any:
        rows = torch.cat(batches)
        losses: list[Any] = []
        first = (rows[:, :-1].contiguous(),) if self.model.embedding is not None else ()
        if not self.last:
            self.schedule.step(*first)
            return torch.zeros((), device=self.device)
        with parallel_loss(self.strategy.tensor > 1):
            self.schedule.step(*first, target=rows[:, 1:].contiguous(), losses=losses)
        return torch.stack([whole(loss.detach()) for loss in losses]).mean()

    def close(self) -> None:
        """Give the memory back."""
        del self.model, self.optimizer, self.data, self._step
        self.__dict__.pop("schedule", None)


class MasterWeights:
    """AdamW on float32 weights beside a model that computes in bfloat16."""

    def __init__(self, replica: Any, width: int) -> None:
        self.masters = [parameter.detach().clone() for parameter in replica.parameters()]
        replica.to(torch.bfloat16)
        self.parameters = list(replica.parameters())
        self.adamw = adamw(self.masters, width, fused=True)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for parameter in self.parameters:
            parameter.grad.zero_()


def adamw(parameters: Any, width: int, fused: bool) -> Any:
    """AdamW, with one group of parameters for each mesh: its fused form takes no mixture."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in by_mesh.values()],
        lr=LEARNING_RATE / width,
        betas=(0.9, 0.95),
        fused=fused,
    )


def parallelize(decoder: Any, mesh: Any) -> None:
    """Tensor parallel: heads, feed-forward and the output's vocabulary shared out."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in decoder.layers.values():
        plan = {
            "qkv": ColwiseParallel(),
            "out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    if decoder.head is not None:
        parallelize_module(
            decoder, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        )


@contextmanager
def parallel_loss(tensor: bool) -> Iterator[None]:
    """Where the vocabulary is shared out, so is the loss."""
    if not tensor:
        yield
        return
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():
        yield


def whole(tensor: Any) -> Any:
    """A plain tensor of what may be spread over ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def recompute(decoder: Any) -> None:
    """Keep only each layer's input and compute the rest again in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, layer in decoder.layers.items():
        decoder.layers[name] = checkpoint_wrapper(layer)
