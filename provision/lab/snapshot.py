"""Keeps the disks of all nodes under a name, and puts them back."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from provision.lab import state
from provision.lab.command import InputError, LabError, execute

if TYPE_CHECKING:
    from provision.lab.lab import Lab

PARTS = ("upper", "disk", "keys")
_SPEC = "lab.json"


def names(lab: Lab) -> list[str]:
    """The snapshots there are."""
    folder = lab.paths.snapshots
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []


def take(lab: Lab, name: str) -> None:
    """Shut all nodes down, keep their disks as `name` (an older one of that name goes), start them again."""
    if not name.isidentifier() and not name.replace("-", "").isalnum():
        raise InputError(f"snapshot {name}: expected letters, digits and dashes")
    spec = state.load(lab.paths)
    if spec is None:
        raise InputError(f"no lab at {lab.paths.state}: run `provision lab up`")
    target = lab.paths.snapshots / name
    scratch = target.with_name(f".{name}")
    shutil.rmtree(scratch, ignore_errors=True)
    lab.paths.snapshots.mkdir(exist_ok=True, mode=0o700)
    scratch.mkdir()
    lab.parallel(lambda node: lab.power_off(node.name), spec.nodes)
    lab.progress.say("snapshot", f"keeping {len(spec.nodes)} nodes as {name}")
    lab.parallel(lambda node: _copy(lab.paths.node(node.name), scratch / node.name), spec.nodes)
    state.write_json(scratch / _SPEC, asdict(spec))
    if target.exists():
        shutil.rmtree(target)
    scratch.rename(target)
    lab.parallel(lambda node: lab.start(node.name), spec.nodes)


def restore(lab: Lab, name: str) -> None:
    """Cut the power of all nodes, put their disks back as `name` has them, start them."""
    source = lab.paths.snapshots / name
    spec = state.load(lab.paths)
    if spec is None or not source.is_dir():
        raise InputError(f"{name}: no such snapshot; there are {', '.join(names(lab)) or 'none'}")
    kept = state.decode(json.loads((source / _SPEC).read_text()))
    if kept.nodes != spec.nodes:
        raise LabError(
            f"{name}: was taken of {len(kept.nodes)} nodes that differ from those of today: take a new one"
        )
    lab.parallel(lambda node: lab.power_loss(node.name), spec.nodes)
    lab.progress.say("snapshot", f"restoring {name}")
    lab.parallel(lambda node: _put_back(source / node.name, lab.paths.node(node.name)), spec.nodes)
    lab.parallel(lambda node: lab.start(node.name), spec.nodes)


def _copy(source: Path, target: Path) -> None:
    """Copy a node's disks with all attributes, device nodes and links."""
    target.mkdir()
    execute(
        ["cp", "-a", "--reflink=auto", "--sparse=always", *(source / part for part in PARTS), target],
        timeout=600,
    )


def _put_back(source: Path, folder: Path) -> None:
    """Build the node's folder anew beside the old one, then change places."""
    scratch, old = folder.with_name(f".{folder.name}"), folder.with_name(f".{folder.name}.old")
    for left in (scratch, old):
        if left.exists():
            shutil.rmtree(left)
    _copy(source, scratch)
    for part in ("work", "root"):
        (scratch / part).mkdir()
    (scratch / "kmsg").touch()
    folder.rename(old)
    scratch.rename(folder)
    shutil.rmtree(old)
