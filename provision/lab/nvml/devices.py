"""Makes what the driver of the simulated GPUs would: device files, PCI functions in sysfs, /proc/driver/nvidia.

Run at each boot, and again by faults: a GPU that is not there any more loses its device file and its PCI function.
The folders it makes are mounted over /sys/bus/pci/devices, so a node sees no device of its machine, and /proc/driver.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

STATE = Path("/var/lib/lab-gpu/state")
MADE = Path("/run/lab-gpu")
MAJOR, CONTROL_MINOR = 195, 255
FIRST_CAPABILITY = 3  # 1 and 2 are those of the driver's configuration and monitor
CAPABILITY_MINORS = 1000  # the real ones have a major number of their own, that the kernel gives out
MOUNTS = {"pci": "/sys/bus/pci/devices", "driver": "/proc/driver"}
SPEEDS = {3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe", 6: "64.0 GT/s PCIe"}


def read(path: Path) -> list[tuple[str, str]]:
    """The lines of a state file: pattern, value."""
    text = path.read_text() if path.exists() else ""
    pairs = (line.partition("#")[0].partition("=") for line in text.splitlines())
    return [(key.strip(), value.strip()) for key, sign, value in pairs if sign]


def answer(lines: list[tuple[str, str]], key: str) -> str | None:
    """The last line that matches, as nvml.c has it."""
    return next((text for pattern, text in reversed(lines) if fnmatchcase(key, pattern)), None)


def value(lines: list[tuple[str, str]], key: str) -> str | None:
    """The last line that matches and is no error of the driver: such a one changes no hardware."""
    return answer([pair for pair in lines if not pair[1].startswith(("!", "@"))], key)


def there(lines: list[tuple[str, str]]) -> Iterator[str]:
    """The GPUs that are present: "gpu0" ..."""
    for gpu in range(64):
        if value(lines, f"gpu{gpu}.present") == "1":
            yield f"gpu{gpu}"


def device(name: str, major: int, minor: int) -> None:
    path = Path("/dev") / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        path.chmod(0o666)


def pci_function(lines: list[tuple[str, str]], gpu: str) -> tuple[str, dict[str, str]]:
    """Its address and the files that sysfs has for it."""
    address = str(value(lines, f"{gpu}.pci.bus_id")).lower()[4:]
    number = int(str(value(lines, f"{gpu}.pci.id")), 16)
    current, most = (int(value(lines, f"{gpu}.pcie.generation{end}") or 0) for end in ("", "_max"))
    return address, {
        "vendor": f"0x{number & 0xFFFF:04x}",
        "device": f"0x{number >> 16:04x}",
        "class": "0x030200",
        "numa_node": value(lines, f"{gpu}.numa") or "-1",
        "local_cpulist": f"0-{int(value(lines, f'{gpu}.cpus') or 1) - 1}",
        "current_link_width": value(lines, f"{gpu}.pcie.width") or "0",
        "max_link_width": value(lines, f"{gpu}.pcie.width_max") or "0",
        "current_link_speed": SPEEDS.get(current, "Unknown"),
        "max_link_speed": SPEEDS.get(most, "Unknown"),
    }


def slices(lines: list[tuple[str, str]], gpu: str) -> Iterator[str]:
    """The capabilities of a GPU's slices, as /proc/driver/nvidia-caps/mig-minors names them."""
    minor = value(lines, f"{gpu}.minor")
    for number in range(7):
        if (answer(lines, f"{gpu}.mig.{number}.uuid") or "!").startswith("MIG-"):
            instance = f"gpu{minor}/gi{value(lines, f'{gpu}.mig.{number}.gi')}"
            yield f"{instance}/access"
            yield f"{instance}/ci{value(lines, f'{gpu}.mig.{number}.ci')}/access"


def put(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def booted(lines: list[tuple[str, str]]) -> None:
    """What was set to take effect at the next boot does so."""
    due = {
        f"{gpu}.{mode}": pending
        for gpu in there(lines)
        for mode in ("ecc.mode", "mig.mode")
        if (pending := answer(lines, f"{gpu}.{mode}_pending")) != answer(lines, f"{gpu}.{mode}")
    }
    with STATE.open("a") as file:
        file.writelines(f"{key} = {pending}\n" for key, pending in due.items())


def main(words: list[str]) -> None:
    if words == ["boot"] and STATE.exists():
        booted(read(STATE))
    lines = read(STATE)
    gpus = list(there(lines))
    minors = {int(value(lines, f"{gpu}.minor") or 0) for gpu in gpus}
    for path in Path("/dev").glob("nvidia[0-9]*"):
        if int(path.name[6:]) not in minors:
            path.unlink()
    for minor in sorted(minors):
        device(f"nvidia{minor}", MAJOR, minor)
    if minors:
        device("nvidiactl", MAJOR, CONTROL_MINOR)
    functions = dict(pci_function(lines, gpu) for gpu in gpus)
    capabilities = dict(enumerate((line for gpu in gpus for line in slices(lines, gpu)), FIRST_CAPABILITY))
    for number in capabilities:
        device(f"nvidia-caps/nvidia-cap{number}", MAJOR, CAPABILITY_MINORS + number)
    for name in MOUNTS:
        (MADE / name).mkdir(parents=True, exist_ok=True)
    for folder in (MADE / "pci").iterdir():
        if folder.name not in functions:
            shutil.rmtree(folder)
    for address, files in functions.items():
        put(MADE / "pci" / address, files)
    if functions:
        version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {value(lines, 'module')}  Release Build"
        put(MADE / "driver/nvidia", {"version": version})
        minors_file = "\n".join(f"{line} {number}" for number, line in capabilities.items())
        put(MADE / "driver/nvidia-caps", {"mig-minors": minors_file})
    for name, target in MOUNTS.items():
        if not os.path.ismount(target):
            subprocess.run(["mount", "--bind", str(MADE / name), target], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
