"""Checks of what connects GPUs: NVLink, fabric, PCIe, peer access, topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from provision.health import xid
from provision.health.catalogue import Found, check, judged, passed, skipped, unknown
from provision.health.finding import FAIL, UNKNOWN, WARN
from provision.health.limits import Limits
from provision.health.readings import Device, NotApplicable

_FABRIC = "systemctl status nvidia-fabricmanager; journalctl -u nvidia-fabricmanager"


@check(
    19,
    "fabric-manager",
    "fabric manager runs, where there is NVSwitch",
    reads="systemd; NVSwitch devices in /proc/driver/nvidia-nvswitch or on PCI",
    accepts="active",
    action="fix",
    fixable=True,
)
def fabric_manager(node: Device, limits: Limits) -> Iterator[Found]:
    if not node["nvswitches"]:
        raise NotApplicable("no NVSwitch here")
    state = node["services"].get("nvidia-fabricmanager")
    if state is None:
        yield Found(FAIL, "not installed", "active", _FABRIC, action="drain")
    else:
        yield judged(state == "active", state, "active", advice=_FABRIC)


@check(
    20,
    "fabric-state",
    "GPUs registered with the fabric",
    reads="NVML: fabric state, status, clique, cluster",
    accepts="Completed, Success",
    action="drain",
    each="gpus",
)
def fabric_state(gpu: Device, limits: Limits) -> Iterator[Found]:
    state = str(gpu["fabric.state"])
    status = str(gpu.get("fabric.status", "not told"))
    read = f"{state}, {status}"
    why = gpu.get("fabric.hint")
    if state.lower() in ("not supported", "not started") and status.lower() in ("not told", "success", "n/a"):
        if state.lower() == "not started":
            yield Found(FAIL, read, "Completed, Success", _FABRIC, why)
            return
        raise NotApplicable("no NVLink fabric on this GPU")
    yield judged(
        (state, status) == ("Completed", "Success"), read, "Completed, Success", advice=_FABRIC, why=why
    )
    if limits.site.get("nvlink_domain"):
        clique, cluster = str(gpu["fabric.cliqueId"]), str(gpu["fabric.clusterUuid"])
        zero = not cluster.replace("-", "").strip("0")
        yield judged(
            not zero,
            f"clique {clique}, cluster {cluster}",
            "a cluster of several nodes",
            advice="nvidia-imex, the fabric's own configuration",
        )
    health = gpu.get("fabric.health.summary")
    if health is not None:
        yield judged(
            str(health).lower() == "healthy",
            f"health {health}",
            "healthy",
            verdict=WARN,
            action="warn",
            advice=_FABRIC,
        )


def _links(gpu: Device) -> list[dict[str, Any]]:
    return list(gpu["nvlink.links"])


@check(
    22,
    "nvlink-count",
    "NVLinks up",
    reads="NVML: state of each link; count by exact product",
    accepts="all that the model has",
    action="drain",
    each="gpus",
)
def nvlink_count(gpu: Device, limits: Limits) -> Iterator[Found]:
    links = _links(gpu)
    product = str(gpu["name"])
    model = limits.model(product)
    if model is not None and model.nvlinks == (0,):
        raise NotApplicable(f"{product} has no NVLink")
    up = sum(1 for link in links if link["up"])
    down = [str(link["link"]) for link in links if link["up"] is False]
    advice = f"nvidia-smi nvlink -s; dmesg | grep -e Xid -e nvlink; {xid.ADVICE['reset']}"
    if down:
        yield Found(FAIL, f"{up} of {len(links)} up, down: {', '.join(down)}", "all up", advice)
    elif model is None:
        yield Found(
            UNKNOWN, f"{up} up", None, why=f"no limit is known for {product}: nothing to compare with"
        )
    elif up in model.nvlinks:
        if up == 0:
            raise NotApplicable(f"{product} without an NVLink bridge")
        yield passed(f"{up} up", up)
    else:
        yield Found(FAIL, f"{up} up", " or ".join(map(str, model.nvlinks)), advice)


@check(
    23,
    "nvlink-speed",
    "speed of each NVLink",
    reads="NVML: speed of each link",
    accepts="the model's",
    action="drain",
    each="gpus",
)
def nvlink_speed(gpu: Device, limits: Limits) -> Iterator[Found]:
    speeds = Counter(
        float(link["speed"]) for link in _links(gpu) if link["up"] and link.get("speed") is not None
    )
    if not speeds:
        raise NotApplicable("no NVLink is up")
    model = limits.model(str(gpu["name"]))
    if model is None or model.nvlink_gbs is None:
        yield unknown(
            f"no speed is known for {gpu['name']}", read=f"{', '.join(f'{speed:g}' for speed in speeds)} GB/s"
        )
        return
    # drivers name the A100's 25.781 GB/s also as 25
    wrong = [speed for speed in speeds if abs(speed - model.nvlink_gbs) > 0.04 * model.nvlink_gbs]
    read = ", ".join(f"{count} x {speed:g} GB/s" for speed, count in sorted(speeds.items()))
    yield judged(not wrong, read, f"{model.nvlink_gbs:g} GB/s each", advice=xid.ADVICE["reset"])


@check(
    24,
    "nvlink-errors",
    "NVLink errors",
    reads="NVML: replay, recovery, CRC of each link, against the baseline",
    accepts="no new replay or recovery; CRC < 100/s",
    action="drain",
    each="gpus",
    thresholds=("nvlink_crc_per_second",),
)
def nvlink_errors(gpu: Device, limits: Limits) -> Iterator[Found]:
    most = limits.value("nvlink_crc_per_second")
    bad = 0
    for link in gpu["nvlink.errors"]:
        for kind in ("replay", "recovery", "crc"):
            grown, seconds = link.get(f"{kind}.delta"), link.get(f"{kind}.seconds")
            if grown is None:  # a recording: all of its life
                total = link.get(kind, 0)
                if total:
                    bad += 1
                    yield Found(
                        WARN,
                        f"link {link['link']}: {total} {kind} errors",
                        "0",
                        action="warn",
                        why="since the last reset; a second reading tells whether they grow",
                        advice="nvidia-smi nvlink -e again; reseat, or the cable",
                    )
            elif kind == "crc" and grown and seconds and grown / seconds < most:
                continue
            elif grown:
                bad += 1
                yield Found(
                    FAIL if kind != "replay" or grown > 10 else WARN,
                    f"link {link['link']}: {grown} new {kind} errors",
                    f"< {most}/s" if kind == "crc" else "0",
                    xid.ADVICE["reset"],
                    action="drain" if kind != "replay" or grown > 10 else "warn",
                )
    if not bad:
        yield passed("no errors")


@check(
    25,
    "p2p",
    "peer access between all GPUs",
    reads="NVML: P2P read, write, NVLink of each pair",
    accepts="OK",
    action="drain",
)
def p2p(node: Device, limits: Limits) -> Iterator[Found]:
    bad = [f"{pair}: {state}" for pair, state in sorted(node["p2p"].items()) if state != "OK"]
    pairs = len(node["p2p"])
    if not pairs:
        raise NotApplicable("fewer than two GPUs")
    supported = [
        state for state in node["p2p"].values() if state not in ("CNS", "GNS", "TNS", "NS", "Not supported")
    ]
    if not supported:
        raise NotApplicable("no pair of these GPUs supports peer access")
    yield judged(
        not bad,
        f"{pairs - len(bad)} of {pairs} pairs" + (f", {', '.join(bad[:4])}" if bad else ""),
        "OK for every pair",
        advice="ACS and IOMMU settings; fabric manager; nvidia-smi topo -p2p r",
    )


@check(
    26,
    "topology",
    "topology of GPUs and NICs",
    reads="NVML: connection of each pair",
    accepts="symmetric; as the golden one of the site",
    action="drain",
)
def topology(node: Device, limits: Limits) -> Iterator[Found]:
    matrix: dict[str, dict[str, str]] = node["topology"]
    one_way = sorted(
        f"{a}-{b}"
        for a in matrix
        for b in matrix[a]
        if b in matrix and matrix[b].get(a, matrix[a][b]) != matrix[a][b] and a < b
    )
    if one_way:
        yield unknown(f"the two halves of the matrix differ: {', '.join(one_way[:4])}")
        return
    golden = limits.site.get("topology")
    if golden is not None:
        different = sorted(
            f"{a}-{b} {matrix.get(a, {}).get(b, 'missing')} for {golden[a][b]}"
            for a in golden
            for b in golden[a]
            if matrix.get(a, {}).get(b) != golden[a][b]
        )
        yield judged(
            not different,
            ", ".join(different[:4]) or "equal",
            "as the golden one",
            advice="a GPU, link or switch is missing: lspci -t, nvidia-smi nvlink -s",
        )
        return
    gpus = [name for name in matrix if name.startswith("GPU")]
    kinds = {frozenset((a, b)): matrix[a][b] for a in gpus for b in gpus if a != b and b in matrix[a]}
    widths = {kind for kind in kinds.values() if kind.startswith("NV")}
    told = Counter(kinds.values())
    usual = told.most_common(1)[0][0] if told else ""
    shown = ", ".join(f"{count} x {kind}" for kind, count in sorted(told.items()))
    if len(widths) > 1 or (widths and len(told) > 1 and len(gpus) >= 8):
        odd = [name for name in gpus if 2 * _other(name, kinds, usual) > len(gpus) - 1]
        yield Found(
            WARN,
            shown + (f"; of {', '.join(odd)}" if 0 < len(odd) < len(gpus) else ""),
            "one kind for all pairs",
            "compare with a sound node of this model; nvidia-smi nvlink -s",
            action="warn",
        )
        return
    model = limits.site.get("model")
    meant = [
        about for product, about in limits.models.items() if model and limits.is_model(product, str(model))
    ]
    if len(gpus) > 1 and not widths and meant and all(min(about.nvlinks) > 0 for about in meant):
        yield Found(
            WARN,
            shown,
            f"NVLink between GPUs of the model {model}",
            "fabric manager, MIG, or a virtual machine without the switches? nvidia-smi nvlink -s",
            action="warn",
        )
        return
    yield passed(
        shown or f"{len(gpus)} GPU",
        why="not compared: no golden topology was given",
    )


def _other(name: str, kinds: Mapping[frozenset[str], str], usual: str) -> int:
    """How many pairs of one GPU are not of the usual kind."""
    return sum(kind != usual for pair, kind in kinds.items() if name in pair)


@check(
    27,
    "pcie-link",
    "PCIe width; generation under load",
    reads="NVML: current and greatest",
    accepts="equal",
    action="reboot",
    each="gpus",
)
def pcie_link(gpu: Device, limits: Limits) -> Iterator[Found]:
    width, widest = gpu["pcie.link.width.current"], gpu["pcie.link.width.max"]
    advice = "reseat the card or its riser; reboot"
    yield judged(width == widest, f"width x{width}", f"x{widest}", advice=advice)
    generation, best = gpu["pcie.link.gen.current"], gpu["pcie.link.gen.max"]
    busy = gpu.get("utilization.gpu", 0)
    if generation == best:
        yield passed(f"generation {generation}", best)
    elif busy >= 10:
        yield Found(FAIL, f"generation {generation} at {busy} % use", str(best), advice)
    else:
        yield skipped(f"generation {generation} of {best} at idle: links slow down to save power")


@check(
    29,
    "pcie-replays",
    "PCIe replays",
    reads="NVML: replay counter against the baseline",
    accepts="below the rate of the specification",
    action="warn",
    each="gpus",
    thresholds=("pcie_replays_per_minute_lane_gen4", "pcie_replays_per_minute_lane_gen5"),
)
def pcie_replays(gpu: Device, limits: Limits) -> Iterable[Found]:
    grown, seconds = gpu["pcie.replays.delta"], gpu["pcie.replays.seconds"]
    generation = 5 if gpu.get("pcie.link.gen.max", 4) >= 5 else 4
    most = limits.value(f"pcie_replays_per_minute_lane_gen{generation}") * gpu.get(
        "pcie.link.width.current", 16
    )
    rate = grown * 60 / max(seconds, 60)
    return [
        judged(
            rate < most,
            f"{rate:.1f} a minute",
            f"< {most:.1f}",
            verdict=WARN,
            advice="reseat the card or its riser; look at AER",
        )
    ]


@check(
    30,
    "aer",
    "PCIe errors of GPUs, NICs and the ports above them",
    reads="/sys/bus/pci/devices/*/aer_dev_fatal, aer_dev_nonfatal against the baseline; kernel messages",
    accepts="no new fatal or nonfatal one",
    action="drain",
)
def aer(node: Device, limits: Limits) -> Iterator[Found]:
    advice = "reseat the card, riser or cable; lspci -vv"
    bad = False
    for device in node.get("aer", ()):
        for kind in ("fatal", "nonfatal"):
            grown = device.get(f"aer.{kind}.delta", 0)
            if grown:
                bad = True
                yield Found(FAIL, f"{grown} new {kind} errors", "0", advice, subject=device.subject)
    if node.told("kernel.events"):
        for event in node["kernel.events"]:
            if event.kind in ("aer-fatal", "aer-nonfatal"):
                bad = True
                yield Found(
                    FAIL,
                    f"{event.kind[4:]} PCIe error, {event.count} times",
                    "none",
                    advice,
                    subject=f"{node.subject} {event.device}",
                )
            elif event.kind == "aer-corrected":
                bad = True
                yield Found(
                    WARN,
                    f"corrected PCIe errors, {event.count} messages",
                    "none",
                    advice,
                    action="warn",
                    subject=f"{node.subject} {event.device}",
                )
    if not bad:
        if not node.told("kernel.events"):
            node["aer"]
        yield passed("none")


@check(
    37,
    "driver-library",
    "driver and library of one version",
    reads="NVML's first words; the module's and the library's version",
    accepts="equal",
    action="reboot",
)
def driver_library(node: Device, limits: Limits) -> Iterator[Found]:
    advice = "an upgrade without a reboot: reboot, then hold the packages"
    if "version mismatch" in str(node.get("nvml", "")).lower():
        module, library = node.get("module.version"), node.get("library.version")
        told = f": module {module}, library {library}" if module and library else ""
        yield Found(FAIL, f"mismatch{told}", "equal", advice)
        return
    module, library = node["module.version"], node["library.version"]
    yield judged(module == library, f"module {module}, library {library}", "equal", advice=advice)


@check(
    42,
    "acs-iommu",
    "ACS and IOMMU let GPUs and NICs talk directly",
    reads="/sys/bus/pci (ACS control of bridges), /sys/kernel/iommu_groups, the kernel's command line",
    accepts="no redirection; IOMMU off or passthrough",
    action="warn",
)
def acs_iommu(node: Device, limits: Limits) -> Iterator[Found]:
    if node.get("virtual"):
        yield skipped(f"a virtual machine ({node['virtual']}): the host decides")
        return
    redirecting = [bridge.subject for bridge in node["bridges"] if bridge.get("acs.redirect")]
    yield judged(
        not redirecting,
        ", ".join(redirecting[:8]) or "no bridge redirects",
        "no ACS redirection",
        verdict=WARN,
        advice="switch ACS off in firmware, or with setpci at boot (maintenance)",
    )
    if node.told("iommu"):
        mode = node["iommu"]
        yield judged(
            mode in ("off", "passthrough"),
            f"IOMMU {mode}",
            "off or passthrough",
            verdict=WARN,
            advice="iommu=pt on the kernel's command line (maintenance)",
        )


@check(
    43,
    "peer-memory",
    "GPUDirect RDMA",
    reads="/proc/modules; DMA-BUF support of the driver",
    accepts="one of both",
    action="fix",
    fixable=True,
)
def peer_memory(node: Device, limits: Limits) -> Iterator[Found]:
    if not node["ports"]:
        raise NotApplicable("no RDMA device here")
    if node["gpus"] == []:
        raise NotApplicable("no GPU here")
    if "nvidia_peermem" in node["modules"]:
        yield passed("nvidia_peermem loaded")
    elif node.get("dmabuf"):
        yield passed("DMA-BUF: open kernel modules")
    else:
        yield Found(WARN, "neither nvidia_peermem nor DMA-BUF", "one of both", "modprobe nvidia_peermem")
