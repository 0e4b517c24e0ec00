"""Accounts, users and qualities of service in Slurm's database, from the site file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from provision.components.slurm import exports
from provision.components.slurm.settings import Qos
from provision.engine import ops

if TYPE_CHECKING:
    from provision.engine.deploy import Context
    from provision.site.models import Site


_HAS = 'has() { sacctmgr -nP "$@" | grep -q .; }'
_HAVE = (
    "have() { while read -r line; do "
    '[ -z "$line" ] || printf \'%s\\n\' "$1" | grep -qxF -- "$line" || return 1; done; }'
)


def qualities(on: Context) -> None:
    """Before slurmctld, which ends itself where a partition names a quality of service that is not there.

    Only their names: limits on GPUs can be set once slurmctld has told the database that there are such.
    """
    asking, names = asking_database(on.site), [qos.name for qos in exports.settings(on.site).qos]
    if not names:
        return
    ops.wait("slurmdbd answers", test=f"{asking}\nsacctmgr -nP show qos")
    ops.ensure(
        f"qualities of service {' '.join(names)}",
        test=f"{asking}\n{qualities_test(names)}",
        make=f"{asking}\n{qualities_make(names)}",
        requires="sacctmgr",
    )


def asking_database(site: Site) -> str:
    """Shell: sacctmgr finds slurmdbd where no slurm.conf is in its place yet."""
    return f"""t=$(mktemp) || exit 2
trap 'rm -f "$t"' EXIT
cat >"$t" <<'EOF'
ClusterName={site.cluster}
SlurmctldHost={site.head.name}
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={site.head.name}
EOF
export SLURM_CONF="$t\""""


def qualities_test(names: Sequence[str]) -> str:
    """Shell: exits 0 when every quality of service is there, 1 when not, 2 when it cannot be told."""
    wanted = "\n".join(name.lower() for name in names)
    return f"""q=$(sacctmgr -nP show qos format=name) || exit 2
{_HAVE}
have "$q" <<'EOF' || exit 1
{wanted}
EOF"""


def qualities_make(names: Sequence[str]) -> str:
    """Shell: adds what is missing."""
    adds = (f"has show qos {quote(name)} || sacctmgr -iQ add qos {quote(name)} >&2" for name in names)
    return "\n".join(["set -eu", _HAS, *adds])


def apply(on: Context) -> None:
    """slurmctld has registered its cluster by itself; then what jobs need to be accounted to."""
    ops.wait("the cluster is registered", test=registered_test(on.site))
    ops.ensure("accounts and users", test=test(on.site), make=make(on.site), requires="sacctmgr")


def registered_test(site: Site) -> str:
    """Shell: the database knows the cluster and where its slurmctld is."""
    return f"sacctmgr -nP show cluster {quote(site.cluster)} format=controlhost | grep -q ."


def test(site: Site) -> str:
    """Shell: exits 0 when all of it is there, 1 when something is missing, 2 when it cannot be told."""
    accounts = "\n".join(
        f"{account.name.lower()}||{account.fair_share}" for account in exports.accounts(site)
    )
    users = "\n".join(f"{account.lower()}|{user}" for account, user in exports.associations(site))
    qos = "\n".join(qos_line(each) for each in exports.settings(site).qos)
    names = "\n".join(each.name.lower() for each in exports.settings(site).qos)
    return f"""a=$(sacctmgr -nP show assoc cluster={quote(site.cluster)} format=account,user,share) || exit 2
q=$(sacctmgr -nP show qos format=name,priority,maxwall,maxtrespu) || exit 2
r=$(sacctmgr -nP show assoc cluster={quote(site.cluster)} account=root user= format=qos) || exit 2
{_HAVE}
have "$a" <<'EOF' || exit 1
{accounts}
EOF
have "$(printf '%s\\n' "$a" | cut -d'|' -f1,2)" <<'EOF' || exit 1
{users}
EOF
have "$q" <<'EOF' || exit 1
{qos}
EOF
have "$(printf '%s\\n' "$r" | tr , '\\n')" <<'EOF' || exit 1
{names}
EOF"""


def make(site: Site) -> str:
    """Shell: adds what is missing and sets what differs. Nothing is removed: past jobs belong to it."""
    lines = [
        "set -eu",
        f"c={quote(site.cluster)}",
        _HAS,
    ]
    for qos in exports.settings(site).qos:
        name = quote(qos.name)
        lines.append(f"sacctmgr -iQ modify qos {name} set {qos_values(qos)} >&2")
        # on the cluster's root: accounts have what their parent has, and without it nobody may ask for one
        lines.append(f"sacctmgr -iQ modify cluster $c set qos+={name} >&2")
    for account in exports.accounts(site):
        name, share = quote(account.name), f"fairshare={account.fair_share}"
        lines.append(
            f"if has show assoc cluster=$c account={name} user= format=account; then "
            f"sacctmgr -iQ modify account where cluster=$c account={name} set {share} >&2; "
            f"else sacctmgr -iQ add account {name} cluster=$c {share} >&2; fi"
        )
    for account_name, user in exports.associations(site):
        words = f"user={quote(user)} account={quote(account_name)}"
        lines.append(
            f"has show assoc cluster=$c {words} format=user || "
            f"sacctmgr -iQ add user {quote(user)} cluster=$c account={quote(account_name)} >&2"
        )
    return "\n".join(lines)


def qos_line(qos: Qos) -> str:
    """A quality of service as `sacctmgr -P show qos format=name,priority,maxwall,maxtrespu` prints it."""
    wall = slurm_time(qos.max_wall) if qos.max_wall else ""
    gpus = f"gres/gpu={qos.max_gpus_per_user}" if qos.max_gpus_per_user is not None else ""
    return f"{qos.name.lower()}|{qos.priority}|{wall}|{gpus}"


def qos_values(qos: Qos) -> str:
    """The same as `sacctmgr modify qos ... set` takes it; -1 is "no limit"."""
    wall = slurm_time(qos.max_wall) if qos.max_wall else ""
    gpus = qos.max_gpus_per_user if qos.max_gpus_per_user is not None else -1
    return f"priority={qos.priority} maxwall={wall or -1} maxtresperuser=gres/gpu={gpus}"


def slurm_time(text: str) -> str:
    """A time as Slurm prints it: "90" -> "01:30:00", "36:00:00" -> "1-12:00:00", "INFINITE" -> ""."""
    if text == "INFINITE":
        return ""
    days, dash, rest = text.rpartition("-")
    numbers = [int(part) for part in re.split(":", rest)]
    if dash:  # D-H[:M[:S]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # M[:S]
        hours, minutes, seconds = 0, numbers[0], (*numbers, 0)[1]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    day, left = divmod(total, 86400)
    clock = f"{left // 3600:02}:{left // 60 % 60:02}:{left % 60:02}"
    return f"{day}-{clock}" if day else clock
