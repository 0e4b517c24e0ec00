"""Brings a GPU node to the set that the lock has for its group, and its GPUs to their modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote

from provision.components.fabric import exports as fabric
from provision.components.nvidia import exports, machine
from provision.components.nvidia.operations import (
    PHASES,
    Ensure,
    Exact,
    Install,
    Operation,
    Place,
    Reboot,
    Remove,
    Skip,
    Stop,
    Unit,
    Write,
)
from provision.components.nvidia.settings import NvidiaSettings
from provision.components.slurm import exports as slurm
from provision.engine import facts, ops
from provision.engine.deploy import Context, step
from provision.engine.record import OperationFailed
from provision.profiles.packaging import BUILD_LOG

_JOBS_LIMIT = 60  # seconds for jobs to end on a node that takes no new ones


@step("worker", after=[("fabric", "self")])  # its modules are built against the RDMA stack
def worker(on: Context) -> None:
    """Driver, modules, daemons, modes, CUDA: one phase after another, each from what the node says by then."""
    lock = exports.set_of(on.site, on.lock, on.node)
    if on.node.gpu is None:
        ops.skip("NVIDIA's software", f"{on.node.name} has no GPU in the site file")
        return
    if lock is None:
        raise OperationFailed(
            "lock",
            f"nothing is locked for group {on.node.group}: no node of it answered when that was resolved",
            f"provision lock {on.site.path}",
        )
    if lock.distribution != on.profile.key:
        raise OperationFailed(
            "lock",
            f"{on.node.name} is {on.profile.key}, and the set of group {on.node.group} is for {lock.distribution}",
            "make a group of its own for it, then `provision lock`",
        )
    chosen = exports.Chosen.of(lock)
    settings = on.settings(NvidiaSettings)
    peermem = on.site.enabled("fabric") and fabric.settings(on.site, on.node).peer_memory == "nvidia-peermem"
    before = _machine()
    changes = before.loaded is not None and before.loaded.version != lock.driver
    with drained(on, f"driver {before.loaded.version if before.loaded else ''} -> {lock.driver}", changes):
        for phase in PHASES:
            at = Place(on.node, settings, chosen, _machine(), on.limits, on.profile.manager, peermem)
            for operation in phase(at):
                perform(on, operation)


def _machine() -> machine.Machine:
    """What the node says now."""
    answer = facts.read(machine.QUERY)
    try:
        return machine.parse_machine(answer.stdout)
    except ValueError as error:
        raise OperationFailed("kernel and driver", str(error)) from error


def perform(on: Context, operation: Operation) -> None:
    """Do it on this node. Raises OperationFailed."""
    match operation:
        case Install(names):
            ops.packages(*names)
        case Exact(title, wanted):
            with _build_explained():
                ops.ensure(
                    title,
                    test=on.profile.manager.exact(wanted),
                    make=on.profile.manager.make_exact(wanted),
                    timeout=3600,
                )
        case Write(path, content, mode):
            ops.file(path, content, mode=mode)
        case Remove(path):
            ops.absent(path)
        case Ensure(title, test, make, timeout):
            with _build_explained():
                ops.ensure(title, test=test, make=make, timeout=timeout)
        case Unit(name, reads, running):
            ops.unit(name, reads=reads, running=running)
        case Skip(title, reason):
            ops.skip(title, reason)
        case Reboot(reason):
            on.reboot(reason)
        case Stop(title, reason, advice):
            raise OperationFailed(title, reason, advice)


@contextmanager
def _build_explained() -> Iterator[None]:
    """Name the line of the build log that tells why a kernel module did not build."""
    try:
        yield
    except OperationFailed as failed:
        log = facts.text(BUILD_LOG)
        found = machine.build_error(log) if log is not None else None
        if found is None:
            raise
        outcome = failed.detail.strip().splitlines()[-1]
        raise OperationFailed(
            failed.title,
            f"{BUILD_LOG}:{found[0]}: {found[1]}; {outcome}",
            "do the headers fit the kernel, and does this driver build with it? the packages are as they were",
        ) from failed


@contextmanager
def drained(on: Context, reason: str, changes: bool) -> Iterator[None]:
    """While the driver is changed no job runs here, and none begins; only our own drain is undone."""
    node = quote(on.node.name)
    ours = f"{slurm.MARK} {reason}"
    in_slurm = changes and on.site.enabled("slurm") and facts.read("systemctl is-active slurmd").ok
    if not in_slurm:
        yield
        return
    ops.ensure(
        f"{on.node.name} takes no jobs",
        test=f"sinfo -h -n {node} -o %T | grep -Eq 'drain|down' || exit 1",
        make=f"scontrol update nodename={node} state=drain reason={quote(ours)}",
    )
    idle = f'j=$(squeue -h -w {node} -o %i) && [ -z "$j" ] || {{ echo "jobs $j still run" >&2; false; }}'
    ops.wait("its jobs have ended", test=idle, timeout=_JOBS_LIMIT)
    yield
    if on.reboot_reasons:
        return  # it is open again once it has come back and runs the new driver
    ops.ensure(
        f"{on.node.name} takes jobs again",
        test=f"sinfo -h -n {node} -o %E | grep -qxF {quote(ours)} && exit 1; exit 0",
        make=f"scontrol update nodename={node} state=resume",
    )
