"""munge on real nodes: one key, read by every daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.checking import HEAD, WORKER, Case, hidden
from tests.lab.cluster import Cluster, brought_up, changed, names, try_case

KEY = "/etc/munge/munge.key"
WRONG = f"cp -a {KEY} /root/right.key; head -c 1024 /dev/urandom >{KEY}; systemctl restart munge"
CASES = [
    hidden("munge-key", f"chmod 444 {KEY}", "/usr/bin/stat"),
    hidden("munge-local", "systemctl stop munge", "/usr/bin/unmunge"),
    hidden("munge-cross", WRONG, "/usr/bin/munge"),
]


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Cluster]:
    with brought_up("munge") as made:
        yield made


def test_a_second_apply_changes_nothing(cluster: Cluster) -> None:
    assert changed(cluster.apply()) == {}


def test_the_key_is_the_same_everywhere_and_nobody_elses(cluster: Cluster) -> None:
    sums = {cluster.must(node, f"sha256sum <{KEY}") for node in cluster.site.nodes}
    assert len(sums) == 1
    assert cluster.run(WORKER, f"runuser -u alice -- cat {KEY}").rc != 0


def test_a_daemon_older_than_its_key_is_named(cluster: Cluster) -> None:
    """The right key was put back, but munged still works with the wrong one."""
    cluster.must(WORKER, f"{WRONG}; sleep 1.1; cp /root/right.key {KEY}; rm /root/right.key")
    found = cluster.found("munge-cross", WORKER)
    assert found.verdict is Verdict.FAIL
    assert found.why == f"munged on {WORKER} is older than its key"
    assert set(changed(cluster.apply())) == {WORKER}
    assert cluster.found("munge-cross", WORKER).verdict is Verdict.PASS


def test_a_clock_that_is_off_is_named(lab: Lab, cluster: Cluster) -> None:
    lab.fault("clock", WORKER)
    try:
        found = cluster.found("munge-cross", WORKER)
    finally:
        lab.fault("clock", WORKER, undo=True)
    assert found.verdict is Verdict.FAIL
    assert f"clocks of {WORKER} and {HEAD}" in str(found.why)
    assert cluster.found("munge-cross", WORKER).verdict is Verdict.PASS


def test_every_check_is_tried() -> None:
    assert {case.check for case in CASES} == names(["munge"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fail_and_unknown_are_told_apart(cluster: Cluster, case: Case) -> None:
    try_case(cluster, case)
