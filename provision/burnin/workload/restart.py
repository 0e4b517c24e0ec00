"""A training job that loses a rank and goes on from its checkpoint, on the storage that real jobs would use.

Every rank starts a trainer of its own beside it. The trainers save a distributed checkpoint and train on; then one
is killed in the middle of a step, the others are ended, and new ones load the checkpoint and do the same steps once
more. With deterministic kernels the losses must be the same.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import child
from .device import synchronise
from .document import RankLog
from .group import Group, GroupError, open_store
from .meshes import Strategy
from .shapes import SMALL, TINY
from .strategies import Trainer, Unavailable
from .system import filesystem

SHAPES = {"cpu": TINY, "cuda": SMALL}
SAVED_AFTER, KILLED_AFTER, MOST_STEPS = 3, 6, 10_000  # steps
POLL_SECONDS = 0.2
START_SECONDS = 120.0


def measure(group: Group, log: RankLog, device: Any, folder: Path, sharded: bool) -> dict[str, Any]:
    """The row for `Checkpoint`. `folder` is the same on all nodes; its content is removed at the end."""
    place = group.placement
    seen = _seen_everywhere(group, folder)
    if not all(seen):
        blind = group.members[seen.index(False)]["host"]
        raise Unavailable(
            f"{folder.parent} on {blind} is not that of {group.members[0]['host']}: no shared storage"
        )
    victim = place.world_size - 1
    kind = "checkpoint"
    address = group.members[0]["address"]
    started: list[subprocess.Popen[bytes]] = []
    reports: list[dict[str, Any]] = []
    try:
        for attempt in ("first", "resumed"):
            port = group.gather(
                f"{kind}: port of the {attempt} job", free_port(address) if place.rank == 0 else None
            )[0]
            order = {
                "rank": place.rank, "world_size": place.world_size, "device": str(device), "address": address,
                "port": port, "folder": str(folder), "sharded": sharded, "resume": attempt == "resumed",
            }  # fmt: skip
            trainer = _start(order, log.folder, attempt)
            started.append(trainer)
            report = _follow(group, trainer, attempt, place.rank == victim)
            reports.append(report)
            log.event("checkpoint", attempt=attempt, **report)
            log.progress(
                f"{kind}: saved, rank {victim} killed after step {KILLED_AFTER - 1}"
                if attempt == "first"
                else f"{kind}: resumed from step {SAVED_AFTER}"
            )
    finally:
        for trainer in started:
            trainer.kill()
            trainer.wait()
    steps = [str(step) for step in range(SAVED_AFTER, KILLED_AFTER)]
    results = group.gather(
        f"{kind} results",
        {
            "save": reports[0]["save_seconds"],
            "load": reports[1]["load_seconds"],
            "before": [reports[0]["losses"][step] for step in steps],
            "after": [reports[1]["losses"][step] for step in steps],
        },
    )
    row = {
        "folder": str(folder),
        "filesystem": filesystem(folder),
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "save_seconds": max(result["save"] for result in results),
        "load_seconds": max(result["load"] for result in results),
        "step": SAVED_AFTER,
        "killed": victim,
        "losses": results[0]["before"],
        "resumed_losses": results[0]["after"],
    }
    group.barrier(f"{kind}: counted")
    if place.rank == 0:
        shutil.rmtree(folder)
    rate = row["bytes"] / row["save_seconds"] / 1e9
    log.progress(
        f"{kind}: {row['bytes'] / 1e9:.2f} GB at {rate:.2f} GB/s; losses again: {row['resumed_losses']}"
    )
    return row


def _seen_everywhere(group: Group, folder: Path) -> list[bool]:
    """By rank: whether it sees what rank 0 writes beside `folder`."""
    mark = folder.with_name(f"{folder.name}-mark")
    if group.placement.rank == 0:
        mark.write_text("")
    group.barrier("checkpoint: folder")
    os.listdir(folder.parent)  # so that a network file system looks anew
    seen = group.gather("checkpoint: folder seen", mark.exists())
    if group.placement.rank == 0:
        mark.unlink()
    return [bool(each) for each in seen]


def _start(order: dict[str, Any], folder: Path, attempt: str) -> subprocess.Popen[bytes]:
    """This rank's trainer."""
    name = f"restart-{attempt}-rank-{order['rank']:04d}"
    environment = dict(os.environ)
    if Path(environment.get("NCCL_DEBUG_FILE", "")).parent == folder:  # ours: the trainer would empty it
        environment["NCCL_DEBUG_FILE"] = str(folder / f"{name}-nccl.log")
    with (folder / f"{name}.log").open("wb") as errors:
        return subprocess.Popen(
            child.command("restart", "train", order),
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip


def _follow(group: Group, trainer: subprocess.Popen[bytes], attempt: str, victim: bool) -> dict[str, Any]:
    """What the trainer told, until it ended or the job was broken on purpose."""
    report: dict[str, Any] = {"losses": {}}
    broken = f"checkpoint/{attempt}/killed"
    for line in _lines(group, trainer, broken):
        told = json.loads(line)
        group.step(f"checkpoint: {attempt} job, {next(iter(told))}")
        if "step" in told:
            report["losses"][str(told["step"])] = told["loss"]
        else:
            report.update(told)
        if attempt == "first" and victim and told.get("step") == KILLED_AFTER - 1:
            trainer.send_signal(signal.SIGKILL)
            group.store.set(broken, "")
    trainer.kill()
    status = trainer.wait()
    wanted = KILLED_AFTER - 1
    if str(wanted) not in report["losses"]:
        raise GroupError(
            f"rank {group.placement.rank} on {group.placement.host}: the trainer of the {attempt} job ended "
            f"(status {status}) before step {wanted}: see restart-{attempt}-rank-{group.placement.rank:04d}.log"
        )
    return report


def _lines(group: Group, trainer: subprocess.Popen[bytes], broken: str) -> Iterator[str]:
    """Lines of the trainer until it ends; when the job is broken, until the last step that counts."""
    assert trainer.stdout is not None
    descriptor = trainer.stdout.fileno()
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], POLL_SECONDS)
        if ready:
            read = os.read(descriptor, 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                yield line.decode()
        elif group.store.check([broken]):
            return
        else:
            group.check()


def free_port(address: str) -> int:
    """A port of this node that nobody listens on now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


# The trainer


def train(order: dict[str, Any]) -> None:
    """Train as ordered; tells each step's loss on standard output, one JSON object a line."""
    child.end_with_parent()
    device = torch.device(order["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    store = open_store(order["address"], order["port"], order["rank"] == 0, START_SECONDS)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store, rank=order["rank"], world_size=order["world_size"],
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    ranks = order["world_size"]
    strategy = Strategy("fsdp2", shard=ranks) if order["sharded"] else Strategy("ddp", replicate=ranks)
    trainer = Trainer(strategy, SHAPES[device.type], order["rank"], device)
    step = 0
    if order["resume"]:
        start = time.perf_counter()
        load(trainer, order["folder"])
        tell(load_seconds=time.perf_counter() - start)
        step = SAVED_AFTER
    last = KILLED_AFTER if order["resume"] else MOST_STEPS
    while step < last:
        loss = trainer.step(step).double()
        dist.all_reduce(loss)
        synchronise(device)
        tell(step=step, loss=float(loss) / ranks)
        step += 1
        if step == SAVED_AFTER and not order["resume"]:
            start = time.perf_counter()
            save(trainer, order["folder"])
            tell(save_seconds=time.perf_counter() - start)
    dist.destroy_process_group()


def tell(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def save(trainer: Trainer, folder: str) -> None:
    """Every rank its own share, synced to the storage."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(trainer.model, trainer.optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load(trainer: Trainer, folder: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(trainer.model, trainer.optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(trainer.model, trainer.optimizer, model_state_dict=weights, optim_state_dict=moments)
