"""Whether the machine was what it should be while it ran: who took part, over what, and what it said meanwhile."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from provision.burnin.judge.parts import Expected, Judged, found, hosts, listed, recorded_by
from provision.burnin.result import BurninResult, KernelMessages, Series, Tool, Transport
from provision.profiles.gpu import gpu_model, gpu_profile
from provision.report.model import Verdict

# NVML's bits of clock event reasons.
HARDWARE_SLOWDOWN = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
THERMAL_SLOWDOWN = 0x20
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
SXID = re.compile(r"nvidia-nvswitch\d*: SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
HARDWARE = re.compile(r"AER:|PCIe Bus Error|Machine check|\bmce:|EDAC .*\bUE\b|link is down", re.IGNORECASE)
LINK_LOSSES = ("link_downed", "link_error_recovery")
LINK_ERRORS = (
    "symbol_error", "port_rcv_errors", "local_link_integrity_errors", "tx_errors", "rx_errors",
)  # fmt: skip
PCIE_REPLAYS_PER_MINUTE = 30.7  # 1.92 for each of 16 lanes, PCIe 5.0
# Of the wire. AzureHPC node health checks ask for 360 of 400 Gbit/s; NVIDIA expects 46 to 48 of 50 GB/s.
WIRE_FAIL, WIRE_WARN = 0.9, 0.92
BRIDGES = re.compile(r"(docker|br-|veth|virbr|cni|flannel|lo$)")


def machine(result: BurninResult, expected: Mapping[str, Expected]) -> Iterable[Judged]:
    """All findings about the nodes themselves, of a run whose ranks came together."""
    yield from _network(result, expected)
    yield from _inside(result)
    yield from _kernel(result)
    yield from _telemetry(result)
    for tool in result.tools:
        yield _tool(tool, expected)


def attendance(
    result: BurninResult, nodes: Sequence[str], expected: Mapping[str, Expected]
) -> Iterable[Judged]:
    """Whether every node took part, to the end, with all its GPUs, which nobody else used."""
    ranks = Counter(rank.host for rank in result.ranks)
    at_fault = {
        missing.host: f"rank {missing.rank}: {missing.why}"
        for missing in (result.failure.missing if result.failure else [])
        if missing.host
    }
    busy = {host.host: host.busy for host in result.hosts if host.busy}
    for node in nodes:
        if node in busy:
            held = "; ".join(f"{uuid} by {listed(who)}" for uuid, who in busy[node].items())
            yield found(
                Verdict.UNKNOWN,
                "burnin-idle",
                [node],
                read=held,
                expected="no other process",
                why=f"busy before the burn-in began: {held}",
                action="end these processes, or wait for them, and run it again",
            )
        if node in at_fault and result.ranks and node not in busy:
            yield found(
                Verdict.FAIL,
                "burnin-ran",
                [node],
                read=at_fault[node],
                expected="every rank to the end",
                why=at_fault[node],
                action=f"look at the kernel messages of {node} and at its rank's own lines",
            )
        elif result.failure or not result.complete:
            why = at_fault.get(node) or (
                f"the run did not finish: {result.failure.message}"
                if result.failure
                else "the run did not finish"
            )
            yield found(Verdict.UNKNOWN, "burnin-ran", [node], why=why)
        elif not ranks[node]:
            why = f"no rank ran on it; ranks ran on {listed(ranks)}"
            yield found(Verdict.UNKNOWN, "burnin-ran", [node], why=why)
        else:
            yield found(Verdict.PASS, "burnin-ran", [node], read=f"{ranks[node]} ranks")
        if ranks[node] and expected[node].gpus:
            yield from _gpus(result, node, expected[node])
    if result.injected:
        why = f"a fault was injected on purpose ({result.injected}): this run proves nothing good"
        yield found(Verdict.UNKNOWN, "burnin-injected", nodes, why=why)


def _gpus(result: BurninResult, node: str, expected: Expected) -> Iterable[Judged]:
    if result.device == "cpu":
        why = f"the site says {expected.gpus} GPUs, but the burn-in ran on the CPU"
        yield found(Verdict.UNKNOWN, "burnin-gpus", [node], why=why, read="cpu")
        return
    own = [rank for rank in result.ranks if rank.host == node and rank.gpu]
    used = [rank.gpu.uuid or f"rank {rank.rank}" for rank in own if rank.gpu]
    distinct = len(set(used))
    elsewhere = {rank.gpu.uuid: rank.host for rank in result.ranks if rank.gpu and rank.host != node}
    shared = [elsewhere[uuid] for uuid in used if uuid in elsewhere]
    good = distinct == expected.gpus and len(used) == expected.gpus and not shared
    why = f"{len(used)} ranks used {distinct} different GPUs, expected {expected.gpus}"
    if shared:
        why = f"a GPU of {node} is one of {listed(shared)} as well: two nodes by name, one machine"
    yield found(
        Verdict.PASS if good else Verdict.FAIL,
        "burnin-gpus",
        [node],
        read=str(distinct),
        expected=str(expected.gpus),
        why=None if good else why,
        action=None if good else f"provision health on {node}: is a GPU lost, or taken by another job?",
    )
    profile = gpu_model(expected.model) if expected.model else None
    others = sorted(
        {rank.gpu.name for rank in own if rank.gpu and profile and rank.gpu.name not in profile.products}
    )
    if profile and others:
        yield found(
            Verdict.FAIL,
            "burnin-model",
            [node],
            read=listed(others),
            expected=listed(profile.products),
            why=f"the site file says {profile.name}, the driver {listed(others)}",
            action="correct the site file, or have the right GPUs put in",
        )


# The way between nodes and inside them


def _network(result: BurninResult, expected: Mapping[str, Expected]) -> Iterable[Judged]:
    """What NCCL used between nodes, against what the site file says."""
    nodes = hosts(result)
    if len(nodes) < 2:
        return
    yield from _routes(result)
    if result.device == "cpu":
        return
    yield from _interfaces(result)
    yield from _prefixes(result)
    by_host: dict[str, list[Transport]] = {}
    for transport in result.transports:
        by_host.setdefault(result.host(transport.rank), []).append(transport)
    for node in nodes:
        fabric = expected[node].fabric if node in expected else None
        if fabric is None or fabric.kind == "ethernet":
            continue
        told = by_host.get(node, [])
        networks = {_between(result, transport) for transport in told}
        check, wanted = "burnin-network", f"{fabric.kind}, {fabric.rails} rails"
        if not told or None in networks:
            why = next((each.why for each in told if each.why), "NCCL's log does not say what it used")
            yield found(Verdict.UNKNOWN, check, [node], expected=wanted, why=f"between nodes: {why}")
        elif "Socket" in networks:
            yield found(
                Verdict.FAIL,
                check,
                [node],
                read="Socket",
                expected=wanted,
                why=f"NCCL went by sockets on {node}, whatever the bandwidth; the site file says {fabric.kind}",
                action="are the adapters up (ibstat), and visible to the job: /dev/infiniband, memlock, container?",
            )
        else:
            used = {device for transport in told for device in transport.devices}
            short = len(used) < fabric.rails
            yield found(
                Verdict.FAIL if short else Verdict.PASS,
                check,
                [node],
                read=f"{listed(sorted(map(str, networks)))}: {listed(sorted(used))}",
                expected=wanted,
                why=f"{len(used)} of {fabric.rails} adapters in use" if short else None,
                action="look at the ports that are missing: ibstat, cable, NCCL_IB_HCA" if short else None,
            )
            yield from _gpudirect(node, told)


def _between(result: BurninResult, transport: Transport) -> str | None:
    """The network by the connections to other nodes where they are told, else the one that NCCL chose."""
    host = result.host(transport.rank)
    vias = {
        c.via.split("/")[1]
        for c in transport.connections
        if c.via.startswith("NET/") and result.host(c.peer) != host
    }
    return "Socket" if "Socket" in vias else next(iter(sorted(vias)), transport.network)


def _gpudirect(node: str, told: Sequence[Transport]) -> Iterable[Judged]:
    net = [c for transport in told for c in transport.connections if c.via.startswith("NET/")]
    without = sum(c.channels for c in net if "GDRDMA" not in c.via)
    if net:
        total = sum(c.channels for c in net)
        yield found(
            Verdict.WARN if without else Verdict.PASS,
            "burnin-gpudirect",
            [node],
            read=f"{total - without} of {total} channels with GPUDirect RDMA",
            expected="all",
            why=f"{without} of {total} channels go through the host's memory" if without else None,
            action="is nvidia_peermem loaded, or DMA-BUF supported; is ACS off?" if without else None,
        )


def _interfaces(result: BurninResult) -> Iterable[Judged]:
    """The address that ranks meet at must be the node's own."""
    owners: dict[str, set[str]] = {}
    for rank in result.ranks:
        owners.setdefault(rank.address, set()).add(rank.host)
    for address, names in owners.items():
        if len(names) > 1:
            interfaces = sorted({rank.interface for rank in result.ranks if rank.address == address})
            yield found(
                Verdict.FAIL,
                "burnin-interface",
                sorted(names),
                read=f"{listed(interfaces)} {address}",
                expected="an address of its own for every node",
                why=f"{address} on {listed(interfaces)} is held by {listed(sorted(names))}",
                action="name the cluster's address of each node in the site file",
            )
    for rank in result.ranks:
        if rank.local_rank == 0 and BRIDGES.match(rank.interface) and len(owners[rank.address]) == 1:
            yield found(
                Verdict.WARN,
                "burnin-interface",
                [rank.host],
                read=f"{rank.interface} {rank.address}",
                why=f"{rank.interface} looks like a bridge of this node alone",
                action="name the cluster's address of each node in the site file",
            )


def _routes(result: BurninResult) -> Iterable[Judged]:
    """Each node must reach the others from the interface that the job uses, whose network is that one's alone."""
    chosen = {rank.host: rank for rank in result.ranks}
    for host in result.hosts:
        rank = chosen[host.host]
        odd = [f"reaches {peer} by {way}" for peer, way in host.odd_routes.items()]
        told = odd + _shared_networks(rank.interface, host.networks)
        if told:
            yield found(
                Verdict.FAIL if odd else Verdict.WARN,
                "burnin-routes",
                [host.host],
                read="; ".join(told),
                expected=f"all nodes by {rank.interface} {rank.address}",
                why=f"{'; '.join(told)}; the job uses {rank.interface} {rank.address}, and answers may leave elsewhere",
                action="a network for each interface, or routing by source; ip route get ADDRESS",
            )


def _prefixes(result: BurninResult) -> Iterable[Judged]:
    """NCCL takes a name without "=" for the beginning of names: bond0 is bond0.2093, too."""
    told = result.environment.get("NCCL_SOCKET_IFNAME", "")
    if not told or told[0] in "=^":
        return
    for host in result.hosts:
        for word in told.split(","):
            meant = [name for name in host.networks if name.startswith(word)]
            if word in meant and len(meant) > 1:
                yield found(
                    Verdict.WARN,
                    "burnin-interface",
                    [host.host],
                    read=f"NCCL_SOCKET_IFNAME={told} matches {listed(meant)}",
                    expected=f"{word} alone",
                    why=f"NCCL_SOCKET_IFNAME={told} stands for {listed(meant)}: which one NCCL takes is chance",
                    action=f"NCCL_SOCKET_IFNAME=={word}, or fabric.interfaces: [{word}]",
                )


def _shared_networks(chosen: str, networks: Mapping[str, Sequence[str]]) -> list[str]:
    """The interfaces that are in a network of `chosen`: "eth0 and eth1 overlap (10.20.0.0/20)". IPv4 alone.

    IPv6 gives interfaces of one network addresses by design; a single address is a service's, not a network.
    """
    held = [
        (name, address.network)
        for name, texts in networks.items()
        for address in map(ipaddress.ip_interface, texts)
        if address.version == 4 and address.network.num_addresses > 1
    ]
    return [
        f"{chosen} and {other} overlap ({max(own, network, key=lambda each: each.num_addresses)})"
        for name, own in held
        for other, network in held
        if name == chosen != other and own.overlaps(network)
    ]


def _inside(result: BurninResult) -> Iterable[Judged]:
    """GPUs of one node that have NVLink must use it."""
    for node in hosts(result):
        ranks = [rank for rank in result.ranks if rank.host == node and rank.gpu]
        profile = gpu_profile(ranks[0].gpu.name) if ranks and ranks[0].gpu else None
        own = {rank.rank for rank in ranks}
        vias = Counter(
            {
                c.via.split("/")[0]: c.channels
                for transport in result.transports
                if transport.rank in own
                for c in transport.connections
                if c.peer in own and c.peer != transport.rank
            }
        )
        if not profile or not profile.nvlinks or not vias:
            continue
        detours = {via for via in vias if via in ("SHM", "NET")}
        yield found(
            Verdict.UNKNOWN if detours else Verdict.PASS,
            "burnin-nvlink",
            [node],
            read=listed(sorted(vias)),
            expected="P2P between the GPUs of a node with NVLink",
            why=f"setup suspect: transport {listed(sorted(detours))} on a node with NVLink"
            if detours
            else None,
            action="NCCL_P2P_DISABLE set? fabric manager, container's devices; then nvidia-smi nvlink -s"
            if detours
            else None,
        )


# What the machine said


def _kernel(result: BurninResult) -> Iterable[Judged]:
    """An XID while nothing but the burn-in ran fails the node."""
    if result.device == "cpu":
        return
    for messages in result.kernel:
        yield _said(messages)
    silent = sorted(set(hosts(result)) - {messages.host for messages in result.kernel})
    if silent and recorded_by(result):
        yield found(Verdict.UNKNOWN, "burnin-kernel", silent, why="no kernel messages were recorded")


def _said(messages: KernelMessages) -> Judged:
    check, node = "burnin-kernel", messages.host
    if messages.source is None:
        return found(
            Verdict.UNKNOWN,
            check,
            [node],
            why=f"kernel messages could not be read: {messages.why}",
            action="burnin.user must be root, or have CAP_SYSLOG, or kernel.dmesg_restrict be 0",
        )
    events = [line for line in messages.during if XID.search(line) or SXID.search(line)]
    if events:
        kinds = Counter(_event(line) for line in events)
        read = ", ".join(f"{kind} ({count} times)" if count > 1 else kind for kind, count in kinds.items())
        return found(
            Verdict.FAIL,
            check,
            [node],
            read=read,
            expected="no XID during the burn-in",
            why=f"{read} during the burn-in: {events[0].strip()}",
            action="see NVIDIA's XID catalogue for the number; keep the lines for the vendor",
            source=messages.source,
        )
    telling = [line for line in messages.during if HARDWARE.search(line)]
    earlier = [line for line in messages.before if XID.search(line) or SXID.search(line)]
    if telling or earlier:
        what = f"during the burn-in: {telling[0].strip()}" if telling else f"before it: {earlier[0].strip()}"
        return found(
            Verdict.WARN,
            check,
            [node],
            read=f"{len(telling or earlier)} lines",
            why=f"the kernel said {what}",
            action="look at the whole log: journalctl -k -b",
            source=messages.source,
        )
    return found(Verdict.PASS, check, [node], read="no XID", source=messages.source)


def _event(line: str) -> str:
    for kind, pattern in (("XID", XID), ("SXID", SXID)):
        if match := pattern.search(line):
            return f"{kind} {match[2]} on {match[1]}"
    return line


def _telemetry(result: BurninResult) -> Iterable[Judged]:
    if result.device == "cpu":
        return
    watched = {series.host for series in result.telemetry if series.subject.startswith("gpu")}
    silent = sorted(set(hosts(result)) - watched)
    if silent and recorded_by(result):
        told = [each.why for each in result.skipped if "telemetry" in each.what or "reading" in each.what]
        why = told[0] if told else "no readings of its GPUs were recorded"
        yield found(Verdict.UNKNOWN, "burnin-slowdown", silent, why=why)
    for node in hosts(result):
        series = [each for each in result.telemetry if each.host == node]
        gpus = [each for each in series if each.subject.startswith("gpu")]
        if gpus:
            yield _slowdown(node, gpus)
            yield _memory_errors(node, gpus)
            yield from _replays(node, gpus)
        adapters = [each for each in series if not each.subject.startswith("gpu")]
        if adapters:
            yield _links(node, adapters)


def _slowdown(node: str, gpus: Sequence[Series]) -> Judged:
    check = "burnin-slowdown"
    unread = [each for each in gpus if not _known(each, "slowdown_reasons")]
    hard: list[str] = []
    warm: list[str] = []
    for each in gpus:
        values = [int(value) for value in _known(each, "slowdown_reasons")]
        for bit, name in HARDWARE_SLOWDOWN.items():
            if count := sum(bool(value & bit) for value in values):
                hard.append(f"{each.subject}: {name} in {count} of {len(values)} readings")
        if count := sum(bool(value & THERMAL_SLOWDOWN) for value in values):
            warm.append(f"{each.subject}: software thermal slowdown in {count} of {len(values)} readings")
    if hard:
        return found(
            Verdict.FAIL,
            check,
            [node],
            read=hard[0],
            expected="none",
            why="; ".join(hard),
            action="look at fans, inlet temperature, power supplies and cables",
        )
    if unread:
        why = unread[0].unavailable.get("slowdown_reasons", "no reading")
        return found(Verdict.UNKNOWN, check, [node], why=f"{unread[0].subject}: slowdown reasons: {why}")
    if warm:
        return found(
            Verdict.WARN,
            check,
            [node],
            read=warm[0],
            expected="none",
            why="; ".join(warm),
            action="look at the cooling",
        )
    return found(Verdict.PASS, check, [node], read=f"{len(gpus)} GPUs, none")


def _memory_errors(node: str, gpus: Sequence[Series]) -> Judged:
    check = "burnin-ecc"
    grown = {each.subject: _growth(each, "ecc_uncorrected") for each in gpus}
    bad = {subject: count for subject, count in grown.items() if count}
    if bad:
        read = ", ".join(f"{subject}: {count:.0f}" for subject, count in bad.items())
        return found(
            Verdict.FAIL,
            check,
            [node],
            read=read,
            expected="0",
            why=f"uncorrected memory errors during the burn-in, {read}",
            action="reset the GPU; if it comes again, have it replaced",
        )
    unread = [each for each in gpus if grown[each.subject] is None]
    if unread:
        why = unread[0].unavailable.get("ecc_uncorrected", "no reading")
        unsupported = "not supported" in why.lower() or why.strip("[]") == "N/A"
        return found(
            Verdict.SKIP if unsupported else Verdict.UNKNOWN,
            check,
            [node],
            why=f"{unread[0].subject}: {why}",
        )
    return found(Verdict.PASS, check, [node], read="no uncorrected error")


def _replays(node: str, gpus: Sequence[Series]) -> Iterable[Judged]:
    for each in gpus:
        grown = _growth(each, "pcie_replays")
        minutes = (each.seconds[-1] - each.seconds[0]) / 60 if each.seconds else 0
        if grown and minutes and grown / minutes > PCIE_REPLAYS_PER_MINUTE:
            yield found(
                Verdict.WARN,
                "burnin-pcie",
                [node],
                read=f"{each.subject}: {grown / minutes:.0f} replays a minute",
                expected=f"at most {PCIE_REPLAYS_PER_MINUTE:g}",
                why=f"{each.subject}: {grown:.0f} PCIe replays in {minutes:.1f} minutes",
                action="reseat the GPU or its riser",
            )


def _links(node: str, adapters: Sequence[Series]) -> Judged:
    check = "burnin-adapters"
    for names, verdict in ((LINK_LOSSES, Verdict.FAIL), (LINK_ERRORS, Verdict.WARN)):
        grown = [
            f"{each.subject} {name}: {count:.0f}"
            for each in adapters
            for name in names
            if (count := _growth(each, name))
        ]
        if grown:
            return found(
                verdict,
                check,
                [node],
                read=grown[0],
                expected="0",
                why="; ".join(grown),
                action="clean or change cable and transceiver; look at the switch's port",
            )
    return found(Verdict.PASS, check, [node], read=f"{len(adapters)} adapters, no link lost, no errors")


def _known(series: Series, name: str) -> list[float]:
    return [value for value in series.values.get(name, []) if value is not None]


def _growth(series: Series, name: str) -> float | None:
    """What a counter gained during the run; None where it could not be read."""
    values = _known(series, name)
    return values[-1] - values[0] if values else None


def _tool(tool: Tool, expected: Mapping[str, Expected]) -> Judged:
    subject = f"{tool.tool} {tool.subject}" if tool.subject else tool.tool
    check = f"tool-{re.split(r'[^a-z0-9]+', tool.tool.lower())[0]}"
    if tool.skipped is not None:
        return found(Verdict.SKIP, check, [tool.host], why=f"{subject}: {tool.skipped}")
    read = ", ".join(f"{name} {value:.4g}" for name, value in tool.numbers.items()) or f"exit {tool.exit}"
    if tool.exit != 0:
        return found(
            Verdict.FAIL if tool.tool.startswith("dcgmi") else Verdict.WARN,
            check,
            [tool.host],
            read=f"exit {tool.exit}",
            expected="exit 0",
            why=f"{subject} ended with {tool.exit}",
            action=f"read {tool.raw} in the run's folder",
            source=tool.raw,
        )
    fabric = expected[tool.host].fabric if tool.host in expected else None
    wire = fabric.gbits / 8 if fabric and fabric.gbits else None
    rate = tool.numbers.get("write_gbs")
    if wire and rate is not None and tool.tool.startswith("ib_write_bw"):
        verdict = (
            Verdict.PASS
            if rate >= WIRE_WARN * wire
            else Verdict.WARN
            if rate >= WIRE_FAIL * wire
            else Verdict.FAIL
        )
        lowest = (WIRE_WARN if verdict is not Verdict.FAIL else WIRE_FAIL) * wire
        return found(
            verdict,
            check,
            [tool.host],
            read=f"{subject}: {rate:.4g} GB/s",
            expected=f"at least {lowest:.4g}",
            why=None
            if verdict is Verdict.PASS
            else f"{subject}: {rate:.4g} GB/s, {100 * (1 - rate / lowest):.0f} % below {lowest:.4g}",
            action=None if verdict is Verdict.PASS else "look at the cable, the port's width and speed, PCIe",
            source=f"{WIRE_FAIL:g} and {WIRE_WARN:g} of {fabric.gbits:g} Gbit/s by the site file"
            if fabric
            else None,
        )
    return found(Verdict.PASS, check, [tool.host], read=f"{subject}: {read}", source=tool.raw)
