"""What can go wrong with a node, made to happen on purpose, and taken back.

Faults reach into a node from outside, by its namespaces, never by ssh: they work on nodes whose network, host
key or login is broken already. What an undo needs (a file's old content) is kept beside the node, not on it.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.lab import cgroup, gpus, network, state
from provision.lab.command import InputError, LabError, execute
from provision.site.problem import instead

if TYPE_CHECKING:
    from provision.lab.lab import Lab

_REQUIRED = inspect.Parameter.empty  # the default of an option that must be given
Action = Callable[..., None]  # (lab, node name, options by keyword)

XIDS = {
    13: "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Out Of Range Address",
    31: "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2a_00000000. Fault is of type FAULT_PDE",
    48: "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer.",
    63: "Row Remapper: New row (0x0000000000a1b2c3) marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Error recording row remapping to the InfoROM",
    74: "NVLink: fatal error detected on link 3(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "GPU has fallen off the bus.",
    94: "Contained: SM (0x1). RST: No, D-RST: No",
    95: "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    119: "Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL)",
}


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `undo` is None where time or the node's own repair ends it."""

    name: str
    doc: str
    apply: Action
    undo: Action | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that it understands, with their defaults."""
        parameters = inspect.signature(self.apply).parameters.values()
        return {each.name: each.default for each in parameters if each.name not in ("lab", "node")}

    def told(self, node: str, **given: Any) -> str:
        """What has been done to `node`, and how it is taken back."""
        values = {**self.options, **given}
        done = re.sub(r"--(\w+)", lambda word: _spoken(word[1], values), self.doc)
        back = f"; take it back: provision lab fault {self.name} {node} --undo" if self.undo else ""
        return f"{node}: {done}{back}"


def _spoken(option: str, values: Mapping[str, Any]) -> str:
    return f"GPU {values[option]}" if option == "gpu" else str(values[option])


def inject(lab: Lab, kind: str, node: str, undo: bool = False, **options: Any) -> None:
    """Make a fault happen on a node, or take it back. Raises InputError for what does not exist."""
    fault = FAULTS.get(kind)
    if fault is None:
        raise InputError(f"{kind}: no such fault; {instead(kind, FAULTS)}")
    lab.node(node)
    action = fault.undo if undo else fault.apply
    if action is None:
        raise InputError(f"{kind}: cannot be undone: {fault.doc}")
    unknown = [name for name in options if name not in inspect.signature(action).parameters]
    if unknown:
        taken = ", ".join(f"--{name}" for name in fault.options) or "none"
        raise InputError(
            f"{kind}{' --undo' if undo else ''}: no option --{', --'.join(unknown)}; it takes {taken}"
        )
    if not undo:
        missing = [
            name for name, default in fault.options.items() if default is _REQUIRED and name not in options
        ]
        if missing:
            raise InputError(f"{kind}: needs --{', --'.join(missing)}")
    action(lab, node, **options)


# ---- what an undo needs


def _record(lab: Lab, node: str) -> Path:
    return lab.paths.node(node) / "faults.json"


@contextmanager
def _kept(lab: Lab, node: str, kind: str) -> Iterator[list[dict[str, str]]]:
    """The stack of what was kept for faults of `kind` on the node; changes are written back."""
    file = _record(lab, node)
    record: dict[str, list[dict[str, str]]] = json.loads(file.read_text()) if file.exists() else {}
    stack = record.setdefault(kind, [])
    yield stack
    state.write_file(file, json.dumps(record), 0o600)


def _replace(lab: Lab, node: str, kind: str, path: str, content: bytes) -> None:
    """Give a file of the node another content, keep the old one."""
    old = lab.inside(node, f"cat {shlex.quote(path)} | base64 -w0")
    with _kept(lab, node, kind) as stack:
        stack.append({"path": path, "content": old})
    _write(lab, node, path, content)


def _write(lab: Lab, node: str, path: str, content: bytes) -> None:
    lab.inside(node, f"base64 -d >{shlex.quote(path)}", stdin=base64.b64encode(content).decode())


def _restore(lab: Lab, node: str, kind: str) -> str:
    """Give the last file that a fault of `kind` changed its old content back; its path."""
    with _kept(lab, node, kind) as stack:
        if not stack:
            raise InputError(f"{kind}: nothing of the kind was done to {node}")
        last = stack.pop()
    _write(lab, node, last["path"], base64.b64decode(last["content"]))
    return last["path"]


# ---- power, processes, network


def _stop(lab: Lab, node: str) -> None:
    lab.power_off(node)


def _kill(lab: Lab, node: str) -> None:
    lab.power_loss(node)


def _start(lab: Lab, node: str) -> None:
    lab.start(node)


def _freeze(lab: Lab, node: str) -> None:
    cgroup.freeze(lab.paths.machine_cgroup(node), True)


def _thaw(lab: Lab, node: str) -> None:
    cgroup.freeze(lab.paths.machine_cgroup(node), False)


def _signal_sshd(lab: Lab, node: str, number: signal.Signals) -> None:
    """Send a signal to the node's sshd: the one that listens and those of all sessions."""
    hit = 0
    for pid in cgroup.pids(lab.paths.machine_cgroup(node)):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # with the handle open the number cannot pass to another process: what is read now is what is hit
            if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                signal.pidfd_send_signal(handle, number)
                hit += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
        finally:
            os.close(handle)
    if not hit:
        raise LabError(f"{node}: no sshd runs there")


def _freeze_sshd(lab: Lab, node: str) -> None:
    _signal_sshd(lab, node, signal.SIGSTOP)


def _thaw_sshd(lab: Lab, node: str) -> None:
    _signal_sshd(lab, node, signal.SIGCONT)


def _unplug(lab: Lab, node: str) -> None:
    network.plug(lab.paths, lab.node(node), False)


def _plug(lab: Lab, node: str) -> None:
    network.plug(lab.paths, lab.node(node), True)


# ---- disk and files

_OVERLAY_DISK = """
set -e
mkdir -p "$1"
mknod /dev/lab-fill b 7 "$2"
mkdir /run/lab-fill
mount -t ext4 /dev/lab-fill /run/lab-fill
rm /dev/lab-fill
cp -ax "$1/." /run/lab-fill/
mount --bind /run/lab-fill "$1"
umount /run/lab-fill
rmdir /run/lab-fill
if head -c 4G /dev/zero >"$1/lab-fill"; then echo "$1 is not full"; exit 1; fi
# what was set aside to place that file is free again once it lies on the disk: to the last byte
sync -f "$1"
last=0
while printf x >"$1/lab-fill.$last"; do last=$((last + 1)); sync -f "$1"; done
"""


def _fill_disk(lab: Lab, node: str, path: str = "/var/log") -> None:
    used = int(lab.inside(node, f"mkdir -p {shlex.quote(path)}; du -sxm {shlex.quote(path)}").split()[0])
    image = lab.paths.node(node) / "fill.img"
    with image.open("wb") as file:
        file.truncate((used * 5 // 4 + 16) << 20)
    execute(["mkfs.ext4", "-q", "-F", "-m", "0", image])
    device = execute(["losetup", "--find", "--show", image]).strip()
    try:
        number = device.removeprefix("/dev/loop")
        lab.inside(node, _OVERLAY_DISK, path, number)
    finally:
        execute(["losetup", "--detach", device])  # takes effect when the node unmounts it, or ends
        image.unlink()
    with _kept(lab, node, "fill-disk") as stack:
        stack.append({"path": path})


def _empty_disk(lab: Lab, node: str) -> None:
    with _kept(lab, node, "fill-disk") as stack:
        if not stack:
            raise InputError(f"fill-disk: nothing of the kind was done to {node}")
        path = stack.pop()["path"]
    lab.inside(node, 'umount --lazy "$1"', path)


def _edit(lab: Lab, node: str, path: str) -> None:
    old = base64.b64decode(lab.inside(node, f"cat {shlex.quote(path)} | base64 -w0"))
    _replace(lab, node, "edit", path, old + b"\n")


def _unedit(lab: Lab, node: str) -> None:
    _restore(lab, node, "edit")


# ---- packages

_HOLD_LOCK = """
import fcntl, os, socket, sys, time
held = [open(f"/var/lib/dpkg/{name}", "w") for name in ("lock-frontend", "lock")]
for file in held:
    fcntl.lockf(file, fcntl.LOCK_EX)
client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client.connect(os.environ["NOTIFY_SOCKET"])
client.send(b"READY=1")
time.sleep(float(sys.argv[1]))
"""


def _apt_lock(lab: Lab, node: str, seconds: float = 60) -> None:
    lab.inside(
        node,
        "systemd-run --quiet --collect --unit=lab-apt-lock --service-type=notify --property=NotifyAccess=all "
        'python3 -c "$1" "$2"',
        _HOLD_LOCK,
        str(seconds),
    )


def _apt_unlock(lab: Lab, node: str) -> None:
    lab.inside(node, "systemctl stop lab-apt-lock")


_HALF_INSTALL = """
set -e
script="/var/lib/dpkg/info/$1.postinst"
cd "$(mktemp -d)"
apt-get download "$1" >&2 || { apt-get update >&2 && apt-get download "$1" >&2; }
dpkg --unpack ./*.deb >&2
rm -r "$PWD"
cd /
if [ -e "$script" ]; then cp -p "$script" "$script.lab"; fi
printf '#!/bin/sh\\nexit 1\\n' >"$script"
chmod 755 "$script"
if dpkg --configure "$1" >&2; then echo "$1 got configured"; exit 1; fi
if [ -e "$script.lab" ]; then mv "$script.lab" "$script"; else rm "$script"; fi
"""


def _half_install(lab: Lab, node: str, package: str = "munge") -> None:
    lab.inside(node, _HALF_INSTALL, package)


def _configure(lab: Lab, node: str) -> None:
    lab.inside(node, "DEBIAN_FRONTEND=noninteractive dpkg --configure --pending >&2")


# ---- time and secrets

_SKEW = """
library="$(dpkg -L libfaketime | grep /libfaketimeMT.so.1)"
skewed=
for unit in munge slurmd slurmctld slurmdbd; do
    systemctl cat "$unit.service" >/dev/null 2>&1 || continue
    preload="$(systemctl show --property=Environment --value "$unit.service" | grep -o 'LD_PRELOAD=[^ ]*')"
    preload="${preload#LD_PRELOAD=}"
    mkdir -p "/run/systemd/system/$unit.service.d"
    printf '[Service]\\nEnvironment="LD_PRELOAD=%s" "FAKETIME=%s" FAKETIME_DONT_FAKE_MONOTONIC=1\\n' \\
        "$library${preload:+:$preload}" "$1" >"/run/systemd/system/$unit.service.d/zzz-lab-clock.conf"
    skewed="$skewed $unit.service"
done
[ -n "$skewed" ] || { echo "neither munge nor Slurm is installed" >&2; exit 1; }
systemctl daemon-reload
# slurmd asks slurmctld for its configuration as it starts: with a clock that is off it does not get an answer
systemctl try-restart munge.service
systemctl --no-block try-restart $(printf '%s\\n' $skewed | grep -v munge)
"""
_UNSKEW = """
skewed="$(cd /run/systemd/system && ls */zzz-lab-clock.conf)" || exit 1
cd /run/systemd/system
rm $skewed
systemctl daemon-reload
systemctl try-restart $(printf '%s\\n' $skewed | sed 's,.d/zzz-lab-clock.conf,,')
"""


def _clock(lab: Lab, node: str, by: str = "10m") -> None:
    if not re.fullmatch(r"[+-]?\d+[smhd]?", by):
        raise InputError(f"clock: --by {by}: expected a time such as 10m, -90s or 2h")
    lab.inside(node, _SKEW, by if by[0] in "+-" else f"+{by}")


def _unclock(lab: Lab, node: str) -> None:
    lab.inside(node, _UNSKEW)


MUNGE_KEY = "/etc/munge/munge.key"
# reset-failed: systemd counts starts, and refuses one that comes too soon after others
_RESTART_MUNGE = (
    "! systemctl -q is-active munge || { systemctl reset-failed munge && systemctl restart munge; }"
)


def _wrong_munge_key(lab: Lab, node: str) -> None:
    _replace(lab, node, "wrong-munge-key", MUNGE_KEY, os.urandom(128))
    lab.inside(node, _RESTART_MUNGE)


def _right_munge_key(lab: Lab, node: str) -> None:
    _restore(lab, node, "wrong-munge-key")
    lab.inside(node, _RESTART_MUNGE)


_NEW_HOST_KEY = """
set -e
rm -f /etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
systemctl reload ssh
"""


def _host_key(lab: Lab, node: str) -> None:
    lab.inside(node, _NEW_HOST_KEY)


def _old_host_key(lab: Lab, node: str) -> None:
    key = (lab.paths.node(node) / "keys/ssh_host_ed25519_key").read_bytes()
    _write(lab, node, "/etc/ssh/ssh_host_ed25519_key", key)
    lab.inside(node, "rm -f /etc/ssh/ssh_host_*.pub; systemctl reload ssh")


SUDOERS = "/etc/sudoers.d/ops"


def _sudo_password(lab: Lab, node: str) -> None:
    file = lab.paths.sudo_password
    if not file.exists():
        state.write_file(file, secrets.token_urlsafe(12) + "\n", 0o600)
    lab.inside(node, "chpasswd", stdin=f"ops:{file.read_text()}")
    _write(lab, node, SUDOERS, b"ops ALL=(ALL:ALL) ALL\n")


def _no_sudo_password(lab: Lab, node: str) -> None:
    _write(lab, node, SUDOERS, b"ops ALL=(ALL:ALL) NOPASSWD: ALL\n")
    lab.inside(node, "usermod --lock ops")


# ---- hardware


def kernel_line(number: int, microseconds: int, xid: int, gpu: int) -> str:
    """A record of /dev/kmsg as the NVIDIA driver writes it: facility.level, number, time, flags; text."""
    return f"3,{number},{microseconds},-;NVRM: Xid (PCI:0000:{gpus.bus(gpu):02x}:00): {xid}, {XIDS[xid]}\n"


def _xid(lab: Lab, node: str, xid: int = 79, gpu: int = 0) -> None:
    if xid not in XIDS:
        raise InputError(f"xid: --xid {xid}: known are {', '.join(map(str, XIDS))}")
    kmsg = lab.paths.node(node) / "kmsg"
    with kmsg.open("a") as file:
        file.write(kernel_line(1000 + kmsg.read_text().count("\n"), time.monotonic_ns() // 1000, xid, gpu))


# $1 the state file, $2 the fault; its lines come on standard input, none for an undo
_GPU_LINES = r"""
set -e
[ -e "$1" ] || { echo "this node has no simulated GPU" >&2; exit 1; }
{ if [ "$3" = undo ]; then sed "/ # $2\$/d" "$1"; else cat "$1" -; fi; } >"$1.new"
mv "$1.new" "$1"
"$4"
"""


def _change_gpus(lab: Lab, node: str, fault: gpus.GpuFault, lines: str | None) -> None:
    words = (gpus.STATE, fault.name, "undo" if lines is None else "do", gpus.DEVICES)
    lab.inside(node, _GPU_LINES, *words, stdin=lines or "")


# ---- services, mounts, devices, messages of the kernel


def _stop_unit(lab: Lab, node: str, unit: str = "munge") -> None:
    lab.inside(node, 'systemctl stop "$1"', unit)
    with _kept(lab, node, "unit-stopped") as stack:
        stack.append({"path": unit})


def _start_unit(lab: Lab, node: str) -> None:
    lab.inside(node, 'systemctl start "$1"', _undone(lab, node, "unit-stopped"))


_CRASH = """
set -e
unit="$1.service"
mkdir -p "/run/systemd/system/$unit.d"
printf '[Unit]\\nStartLimitIntervalSec=0\\n[Service]\\nRestart=always\\nRestartSec=100ms\\n' \\
    >"/run/systemd/system/$unit.d/zzz-lab-crash.conf"
systemctl daemon-reload
for i in 1 2 3 4; do
    systemctl kill --signal=KILL --kill-whom=main "$unit"
    for j in $(seq 50); do
        sleep 0.2
        if [ "$(systemctl show --property=MainPID --value "$unit")" != 0 ]; then break; fi
    done
done
"""


def _crash_unit(lab: Lab, node: str, unit: str = "prometheus-node-exporter") -> None:
    lab.inside(node, _CRASH, unit)
    with _kept(lab, node, "unit-crashes") as stack:
        stack.append({"path": unit})


def _calm_unit(lab: Lab, node: str) -> None:
    unit = _undone(lab, node, "unit-crashes")
    script = 'rm "/run/systemd/system/$1.service.d/zzz-lab-crash.conf"; systemctl daemon-reload; systemctl restart "$1"'
    lab.inside(node, f'{script}; systemctl reset-failed "$1"', unit)


def _undone(lab: Lab, node: str, kind: str) -> str:
    """What the last fault of `kind` was done to; it is no longer kept."""
    with _kept(lab, node, kind) as stack:
        if not stack:
            raise InputError(f"{kind}: nothing of the kind was done to {node}")
        return stack.pop()["path"]


def _read_only(lab: Lab, node: str, path: str = "/home") -> None:
    lab.inside(node, 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"', path)
    with _kept(lab, node, "read-only") as stack:
        stack.append({"path": path})


def _writable(lab: Lab, node: str) -> None:
    lab.inside(node, 'umount "$1"', _undone(lab, node, "read-only"))


def _unmount(lab: Lab, node: str, path: str = "/shared") -> None:
    lab.inside(node, 'umount --lazy "$1"', path)
    with _kept(lab, node, "unmounted") as stack:
        stack.append({"path": path})


def _mount_again(lab: Lab, node: str) -> None:
    path = _undone(lab, node, "unmounted")
    lab.inside(node, 'unit="$(systemd-escape --path --suffix=mount "$1")"; systemctl restart "$unit"', path)


def _no_device(lab: Lab, node: str, gpu: int = 0) -> None:
    lab.inside(node, 'rm "/dev/nvidia$1"', str(gpu))
    with _kept(lab, node, "no-device") as stack:
        stack.append({"path": str(gpu)})


def _device_again(lab: Lab, node: str) -> None:
    lab.inside(node, 'mknod -m 666 "/dev/nvidia$1" c 195 "$1"', _undone(lab, node, "no-device"))


def _flap(lab: Lab, node: str, times: int = 3) -> None:
    for _ in range(times):
        network.plug(lab.paths, lab.node(node), False)
        time.sleep(0.3)
        network.plug(lab.paths, lab.node(node), True)
        time.sleep(0.3)


_HOLD = """
set -e
rm "/dev/nvidia$1"
touch "/dev/nvidia$1"
systemd-run --quiet --collect --slice=user.slice --unit=lab-holder sh -c "exec sleep 3600 </dev/nvidia$1"
"""
_LET_GO = """
systemctl stop lab-holder
rm "/dev/nvidia$1"
mknod -m 666 "/dev/nvidia$1" c 195 "$1"
"""


def _hold(lab: Lab, node: str, gpu: int = 0) -> None:
    lab.inside(node, _HOLD, str(gpu))
    with _kept(lab, node, "held-device") as stack:
        stack.append({"path": str(gpu)})


def _let_go(lab: Lab, node: str) -> None:
    lab.inside(node, _LET_GO, _undone(lab, node, "held-device"))


def _empty_library(lab: Lab, node: str) -> None:
    _replace(lab, node, "empty-library", gpus.LIBRARY, b"")


def _garbage_library(lab: Lab, node: str) -> None:
    _replace(lab, node, "garbage-library", gpus.LIBRARY, b"no library at all\n" * 64)


def _library_again(kind: str) -> Action:
    def undo(lab: Lab, node: str) -> None:
        _restore(lab, node, kind)

    return undo


_INODES = """
set -e
mount -t tmpfs -o size=1m,nr_inodes=16 lab-inodes "$1"
i=0
while touch "$1/$i" 2>/dev/null; do i=$((i + 1)); done
"""


def _no_inodes(lab: Lab, node: str, path: str = "/home") -> None:
    lab.inside(node, _INODES, path)
    with _kept(lab, node, "no-inodes") as stack:
        stack.append({"path": path})


def _inodes_again(lab: Lab, node: str) -> None:
    lab.inside(node, 'umount --lazy "$1"', _undone(lab, node, "no-inodes"))


_ZOMBIE = "import os, time\nif os.fork() == 0:\n    os._exit(0)\ntime.sleep(3600)\n"


def _zombie(lab: Lab, node: str) -> None:
    lab.inside(node, 'systemd-run --quiet --collect --unit=lab-zombie python3 -c "$1"', _ZOMBIE)


def _no_zombie(lab: Lab, node: str) -> None:
    lab.inside(node, "systemctl stop lab-zombie")


def _no_systemctl(lab: Lab, node: str) -> None:
    lab.inside(node, "chmod 644 /usr/bin/systemctl")


def _systemctl_again(lab: Lab, node: str) -> None:
    lab.inside(node, "chmod 755 /usr/bin/systemctl")


def _no_messages(lab: Lab, node: str) -> None:
    lab.inside(node, "mount -t tmpfs none /var/log && rm -f /var/log/kmsg")


def _messages_again(lab: Lab, node: str) -> None:
    lab.inside(node, "umount --lazy /var/log")


def _unknown_name(lab: Lab, node: str) -> None:
    hosts = lab.inside(node, "cat /etc/hosts")
    kept = [line for line in hosts.splitlines() if node not in line.split()]
    _replace(lab, node, "own-name", "/etc/hosts", ("\n".join(kept) + "\n").encode())


def _known_name(lab: Lab, node: str) -> None:
    _restore(lab, node, "own-name")


MESSAGES = {
    "sxid": "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "off-bus": "NVRM: GPU 0000:0b:00.0: GPU has fallen off the bus.",
    "rm-init": "NVRM: GPU 0000:0b:00.0: RmInitAdapter failed! (0x62:0x55:2631)",
    "downtrain": "pci 0000:0b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x4 link",
    "aer": "pcieport 0000:0a:00.0: AER: Uncorrected (Fatal) error received: 0000:0b:00.0",
    "peermem": "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping it",
    "io-error": "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)",
    "read-only": "EXT4-fs (nvme0n1p2): Remounting filesystem read-only",
    "lockup": "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [python3:4711]",
    "hung-task": "INFO: task python3:4711 blocked for more than 120 seconds.",
    "oom": "Out of memory: Killed process 4711 (python3) total-vm:1048576kB",
    "machine-check": "mce: [Hardware Error]: Machine check events logged",
    "module-power": "mlx5_core 0000:1a:00.0: Port module event[error]: module 0, Cable error, insufficient power",
    "module-hot": "mlx5_core 0000:1a:00.0: mlx5_port_module_event: High Temperature",
    "carrier": "mlx5_core 0000:1a:00.0 ib0: Link down",
    "userns": 'audit: type=1400 apparmor="DENIED" profile="unprivileged_userns" comm="enroot-nsenter"',
}


def _kernel(lab: Lab, node: str, message: str = "lockup", count: int = 1) -> None:
    if message not in MESSAGES:
        raise InputError(f"kernel-message: --message {message}: known are {', '.join(MESSAGES)}")
    kmsg = lab.paths.node(node) / "kmsg"
    with kmsg.open("a") as file:
        first = 1000 + kmsg.read_text().count("\n")
        for number in range(count):
            file.write(f"3,{first + number},{time.monotonic_ns() // 1000},-;{MESSAGES[message]}\n")


def _silence(lab: Lab, node: str) -> None:
    with (lab.paths.node(node) / "kmsg").open("w"):
        pass


def _gpu_fault(fault: gpus.GpuFault) -> Fault:
    """A fault of simulated GPUs, with the options that it understands."""

    def checked(lab: Lab, node: str, gpu: int, link: int = 0) -> None:
        count = lab.node(node).gpus
        if not 0 <= gpu < count:
            raise InputError(f"{fault.name}: --gpu {gpu}: {node} has {count}, counted from 0")
        _change_gpus(lab, node, fault, fault.text(gpu, link))

    def of_node(lab: Lab, node: str) -> None:
        _change_gpus(lab, node, fault, fault.text())

    def of_gpu(lab: Lab, node: str, gpu: int = 0) -> None:
        checked(lab, node, gpu)

    def of_link(lab: Lab, node: str, gpu: int = 0, link: int = 0) -> None:
        checked(lab, node, gpu, link)

    def undo(lab: Lab, node: str) -> None:
        _change_gpus(lab, node, fault, None)

    apply = of_node if fault.whole_node else of_link if fault.of_link else of_gpu
    return Fault(fault.name, fault.doc, apply, undo)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("stop-node", "the node is shut down", _stop, _start),
        Fault("kill-node", "the node loses power", _kill, _start),
        Fault("freeze", "all processes of the node stand still", _freeze, _thaw),
        Fault("freeze-sshd", "sshd and its sessions stand still; the rest goes on", _freeze_sshd, _thaw_sshd),
        Fault("unplug", "the node's network cable is pulled", _unplug, _plug),
        Fault(
            "fill-disk", "the file system at --path is full (a loop image over it)", _fill_disk, _empty_disk
        ),
        Fault("clock", "munged and the Slurm daemons see a clock that is off by --by", _clock, _unclock),
        Fault("wrong-munge-key", "the node has a munge key of its own", _wrong_munge_key, _right_munge_key),
        Fault("apt-lock", "dpkg's lock is held for --seconds seconds", _apt_lock, _apt_unlock),
        Fault(
            "half-installed", "--package is unpacked and its configuration failed", _half_install, _configure
        ),
        Fault("edit", "one byte is appended to the file at --path", _edit, _unedit),
        Fault("host-key", "sshd has another host key", _host_key, _old_host_key),
        Fault("xid", "the kernel reports NVIDIA error --xid on --gpu (stays until the next boot)", _xid),
        Fault(
            "sudo-password",
            "ops needs a password for sudo: the one in .lab/sudo-password",
            _sudo_password,
            _no_sudo_password,
        ),
        Fault("unit-stopped", "the service --unit is stopped", _stop_unit, _start_unit),
        Fault(
            "unit-crashes",
            "the service --unit is killed and started again four times",
            _crash_unit,
            _calm_unit,
        ),
        Fault("read-only", "the file system at --path can only be read", _read_only, _writable),
        Fault("unmounted", "the file system at --path is not mounted", _unmount, _mount_again),
        Fault("no-device", "the device file of --gpu is gone", _no_device, _device_again),
        Fault("held-device", "a process of no job holds the device file of --gpu", _hold, _let_go),
        Fault("empty-library", "NVML's library is empty", _empty_library, _library_again("empty-library")),
        Fault(
            "garbage-library",
            "NVML's library is no library",
            _garbage_library,
            _library_again("garbage-library"),
        ),
        Fault(
            "no-inodes", "the file system at --path has no room for another file", _no_inodes, _inodes_again
        ),
        Fault("link-flap", "the node's cable is pulled and put back --times times", _flap),
        Fault("zombie", "a process has ended and its parent does not collect it", _zombie, _no_zombie),
        Fault("no-systemctl", "systemctl cannot be run", _no_systemctl, _systemctl_again),
        Fault("no-kernel-messages", "kernel messages cannot be read", _no_messages, _messages_again),
        Fault("own-name", "the node's own name means nothing to it", _unknown_name, _known_name),
        Fault(
            "kernel-message",
            "the kernel reports --message, --count times (undo: nothing that it reported is there any more)",
            _kernel,
            _silence,
        ),
        *map(_gpu_fault, gpus.faults()),
    )
}
