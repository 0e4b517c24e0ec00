"""The command line and the order of things: join, measure part by part, write the result."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from . import (
    FORMAT,
    checksums,
    collectives,
    compute,
    copies,
    hosts,
    nccl_log,
    network,
    pairs,
    placement,
    replicas,
    restart,
    rotation,
    strategies,
    tools,
)
from .device import release
from .document import RankLog, last_trouble, write_json
from .group import Group, GroupError, Missing, writer
from .kernel import Messages
from .levels import LEVELS, plan
from .telemetry import Telemetry, bare

PARTS = (
    "collectives", "pairs", "compute", "copies", "replicas", "rotation", "strategies", "checkpoint", "tools",
)  # fmt: skip

MOST_LETTERS = 300  # of an error in the document; the rank's own lines have all of it


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
    parser.add_argument("--minutes", type=float, help="about how long (default: as long as the level takes)")
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, metavar="PART,PART", help=f"only these of {', '.join(PARTS)}"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--addresses", type=Path, help='JSON file {"node": "address"} of the cluster network')
    parser.add_argument("--timeout", type=float, default=120.0, help="longest time for one step, seconds")
    parser.add_argument("--join-timeout", type=float, default=120.0, help="longest wait for all ranks, s")
    parser.add_argument(
        "--inject",
        metavar="FAULT:RANK",
        type=_fault,
        help="prove that a fault is found: flip-bit (of the averaged gradient), wrong-element (received) or "
        "wrong-gpu (computes its gradients wrongly)",
    )
    options = parser.parse_args(arguments)
    options.raw = options.raw or options.out.parent
    return options


def _fault(text: str) -> tuple[str, int]:
    kind, _, rank = text.partition(":")
    if kind not in ("flip-bit", "wrong-element", "wrong-gpu") or not rank.isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected flip-bit:RANK, wrong-element:RANK or wrong-gpu:RANK"
        )
    return kind, int(rank)


def _parts(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    return wanted


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
        self.level = plan(options.level, options.minutes, device.type)
        self.log.expected_seconds = self.level.seconds
        self.group: Group | None = None
        self.telemetry: Telemetry | None = None
        self.messages: Messages | None = None
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
            "pairs": [],
            "copies": [],
            "training_runs": [],
            "checkpoint": None,
            "rotations": [],
            "transports": [],
            "telemetry": [],
            "kernel": [],
            "tools": [],
            "hosts": [],
            "phases": [],
            "skipped": [],
        }

    def all(self) -> int:
        """Everything, in order; whatever happens, a document says so."""
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        self._crash = (self.log.folder / f"rank-{self.place.rank:04d}.crash").open("w")
        faulthandler.enable(self._crash)  # a crash in native code leaves at least where it was
        self.log.event("start", pid=os.getpid(), host=self.place.host, rank=self.place.rank)
        if self.place.rank == 0:
            self.options.out.unlink(missing_ok=True)  # that of an earlier run
        try:
            self._join()
            self._measure()
            self._collect()
            self.document["complete"] = True
            self._write()
            assert self.group is not None
            self.group.barrier("end")
            self.group.end()
            dist.destroy_process_group()
            faulthandler.disable()
            self._crash.close()
            Path(self._crash.name).unlink()
        except GroupError as error:
            self._fail(error)
            return self._leave()
        except Stopped as error:
            self._fail(GroupError(f"rank {self.place.rank} on {self.place.host} was stopped: {error}"))
            return self._leave()
        except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it was
            self.log.event("traceback", text=traceback.format_exc())
            text = textwrap.shorten(f"{type(error).__name__}: {error}", MOST_LETTERS)
            self._tell_others(text)
            own = Missing(self.place.rank, self.place.host, text)
            self._fail(GroupError(f"rank {own.rank} on {own.host}: {text}", (own,)))
            return self._leave()
        wrong = wrong_bits(self.document)
        self.log.progress(f"done; {wrong or 'every bit was right'}")
        return 1 if wrong else 0

    def _join(self) -> None:
        place, device = self.place, self.device
        cuda = device.type == "cuda"
        node = hosts.row(place.host, cuda) if place.local_rank == 0 else None  # before CUDA starts here
        others = [name for name in place.nodes if name != place.host]
        if not place.hosts and place.master not in (place.host, "localhost", "127.0.0.1"):
            others = [place.master]
        held = network.held_addresses()
        if place.rank == 0 and place.local_world_size < place.world_size:
            network.check_master(place.host, self.given.get(place.master, place.master), held)
        address, interface = network.cluster_address(place.host, others, self.given, held)
        backend = self.document["backend"]
        configured = network.nccl_configuration(os.environ)
        self._set_environment(interface, configured)
        if cuda:
            torch.cuda.set_device(device)
            torch.backends.cuda.matmul.allow_tf32 = False
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
        self.document["environment"] = {
            name: value
            for name, value in sorted((configured | os.environ).items())
            if name.startswith(("NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE", "TORCH_NCCL_"))
        }
        me = {
            "rank": place.rank,
            "host": place.host,
            "local_rank": place.local_rank,
            "pid": os.getpid(),
            "address": address,
            "interface": interface,
            "gpu": _gpu(device) if cuda else None,
        }
        if place.local_rank == 0:
            path = self.log.folder / f"telemetry-{place.host}.jsonl"
            self.telemetry = Telemetry(path, self.log.start, interface, cuda)
            self.messages = Messages()
        self.log.progress(
            f"waiting for {_ranks(place.world_size)} on {', '.join(place.nodes) or 'all nodes'}"
        )
        self.group = group = Group(
            place,
            self.given.get(place.master, place.master),
            me,
            timeout=self.options.timeout,
            join_timeout=self.options.join_timeout,
            on_loss=self._fail,
            heard=lambda rank: last_trouble(self.log.folder, rank),
        )
        if node:
            peers = {member["host"]: member["address"] for member in group.members}
            del peers[place.host]
            node["networks"] = network.held_networks()
            node["odd_routes"] = network.odd_routes(address, peers, held)
        self.document["ranks"] = group.members
        self.document["nodes"] = list(dict.fromkeys(member["host"] for member in group.members))
        self.document["hosts"] = [row for row in group.gather("nodes", node) if row]
        for row in self.document["hosts"]:
            row["busy"] = hosts.others(row, group.members)
        with group.collective(f"start of {backend}"):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("process-group", group.store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=self.options.timeout),
                device_id=device if cuda else None,
            )
        self.log.progress(
            f"{_ranks(place.world_size)} on {', '.join(self.document['nodes'])}: {backend} over {interface}"
        )

    def _set_environment(self, interface: str, configured: Mapping[str, str]) -> None:
        """What the job needs; whatever the machine or a person has set, or `configured`, stays as it is."""
        wanted = {"GLOO_SOCKET_IFNAME": interface}
        if interface != "lo":
            wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
        if self.device.type == "cuda":
            wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS is not deterministic
            wanted["NCCL_DEBUG"] = "INFO"
            # A line for each call (TUNING) is too much for hours.
            wanted["NCCL_DEBUG_SUBSYS"] = "INIT,ENV,NET" + ("" if self.level.name == "soak" else ",TUNING")
            wanted["NCCL_DEBUG_FILE"] = str(self.log.folder / f"nccl-{self.place.rank:04d}.log")
        for name, value in wanted.items():
            if name not in configured:
                os.environ.setdefault(name, value)

    def _measure(self) -> None:
        """Every part that was asked for, in an order that is the same on all ranks."""
        inject = self.options.inject
        faults = {inject[0]: inject[1]} if inject else {}
        level, log, device, document = self.level, self.log, self.device, self.document
        group = self.group
        assert group is not None
        several = self.place.world_size > 1
        if self._begin("collectives", several):
            fitting = group.gather("sizes", collectives.sizes_that_fit(device, level.sizes))
            sizes = min((tuple(each) for each in fitting), key=len)
            wrong = faults.get("wrong-element")
            for row in collectives.measure(group, log, device, sizes, level.collectives, wrong):
                document["skipped" if "what" in row else "collectives"].append(row)
            self._read_transports()  # now: what comes later may fail for what they tell
            release(device)
        if self._begin("pairs", several):
            document["pairs"] = pairs.measure(group, log, device)
        if self._begin("compute"):
            document["compute"], skipped = compute.measure(group, log, device, level.compute, level.thorough)
            document["skipped"] += skipped
        if self._begin("copies"):
            document["copies"], skipped = copies.measure(group, log, device)
            document["skipped"] += skipped
        if self._begin("replicas"):
            document["training"] = replicas.train(group, log, device, level.replicas, faults.get("flip-bit"))
        if self._begin("rotation"):
            document["rotations"] = rotation.measure(
                group, log, device, level.rotations, faults.get("wrong-gpu")
            )
        if self._begin("strategies"):
            document["training_runs"], skipped = strategies.measure(
                group, log, device, level.strategies, level.thorough, document["collectives"]
            )
            document["skipped"] += skipped
        if self._begin("checkpoint", level.thorough):
            folder = self.options.out.resolve().parent / f"checkpoint-{self.options.out.stem}"
            sharded = strategies.lacks_sharding(device) is None
            try:
                document["checkpoint"] = restart.measure(group, log, device, folder, sharded)
            except strategies.Unavailable as error:
                document["skipped"].append({"what": "checkpoint", "why": str(error), "host": None})
        if self._begin("tools", level.thorough):
            document["tools"] = tools.measure(group, log.folder, self.options.out.resolve().parent)
        self._end_phase()
        if not document["transports"]:
            self._read_transports()

    def _begin(self, part: str, applies: bool = True) -> bool:
        """Whether to run a part; if so its time starts, and that of the one before ends."""
        self._end_phase()
        if part not in self.options.parts:
            why = "not asked for"
        elif not applies:
            why = (
                "a single rank"
                if self.place.world_size == 1 and part in ("collectives", "pairs")
                else (f"not part of the level {self.level.name}")
            )
        else:
            self.document["phases"].append({"name": part, "start": round(self.log.seconds, 3), "end": None})
            return True
        self.document["skipped"].append({"what": part, "why": why, "host": None})
        return False

    def _end_phase(self) -> None:
        phases = self.document["phases"]
        if phases and phases[-1]["end"] is None:
            phases[-1]["end"] = round(self.log.seconds, 3)

    def _collect(self) -> None:
        """What the nodes and NCCL said meanwhile."""
        group, place = self.group, self.place
        assert group is not None
        own: dict[str, Any] = {"series": [], "kernel": None, "skipped": None}
        if self.telemetry and self.messages:
            self.telemetry.stop()
            ranks = {
                bare(member["gpu"]["uuid"]): member["rank"]
                for member in group.members
                if member["host"] == place.host and member["gpu"]
            }
            own["series"] = self.telemetry.series(place.host, ranks)
            own["skipped"] = self.telemetry.skipped
            own["kernel"] = self.messages.row(place.host)
        for member, answer in zip(group.members, group.gather("telemetry", own)):
            self.document["telemetry"] += answer["series"]
            self.document["kernel"] += [answer["kernel"]] if answer["kernel"] else []
            if answer["skipped"]:
                row = {"what": "readings of the GPUs", "why": answer["skipped"], "host": member["host"]}
                self.document["skipped"].append(row)

    def _read_transports(self) -> None:
        if self.device.type == "cuda" and self.group is not None:
            self.document["transports"] = self.group.gather("NCCL's logs", self._transport())

    def _transport(self) -> dict[str, Any]:
        rank, ranks = self.place.rank, self.place.world_size
        path = (
            os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
        )
        try:
            text = Path(path).read_text(errors="replace")
        except OSError as error:
            return nccl_log.unread(rank, f"{path}: {error.strerror}")
        return nccl_log.transport(text, rank, ranks)

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
        self._end_phase()
        if self.place.rank and self.options.out.exists():
            return  # rank 0 knows more: this rank may only not have reached it
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
        "bus": copies.pci_address(device),
        "numa_node": copies.gpu_node(device),
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
    if trained and trained["disagreements"]:
        found.append("gradients that differ between ranks")
    if trained and any(not error <= trained["reference_tolerance"] for error in trained["reference_error"]):
        found.append("gradients that differ from those of one process")
    moved = sum(row["wrong"] for row in (*document["copies"], *document["pairs"]))
    if moved:
        found.append(f"{moved} wrong elements in copies")
    if any(row["differing_products"] for row in document["compute"]):
        found.append("matrix products that differ from one time to the next")
    if checksums.odd_gpus(document["rotations"]).ranks:
        found.append("gradients that differ between GPUs")
    return ", ".join(found)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
