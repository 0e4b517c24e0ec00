"""Slurm's files and answers: slurm.conf, gres.conf, cgroup.conf, topology.conf, sinfo, scontrol, logs, NHC. Pure."""

from __future__ import annotations

import re

from provision.components.slurm import lint
from provision.components.slurm.acceptance import BASES, FLAGS, parse_state
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN
from provision.health.sources.programs import Failed, slurm_node
from provision.inspect.recording import Kind, Recording

_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


def _conf_lines(text: str) -> list[str]:
    return [bare for line in text.splitlines() if (bare := line.partition("#")[0].strip())]


def _keys(text: str) -> set[str]:
    return {key for entry in lint.parse(text) for key in entry.values}


def _is_conf(text: str) -> bool:
    lines = _conf_lines(text)
    return (
        bool(lines) and sum(bool(re.match(r"[A-Za-z]\w*\s*=", line)) for line in lines) * 10 >= len(lines) * 8
    )


def _template(found: Recording, text: str) -> bool:
    if _TEMPLATE.search(text):
        found.cut("a template, not the file that it makes")
        return True
    return False


def is_gres(text: str) -> bool:
    keys = _keys(text) if _is_conf(text) or _TEMPLATE.search(text) else set()
    return (
        "autodetect" in keys
        or ("name" in keys and bool(keys & {"file", "type", "count", "nodename"}))
        or keys == {"name"}
    ) and not keys & {
        "clustername",
        "partitionname",
        "realmemory",
        "slurmctldhost",
    }


def parse_gres(text: str) -> Recording:
    found = Recording("gres.conf", data=text)
    if _template(found, text):
        return found
    for mistake in lint.gres_mistakes(text):
        found.find(
            FAIL,
            "gres-conf",
            f"gres.conf:{mistake.line}",
            mistake.message,
            "a file that slurmd takes",
            action="drain",
            advice="correct the line, then scontrol reconfigure",
        )
    if not found.findings:
        found.tell("gres-conf", "gres.conf", f"{len(lint.parse(text))} lines")
    return found


def is_topology(text: str) -> bool:
    return bool(_keys(text) & {"switchname", "blockname"}) and _is_conf(text)


def parse_topology(text: str) -> Recording:
    found = Recording("topology.conf", data=text)
    if _template(found, text):
        return found
    switches, blocks = lint.topology_switches(text), lint.topology_blocks(text)
    for mistake in lint.topology_file_mistakes(text):
        found.find(
            FAIL,
            "topology-conf",
            "topology.conf",
            mistake,
            "every child defined, one root" if switches else "every node in one block",
            action="drain",
            advice="correct it, then scontrol reconfigure",
        )
    if not found.findings:
        below = [*(switch.nodes for switch in switches.values()), *blocks.values()]
        known = {node for members in below for node in members}
        told = f"{len(switches)} switches" if switches else f"{len(blocks)} blocks"
        found.tell("topology-conf", "topology.conf", f"{told}, {len(known)} nodes")
    return found


def is_cgroup(text: str) -> bool:
    keys = _keys(text)
    return (
        bool(
            keys
            & {
                "constraindevices",
                "constraincores",
                "constrainramspace",
                "cgroupplugin",
                "cgroupautomount",
                "cgroupmountpoint",
            }
        )
        and "nodename" not in keys
    )


def parse_cgroup(text: str) -> Recording:
    found = Recording("cgroup.conf", data=text)
    if _template(found, text):
        return found
    for key, verdict, why in (
        ("ConstrainDevices", FAIL, "every job sees all GPUs of the node"),
        ("ConstrainCores", WARN, "jobs take each other's cores"),
        ("ConstrainRAMSpace", WARN, "jobs take each other's memory"),
    ):
        told = lint.parameter(text, key)
        fine = (told or "no").lower() == "yes"
        found.find(
            PASS if fine else verdict,
            "cgroup-conf",
            key,
            told or "missing",
            "yes",
            action=None if fine else "drain" if verdict == FAIL else "warn",
            why=None if fine else why,
            advice=None if fine else f"{key}=yes, then restart slurmd",
        )
    return found


def is_slurmd_c(text: str) -> bool:
    return (
        re.match(r"\s*NodeName=\S+ .*SocketsPerBoard=", text) is not None
        and "RealMemory=" in text
        and len(_conf_lines(text)) <= 2
    )


def parse_slurmd_c(text: str) -> Recording:
    found = Recording("slurmd -C")
    try:
        found.data = lint.parse_slurmd_c(text)
    except ValueError as error:
        found.cut(str(error)[:160])
        return found
    measured = found.data
    found.tell(
        "cpu-memory",
        measured.name,
        f"{measured.sockets} x {measured.cores} x {measured.threads}, {measured.memory} MiB",
        "not compared: give slurm.conf too",
    )
    return found


def is_scontrol_node(text: str) -> bool:
    return (
        re.search(r"^NodeName=\S", text, re.MULTILINE) is not None
        and re.search(r"\b(?:Reason|CfgTRES|CPUTot|CPUAlloc|Arch)=", text) is not None
    )


def parse_scontrol_node(text: str) -> Recording:
    found = Recording("scontrol show node")
    nodes = re.split(r"\n(?=NodeName=)", text.strip())
    for block in nodes:
        try:
            node = slurm_node(" ".join(block.split()))
        except Failed as error:
            found.cut(str(error))
            continue
        if "CPUTot=" in block and "CfgTRES=" not in block:
            found.cut(f"{node.subject} is not told to its end: cut off?")
        reason = node.get("reason")
        causes = lint.reason_cause(str(reason or ""), memory=node.get("real_memory"))
        for cause in causes:
            found.find(
                FAIL,
                f"slurm-{cause.rule}",
                node.subject,
                str(reason)[:120],
                "no reason",
                action="drain",
                why=cause.why,
                advice=cause.action,
            )
        if reason and not causes:
            found.find(
                WARN,
                "scheduler",
                node.subject,
                f"{node['state']}: {reason}",
                "no reason",
                action="warn",
                advice="who set it? a person's drain stays",
            )
        if not reason and not causes:
            _state(found, node.subject, node["state"].split("+"))
        found.data = [*(found.data or []), node]
    return found


_JOB = re.compile(r"JobId=(\d+)\b.*?\bGRES=gpu(?::[\w.-]+)?:(\d+)\(IDX:([\d,-]+)\)", re.DOTALL)


def is_job(text: str) -> bool:
    return _JOB.search(text) is not None


def parse_job(text: str) -> Recording:
    found = Recording("scontrol show job")
    found.data = [(job, _indices(indices)) for job, _, indices in _JOB.findall(text)]
    for job, indices in found.data:
        found.find(
            SKIP,
            "job-gpus",
            f"job {job}",
            ", ".join(f"/dev/nvidia{i}" for i in indices),
            why="Slurm counts device files; give the minor numbers too (nvidia-smi -q)",
        )
    return found


def _indices(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit() and int((last or first)[:4]) - int(first[:4]) < 256:
            found += range(int(first[:4]), int((last or first)[:4]) + 1)
    return found


_SINFO = re.compile(r"([\w.-]+) ([a-z_]+[*~#!%$@^-]?)")


def is_sinfo(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    states = [match[2].rstrip("*~#!%$@^-") for line in lines if (match := _SINFO.fullmatch(line.strip()))]
    return (
        bool(lines)
        and len(states) == len(lines)
        and any(
            state in ("idle", "alloc", "mix", "down", "drain", "drng", "resv", "comp") for state in states
        )
    )


def parse_sinfo(text: str) -> Recording:
    found = Recording("sinfo -N")
    for line in text.splitlines():
        match = _SINFO.fullmatch(line.strip())
        if match:
            _state(found, match[1], [match[2]])
    return found


_HEADED = re.compile(r"^(?:PARTITION|NODELIST|REASON|HOSTNAMES)\s+[A-Z]", re.MULTILINE)


def is_sinfo_table(text: str) -> bool:
    head = _HEADED.search(text)
    words = text[head.start() :].partition("\n")[0].split() if head else []
    return bool({"NODELIST", "HOSTNAMES"} & set(words)) and ("STATE" in words or words[0] == "REASON")


def parse_sinfo_table(text: str) -> Recording:
    """sinfo as it prints by itself, with -N, -l or -R: the header tells the columns."""
    found = Recording("sinfo")
    head = _HEADED.search(text)
    lines = text[head.start() :].splitlines() if head else []
    columns = lines[0].split()
    name = columns.index("NODELIST" if "NODELIST" in columns else "HOSTNAMES")
    for line in lines[1:]:
        cells = line.split()
        if not cells:
            continue
        if columns[0] == "REASON":
            _reason(found, cells[-1], line[: lines[0].index(columns[1])].strip())
        elif "n/a" in cells:  # a partition without a node
            continue
        elif len(cells) <= max(name, columns.index("STATE")):
            found.cut(f"not a row of sinfo: {line[:60]!r}")
        else:
            _state(found, cells[name], [cells[columns.index("STATE")]])
    if not found.findings:
        found.cut("no node in it")
    return found


def _reason(found: Recording, node: str, reason: str) -> None:
    """What a node's reason tells: its cause where it has a known one."""
    causes = lint.reason_cause(reason)
    for cause in causes:
        found.find(
            FAIL,
            f"slurm-{cause.rule}",
            node,
            reason[:120],
            "no reason",
            action="drain",
            why=cause.why,
            advice=cause.action,
        )
    if not causes:
        found.find(
            WARN,
            "scheduler",
            node,
            reason[:120],
            "no reason",
            action="warn",
            advice="who set it? journalctl -u slurmd on the node",
        )


def _state(found: Recording, node: str, words: list[str]) -> None:
    base, flags = parse_state(words)
    if base not in BASES or not flags <= FLAGS:
        odd = base if base not in BASES else ", ".join(sorted(flags - FLAGS))
        found.find(
            UNKNOWN,
            "scheduler",
            node,
            f"state {odd}",
            "a state that is known",
            why="no state of Slurm's that is known here",
        )
        return
    told = "+".join([base, *sorted(flags)])
    bad = base in ("DOWN", "ERROR") or flags & {"NOT_RESPONDING", "INVALID_REG", "INVALID", "FAIL"}
    out = flags & {"DRAIN"}
    verdict = FAIL if bad else WARN if out else PASS
    found.find(
        verdict,
        "scheduler",
        node,
        told,
        "in service",
        action={FAIL: "drain", WARN: "warn"}.get(verdict),
        advice="scontrol show node says why" if verdict != PASS else None,
    )


_REASON = re.compile(
    r"^\s*(Low (?:socket|CPUs|RealMemory)|gres/\w+ count|Not responding|Kill task failed"
    r"|batch job complete failure|Prolog error|Epilog error|Node unexpectedly rebooted)"
)


def is_reason(text: str) -> bool:
    return _REASON.match(text) is not None and len(text.strip().splitlines()) == 1


def parse_reason(text: str) -> Recording:
    found = Recording("a node's reason", data=text.strip())
    _reason(found, "node", text.strip())
    return found


_LOG = re.compile(r"^(?:\[[^\]]+\] )?(?:\w+: )?(?:error|fatal): ", re.MULTILINE)


def is_log(text: str) -> bool:
    return (
        _LOG.search(text) is not None
        and re.search(r"slurm|gres|Credential|PersistInit|CLUSTER ID|plugin|TRES|node", text, re.IGNORECASE)
        is not None
    )


def parse_log(text: str) -> Recording:
    found = Recording("Slurm's log", data=text)
    cause = lint.log_cause(text)
    if cause:
        found.find(
            FAIL,
            f"slurm-{cause.rule}",
            "Slurm",
            _first(text),
            "no error",
            action="drain",
            why=cause.why,
            advice=cause.action,
        )
    else:
        errors = [line.strip() for line in text.splitlines() if "error" in line and "INVAL" not in line]
        for line in dict.fromkeys(errors):
            for known in lint.reason_cause(line):
                node = re.search(r"\b[Nn]ode (\S+)", line)
                found.find(
                    FAIL,
                    f"slurm-{known.rule}",
                    node[1] if node else "Slurm",
                    line[:140],
                    "no error",
                    action="drain",
                    why=known.why,
                    advice=known.action,
                )
    changed = re.search(r"gres/gpu: Count changed on node (\S+) \((\d+) != (\d+)\)", text)
    low = re.search(
        r"Setting node (\S+) state to INVAL with reason:(gres/gpu count reported lower than configured"
        r" \((\d+) < (\d+)\))",
        text,
    )
    if low:
        found.find(
            FAIL,
            "slurm-gres-low",
            low[1],
            f"{low[3]} GPUs or MIG devices on the node, {low[4]} in slurm.conf",
            "equal",
            action="drain",
            why="MIG layout and Slurm's configuration changed apart"
            if changed
            else "a GPU is missing, or slurmd started before the driver",
            advice="drain, MIG, slurm.conf and gres.conf, reconfigure, resume: in this order",
        )
    if "Credential data mismatch" in text and not cause:
        credential = lint.credential_cause(text, {}, None)
        found.find(
            FAIL,
            "slurm-credential",
            "Slurm",
            _first(text),
            "no error",
            action="drain",
            why=credential.why if credential else None,
            advice="compare `slurmctld -V` on all hosts first, then munge -n | unmunge between them",
        )
    if "AllocGRES is deprecated" in text or "AllocGRES" in text:
        found.find(
            FAIL,
            "exporter",
            "sacct",
            _first(text),
            "AllocTRES",
            action="fix",
            advice="an exporter for this release of Slurm: it asks for AllocTRES",
        )
    if not found.findings:
        found.find(
            WARN,
            "slurm-log",
            "Slurm",
            _first(text),
            "no error",
            action="warn",
            why="no known cause",
            advice="the lines before it",
        )
    return found


def _first(text: str) -> str:
    return next(
        (line.strip() for line in text.splitlines() if re.search(r"error|fatal", line)), text.strip()
    )[:140]


def is_tres(text: str) -> bool:
    return (
        re.fullmatch(r"\s*(?:[\w/:.-]+=[\w.]+,)+[\w/:.-]+=[\w.]+\s*", text) is not None and "gres/gpu" in text
    )


def parse_tres(text: str) -> Recording:
    found = Recording("TRES of a job")
    values = dict(part.partition("=")[::2] for part in text.strip().split(","))
    typed = [int(each) for key, each in values.items() if key.startswith("gres/gpu:") and each.isdigit()]
    total = int(values["gres/gpu"]) if values.get("gres/gpu", "").isdigit() else sum(typed)
    found.tell(
        "job-gpus",
        "job",
        f"{total} GPUs",
        "typed and untyped entries are the same GPUs" if typed and "gres/gpu" in values else None,
    )
    found.data = total
    return found


def is_gres_csv(text: str) -> bool:
    return re.match(r"\s*gres;gres_used", text, re.IGNORECASE) is not None


def gres_count(text: str) -> int:
    """GPUs in a GRES of any spelling: "gpu:4(S:0-1)", "gpu:(null):3(IDX:0-2)", "gpu:a100:4,gpu:v100:2", "(null)"."""
    total = 0
    for part in re.sub(r"\((?:IDX|S):[^)]*\)", "", text).split(","):
        words = part.strip().split(":")
        if words[0] == "gpu":
            total += int(words[-1][:6]) if words[-1].isdigit() else 1
    return total


def parse_gres_csv(text: str) -> Recording:
    found = Recording("sinfo's GRES")
    rows = [line.split(";") for line in text.splitlines()[1:] if line.strip()]
    found.data = []
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            found.cut(f"row {number} has {len(row)} cells")
            continue
        total, used = gres_count(row[0]), gres_count(row[1])
        found.data.append((total, used))
        found.find(
            PASS if used <= total else FAIL,
            "gres-used",
            f"row {number}",
            f"total/used {total}/{used}",
            "used <= total",
            action=None if used <= total else "drain",
        )
    return found


def is_mpi_list(text: str) -> bool:
    return "MPI plugin types are" in text


def parse_mpi_list(text: str) -> Recording:
    found = Recording("srun --mpi=list")
    found.data = re.findall(r"^\s+(\S+)\s*$", text, re.MULTILINE)
    pmix = any(name.startswith("pmix") for name in found.data)
    found.find(
        PASS if pmix else WARN,
        "slurm-mpi",
        "srun",
        ", ".join(found.data) or "none",
        "pmix for images with OpenMPI",
        action=None if pmix else "warn",
        advice=None if pmix else "a Slurm built with PMIx, or srun --mpi=pmi2 and an MPI for it",
    )
    return found


def is_slurm_conf(text: str) -> bool:
    keys = _keys(text)
    return bool(
        keys
        & {
            "clustername",
            "slurmctldhost",
            "controlmachine",
            "partitionname",
            "nodename",
            "grestypes",
            "nodeset",
        }
    ) and (_is_conf(text) or bool(_TEMPLATE.search(text)))


def parse_slurm_conf(text: str) -> Recording:
    found = Recording("slurm.conf", data=text)
    if _template(found, text):
        return found
    nodes = lint.nodes(text)
    types = {word.lower() for word in (lint.parameter(text, "GresTypes") or "").split(",")}
    lines: dict[int, str] = {}
    for name, entry in nodes.items():
        gres = entry.get("Gres")
        if gres and "gpu" in gres and "gpu" not in types and "clustername" in _keys(text):
            lines.setdefault(entry.line, f"Gres={gres} without gpu in GresTypes")
        memory = entry.get("RealMemory")
        if memory == "1":
            lines.setdefault(entry.line, "RealMemory=1: the line was never filled in")
        product = _cpus(entry)
        cpus = entry.get("CPUs") or entry.get("Procs")
        if product and cpus and cpus.isdigit() and int(cpus) not in product:
            lines.setdefault(
                entry.line, f"{name}: CPUs={cpus} and sockets x cores x threads is {product[-1]}"
            )
    for mistake in lint.partition_mistakes(text):
        lines.setdefault(mistake.line, mistake.message)
    for number, message in sorted(lines.items()):
        found.find(
            FAIL,
            "slurm-conf",
            f"slurm.conf:{number}",
            message,
            "a file that slurmctld takes",
            action="drain",
            advice="correct the line, then scontrol reconfigure",
        )
    if lint.parameter(text, "ProctrackType") == "proctrack/linuxproc":
        found.find(
            WARN,
            "slurm-conf",
            "ProctrackType",
            "proctrack/linuxproc",
            "proctrack/cgroup",
            action="warn",
            advice="set ProctrackType=proctrack/cgroup",
            why="processes escape their job, GPUs are not kept apart",
        )
    if "gpu" in types and "cgroup" not in (lint.parameter(text, "TaskPlugin") or "cgroup"):
        found.find(
            WARN,
            "slurm-conf",
            "TaskPlugin",
            str(lint.parameter(text, "TaskPlugin")),
            "task/cgroup",
            action="warn",
            advice="set TaskPlugin=task/cgroup,task/affinity and ConstrainDevices=yes in cgroup.conf",
            why="every job sees all GPUs",
        )
    if not found.findings:
        found.tell("slurm-conf", "slurm.conf", f"{len(nodes)} nodes")
    found.about = f"{len(nodes)} nodes"
    return found


def _cpus(entry: lint.Entry) -> list[int]:
    """Numbers of CPUs that sockets, cores and threads allow: cores, or threads."""
    boards = entry.get("Boards") or "1"
    per_board = entry.get("SocketsPerBoard")
    numbers = [
        per_board or entry.get("Sockets"),
        entry.get("CoresPerSocket"),
        entry.get("ThreadsPerCore"),
        boards if per_board else "1",
    ]
    if not all(number and number.isdigit() for number in numbers):
        return []
    sockets, cores, threads, times = (int((number or "0")[:6]) for number in numbers)
    return [times * sockets * cores, times * sockets * cores * threads]


_RULE = re.compile(r"^\s*(\S+)\s*\|\|\s*(?:export\s+)?(\w+)\s*(.*?)\s*$")
_GPU_CHECKS = re.compile(r"gpu|nv_|nvsmi|cuda|nvlink|nccl|xid")
_PCIE5_GBS = 63.0  # of x16; no copy between host and GPU is faster


def is_nhc(text: str) -> bool:
    return re.search(r"^\s*#?\s*\S+.*\|\|\s*check_\w+", text, re.MULTILINE) is not None


def parse_nhc(text: str) -> Recording:
    found = Recording("NHC's configuration")
    if _template(found, text):
        return found
    rules: list[tuple[str, str, str]] = []
    off = []
    for line in text.splitlines():
        match = _RULE.match(line)
        if match and not line.lstrip().startswith("#"):
            rules.append((match[1], match[2], match[3]))
        elif line.lstrip().startswith("#") and (match := _RULE.match(line.lstrip("# \t"))):
            off.append(match[2])
    gpu = [name for _, name, _ in rules if _GPU_CHECKS.search(name)]
    absent = sorted({name for name in off if _GPU_CHECKS.search(name)})
    if absent:
        found.find(
            WARN,
            "nhc-rules",
            "NHC",
            f"switched off: {', '.join(absent)}",
            "checks of the GPUs",
            action="warn",
            why="what is not checked is not healthy",
        )
    if not gpu and not absent and rules:
        found.find(SKIP, "nhc-rules", "NHC", why="no check of GPUs in it")
    for _, name, told in rules:
        for number in re.findall(r"\d+(?:\.\d+)?", told)[:1]:
            if name in ("check_cuda_bw", "check_gpu_bw") and float(number) > _PCIE5_GBS:
                found.find(
                    FAIL,
                    "nhc-rules",
                    name,
                    f"{number} GB/s between host and GPU",
                    f"<= {_PCIE5_GBS:g} GB/s",
                    action="fix",
                    why="no PCIe 5.0 x16 link is faster: every node would fail",
                    advice="50 to 55 GB/s are good",
                )
    found.tell("nhc-rules", "NHC", f"{len(rules)} rules, {len(gpu)} of them about GPUs")
    found.data = rules
    found.about = f"{len(rules)} rules"
    return found


def matches(mask: str, name: str) -> bool:
    """Whether a host mask of NHC ("*", "gpu-a01", "gpu-*") means the node `name`."""
    return re.fullmatch(re.escape(mask).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


KINDS: tuple[Kind, ...] = (
    Kind("NHC's configuration", is_nhc, parse_nhc),
    Kind("srun --mpi=list", is_mpi_list, parse_mpi_list),
    Kind("sinfo's GRES", is_gres_csv, parse_gres_csv),
    Kind("scontrol show node", is_scontrol_node, parse_scontrol_node),
    Kind("scontrol show job", is_job, parse_job),
    Kind("slurmd -C", is_slurmd_c, parse_slurmd_c),
    Kind("TRES of a job", is_tres, parse_tres),
    Kind("topology.conf", is_topology, parse_topology),
    Kind("cgroup.conf", is_cgroup, parse_cgroup),
    Kind("gres.conf", is_gres, parse_gres),
    Kind("slurm.conf", is_slurm_conf, parse_slurm_conf),
    Kind("a node's reason", is_reason, parse_reason),
    Kind("Slurm's log", is_log, parse_log),
    Kind("sinfo", is_sinfo_table, parse_sinfo_table),
    Kind("sinfo -N", is_sinfo, parse_sinfo),
)
