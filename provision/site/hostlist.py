"""Host lists, "gpu-[001-016,020]", by ClusterShell: padding kept, several ranges and prefixes, exact round trip."""

from __future__ import annotations

from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetParseError


class HostlistError(ValueError):
    """A host list that cannot be read; the message says where."""


def expand(text: str) -> list[str]:
    """The names in `text`, in the order of the list. Raises HostlistError."""
    try:
        return [str(name) for name in NodeSet(text, resolver=None)]
    except NodeSetParseError as error:
        raise HostlistError(str(error)) from error


def fold(names: Iterable[str]) -> str:
    """The shortest host list of `names`; `expand` gives back exactly these names."""
    return str(NodeSet.fromlist(list(names), resolver=None))
