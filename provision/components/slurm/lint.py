"""Reads Slurm's own files and messages and says what is wrong with them. Pure; for any cluster's files.

Mistakes name file and line. `cause` turns what slurmctld or slurmd say into why, and what to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from provision.site.hostlist import HostlistError, expand


@dataclass(frozen=True)
class Entry:
    """One line of a file of Slurm's: its number and its keys, in lower case, with their values."""

    line: int
    values: Mapping[str, str]

    def get(self, key: str) -> str | None:
        return self.values.get(key.lower())


@dataclass(frozen=True)
class Mistake:
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Switch:
    name: str
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


_WORD = re.compile(r'([A-Za-z][A-Za-z0-9_]*)\s*=\s*("[^"]*"|[^\s#"]+)')


def parse(text: str) -> list[Entry]:
    """The lines of slurm.conf, gres.conf, topology.conf and the like; comments and continued lines understood."""
    entries: list[Entry] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        bare = line.split("#", 1)[0].rstrip() if '"' not in line else line.rstrip()
        if bare.endswith("\\"):
            pending += bare[:-1] + " "
            continue
        values = {key.lower(): value.strip('"') for key, value in _WORD.findall(pending + bare)}
        if values:
            entries.append(Entry(start, values))
        pending, start = "", 0
    return entries


def nodes(slurm_conf: str) -> dict[str, Entry]:
    """The nodes that slurm.conf names, each with its line; DEFAULT applied."""
    found: dict[str, Entry] = {}
    defaults: dict[str, str] = {}
    for entry in parse(slurm_conf):
        name = entry.get("NodeName")
        if name is None:
            continue
        if name.upper() == "DEFAULT":
            defaults.update(entry.values)
            continue
        for each in _expanded(name):
            found[each] = Entry(entry.line, {**defaults, **entry.values})
    return found


def _expanded(text: str) -> list[str]:
    try:
        return expand(text)
    except HostlistError:
        return [text]


def parameter(slurm_conf: str, name: str) -> str | None:
    """The value of a parameter of slurm.conf; the last line wins."""
    found = [value for entry in parse(slurm_conf) if (value := entry.get(name)) is not None]
    return found[-1] if found else None


def partition_mistakes(slurm_conf: str) -> list[Mistake]:
    """Nodes of partitions that no NodeName line names. A file that includes others cannot be judged so."""
    if re.search(r"^\s*include\s", slurm_conf, re.IGNORECASE | re.MULTILINE):
        return []
    known = {*nodes(slurm_conf), *(entry.get("NodeSet") for entry in parse(slurm_conf))}
    found = []
    for entry in parse(slurm_conf):
        wanted = entry.get("Nodes") if entry.get("PartitionName") else None
        names = _expanded(wanted) if wanted and wanted.upper() != "ALL" else []
        strange = [name for name in names if name not in known]
        if strange and len(known) > 1:
            told = ", ".join(strange[:4]) + (f" and {len(strange) - 4} more" if len(strange) > 4 else "")
            found.append(Mistake("slurm.conf", entry.line, f"no NodeName line for {told}"))
    return found


# gres.conf


def gres_mistakes(gres_conf: str, slurm_conf: str | None = None) -> list[Mistake]:
    """What slurmd would refuse, and what would leave GPUs unused, in gres.conf (against slurm.conf where given)."""
    entries = parse(gres_conf)
    mistakes = list(_gres_alone(entries))
    if slurm_conf is not None:
        mistakes += _gres_against(entries, slurm_conf)
    return sorted(mistakes, key=lambda mistake: mistake.line)


_GRES_KEYS = {
    *("autodetect", "cores", "count", "cpus", "file", "files", "flags", "links", "multiplefiles", "name"),
    *("nodename", "type"),
}


def _gres_alone(entries: list[Entry]) -> Iterator[Mistake]:
    automatic = any((entry.get("AutoDetect") or "off").lower() != "off" for entry in entries)
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for entry in entries:
        strange = sorted(set(entry.values) - _GRES_KEYS)
        if strange:
            yield Mistake("gres.conf", entry.line, f"slurmd does not know the key {', '.join(strange)}")
        name = entry.get("Name")
        if name is None:
            continue
        file, count = entry.get("File"), entry.get("Count") or ""
        files = len(_expanded(file.replace("/", "_"))) if file and "," not in file else 0
        if files and count.isdigit() and int(count) != files:
            yield Mistake("gres.conf", entry.line, f"Count={count} and {files} device files")
        same = tuple(sorted(entry.values.items()))
        if same in seen:
            yield Mistake(
                "gres.conf", entry.line, f"duplicate records for {name}: the same as line {seen[same]}"
            )
            continue
        seen[same] = entry.line
        if automatic and name.lower() == "gpu" and entry.get("File") is None:
            yield Mistake(
                "gres.conf",
                entry.line,
                "Name=gpu without File beside AutoDetect: the GPUs would be counted twice; leave the line out",
            )


def _gres_against(entries: list[Entry], slurm_conf: str) -> Iterator[Mistake]:
    """Lines without NodeName are for the node whose file this is: which one, only that node knows."""
    known = nodes(slurm_conf)
    kinds = {word.lower() for word in (parameter(slurm_conf, "GresTypes") or "").split(",")}
    first: dict[tuple[str, str], int] = {}  # (node, kind) -> line
    counts: dict[tuple[str, str], Counter[str]] = {}
    for entry in entries:
        kind = (entry.get("Name") or "").lower()
        if kind and kind not in kinds:
            yield Mistake("gres.conf", entry.line, f"{kind} is not in GresTypes of slurm.conf")
        for node in _expanded(entry.get("NodeName") or "") if kind and entry.get("NodeName") else ():
            if node in known:
                first.setdefault((node, kind), entry.line)
                counts.setdefault((node, kind), Counter())[entry.get("Type") or ""] += _count(entry)
            else:
                yield Mistake("gres.conf", entry.line, f"{node} has no NodeName line in slurm.conf")
    wanting: dict[tuple[int, str, int], list[str]] = {}
    for (node, kind), have in counts.items():
        gres = known[node].get("Gres")
        if gres is None:
            wanting.setdefault((first[node, kind], kind, have.total()), []).append(node)
        elif not _agree(have, _gres_counts(gres, kind)):
            message = f"{node} has {have.total()} {kind} here and Gres={gres} in slurm.conf"
            yield Mistake("gres.conf", first[node, kind], message)
    for (line, kind, count), names in wanting.items():
        have_ = "has" if len(names) == 1 else "have"
        what = "GPUs" if kind == "gpu" else kind
        message = f"{', '.join(names)} {have_} {count} {what} in gres.conf and no Gres= in slurm.conf"
        yield Mistake("gres.conf", line, message)


def _count(entry: Entry) -> int:
    if entry.get("Count"):
        return int(re.sub(r"\D", "", entry.get("Count") or "") or 0)
    file = entry.get("File")
    return len(_expanded(file.replace("/", "_"))) if file else 1


def _gres_counts(text: str, kind: str) -> Counter[str]:
    """Type ("" for none) -> count of a kind: "gpu:h100:8(S:0-1),gpu:a100:2" -> {"h100": 8, "a100": 2}."""
    found: Counter[str] = Counter()
    for word in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = word.split(":")
        if name.lower() == kind:
            count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
            found[rest[0] if rest else ""] += count
    return found


def _agree(have: Counter[str], wanted: Counter[str]) -> bool:
    """Whether both sides count the same; of types only where both name them."""
    return have.total() == wanted.total() if "" in have or "" in wanted else have == wanted


# topology.conf


def topology_switches(topology_conf: str) -> dict[str, Switch]:
    """The switches of topology.conf, by name."""
    found = {}
    for entry in parse(topology_conf):
        name = entry.get("SwitchName")
        if name is not None:
            below, leaves = entry.get("Switches"), entry.get("Nodes")
            found[name] = Switch(
                name,
                tuple(_expanded(leaves)) if leaves else (),
                tuple(_expanded(below)) if below else (),
            )
    return found


def topology_mistakes(switches: Mapping[str, Switch], known: Collection[str]) -> list[str]:
    """Every node in exactly one leaf, every child defined, nothing empty, one root."""
    mistakes: list[str] = []
    leaf_of: dict[str, str] = {}
    parent_of: dict[str, str] = {}
    for switch in switches.values():
        if not switch.nodes and not switch.switches:
            mistakes.append(f"switch {switch.name} has nothing below it")
        for node in switch.nodes:
            if node not in known:
                mistakes.append(f"node {node} below {switch.name} is unknown to slurm.conf")
            elif leaf_of.setdefault(node, switch.name) != switch.name:
                mistakes.append(f"node {node} is below {leaf_of[node]} and {switch.name}")
        for child in switch.switches:
            if child not in switches:
                mistakes.append(f"switch {child} below {switch.name} is not defined")
            elif parent_of.setdefault(child, switch.name) != switch.name:
                mistakes.append(f"switch {child} is below {parent_of[child]} and {switch.name}")
    mistakes += [f"node {node} is in no switch" for node in known if node not in leaf_of]
    roots = [name for name in switches if name not in parent_of]
    if len(roots) > 1:
        mistakes.append(f"several roots, no path between them: {', '.join(roots)}")
    if switches and not roots:
        mistakes.append("switches form a circle: there is no root")
    return mistakes


def topology_blocks(topology_conf: str) -> dict[str, tuple[str, ...]]:
    """The blocks of topology.conf (topology/block) with their nodes."""
    return {
        name: tuple(_expanded(members)) if (members := entry.get("Nodes")) else ()
        for entry in parse(topology_conf)
        if (name := entry.get("BlockName")) is not None
    }


def block_mistakes(blocks: Mapping[str, Collection[str]], known: Collection[str]) -> list[str]:
    """Every node known and in one block only. A node may be in none, a block empty: what is planned for is."""
    mistakes = []
    block_of: dict[str, str] = {}
    for block, members in blocks.items():
        for node in members:
            if node not in known:
                mistakes.append(f"node {node} in block {block} is unknown to slurm.conf")
            elif block_of.setdefault(node, block) != block:
                mistakes.append(f"node {node} is in the blocks {block_of[node]} and {block}")
    return mistakes


def topology_file_mistakes(topology_conf: str, slurm_conf: str | None = None) -> list[str]:
    """Of topology.conf, a tree of switches or blocks; with slurm.conf, or alone."""
    switches, blocks = topology_switches(topology_conf), topology_blocks(topology_conf)
    if slurm_conf is not None:
        known = dict.fromkeys(nodes(slurm_conf))
    else:
        below = [*(switch.nodes for switch in switches.values()), *blocks.values()]
        known = dict.fromkeys(node for members in below for node in members)
    if blocks and not switches:
        return block_mistakes(blocks, known)
    return topology_mistakes(switches, known)


# Hardware


@dataclass(frozen=True)
class Measured:
    """What `slurmd -C` prints."""

    name: str
    cpus: int
    sockets: int
    cores: int
    threads: int
    memory: int  # MiB


def parse_slurmd_c(text: str) -> Measured:
    """From the output of `slurmd -C`. Raises ValueError where it is something else."""
    for entry in parse(text):
        if entry.get("NodeName"):
            try:
                return Measured(
                    entry.values["nodename"],
                    int(entry.values["cpus"]),
                    int(entry.values["socketsperboard"]) * int(entry.values.get("boards", "1")),
                    int(entry.values["corespersocket"]),
                    int(entry.values["threadspercore"]),
                    int(entry.values["realmemory"]),
                )
            except KeyError as missing:
                raise ValueError(f"slurmd -C says nothing of {missing}: {text.strip()[:200]!r}") from None
    raise ValueError(f"expected a NodeName line of slurmd -C, read {text.strip()[:200]!r}")


def hardware_difference(sockets: int, cores: int, threads: int, memory: int, measured: Measured) -> list[str]:
    """Where a node has less than, or something else than, its NodeName line says."""
    found = []
    if threads != measured.threads:
        hint = " (SMT off)" if measured.threads < threads else " (SMT on)"
        found.append(f"threads per core {threads} configured, {measured.threads} present{hint}")
    if cores != measured.cores:
        found.append(f"cores per socket {cores} configured, {measured.cores} present")
    if sockets != measured.sockets:
        found.append(f"sockets {sockets} configured, {measured.sockets} present")
    if memory > measured.memory:
        found.append(f"memory {memory} MiB configured, {measured.memory} MiB present")
    return found


# What daemons say


@dataclass(frozen=True)
class Cause:
    """Why something is as it is, and what to do."""

    rule: str  # kebab-case
    why: str
    action: str


def reason_cause(
    reason: str, *, devices: int | None = None, memory: int | None = None, mig: bool = False
) -> list[Cause]:
    """What a node's reason means.

    `devices`: GPU device files present on it; `memory`: its configured MiB; `mig`: its GPUs are split.
    """
    causes: list[Cause] = []
    low = re.search(r"gres/(\w+) count reported lower than configured \((\d+) < (\d+)\)", reason)
    if low:
        have, want = int(low[2]), int(low[3])
        action = "nvidia-smi; ls /dev/nvidia[0-9]*; then restart slurmd, and resume only when all are there"
        if mig:
            why = f"the MIG layout has {have} slices, slurm.conf says {want}"
            action = "change both together: drain, MIG layout, slurm.conf, resume"
        elif devices is None:
            why = f"slurmd saw {have} of {want} {low[1]}s as it started"
        elif devices == 0:
            why = "no device files: the driver was not up when slurmd started, or is not up now"
        elif devices < want:
            why = f"{devices} of {want} device files: a GPU is missing"
        else:
            why = f"all {want} device files are there now: slurmd started before the driver"
        causes.append(Cause("gres-low", why, action))
    elif re.search(r"low socket\*core\*thread count|low cpus", reason, re.IGNORECASE):
        why = "the node has fewer CPUs than its NodeName line says: SMT off in firmware, or a CPU missing"
        causes.append(Cause("cpus-low", why, "slurmd -C on the node, against its NodeName line"))
    elif re.search(r"low real_?memory", reason, re.IGNORECASE):
        why = "the node has less memory than its NodeName line says: a memory module is missing or disabled"
        causes.append(Cause("memory-low", why, "free -m and dmidecode -t memory on the node"))
    elif re.search(r"not responding", reason, re.IGNORECASE):
        why = "slurmctld got no answer from slurmd"
        causes.append(Cause("not-responding", why, "is the node up? systemctl status slurmd munge on it"))
    elif re.search(r"(prolog|epilog) error", reason, re.IGNORECASE):
        why = "a program of prolog.d or epilog.d failed there, or there is none that can be run"
        causes.append(Cause("prolog", why, "journalctl -u slurmd on the node names it"))
    elif re.search(r"unexpectedly rebooted", reason, re.IGNORECASE):
        action = "is its slurmd up? once that registers, the node comes back"
        causes.append(Cause("rebooted", "the node rebooted by itself", action))
    if memory == 1:
        why = "RealMemory=1: the NodeName line was never filled in, and no job asks for so little"
        causes.append(Cause("memory-unset", why, "take RealMemory from slurmd -C"))
    return causes


_ID = re.compile(r'ClusterID=(\d+).*?(?:should be|thinks it should be)\s+"?(\d+)"?', re.DOTALL)


def log_cause(log: str) -> Cause | None:
    """What a slurmctld's or slurmd's log means, for the failures that have one known cause."""
    if "CLUSTER ID MISMATCH" in log:
        ids = _ID.search(log)
        state, database = (ids[1], ids[2]) if ids else ("?", "?")
        return Cause(
            "cluster-id-mismatch",
            f"the state files belong to cluster id {state}, the database holds this cluster as id {database}",
            "nothing was deleted. If the state is right (running jobs, nodes): stop slurmctld, copy "
            "StateSaveLocation and dump the database, write the database's id into StateSaveLocation/clustername "
            f"(NAME|{database}), start slurmctld. If the database is another cluster's: give this one its own name",
        )
    if (
        "no TRES from it" in log
        or "No Assoc usage file" in log
        or "PersistInit msg: Connection refused" in log
    ):
        return Cause(
            "start-order",
            "slurmctld started before slurmdbd answered",
            "wait for `sacctmgr show cluster` to answer, then start slurmctld",
        )
    missing = re.search(r"(?:can't stat|Waiting for) gres.conf file (\S+?):?(?:\s|$)", log)
    if missing:
        return Cause(
            "gres-device",
            f"{missing[1]} is not there: a GPU is missing, or the driver was not up when slurmd started",
            "nvidia-smi; ls /dev/nvidia[0-9]*; then restart slurmd",
        )
    if re.search(r"specified plugin name for cgroup/v2", log):
        return Cause(
            "cgroup-plugin",
            "this build of Slurm has no cgroup/v2 plugin (built without the D-Bus headers)",
            "install a build that has cgroup_v2.so; other proctrack plugins would not keep GPUs apart",
        )
    return None


def credential_cause(
    log: str, versions: Mapping[str, tuple[int, int, int]], skew: str | None
) -> Cause | None:
    """Whether "Credential data mismatch" is munge's or comes from two releases of Slurm (`skew` says why)."""
    if "Credential data mismatch" not in log:
        return None
    if skew is not None:
        seen = ", ".join(f"{host} {'.'.join(map(str, version))}" for host, version in versions.items())
        return Cause("slurm-version", f"not munge: {skew} ({seen})", "one release of Slurm on all nodes")
    return Cause(
        "credential", "munge or Slurm refused a credential", "try munge -n | unmunge between the nodes"
    )


def cgroup_mistake(mounts: str, plugins: Collection[str]) -> str | None:
    """What is wrong between the host's cgroups (`mount` output) and Slurm's plugins; None: nothing."""
    version2 = re.search(r"^\S+ on /sys/fs/cgroup type cgroup2 ", mounts, re.MULTILINE) is not None
    have = {plugin.rpartition("/")[2] for plugin in plugins}
    if version2 and "cgroup_v2.so" not in have:
        return "the host has cgroup v2, and the plugin cgroup_v2.so is missing"
    return None
