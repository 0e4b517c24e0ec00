"""Shared file systems on real nodes, by GlusterFS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from provision.lab import Lab
from tests.lab.checking import HEAD, WORKER, Case, hidden
from tests.lab.cluster import OTHER, Cluster, brought_up, changed, names, try_case
from tests.lab.command import provision

FULL = (
    "mount -t tmpfs -o size=1m full /scratch && { head -c 2000000 /dev/zero >/scratch/f 2>/dev/null; true; }"
)
CASES = [
    hidden("storage-mounted", "systemctl stop shared.mount", "/usr/bin/findmnt"),
    hidden("storage-shared", "systemctl stop shared.mount", "/usr/bin/timeout"),
    hidden("storage-space", FULL, "/usr/bin/df", mend="umount /scratch"),
    hidden("storage-server", "systemctl stop glusterd", "/usr/sbin/gluster", node=HEAD),
    hidden("scratch", "chmod 700 /scratch", "/usr/bin/stat"),
]


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Cluster]:
    with brought_up("storage") as made:
        yield made


def test_a_second_apply_changes_nothing(cluster: Cluster) -> None:
    assert changed(cluster.apply()) == {}


def test_all_nodes_see_one_tree_and_users_own_their_homes(cluster: Cluster) -> None:
    cluster.must(WORKER, "runuser -u alice -- sh -c 'echo hello >/home/alice/word'")
    for node in (HEAD, OTHER):
        assert cluster.must(node, "runuser -u alice -- cat /home/alice/word") == "hello\n"
        assert cluster.must(node, "stat -c '%U:%G %a' /home/alice") == "alice:alice 700\n"
    cluster.must(HEAD, "rm /home/alice/word")


def test_the_account_that_the_tool_comes_in_by_kept_its_home(cluster: Cluster) -> None:
    assert "ssh-" in cluster.must(OTHER, "cat /home/ops/.ssh/authorized_keys")
    assert cluster.must(OTHER, "stat -c '%U %a' /etc/ssh/access/ops") == "root 644\n"


def test_what_a_hand_changed_is_shown_and_mended(cluster: Cluster) -> None:
    unit = "/etc/systemd/system/shared.mount"
    cluster.must(WORKER, f"echo '# mine' >>{unit}; systemctl disable home.mount")
    cluster.must(HEAD, "chmod 700 /shared; gluster --mode=script volume set home auth.allow '*' >&2")
    plan = {(each["node"], each["title"]) for each in cluster.plan().details["operations"]}
    wanted = {
        (WORKER, f"file {unit}"),
        (WORKER, "unit home.mount"),
        (HEAD, "directory /shared"),
        (HEAD, "volume home"),
    }
    assert wanted <= plan
    assert set(changed(cluster.apply())) == {HEAD, WORKER}
    assert changed(cluster.plan()) == {}


def test_a_device_with_something_on_it_is_never_touched(cluster: Cluster) -> None:
    from provision.components.storage.deploy import _BLANK

    script = _BLANK.format(device="/dev/null", filesystem="xfs")
    assert cluster.run(WORKER, script).rc == 2
    for content, rc in (("printf data | dd of=$f conv=notrunc status=none", 2), (":", 1)):
        script = (
            _BLANK.format(device='"$f"', filesystem="xfs")
            .replace("[ -b", "[ -f")
            .replace("lsblk -nro NAME", "echo")
        )
        said = cluster.run(
            WORKER, f"f=$(mktemp); truncate -s 8M $f; {content}; ( {script}\n); r=$?; rm $f; exit $r"
        )
        assert said.rc == rc, said.stderr
        assert ("not touched" in said.stderr) is (rc == 2)


def test_every_check_is_tried() -> None:
    assert {case.check for case in CASES} == names(["storage"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fail_and_unknown_are_told_apart(cluster: Cluster, case: Case) -> None:
    try_case(cluster, case)


def test_switched_off_and_on_again_no_unit_has_failed(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login requires the mount of its home: what systemd went on to know of it would be started, and fail."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site = tmp_path / "lab.yml"
    off = {
        "cluster": "lab",
        "access": {"user": "ops", "ssh_config": str(lab.paths.ssh_config), "host_keys": "strict"},
        "groups": {"head": {"hosts": HEAD, "addresses": "10.77.0.10", "roles": ["head"]}},
        "networks": {"management": "10.77.0.0/24"},
    }
    on = {**off, "storage": {"provider": "glusterfs", "data": "/data/gluster"}}

    def apply(document: dict[str, object]) -> dict[str, int]:
        site.write_text(yaml.safe_dump(document, sort_keys=False))
        found = provision("apply", str(site))
        assert found.rc == 0, found
        return found.changed

    apply(on)
    lab.inside(HEAD, "systemctl start --no-block provision-mount-again@nowhere")  # tries until it is stopped
    assert apply(off)[HEAD] > 0
    assert lab.inside(HEAD, "findmnt -n -t fuse.glusterfs || [ $? = 1 ]") == ""
    lab.run(HEAD, "true", user="ops")
    assert lab.inside(HEAD, "systemctl list-units --plain --no-legend '*mount-again*' home.mount") == ""
    assert apply(on)[HEAD] > 0
    assert lab.inside(HEAD, "systemctl --failed --plain --no-legend") == ""
    assert apply(on)[HEAD] == 0
