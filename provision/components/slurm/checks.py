"""Do Slurm's daemons answer, does every node have what slurm.conf says, and are GPUs kept apart?"""

from __future__ import annotations

import re
from shlex import quote
from typing import Any

from provision.components.slurm import exports, lint
from provision.components.slurm.acceptance import NodeState, SlurmError, parse_nodes
from provision.report.model import Verdict
from provision.site.lock import lock_path
from provision.verify.check import Found, Target, check, expect, skip, unknown


class _NoAnswer(Exception):
    """A source could not be read; the message is for the finding."""


def _ask(host: Any, command: str) -> str:
    """The output of a command that must work wherever Slurm is installed. Raises _NoAnswer."""
    answer = host.run(f"timeout 30 {command}")
    if answer.rc == 124:
        raise _NoAnswer(f"{command}: no answer within 30 s")
    if answer.rc != 0:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        raise _NoAnswer(f"{command}: {said[-1] if said else f'exit {answer.rc}'}")
    return str(answer.stdout)


def parse_ping(text: str) -> dict[str, bool]:
    """ "Slurmctld(primary) at atlas-head-1 is UP" -> {"atlas-head-1": True}. Raises ValueError for another form."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 5 and words[0].startswith("Slurmctld(") and words[1] == "at":
            found[words[2]] = words[-1] == "UP"
    if not found:
        raise ValueError(f"not an answer of scontrol ping: {text.strip()[:100]!r}")
    return found


def parse_hash(text: str) -> str:
    """The HASH_VAL of `scontrol show config`: "Match" where slurmctld has read the slurm.conf that is there."""
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "HASH_VAL":
            return value.strip()
    raise ValueError("scontrol show config says nothing of HASH_VAL")


def judge_node(
    state: NodeState | None,
    kind: exports.Kind | None,
    name: str,
    devices: int | None = None,
    said: lint.Cause | None = None,
) -> Found:
    """What slurmctld knows of a node against what the site file says of it.

    `devices`: device files of GPUs on the node, None where not counted; `said`: what its slurmd's log means.
    """
    if kind is None:
        return unknown(f"the hardware of {name} is in neither site file nor lock file")
    cpus = kind.sockets * kind.cores * kind.threads
    expected = f"registered, {cpus} CPUs, {kind.memory} MiB, {kind.gres or 'no GPU'}"
    if state is None:
        return Found(Verdict.FAIL, "not in slurm.conf", expected, "run `provision apply`")
    gres = re.sub(r"\([^)]*\)", "", state.gres)
    word = state.word if state.version is not None else f"{state.word} without a registration"
    read = f"{word}, {state.cpus} CPUs, {state.memory} MiB, {gres or 'no GPU'}"
    reason = state.reason or ""
    if not state.known:
        return unknown(f"state {state.word} is not understood", source="scontrol show node")
    causes = lint.reason_cause(reason, devices=devices, memory=state.memory, mig=bool(kind.slices))
    if not state.registered or state.invalid or state.base == "DOWN" or (state.drained and causes):
        causes += [said] if said else []
        why = "; ".join([reason, *(cause.why for cause in causes)]).strip("; ")
        action = (
            causes[0].action if causes else f"on {name}: systemctl status slurmd; journalctl -u slurmd -n 20"
        )
        return Found(Verdict.FAIL, read, expected, action, why or None)
    same = (state.cpus, state.memory, gres) == (cpus, kind.memory, kind.gres or "")
    if not same:
        return Found(Verdict.FAIL, read, expected, "run `provision apply`, or correct the site file")
    if state.drained and not exports.ours(reason):
        return Found(
            Verdict.WARN,
            read,
            expected,
            f"scontrol update nodename={name} state=resume",
            f"drained: {reason}",
        )
    return Found(Verdict.PASS, read, expected, why=reason or None)


@check("slurmctld-answers", role="head")
def answers(at: Target) -> Found:
    """slurmctld answers."""
    if at.node.name != at.site.head.name:
        return skip(f"slurmctld runs on {at.site.head.name}")
    answer = at.host.run("timeout 30 scontrol ping")
    try:  # scontrol ping exits 1 when nobody answers, and still says so
        up = parse_ping(answer.stdout)
    except ValueError as error:
        return unknown(answer.stderr.strip() or str(error), source="scontrol ping")
    read = ", ".join(f"{name} {'UP' if state else 'DOWN'}" for name, state in up.items())
    if all(up.values()):
        return Found(Verdict.PASS, read, source="scontrol ping")
    log = at.host.run(f"tail -n 60 {exports.LOGS}/slurmctld.log")
    cause = lint.log_cause(log.stdout)
    return Found(
        Verdict.FAIL,
        read,
        "UP",
        cause.action if cause else "systemctl status slurmctld; journalctl -u slurmctld -n 30",
        cause.why if cause else None,
        "scontrol ping",
    )


@check("slurm-conf-loaded", role="head")
def loaded(at: Target) -> Found:
    """slurmctld works with the slurm.conf that is on the disk."""
    if at.node.name != at.site.head.name:
        return skip(f"slurmctld runs on {at.site.head.name}")
    try:
        read = parse_hash(_ask(at.host, "scontrol show config"))
    except (_NoAnswer, ValueError) as error:
        return unknown(str(error), source="scontrol show config")
    return expect(
        read,
        "Match",
        action="run `provision apply`: reconfigure alone would load an edit by hand",
        source=exports.CONF,
    )


@check("slurm-files", role="head")
def files(at: Target) -> Found:
    """gres.conf and topology.conf agree with slurm.conf, whoever wrote them."""
    if at.node.name != at.site.head.name:
        return skip(f"slurmctld runs on {at.site.head.name}")
    try:
        conf = _ask(at.host, f"cat {exports.CONF}")
        gres, topology = (
            _ask(at.host, f"sh -c 'if [ -e {exports.ETC}/{name} ]; then cat {exports.ETC}/{name}; fi'")
            for name in ("gres.conf", "topology.conf")
        )
    except _NoAnswer as error:
        return unknown(str(error), source=exports.ETC)
    mistakes = [str(mistake) for mistake in lint.gres_mistakes(gres, conf)]
    if topology:
        mistakes += [f"topology.conf: {text}" for text in lint.topology_file_mistakes(topology, conf)]
    return expect(
        "; ".join(mistakes) or "agree",
        "agree",
        action="run `provision apply`, or correct them",
        source=exports.ETC,
    )


@check("slurm-accounting", role="head")
def accounting(at: Target) -> Found:
    """The database answers, knows this cluster and its slurmctld, and counts GPUs."""
    if at.node.name != at.site.head.name:
        return skip(f"slurmdbd runs on {at.site.head.name}")
    answer = at.host.run("timeout 30 sacctmgr -nP show cluster format=cluster,controlhost")
    if answer.rc in (124, 126, 127):
        return unknown(answer.stderr.strip() or "no answer within 30 s", source="sacctmgr")
    if answer.rc != 0:
        said = answer.stderr.strip().splitlines()
        advice = "systemctl status mariadb slurmdbd; journalctl -u slurmdbd -n 30"
        return Found(
            Verdict.FAIL, said[-1] if said else "no answer", at.site.cluster, advice, source="sacctmgr"
        )
    clusters = dict(line.split("|")[:2] for line in answer.stdout.splitlines() if "|" in line)
    if not clusters.get(at.site.cluster):
        read = f"known: {', '.join(name for name, host in clusters.items() if host) or 'none'}"
        expected = f"{at.site.cluster} with its control host"
        return Found(
            Verdict.FAIL, read, expected, "systemctl restart slurmctld, which registers", source="sacctmgr"
        )
    try:
        tres = [
            line
            for line in _ask(at.host, "scontrol show config").splitlines()
            if "AccountingStorageTRES" in line
        ]
    except _NoAnswer as error:
        return unknown(str(error), source="scontrol show config")
    counted = "gres/gpu" in "".join(tres)
    read = f"{at.site.cluster} at {clusters[at.site.cluster]}, gres/gpu {'counted' if counted else 'not counted'}"
    action = None if counted else "run `provision apply`"
    return Found(
        Verdict.PASS if counted else Verdict.FAIL, read, "gres/gpu counted", action, source="sacctmgr"
    )


# The token goes from one program to the other without being an argument of either. slurmrestd takes any at first:
# only a question that it has to ask slurmctld shows whether the token is good.
_REST = """set -e
command -v curl >/dev/null || curl
t=$(timeout 20 scontrol token username=root lifespan=60) || exit 3
ask() {
  printf 'header = "X-SLURM-USER-TOKEN: %s"\\nheader = "X-SLURM-USER-NAME: root"\\n' "${t#SLURM_JWT=}" |
    curl -sS -m 20 -K - "$@"
}
v=$(ask URL/openapi/v3 | grep -o 'v0\\.0\\.[0-9]*' | sort -V | tail -n 1)
ask -o /dev/null -w '%{http_code}' "URL/${v:+slurm/$v/diag}\""""


@check("slurm-rest", role="head")
def rest(at: Target) -> Found:
    """slurmrestd answers who has a token, and slurmctld takes it."""
    if at.node.name != at.site.head.name or exports.settings(at.site).rest is None:
        return skip("no slurmrestd on this node")
    url = exports.rest_url(at.site)
    answer = at.host.run(_REST.replace("URL", url))
    if answer.rc in (3, 126, 127):
        return unknown(answer.stderr.strip() or "no token", source="scontrol token")
    advice = "systemctl status slurmrestd; journalctl -u slurmrestd -n 20"
    if answer.rc != 0:
        return Found(Verdict.FAIL, answer.stderr.strip() or f"exit {answer.rc}", "200", advice, source=url)
    return expect(answer.stdout.strip(), "200", action=advice, source=url)


@check("slurm-login", role="login")
def login(at: Target) -> Found:
    """Commands of people reach slurmctld from here, with the configuration that it works with."""
    answer = at.host.run("timeout 30 scontrol ping")
    try:
        up = parse_ping(answer.stdout)
    except ValueError as error:
        return unknown(answer.stderr.strip() or str(error), source="scontrol ping")
    if not all(up.values()):
        read = ", ".join(f"{name} {'UP' if state else 'DOWN'}" for name, state in up.items())
        advice = f"is {at.site.head.name} up, is its port {exports.CONTROLLER_PORT} reachable from here?"
        return Found(Verdict.FAIL, read, "UP", advice, source="scontrol ping")
    try:
        read = parse_hash(_ask(at.host, "scontrol show config"))
    except (_NoAnswer, ValueError) as error:
        return unknown(str(error), source="scontrol show config")
    return expect(read, "Match", action="run `provision apply`", source="scontrol show config")


@check("slurm-user", role="worker")
def user(at: Target) -> Found:
    """The user slurm has the head's number: daemons take orders by number."""
    head = at.on(at.site.head.name)
    if head is None:
        return unknown(f"{at.site.head.name} is unreachable", source=at.site.head.name)
    try:
        here, there = (_ask(host, "id -u slurm").strip() for host in (at.host, head))
    except _NoAnswer as error:
        if at.host.run("id slurm").rc == 1:
            expected = "a user slurm with the head's number"
            return Found(
                Verdict.FAIL, "no such user", expected, "run `provision apply`", source="id -u slurm"
            )
        return unknown(str(error), source="id -u slurm")
    return expect(
        here, there, action="give slurm one number on all nodes, then chown its files", source="id -u slurm"
    )


@check("slurm-node", role="worker")
def node(at: Target) -> Found:
    """The node is registered with the CPUs, memory and GPUs that the site file says, and not down."""
    name = at.node.name
    try:
        states = parse_nodes(_ask(at.host, f"scontrol show nodes {quote(name)} --json"))
    except (_NoAnswer, SlurmError) as error:
        if f"Node {name} not found" in str(error):
            states = {}
        else:
            return unknown(str(error), source="scontrol show nodes")
    devices = at.host.run("ls /dev | grep -c '^nvidia[0-9]'")
    return judge_node(
        states.get(name),
        exports.kind_of(at.site, at.lock, name),
        name,
        int(devices.stdout) if devices.rc in (0, 1) else None,
        _said(at),
    )


def _said(at: Target) -> lint.Cause | None:
    """What the end of slurmd's log means, where it is one of the known things."""
    log = at.host.run(f"tail -n 60 {exports.LOGS}/slurmd.log")
    head = at.on(at.site.head.name)
    if log.rc != 0 or head is None:
        return None
    try:
        versions = {
            at.node.name: exports.parse_version(_ask(at.host, "slurmd -V")),
            at.site.head.name: exports.parse_version(_ask(head, "slurmctld -V")),
        }
    except (_NoAnswer, ValueError):
        return lint.log_cause(log.stdout)
    skew = exports.skew(versions[at.site.head.name], versions[at.node.name])
    return lint.log_cause(log.stdout) or lint.credential_cause(log.stdout, versions, skew)


@check("slurm-hardware", role="worker")
def hardware(at: Target) -> Found:
    """The node has at least what its NodeName line says, measured on the node."""
    kind = exports.kind_of(at.site, at.lock, at.node.name)
    if kind is None:
        return unknown(
            f"the hardware of {at.node.name} is in neither site file nor lock file",
            action=f"is {lock_path(at.site).name} missing beside {at.site.path}? bring it back, or have it written by "
            "`provision apply`; or write what `provision discover` says into the site file",
            source=str(lock_path(at.site)),
        )
    try:
        measured = lint.parse_slurmd_c(_ask(at.host, "slurmd -C"))
    except (_NoAnswer, ValueError) as error:
        return unknown(str(error), source="slurmd -C")
    differences = lint.hardware_difference(kind.sockets, kind.cores, kind.threads, kind.memory, measured)
    odd = exports.unlike_its_group(at.site, at.lock, at.node)
    if odd is not None and not differences:
        advice = "is a memory module or a GPU missing? otherwise make groups of them"
        return Found(Verdict.WARN, odd, "nodes of a group are alike", advice, source="slurmd -C")
    return Found(
        Verdict.FAIL if differences else Verdict.PASS,
        read=f"{measured.sockets} x {measured.cores} x {measured.threads}, {measured.memory} MiB",
        expected=f"{kind.sockets} x {kind.cores} x {kind.threads}, at least {kind.memory} MiB",
        action="repair it, or correct site file or lock file" if differences else None,
        why="; ".join(differences) or None,
        source="slurmd -C",
    )


@check("slurm-version", role="worker")
def version(at: Target) -> Found:
    """slurmd is of a release that slurmctld works with."""
    head = at.on(at.site.head.name)
    if head is None:
        return unknown(f"{at.site.head.name} is unreachable", source=at.site.head.name)
    try:
        here = exports.parse_version(_ask(at.host, "slurmd -V"))
        there = exports.parse_version(_ask(head, "slurmctld -V"))
    except (_NoAnswer, ValueError) as error:
        return unknown(str(error), source="slurmd -V")
    why = exports.skew(there, here)
    return Found(
        Verdict.FAIL if why else Verdict.PASS,
        read=f"slurmd {'.'.join(map(str, here))}",
        expected=f"slurmctld {'.'.join(map(str, there))}",
        action="one release of Slurm on all nodes" if why else None,
        why=why,
        source="slurmd -V",
    )


@check("slurm-conf-same", role="worker")
def same(at: Target) -> Found:
    """The node works with the head's configuration, and has none of its own."""
    head = at.on(at.site.head.name)
    if head is None:
        return unknown(f"{at.site.head.name} is unreachable", source=at.site.head.name)
    if at.node.name != at.site.head.name:
        own = at.host.run(f"[ ! -e {exports.CONF} ]")
        if own.rc == 1:
            advice = "run `provision apply`: it moves it aside"
            return Found(Verdict.FAIL, f"{exports.CONF} on the node", "none", advice, source=exports.CONF)
    names = ("slurm.conf", "cgroup.conf", "gres.conf")
    try:
        here = _sums(at.host, exports.FETCHED, names)
        there = _sums(head, exports.ETC, names)
    except _NoAnswer as error:
        return unknown(str(error), source=exports.FETCHED)
    different = [name for name in names if here.get(name) != there.get(name)]
    return Found(
        Verdict.FAIL if different else Verdict.PASS,
        read=f"different: {', '.join(different)}" if different else "the head's",
        expected="the head's",
        action="run `provision apply`; a node that was away: systemctl restart slurmd" if different else None,
        source=exports.FETCHED,
    )


def _sums(host: Any, folder: str, names: tuple[str, ...]) -> dict[str, str]:
    text = _ask(host, f"sha256sum {' '.join(f'{folder}/{name}' for name in names)}")
    return {path.rpartition("/")[2]: digest for digest, path in (line.split() for line in text.splitlines())}


@check("gpu-isolation", role="worker")
def isolation(at: Target) -> Found:
    """A job gets only its own GPUs: cgroups constrain devices, and Slurm has the plugin for this host's cgroups."""
    if at.node.gpu is None:
        return skip("this node has no GPU")
    try:
        constrained = lint.parameter(_ask(at.host, f"cat {exports.FETCHED}/cgroup.conf"), "ConstrainDevices")
        mounts = _ask(at.host, "mount")
        config = _ask(at.host, "scontrol show config")
        folder = next(
            line.partition("=")[2].strip() for line in config.splitlines() if line.startswith("PluginDir")
        )
        plugins = _ask(at.host, f"ls {quote(folder)}").split()
    except _NoAnswer as error:
        return unknown(str(error), source="cgroup.conf")
    except StopIteration:
        return unknown("scontrol show config says nothing of PluginDir", source="scontrol show config")
    task = next((line for line in config.splitlines() if line.startswith("TaskPlugin ")), "")
    mistake = lint.cgroup_mistake(mounts, plugins)
    if mistake is None and (constrained or "no").lower() != "yes":
        mistake = f"ConstrainDevices is {constrained or 'not set'}: every job sees all GPUs"
    if mistake is None and "task/cgroup" not in task:
        mistake = f"{task.strip() or 'TaskPlugin is not set'}: without task/cgroup every job sees all GPUs"
    return Found(
        Verdict.FAIL if mistake else Verdict.PASS,
        read=mistake or "ConstrainDevices=yes, cgroup_v2.so, task/cgroup",
        expected="ConstrainDevices=yes, cgroup_v2.so, task/cgroup",
        action="run `provision apply`, or install a build with the plugin" if mistake else None,
        source=f"{exports.FETCHED}/cgroup.conf",
    )
