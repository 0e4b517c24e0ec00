"""The cluster's own certificates on real nodes: renewed in time, mended when they are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provision.lab import Lab
from tests.lab.checking import WORKER, Case
from tests.lab.cluster import OTHER, Cluster, brought_up, changed, names, try_case

TLS = "/etc/provision/tls"
CASES = [
    Case(
        "certificate",
        subject=f"rm {TLS}/node.crt",
        source=f"mv {TLS}/ca.crt /root/; echo unreadable >{TLS}/ca.crt",
        undo=f"mv /root/ca.crt {TLS}/ca.crt",
    )
]

# What a hand or time can do to a node's certificate; all of it is seen from the node alone.
WRONG = {
    "key of another certificate": f"openssl ecparam -name prime256v1 -genkey -noout -out {TLS}/node.key",
    "readable key": f"chmod 644 {TLS}/node.key",
    "ends too soon": f"openssl req -x509 -key {TLS}/node.key -subj /CN={WORKER} -days 3 -out {TLS}/node.crt",
    "cut off": f"truncate -s 100 {TLS}/node.crt",
}


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Cluster]:
    with brought_up("certificates") as made:
        yield made


def test_a_second_apply_changes_nothing(cluster: Cluster) -> None:
    assert changed(cluster.apply()) == {}


def test_nodes_trust_each_other_and_the_authoritys_key_is_on_the_head_alone(cluster: Cluster) -> None:
    for node in (WORKER, OTHER):
        cluster.must(node, f"openssl verify -CAfile {TLS}/ca.crt {TLS}/node.crt")
    assert len({cluster.must(node, f"cat {TLS}/ca.crt") for node in cluster.site.nodes}) == 1
    found = cluster.must(WORKER, "grep -rlE 'BEGIN .*PRIVATE KEY' /etc/provision /var/lib/provision")
    assert found.split() == [f"{TLS}/node.key"]


@pytest.mark.parametrize("what", WRONG)
def test_a_certificate_that_is_wrong_is_made_anew(cluster: Cluster, what: str) -> None:
    cluster.must(WORKER, WRONG[what])
    assert set(changed(cluster.plan())) == {WORKER}
    assert set(changed(cluster.apply())) == {WORKER}
    assert cluster.found("certificate", WORKER).verdict.good
    assert changed(cluster.apply()) == {}


def test_every_check_is_tried() -> None:
    assert {case.check for case in CASES} == names(["certificates"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fail_and_unknown_are_told_apart(cluster: Cluster, case: Case) -> None:
    try_case(cluster, case)
