"""Are the adapters that NCCL is told of there, active and no switch's, and is it told what the site file says?"""

from __future__ import annotations

from shlex import quote

from provision.components.fabric import exports, roce
from provision.components.fabric.settings import FabricSettings
from provision.profiles.doca import doca
from provision.report.model import Verdict
from provision.tune.wiring import GIDS
from provision.verify.check import Found, Target, check, skip, unknown

_FOLDER = "/sys/class/infiniband"


@check("nccl-configuration", role="worker")
def nccl_configuration(at: Target) -> Found:
    """NCCL's defaults are those of the site file."""
    answer = at.host.run(f"cat {exports.NCCL}")
    if answer.rc != 0:
        if "No such file" in answer.stderr:
            return Found(
                Verdict.FAIL, "not there", exports.NCCL, "run `provision apply`", source=exports.NCCL
            )
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source=exports.NCCL)
    read = [line for line in answer.stdout.splitlines() if line and not line.startswith("#")]
    index = None
    if exports.kind(at.site) == "roce":
        table = at.host.run(f"sh -c {quote(GIDS)}")
        try:
            index = roce.gid_index(at.settings(FabricSettings), table.stdout) if table.rc == 0 else None
        except ValueError as error:
            return unknown(str(error), source=_FOLDER)
        if table.rc != 0:
            return unknown(table.stderr.strip() or f"exit {table.rc}", source=_FOLDER)
    wanted = exports.nccl_conf(at.site, at.node, index).splitlines()
    return Found(
        Verdict.PASS if read == wanted else Verdict.FAIL,
        "; ".join(read) or "nothing",
        "; ".join(wanted) or "nothing",
        None if read == wanted else "run `provision apply`",
        source=exports.NCCL,
    )


@check("rdma-adapters", role="worker", limit="module:ib_umad")
def adapters(at: Target) -> Found:
    """Every adapter that is named is there and has a link; none of them is the bridge of an NVSwitch."""
    wanted = at.settings(FabricSettings).hcas
    if not exports.rdma(at.site) or not wanted:
        return skip("the site file names no RDMA adapters")
    states: dict[str, str] = {}
    for name in wanted:
        adapter, _, port = name.partition(":")
        folder = quote(f"{_FOLDER}/{adapter}")
        answer = at.host.run(
            f"test -d {_FOLDER} || exit 2; test -d {folder} || exit 1; cat {folder}/ports/{port or '1'}/state && "
            f"if grep -aq SW_MNG {folder}/device/vpd; then echo switch; else [ $? -le 2 ]; fi"
        )
        if answer.rc not in (0, 1):
            return unknown(answer.stderr.strip() or f"{_FOLDER} is not there: no RDMA stack", source=_FOLDER)
        states[name] = "missing" if answer.rc == 1 else " ".join(answer.stdout.split())
    return judge_adapters(states)


def judge_adapters(states: dict[str, str]) -> Found:
    """Adapter -> what sysfs says of its port ("4: ACTIVE"), "switch" behind it for an NVSwitch's bridge."""
    wrong = {
        name: "belongs to an NVSwitch" if "switch" in state else state
        for name, state in states.items()
        if "switch" in state or "ACTIVE" not in state
    }
    return Found(
        Verdict.FAIL if wrong else Verdict.PASS,
        ", ".join(f"{name} {wrong.get(name, state)}" for name, state in states.items()),
        "all of them active",
        "ibstat; look at cable and switch, or take it out of fabric.hcas" if wrong else None,
        source=_FOLDER,
    )


@check("peer-memory", role="worker", limit="module:nvidia")
def peer_memory(at: Target) -> Found:
    """Adapters reach the GPUs' memory, not only a module of that name is loaded."""
    if not exports.rdma(at.site) or at.node.gpu is None:
        return skip("no RDMA between GPUs here")
    answer = at.host.run("uname -r && cat /proc/modules && head -n 1 /proc/driver/nvidia/version")
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source="/proc/modules")
    kernel, _, rest = answer.stdout.partition("\n")
    return judge_peer_memory(at.settings(FabricSettings).peer_memory, kernel, rest)


def judge_peer_memory(way: str, kernel: str, modules: str) -> Found:
    """`modules`: /proc/modules and the driver's version line. DMA-BUF needs Linux 5.12 and the open modules."""
    if way == "dma-buf":
        numbers = tuple(
            int(part) for part in kernel.split("-")[0].split("+")[0].split(".")[:2] if part.isdigit()
        )
        right = numbers >= (5, 12) and "Open Kernel Module" in modules
        read = f"Linux {kernel}, {'open' if 'Open Kernel Module' in modules else 'proprietary'} modules"
        return Found(
            Verdict.PASS if right else Verdict.FAIL,
            read,
            "DMA-BUF: Linux 5.12 or newer, open modules",
            None if right else "fabric.peer_memory: nvidia-peermem",
            source="/proc/modules",
        )
    users = next((line.split()[3] for line in modules.splitlines() if line.startswith("ib_core ")), None)
    loaded = any(line.startswith("nvidia_peermem ") for line in modules.splitlines())
    right = loaded and users is not None and "nvidia_peermem" in users.split(",")
    return Found(
        Verdict.PASS if right else Verdict.FAIL,
        "not loaded" if not loaded else f"loaded; ib_core is used by {users or 'nobody, or is not loaded'}",
        "nvidia_peermem loaded, a client of ib_core",
        None
        if right
        else "the driver was built before the RDMA stack: dkms install --force nvidia, then reboot",
        source="/proc/modules",
    )


@check("acs-redirect-off", role="worker", limit="module:*")
def acs(at: Target) -> Found:
    """No PCIe bridge sends what GPUs and adapters tell each other up to the root complex."""
    if at.settings(FabricSettings).acs == "keep":
        return skip("the site file leaves it as it is")
    answer = at.host.run(f"sh -c {quote(exports.acs_script())} acs-off check")
    if answer.rc == 1:
        read = "; ".join(answer.stderr.strip().splitlines())
        return Found(
            Verdict.FAIL, read, "no redirect", f"systemctl restart {exports.ACS_UNIT}", source="setpci"
        )
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source="setpci")
    return Found(Verdict.PASS, "no bridge redirects", "no redirect", source="setpci")


@check("roce", role="worker", limit="module:mlx5_core")
def roce_settings(at: Target) -> Found:
    """Every knob of RoCE on every adapter, read back."""
    if exports.kind(at.site) != "roce":
        return skip(f"the fabric is {exports.kind(at.site)}")
    answer = at.host.run(f"sh -c {quote(roce.script(at.settings(FabricSettings)))} roce check")
    read = "; ".join(answer.stderr.strip().splitlines())
    if answer.rc == 1:
        return Found(
            Verdict.FAIL, read, "as the site file says", f"systemctl restart {roce.UNIT}", source=_FOLDER
        )
    if answer.rc != 0:
        return unknown(
            read or f"exit {answer.rc}",
            source=_FOLDER,
            action="fabric.stack: doca has all knobs; fabric.roce.ecn: false leaves ECN to the firmware",
        )
    return Found(Verdict.PASS, "every adapter", "as the site file says", source=_FOLDER)


@check("doca", role="worker", limit="module:mlx5_core")
def doca_release(at: Target) -> Found:
    """Package, module on the disk, module that runs and user space are of one release, the locked one."""
    wanted = at.settings(FabricSettings).doca
    if wanted is None:
        return skip("the kernel's own RDMA stack")
    if wanted.version not in doca().releases:
        return unknown(f"nothing is known about DOCA {wanted.version}", source="profiles/doca.yml")
    answer = at.host.run(
        "command -v modinfo >/dev/null || { echo 'modinfo is needed (kmod)' >&2; exit 2; }\n"
        f"p=$({at.profile.manager.version_of('doca-ofed')} 2>/dev/null) || p=\n"
        "m=$(modinfo -F version mlx5_core 2>/dev/null) || m=\n"
        "r=; [ ! -d /sys/module/mlx5_core ] || r=$(cat /sys/module/mlx5_core/version 2>/dev/null || echo inbox)\n"
        "u=$(ofed_info -s 2>/dev/null) || u=\n"
        'printf \'%s\\n\' "$p" "$m" "$r" "$u"'
    )
    if answer.rc != 0 or answer.stdout.count("\n") < len(_PLACES):
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source="modinfo")
    return judge_doca(wanted.version, answer.stdout.splitlines())


_PLACES = ("package doca-ofed", "module on the disk", "module that runs", "user space (ofed_info)")


def judge_doca(release: str, read: list[str]) -> Found:
    """`read`: what each of the four places says, empty where it says nothing."""
    drivers = doca().releases[release].drivers
    right = (
        read[0].startswith(f"{release}-"),
        read[1] == drivers,
        read[2] == drivers,
        read[3].rstrip(":").removeprefix("OFED-internal-") == drivers,
    )
    words = [
        f"{place} {text or 'not there'}" for place, text in zip(_PLACES, read[: len(_PLACES)], strict=True)
    ]
    return Found(
        Verdict.PASS if all(right) else Verdict.FAIL,
        ", ".join(words),
        f"DOCA {release}: {drivers} in all of them",
        None if all(right) else "run `provision apply`; a module that runs is changed by a reboot",
        source="modinfo",
    )
