"""Checks of InfiniBand, RoCE and Ethernet ports."""

from __future__ import annotations

from collections.abc import Iterator

from provision.health.catalogue import Found, check, judged, passed, skipped, wanted
from provision.health.finding import FAIL, WARN
from provision.health.limits import Limits
from provision.health.readings import Device, NotApplicable


@check(
    45,
    "port",
    "InfiniBand and RoCE ports",
    reads="/sys/class/infiniband/*/ports/*: state, phys_state, rate, link_layer",
    accepts="ACTIVE, LinkUp, expected rate",
    action="drain",
)
def port(node: Device, limits: Limits) -> Iterator[Found]:
    expected: dict[str, float] | None = limits.site.get("ports")  # device -> Gbit/s
    ports = {each.subject: each for each in node["ports"] if not each.get("nvswitch")}
    if expected is None and not ports:
        raise NotApplicable("no RDMA device here")
    seen = {each.get("device") for each in ports.values()}
    for name, rate in (expected or {}).items():
        if name in seen:
            continue
        yield Found(
            FAIL,
            "no such device",
            f"{rate:g} Gbit/s",
            "lspci | grep Mellanox; dmesg | grep mlx5",
            subject=name,
        )
    for each in ports.values():
        if expected is not None and each.get("device") not in expected:
            yield skipped("not named in the site file", subject=each.subject)
            continue
        yield _port(each, None if expected is None else expected[each["device"]])


def _port(port: Device, rate: float | None) -> Found:
    state, physical = str(port["state"]).upper(), str(port.get("phys_state", ""))
    layer = str(port.get("link_layer", "InfiniBand"))
    read = ", ".join(
        part
        for part in (state, physical, f"{port['rate']:g} Gbit/s" if port.get("rate") else "", layer)
        if part
    )
    wants = "ACTIVE, LinkUp" + (f", {rate:g} Gbit/s" if rate else "")
    advice = "cable and transceiver; mlxlink -d; the switch's port"
    why = None
    if state in ("INITIALIZING", "INIT", "ARMED"):
        why, advice = (
            "the link is up and no subnet manager has configured it",
            "start a subnet manager (opensm, or the switch's)",
        )
    elif physical == "Polling":
        why = "no partner answers at the other end"
    elif physical == "Disabled":
        why, advice = "switched off", "ibportstate, ip link set up, or leave the port out of the site file"
    fine = state == "ACTIVE" and physical in ("LinkUp", "")
    if fine and rate and port.get("rate") is not None and port["rate"] != rate:
        return Found(
            FAIL, read, wants, "cable, transceiver or switch port of a lower speed", subject=port.subject
        )
    if fine and layer == "InfiniBand" and port.told("lid") and port["lid"] in (0, 0xFFFF):
        return Found(
            FAIL, f"{read}, lid {port['lid']}", wants, "start a subnet manager", subject=port.subject
        )
    return judged(fine, read, wants, advice=advice, why=why, subject=port.subject)


@check(
    46,
    "link-flaps",
    "flapping links",
    reads="link_downed, carrier_changes over a window; kernel messages",
    accepts="< 3 in 12 h",
    action="drain",
    thresholds=("link_flaps", "flap_window_hours"),
)
def link_flaps(node: Device, limits: Limits) -> Iterator[Found]:
    most = limits.value("link_flaps")
    hours = limits.value("flap_window_hours")
    advice = "cable and transceiver; the switch's log"
    bad = False
    for each in [*node.get("ports", ()), *node.get("nics", ())]:
        flaps = each.get("flaps")
        if flaps is not None and flaps >= most:
            bad = True
            yield Found(FAIL, f"{flaps} times in {hours} h", f"< {most}", advice, subject=each.subject)
    if node.told("kernel.events"):
        for event in node["kernel.events"]:
            if event.kind != "carrier-lost":
                continue
            bad = True
            yield Found(
                FAIL if event.count >= most else WARN,
                f"carrier lost {event.count} times",
                f"< {most} in {hours} h",
                advice,
                action="drain" if event.count >= most else "warn",
                subject=f"{node.subject} {event.device}",
            )
    elif not (node.told("ports") or node.told("nics")):
        node["ports"]
    if not bad:
        yield passed("none")


# sysfs and perfquery spell them differently; what they count is the same
_SYMBOLS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "link_error_recovery",
)


@check(
    47,
    "symbol-errors",
    "errors on ports",
    reads="counters of ports against the baseline (they stop at their greatest value)",
    accepts="no new one",
    action="drain",
)
def symbol_errors(node: Device, limits: Limits) -> Iterator[Found]:
    ports = node["ports"]
    if not ports:
        raise NotApplicable("no RDMA device here")
    advice = "clean or change cable and transceiver; perfquery -x again"
    for each in ports:
        bad = False
        for name in _SYMBOLS:
            grown = each.get(f"{name}.delta")
            if grown is None and each.told(name) and not each.told(f"{name}.delta"):
                total = each.get(name)
                if total:
                    bad = True
                    full = total in (255, 65535, 0xFFFFFFFF)
                    yield Found(
                        WARN,
                        f"{name} {total}" + (", its greatest value" if full else ""),
                        "0",
                        "perfquery -R, then read again: does it grow?",
                        "since the counters were reset",
                        "warn",
                        each.subject,
                    )
            elif grown:
                bad = True
                many = grown >= 100 or name == "link_error_recovery"
                yield Found(
                    FAIL if many else WARN,
                    f"{grown} new in {name}",
                    "0",
                    advice,
                    action="drain" if many else "warn",
                    subject=each.subject,
                )
        if not bad and any(each.get(name) is not None for name in _SYMBOLS):
            yield passed("no new errors", subject=each.subject)


@check(
    48,
    "transceiver",
    "transceivers",
    reads="hwmon of the NIC; kernel messages of mlx5",
    accepts="below 75 C; no power or temperature warning",
    action="drain",
    thresholds=("module_temperature",),
)
def transceiver(node: Device, limits: Limits) -> Iterator[Found]:
    most = limits.value("module_temperature")
    bad = False
    seen = False
    for each in node.get("ports", ()):
        degrees = each.get("module.temperature")
        if degrees is not None:
            seen = True
            if degrees >= most:
                bad = True
                yield Found(
                    FAIL,
                    f"{degrees} C",
                    f"< {most} C",
                    "air flow; reseat or change the module",
                    subject=each.subject,
                )
    if node.told("kernel.events"):
        seen = True
        for event in node["kernel.events"]:
            if event.kind in ("module-power", "module-temperature", "module-error", "nic-health"):
                bad = True
                yield Found(
                    FAIL,
                    f"{event.text.strip()[:140]} ({event.count} times)",
                    "no such line",
                    "reseat or change the module; slot power; firmware of the NIC",
                    subject=f"{node.subject} {event.device}",
                )
    if not seen:
        node["kernel.events"]
    if not bad:
        yield passed("in range")


@check(
    49,
    "nic-firmware",
    "NIC firmware and read request size",
    reads="/sys/class/infiniband/*/fw_ver; PCI express capability",
    accepts="as the site says; one value a model",
    action="warn",
)
def nic_firmware(node: Device, limits: Limits) -> Iterator[Found]:
    boards: dict[str, set[str]] = {}
    for each in node["ports"]:
        if each.get("fw_ver") is not None:
            boards.setdefault(str(each.get("board_id", each.get("hca_type", "NIC"))), set()).add(
                str(each["fw_ver"])
            )
    if not boards:
        raise NotApplicable("no RDMA device here")
    expected = limits.site.get("nic_firmware", {})
    for board, versions in sorted(boards.items()):
        fine = versions == {expected[board]} if board in expected else len(versions) == 1
        yield judged(
            fine,
            f"{board}: {', '.join(sorted(versions))}",
            expected.get(board, "one version"),
            verdict=WARN,
            advice="update the odd one (maintenance)",
        )
    sizes = {each["mrrs"] for each in node["ports"] if each.get("mrrs") is not None}
    if sizes and limits.site.get("mrrs") is not None:
        yield judged(
            sizes == {limits.site["mrrs"]},
            f"read request {', '.join(map(str, sorted(sizes)))} B",
            f"{limits.site['mrrs']} B",
            verdict=WARN,
            advice="setpci at boot (maintenance)",
        )


@check(
    50,
    "roce",
    "RoCE settings",
    reads="GID types and MTU in sysfs; trust mode and PFC by DCB",
    accepts="as the site says",
    action="drain",
)
def roce(node: Device, limits: Limits) -> Iterator[Found]:
    expected = wanted(limits.site, "roce")
    ports = [each for each in node["ports"] if each.get("link_layer") == "Ethernet"]
    if not ports:
        yield Found(FAIL, "no RoCE port", "RoCE", "mlx5_ib loaded? link type of the NIC")
    for each in ports:
        for key in ("mtu", "trust", "pfc"):
            if key in expected:
                yield judged(
                    each[f"roce.{key}"] == expected[key],
                    f"{key} {each[f'roce.{key}']}",
                    expected[key],
                    subject=each.subject,
                    advice="provision apply; mlnx_qos -i",
                )
        if "gid_index" in expected:
            kind = each["roce.gid_types"].get(str(expected["gid_index"]))
            yield judged(
                kind == "RoCE v2",
                f"GID {expected['gid_index']}: {kind}",
                "RoCE v2",
                subject=each.subject,
                advice="address missing on the interface? NCCL_IB_GID_INDEX",
            )
