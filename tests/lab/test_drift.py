"""What a hand changes on a node - a byte, a mode, an owner, a unit, a package - of every component: seen and mended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from provision.components import registry
from tests.lab.admitted import HEAD, NODES, OTHER, WORKER, Admitted, bad


@dataclass(frozen=True)
class Owned:
    """What a component has on every node, and how an operation names it.

    A byte and the package are changed on the first of `nodes`, mode and unit on the second, the owner on the last.
    """

    file: str
    unit: str | None = None
    package: str | None = None
    removal: str = "dpkg --remove --force-depends {package} >&2"
    nodes: tuple[str, str, str] = (WORKER, OTHER, HEAD)


OWNED = {
    # Its unit, journald, cannot be taken away from a running node: daemons lose what they write to.
    "base": Owned("/etc/hosts", package="tzdata"),
    # Disabling ssh removes its alias; systemd 257, reloaded when that is back, at times takes the server for dead while
    # it runs, and aborts once it ends: tests/lab/test_ssh.py disables it where nothing else is reloaded.
    # Nobody could mend a node without its package: there dpkg is only made to take it for removed.
    "ssh": Owned(
        "/etc/ssh/sshd_config.d/00-provision.conf",
        package="openssh-server",
        removal="sed -i '/^Package: {package}$/,/^$/s/^Status: .*/Status: deinstall ok config-files/' "
        "/var/lib/dpkg/status",
    ),
    "firewall": Owned("/etc/nftables.d/provision.nft", "provision-firewall.service", "nftables"),
    "time": Owned("/etc/chrony/chrony.conf", "chrony.service", "chrony"),
    "certificates": Owned("/etc/provision/tls/ca.crt"),
    "storage": Owned("/etc/systemd/system/shared.mount", "shared.mount", "glusterfs-client"),
    "munge": Owned("/etc/munge/munge.key", "munge.service", "munge"),
    "slurm": Owned("/etc/slurm/prolog.d/00-provision", "slurmd.service", "slurmd"),
    "prometheus": Owned(
        "/etc/systemd/system/prometheus-node-exporter.service.d/provision.conf",
        "prometheus-node-exporter.service",
        "prometheus-node-exporter",
    ),
    "slurm_exporter": Owned(
        "/usr/local/lib/provision/slurm-metrics",
        "provision-slurm-metrics.timer",
        "python3-prometheus-client",
        nodes=(HEAD, HEAD, HEAD),
    ),
    "logs": Owned(
        "/etc/systemd/journal-upload.conf.d/provision.conf",
        "systemd-journal-upload.service",
        "systemd-journal-remote",
        nodes=(WORKER, OTHER, OTHER),
    ),
}
UNITS = " ".join(own.unit for own in OWNED.values() if own.unit)
CHANGED_SINCE = (
    "find /etc /usr /var/lib/dpkg /var/lib/provision -xdev -newercc /run/drift-stamp; "
    f"systemctl show -p Id,ActiveState,UnitFileState,ActiveEnterTimestamp -- {UNITS}"
)


@dataclass(frozen=True)
class Edit:
    """What a hand does on a node, and the operation that must tell of it."""

    node: str
    hand: str
    title: str


def edits() -> list[Edit]:
    found = []
    for own in OWNED.values():
        file = f"file {own.file}"
        first, second, last = own.nodes
        found += [
            Edit(first, f"echo >>{own.file}", file),
            Edit(second, f"chmod o+w {own.file}", file),
            Edit(last, f"chown nobody {own.file}", file),
        ]
        if own.unit:
            now = "" if own.unit.endswith(".mount") else "--now"
            stop = f"; systemctl stop {own.unit}" if own.unit.endswith(".mount") else ""
            found.append(Edit(second, f"systemctl -q disable {now} {own.unit}{stop}", f"unit {own.unit}"))
        if own.package:
            removal = own.removal.format(package=own.package)
            found.append(Edit(first, removal, f"install {own.package}"))
    return found


def test_every_component_is_tried(admitted: Admitted) -> None:
    from provision.site.load import load

    site = load(Path(admitted.site))
    assert {name for name in registry.COMPONENTS if site.enabled(name)} == set(OWNED)
    admitted.whole = True


def test_everything_that_a_hand_changed_is_shown_by_one_plan_and_mended_by_one_apply(
    admitted: Admitted,
) -> None:
    for edit in edits():
        admitted.on(edit.node, edit.hand)
    for node in NODES:
        admitted.on(node, "touch /run/drift-stamp")
    before = {node: admitted.on(node, CHANGED_SINCE) for node in NODES}

    plan = admitted("plan")

    assert plan.rc == 0, bad(plan)
    shown = [(op["node"], op["title"]) for op in plan.operations if op["outcome"] != "skipped"]
    missed = [edit for edit in edits() if not any(told(edit, node, title) for node, title in shown)]
    assert missed == []
    assert {node: admitted.on(node, CHANGED_SINCE) for node in NODES} == before, "a plan changes nothing"

    mended = admitted("apply")

    assert mended.rc == 0, bad(mended)
    changed = {(op["node"], op["title"]) for op in mended.operations if op["outcome"] == "changed"}
    # the first package that is installed completes all others, so that these have nothing left to do
    left = [edit for edit in edits() if not edit.title.startswith("install ")]
    assert [edit for edit in left if not any(told(edit, *op) for op in changed)] == []
    admitted.converged()


def told(edit: Edit, node: str, title: str) -> bool:
    """Whether an operation is the one that an edit makes necessary; packages share one with others."""
    if edit.title.startswith("install "):
        return node == edit.node and title.startswith("install ") and edit.title.split()[1] in title.split()
    return (node, title) == (edit.node, edit.title)
