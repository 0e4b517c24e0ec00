"""The command line and the order of things: join, collectives, compute, training, result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from . import FORMAT, collectives, compute, network, placement, training
from .document import RankLog, write_json
from .group import Group, GroupError, Missing, writer

LEVELS = ("quick",)
COMPUTE_SECONDS = {"cpu": 1.0, "cuda": 10.0}


class Stopped(Exception):
    """A signal asked this rank to stop."""


def main(arguments: list[str]) -> int:
    """Run one rank. Exit status 0: all ran and every bit was right; 1: not so; 2: wrong input."""
    options = _parse(arguments)
    try:
        place = placement.read(os.environ, socket.gethostname(), _expand_hostlist)
        given = json.loads(options.addresses.read_text()) if options.addresses else {}
        device = _device(options.device, place)
    except (placement.PlacementError, OSError, ValueError) as error:
        print(f"burn-in: {error}", file=sys.stderr)
        return 2
    run = Run(options, place, given, device)
    return run.all()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="burn-in",
        description="Collectives, matrix products and a training job, every result checked.",
        epilog="example: torchrun --nproc-per-node 8 burnin.pyz --out result.json",
    )
    parser.add_argument("--out", type=Path, default=Path("burnin.json"), help="result document (JSON)")
    parser.add_argument("--raw", type=Path, help="folder of the ranks' own lines (default: beside --out)")
    parser.add_argument("--level", choices=LEVELS, default="quick")
    parser.add_argument("--minutes", type=float, default=0.0, help="train for at least this long")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--addresses", type=Path, help='JSON file {"node": "address"} of the cluster network')
    parser.add_argument("--timeout", type=float, default=120.0, help="longest time for one step, seconds")
    parser.add_argument("--join-timeout", type=float, default=120.0, help="longest wait for all ranks, s")
    parser.add_argument(
        "--inject",
        metavar="FAULT:RANK",
        type=_fault,
        help="prove that a fault is found: flip-bit (of the averaged gradient) or wrong-element (received)",
    )
    options = parser.parse_args(arguments)
    options.raw = options.raw or options.out.parent
    return options


def _fault(text: str) -> tuple[str, int]:
    kind, _, rank = text.partition(":")
    if kind not in ("flip-bit", "wrong-element") or not rank.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected flip-bit:RANK or wrong-element:RANK")
    return kind, int(rank)


def _expand_hostlist(text: str) -> list[str]:
    """Slurm's own expansion; the nodes have no other library that knows all of its forms."""
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=30, check=False
    )
    if answer.returncode != 0:
        raise placement.PlacementError(f"scontrol show hostnames {text}: {answer.stderr.strip()}")
    return answer.stdout.split()


def _device(wanted: str, place: placement.Placement) -> Any:
    """This rank's device. Never the CPU in place of a GPU that was asked for."""
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if not count:
        if wanted == "cuda":
            raise placement.PlacementError(
                f"{place.host}: torch {torch.__version__} sees no CUDA device (built for CUDA "
                f"{torch.version.cuda}); is the driver loaded, and did the job ask for GPUs?"
            )
        return torch.device("cpu")
    if 1 < count < place.local_world_size:
        raise placement.PlacementError(
            f"{place.host}: {place.local_world_size} ranks, but torch sees {count} GPUs"
        )
    # Slurm can show each rank only its own GPU, which then is number 0.
    return torch.device("cuda", 0 if count == 1 else place.local_rank)


class Run:
    """One rank's run, and the document that grows with it (the same on every rank)."""

    def __init__(
        self, options: argparse.Namespace, place: placement.Placement, given: dict[str, str], device: Any
    ) -> None:
        self.options = options
        self.place = place
        self.given = given
        self.device = device
        self.log = RankLog(options.raw, place.rank)
        self.group: Group | None = None
        self.document: dict[str, Any] = {
            "format": FORMAT,
            "complete": False,
            "failure": None,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "job": place.job,
            "launcher": place.launcher,
            "level": options.level,
            "world_size": place.world_size,
            "nodes": list(place.nodes),
            "backend": "nccl" if device.type == "cuda" else "gloo",
            "device": device.type,
            "injected": "{}:{}".format(*options.inject) if options.inject else None,
            "software": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
            },
            "environment": {},
            "ranks": [],
            "collectives": [],
            "compute": [],
            "training": None,
        }

    def all(self) -> int:
        """Everything, in order; whatever happens, a document says so."""
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        self.log.event("start", pid=os.getpid(), host=self.place.host, rank=self.place.rank)
        try:
            self._join()
            self._measure()
            self.document["complete"] = True
            self._write()
            assert self.group is not None
            self.group.barrier("end")
            self.group.end()
            dist.destroy_process_group()
        except GroupError as error:
            self._fail(error)
            return self._leave()
        except Stopped as error:
            self._fail(GroupError(f"rank {self.place.rank} on {self.place.host} was stopped: {error}"))
            return self._leave()
        except (RuntimeError, OSError, network.NetworkError) as error:
            text = f"{type(error).__name__}: {error}"
            self._tell_others(text)
            own = Missing(self.place.rank, self.place.host, text)
            self._fail(GroupError(f"rank {own.rank} on {own.host}: {text}", (own,)))
            return self._leave()
        wrong = wrong_bits(self.document)
        self.log.progress(f"done; {wrong or 'every bit was right'}")
        return 1 if wrong else 0

    def _join(self) -> None:
        place, device = self.place, self.device
        others = [node for node in place.nodes if node != place.host]
        if not place.hosts and place.master not in (place.host, "localhost", "127.0.0.1"):
            others = [place.master]
        address, interface = network.cluster_address(place.host, others, self.given, network.held_addresses())
        backend = self.document["backend"]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic
            torch.backends.cuda.matmul.allow_tf32 = False
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
        self.document["environment"] = {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE", "TORCH_NCCL_"))
        }
        me = {
            "rank": place.rank,
            "host": place.host,
            "local_rank": place.local_rank,
            "pid": os.getpid(),
            "address": address,
            "interface": interface,
            "gpu": _gpu(device) if device.type == "cuda" else None,
        }
        self.log.progress(
            f"waiting for {_ranks(place.world_size)} on {', '.join(place.nodes) or 'all nodes'}"
        )
        self.group = Group(
            place,
            self.given.get(place.master, place.master),
            me,
            timeout=self.options.timeout,
            join_timeout=self.options.join_timeout,
            on_loss=self._fail,
        )
        self.document["ranks"] = self.group.members
        self.document["nodes"] = list(dict.fromkeys(member["host"] for member in self.group.members))
        with self.group.collective(f"start of {backend}"):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("process-group", self.group.store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=self.options.timeout),
                device_id=device if device.type == "cuda" else None,
            )
        self.log.progress(
            f"{_ranks(place.world_size)} on {', '.join(self.document['nodes'])}: {backend} over {interface}"
        )

    def _measure(self) -> None:
        group, inject = self.group, self.options.inject
        assert group is not None
        faults = {inject[0]: inject[1]} if inject else {}
        if self.place.world_size > 1:
            fitting = [tuple(s) for s in group.gather("sizes", collectives.sizes_that_fit(self.device))]
            for row in collectives.measure(
                group, self.log, self.device, min(fitting, key=len), faults.get("wrong-element")
            ):
                self.document["collectives"].append(row)
        else:
            self.log.progress("a single rank: no collectives to measure")
        self.document["compute"] = compute.measure(
            group, self.log, self.device, COMPUTE_SECONDS[self.device.type]
        )
        self.document["training"] = training.train(
            group, self.log, self.device, self.options.minutes * 60, faults.get("flip-bit")
        )

    def _tell_others(self, text: str) -> None:
        if self.group is not None:
            self.group.failed(text)

    def _fail(self, error: GroupError) -> None:
        """Say what went wrong: every rank in its own lines, one of those that are left in the document."""
        self.log.trouble(error.message)
        self.document["complete"] = False
        self.document["failure"] = {
            "message": error.message,
            "missing": [vars(missing) for missing in error.missing],
            "reported_by": self.place.rank,
        }
        if self.place.rank == writer(self.place.world_size, error.missing):
            self._write()

    def _write(self) -> None:
        if self.place.rank == 0 or self.document["failure"]:
            self.document["seconds"] = round(self.log.seconds, 3)
            write_json(self.options.out, self.document)

    def _leave(self) -> int:
        """End a rank whose group is lost: torch's own clean-up would wait for the others."""
        if self.group is not None:
            self.group.leave()
        sys.stderr.flush()
        os._exit(1)


def _gpu(device: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "memory_bytes": properties.total_memory,
    }


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


def wrong_bits(document: dict[str, Any]) -> str:
    """What was wrong in the results themselves, in words; empty if nothing was."""
    found = []
    elements = sum(sum(row["wrong"]) for row in document["collectives"])
    if elements:
        found.append(f"{elements} wrong elements in collectives")
    if any(not row["relative_error"] <= row["tolerance"] for row in document["compute"]):
        found.append("a wrong matrix product")
    trained = document["training"]
    if trained["disagreements"]:
        found.append("gradients that differ between ranks")
    if any(not error <= trained["reference_tolerance"] for error in trained["reference_error"]):
        found.append("gradients that differ from those of one process")
    return ", ".join(found)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
