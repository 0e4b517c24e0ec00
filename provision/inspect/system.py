"""What the system around the GPUs tells: lsmod, modinfo, lspci, device files, mounts, munge, exporters. Pure."""

from __future__ import annotations

import re

from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN
from provision.inspect.recording import Kind, Recording


def is_lsmod(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Module ")]
    return bool(lines) and all(
        re.fullmatch(r"[\w-]+\s+\d+\s+-?\d+(?:\s+[\w,\[\]-]*)?\s*", line) for line in lines
    )


def parse_lsmod(text: str) -> Recording:
    found = Recording("lsmod")
    found.data = [
        line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("Module ")
    ]
    if "nvidia" in found.data and any(name in found.data for name in ("ib_core", "mlx5_ib")):
        peer = "nvidia_peermem" in found.data
        found.find(
            PASS if peer else WARN,
            "peer-memory",
            "node",
            f"nvidia_peermem {'loaded' if peer else 'absent'}",
            "nvidia_peermem, or DMA-BUF of the open modules",
            action=None if peer else "fix",
            advice=None if peer else "modprobe nvidia_peermem",
        )
    elif "nvidia" in found.data or "nvidia_peermem" in found.data:
        found.tell(
            "modules",
            "node",
            ", ".join(name for name in found.data if name.startswith(("nvidia", "mlx5", "ib_")))[:160],
        )
    else:
        found.find(
            UNKNOWN,
            "modules",
            "node",
            f"{len(found.data)} modules, no nvidia",
            "the nvidia module",
            why="a part of lsmod, or the driver is not loaded",
            advice="modprobe nvidia",
        )
    return found


def is_modinfo(text: str) -> bool:
    return (
        re.search(r"^license:\s+\S", text, re.MULTILINE) is not None
        and re.search(r"^version:\s+\S", text, re.MULTILINE) is not None
    )


def parse_modinfo(text: str) -> Recording:
    found = Recording("modinfo nvidia")
    values = {key: told.strip() for key, _, told in (line.partition(":") for line in text.splitlines())}
    flavour = "open" if "GPL" in values["license"] else "closed"
    found.data = {"flavour": flavour, "version": values["version"]}
    signer = values.get("signer")
    found.tell(
        "driver-version",
        "module",
        f"driver {values['version']}, {flavour} modules",
        f"signed by {signer}" if signer else None,
    )
    return found


# the first hexadecimal digits of PCI device ids -> generation
_BLACKWELL = re.compile(r"29|2b|2c|2d|2e|2f|31|32")
_FUNCTION = re.compile(
    r"^([0-9a-f]{4}:)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) [^\[]*\[(03\d\d)\]: .*\[10de:([0-9a-f]{4})\]",
    re.MULTILINE,
)


_SILENT = re.compile(r"^((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)\(rev ff\)", re.MULTILINE)


def is_lspci(text: str) -> bool:
    return re.search(r"^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] \S", text, re.MULTILINE) is not None


def parse_lspci(text: str) -> Recording:
    found = Recording("lspci")
    functions = re.split(r"\n(?=(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] )", text)
    gpus = [((match[1] or "0000:") + match[2], match[4]) for match in _FUNCTION.finditer(text)]
    found.data = {"gpus": gpus, "need_open": [bus for bus, device in gpus if _BLACKWELL.match(device)]}
    judged = 0
    for function in functions:
        bus = function.split(" ", 1)[0]
        control = re.search(r"ACSCtl:\s*(.*)", function)
        if control:
            judged += 1
            on = [
                flag
                for flag in ("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")
                if f"{flag}+" in control[1]
            ]
            bad = "ReqRedir" in on or "CmpltRedir" in on
            found.find(
                WARN if bad else PASS,
                "acs-iommu",
                bus,
                f"ACS {', '.join(on)}" if on else "no ACS redirection",
                "no ACS redirection on bare metal",
                action="warn" if bad else None,
                advice="in firmware, or setpci at boot (maintenance); in a virtual machine leave it"
                if bad
                else None,
            )
        elif "ACSCap" in function or "Access Control Services" in function:
            judged += 1
            found.cut(f"{bus}: ACS capability without its control: cut off?")
        width = re.search(
            r"LnkSta:\s*Speed ([\d.]+)GT/s(?: \((\w+)\))?,? *Width x(\d+)(?: \((\w+)\))?", function
        )
        if width and "[10de:" in function.splitlines()[0] + "[10de:":
            judged += 1
            down = width[4] == "downgraded"
            found.find(
                FAIL if down else PASS,
                "pcie-link",
                bus,
                f"width x{width[3]}",
                "as wide as the card",
                action="reboot" if down else None,
                advice="reseat the card or its riser" if down else None,
            )
    for bus, words in _SILENT.findall(text):
        judged += 1
        found.find(
            FAIL,
            "off-bus",
            bus,
            f"{words.strip()[:80]} (rev ff)",
            "an answer",
            action="reboot",
            why="the card does not answer on the bus",
            advice="drain, reboot; if it comes back: reseat, check power and cooling",
        )
    if gpus:
        judged += 1
        found.tell(
            "gpu-count", "bus", f"{len(gpus)} NVIDIA GPUs on the bus: {', '.join(bus for bus, _ in gpus[:8])}"
        )
    if not judged:
        found.find(
            SKIP,
            "recording",
            "lspci",
            why="neither GPUs (lspci -nn) nor ACS nor link states (lspci -vvv as root) in it",
        )
    found.about = f"{len(functions)} functions"
    return found


def is_devices(text: str) -> bool:
    return (
        re.search(r"cannot access '/dev/nvidia|^(?:c[rwx-]{9}\S*\s.*\s)?/dev/nvidia\d", text, re.MULTILINE)
        is not None
        and "NCCL" not in text
    )


def parse_devices(text: str) -> Recording:
    found = Recording("ls /dev/nvidia*")
    count = len(set(re.findall(r"/dev/nvidia\d+\b", text)))
    if "cannot access" in text or not count:
        found.find(
            FAIL,
            "device-files",
            "node",
            "no device files",
            "one a GPU",
            action="drain",
            why="the driver is not up",
            advice="nvidia-smi; then restart slurmd",
        )
        count = 0
    else:
        found.tell("device-files", "node", f"{count} device files")
    found.data = count
    return found


def is_mount(text: str) -> bool:
    return re.search(r"^\S+ on /\S* type \S+ \(", text, re.MULTILINE) is not None


def parse_mount(text: str) -> Recording:
    found = Recording("mount", data=text)
    mounts = re.findall(r"^(\S+) on (/\S*) type (\S+) \(([^)]*)\)", text, re.MULTILINE)
    for device, path, kind, options in mounts:
        if "ro" in options.split(",") and kind in ("ext4", "xfs", "btrfs", "nfs", "nfs4", "lustre"):
            found.find(
                FAIL,
                "filesystems",
                path,
                f"{device} read-only",
                "writable",
                action="drain",
                advice="dmesg says why; fsck, or the server",
            )
    if any(path == "/sys/fs/cgroup" and kind == "cgroup2" for _, path, kind, _ in mounts):
        found.tell("cgroup", "node", "cgroup v2")
    if not found.findings:
        found.tell("filesystems", "node", f"{len(mounts)} mounts, none read-only")
    return found


def is_plugins(text: str) -> bool:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return bool(lines) and all(re.fullmatch(r"/\S+/slurm/\S+\.so", line) for line in lines)


def parse_plugins(text: str) -> Recording:
    found = Recording("Slurm's plugins")
    found.data = text.split()
    found.tell(
        "slurm-plugins",
        "node",
        f"{len(found.data)} plugins: {', '.join(path.rpartition('/')[2] for path in found.data[:6])}",
    )
    return found


_ROUND = re.compile(r"^(\S+) -> (\S+): (?:unmunge: )?(Error: .+|STATUS: .+)$", re.MULTILINE)


def is_round_trip(text: str) -> bool:
    return _ROUND.search(text) is not None


def parse_round_trip(text: str) -> Recording:
    found = Recording("credentials between hosts")
    for source, target, status in _ROUND.findall(text):
        fine = "Success" in status
        found.find(
            PASS if fine else FAIL,
            "munge-cross",
            f"{source} -> {target}",
            status,
            "Success",
            action=None if fine else "drain",
            advice=None
            if fine
            else f"munge -n on {source}, unmunge on {target}; keys, clocks, when munged started",
        )
    return found


_TIMES = re.compile(r"^(\S+) munge\.key mtime (\S+ \S+?), munged started (\S+ \S+)", re.MULTILINE)


def is_munge_times(text: str) -> bool:
    return _TIMES.search(text) is not None


def parse_munge_times(text: str) -> Recording:
    found = Recording("times of munge's key and daemon")
    for host, key, started in _TIMES.findall(text):
        stale = started < key
        found.find(
            FAIL if stale else PASS,
            "munge-key",
            host,
            f"key of {key}, munged since {started}",
            "munged younger than its key",
            action="fix" if stale else None,
            why="munged is older than its key: it still has the old one" if stale else None,
            advice="systemctl restart munge, then slurmd" if stale else None,
        )
    return found


def is_exporter(text: str) -> bool:
    return (
        re.search(r"DCP metrics|DCGM_FI_\w+|metric not enabled", text) is not None
        and re.search(r"level=\w+ |msg=", text) is not None
    )


def parse_exporter(text: str) -> Recording:
    found = Recording("dcgm-exporter's log")
    skipped = re.findall(r"Skipping line \d+ \('(\w+)'\): ([^\"\n]+)", text)
    reason = re.search(r'Not collecting DCP metrics: ([^"\n]+)', text)
    if skipped or reason:
        why = reason[1] if reason else skipped[0][1]
        found.find(
            WARN,
            "exporter",
            "dcgm-exporter",
            f"profiling fields absent{': ' + ', '.join(name for name, _ in skipped) if skipped else ''}",
            "all fields that were asked for",
            action="warn",
            why=why,
            advice="fields for this kind of GPU; another profiler running? SYS_ADMIN in its container",
        )
    for line in re.findall(r"^.*level=(?:error|fatal).*$", text, re.MULTILINE):
        found.find(
            FAIL,
            "exporter",
            "dcgm-exporter",
            line.strip()[:140],
            "no error",
            action="fix",
            advice="journalctl -u dcgm-exporter",
        )
    if not found.findings:
        found.tell("exporter", "dcgm-exporter", "no error")
    return found


def is_sudo(text: str) -> bool:
    return "unable to resolve host" in text


def parse_sudo(text: str) -> Recording:
    found = Recording("sudo's words")
    match = re.search(r"unable to resolve host (\S+?):? ", text + " ")
    found.find(
        FAIL,
        "own-name",
        match[1] if match else "node",
        "not resolvable",
        "an address",
        action="drain",
        advice="provision apply -c base writes /etc/hosts",
    )
    return found


def is_nhc_result(text: str) -> bool:
    return re.match(r"NHC(?:NA)?:|ERROR:\s+nhc:", text) is not None


def parse_nhc_result(text: str) -> Recording:
    found = Recording("NHC's answer")
    for line in text.splitlines():
        absent = re.match(r"NHCNA: (\w+): (.*)", line)
        failed = re.match(r"ERROR:\s+nhc:\s+(.*)", line)
        if absent:
            found.find(UNKNOWN, "nhc", absent[1], "not run", "a result", why=absent[2])
        elif failed:
            found.find(FAIL, "nhc", "node", failed[1][:140], "no error", action="drain")
        elif line.strip():
            found.tell("nhc", "node", line.strip()[:140])
    return found


def is_counter(text: str) -> bool:
    return re.fullmatch(r"\s*(?:\d+|N/A \(no PMA\))\s*", text) is not None


def parse_counter(text: str) -> Recording:
    found = Recording("a counter file")
    if text.strip().isdigit():
        found.tell("counter", "value", text.strip()[:20])
        found.data = int(text.strip()[:19])
    else:
        found.find(
            SKIP, "counter", "value", why=f"{text.strip()}: this one has no sample, others are not concerned"
        )
    return found


def is_environment(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return (
        bool(lines)
        and all(re.match(r"(?:export )?[A-Z][A-Z0-9_]+=", line) for line in lines)
        and "NCCL" in text
    )


def parse_environment(text: str) -> Recording:
    found = Recording("environment of NCCL")
    found.data = {
        key: told.strip().strip("'\"")
        for key, _, told in (line.removeprefix("export ").partition("=") for line in text.splitlines())
    }
    value = found.data.get("NCCL_SOCKET_IFNAME")
    if value and not value.startswith(("=", "^")):
        found.find(
            WARN,
            "nccl-interface",
            "NCCL_SOCKET_IFNAME",
            value,
            f"={value}",
            action="warn",
            why="the value is a prefix: other interfaces may begin with it",
            advice=f"NCCL_SOCKET_IFNAME=={value}",
        )
    else:
        found.tell("nccl-interface", "NCCL_SOCKET_IFNAME", value or "not set")
    return found


def is_virtual(text: str) -> bool:
    return text.strip() in (
        "none",
        "kvm",
        "qemu",
        "microsoft",
        "vmware",
        "xen",
        "amazon",
        "google",
        "docker",
        "lxc",
        "systemd-nspawn",
    )


def parse_virtual(text: str) -> Recording:
    found = Recording("systemd-detect-virt", data=text.strip())
    found.tell("virtual", "node", "bare metal" if text.strip() == "none" else text.strip())
    return found


KINDS: tuple[Kind, ...] = (
    Kind("lspci", is_lspci, parse_lspci),
    Kind("modinfo nvidia", is_modinfo, parse_modinfo),
    Kind("lsmod", is_lsmod, parse_lsmod),
    Kind("ls /dev/nvidia*", is_devices, parse_devices),
    Kind("mount", is_mount, parse_mount),
    Kind("Slurm's plugins", is_plugins, parse_plugins),
    Kind("credentials between hosts", is_round_trip, parse_round_trip),
    Kind("times of munge's key and daemon", is_munge_times, parse_munge_times),
    Kind("dcgm-exporter's log", is_exporter, parse_exporter),
    Kind("sudo's words", is_sudo, parse_sudo),
    Kind("NHC's answer", is_nhc_result, parse_nhc_result),
    Kind("a counter file", is_counter, parse_counter),
    Kind("environment of NCCL", is_environment, parse_environment),
    Kind("systemd-detect-virt", is_virtual, parse_virtual),
)
