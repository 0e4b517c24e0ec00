"""Silent corruption: one deterministic training step, its shares of the batch computed by other GPUs in turn.

GPUs of one model must get the same gradients from the same share, bit for bit. Ranks that are wrong on whatever
share they compute are named by `odd_gpus`.
"""

from __future__ import annotations

from typing import Any

import torch

from . import model, pattern
from .checksums import odd_gpus
from .device import release
from .document import RankLog
from .group import Group
from .shapes import SMALL, TINY, Shape

MOST_SHIFTS = 4  # so many GPUs compute each share: three outvote one
SHAPES = {"cpu": TINY, "cuda": SMALL}


def measure(
    group: Group, log: RankLog, device: Any, steps: int, flip_rank: int | None
) -> list[dict[str, Any]]:
    """Rows for `Rotation`. `flip_rank` flips one bit of what it computes, in every replay, to show that it is found."""
    place = group.placement
    ranks = place.world_size
    shape = SHAPES[device.type]
    group.step("replayed steps")
    torch.use_deterministic_algorithms(True)
    decoder = model.build(shape, device)
    shifts = min(ranks, MOST_SHIFTS) if ranks > 1 else 2  # one GPU alone can at least repeat itself
    rows = []
    for step in range(steps):
        for shift in range(shifts):
            label = f"step {step}, shares moved by {shift}"
            group.step(label)
            own = _gradients(
                decoder, shape, (place.rank + shift) % ranks, step, device, flip_rank == place.rank
            )
            rows.append({"step": step, "shift": shift, "checksums": group.gather(label, own)})
    torch.use_deterministic_algorithms(False)
    del decoder
    release(device)
    odd = odd_gpus(rows)
    log.progress(
        f"{steps} steps replayed {shifts} times: {odd.how if odd.ranks else 'the same bits on every GPU'}"
    )
    return rows


def _gradients(decoder: Any, shape: Shape, share: int, step: int, device: Any, flip: bool) -> str:
    decoder.zero_grad()
    batch = model.tokens(shape, share, step, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = decoder(batch[:, :-1])
    model.loss_of(logits, batch[:, 1:]).backward()
    gradients = [parameter.grad for parameter in decoder.parameters()]
    if flip:
        pattern.flip_bit(gradients[-1], gradients[-1].numel() // 3, 2)
    return pattern.checksum(gradients)
