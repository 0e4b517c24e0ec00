"""An nvidia-smi for the simulated GPUs: lists, queries, a small -q -x, and the modes that a program may set.

Reads and writes the state file that nvml.c answers from, so what is set here shows there. What it does not know it
refuses, with exit status 2, as the real one does.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from xml.sax.saxutils import escape

from provision.lab.nvml import devices

Lines = list[tuple[str, str]]
ERRORS = {"!3": "[N/A]", "!15": "[GPU is lost]"}
REFUSALS = {  # of the library's start -> words, exit status
    "!9": ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
    "!18": ("Failed to initialize NVML: Driver/library version mismatch", 18),
}
COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
SWITCH = ("Disabled", "Enabled")
ANCESTORS = {"10": "PIX", "20": "PXB", "30": "PHB", "40": "NODE", "50": "SYS"}


def number(unit: str, divisor: int = 1, digits: int = 0) -> Callable[[str], str]:
    return lambda text: f"{int(text, 0) / divisor:.{digits}f}{unit}"


def word(words: tuple[str, ...]) -> Callable[[str], str]:
    return lambda text: words[int(text, 0)]


FIELDS: dict[
    str, tuple[str, Callable[[str], str]]
] = {  # of --query-gpu: key of the state file, how it is shown
    "name": ("name", str),
    "uuid": ("uuid", str),
    "serial": ("serial", str),
    "pci.bus_id": ("pci.bus_id", str),
    "vbios_version": ("vbios", str),
    "persistence_mode": ("persistence", word(SWITCH)),
    "compute_mode": ("compute_mode", word(COMPUTE_MODES)),
    "ecc.mode.current": ("ecc.mode", word(SWITCH)),
    "ecc.mode.pending": ("ecc.mode_pending", word(SWITCH)),
    "mig.mode.current": ("mig.mode", word(SWITCH)),
    "mig.mode.pending": ("mig.mode_pending", word(SWITCH)),
    "power.limit": ("power.limit", number(" W", 1000, 2)),
    "power.default_limit": ("power.default", number(" W", 1000, 2)),
    "power.draw": ("power.usage", number(" W", 1000, 2)),
    "temperature.gpu": ("temperature.0", number("")),
    "memory.total": ("memory.total", number(" MiB", 1 << 20)),
    "memory.used": ("memory.used", number(" MiB", 1 << 20)),
    "pcie.link.gen.current": ("pcie.generation", number("")),
    "pcie.link.gen.max": ("pcie.generation_max", number("")),
    "pcie.link.width.current": ("pcie.width", number("")),
    "pcie.link.width.max": ("pcie.width_max", number("")),
    "clocks.sm": ("clocks.1", number(" MHz")),
    "utilization.gpu": ("utilization.gpu", number(" %")),
    "ecc.errors.uncorrected.volatile.total": ("ecc.1.0.total", number("")),
}
TREE = {  # of -q -x: where it stands -> field of --query-gpu
    "product_name": "name",
    "persistence_mode": "persistence_mode",
    "mig_mode/current_mig": "mig.mode.current",
    "mig_mode/pending_mig": "mig.mode.pending",
    "serial": "serial",
    "uuid": "uuid",
    "vbios_version": "vbios_version",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "pcie.link.gen.current",
    "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "pcie.link.gen.max",
    "fb_memory_usage/total": "memory.total",
    "fb_memory_usage/used": "memory.used",
    "compute_mode": "compute_mode",
    "ecc_mode/current_ecc": "ecc.mode.current",
    "ecc_mode/pending_ecc": "ecc.mode.pending",
    "temperature/gpu_temp": "temperature.gpu",
    "gpu_power_readings/current_power_limit": "power.limit",
    "gpu_power_readings/default_power_limit": "power.default_limit",
}


class Refused(Exception):
    """Words for the standard output, as the real program has them, and the exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def asked(lines: Lines, key: str) -> str:
    """What NVML would be told: a value, or "!" and the number of an error."""
    return devices.answer(lines, key) or "!3"


def chosen(lines: Lines, wanted: str | None) -> list[tuple[int, str]]:
    """Index and name of the GPUs that -i means: all, an index, a UUID or a PCI address."""
    gpus = list(enumerate(devices.there(lines)))
    if wanted is None:
        return gpus
    for index, gpu in gpus:
        names = {str(index), asked(lines, f"{gpu}.uuid"), asked(lines, f"{gpu}.pci.bus_id")}
        if wanted in names:
            return [(index, gpu)]
    raise Refused("No devices were found", 6)


def field(lines: Lines, index: int, gpu: str, name: str) -> str:
    if name == "index":
        return str(index)
    if name == "driver_version":
        return asked(lines, "driver")
    if name not in FIELDS:
        raise Refused(f'Field "{name}" is not a valid field to query.', 2)
    key, show = FIELDS[name]
    told = asked(lines, f"{gpu}.{key}")
    return ERRORS.get(told, "[Unknown Error]") if told.startswith("!") else show(told)


def query(lines: Lines, gpus: list[tuple[int, str]], names: list[str], style: set[str]) -> str:
    rows = [[field(lines, index, gpu, name) for name in names] for index, gpu in gpus]
    if "nounits" in style:
        rows = [[re.sub(r" (W|MiB|MHz|%)$", "", cell) for cell in row] for row in rows]
    head = [] if "noheader" in style else [names]
    return "".join(", ".join(row) + "\n" for row in head + rows)


def processes(lines: Lines, gpus: list[tuple[int, str]], names: list[str], style: set[str]) -> str:
    keys = {"pid": "pid", "used_memory": "memory", "used_gpu_memory": "memory"}
    rows = [[] if "noheader" in style else names]
    for _index, gpu in gpus:
        for process in range(16):
            if not asked(lines, f"{gpu}.compute.{process}.pid").startswith("!"):
                rows.append(
                    [asked(lines, f"{gpu}.compute.{process}.{keys.get(name, name)}") for name in names]
                )
    return "".join(", ".join(row) + "\n" for row in rows if row)


def slices(lines: Lines, gpu: str) -> list[tuple[int, str, str]]:
    """Number, kind and UUID of the GPU's slices, in MIG mode."""
    found = []
    for part in range(7) if asked(lines, f"{gpu}.mig.mode") == "1" else ():
        uuid = asked(lines, f"{gpu}.mig.{part}.uuid")
        if not uuid.startswith("!"):
            memory = -(-int(asked(lines, f"{gpu}.mig.{part}.attributes.memory")) // 1024)
            found.append(
                (part, f"{asked(lines, f'{gpu}.mig.{part}.attributes.gi_slices')}g.{memory}gb", uuid)
            )
    return found


def listed(lines: Lines, gpus: list[tuple[int, str]]) -> str:
    text = ""
    for index, gpu in gpus:
        text += f"GPU {index}: {asked(lines, f'{gpu}.name')} (UUID: {asked(lines, f'{gpu}.uuid')})\n"
        for number_, (_part, kind, uuid) in enumerate(slices(lines, gpu)):
            text += f"  MIG {kind:<11} Device {number_:2}: (UUID: {uuid})\n"
    return text


def tree(lines: Lines, gpus: list[tuple[int, str]]) -> str:
    """A part of -q -x, each value where the real one has it."""
    cuda = int(asked(lines, "cuda"))
    text = '<?xml version="1.0" ?>\n<nvidia_smi_log>\n'
    text += f"<driver_version>{asked(lines, 'driver')}</driver_version>\n"
    text += f"<cuda_version>{cuda // 1000}.{cuda % 1000 // 10}</cuda_version>\n"
    for index, gpu in gpus:
        text += f'<gpu id="{asked(lines, f"{gpu}.pci.bus_id")}">\n'
        text += f"<minor_number>{asked(lines, f'{gpu}.minor')}</minor_number>\n"
        for place, name in TREE.items():
            value = escape(field(lines, index, gpu, name).strip("[]"))
            path = place.split("/")
            text += "".join(f"<{each}>" for each in path) + value
            text += "".join(f"</{each}>" for each in reversed(path)) + "\n"
        text += "</gpu>\n"
    return text + "</nvidia_smi_log>\n"


def nvlinks(lines: Lines, gpus: list[tuple[int, str]]) -> str:
    text = ""
    for index, gpu in gpus:
        text += f"GPU {index}: {asked(lines, f'{gpu}.name')} (UUID: {asked(lines, f'{gpu}.uuid')})\n"
        count = asked(lines, f"{gpu}.nvlink.count")
        if count.startswith("!"):
            text += "Device does not have or support Nvlink\n"
            continue
        for link in range(int(count)):
            speed = int(asked(lines, f"{gpu}.nvlink.{link}.speed")) / 1000
            up = asked(lines, f"{gpu}.nvlink.{link}.state") == "1"
            text += f"\t Link {link}: {f'{speed:g} GB/s' if up else '<inactive>'}\n"
    return text


def topology(lines: Lines, gpus: list[tuple[int, str]]) -> str:
    names = [f"GPU{index}" for index, _gpu in gpus]
    text = "\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\n"
    for index, gpu in gpus:
        links = asked(lines, f"{gpu}.nvlink.count")
        way = ANCESTORS[asked(lines, f"{gpu}.topology.0")] if links.startswith("!") else f"NV{links}"
        row = [" X " if other == index else way for other, _gpu in gpus]
        cpus = f"0-{int(asked(lines, f'{gpu}.cpus')) - 1}"
        text += "\t".join([f"GPU{index}", *row, cpus, asked(lines, f"{gpu}.numa"), "", "N/A"]) + "\n"
    return text


# ---- what is set


def put(values: dict[str, object]) -> None:
    """Lines at the end of the state file, which win; earlier ones of this program for the same keys go."""
    text = devices.STATE.read_text()
    mark = "# nvidia-smi"
    kept = [
        line for line in text.splitlines() if not (line.endswith(mark) and line.split(" = ")[0] in values)
    ]
    new = devices.STATE.with_suffix(".new")
    new.write_text("\n".join([*kept, *(f"{key} = {value} {mark}" for key, value in values.items())]) + "\n")
    new.rename(devices.STATE)
    devices.main([])


def divide(lines: Lines, gpu: str, kinds: list[str]) -> None:
    """MIG devices of these kinds, on a GPU in MIG mode that has none."""
    if asked(lines, f"{gpu}.mig.mode") != "1":
        raise Refused("Unable to create a GPU instance: Not Supported: MIG mode is not enabled", 3)
    values: dict[str, object] = {}
    used = 0
    for part, kind in enumerate(kinds):
        found = re.fullmatch(r"([1-7])g\.(\d+)gb.*", kind)
        if found is None:
            raise Refused(f"Invalid GPU instance profile: {kind}", 2)
        used += int(found[1])
        here = f"{gpu}.mig.{part}"
        values |= {
            f"{here}.uuid": f"MIG-{asked(lines, f'{gpu}.uuid')[4:-2]}{part:02d}",
            f"{here}.gi": part + 1,
            f"{here}.ci": 0,
            f"{here}.memory.total": (int(found[2]) * 1024 - 512) << 20,
            f"{here}.attributes.memory": int(found[2]) * 1024 - 512,
            f"{here}.attributes.gi_slices": found[1],
            f"{here}.attributes.ci_slices": found[1],
            f"{here}.attributes.multiprocessors": 16 * int(found[1]),
            f"{here}.attributes.copy": found[1],
        }
    if used > 7 or slices(lines, gpu):
        raise Refused("Unable to create a GPU instance: Insufficient Resources", 7)
    put(values)


def join(lines: Lines, gpu: str) -> None:
    if not slices(lines, gpu):
        raise Refused("No GPU instances found: Not Found", 6)
    put({f"{gpu}.mig.{part}.uuid": "!3" for part, _kind, _uuid in slices(lines, gpu)})


def change(lines: Lines, gpu: str, options: argparse.Namespace) -> None:
    """The modes that `options` set on one GPU. ECC takes effect at the next boot."""
    if options.pm is not None:
        put({f"{gpu}.persistence": options.pm})
    if options.e is not None:
        put({f"{gpu}.ecc.mode_pending": options.e})
    if options.c is not None:
        modes = [mode.upper() for mode in COMPUTE_MODES]
        put({f"{gpu}.compute_mode": modes.index(options.c) if options.c in modes else int(options.c)})
    if options.pl is not None:
        low, high = (int(asked(lines, f"{gpu}.power.{end}")) for end in ("min", "max"))
        if not low <= options.pl * 1000 <= high:
            raise Refused(f"Provided power limit {options.pl:.2f} W is not a valid power limit", 2)
        put({f"{gpu}.power.limit": round(options.pl * 1000)})
    if options.mig is not None:
        if asked(lines, f"{gpu}.mig.mode").startswith("!"):
            raise Refused("Unable to change MIG mode: Not Supported", 3)
        put(
            {
                f"{gpu}.mig.mode": options.mig,
                f"{gpu}.mig.mode_pending": options.mig,
                f"{gpu}.mig.max": 7 * options.mig,
            }
        )


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nvidia-smi", allow_abbrev=False)
    parser.add_argument("-i", "--id")
    if words[:1] == ["mig"]:
        for option in ("-dci", "-dgi", "-C"):
            parser.add_argument(option, action="store_true")
        parser.add_argument("-cgi")
        return parser.parse_args(words[1:])
    if words[:1] in (["nvlink"], ["topo"]):
        parser.add_argument("-s" if words[0] == "nvlink" else "-m", action="store_true", required=True)
        return parser.parse_args(words[1:])
    for option in ("-L", "-q", "-x"):
        parser.add_argument(option, action="store_true")
    for option in ("--query-gpu", "--query-compute-apps", "--format"):
        parser.add_argument(option)
    for option in ("-mig", "-pm", "-e"):
        parser.add_argument(option, type=int, choices=(0, 1))
    parser.add_argument("-c")
    parser.add_argument("-pl", type=float)
    return parser.parse_args(words)


def answer(words: list[str]) -> str:
    """What is printed. Raises Refused."""
    lines = devices.read(devices.STATE)
    init = asked(lines, "init")
    if not lines or init in REFUSALS:
        raise Refused(*REFUSALS[init if lines else "!9"])
    options = parse(words)
    gpus = chosen(lines, options.id)
    for _index, gpu in gpus:
        told = asked(lines, f"{gpu}.handle")
        if told.startswith("!") and told != "!3":
            address = asked([pair for pair in lines if pair[1] != told], f"{gpu}.pci.bus_id")[4:]
            raise Refused(f"Unable to determine the device handle for GPU{address}: Unknown Error", 255)
    if words[:1] == ["mig"]:
        for _index, gpu in gpus:
            if options.dgi:
                join(lines, gpu)
            if options.cgi:
                divide(lines, gpu, options.cgi.split(","))
        return ""
    if words[:1] == ["nvlink"]:
        return nvlinks(lines, gpus)
    if words[:1] == ["topo"]:
        return topology(lines, gpus)
    style = set((options.format or "").split(","))
    if options.query_gpu:
        return query(lines, gpus, [name.strip() for name in options.query_gpu.split(",")], style)
    if options.query_compute_apps:
        return processes(lines, gpus, options.query_compute_apps.split(","), style)
    if options.L:
        return listed(lines, gpus)
    if options.q and options.x:
        return tree(lines, gpus)
    if not any(getattr(options, name) is not None for name in ("pm", "e", "c", "pl", "mig")):
        raise Refused("this simulated nvidia-smi knows -L, -q -x, queries and modes", 2)
    if os.geteuid():
        raise Refused("Insufficient Permissions", 4)
    for _index, gpu in gpus:
        change(lines, gpu, options)
    return "All done.\n"


def main() -> int:
    try:
        sys.stdout.write(answer(sys.argv[1:]))
    except Refused as refused:
        print(refused)
        return refused.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
