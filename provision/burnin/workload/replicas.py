"""A small decoder transformer, trained data-parallel on synthetic tokens, watched for wrong gradients.

Before every weight update the ranks compare checksums of their averaged gradients, which must be equal bit
for bit. If they are not, the step is done once more from the same weights and data: that tells who differs
even among two ranks, and a passing fault is not trained into the weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from . import pattern
from .document import RankLog
from .group import Group

VOCABULARY, WIDTH, LAYERS, HEADS, SEQUENCE = 128, 64, 2, 4, 32
BATCH = 4  # sequences a rank
STEPS = 40
LEARNING_RATE = 3e-3
FLIP_STEP = 3
# Two ways to add the same float32 numbers differ by rounding: 6e-8 a step, here at most some thousand steps
# of random sign. Observed: below 1e-6. A wrong sample, rank or factor shows as 1e-2 and more.
REFERENCE_TOLERANCE = 1e-4


class Block(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward, each behind its normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):  # type: ignore[misc]
    """Tokens (batch, length) to logits (batch, length, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(rank: int, step: int, device: Any) -> Any:
    """One rank's batch, int64 (BATCH, SEQUENCE + 1): a rule to learn, every tenth token random."""
    noise = pattern.words("tokens", rank, step, BATCH * (SEQUENCE + 1), "cpu").long()
    noise = noise.view(BATCH, SEQUENCE + 1)
    rows = noise.bitwise_and(VOCABULARY - 1)
    surprise = noise.bitwise_right_shift(8).remainder(10) == 0
    for place in range(1, SEQUENCE + 1):
        follows = (rows[:, place - 1] * 5 + 3).remainder(VOCABULARY)
        rows[:, place] = torch.where(surprise[:, place], rows[:, place], follows)
    return rows.to(device)


def loss_of(model: Any, batch: Any) -> Any:
    """Mean cross entropy of the next token."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def train(group: Group, log: RankLog, device: Any, seconds: float, flip_rank: int | None) -> dict[str, Any]:
    """Train for STEPS steps and at least `seconds`; returns what `provision.burnin.result.Training` reads."""
    place = group.placement
    group.step("training set-up")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = Decoder().to(device)
    with group.collective("training set-up"):
        parallel = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
        # The first backward pass makes torch regroup its gradient buckets; only from then on is a repeated
        # step the same sequence of additions.
        loss_of(parallel, tokens(place.rank, 0, device)).backward()
    reference = _reference_error(group, model, parallel, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    loss_spread = 0.0
    disagreements: list[dict[str, Any]] = []
    start = time.perf_counter()
    step = 0
    while True:
        batch = tokens(place.rank, step, device)
        with group.collective(f"training step {step}"):
            loss = _backward(parallel, batch)
        if place.rank == flip_rank and step == FLIP_STEP:
            largest = max(model.parameters(), key=lambda parameter: parameter.numel())
            pattern.flip_bit(largest.grad, largest.numel() // 3, 2)
        own = checksum(model)
        mine = {"checksum": own, "loss": loss, "seconds": time.perf_counter() - start}
        all_ranks = group.gather(f"training step {step} checksums", mine)
        first = [entry["checksum"] for entry in all_ranks]
        if len(set(first)) > 1:
            with group.collective(f"training step {step} again"):
                _backward(parallel, batch)
            replay = group.gather(f"training step {step} replay", checksum(model))
            disagreements.append({"step": step, "first": first, "replay": replay})
            log.progress(f"training step {step}: the ranks' gradients differ: {first}, again: {replay}")
            if len(set(replay)) > 1:
                break  # the weights would drift apart, and all that follows with them
        optimizer.step()
        step_losses = [float(entry["loss"]) for entry in all_ranks]
        losses.append(step_losses[0])
        loss_spread = max(loss_spread, max(step_losses) - min(step_losses))
        log.event("step", step=step, loss=loss, checksum=own)
        if step % 10 == 0:
            log.progress(f"training step {step:4d}  loss {losses[-1]:.4f}")
        step += 1
        if step >= STEPS and float(all_ranks[0]["seconds"]) >= seconds:
            break
    elapsed = time.perf_counter() - start
    global_batch = BATCH * place.world_size
    return {
        "steps": len(losses),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "global_batch": global_batch,
        "tokens_per_second": global_batch * SEQUENCE * len(losses) / elapsed,
        "losses": losses,
        "loss_spread": loss_spread,
        "reference_error": reference,
        "reference_tolerance": REFERENCE_TOLERANCE,
        "disagreements": disagreements,
    }


def _backward(parallel: Any, batch: Any) -> float:
    """Gradients averaged over the ranks, in place; returns the loss averaged over the ranks."""
    parallel.zero_grad(set_to_none=False)
    loss = loss_of(parallel, batch)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def _reference_error(group: Group, model: Any, parallel: Any, device: Any) -> list[float]:
    """Each rank's averaged gradient against that of one process with the whole batch: relative L2 error."""
    place = group.placement
    with group.collective("reference gradient"):
        _backward(parallel, tokens(place.rank, 0, device))
    averaged = [parameter.grad.double().clone() for parameter in model.parameters()]
    alone = Decoder().to(device)
    alone.load_state_dict(model.state_dict())
    loss_of(alone, torch.cat([tokens(rank, 0, device) for rank in range(place.world_size)])).backward()
    wanted = [parameter.grad.double() for parameter in alone.parameters()]
    difference = sum(float((got - want).square().sum()) for got, want in zip(averaged, wanted))
    size = sum(float(want.square().sum()) for want in wanted)
    error = (difference / size) ** 0.5
    return [float(value) for value in group.gather("reference gradient results", error)]


def checksum(model: Any) -> str:
    """Of all gradients, bit for bit."""
    return pattern.checksum(parameter.grad for parameter in model.parameters())
