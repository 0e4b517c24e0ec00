"""What the agent remembers between two runs. Pure: state and readings in, state and completed readings out.

Counters are judged by how much they grew since a baseline of this boot, keyed by GPU UUID or HCA GUID, so a moved
cable or a new GPU begins anew. Events are kept until somebody acknowledges them, also when the kernel's buffer has
forgotten them. The state is one JSON file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from provision.health.kernel import Event
from provision.health.limits import Limits
from provision.health.readings import Device

State = dict[str, Any]

VERSION = 1
SATURATED = frozenset({0xFF, 0xFFFF, 0xFFFFFFFF})  # InfiniBand's counters stop there
HISTORY_SECONDS = 30 * 86400  # an action that long ago no longer makes the next one sterner

PORT_COUNTERS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "link_error_recovery",
)


def empty() -> State:
    return {
        "version": VERSION,
        "boot": None,
        "counters": {},
        "events": [],
        "cursor": None,
        "flaps": {},
        "xid": {},
        "stuck": {},
        "unreadable": 0,
        "refused": False,
        "idle": {},
        "acknowledged": None,
    }


def complete(state: State, node: Device, limits: Limits, now: float) -> tuple[State, Device]:
    """The state after these readings, and the readings with what only memory knows: growth, flaps, old events.

    now: seconds since 1970.
    """
    boot = node.get("boot", state.get("boot"))
    new = {**empty(), **state}
    if boot != new["boot"]:
        new = _rebooted(new, boot, now)
    counters: dict[str, Any] = dict(new["counters"])
    values = dict(node.values)
    if node.get("gpus") is not None:
        values["gpus"] = [_gpu(counters, new, gpu, now) for gpu in node["gpus"]]
    if node.get("ports") is not None:
        values["ports"] = [_port(counters, new, port, limits, now) for port in node["ports"]]
    if node.get("nics") is not None:
        values["nics"] = [_nic(counters, new, nic, limits, now) for nic in node["nics"]]
    if node.get("aer") is not None:
        values["aer"] = [
            _grown(counters, f"aer:{device.subject}", device, ("aer.fatal", "aer.nonfatal"), now)
            for device in node["aer"]
        ]
    if node.get("edac") is not None:
        values["edac"] = [
            _grown(counters, f"edac:{device.subject}", device, ("ce",), now) for device in node["edac"]
        ]
    if node.get("kernel.events") is not None:
        new["events"], new["cursor"] = merged(
            [_revived(each) for each in new["events"]],
            node["kernel.events"],
            new["cursor"],
            new["acknowledged"],
        )
        values["kernel.events"] = [_revived(each) for each in new["events"]]
    if node.get("processes.stuck") is not None:
        new["stuck"], values["processes.stuck"] = _stuck(new["stuck"], node["processes.stuck"], now)
    values["xid.actions"] = {
        key: each for key, each in new["xid"].items() if now - each.get("at", 0) < HISTORY_SECONDS
    }
    new["counters"] = counters
    return new, Device(node.subject, values, node.source)


def _rebooted(state: State, boot: str | None, now: float) -> State:
    """The state in a new boot: counters begin anew; what asked for a reset or a reboot has had its reboot."""
    history = dict(state["xid"])
    for key in state.get("asked", ()):
        history[key] = {
            **history.get(key, {}),
            "reboot": history.get(key, {}).get("reboot", 0) + 1,
            "at": now,
        }
    return {**empty(), "boot": boot, "xid": history, "flaps": state["flaps"], "idle": state["idle"]}


def grown(counters: dict[str, Any], key: str, value: Any, now: float) -> dict[str, float]:
    """How much a counter grew since its baseline, and in how many seconds; sets the baseline where there is none.

    A value below the last one means that the counter was reset: all that it has is new. One that stands at the
    greatest value it can have may have grown further: that is no reason to call it well.
    """
    known = counters.get(key)
    if known is None:
        known = {"base": value, "since": now, "last": value, "carried": 0}
    elif value < known["last"]:
        known = {
            **known,
            "carried": known["carried"] + known["last"] - known["base"],
            "base": 0,
            "last": value,
        }
    else:
        known = {**known, "last": value}
    counters[key] = known
    return {"delta": known["carried"] + value - known["base"], "seconds": now - known["since"]}


def _grown(counters: dict[str, Any], key: str, device: Device, names: Iterable[str], now: float) -> Device:
    values = dict(device.values)
    for name in names:
        value = device.get(name)
        if isinstance(value, int):
            told = grown(counters, f"{key}:{name}", value, now)
            values[f"{name}.delta"], values[f"{name}.seconds"] = int(told["delta"]), told["seconds"]
    return Device(device.subject, values, device.source)


def _gpu(counters: dict[str, Any], state: State, gpu: Device, now: float) -> Device:
    key = f"gpu:{gpu.get('uuid', gpu.subject)}"
    found = _grown(counters, key, gpu, ("pcie.replays",), now)
    errors = gpu.get("nvlink.errors")
    if errors is not None:
        links = []
        for link in errors:
            each = dict(link)
            for name in ("replay", "recovery", "crc"):
                if isinstance(link.get(name), int):
                    told = grown(counters, f"{key}:nvlink{link['link']}:{name}", link[name], now)
                    each[f"{name}.delta"], each[f"{name}.seconds"] = int(told["delta"]), told["seconds"]
            links.append(each)
        found.values["nvlink.errors"] = links
    if gpu.get("processes") == [] and gpu.get("memory.used") is not None:
        # the driver's own reserve differs by model and release: the least ever seen at idle is what it takes
        idle = min(state["idle"].get(key, gpu["memory.used"]), gpu["memory.used"])
        state["idle"] = {**state["idle"], key: idle}
    if key in state["idle"]:
        found.values["memory.idle"] = state["idle"][key]
    return found


def _port(counters: dict[str, Any], state: State, port: Device, limits: Limits, now: float) -> Device:
    key = f"port:{port.get('guid', port.subject)}:{port.subject.rpartition(':')[2]}"
    found = _grown(counters, key, port, PORT_COUNTERS, now)
    downs = port.get("link_downed")
    if isinstance(downs, int):
        found.values["flaps"] = _flaps(counters, state, f"{key}:link_downed", downs, limits, now)
    return found


def _nic(counters: dict[str, Any], state: State, nic: Device, limits: Limits, now: float) -> Device:
    changes = nic.get("carrier_changes")
    found = Device(nic.subject, dict(nic.values), nic.source)
    if isinstance(changes, int):
        found.values["flaps"] = _flaps(
            counters, state, f"nic:{nic.subject}:carrier", changes // 2, limits, now
        )
    return found


def _flaps(counters: dict[str, Any], state: State, key: str, value: int, limits: Limits, now: float) -> int:
    """How often the link went down within the window that ends now."""
    last = counters.get(key, {}).get("last", value)
    grown(counters, key, value, now)
    more = value - last if value >= last else value
    window = limits.value("flap_window_hours") * 3600
    seen: list[list[float]] = [each for each in state["flaps"].get(key, []) if now - each[0] < window]
    if more > 0:
        seen = [*seen, [now, more]]
    state["flaps"] = {**state["flaps"], key: seen[-256:]}
    return int(sum(count for _, count in seen))


def merged(
    old: list[Event], read: Iterable[Event], cursor: int | None, acknowledged: int | None
) -> tuple[list[dict[str, Any]], int | None]:
    """Events known and read, as the state keeps them; those up to the acknowledged message are left out.

    The kernel's buffer is read whole each time, so an event that is read again replaces the known one; what the
    buffer has forgotten stays known, before all that is in it.
    """
    known = {_key(event): replace(event, final=-1) for event in old}
    for event in read:
        if event.sequence is not None and acknowledged is not None and event.sequence <= acknowledged:
            continue
        before = known.get(_key(event))
        count = event.count if before is None else max(event.count, before.count)
        known[_key(event)] = replace(event, count=count, first=before.first if before else event.first)
        if event.sequence is not None:
            cursor = event.sequence if cursor is None else max(cursor, event.sequence)
    return [asdict(event) for event in sorted(known.values(), key=lambda event: event.order)], cursor


def _key(event: Event) -> tuple[Any, ...]:
    return (
        event.kind,
        event.device,
        event.number,
        event.text if event.number in (154, *range(144, 151)) else "",
    )


def _revived(value: Any) -> Event:
    return value if isinstance(value, Event) else Event(**{**value, "pids": tuple(value.get("pids", ()))})


def acknowledge(state: State, after: str) -> State:
    """The state with all events acknowledged, all baselines set to now. after: what was done, "reset" or "look"."""
    history = dict(state.get("xid", {}))
    if after == "reset":
        for key in state.get("asked", ()):
            history[key] = {**history.get(key, {}), "reset": history.get(key, {}).get("reset", 0) + 1}
    counters = {
        key: {**each, "base": each["last"], "carried": 0} for key, each in state.get("counters", {}).items()
    }
    return {
        **state,
        "events": [],
        "acknowledged": state.get("cursor"),
        "counters": counters,
        "xid": history,
        "asked": [],
        "flaps": {},
        "unreadable": 0,
    }


def told(state: State, scheduler: str, said: str) -> State:
    """The state after `scheduler` was told: an alert that was `said` is remembered until the next time."""
    untold = {name: alert for name, alert in state.get("untold", {}).items() if name != scheduler}
    return {**state, "untold": {**untold, scheduler: said} if said.startswith("ALERT") else untold}


def _stuck(
    known: Mapping[str, Any], read: Iterable[Mapping[str, Any]], now: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Processes that are stuck with for how long they have been seen so, by pid and start."""
    after: dict[str, Any] = {}
    found = []
    for process in read:
        key = f"{process['pid']}:{process.get('start')}:{process['state']}"
        since, readings = known.get(key, (now, 0))
        after[key] = (since, readings + 1)
        if process["state"] == "Z" and readings < 3:
            continue  # most are collected within a moment
        found.append({**process, "seconds": now - since, "readings": readings + 1})
    return after, found
