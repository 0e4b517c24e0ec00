"""Puts values into the text of a site file, which otherwise stays as its author wrote it, comments and all. Pure."""

from __future__ import annotations

import yaml

from provision.errors import InputError


def put(text: str, key: tuple[str, ...], value: str) -> str:
    """`text` with `value` (YAML on one line) at `key`, there or not. Raises InputError where it cannot be put."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise InputError("the site file is no mapping")
    return _put(text, root, key, value)


def _put(text: str, mapping: yaml.MappingNode, key: tuple[str, ...], value: str) -> str:
    name, *rest = key
    for own, node in mapping.value:
        if own.value != name:
            continue
        if node.start_mark.index < own.end_mark.index:
            raise InputError(f"{name} is an alias: write {value} there by hand")
        if rest and isinstance(node, yaml.MappingNode) and node.value:
            return _put(text, node, tuple(rest), value)
        return f"{text[: own.end_mark.index]}: {_nested(rest, value)}{text[_end(node) :]}"
    if mapping.flow_style:
        before = text[: mapping.end_mark.index - 1].rstrip().removesuffix(",")
        comma = ", " if mapping.value else ""
        return f"{before}{comma}{name}: {_nested(rest, value)}{text[mapping.end_mark.index - 1 :]}"
    first, last = mapping.value[0][0], mapping.value[-1][1]
    end = text.find("\n", _end(last))
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{' ' * first.start_mark.column}{name}: {_nested(rest, value)}{text[end:]}"


def _nested(names: list[str], value: str) -> str:
    for name in reversed(names):
        value = f"{{{name}: {value}}}"
    return value


def _end(node: yaml.Node) -> int:
    """Where the last thing of `node` ends: marks of block collections lie behind the comments that follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)
