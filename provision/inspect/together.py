"""What several recordings tell together that none tells alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from provision.components.slurm import lint
from provision.health import finding as words
from provision.health.finding import FAIL, PASS, UNKNOWN, WARN, Finding
from provision.inspect import facts
from provision.inspect.dcgm import test_name
from provision.inspect.recording import Recording
from provision.inspect.slurm import matches

Pair = Callable[[Any, Any], list[Finding]]


def judge(recordings: Sequence[Recording], expect: dict[str, Any]) -> list[Finding]:
    """Findings about several recordings of one call."""
    found: list[Finding] = []
    for (first, second), rule in _RULES.items():
        ones = [each for each in recordings if each.kind == first]
        others = [each for each in recordings if each.kind == second and each not in ones[:1]]
        for one in ones[:1]:
            for other in others[:1]:
                found += rule(one, other)
    drained = [each for each in recordings if each.kind == "drained nodes"]
    if drained and "mark" in expect:
        found += _resume(drained[0].data, str(expect["mark"]))
    return found


def settled(one: Finding, both: Sequence[Finding]) -> bool:
    """Whether a finding of one file has its answer in another: a test that was run again alone and passed then."""
    return one.verdict == UNKNOWN and any(
        other.check == one.check and other.subject == f"{one.subject}, in the end" for other in both
    )


def _slurm_gres(conf: Recording, gres: Recording) -> list[Finding]:
    alone = {mistake.message for mistake in lint.gres_mistakes(gres.data)}
    return [
        Finding(
            FAIL,
            "gres-conf",
            f"gres.conf:{mistake.line}",
            mistake.message,
            "the same in both files",
            "drain",
            "Gres= of the NodeName line, GresTypes=gpu",
        )
        for mistake in lint.gres_mistakes(gres.data, conf.data)
        if mistake.message not in alone
    ]


def _slurm_topology(conf: Recording, topology: Recording) -> list[Finding]:
    return [
        Finding(
            FAIL,
            "topology-conf",
            "topology.conf",
            mistake,
            "every node known, in one leaf or block, every child defined",
            "drain",
            "correct it, then scontrol reconfigure",
        )
        for mistake in lint.topology_file_mistakes(topology.data, conf.data)
    ]


def _slurm_hardware(conf: Recording, measured: Recording) -> list[Finding]:
    if measured.data is None:
        return []
    entry = lint.nodes(conf.data).get(measured.data.name)
    if entry is None:
        return [
            Finding(
                FAIL,
                "cpu-memory",
                measured.data.name,
                "no NodeName line",
                "one in slurm.conf",
                "drain",
                "add it",
            )
        ]
    numbers = [entry.get(key) or "0" for key in ("Sockets", "CoresPerSocket", "ThreadsPerCore", "RealMemory")]
    if not all(number.isdigit() for number in numbers):
        return []
    sockets, cores, threads, memory = (int(number[:9]) for number in numbers)
    return [
        Finding(
            FAIL,
            "cpu-memory",
            measured.data.name,
            difference,
            "as slurm.conf says",
            "drain",
            "SMT in firmware, memory modules; or correct the NodeName line",
        )
        for difference in lint.hardware_difference(sockets, cores, threads, memory, measured.data)
    ]


def _node_devices(node: Recording, devices: Recording) -> list[Finding]:
    found = []
    for each in node.data or []:
        for cause in lint.reason_cause(
            str(each.get("reason") or ""), devices=devices.data, memory=each.get("real_memory")
        ):
            found.append(
                Finding(
                    FAIL,
                    f"slurm-{cause.rule}",
                    each.subject,
                    str(each.get("reason"))[:120],
                    "no reason",
                    "drain",
                    cause.action,
                    cause.why,
                )
            )
    return found


def _log_versions(log: Recording, versions: Recording) -> list[Finding]:
    numbers = set(versions.data.values())
    skew = "the releases of Slurm differ" if len(numbers) > 1 else None
    cause = lint.credential_cause(log.data, versions.data, skew)
    return (
        []
        if cause is None
        else [
            Finding(
                FAIL,
                cause.rule if cause.rule.startswith("slurm-") else f"slurm-{cause.rule}",
                "Slurm",
                cause.why,
                "one release",
                "drain",
                cause.action,
            )
        ]
    )


def _cgroup(mount: Recording, plugins: Recording) -> list[Finding]:
    mistake = lint.cgroup_mistake(mount.data, plugins.data)
    return (
        [
            Finding(
                FAIL,
                "cgroup-plugin",
                "node",
                mistake,
                "cgroup_v2.so",
                "drain",
                "a build of Slurm with D-Bus; linuxproc would not keep GPUs apart",
            )
        ]
        if mistake
        else []
    )


def _flavour(module: Recording, bus: Recording) -> list[Finding]:
    need = bus.data["need_open"]
    if not need:
        return []
    fine = module.data["flavour"] == "open"
    return [
        Finding(
            PASS if fine else FAIL,
            "driver-flavour",
            need[0],
            f"{module.data['flavour']} modules {module.data['version']}",
            "open modules for this generation",
            None if fine else "drain",
            None if fine else "install the open flavour of the same version, then reboot",
        )
    ]


def _fabric_modules(report: Recording, modules: Recording) -> list[Finding]:
    missing = [name for name in ("mlx5_ib", "ib_umad") if name not in modules.data]
    waiting = any(gpu.get("fabric.state") == "In Progress" for gpu in report.node.get("gpus", []))
    if not (waiting and missing):
        return []
    return [
        Finding(
            FAIL,
            "fabric-state",
            "node",
            f"{' and '.join(missing)} not loaded",
            "loaded before the fabric manager",
            "drain",
            "install the kernel's extra modules; modprobe; NVLSM; restart the fabric manager, drained",
            "from B200 on the switches are managed through the InfiniBand stack",
        )
    ]


def _peermem(log: Recording, modules: Recording) -> list[Finding]:
    events = log.node.get("kernel.events", [])
    if "nvidia_peermem" in modules.data and any(event.kind == "peermem-symbol" for event in events):
        return [
            Finding(
                FAIL,
                "peer-memory",
                "node",
                "nvidia_peermem is listed and has no client",
                "registered with the RDMA stack",
                "drain",
                "the driver was built before the RDMA stack: rebuild it (dkms), load again",
            )
        ]
    return []


def _gdr(log: Recording, modules: Recording) -> list[Finding]:
    if log.data and log.data["direct"] < log.data["channels"] and "nvidia_peermem" not in modules.data:
        return [
            Finding(
                WARN,
                "peer-memory",
                "node",
                f"nvidia_peermem absent; {log.data['channels'] - log.data['direct']} of {log.data['channels']} "
                "channels without GDRDMA",
                "loaded",
                "fix",
                "modprobe nvidia_peermem",
            )
        ]
    return []


def _job_gpus(job: Recording, minors: Recording) -> list[Finding]:
    by_minor = {minor: (index, bus) for index, bus, minor in minors.data["minors"] if minor is not None}
    found = []
    for number, indices in job.data:
        for device in indices:
            known = by_minor.get(device)
            found.append(
                Finding(UNKNOWN, "job-gpus", f"job {number}", why=f"no GPU has minor number {device}")
                if known is None
                else Finding(
                    PASS,
                    "job-gpus",
                    f"job {number}",
                    f"/dev/nvidia{device} is index {known[0]}, bus {known[1]}",
                )
            )
    return found


def _required(diag: Recording, wish: Recording) -> list[Finding]:
    skipped = set((diag.data or {}).get("skipped", ()))
    tested = set((diag.data or {}).get("tested", ()))
    found = []
    for name in map(str, wish.data["required"]):
        bare = test_name(name)
        if bare in tested:
            found.append(Finding(PASS, "dcgm-required", name, "ran"))
        else:
            state = "skipped" if bare in skipped else "not there"
            found.append(
                Finding(
                    FAIL,
                    "dcgm-required",
                    name,
                    state,
                    "ran",
                    "drain",
                    "not passed: why was it skipped? ECC, product, other processes",
                )
            )
    return found


_DCGM = {
    3: {
        "software",
        "memory",
        "diagnostic",
        "pcie",
        "sm_stress",
        "targeted_stress",
        "targeted_power",
        "memory_bandwidth",
        "memtest",
        "pulse_test",
        "context_create",
    },
    4: {
        "software",
        "memory",
        "diagnostic",
        "pcie",
        "targeted_stress",
        "targeted_power",
        "memtest",
        "nvbandwidth",
        "eud",
        "nccl_tests",
        "context_create",
        "pulse",
    },
}
_RENAMED = {"memory_bandwidth": "nvbandwidth", "pulse_test": "pulse"}


def _test_names(wish: Recording, version: Recording) -> list[Finding]:
    major = int(version.data["version"].partition(".")[0][:3])
    known = _DCGM.get(major)
    if known is None:
        return [
            Finding(UNKNOWN, "dcgm-tests", f"DCGM {major}", why="the names of its tests are not known here")
        ]
    found = []
    for name in map(str, wish.data["dcgm_tests"]):
        new = _RENAMED.get(name)
        if name in known:
            found.append(Finding(PASS, "dcgm-tests", name, f"known to DCGM {major}"))
        else:
            found.append(
                Finding(
                    FAIL,
                    "dcgm-tests",
                    name,
                    f"unknown to DCGM {major}",
                    f"{new} there" if new in known else "a test of this version",
                    "fix",
                    "no test would run: correct the name first",
                )
            )
    return found


def _retried(first: Recording, second: Recording) -> list[Finding]:
    found = []
    for name, (status, why) in first.data.items():
        again = second.data.get(name, ("", ""))[0]
        if status == "Fail" and again == "Pass":
            found.append(
                Finding(
                    PASS,
                    "dcgm-diag",
                    f"{name}, in the end",
                    "Pass",
                    why=f"first try failed: {'not idle' if 'above' in why else why}",
                )
            )
    return found


def _rules(names: Recording, nhc: Recording) -> list[Finding]:
    short = str(names.data["hostname"]).partition(".")[0]
    meant = [rule for rule in nhc.data or [] if matches(rule[0], short)]
    return [
        Finding(
            PASS if meant else FAIL,
            "nhc-rules",
            short,
            f"{len(meant)} rules",
            "at least one",
            None if meant else "drain",
            None if meant else "no check runs on this node: correct the host mask",
        )
    ]


def _same_machine(first: Recording, second: Recording) -> list[Finding]:
    found = []
    old, new = facts.fixed(first.data), facts.fixed(second.data)
    for key, told in old.items():
        now = new.get(key)
        close = now == told or (
            isinstance(told, (int, float))
            and isinstance(now, (int, float))
            and abs(now - told) <= facts.MEMORY_TOLERANCE * abs(told)
            and key.startswith("mem")
        )
        found.append(
            Finding(PASS if close else FAIL, "facts", key, str(now), str(told), None if close else "drain")
        )
    return found


def _limits(nodes: Recording, wish: Recording) -> list[Finding]:
    found = []
    for each in nodes.data:
        limit = wish.data.get(each["product"])
        subject = str(each.get("node", "node"))
        if limit is None:
            found.append(
                Finding(
                    UNKNOWN,
                    "nvlink-count",
                    subject,
                    str(each["product"]),
                    why="unknown model: no limit of it is known, another's is not taken",
                )
            )
            continue
        fine = each["nvlinks_active"] >= limit["nvlinks"] and each.get("busbw", 0) >= limit.get("busbw", 0)
        found.append(
            Finding(
                PASS if fine else FAIL,
                "nvlink-count",
                subject,
                f"{each['nvlinks_active']} links, {each.get('busbw')} GB/s",
                f"{limit['nvlinks']} links, >= {limit.get('busbw')} GB/s",
                None if fine else "drain",
            )
        )
    return found


def _source_address(addresses: Recording, routes: Recording) -> list[Finding]:
    home = {
        told.partition("/")[0]: (host, name)
        for host, each in addresses.data.items()
        for name, told in each.items()
    }
    found = []
    for host, peers in routes.data.items():
        for peer, route in peers.items():
            wanted = home.get(peer, ("", ""))[1]
            if wanted and route["dev"] != wanted:
                found.append(
                    Finding(
                        FAIL,
                        "route",
                        f"{host} -> {peer}",
                        f"by {route['dev']} ({route['src']})",
                        f"by {wanted}",
                        "drain",
                        "one network a rail, or source routing",
                        "answers leave by another interface than requests come in",
                    )
                )
    return found


def _prefix(environment: Recording, interfaces: Recording) -> list[Finding]:
    value = environment.data.get("NCCL_SOCKET_IFNAME", "")
    found = []
    for host, names in interfaces.data.items():
        exact = value.removeprefix("=")
        meant = [
            name for name in names if (name == exact if value.startswith("=") else name.startswith(exact))
        ]
        found.append(
            Finding(
                PASS if len(meant) == 1 else WARN,
                "nccl-interface",
                host,
                f"matches {', '.join(meant) or 'nothing'}",
                "one interface",
                None if len(meant) == 1 else "warn",
                f"NCCL_SOCKET_IFNAME=={exact} matches one" if len(meant) != 1 else None,
            )
        )
    return found


def _stale_munge(trips: Recording, times: Recording) -> list[Finding]:
    old = [each.subject for each in times.findings if each.verdict == FAIL]
    bad = [
        each for each in trips.findings if each.verdict == FAIL and any(host in each.subject for host in old)
    ]
    return [
        Finding(
            FAIL,
            "munge-cross",
            each.subject,
            each.read,
            "Success",
            "fix",
            "systemctl restart munge there, then Slurm",
            f"munged is older than its key on {', '.join(old)}",
        )
        for each in bad
    ]


def _mpi(launch: Recording, types: Recording) -> list[Finding]:
    if not any("pmix" in (each.read or "") for each in launch.findings):
        return []
    return [
        Finding(
            FAIL,
            "nccl-run",
            "launch",
            f"pmix wanted, available: {', '.join(types.data)}",
            "pmix",
            "warn",
            "a Slurm built with PMIx, or srun --mpi=pmi2",
            "launch failed: no verdict on bandwidth",
        )
    ]


def _busy(processes: Recording, launch: Recording) -> list[Finding]:
    if not processes.data or not processes.data["busy"]:
        return []
    return [
        Finding(
            UNKNOWN,
            "nccl-run",
            "run",
            "not run",
            "a run on idle GPUs",
            why="busy: "
            + "; ".join(
                f"{each.subject} {each.read}" for each in processes.findings if each.verdict == words.UNKNOWN
            ),
        )
    ]


_RULES: dict[tuple[str, str], Pair] = {
    ("slurm.conf", "gres.conf"): _slurm_gres,
    ("slurm.conf", "topology.conf"): _slurm_topology,
    ("slurm.conf", "slurmd -C"): _slurm_hardware,
    ("scontrol show node", "ls /dev/nvidia*"): _node_devices,
    ("Slurm's log", "versions by host"): _log_versions,
    ("mount", "Slurm's plugins"): _cgroup,
    ("modinfo nvidia", "lspci"): _flavour,
    ("nvidia-smi -q", "lsmod"): _fabric_modules,
    ("kernel messages", "lsmod"): _peermem,
    ("NCCL's log", "lsmod"): _gdr,
    ("scontrol show job", "nvidia-smi --query-gpu"): _job_gpus,
    ("dcgmi diag -j", "required tests"): _required,
    ("tests to run", "dcgmi -v"): _test_names,
    ("results of diagnostics", "results of diagnostics"): _retried,
    ("names of a host", "NHC's configuration"): _rules,
    ("facts of a machine", "facts of a machine"): _same_machine,
    ("NVLinks and bandwidth of nodes", "limits of products"): _limits,
    ("addresses of hosts", "routes between hosts"): _source_address,
    ("environment of NCCL", "interfaces of hosts"): _prefix,
    ("credentials between hosts", "times of munge's key and daemon"): _stale_munge,
    ("messages of a launch", "srun --mpi=list"): _mpi,
    ("nvidia-smi --query-compute-apps", "messages of a launch"): _busy,
}


def _resume(nodes: Sequence[dict[str, Any]], mark: str) -> list[Finding]:
    found = []
    for each in nodes:
        ours = str(each["reason"]).startswith(mark)
        found.append(
            Finding(
                PASS,
                "resume",
                str(each["node"]),
                "resume, once all checks pass",
                why=f"drained by this tool: {each['reason']}",
            )
            if ours
            else Finding(
                words.SKIP,
                "resume",
                str(each["node"]),
                "stays drained",
                why=f"not this tool's: {each['reason'] or 'no reason'}",
            )
        )
    return found
