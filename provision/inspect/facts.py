"""Facts of nodes and wishes, as small JSON, YAML and CSV that people and scripts write down. Pure.

Every shape that is understood is recognised by its keys; others are not guessed at.
"""

from __future__ import annotations

import csv
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from provision.health.decide import MARK
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN
from provision.inspect.recording import Kind, Recording

Judge = Callable[[Any], Recording]
MEMORY_TOLERANCE = 0.03


def document(text: str) -> Any:
    """The JSON or YAML document in `text`; None where it is neither, or only text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if not re.match(r"\s*[\w\"'-][\w .\"'-]*:\s|\s*- ", text) or len(text) > 1_000_000:
        return None
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list)) else None


def _all(value: Any, *keys: str) -> bool:
    """Whether `value` is a mapping, or a list of mappings, each with all of `keys`."""
    if isinstance(value, dict):
        return all(key in value for key in keys)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and all(key in each for key in keys) for each in value)
    )


def _each(value: Any) -> list[dict[str, Any]]:
    return [value] if isinstance(value, dict) else list(value)


# ---- GPUs


def _counts(value: Any) -> Recording:
    found = Recording("counts of GPUs")
    for node in _each(value):
        wanted, pci, nvml = (int(node[key]) for key in ("wanted", "pci", "nvml"))
        devices = node.get("dev")
        subject = str(node.get("node", "node"))
        if pci < wanted:
            found.find(
                FAIL,
                "gpu-count",
                subject,
                f"{pci} on the bus, {nvml} by NVML",
                str(wanted),
                action="drain",
                why="not on the bus",
                advice="power, seat; BMC; reboot",
            )
        elif nvml < pci:
            found.find(
                FAIL,
                "gpu-count",
                subject,
                f"{pci} on the bus, {nvml} by NVML",
                str(wanted),
                action="drain",
                why="the driver lost one",
                advice="dmesg | grep NVRM; reboot",
            )
        else:
            found.tell("gpu-count", subject, f"{nvml} of {wanted}")
        if devices is not None and devices < nvml:
            root = node.get("driver_root")
            found.find(
                SKIP if root else FAIL,
                "device-files",
                subject,
                f"{devices}",
                str(nvml),
                action=None if root else "drain",
                why=f"device files live under the driver root {root}" if root else None,
            )
    return found


def _cuda(value: Any) -> Recording:
    found = Recording("CUDA of driver and image")
    for node in _each(value):
        driver, image = (
            tuple(int(part) for part in re.findall(r"\d+", str(node[key]))[:2])
            for key in ("driver_cuda", "image_cuda")
        )
        subject, read = (
            str(node.get("node", "node")),
            f"driver {node.get('driver', '?')} carries CUDA {node['driver_cuda']}, image has {node['image_cuda']}",
        )
        if image <= driver:
            found.tell("cuda-version", subject, read)
        elif image[:1] == driver[:1]:
            found.find(
                WARN,
                "cuda-version",
                subject,
                read,
                "not newer than the driver's",
                action="warn",
                why="same major version: allowed by minor compatibility, without newer features and PTX",
            )
        else:
            found.find(
                FAIL,
                "cuda-version",
                subject,
                read,
                "not newer than the driver's",
                action="drain",
                why="needs a newer driver" + (" or compat libraries" if node.get("datacentre") else ""),
            )
    return found


def _fabric_started(value: Any) -> Recording:
    found = Recording("times of driver and fabric manager")
    late = value["fabricmanager_started"] - value["driver_loaded"]
    bad = late > 600 and not value.get("gpu_reset_after")
    found.find(
        FAIL if bad else PASS,
        "fabric-manager",
        "node",
        f"fabric manager started {late} s after the driver",
        "at boot, or GPUs reset after it",
        action="reset" if bad else None,
        why="restarted after the GPUs were initialised: NVLink SHARP fails" if bad else None,
        advice="drain, reset all GPUs or reboot" if bad else None,
    )
    return found


def _dcgm_running(value: Any) -> Recording:
    found = Recording("versions of DCGM")
    same = value["package"] == value["running_hostengine"]
    found.find(
        PASS if same else FAIL,
        "dcgm-version",
        "host engine",
        f"running {value['running_hostengine']}, installed {value['package']}",
        "equal",
        action=None if same else "fix",
        why=None if same else "restart needed",
        advice=None if same else "systemctl restart nvidia-dcgm, then its clients",
    )
    return found


def _mig(value: Any) -> Recording:
    found = Recording("MIG configuration")
    for name, entries in value.items():
        covered: set[int] = set()
        for entry in entries:
            devices = entry["devices"]
            layout = entry.get("mig-devices") or {}
            told = (
                f"{sum(layout.values())} devices: {', '.join(f'{count} x {kind}' for kind, count in layout.items())}"
                if layout
                else "no devices"
            )
            state = told if entry["mig-enabled"] else "MIG off"
            subjects = [f"GPU {number}" for number in devices] if isinstance(devices, list) else ["all GPUs"]
            if isinstance(devices, list):
                covered |= set(devices)
            for subject in subjects:
                found.tell("mig-layout", f"{name} {subject}", state)
        for number in range(max(covered, default=-1)):
            if number not in covered:
                found.tell("mig-layout", f"{name} GPU {number}", "MIG off", "not named: left as it is")
    return found


def _bandwidth(value: Any) -> Recording:
    found = Recording("results of a collective")
    for each in _each(value):
        limit, got = float(each["limit"]), float(each["avg_busbw"])
        subject = str(each.get("node", "run"))
        if got < 0.2 * limit:
            transport = each.get("transport")
            found.find(
                UNKNOWN,
                "nccl-bandwidth",
                subject,
                f"{got:g} GB/s",
                f">= {limit:g} GB/s",
                why=f"set-up suspect, not the hardware{': transport ' + str(transport) if transport else ''}",
                advice="which transport? again with the reference container before anybody drains",
            )
        else:
            found.find(
                PASS if got >= limit else FAIL,
                "nccl-bandwidth",
                subject,
                f"{got:g} GB/s",
                f">= {limit:g} GB/s",
                action=None if got >= limit else "drain",
            )
    return found


def _products(value: Any) -> Recording:
    found = Recording("NVLinks and bandwidth of nodes", data=_each(value))
    for each in _each(value):
        found.find(
            SKIP,
            "nvlink-count",
            str(each.get("node", "node")),
            f"{each['product']}: {each['nvlinks_active']} up, {each.get('busbw')} GB/s",
            why="limits of this product are in another file",
        )
    return found


# ---- nodes and Slurm


def _names(value: Any) -> Recording:
    found = Recording("names of a host", data=value)
    short = str(value["hostname"]).partition(".")[0]
    known = short in value["nodenames"]
    found.find(
        PASS if known else FAIL,
        "node-name",
        str(value["hostname"]),
        short if known else "no NodeName",
        "a NodeName of the scheduler",
        action=None if known else "drain",
        advice=None if known else "compare the host's name with slurm.conf",
    )
    return found


def _drained(value: Any) -> Recording:
    found = Recording("drained nodes", data=_each(value))
    for each in _each(value):
        found.find(
            SKIP,
            "resume",
            str(each["node"]),
            f"{each['state']}: {each['reason'] or 'no reason'}",
            why=f"not this tool's: its reasons begin with {MARK!r}",
        )
    return found


def _after(value: Any) -> Recording:
    found = Recording("a check and the state after it")
    for each in _each(value):
        state = str(each["state_after"]).upper()
        bad = each["result"] == "fail" and not re.search(r"DRAIN|DOWN|FAIL", state)
        found.find(
            FAIL if bad else PASS,
            "drain-effect",
            str(each.get("node", "node")),
            f"{each['result']}, still {state}" if bad else f"{each['result']}, {state}",
            "drained after a failure",
            action="drain" if bad else None,
            why="ALARM: the check failed and the node still takes jobs" if bad else None,
            advice="scontrol update nodename=NODE state=drain reason=..." if bad else None,
        )
    return found


def _machine(value: Any) -> Recording:
    found = Recording("facts of a machine", data=value)
    fixed = {key: told for key, told in value.items() if not re.search(r"free|avail|mhz|used|load", key)}
    found.tell(
        "facts",
        "node",
        ", ".join(f"{key} {told}" for key, told in fixed.items()),
        "only what does not change is compared",
    )
    return found


def _collectors(value: Any) -> Recording:
    found = Recording("devices of a host")
    off = [kind for kind in ("infiniband", "nvme") if not value.get(kind)]
    for kind in off:
        found.find(
            SKIP,
            "exporter",
            str(value["host"]),
            f"no {kind}",
            why=f"node_exporter needs --no-collector.{kind}",
        )
    found.tell(
        "exporter",
        str(value["host"]),
        f"collectors on: {', '.join(k for k in ('infiniband', 'nvme') if value.get(k)) or 'none'}",
    )
    return found


# ---- networks


def _addresses(value: Any) -> Recording:
    found = Recording("addresses of hosts", data=value)
    for host, interfaces in value.items():
        networks = {name: ipaddress.ip_interface(told).network for name, told in interfaces.items()}
        pairs = [(a, b) for a in networks for b in networks if a < b and networks[a].overlaps(networks[b])]
        for a, b in pairs:
            found.find(
                FAIL,
                "overlapping-networks",
                host,
                f"{a} and {b} are both in {networks[a]}",
                "a network for each interface",
                action="drain",
                why="answers leave by the other interface",
                advice="one network a rail, or source routing",
            )
        if not pairs:
            found.tell("overlapping-networks", host, "none")
    return found


def _routes(value: Any) -> Recording:
    found = Recording("routes between hosts", data=value)
    for host, peers in value.items():
        for peer, route in peers.items():
            found.tell("route", f"{host} -> {peer}", f"by {route['dev']} ({route['src']})")
    return found


# ---- a launch over several nodes


def _names_seen(value: Any) -> Recording:
    found = Recording("names as other hosts resolve them", data=value)
    for each in value.values():
        for other, address in each["seen_by"].items():
            loops = address is not None and _loopback(address)
            good = address is not None and not loops
            found.find(
                PASS if good else FAIL,
                "names-resolve",
                other,
                f"{each['fqdn']} is {address}" if address else f"cannot resolve {each['fqdn']}",
                "an address that leads there",
                action=None if good else "drain",
                why=None
                if good
                else f"{other} would talk to itself"
                if loops
                else "all ranks wait for this one",
                advice=None if good else "/etc/hosts or DNS; or give the launch an address",
            )
    return found


def _endpoint(value: Any) -> Recording:
    found = Recording("where a launch meets", data=value)
    head = value["head"]
    name, host = str(value["endpoint"]).rpartition(":")[0], str(head["hostname"])
    address = name if _is_address(f"{name}/32") else (head.get("resolves") or {}).get(name)
    good = address in head["addrs"] or (address is None and name == host)
    read = f"{address} is no address of {host}" if address else f"{host} cannot resolve {name}"
    found.find(
        PASS if good else FAIL,
        "launch-endpoint",
        host,
        f"{name} is {host}" if good else read,
        f"one of {', '.join(map(str, head['addrs']))}",
        action=None if good else "drain",
        why=None if good else "no node serves there: all connect to nothing",
        advice=None if good else f"give the launch an address of {host}",
    )
    return found


def _probes(value: Any) -> Recording:
    found = Recording("connections between hosts", data=_each(value))
    for each in _each(value):
        pair, where = f"{each['from']} -> {each['to']}", f"{each['addr']} port {each['port']}"
        if each["from"] == each["to"] or _loopback(each["addr"]):
            found.find(SKIP, "launch-port", pair, where, why="a host that reaches itself shows nothing")
            continue
        closed = each["error"] is not None
        found.find(
            FAIL if closed else PASS,
            "launch-port",
            pair,
            f"{where}: {each['error']}" if closed else f"{where}: open",
            "open",
            action="drain" if closed else None,
            why=f"closed: {each['error']}" if closed else None,
            advice="firewall between the nodes; does the name lead to another interface?" if closed else None,
        )
    return found


def _loopback(address: Any) -> bool:
    return _is_address(f"{address}/32") and ipaddress.ip_address(address).is_loopback


def _interfaces(value: Any) -> Recording:
    found = Recording("interfaces of hosts", data=value)
    for host, names in value.items():
        found.tell("interfaces", host, ", ".join(map(str, names)))
    return found


def _slurm_roles(value: Any) -> Recording:
    found = Recording("roles and settings of Slurm")
    told = value.get("slurm_config") or {}
    needs = "dbd" in value["roles"] and "AccountingStorageType" not in told
    found.find(
        WARN if needs else PASS,
        "slurm-accounting",
        "slurm.conf",
        "a database role and no AccountingStorageType" if needs else "consistent",
        "accounting_storage/slurmdbd",
        action="warn" if needs else None,
        advice="AccountingStorageType=accounting_storage/slurmdbd; start slurmdbd, slurmctld, sacctmgr in this order"
        if needs
        else None,
    )
    return found


# ---- wishes: nothing is wrong with them alone


def _wish(kind: str) -> Judge:
    def parse(value: Any) -> Recording:
        found = Recording(kind, data=value)
        found.find(SKIP, "expectation", kind, json.dumps(value)[:120], why="compared with the other files")
        return found

    return parse


_JUDGES: tuple[tuple[Callable[[Any], bool], Judge], ...] = (
    (lambda v: _all(v, "wanted", "pci", "nvml"), _counts),
    (lambda v: _all(v, "driver_cuda", "image_cuda"), _cuda),
    (lambda v: _all(v, "driver_loaded", "fabricmanager_started"), _fabric_started),
    (lambda v: _all(v, "package", "running_hostengine"), _dcgm_running),
    (lambda v: _all(v, "avg_busbw", "limit"), _bandwidth),
    (lambda v: _all(v, "product", "nvlinks_active"), _products),
    (lambda v: _all(v, "hostname", "nodenames"), _names),
    (lambda v: _all(v, "result", "state_after"), _after),
    (lambda v: _all(v, "node", "state", "reason"), _drained),
    (lambda v: isinstance(v, dict) and "mem_total_kb" in v, _machine),
    (lambda v: isinstance(v, dict) and "host" in v and "infiniband" in v, _collectors),
    (
        lambda v: isinstance(v, dict) and isinstance(v.get("roles"), list) and "slurm_config" in v,
        _slurm_roles,
    ),
    (lambda v: isinstance(v, dict) and set(v) == {"required"}, _wish("required tests")),
    (lambda v: isinstance(v, dict) and "dcgm_tests" in v, _wish("tests to run")),
    (lambda v: isinstance(v, dict) and bool(v) and set(v) <= {"gpus", "model"}, _wish("expectation")),
    (
        lambda v: isinstance(v, dict) and bool(v) and all(_all(each, "nvlinks") for each in v.values()),
        _wish("limits of products"),
    ),
    (
        lambda v: (
            isinstance(v, dict)
            and bool(v)
            and all(isinstance(each, list) and _all(each, "devices", "mig-enabled") for each in v.values())
        ),
        _mig,
    ),
    (
        lambda v: _by_host(
            v,
            lambda each: (
                isinstance(each, dict) and bool(each) and all(_is_address(told) for told in each.values())
            ),
        ),
        _addresses,
    ),
    (
        lambda v: _by_host(
            v,
            lambda each: (
                isinstance(each, dict)
                and bool(each)
                and all(_all(told, "dev", "src") for told in each.values())
            ),
        ),
        _routes,
    ),
    (lambda v: _by_host(v, lambda each: isinstance(each, list) and "lo" in each), _interfaces),
    (
        lambda v: _by_host(
            v, lambda each: _all(each, "fqdn", "seen_by") and isinstance(each["seen_by"], dict)
        ),
        _names_seen,
    ),
    (
        lambda v: isinstance(v, dict) and "endpoint" in v and _all(v.get("head"), "hostname", "addrs"),
        _endpoint,
    ),
    (lambda v: _all(v, "from", "to", "addr", "port", "error"), _probes),
)


def _by_host(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and bool(value) and all(test(each) for each in value.values())


def _is_address(told: Any) -> bool:
    try:
        return isinstance(told, str) and "/" in told and ipaddress.ip_interface(told) is not None
    except ValueError:
        return False


def is_it(text: str) -> bool:
    value = document(text)
    return value is not None and any(test(value) for test, _ in _JUDGES)


def parse(text: str) -> Recording:
    value = document(text)
    judge = next(judge for test, judge in _JUDGES if test(value))
    try:
        return judge(value)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        found = Recording("facts")
        found.cut(f"values of another kind than their keys promise: {error!r}")
        return found


# ---- versions by host


def is_versions(text: str) -> bool:
    return re.match(r"host,slurm,munge\s*$", text.partition("\n")[0]) is not None


def parse_versions(text: str) -> Recording:
    found = Recording("versions by host")
    rows = list(csv.DictReader(text.splitlines()))
    found.data = {
        str(row["host"]): tuple(int(part[:4]) for part in re.findall(r"\d+", str(row["slurm"]))[:3])
        for row in rows
    }
    told = ", ".join(f"{host} {'.'.join(map(str, version))}" for host, version in found.data.items())
    same = len(set(found.data.values())) == 1
    found.find(
        PASS if same else WARN,
        "slurm-version",
        "hosts",
        told or "none",
        "one release",
        action=None if same else "warn",
        why=None
        if same
        else "daemons may be up to two releases older than slurmctld (three from 24.11), never newer; commands equal",
    )
    return found


KINDS = (
    Kind("versions by host", is_versions, parse_versions),
    Kind("facts", is_it, parse),
)


def fixed(value: Mapping[str, Any]) -> dict[str, Any]:
    """What of a machine's facts does not change between two readings."""
    return {key: told for key, told in value.items() if not re.search(r"free|avail|mhz|used|load", key)}
