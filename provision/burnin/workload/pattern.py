"""Random-looking data that every rank can compute for every other one, bit for bit, on any device.

torch's own generators give other numbers on other GPU models, so the data is a hash (the 32-bit finaliser of
MurmurHash3) of job seed, purpose, rank and position. Work is done in blocks to bound the memory it takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

BLOCK = 1 << 22  # elements


def blocks(count: int) -> Iterator[tuple[int, int, int]]:
    """(index, start, stop) of the blocks of `count` elements."""
    for index, start in enumerate(range(0, count, BLOCK)):
        yield index, start, min(start + BLOCK, count)


def words(purpose: str, rank: int, index: int, count: int, device: Any) -> Any:
    """Block `index` of `rank`'s data: int32 tensor (count,), all 32 bits random, count <= BLOCK."""
    key = zlib.crc32(f"{purpose}/{rank}/{index}".encode())
    x = torch.arange(count, dtype=torch.int32, device=device)
    x.mul_(_signed(0x9E3779B1)).add_(_signed(key))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x.bitwise_xor_(_logical_shift(x, shift)).mul_(_signed(factor))
    return x.bitwise_xor_(_logical_shift(x, 16))


def _logical_shift(x: Any, bits: int) -> Any:
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def bits(purpose: str, rank: int, index: int, count: int, dtype: Any, device: Any) -> Any:
    """Data that is only moved: any bit pattern of `dtype` (float32 or bfloat16), NaN included."""
    x = words(purpose, rank, index, count, device)
    return x.view(dtype) if dtype == torch.float32 else x.to(torch.int16).view(dtype)


def summands(purpose: str, rank: int, index: int, count: int, dtype: Any, device: Any, ranks: int) -> Any:
    """Data that is added up over `ranks`: whole numbers, so large that the sum is still exact in `dtype`.

    An exact sum does not depend on the order of additions: any algorithm must give the same bits.
    """
    significand = 24 if dtype == torch.float32 else 8
    limit = max(1, (1 << significand) // (2 * ranks))
    return words(purpose, rank, index, count, device).remainder_(2 * limit + 1).sub_(limit).to(dtype)


def wrong_elements(got: Any, want: Any) -> int:
    """How many elements differ in any bit."""
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    return int((got.view(integer) != want.view(integer)).sum())


def flip_bit(tensor: Any, element: int, bit: int) -> None:
    """Flip one bit of one element, in memory."""
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(-1).view(integer)[element].bitwise_xor_(1 << bit)


def checksum(tensors: Iterable[Any]) -> str:
    """Of all bits, in their order: a change of any single bit changes it.

    A sum modulo 2**64 of each 32-bit (or 16-bit) word times an odd number: one flipped bit changes the sum by a
    power of two below 2**32 times an odd number, which is never 0.
    """
    total = 0
    for place, tensor in enumerate(tensors):
        integer = torch.int32 if tensor.element_size() == 4 else torch.int16
        flat = tensor.contiguous().view(-1).view(integer)
        for index, start, stop in blocks(flat.numel()):
            odd = words("checksum", place, index, stop - start, flat.device).bitwise_or_(1)
            total += int((flat[start:stop].long() * odd.long()).sum())
    return f"{total % (1 << 64):016x}"
