"""Journals on real nodes: they arrive, also what was written while nobody took them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from provision.engine.controller import converge
from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.admitted import until
from tests.lab.checking import HEAD, WORKER, Case, hidden
from tests.lab.cluster import OTHER, Cluster, brought_up, changed, names, try_case
from tests.lab.command import provision

SENDER = "systemd-journal-upload.service"
GATE = "provision-logs-gate.service"
SPEAKER = f"speaker-{os.getpid()}"  # of this run alone, where the lab is an old one
GATHERED = "/var/log/journal/remote"

CASES = [
    Case(
        "logs-arrive",
        subject=f"systemctl stop {SENDER}; logger written after it stopped; sleep 17",
        source="mv /usr/bin/journalctl /usr/bin/journalctl.away",
        undo="mv /usr/bin/journalctl.away /usr/bin/journalctl",
    ),
    hidden("logs-collector", f"systemctl stop {GATE}", "/usr/bin/systemctl", HEAD),
]


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Cluster]:
    with brought_up("certificates", "logs") as made:
        until(lambda: made.found("logs-arrive", WORKER).verdict.good, "the first lines have arrived", 60)
        yield made


def messages(*words: str) -> list[tuple[str, str]]:
    """(node, message) of what `provision logs` finds."""
    answer = provision("logs", "inventories/lab.yml", *words)
    assert answer.rc == 0, answer
    return [(entry["node"], entry["message"]) for entry in answer.document["details"]["entries"]]


def arrives(expected: list[tuple[str, str]], *words: str, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while (found := messages(*words)) != expected:
        assert time.monotonic() < deadline, f"{found}, expected {expected}"
        time.sleep(1)


def test_a_second_apply_changes_nothing(cluster: Cluster) -> None:
    assert changed(cluster.apply()) == {}


def test_lines_of_all_nodes_are_found_by_node_unit_time_and_text(cluster: Cluster) -> None:
    for node in cluster.site.nodes:
        cluster.must(node, f"systemd-run -q --wait --unit={SPEAKER} echo here is {node}")
    everywhere = [(node, f"here is {node}") for node in cluster.site.nodes]
    arrives(everywhere, "--unit", SPEAKER, "--grep", "here is", "--since", "-10min")
    arrives([everywhere[1]], "--unit", SPEAKER, "--grep", "here is", "--limit", WORKER)
    assert messages("--unit", SPEAKER, "--until", "-1h", "--grep", "here is") == []


def test_what_this_tool_did_is_in_the_nodes_own_journal(cluster: Cluster) -> None:
    cluster.must(WORKER, "chmod 600 /etc/systemd/journal-upload.conf.d/provision.conf")
    assert set(changed(cluster.apply())) == {WORKER}
    told = cluster.must(WORKER, "journalctl -t provision -o cat -n 2 --no-pager").splitlines()
    assert [line.rpartition(": ")[2] for line in told] == [
        "1 changes",
        "file /etc/systemd/journal-upload.conf.d/provision.conf",
    ]
    assert all(line.startswith("apply ") and " by " in line for line in told)


def test_nothing_is_lost_while_the_collector_is_away(cluster: Cluster) -> None:
    cluster.must(HEAD, f"systemctl stop {GATE}")
    try:
        for number in range(3):
            cluster.must(OTHER, f"logger {SPEAKER} {number}")
            time.sleep(2)
    finally:
        cluster.must(HEAD, f"systemctl start {GATE}")
    arrives(
        [(OTHER, f"{SPEAKER} {number}") for number in range(3)],
        "--grep",
        f"^{SPEAKER} [0-9]$",
        "--limit",
        OTHER,
    )


def test_nothing_is_lost_while_the_head_is_switched_off(cluster: Cluster, lab: Lab) -> None:
    """What nodes logged meanwhile, and what the head itself had logged before, are there afterwards."""
    word = f"gap-{os.getpid()}"
    cluster.must(HEAD, f"logger {word} head; journalctl --sync")
    lab.power_loss(HEAD)
    for node in (WORKER, OTHER):
        for number in range(3):
            lab.inside(node, f"logger {word} {number}")
    lab.start(HEAD)
    cluster.close()
    cluster.shells.clear()
    for node, expected in ((HEAD, ["head"]), (WORKER, ["0", "1", "2"]), (OTHER, ["0", "1", "2"])):
        lines = [(node, f"{word} {what}") for what in expected]
        arrives(lines, "--grep", f"^{word} ", "--limit", node, within=120)


def test_a_node_is_brought_up_while_the_collector_is_away(cluster: Cluster) -> None:
    cluster.must(HEAD, f"systemctl stop {GATE}")
    cluster.must(OTHER, f"systemctl stop {SENDER}")
    document = converge(
        cluster.site,
        [cluster.site.nodes[OTHER]],
        verb="apply",
        forecast=False,
        components=["logs"],
        reboot=False,
    )
    assert document.verdict is Verdict.PASS, document.findings
    cluster.must(HEAD, f"systemctl start {GATE}")


def test_who_has_no_certificate_of_the_cluster_is_refused(cluster: Cluster) -> None:
    refused = cluster.run(
        WORKER,
        "d=$(mktemp -d); openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -days 1 -keyout $d/k -out $d/c"
        f" 2>/dev/null; printf 'MESSAGE=forged\\n\\n' >$d/m; for who in '' \"--cert $d/c --key $d/k\"; do"
        f" curl -sS --cacert /etc/provision/tls/ca.crt $who -H 'Content-Type: application/vnd.fdo.journal'"
        f" --data-binary @$d/m -o /dev/null -w '%{{http_code}} ' https://{HEAD}:19532/upload; done; rm -r $d",
    )
    assert refused.stdout.split() == ["000", "000"], refused
    assert "alert" in refused.stderr, "it was TLS that refused"
    assert messages("--grep", "^forged$") == []


def test_the_limit_of_gathered_journals_can_be_kept(cluster: Cluster) -> None:
    cluster.must(HEAD, "systemctl start provision-logs-keep.service")
    shown = cluster.must(HEAD, "systemctl show -p ExecStart provision-logs-keep.service")
    assert f"--directory={GATHERED} --vacuum-time=1month --vacuum-size=10G" in shown


def test_a_site_without_logs_says_how_to_get_them(tmp_path: object) -> None:
    answer = provision("logs", "inventories/examples/atlas.yml")
    assert answer.rc == 2
    assert "logs: {}" in json.dumps(answer.document)


def test_every_check_is_tried() -> None:
    assert {case.check for case in CASES} == names(["logs"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fail_and_unknown_are_told_apart(cluster: Cluster, case: Case) -> None:
    try_case(cluster, case)
