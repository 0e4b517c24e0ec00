"""Journals of all nodes: where they go, and how questions and answers are written."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.cli import logs as cli
from provision.components import vendor
from provision.components.logs import checks, deploy, exports, filebeat, loki
from provision.components.logs.ask import Answer
from provision.components.logs.exports import Query
from provision.components.logs.settings import LogsSettings
from provision.engine.remote import Output
from provision.profiles import distribution
from provision.report.model import Document, Verdict
from provision.site.lock import Lock
from provision.site.models import Site, SiteFile
from provision.verify.check import Target


def make_site(
    tmp_path: Path, roles: tuple[str, ...] = ("head", "monitor"), logs: dict[str, Any] | None = None
) -> Site:
    document: dict[str, Any] = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "addresses": "2001:db8::1", "roles": list(roles)},
            "gpu": {"hosts": "g[1-2]", "addresses": "192.0.2.[11-12]", "roles": ["worker"]},
        },
        "logs": logs or {},
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def test_nodes_send_to_the_first_monitor_by_tls(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    gathers = exports.collector(site)
    assert gathers is site.head
    sends = exports.sender_conf(site.head)
    assert "URL=https://[2001:db8::1]:19532\n" in sends
    assert "TrustedCertificateFile=/etc/provision/tls/ca.crt\n" in sends
    gate = exports.gate_conf(site.head)
    assert "accept = [2001:db8::1]:19532\n" in gate
    assert "CAfile = /etc/provision/tls/ca.crt\nverifyChain = yes\n" in gate
    assert "key = /run/credentials/provision-logs-gate.service/node.key\n" in gate


def test_a_collector_that_comes_later_fails_no_node() -> None:
    dropin = exports.sender_dropin("/lib/systemd/systemd-journal-upload")
    assert (
        "ExecStart=\nExecStart=/bin/sh -c 'while :; do /lib/systemd/systemd-journal-upload --save-state;"
        in dropin
    )
    assert "Type=exec\n" in dropin


def test_certificates_come_with_logs(tmp_path: Path) -> None:
    assert make_site(tmp_path).enabled("certificates")


def test_logs_without_a_monitor_are_a_mistake_of_the_site_file(tmp_path: Path) -> None:
    assert list(exports.problems(make_site(tmp_path))) == []
    (problem,) = exports.problems(make_site(tmp_path, ("head",)))
    assert "no node has the role monitor" in str(problem)


def test_what_is_asked_for_reaches_journalctl_as_one_word_each() -> None:
    query = Query(
        nodes=["g1", "g2"],
        units=["slurmd", "x.timer"],
        since="-2h",
        until="2026-03-01 12:00",
        grep="a'b; rm -rf /",
        priority="err",
        lines=50,
    )
    assert shlex.split(exports.command(query))[5:] == [
        "--output-fields=_HOSTNAME,_SYSTEMD_UNIT,SYSLOG_IDENTIFIER,PRIORITY,MESSAGE",
        "--since=-2h",
        "--until=2026-03-01 12:00",
        "--grep=a'b; rm -rf /",
        "--priority=err",
        "--lines=50",
        "_SYSTEMD_UNIT=slurmd.service",
        "_SYSTEMD_UNIT=x.timer",
        "_HOSTNAME=g1",
        "_HOSTNAME=g2",
    ]
    assert "_TRANSPORT=kernel" in exports.command(Query(kernel=True))


def line(**fields: Any) -> str:
    return json.dumps({"__REALTIME_TIMESTAMP": "1772366400000000", **fields}) + "\n"


def test_entries_have_time_node_source_and_message() -> None:
    text = line(_HOSTNAME="g1", _SYSTEMD_UNIT="slurmd.service", PRIORITY="3", MESSAGE="gone")
    text += line(_HOSTNAME="g2", SYSLOG_IDENTIFIER="kernel", MESSAGE=[72, 105, 7])
    first, second = exports.parse(text)
    assert (first.at.isoformat(), first.node, first.source, first.priority, first.message) == (
        "2026-03-01T12:00:00+00:00",
        "g1",
        "slurmd",
        3,
        "gone",
    )
    assert (second.source, second.priority, second.message) == ("kernel", None, "Hi\x07")


def test_a_message_cannot_play_with_the_terminal() -> None:
    assert (
        exports.printable("a\x1b[2Jb\x9b1mc\td\n")
        == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}1mc\td"
    )


@pytest.mark.parametrize("text", ["x", "{}", "[]", '{"__REALTIME_TIMESTAMP": "soon"}'])
def test_what_is_no_entry_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"entry|Expecting"):
        exports.parse(text)


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        exports.parse(text)
    except ValueError:
        return
    assert not any(each.strip() for each in text.splitlines())


def test_where_nothing_fits_the_question_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path)
    document = Document(verb="logs", site=site.cluster, verdict=Verdict.PASS)
    monkeypatch.setattr(cli, "open_site", lambda name: site)
    monkeypatch.setattr(cli, "ask", lambda *_, **__: Answer([], document))
    with pytest.raises(typer.Exit) as ended:
        cli.logs("tiny", grep="nothing of the kind")
    assert ended.value.exit_code == 0
    assert capsys.readouterr() == ("", "nothing that fits was logged\n")


# ---- Loki


LOKI: dict[str, Any] = {"loki": {}, "retention": "2week"}


def test_loki_keeps_logs_as_long_as_the_site_says_and_takes_certificates_of_the_cluster_alone(
    tmp_path: Path,
) -> None:
    site = make_site(tmp_path, logs=LOKI)
    document = yaml.safe_load(loki.loki_yml(site.head, site.settings("logs", site.head, LogsSettings)))
    # Loki, "Log retention": retention_enabled and delete_request_store, or nothing is ever deleted
    assert document["limits_config"]["retention_period"] == "336h"
    assert document["compactor"]["retention_enabled"] is True
    assert document["compactor"]["delete_request_store"] == "filesystem"
    tls = document["server"]["http_tls_config"]
    assert tls["client_auth_type"] == "RequireAndVerifyClientCert"
    assert tls["key_file"] == "/run/credentials/loki.service/node.key"
    assert document["server"]["grpc_listen_address"] == "127.0.0.1"
    assert "LoadCredential=node.key:/etc/provision/tls/node.key\n" in loki.loki_dropin()


@pytest.mark.parametrize(
    ("written", "hours"), [("14d", "336h"), ("1month", "730h"), ("3months", "2190h"), ("1year", "8766h")]
)
def test_how_long_is_said_as_loki_says_it(written: str, hours: str) -> None:
    assert loki.retention(LogsSettings(retention=written)) == hours


def test_alloy_sends_a_nodes_journal_with_its_labels_as_often_as_it_takes(tmp_path: Path) -> None:
    site = make_site(tmp_path, logs=LOKI)
    text = loki.alloy(site, site.nodes["g1"], site.head)
    assert 'labels        = {cluster = "tiny", node = "g1"}\n' in text
    assert 'url                 = "https://[2001:db8::1]:3100/loki/api/v1/push"\n' in text
    assert "max_backoff_retries = 0\n" in text
    assert 'key_file    = "/run/credentials/alloy.service/node.key"\n' in text
    for source, label in (("__journal__systemd_unit", "unit"), ("__journal__transport", "transport")):
        assert f'source_labels = ["{source}"]\n    target_label  = "{label}"' in text
    assert text.count("{") == text.count("}")
    # the collector sends its own journal, too: there is no other way into Loki
    assert "SupplementaryGroups=adm systemd-journal\n" in loki.alloy_dropin()


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("launch task StepId=12.0 request from UID:2001", None),
        ("[12.batch] done with job", None),
        ("Launching batch job 1234 for UID 2001", "1234"),
        ("_slurm_rpc_complete_batch_script: JobId=77 WEXITSTATUS 0", "77"),
    ],
)
def test_a_job_in_slurms_words_becomes_a_value_of_the_line(
    tmp_path: Path, line: str, job: str | None
) -> None:
    site = make_site(tmp_path, logs=LOKI)
    (written,) = re.findall(r'expression = (".*")', loki.alloy(site, site.head, site.head))
    found = re.search(json.loads(written), line)
    assert (found["slurm_job"] if found else None) == job


@pytest.mark.parametrize("on", ["debian 12", "debian 13", "ubuntu 22.04", "ubuntu 24.04", "rocky 9.5"])
def test_loki_and_alloy_come_from_their_makers_repository(on: str) -> None:
    """Grafana Labs: "Install Loki locally", "Install Alloy on Linux": apt.grafana.com, rpm.grafana.com."""
    profile = distribution(*on.split())
    assert (profile.packages("loki"), profile.packages("alloy")) == (["loki"], ["alloy"])
    assert "grafana.com" in profile.path("grafana.entry")


class Ops:
    """What a step does on a node."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def packages(self, *names: str) -> None:
        self.done.append(f"install {' '.join(names)}")

    def ensure(self, what: str, **_: Any) -> None:
        self.done.append(what)

    def directory(self, path: str, **_: Any) -> None:
        self.done.append(f"directory {path}")

    def file(self, path: str, content: str, *, validate: str | None = None, **_: Any) -> None:
        self.done.append(f"write {path}" + (f", by {validate}" if validate else ""))

    def unit(self, name: str, **_: Any) -> None:
        self.done.append(f"run {name}")


FROM_GRAFANA = [
    "install gpg curl",
    "key of grafana",
    "write /etc/apt/sources.list.d/provision-grafana.sources",
]


def done_on(site: Site, node: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """What the steps for monitors and for all nodes do on a node with Debian 13."""
    monkeypatch.setattr(deploy, "ops", done := Ops())
    monkeypatch.setattr(vendor, "ops", done)

    class On:
        profile = distribution("debian", "13")

        def __init__(self) -> None:
            self.site, self.node = site, site.nodes[node]

        def settings(self, kind: type[LogsSettings]) -> LogsSettings:
            return site.settings("logs", self.node, kind)

    if site.nodes[node].has("monitor"):
        deploy.receive.run(On())  # type: ignore[arg-type]
    received, done.done = done.done, []
    deploy.send.run(On())  # type: ignore[arg-type]
    return received, done.done


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            "h1",
            [
                # Loki, "Install Loki locally": apt-get install loki
                *FROM_GRAFANA,
                "install loki",
                "write /etc/loki/provision.yml, by loki -verify-config -config.file={}",
                "write /etc/systemd/system/loki.service.d/provision.conf",
                "run loki",
            ],
        ),
        ("g1", []),
    ],
)
def test_what_is_done_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, expected: list[str]
) -> None:
    received, sent = done_on(make_site(tmp_path, logs=LOKI), node, monkeypatch)
    assert received == expected
    assert sent == [
        # Alloy, "Install Alloy on Linux": apt-get install alloy
        *FROM_GRAFANA,
        "install alloy",
        "write /etc/alloy/provision.alloy, by alloy fmt {}",
        "write /etc/systemd/system/alloy.service.d/provision.conf",
        "run alloy",
    ]


def test_the_firewall_opens_what_takes_logs(tmp_path: Path) -> None:
    def open_for_logs(site: Site) -> list[int]:
        return [port.number for port in exports.PORTS(site)]

    assert open_for_logs(make_site(tmp_path)) == [19532]
    assert open_for_logs(make_site(tmp_path, logs=LOKI)) == [3100]


def answered(**labels: str) -> str:
    return json.dumps(
        {
            "status": "success",
            "data": {"result": [{"stream": labels, "values": [["1772366400000000000", "x"]]}]},
        }
    )


@dataclass
class Host:
    """A node, or the collector: answers by the first word of a command."""

    answers: dict[str, Output]

    def run(self, command: str, *_: str) -> Output:
        return self.answers[command.split()[0]]


def own(seconds: int) -> Output:
    return Output(0, json.dumps({"__REALTIME_TIMESTAMP": f"{(1772366400 + seconds) * 1_000_000}"}), "")


@pytest.mark.parametrize(
    ("here", "there", "verdict"),
    [
        (own(0), Output(0, answered(node="g1"), ""), Verdict.PASS),
        (own(60), Output(0, answered(node="g1"), ""), Verdict.FAIL),
        (own(0), Output(0, '{"data": {"result": []}}', ""), Verdict.FAIL),
        (own(0), Output(0, "<html>", ""), Verdict.UNKNOWN),
        (own(0), Output(0, "[]", ""), Verdict.UNKNOWN),
        (own(0), Output(22, "", "curl: (22) 400"), Verdict.UNKNOWN),
        (Output(127, "", "not found"), Output(0, answered(), ""), Verdict.UNKNOWN),
    ],
)
def test_a_nodes_newest_line_is_in_loki(
    tmp_path: Path, here: Output, there: Output, verdict: Verdict
) -> None:
    site = make_site(tmp_path, logs=LOKI)
    host = Host({"hostname": Output(0, "g1\n", ""), "journalctl": here})
    collector = Host({"curl": there})
    target = Target(
        site,
        site.nodes["g1"],
        "logs",
        Lock(),
        distribution("debian", "13"),
        host,
        reach=lambda name: collector,
    )
    assert checks.arrive.run(target).verdict is verdict


@given(st.text())
def test_no_answer_of_loki_is_more_than_wrong(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert loki.parse(text) is None


def test_logs_in_loki_are_asked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "open_site", lambda name: make_site(tmp_path, logs=LOKI))
    with pytest.raises(typer.Exit) as ended:
        cli.logs("tiny")
    assert ended.value.exit_code == 2
    assert "ask Grafana there" in capsys.readouterr().err


# ---- Elasticsearch


ELASTIC: dict[str, Any] = {
    "elasticsearch": {"hosts": ["https://logs.example.org:9200"], "api_key": {"env": "LOGS_KEY"}}
}


def test_filebeat_sends_a_nodes_journal_to_the_sites_own_elasticsearch(tmp_path: Path) -> None:
    site = make_site(tmp_path, logs=ELASTIC)
    to = exports.elasticsearch(site)
    assert to is not None
    document = yaml.safe_load(filebeat.config_yml(site, site.nodes["g1"], to, "id:secret"))
    (read,) = document["filebeat.inputs"]
    # Filebeat, "Journald input": an id, by which the cursor is kept
    assert (read["type"], read["id"], read["fields"]) == (
        "journald",
        "provision",
        {"cluster": "tiny", "node": "g1"},
    )
    assert document["output.elasticsearch"] == {
        "hosts": ["https://logs.example.org:9200"],
        "api_key": "id:secret",
        "ssl": {"supported_protocols": ["TLSv1.2", "TLSv1.3"]},
    }
    assert "BEAT_CONFIG_OPTS=-c /etc/filebeat/provision.yml" in filebeat.dropin()


def test_what_is_done_on_a_node_for_elasticsearch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGS_KEY", "id:secret")
    site = make_site(tmp_path, logs=ELASTIC)
    expected = [
        # Elastic, Beats, "Repositories for APT and YUM": key, entry, apt-get install filebeat
        "install gpg curl",
        "key of elastic",
        "write /etc/apt/sources.list.d/provision-elastic.sources",
        "install filebeat",
        "write /etc/filebeat/provision.yml, by filebeat test config -c {}",
        "write /etc/systemd/system/filebeat.service.d/provision.conf",
        "run filebeat",
    ]
    for node in ("h1", "g1"):
        assert done_on(site, node, monkeypatch) == ([], expected)
    assert list(exports.PORTS(site)) == []


def test_elasticsearch_needs_no_monitor_but_https_and_a_place_of_its_own(tmp_path: Path) -> None:
    assert list(exports.problems(make_site(tmp_path, ("head",), ELASTIC))) == []
    for wrong in (
        {**ELASTIC, "loki": {}},
        {"elasticsearch": {**ELASTIC["elasticsearch"], "hosts": ["http://logs.example.org"]}},
        {"elasticsearch": {**ELASTIC["elasticsearch"], "hosts": []}},
    ):
        with pytest.raises(ValidationError):
            make_site(tmp_path, logs=wrong)


@dataclass
class Beat:
    """A node with Filebeat."""

    unit: Output
    test: Output

    def run(self, command: str, *_: str) -> Output:
        if command.startswith("filebeat"):
            return self.test
        return Output(0, "enabled\n", "") if "is-enabled" in command else self.unit


RUNS = Output(0, "active\n", "")


@pytest.mark.parametrize(
    ("unit", "test", "verdict"),
    [
        (RUNS, Output(0, "talk to server... OK", ""), Verdict.PASS),
        (RUNS, Output(1, "", "talk to server... ERROR 401 Unauthorized"), Verdict.FAIL),
        (RUNS, Output(127, "", "filebeat: not found"), Verdict.UNKNOWN),
        (Output(127, "", "systemctl: not found"), Output(0, "", ""), Verdict.UNKNOWN),
    ],
)
def test_elasticsearch_takes_what_a_node_sends(
    tmp_path: Path, unit: Output, test: Output, verdict: Verdict
) -> None:
    site = make_site(tmp_path, logs=ELASTIC)
    target = Target(site, site.nodes["g1"], "logs", Lock(), distribution("debian", "13"), Beat(unit, test))
    assert checks.arrive.run(target).verdict is verdict
