"""InfiniBand and RoCE: ibstat, ibstatus, perfquery, mlxlink, iblinkinfo, ibdiagnet and others. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from provision.health.finding import FAIL, PASS, SKIP, WARN
from provision.health.readings import Device
from provision.inspect.recording import Kind, Recording


def is_ibstat(text: str) -> bool:
    return re.search(r"^CA '[^']+'", text, re.MULTILINE) is not None


_FIELDS = {
    "State": "state",
    "Physical state": "phys_state",
    "Rate": "rate",
    "Link layer": "link_layer",
    "Base lid": "lid",
}


def parse_ibstat(text: str) -> Recording:
    found = Recording("ibstat")
    ports: list[Device] = []
    adapters: dict[str, int | None] = {}
    firmware: dict[str, str] = {}
    types: dict[str, str] = {}
    adapter = ""
    for line in text.splitlines():
        begun = re.match(r"CA '([^']+)'", line)
        numbered = re.match(r"\s+Port (\d+):\s*$", line)
        field = re.match(r"\s+([A-Z][\w ]+?): *(.*)$", line)
        if begun:
            adapter = begun[1]
            adapters[adapter] = None
        elif numbered and adapter:
            ports.append(
                Device(
                    f"{adapter}:{numbered[1]}",
                    {"device": adapter, "fw_ver": firmware.get(adapter)},
                    found.kind,
                )
            )
        elif field and field[1] == "CA type":
            types[adapter] = field[2]
        elif field and field[1] == "Number of ports" and field[2].isdigit():
            adapters[adapter] = int(field[2][:4])
        elif field and field[1] == "Firmware version":
            firmware[adapter] = field[2]
        elif field and field[1] in _FIELDS and ports and ports[-1].get("device") == adapter:
            ports[-1].values[_FIELDS[field[1]]] = _port_value(_FIELDS[field[1]], field[2].strip())
    for name, count in adapters.items():
        seen = [port for port in ports if port.get("device") == name]
        if count is None or len(seen) != count:
            found.cut(
                f"{name} has {count if count is not None else 'no number of'} ports, {len(seen)} are told: cut off?"
            )
    for port in ports:
        missing = [key for key in ("state", "phys_state", "rate", "link_layer") if port.get(key) is None]
        if missing:
            found.cut(f"{port.subject} without {', '.join(missing)}: cut off?")
            port.values.setdefault("state", "unknown")
        if port.get("link_layer") == "Ethernet":
            port.values.pop("lid", None)  # 0 is right there
        if port.get("phys_state") != "LinkUp":
            port.values.pop("rate", None)  # what a port that is down says of its rate means nothing
    if ports and not _whole(text):
        found.cut("ends in the middle of a line")
    for port, usual in _slower(ports, types):
        found.find(
            WARN,
            "port",
            port.subject,
            f"{port['rate']:g} Gbit/s",
            f"{usual:g} Gbit/s as all others of its type",
            action="warn",
            advice="cable, transceiver, or the switch's port",
        )
    found.node = Device("node", {"ports": ports}, found.kind)
    found.about = f"{len(adapters)} adapters, {len(ports)} ports"
    return found


def _slower(ports: list[Device], types: dict[str, str]) -> list[tuple[Device, float]]:
    """The one port that is slower than all others of its type of adapter, of three or more, with their rate."""
    found = []
    for kind in set(types.values()):
        alike = [port for port in ports if types.get(port["device"]) == kind and port.get("rate") is not None]
        rates = Counter(port["rate"] for port in alike)
        if len(alike) > 3 and len(rates) == 2 and min(rates.values()) == 1:
            usual = rates.most_common(1)[0][0]
            found += [(port, usual) for port in alike if port["rate"] < usual]
    return found


def _port_value(name: str, text: str) -> Any:
    if name == "rate":
        number = re.match(r"\d+(?:\.\d+)?", text)
        return float(number[0]) if number else None
    if name == "lid":
        return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}|[1-9]\d{0,7}|0", text) else None
    return text


def is_ibstatus(text: str) -> bool:
    return re.search(r"^Infiniband device '[^']+' port \d+ status:", text, re.MULTILINE) is not None


def parse_ibstatus(text: str) -> Recording:
    found = Recording("ibstatus")
    ports: list[Device] = []
    names = {
        "state": "state",
        "phys state": "phys_state",
        "rate": "rate",
        "link_layer": "link_layer",
        "base lid": "lid",
    }
    for line in text.splitlines():
        begun = re.match(r"Infiniband device '([^']+)' port (\d+) status:", line)
        field = re.match(r"\s+([\w ]+?):\s+(.*)$", line)
        if begun:
            ports.append(Device(f"{begun[1]}:{begun[2]}", {"device": begun[1]}, found.kind))
        elif field and ports and field[1] in names:
            told = field[2].strip()
            if names[field[1]] in ("state", "phys_state"):
                told = told.partition(": ")[2] or told
            ports[-1].values[names[field[1]]] = _port_value(names[field[1]], told)
    for port in ports:
        missing = [key for key in ("state", "phys_state", "rate", "link_layer") if port.get(key) is None]
        if missing:
            found.cut(f"{port.subject} without {', '.join(missing)}: cut off?")
            port.values.setdefault("state", "unknown")
        if port.get("link_layer") == "Ethernet":
            port.values.pop("lid", None)
    if not _whole(text):
        found.cut("ends in the middle of a line")
    found.node = Device("node", {"ports": ports}, found.kind)
    found.about = f"{len(ports)} ports"
    return found


def _whole(text: str) -> bool:
    """Whether the last line of ibstat or ibstatus is whole: with its end, or with the last word of a port."""
    return text.endswith("\n") or re.search(r"[Ll]ink.layer: +(?:InfiniBand|Ethernet)$", text) is not None


# with -v the PCI address stands first, board, firmware and the port's state between
_DEV = re.compile(
    r"(?:[\da-f]{4}:[\da-f]{2}:[\da-f]{2}\.\d )?(\S+) (?:.* )?port (\d+) (?:\(\w+ *\) )?==> (\S+) \((\w+)\)\s*"
)


def is_ibdev2netdev(text: str) -> bool:
    return any(_DEV.fullmatch(line) for line in text.splitlines()[:20])


def parse_ibdev2netdev(text: str) -> Recording:
    found = Recording("ibdev2netdev")
    states = []
    for line in text.splitlines():
        told = _DEV.fullmatch(line)
        if told:
            states.append(told[4])
            up = told[4] == "Up"
            found.find(
                PASS if up else FAIL,
                "port",
                f"{told[1]}:{told[2]}",
                f"{told[3]} {told[4]}",
                "Up",
                action=None if up else "drain",
                advice=None if up else "ibstat; ip link; cable, subnet manager",
            )
        elif line.strip():
            found.cut(f"not a line of ibdev2netdev: {line[:60]!r}")
    found.node.values["port.count"] = len(states)
    found.about = f"{len(states)} ports, {states.count('Up')} up"
    return found


_COUNTERS = {
    "SymbolErrorCounter": "symbol_error",
    "LinkErrorRecoveryCounter": "link_error_recovery",
    "LinkDownedCounter": "link_downed",
    "PortRcvErrors": "port_rcv_errors",
    "LocalLinkIntegrityErrors": "local_link_integrity_errors",
    "ExcessiveBufferOverrunErrors": "excessive_buffer_overrun_errors",
}


def is_perfquery(text: str) -> bool:
    return (
        re.search(
            r"^# (?:Port (?:extended )?counters|Port \w+ counters)|^(?:SymbolErrorCounter|PortXmitData):\.+",
            text,
            re.MULTILINE,
        )
        is not None
    )


def parse_perfquery(text: str) -> Recording:
    found = Recording("perfquery")
    ports: list[Device] = []
    for line in text.splitlines():
        head = re.match(r"# Port .*?: Lid (\d+) port (\d+)", line)
        told = re.match(r"(\w+):\.+(\S+)\s*$", line)
        if head:
            ports.append(Device(f"lid {head[1]} port {head[2]}", {}, found.kind))
        elif told and told[1] in _COUNTERS:
            if not ports:
                ports.append(Device("port", {}, found.kind))
            number = told[2]
            if number.isdigit():
                ports[-1].values[_COUNTERS[told[1]]] = int(number[:18])
            else:
                found.cut(f"{told[1]} is {number!r}, no number")
    for port in ports:
        missing = [name for name, key in _COUNTERS.items() if not port.told(key)]
        if len(missing) == len(_COUNTERS) and "PortXmitData" in text:
            found.find(
                SKIP,
                "symbol-errors",
                port.subject,
                why="traffic alone, no counters of errors: perfquery without -x",
            )
        elif missing:
            found.cut(f"{port.subject} without {', '.join(missing[:3])}: cut off?")
        downed = port.get("link_downed")
        if downed:
            found.find(
                WARN,
                "link-flaps",
                port.subject,
                f"link_downed {downed}",
                "0",
                action="warn",
                why="since the counters were reset",
                advice="perfquery -R, then read again in an hour",
            )
    if not ports:
        found.cut("no counter in it")
    found.node = Device("node", {"ports": ports}, found.kind)
    found.about = f"{len(ports)} ports"
    return found


def is_details(text: str) -> bool:
    return re.search(r"^# Port\w+Details counters: ", text, re.MULTILINE) is not None


def parse_details(text: str) -> Recording:
    found = Recording("perfquery's details")
    subject = ""
    told = 0
    for line in text.splitlines():
        head = re.match(r"# Port\w+ counters: Lid (\d+) port (\d+)", line)
        counter = re.match(r"(\w*Errors\w*):\.+(\d+)\s*$", line)
        if head:
            subject = f"lid {head[1]} port {head[2]}"
        elif counter:
            told += 1
            if counter[2].strip("0"):
                found.find(
                    WARN,
                    "symbol-errors",
                    subject or "port",
                    f"{counter[1]} {counter[2]}",
                    "0",
                    action="warn",
                    why="since the counters were reset",
                    advice="perfquery -R, then read again: does it grow?",
                )
    if not told:
        found.cut("no counter in it")
    elif not found.findings:
        found.tell("symbol-errors", subject or "port", f"{told} counters at 0")
    return found


_NET = re.compile(
    r"(CA|SW|RT)\s+(\d+)\s+(\d+)\s+(0x[0-9a-f]+)\s+(\d+x)\s+(\S+)\s*(?:-\s+(CA|SW|RT)\s+(\d+)\s+(\d+)\s+(0x[0-9a-f]+)\s+\(\s*'([^']*)'\s+-\s+'([^']*)'\s*\)|'([^']*)')\s*"
)


def is_ibnetdiscover(text: str) -> bool:
    return any(_NET.fullmatch(line) for line in text.splitlines()[:5])


def parse_ibnetdiscover(text: str) -> Recording:
    found = Recording("ibnetdiscover -p")
    links = []
    idle = 0
    for line in text.splitlines():
        told = _NET.fullmatch(line)
        if told is None:
            if line.strip() and not line.startswith("#"):
                found.cut(f"not a line of ibnetdiscover -p: {line[:60]!r}")
        elif told[7] is None:
            idle += 1
        else:
            links.append((f"{told[11]} port {told[3]}", f"{told[5]} {told[6]}"))
    speeds = Counter(speed for _, speed in links)
    usual = speeds.most_common(1)[0][0] if speeds else ""
    slow = [(name, speed) for name, speed in links if speed != usual]
    for name, speed in slow:
        found.find(
            WARN,
            "port",
            name,
            speed,
            f"{usual} as most links",
            action="warn",
            advice="cable, transceiver or port of a lower speed",
        )
    if links and not slow:
        found.tell("port", f"{len(links)} link ends", usual)
    if idle:
        found.find(SKIP, "port", f"{idle} switch ports", why="nothing is connected there")
    if not links:
        found.cut("no link in it")
    found.about = f"{len(links)} link ends, {idle} free ports"
    return found


def is_manifest(text: str) -> bool:
    return '"intf_status"' in text and '"link_speed"' in text


def parse_manifest(text: str) -> Recording:
    found = Recording("network interfaces (JSON)")
    try:
        told = json.loads(text)
        interfaces: dict[str, dict[str, Any]] = {
            str(each["ifname"]): dict(each) for each in told["intf_status"]
        }
        speeds = {str(name): int(speed or 0) for name, speed in told["link_speed"].items()}
        configured = {
            str(name): dict(each or {}) for name, each in dict(told.get("intf_ifcfg") or {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found.cut(f"not the JSON of interfaces: {error!r}; cut off?")
        return found
    expected = Counter(speed for name, speed in speeds.items() if not _bond(interfaces.get(name, {})))
    best = max(expected, default=0)
    for name in sorted(set(configured) | set(speeds)):
        if name not in interfaces:
            found.find(
                FAIL,
                "port",
                name,
                "no such interface",
                "up",
                action="drain",
                advice="lspci; dmesg | grep mlx5; cable",
            )
            continue
        each = interfaces[name]
        state, flags = str(each.get("operstate")), each.get("flags", [])
        fine = state == "UP" and "LOWER_UP" in flags
        found.find(
            PASS if fine else FAIL,
            "port",
            name,
            f"{state}, {speeds.get(name, 0) // 1000} Gbit/s",
            "UP",
            action=None if fine else "drain",
            advice=None if fine else "cable and transceiver",
        )
        mtu = str(configured.get(name, {}).get("MTU", each.get("mtu")))
        if mtu != str(each.get("mtu")):
            found.find(
                FAIL,
                "mtu",
                name,
                f"MTU {each.get('mtu')}",
                f"{mtu} as configured",
                action="drain",
                advice=f"ip link set {name} mtu {mtu}",
            )
    for name in interfaces:
        members = [
            other for other, about in interfaces.items() if name in (about.get("main"), about.get("master"))
        ]
        total = sum(speeds.get(member, 0) for member in members)
        if members and speeds.get(name, 0) < total:
            found.find(
                FAIL,
                "port",
                name,
                f"{speeds.get(name, 0) // 1000} Gbit/s",
                f"{total // 1000} of {len(members)} members",
                action="drain",
                advice="cat /proc/net/bonding/" + name,
            )
        uneven = {str(interfaces[member].get("mtu")) for member in [*members, name]} if members else set()
        if len(uneven) > 1:
            found.find(
                FAIL,
                "mtu",
                name,
                f"MTUs {', '.join(sorted(uneven))}",
                "one for the bond and its members",
                action="drain",
                advice=f"ip link set {name} mtu ...",
            )
    members_missing = [
        name
        for name, about in configured.items()
        if str(about.get("SLAVE")).lower() == "yes" and name not in interfaces
    ]
    found.about = f"{len(interfaces)} interfaces, fastest {best // 1000} Gbit/s" + (
        f", {len(members_missing)} missing" if members_missing else ""
    )
    found.data = {
        "bonds": [name for name, each in interfaces.items() if _bond(each)],
        "speeds": speeds,
        "mtus": {name: each.get("mtu") for name, each in interfaces.items()},
    }
    return found


def _bond(interface: dict[str, Any]) -> bool:
    return "MASTER" in interface.get("flags", [])


def is_guids(text: str) -> bool:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) >= 2 and all(
        re.fullmatch(r"VM_hostname \S+|(?:0x)?[0-9a-f]{16}", line) for line in lines
    )


def parse_guids(text: str) -> Recording:
    found = Recording("port GUIDs of hosts")
    seen: dict[str, str] = {}
    host = "?"
    for line in text.splitlines():
        if line.startswith("VM_hostname"):
            host = line.split()[1]
        elif line.strip():
            guid = line.strip().removeprefix("0x")
            if guid in seen:
                found.find(
                    FAIL,
                    "port-guid",
                    host,
                    f"{guid} is also {seen[guid]}'s",
                    "a GUID of its own",
                    action="drain",
                    advice="a clone? set its own GUID",
                )
            seen.setdefault(guid, host)
    if not found.findings:
        found.tell("port-guid", f"{len(set(seen.values()))} hosts", f"{len(seen)} different GUIDs")
    return found


def is_devinfo(text: str) -> bool:
    return re.search(r"^hca_id:\s", text, re.MULTILINE) is not None


def parse_devinfo(text: str) -> Recording:
    found = Recording("ibv_devinfo")
    ports: list[Device] = []
    adapter, firmware = "?", None
    for line in text.splitlines():
        field = re.match(r"\s*(hca_id|fw_ver|port|state|port_lid|link_layer):\s+(\S+)", line)
        if field is None:
            continue
        name, told = field[1], field[2]
        if name == "hca_id":
            adapter, firmware = told, None
        elif name == "fw_ver":
            firmware = told
        elif name == "port":
            ports.append(Device(f"{adapter}:{told}", {"device": adapter, "fw_ver": firmware}, found.kind))
        elif ports and name == "state":
            ports[-1].values["state"] = told.removeprefix("PORT_")
        elif ports and name == "port_lid":
            ports[-1].values["lid"] = _port_value("lid", told)
        elif ports and name == "link_layer":
            ports[-1].values["link_layer"] = told
    for port in ports:
        if not port.told("state") or not port.told("link_layer"):
            found.cut(f"{port.subject} is not told to its end: cut off?")
            port.values.setdefault("state", "unknown")
        if port.get("link_layer") == "Ethernet":
            port.values.pop("lid", None)
    if not ports:
        found.cut("an adapter without a port: cut off?")
    found.node = Device("node", {"ports": ports}, found.kind)
    found.about = f"{len(ports)} ports"
    return found


_RDMA = re.compile(
    r"(?:\d+/\d+: |link )?(\w+)/(\d+)[: ].*?state (\w+) physical_state (\w+)(?: netdev (\S+))?.*"
)


def is_rdma(text: str) -> bool:
    return re.search(r"\bstate \w+ physical_state \w+", text) is not None


def parse_rdma(text: str) -> Recording:
    found = Recording("rdma link")
    ports = []
    for line in text.splitlines():
        told = _RDMA.match(line.strip())
        if told:
            physical = {"LINK_UP": "LinkUp", "POLLING": "Polling", "DISABLED": "Disabled"}.get(
                told[4], told[4]
            )
            values = {"device": told[1], "state": told[3], "phys_state": physical, "link_layer": "RDMA"}
            ports.append(Device(f"{told[1]}:{told[2]}", values, found.kind))
        elif line.strip():
            found.cut(f"not a line of rdma link: {line.strip()[:60]!r}")
    found.node = Device("node", {"ports": ports}, found.kind)
    found.about = f"{len(ports)} ports"
    return found


def is_mlxlink(text: str) -> bool:
    return re.search(r"^Operational Info\s*$", text, re.MULTILINE) is not None


def parse_mlxlink(text: str) -> Recording:
    found = Recording("mlxlink")
    links = re.split(r"^Operational Info\s*$", text, flags=re.MULTILINE)[1:]
    for number, link in enumerate(links):
        told = dict(re.findall(r"^([A-Z][\w .\[\]/%-]*?) *: (.*?) *$", link, re.MULTILINE))
        device = re.search(r"^(?:[=#-]+ )?(\S*(?:mlx5_|pciconf)\S*)", text, re.MULTILINE)
        subject = f"link {number}" if len(links) > 1 else device[1] if device else "link"
        state, physical, advice = (told.get(key) for key in ("State", "Physical state", "Recommendation"))
        if state is None or physical is None or advice is None:
            found.cut(f"{subject} without its state or recommendation: cut off?")
            continue
        up = state == "Active"
        found.find(
            PASS if up else FAIL,
            "port",
            subject,
            f"{state}, {physical}, {told.get('Speed', '?')} {told.get('Width', '')}".strip(),
            "Active",
            action=None if up else "drain",
            why=None if up else advice,
            advice=None if up else "cable and transceiver, the port at the other end",
        )
        if up and advice != "No issue was observed":
            found.find(
                WARN, "port", subject, advice, "no issue", action="warn", advice="cable and transceiver"
            )
    if not text.endswith("\n"):
        found.cut("ends in the middle of a line")
    found.about = f"{len(links)} links"
    return found


def is_ibdiagnet(text: str) -> bool:
    return (
        re.search(r"^-I- (?:Discovery|Links Check|Port Counters)\s+\d+\s+\d+", text, re.MULTILINE) is not None
    )


def parse_ibdiagnet(text: str) -> Recording:
    found = Recording("ibdiagnet")
    stages = re.findall(r"^-I- (\w[\w /]*?)[ \t]+(\d+)[ \t]+(\d+)(?:[ \t]+(\S.*))?$", text, re.MULTILINE)
    for stage, warnings, errors, comment in stages:
        bad = errors.strip("0")
        verdict = FAIL if bad else WARN if warnings.strip("0") else PASS
        found.find(
            verdict,
            "fabric",
            stage,
            f"{errors} errors, {warnings} warnings",
            "none",
            action={FAIL: "drain", WARN: "warn"}.get(verdict),
            why=comment or None,
            advice=None
            if verdict == PASS
            else "the lines -E- and -W- of this stage in ibdiagnet2.log name the ports",
        )
    if not re.search(r"^Summary\s*$|^-I- Stage\s", text, re.MULTILINE):
        found.cut("no summary: cut off?")
    found.about = f"{len(stages)} stages"
    return found


_ENDS = re.compile(r"(\d+)\s+(\d+)\[.*?\] ==\(\s*(.*?)\)==>\s*(.*)")


def is_iblinkinfo(text: str) -> bool:
    return any(_ENDS.search(line) for line in text.splitlines()[:50])


def parse_iblinkinfo(text: str) -> Recording:
    found = Recording("iblinkinfo")
    owner = "?"
    states: Counter[str] = Counter()
    for line in text.splitlines():
        named = re.match(r"(?:CA|Switch|Router): (?:0x\w+ )?(.*?):?\s*$", line)
        told = _ENDS.search(line)
        if named:
            owner = named[1]
        elif told:
            state = "Active" if "Active/" in told[3] else "Down" if "Down/" in told[3] else "other"
            states[state] += 1
            could = re.search(r"\(\s*(Could be [^)]*?)\s*\)", told[4])
            if state == "other":
                found.find(
                    FAIL,
                    "port",
                    f"{owner} port {told[2]}",
                    " ".join(told[3].split()),
                    "Active",
                    action="drain",
                    advice="subnet manager; cable",
                )
            elif state == "Active" and could:
                found.find(
                    WARN,
                    "port",
                    f"{owner} port {told[2]}",
                    " ".join(told[3].split()),
                    could[1],
                    action="warn",
                    advice="cable, transceiver or port of a lower speed",
                )
        elif line.strip():
            found.cut(f"not a line of iblinkinfo: {line.strip()[:60]!r}")
    if states["Active"] and not found.findings:
        found.tell("port", f"{states['Active']} ports", "Active")
    if states["Down"]:
        found.find(SKIP, "port", f"{states['Down']} ports", why="nothing answers there")
    found.about = f"{states.total()} ports, {states['Active']} active"
    return found


KINDS = (
    Kind("mlxlink", is_mlxlink, parse_mlxlink),
    Kind("ibdiagnet", is_ibdiagnet, parse_ibdiagnet),
    Kind("iblinkinfo", is_iblinkinfo, parse_iblinkinfo),
    Kind("ibv_devinfo", is_devinfo, parse_devinfo),
    Kind("rdma link", is_rdma, parse_rdma),
    Kind("ibstat", is_ibstat, parse_ibstat),
    Kind("ibstatus", is_ibstatus, parse_ibstatus),
    Kind("ibdev2netdev", is_ibdev2netdev, parse_ibdev2netdev),
    Kind("perfquery's details", is_details, parse_details),
    Kind("perfquery", is_perfquery, parse_perfquery),
    Kind("ibnetdiscover -p", is_ibnetdiscover, parse_ibnetdiscover),
    Kind("network interfaces (JSON)", is_manifest, parse_manifest),
    Kind("port GUIDs of hosts", is_guids, parse_guids),
)
