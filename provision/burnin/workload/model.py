"""A decoder transformer as large as the GPU holds, its synthetic tokens, and what a step of it costs.

The weights are a hash of their names: every strategy starts from the same model, on any number of ranks, without
sending it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import pattern
from .shapes import Shape

ALPHABET = 128  # of the tokens in use: so few that a large model learns something within a few steps


class Block(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward, each behind its normalisation.

    The rows of `qkv` go head by head, so that any share of its rows is a share of the heads.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_width = shape.head_width
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, 3, self.head_width)
        query, key, value = heads.transpose(1, 2).unbind(3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):  # type: ignore[misc]
    """Tokens (batch, length) to logits (batch, length, vocabulary); a stage of a pipeline has some of the layers.

    Positions are not encoded: what follows a token here depends on that token alone.
    """

    def __init__(self, shape: Shape, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        last = shape.layers if last is None else last
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if first == 0 else None
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in range(first, last)})
        ends = last == shape.layers
        self.norm = nn.RMSNorm(shape.width, eps=1e-5) if ends else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if ends else None

    def forward(self, x: Any) -> Any:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build(shape: Shape, device: Any, first: int = 0, last: int | None = None) -> Any:
    """The decoder, or layers `first` to `last` of it, on `device`, with the weights that its names give."""
    with torch.device("meta"):
        decoder = Decoder(shape, first, last)
    decoder = decoder.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            spread = 0.02 if "embedding" in name else 1 / math.sqrt(parameter.shape[1])
            flat = parameter.view(-1)
            for index, start, stop in pattern.blocks(flat.numel()):
                words = pattern.words(name, 0, index, stop - start, device)
                flat[start:stop] = words.float().mul_(spread * math.sqrt(3) / (1 << 31))
    return decoder


def tokens(shape: Shape, share: int, step: int, device: Any) -> Any:
    """Micro batch `step` of a data-parallel share, int64 (micro_batch, sequence + 1): a rule to learn.

    Each token follows from the one before, but every tenth is random.
    """
    count = shape.micro_batch * (shape.sequence + 1)
    words = pattern.words("tokens", share, step, count, "cpu").long().view(shape.micro_batch, -1)
    rows = words.bitwise_and(ALPHABET - 1)
    surprise = words.bitwise_right_shift(8).remainder(10) == 0
    for place in range(1, shape.sequence + 1):
        follows = (rows[:, place - 1] * 5 + 3).remainder(ALPHABET)
        rows[:, place] = torch.where(surprise[:, place], rows[:, place], follows)
    return rows.to(device)


def loss_of(logits: Any, wanted: Any) -> Any:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


@contextmanager
def fast_attention(device: Any) -> Iterator[None]:
    """The kernel that is quickest on the newest GPUs first, the plain one last."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield
