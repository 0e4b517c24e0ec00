"""RDMA on workers before their driver is built, whose modules need the stack; a subnet manager where none runs."""

from __future__ import annotations

from provision.components.fabric import doca, exports, roce
from provision.components.fabric.settings import FabricSettings
from provision.components.nvidia.deploy import drained, perform
from provision.engine import facts, ops
from provision.engine.deploy import Context, step
from provision.engine.record import OperationFailed
from provision.tune.wiring import GIDS


@step("head")
def head(on: Context) -> None:
    """The subnet manager, once in the fabric."""
    if not on.first_head or not on.settings(FabricSettings).subnet_manager:
        return
    ops.packages(*on.profile.packages("opensm"))
    if (reason := on.limited("module:ib_umad")) is not None:
        ops.skip("subnet manager", reason)
    else:
        ops.unit(on.profile.unit("opensm"))


@step("worker")
def worker(on: Context) -> None:
    """The RDMA stack, its modules, what NCCL is told, and the way between GPUs and adapters."""
    wanted = on.settings(FabricSettings)
    if wanted.doca is not None:
        _doca(on, wanted)
    if exports.rdma(on.site):
        ops.packages(*on.profile.packages("rdma"))
        text = exports.modules(on.site)
        ops.file(exports.MODULES, text)
        for name in text.split():
            if (reason := on.limited(f"module:{name}")) is not None:
                ops.skip(f"module {name}", reason)
            else:
                ops.ensure(
                    f"module {name}",
                    test=f"[ -d /sys/module/{name} ] || exit 1",
                    make=f"modprobe {name}",
                )
    else:
        ops.absent(exports.MODULES)
    _roce(on, wanted)
    ops.file(exports.NCCL, exports.nccl_conf(on.site, on.node, _gid_index(on, wanted)))
    _iommu(on, wanted)
    _acs(on, wanted)


def _doca(on: Context, wanted: FabricSettings) -> None:
    """NVIDIA's RDMA stack in place of the kernel's and the distribution's."""
    assert wanted.doca is not None
    if (reason := on.limited("module:mlx5_core")) is not None:
        ops.skip(f"DOCA {wanted.doca.version}", reason)
        return
    try:
        at = doca.place(
            facts.read(doca.QUERY).stdout,
            on.profile.key,
            wanted.doca,
            on.profile.manager,
            peermem=wanted.peer_memory == "nvidia-peermem" and on.node.gpu is not None,
        )
    except ValueError as error:
        raise OperationFailed("kernel and RDMA stack", str(error)) from error
    todo = list(doca.operations(at))
    with drained(on, f"DOCA {wanted.doca.version}", changes=at.changes and not doca.stopped(todo)):
        for operation in todo:
            perform(on, operation)


def _roce(on: Context, wanted: FabricSettings) -> None:
    unit = f"/etc/systemd/system/{roce.UNIT}"
    if exports.kind(on.site) != "roce":
        if facts.read(f"[ -e {unit} ]").ok:
            ops.unit(roce.UNIT, running=False, enabled=False)
        ops.absent(unit)
        ops.absent(roce.SCRIPT)
        return
    if (reason := on.limited("module:mlx5_core")) is not None:
        ops.skip("RoCE's settings of the adapters", reason)
        return
    ops.file(roce.SCRIPT, roce.script(wanted), mode="755")
    ops.file(unit, roce.unit())
    ops.unit(roce.UNIT, reads=[unit, roce.SCRIPT])


def _gid_index(on: Context, wanted: FabricSettings) -> int | None:
    """The one that the node's adapters have in common."""
    if exports.kind(on.site) != "roce":
        return None
    answer = facts.read(GIDS)
    try:
        return roce.gid_index(wanted, answer.stdout)
    except ValueError as error:
        raise OperationFailed("GIDs of the adapters", str(error)) from error


def _iommu(on: Context, wanted: FabricSettings) -> None:
    parameters = exports.iommu_parameters(wanted)
    if "kernel-parameters" not in on.profile.paths:
        if parameters:
            ops.skip(
                "IOMMU", f"{on.profile.key} has no folder for it: grubby --args='{' '.join(parameters)}'"
            )
        return
    path = on.profile.path("kernel-parameters")
    if not parameters:
        if ops.absent(path):
            ops.ensure(
                "kernel parameters at the next boot",
                test="! grep -Eq '(intel_|amd_)?iommu=(off|pt)' /boot/grub/grub.cfg || exit 1",
                make="update-grub",
            )
        return
    if (reason := on.limited("kernel")) is not None:
        ops.skip("IOMMU", reason)
        return
    line = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {" ".join(parameters)}"\n'
    ops.file(path, line)
    ops.ensure(
        "kernel parameters at the next boot",
        test=f"[ /boot/grub/grub.cfg -nt {path} ] || exit 1",
        make="update-grub",
    )
    running = facts.read("cat /proc/cmdline").stdout.split()
    if any(parameter not in running for parameter in parameters):
        on.reboot(f"kernel parameters {' '.join(parameters)}")


def _acs(on: Context, wanted: FabricSettings) -> None:
    unit = f"/etc/systemd/system/{exports.ACS_UNIT}"
    if wanted.acs == "keep":
        if facts.read(f"[ -e {unit} ]").ok:
            ops.unit(exports.ACS_UNIT, running=False, enabled=False)
        ops.absent(unit)
        ops.absent(exports.ACS)
        return
    if (reason := on.limited("module:*")) is not None:
        ops.skip("ACS redirect off", reason)
        return
    ops.file(exports.ACS, exports.acs_script(), mode="755")
    ops.file(unit, exports.acs_unit())
    ops.unit(exports.ACS_UNIT, reads=[unit, exports.ACS])
