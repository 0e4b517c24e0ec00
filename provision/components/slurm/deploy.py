"""Slurm: the head with database, accounting, controller and REST; workers that get their configuration from it.

New nodes are met drained: before their slurmd starts, slurmctld has read a slurm.conf in which they are. There is no
moment in which a job could start on a node that has not been tried.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from shlex import quote

from provision.components.restarts import restarting
from provision.components.slurm import accounting, exports, lint
from provision.components.storage import exports as storage
from provision.engine import facts, ops
from provision.engine.deploy import Context, step
from provision.engine.record import OperationFailed
from provision.engine.replace import replace

_DROP_IN = "/etc/systemd/system/{unit}.service.d/50-provision.conf"
_VALIDATE = "env SLURM_CONF={} scontrol show hostnames localhost >/dev/null"

_DATABASE_TEST = """runuser -u slurm -- mariadb -N -B -e 'select 1' slurm_acct_db >/dev/null 2>&1 || exit 1"""
_DATABASE_MAKE = """mariadb <<'EOF'
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;
ALTER USER slurm@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
EOF"""

_READ = "scontrol show config 2>/dev/null | grep -q '^HASH_VAL *= Match$'"
_ANSWERS = "sacctmgr -nP show cluster format=cluster"

_PATIENCE = 60  # seconds for slurmctld to know its new nodes

# The file with the new nodes drained; then slurmctld meets them; then it is written down that it has.
_INTRODUCE = """set -eu
( {write} )
e=$(($(date +%s) + 60))
until o=$(sacctmgr -nP show cluster 2>&1); do
  [ $(date +%s) -lt $e ] || {{ echo "slurmdbd did not answer within 60 s: $o" >&2; exit 1; }}
  sleep 0.2
done
if systemctl -q is-active slurmctld; then
  scontrol reconfigure
else
  systemctl daemon-reload
  ! systemctl -q is-failed slurmctld || systemctl reset-failed slurmctld
  systemctl start slurmctld
fi
e=$(($(date +%s) + {patience}))
until o=$(scontrol -o show nodes {folded} 2>&1) && [ "$(printf '%s\n' "$o" | grep -c '^NodeName=')" -eq {count} ]; do
  [ $(date +%s) -lt $e ] || {{ echo "slurmctld does not know {folded} after {patience} s: $o" >&2; exit 1; }}
  sleep 0.2
done
bad=$(printf '%s\n' "$o" | grep -v ' State=[^ ]*DRAIN' | cut -d ' ' -f 1 || [ $? = 1 ])
[ -z "$bad" ] || {{ echo "expected to be drained: $bad" >&2; exit 1; }}
{note}"""

_EMPTY_PROGRAM = """#!/bin/sh
# A pattern of slurm.conf that matches no program fails every job: this one keeps {folder} from being empty.
exit 0
"""

# A slurm.conf of the node's own would win over the one from slurmctld.
_OWN_FILES = "slurm.conf gres.conf cgroup.conf topology.conf job_container.conf"
_ASIDE_TEST = f"cd {exports.ETC} 2>/dev/null || exit 0; for f in {_OWN_FILES}; do [ ! -e $f ] || exit 1; done"
_ASIDE_MAKE = (
    f"cd {exports.ETC} && for f in {_OWN_FILES}; do "
    "[ ! -e $f ] || mv --backup=numbered $f $f.before-provision || exit 1; done"
)

_USER = f"""{{ getent group slurm >/dev/null || groupadd --system --gid {exports.USER_ID} slurm; }} &&
useradd --system --uid {exports.USER_ID} --gid slurm --no-create-home --home-dir /nonexistent \\
  --shell /usr/sbin/nologin slurm"""

_PAM = "/etc/pam.d/sshd"


@step("head", after=[("munge", "self"), ("storage", "self")])
def head(on: Context) -> None:
    """Database, accounting, controller, REST."""
    if not on.first_head:
        ops.skip("Slurm's controller", f"it runs on {on.site.head.name}")
        return
    _user()
    _packages(on, "slurm-controller")
    _database(on)
    _directories(("/var/lib/slurm", exports.STATE, exports.LOGS))
    ops.file(
        exports.JWT_KEY, on.secrets["slurm-jwt.key"], mode="600", user="slurm", group="slurm", secret=True, comment=None
    )  # fmt: skip
    ops.file(exports.DATABASE, exports.slurmdbd_conf(on.site), mode="600", user="slurm", group="slurm")
    ops.unit("slurmdbd", reads=[exports.DATABASE, exports.JWT_KEY, restarting("slurmdbd")])
    accounting.qualities(on)
    _controller(on)
    accounting.apply(on)
    _rest(on)


@step("worker", after=[("slurm", "head"), ("munge", "self"), ("storage", "self")])
def worker(on: Context) -> None:
    """slurmd, which gets its configuration from slurmctld."""
    kind = exports.kind_of(on.site, on.lock, on.node.name)
    if kind is None:
        raise OperationFailed(
            "slurmd",
            f"{on.node.name} is not in slurm.conf: neither site file nor lock file says what hardware it has",
            "is the lock file beside the site file, and could the node be read? run `provision apply` again",
        )
    _user()
    _packages(on, "slurm-node")
    detection = exports.gpu_detection(on.site, on.profile)
    if kind.slices and detection != "nvml":
        raise OperationFailed(
            "slurmd",
            f"{on.node.name} is to have MIG slices, whose device files only NVML knows, and Slurm does not ask it",
            "install a Slurm with its NVML plugin and say scheduler.slurm.gpu_detection: nvml, or nvidia.mig: none",
        )
    if kind.gres and detection == "nvml":
        ops.packages(*on.profile.package_sets.get("slurm-nvml", []))
    if on.node.name != on.site.head.name:
        ops.ensure("no configuration of its own", test=_ASIDE_TEST, make=_ASIDE_MAKE)
        _directories(("/var/lib/slurm", exports.LOGS))
    ops.directory(exports.SPOOL)
    _programs()
    private = storage.private_tmp(on.site, on.node)
    if private is not None:
        ops.directory(private)
    ops.file(exports.DEVICES_SCRIPT, exports.devices_script(), mode="755")
    drop_in = _DROP_IN.format(unit="slurmd")
    ops.file(drop_in, exports.slurmd_dropin(on.site, on.node, storage.mounted(on.site, on.node, on.limits)))
    ops.unit("slurmd", reads=[drop_in])
    _same_configuration("slurmd", exports.distributed(on.site, on.lock, on.profile))
    _pam(on)


@step("login", after=[("slurm", "head"), ("munge", "self")])
def login(on: Context) -> None:
    """Slurm's commands for people."""
    if exports.has_commands(on.site, on.node):
        return
    _user()
    _packages(on, "slurm-login")
    if "slurm-login" not in on.profile.units:  # no sackd in this release: the file itself
        ops.directory(exports.ETC)
        for name, text in exports.distributed(on.site, on.lock, on.profile).items():
            ops.file(f"{exports.ETC}/{name}", text)
        return
    ops.ensure("no configuration of its own", test=_ASIDE_TEST, make=_ASIDE_MAKE)
    unit = on.profile.unit("slurm-login")
    drop_in = _DROP_IN.format(unit=unit)
    ops.file(drop_in, exports.sackd_dropin(on.site))
    ops.unit(unit, reads=[drop_in])
    # sackd fetches no more than commands need
    conf = exports.slurm_conf(on.site, on.lock, profile=on.profile)
    _same_configuration(unit, {"slurm.conf": conf})


def _user() -> None:
    """Before the packages: some leave it to the site, others number it as they like."""
    ops.ensure("user slurm", test="getent passwd slurm >/dev/null || exit 1", make=_USER)


def _packages(on: Context, purpose: str) -> None:
    source = exports.settings(on.site).source
    ops.packages(*on.profile.packages(purpose if source == "distribution" else f"{purpose}.{source}"))


def _directories(paths: Sequence[str]) -> None:
    for path in paths:
        ops.directory(path, user="slurm", group="slurm")


def _database(on: Context) -> None:
    path = f"{on.profile.path('mariadb.conf.d')}/60-provision-slurm.cnf"
    ops.file(path, exports.database_conf(on.site, on.lock))
    unit = on.profile.unit("mariadb")
    ops.unit(unit, reads=[path, restarting(unit)])
    ops.ensure("slurmdbd's database", test=_DATABASE_TEST, make=_DATABASE_MAKE, requires="mariadb")


def _controller(on: Context) -> None:
    """slurmctld, after slurmdbd answers and with new nodes drained."""
    beside = {
        name: text
        for name, text in exports.distributed(on.site, on.lock, on.profile).items()
        if name != "slurm.conf"
    }
    for name, text in beside.items():
        ops.file(f"{exports.ETC}/{name}", text)
    _programs()
    again = restarting("slurmctld")
    with _explained():
        _introduce(on)
        ops.file(exports.CONF, exports.slurm_conf(on.site, on.lock, profile=on.profile), validate=_VALIDATE)
        ops.wait("slurmdbd answers", test=_ANSWERS)
        reads = [exports.CONF, exports.JWT_KEY, again, *(f"{exports.ETC}/{name}" for name in beside)]
        if ops.unit("slurmctld", reads=reads, reload=True):
            ops.wait("slurmctld has read slurm.conf", test=_READ)


def _introduce(on: Context) -> None:
    """Let slurmctld meet nodes that it does not know, drained; nodes of a cluster that runs already are known."""
    wanted = exports.known_nodes(on.site, on.lock)
    met = facts.text(exports.INTRODUCED)
    known = set(met.split()) if met is not None else _known_to_slurmctld()
    new = [name for name in wanted if name not in known]
    if not new and met is not None and set(met.split()) <= set(wanted):
        return
    here = (
        f'[ -f {exports.INTRODUCED} ] && [ "$(cat {exports.INTRODUCED})" = "$({_lines(wanted)})" ] || exit 1'
    )
    if not new:
        ops.ensure(
            "nodes that slurmctld has met",
            test=here,
            make=_note(exports.INTRODUCED, wanted),
        )
        return
    ops.ensure(
        f"{exports.slurm_fold(new)} join drained",
        test=here,
        make=introduction(exports.CONF, exports.INTRODUCED, new, wanted),
        stdin=exports.slurm_conf(on.site, on.lock, profile=on.profile, joining=new).encode(),
    )


def introduction(
    conf: str, introduced: str, new: Sequence[str], known: Sequence[str], patience: int = _PATIENCE
) -> str:
    """Shell: puts its standard input in place as `conf`, waits `patience` seconds at most for slurmctld to meet the
    `new` nodes in it, drained, and writes down in `introduced` all nodes that it knows then."""
    return _INTRODUCE.format(
        write=replace(conf, mode="644", check=_VALIDATE.format('"$t"')),
        folded=quote(exports.slurm_fold(new)),
        count=len(new),
        note=_note(introduced, known),
        patience=patience,
    )


def _note(path: str, names: Sequence[str]) -> str:
    """Shell: writes `names` down in `path`, one a line."""
    return f"{_lines(names)} | ( {replace(path, mode='644')} )"


def _lines(names: Sequence[str]) -> str:
    """Shell: prints `names`, one a line."""
    return f"printf '%s\\n' {shlex.join(names) or quote('')}"


def _known_to_slurmctld() -> set[str]:
    """The nodes of a slurmctld that ran before this tool came; none where there was none.

    Raises OperationFailed where there was one that does not answer: its nodes would be taken for new, and drained.
    """
    answer = facts.read("scontrol -o show nodes")  # sinfo is silent of nodes without a partition
    if answer.ok:
        return set(re.findall(r"(?m)^NodeName=(\S+)", answer.stdout))
    conf = facts.text(exports.CONF) or ""
    if ops.MARK in conf or exports.AWAITING in conf:  # this tool has begun already, and was interrupted
        return set()
    states = lint.parameter(conf, "StateSaveLocation")
    if states is not None and facts.read(f"[ -e {quote(states)}/node_state ]").ok:
        raise OperationFailed(
            "nodes that slurmctld has met",
            f"it has run here before and does not answer: {answer.stderr.strip()}",
            f"start slurmctld as it was, and apply again; for a new cluster move {exports.CONF} away",
        )
    return set()


def _programs() -> None:
    for folder in (exports.PROLOG, exports.EPILOG):
        ops.directory(folder)
        ops.file(f"{folder}/00-provision", _EMPTY_PROGRAM.format(folder=folder), mode="755")


@contextmanager
def _explained() -> Iterator[None]:
    """Say why slurmctld does not start where its log has a known cause; its state is never deleted."""
    try:
        yield
    except OperationFailed as failed:
        log = facts.read(f"tail -n 60 {exports.LOGS}/slurmctld.log")
        cause = lint.log_cause(log.stdout) if log.ok else None
        if cause is None:
            raise
        raise OperationFailed(f"slurmctld: {cause.rule}", cause.why, cause.action) from failed


def _same_configuration(unit: str, files: Mapping[str, str]) -> None:
    """What the node got is what the site file says, without the first line, which says who writes the file."""
    sums = "\n".join(
        f"{sha256(text.encode()).hexdigest()} {exports.FETCHED}/{name}"
        for name, text in sorted(files.items())
    )
    same = (
        'while read -r sum file; do [ -r $file ] && [ "$(tail -n +2 $file | sha256sum)" = "$sum  -" ] || exit 1; '
        f"done <<'EOF'\n{sums}\nEOF"
    )
    ops.ensure(
        "configuration as on the head",
        test=same,
        # slurmctld pushes a new one to nodes that answer: this is for those that did not at that moment
        make=f"for i in $(seq 25); do ( {same}\n) && exit 0; sleep 0.2; done; systemctl restart {unit} && sleep 1",
    )


def _rest(on: Context) -> None:
    drop_in = _DROP_IN.format(unit="slurmrestd")
    if exports.settings(on.site).rest is None:
        ops.absent(drop_in)
        if facts.read("systemctl cat slurmrestd").ok:
            ops.unit("slurmrestd", running=False, enabled=False)
        return
    _packages(on, "slurm-rest")
    ops.file(drop_in, exports.rest_dropin(on.site, on.profile.path("slurmrestd")))
    ops.unit("slurmrestd", reads=[drop_in, exports.CONF])


def _pam(on: Context) -> None:
    """On workers only who has a job there logs in; root and the account this tool comes in by always may."""
    wanted = exports.settings(on.site).pam_adopt
    if wanted:
        _packages(on, "slurm-pam")
    block = exports.pam_block(on.node) if wanted else ""
    begin, end = exports.PAM_BEGIN, exports.PAM_END
    ops.ensure(
        "login with a job only" if wanted else "no rule for logins with a job",
        test=f"[ \"$(sed -n '/^{begin}$/,/^{end}$/p' {_PAM})\" = {quote(block.rstrip())} ] || exit 1",
        make=pam(_PAM, block),
    )


def pam(path: str, block: str) -> str:
    """Shell: our block of PAM's file at `path` is `block`, at its end, or gone; nothing is changed where it cannot be
    read."""
    begin, end = exports.PAM_BEGIN, exports.PAM_END
    return (
        f"rest=$(sed '/^{begin}$/,/^{end}$/d' {quote(path)}) || exit 1\n"
        f"printf '%s\\n%s' \"$rest\" {quote(block)} | ( {replace(path, mode='644')} )"
    )
