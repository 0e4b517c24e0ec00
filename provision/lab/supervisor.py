"""Keeps one node of the lab: mounts its root, starts it, and starts it again when it reboots.

    python -m provision.lab.supervisor BOOT_JSON

Runs in a mount namespace of its own, so that the machine never sees the node's root; when the last process of
the node has ended, its mounts are gone too. SIGTERM shuts the node down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from provision.lab import cgroup, mountns

REBOOT = 133  # exit status of systemd-nspawn --keep-unit when the container asked for a reboot

# util-linux 2.39 and later hand each option over by fsconfig(2), which takes 255 characters: five layers are more.
OLD_MOUNT = {"LIBMOUNT_FORCE_MOUNT2": "always"}


def prepare(boot: dict[str, Any]) -> None:
    """What power-on does: no processes, no kernel messages, no firewall rules from the time before."""
    group = Path(boot["cgroup"])
    cgroup.remove(group)
    group.mkdir()
    with open(boot["kmsg"], "w"):
        pass
    subprocess.run(["nsenter", f"--net={boot['netns']}", "nft", "flush", "ruleset"], check=True)


def mount(boot: dict[str, Any]) -> None:
    """Stack the node's own folder on its layers."""
    options = f"lowerdir={':'.join(boot['lowers'])},upperdir={boot['upper']},workdir={boot['work']}"
    argv = ["mount", "-t", "overlay", boot["name"], "-o", options, boot["root"]]
    subprocess.run(argv, check=True, env={**os.environ, **OLD_MOUNT})


def start(boot: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the machine, its mount namespace made on the CPU that mountns names; its processes run on all."""
    cpus, command = os.sched_getaffinity(0), list(boot["command"])
    if (first := mountns.oldest_cpu()) is not None:
        command.append(f"--cpu-affinity={','.join(map(str, sorted(cpus)))}")
        os.sched_setaffinity(0, {first})
    try:
        return subprocess.Popen(
            cgroup.entering(Path(boot["cgroup"]), command), env={**os.environ, **boot["environment"]}
        )
    finally:
        os.sched_setaffinity(0, cpus)


def main() -> int:
    boot = json.loads(Path(sys.argv[1]).read_text())
    machine: subprocess.Popen[bytes] | None = None
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if machine is not None:
            machine.terminate()

    signal.signal(signal.SIGTERM, stop)
    mount(boot)
    status = REBOOT
    while status == REBOOT and not stopping:
        prepare(boot)
        machine = start(boot)
        status = machine.wait()
        print(f"supervisor: {boot['name']}: exit status {status}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
