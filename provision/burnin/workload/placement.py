"""Which rank this process is, of how many, on which node, where rank 0 waits: from the environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


class PlacementError(Exception):
    """The environment does not tell where this process belongs; the message says what is missing."""


@dataclass(frozen=True)
class Placement:
    """One process's place in the job."""

    launcher: str  # "slurm", "torchrun", "environment" (RANK and friends set by something else) or "alone"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str  # node name
    hosts: tuple[str, ...]  # where each rank is expected, by rank; empty if the launcher does not tell
    master: str  # node name or address of rank 0
    port: int  # 0: any free one, only for a single process
    agent_store: bool = False  # torchrun's agent already serves the store
    job: str | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The expected nodes, each once, in rank order."""
        return tuple(dict.fromkeys(self.hosts))


def read(env: Mapping[str, str], hostname: str, expand_hostlist: Callable[[str], Sequence[str]]) -> Placement:
    """The place that `env` describes.

    torchrun wins over Slurm, because `srun torchrun` sets both and torchrun's ranks are the real ones.
    `expand_hostlist` turns `gpu-[1-2]` into names (on a node: `scontrol show hostnames`).
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env, hostname)
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return _from_slurm(env, hostname, expand_hostlist)
    return Placement("alone", 0, 1, 0, 1, hostname, (hostname,), "127.0.0.1", 0)


def _from_torchrun(env: Mapping[str, str], hostname: str) -> Placement:
    world_size = _integer(env, "WORLD_SIZE")
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
    return Placement(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment",
        rank=_integer(env, "RANK"),
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        local_world_size=local_world_size,
        host=env.get("NODE_NAME", hostname),
        hosts=(env.get("NODE_NAME", hostname),) * world_size if local_world_size == world_size else (),
        master=_text(env, "MASTER_ADDR"),
        port=_integer(env, "MASTER_PORT"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=env.get("SLURM_JOB_ID"),
    )


def _from_slurm(
    env: Mapping[str, str], hostname: str, expand_hostlist: Callable[[str], Sequence[str]]
) -> Placement:
    nodes = list(expand_hostlist(_text(env, "SLURM_STEP_NODELIST")))
    counts = tasks_per_node(_text(env, "SLURM_STEP_TASKS_PER_NODE"))
    if len(nodes) != len(counts):
        raise PlacementError(
            f"SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']} has {len(nodes)} nodes, "
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']} has {len(counts)}"
        )
    job = _text(env, "SLURM_JOB_ID")
    local_index = _integer(env, "SLURM_NODEID")
    if local_index >= len(nodes):
        raise PlacementError(f"SLURM_NODEID={local_index}, but the step has {len(nodes)} nodes: {nodes}")
    return Placement(
        launcher="slurm",
        rank=_integer(env, "SLURM_PROCID"),
        world_size=_integer(env, "SLURM_NTASKS"),
        local_rank=_integer(env, "SLURM_LOCALID"),
        local_world_size=counts[local_index],
        host=env.get("SLURMD_NODENAME", hostname),
        hosts=tuple(node for node, count in zip(nodes, counts) for _ in range(count)),
        master=nodes[0],
        # Below the range of ports that the kernel hands out, and another one for each job on a shared node.
        port=int(env.get("MASTER_PORT", 20000 + int(job) % 10000)),
        job=job,
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form `2(x3),1` as `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise PlacementError(f"tasks per node: cannot read {part!r} in {text!r}; expected like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise PlacementError(f"{name} is not set, but the launcher's other variables are")
    return env[name]


def _integer(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not text.isdigit():
        raise PlacementError(f"{name}={text!r} is not a number")
    return int(text)
