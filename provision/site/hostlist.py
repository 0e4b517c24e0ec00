"""Host lists, "gpu-[001-016,020],login-1", as Slurm writes them.

ClusterShell reads ranges and folds names; `expand` keeps the order as written, because addresses are paired
with hosts by their place in the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from ClusterShell.NodeSet import NodeSet
from ClusterShell.RangeSet import RangeSet, RangeSetParseError

LARGEST = 65_536  # names in one list; more is a slip of the pen ("gpu-[1-99999999]")

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?:/(\d{1,9}))?)?", re.ASCII)
_FOREIGN = re.compile(r"[^A-Za-z0-9_.:\[\],/ -]")  # "/" only stands in a range's step
_WORD = re.compile(r"[A-Za-z0-9_.:-]+")
_WORD_WITH_RANGES = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]|([^\[\]]+)")


class HostlistError(ValueError):
    """A host list that cannot be read; the message says where."""


def expand(text: str) -> list[str]:
    """The names in `text`, in the order as written; the last of several ranges in a name runs fastest.

    Works on addresses too: "10.1.0.[11-26]", "2001:db8::[21-22]". Raises HostlistError: not readable, a name
    that stands twice, more than LARGEST names.
    """
    foreign = _FOREIGN.search(text)
    if foreign:
        raise HostlistError(f"{foreign[0]!r} cannot be part of a host list")
    if not text.strip():
        raise HostlistError("a host list with no names")
    names: dict[str, None] = {}
    for word in _split(text):
        for name in _names(word, LARGEST - len(names)):
            if name in names:
                raise HostlistError(f'"{name}" stands twice in the list')
            names[name] = None
    return list(names)


def fold(names: Iterable[str]) -> str:
    """The shortest host list of `names`, sorted; `expand` gives back exactly these names."""
    wanted = list(names)
    for name in wanted:
        if not _WORD.fullmatch(name):
            raise HostlistError(f"{name!r} is not a host name")
    return str(NodeSet.fromlist(wanted, resolver=None))


def _split(text: str) -> Iterator[str]:
    """The words between commas; commas in brackets belong to their word."""
    depth, start = 0, 0
    for index, character in enumerate(text + ","):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise HostlistError(f'bracket without its partner in "{text[start : index + 1]}"')
        if character == "," and depth == 0:
            word = text[start:index].strip()
            if not word:
                raise HostlistError("a comma with no name before or after it")
            if " " in word:
                raise HostlistError(f'names are separated by commas: "{word}"')
            yield word
            start = index + 1
    if depth:
        raise HostlistError(f'bracket without its partner in "{text[start:]}"')


def _names(word: str, limit: int) -> Iterator[str]:
    parts: list[list[str]] = []
    count = 1
    for prefix, ranges, rest in _WORD_WITH_RANGES.findall(word):
        if "/" in prefix or "/" in rest:
            raise HostlistError(f'"/" cannot be part of a name: "{word}"')
        parts.append([prefix or rest])
        if not rest:
            parts.append(_numbers(ranges, word, limit // count))
            count *= len(parts[-1])
    return map("".join, product(*parts))


def _numbers(ranges: str, word: str, limit: int) -> list[str]:
    """ "09-10,3" -> 09, 10, 3: each range with its own padding."""
    numbers: list[str] = []
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text)
        if not found:
            raise HostlistError(f'"{text}" in "{word}" is neither a number nor a range such as 001-016')
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            raise HostlistError(f'the range "{text}" in "{word}" runs backwards or has no step')
        if len(numbers) + (last - first) // step + 1 > limit:
            raise HostlistError(f'"{word}" is more than {LARGEST} names')
        try:
            numbers += [str(number) for number in RangeSet(text)]
        except RangeSetParseError as error:
            raise HostlistError(
                f'the bounds of "{text}" in "{word}" are padded to different widths'
            ) from error
    return numbers
