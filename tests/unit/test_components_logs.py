"""Journals of all nodes: where they go, and how questions and answers are written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.cli import logs as cli
from provision.components import vendor
from provision.components.logs import checks, deploy, elastic, exports, filebeat, labels, loki
from provision.components.logs.ask import Answer
from provision.components.logs.exports import Query
from provision.components.logs.settings import LogsSettings
from provision.components.registry import secrets
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
    text += line(_HOSTNAME="g2", SYSLOG_IDENTIFIER="slurmd", MESSAGE="Launching batch job 12 for UID 2001")
    first, second, third = exports.parse(text)
    assert (first.at.isoformat(), first.node, first.source, first.priority, first.message) == (
        "2026-03-01T12:00:00+00:00",
        "g1",
        "slurmd",
        3,
        "gone",
    )
    assert (second.source, second.priority, second.message) == ("kernel", None, "Hi\x07")
    assert [entry.job for entry in (first, second, third)] == [None, None, "12"]


OOM = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/system.slice/slurmstepd.scope/job_12/step_0/user/task_0"
)


@pytest.mark.parametrize(
    ("source", "message", "job"),
    [
        ("slurmd", "launch task StepId=12.0 request from UID:2001", "12"),
        ("slurmstepd", "[12.batch] done with job", "12"),
        ("slurmd", "Launching batch job 1234 for UID 2001", "1234"),
        ("slurmctld", "_slurm_rpc_complete_batch_script: JobId=77 WEXITSTATUS 0", "77"),
        ("slurmctld", "sched: Allocate JobId=100_3(103) NodeList=g1", "100"),
        ("kernel", OOM, "12"),
        ("slurmd", "[2026-03-01T12:00:00.123] started", None),
        ("slurmctld", "Recovered information about 0 jobs", None),
        ("cron", "job 5 started", None),
    ],
)
def test_the_job_of_a_line_is_told_alike_by_all_who_send_lines(
    source: str, message: str, job: str | None
) -> None:
    assert labels.job(source, message) == job
    if source != "cron":  # Alloy and Filebeat look at lines of Slurm and of the kernel alone, too
        in_go, in_javascript = (re.search(labels.GO, message), re.search(PATTERN, message, re.IGNORECASE))
        assert (in_go["slurm_job"] if in_go else None) == job
        assert (in_javascript[1] if in_javascript else None) == job


PATTERN = labels.JAVASCRIPT.removeprefix("/").removesuffix("/i").replace(r"\/", "/")


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
    assert LogsSettings(retention=written).hours == hours


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


def test_a_job_becomes_a_value_of_slurms_and_of_the_kernels_lines(tmp_path: Path) -> None:
    """Grafana Alloy 1.9, "loki.process": stage.match, stage.regex."""
    site = make_site(tmp_path, logs=LOKI)
    text = loki.alloy(site, site.head, site.head)
    assert [json.loads(found) for found in re.findall(r'expression = (".*")', text)] == [labels.GO] * 2
    assert [json.loads(found) for found in re.findall(r'selector = (".*")', text)] == [
        '{unit=~"slurm.+"}',
        '{transport="kernel"}',
    ]


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

    def wait(self, what: str, **_: Any) -> None:
        self.done.append(f"wait: {what}")


FROM_GRAFANA = [
    "install gpg curl",
    "key of grafana",
    "write /etc/apt/sources.list.d/provision-grafana.sources",
]


PASSWORDS = {secret.name: secret.name.encode() for secret in elastic.SECRETS}


def done_on(site: Site, node: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """What the steps for monitors and for all nodes do on a node with Debian 13."""
    monkeypatch.setattr(deploy, "ops", done := Ops())
    monkeypatch.setattr(vendor, "ops", done)

    class On:
        profile = distribution("debian", "13")
        secrets = PASSWORDS

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
    assert open_for_logs(make_site(tmp_path, logs=OURS)) == [9200, 5601]


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


def found_there(at: int) -> Output:
    return Output(0, json.dumps({"hits": {"hits": [{"sort": [at]}]}}), "")


@pytest.mark.parametrize(
    ("here", "there", "verdict"),
    [
        (own(0), found_there(1772366400000), Verdict.PASS),
        (own(60), found_there(1772366400000), Verdict.FAIL),
        (own(0), Output(0, '{"hits": {"hits": []}}', ""), Verdict.FAIL),
        (own(0), Output(0, '{"hits": {"hits": [{}]}}', ""), Verdict.UNKNOWN),
        (own(0), Output(22, "", "curl: (22) 401"), Verdict.UNKNOWN),
    ],
)
def test_a_nodes_newest_line_is_in_elasticsearch(
    tmp_path: Path, here: Output, there: Output, verdict: Verdict
) -> None:
    assert arrived(make_site(tmp_path, logs=OURS), here, there) is verdict


def arrived(site: Site, here: Output, there: Output) -> Verdict:
    """What the check says of g1, whose journal and whose collector answer so."""
    host = Host({"hostname": Output(0, "g1\n", ""), "journalctl": here})
    collector = Host({"curl": there})
    profile = distribution("debian", "13")
    target = Target(site, site.nodes["g1"], "logs", Lock(), profile, host, reach=lambda name: collector)
    return checks.arrive.run(target).verdict


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
    assert arrived(make_site(tmp_path, logs=LOKI), here, there) is verdict


@given(st.text(), st.sampled_from((loki.parse, elastic.parse)))
def test_no_answer_is_more_than_wrong(text: str, parse: Any) -> None:
    with contextlib.suppress(ValueError):
        assert parse(text) is None


@pytest.mark.parametrize(
    ("logs", "words"),
    [({"loki": {}}, "ask Grafana there"), ({"elasticsearch": {}}, "ask https://[2001:db8::1]:5601")],
)
def test_logs_that_are_no_journal_are_asked_for_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logs: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(cli, "open_site", lambda name: make_site(tmp_path, logs=logs))
    with pytest.raises(typer.Exit) as ended:
        cli.logs("tiny")
    assert ended.value.exit_code == 2
    assert words in capsys.readouterr().err


# ---- Elasticsearch


ELASTIC: dict[str, Any] = {
    "elasticsearch": {"hosts": ["https://logs.example.org:9200"], "api_key": {"env": "LOGS_KEY"}}
}


def test_filebeat_sends_a_nodes_journal_to_the_sites_own_elasticsearch(tmp_path: Path) -> None:
    site = make_site(tmp_path, logs=ELASTIC)
    to = exports.elsewhere(site)
    assert to is not None
    assert not exports.by_elasticsearch(site)
    output = filebeat.to_theirs(to, "id:secret")
    document = yaml.safe_load(filebeat.config_yml(site, site.nodes["g1"], output))
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
    assert labels.JAVASCRIPT in read["processors"][0]["script"]["source"]
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
        {"elasticsearch": {"hosts": ["https://logs.example.org"]}},
        {"elasticsearch": {"authority": "/etc/ssl/site.pem"}},
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


# ---- Elasticsearch and Kibana on the collector. Elastic's documentation of version 9, as of December 2026.


OURS: dict[str, Any] = {"elasticsearch": {}, "retention": "2week"}


def test_elasticsearch_and_kibana_are_reached_by_tls_and_login_alone(tmp_path: Path) -> None:
    site = make_site(tmp_path, logs=OURS)
    server = yaml.safe_load(elastic.elasticsearch_yml(site, site.head))
    # "Security settings in Elasticsearch": security on, PEM files relative to the folder of elasticsearch.yml
    assert server["xpack.security.enabled"] is server["xpack.security.http.ssl.enabled"] is True
    assert server["xpack.security.http.ssl.key"] == "node.key"
    assert not any("anonymous" in key for key in server)
    assert (server["http.host"], server["transport.host"]) == ("2001:db8::1", "127.0.0.1")
    assert "-t /etc/elasticsearch/provision /etc/elasticsearch/jvm.options" in elastic.dropin()
    assert "/etc/provision/tls/node.crt /etc/provision/tls/node.key\n" in elastic.dropin()
    # "Configuring Elasticsearch", "Config files location"
    assert elastic.environment() == "ES_PATH_CONF=/etc/elasticsearch/provision\n"
    kibana = yaml.safe_load(elastic.kibana_yml(site.head, PASSWORDS))
    # Kibana, "General settings"
    assert kibana["server.ssl.enabled"] is True
    assert kibana["server.ssl.key"] == "/run/credentials/kibana.service/node.key"
    assert kibana["elasticsearch.hosts"] == ["https://[2001:db8::1]:9200"]
    assert kibana["elasticsearch.ssl.certificateAuthorities"] == ["/etc/provision/tls/ca.crt"]
    assert "--config /etc/kibana/provision.yml\n" in elastic.kibana_dropin()


def test_users_have_the_clusters_passwords_and_no_more_rights_than_they_need() -> None:
    """Elasticsearch, "File-based user authentication": `name:hash`, bcrypt as $2a$; `role:name,name`."""
    users = dict(line.split(":") for line in elastic.users(PASSWORDS).splitlines())
    roles = dict(line.split(":")[::-1] for line in elastic.users_roles().splitlines())
    assert roles == {
        "provision": "superuser",
        "provision-kibana": "kibana_system",
        "provision-filebeat": "provision-writer",
    }
    assert users.keys() == roles.keys()
    assert users["provision"].startswith("$2a$")
    assert bcrypt.checkpw(PASSWORDS["elasticsearch.password"], users["provision"].encode())
    assert len(set(users.values())) == len(users)
    # Filebeat, "Grant privileges and roles needed for publishing"
    assert yaml.safe_load(elastic.roles_yml()) == {
        "provision-writer": {
            "cluster": ["monitor"],
            "indices": [{"names": ["filebeat-journal"], "privileges": ["create_doc", "auto_configure"]}],
        }
    }


def test_only_a_collector_with_elasticsearch_has_its_secrets(tmp_path: Path) -> None:
    assert {"elasticsearch.password", "kibana.key"} <= secrets(make_site(tmp_path, logs=OURS)).keys()
    assert secrets(make_site(tmp_path, logs=LOKI)).keys() == {"ca.pem"}


@pytest.mark.parametrize(
    ("gib", "heap"), [(2, 1024), (64, 16384), (1024, 26624)], ids=["small", "a quarter", "at most"]
)
def test_the_heap_is_a_quarter_of_the_memory(tmp_path: Path, gib: int, heap: int) -> None:
    """Elasticsearch, "Set the JVM heap size": -Xms and -Xmx equal, below what compressed pointers reach."""
    (tmp_path / "meminfo").write_text(f"MemFree:  1 kB\nMemTotal:  {gib * 2**20} kB\n")
    script = elastic.heap(f"{tmp_path}/meminfo")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"-Xms{heap}m\n-Xmx{heap}m\n"


def test_lines_are_kept_as_long_as_the_site_says(tmp_path: Path) -> None:
    """Elasticsearch, "Index lifecycle actions": rollover, delete; "Set up a data stream"."""
    site = make_site(tmp_path, logs=OURS)
    keeps, makes, shows = elastic.resources(site.head, site.settings("logs", site.head, LogsSettings))
    assert keeps.address == "https://[2001:db8::1]:9200/_ilm/policy/provision"
    assert keeps.body["policy"]["phases"]["delete"] == {"min_age": "336h", "actions": {"delete": {}}}
    assert makes.body["index_patterns"] == ["filebeat-journal"]
    assert makes.body["template"]["settings"]["index"]["lifecycle"] == {"name": "provision"}
    # Kibana API, "Create a data view"
    assert (shows.method, shows.body["data_view"]["title"]) == ("POST", "filebeat-journal")
    assert "--header 'kbn-xsrf: true'" in elastic.make(shows)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        # Elasticsearch, "Get lifecycle policies": the policy with what it had left out
        (
            {
                "provision": {
                    "version": 1,
                    "policy": {"phases": {"hot": {"min_age": "0ms", "actions": {"x": [1]}}}},
                }
            },
            0,
        ),
        ({"provision": {"policy": {"phases": {"hot": {"actions": {"x": [2]}}}}}}, 1),
        ({"provision": {"policy": {"phases": {"hot": {"actions": {"x": [1, 2]}}}}}}, 1),
        ({}, 1),
        ([], 1),
        (None, 1),
    ],
)
def test_what_an_api_answers_is_compared_with_what_was_sent(tmp_path: Path, answer: Any, status: int) -> None:
    wanted = {"provision": {"policy": {"phases": {"hot": {"actions": {"x": [1]}}}}}}
    curl = tmp_path / "curl"
    curl.write_text(f"#!/bin/sh\nprintf %s {shlex.quote('' if answer is None else json.dumps(answer))}\n")
    curl.chmod(0o755)
    script = elastic.is_there(elastic.Resource("", "PUT", "https://x", {}, "https://x", wanted))
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert subprocess.run(["sh", "-c", script], env={"PATH": path}, check=False).returncode == status


def test_filebeat_may_add_lines_and_sets_nothing_up(tmp_path: Path) -> None:
    site = make_site(tmp_path, logs=OURS)
    output = filebeat.to_ours(site.head, b"pw")
    document = yaml.safe_load(filebeat.config_yml(site, site.nodes["g1"], output))
    # Filebeat, "Configure the Elasticsearch output", "Index lifecycle management", "Elasticsearch index template"
    assert document["setup.ilm.enabled"] is document["setup.template.enabled"] is False
    assert document["output.elasticsearch"] == {
        "hosts": ["https://[2001:db8::1]:9200"],
        "username": "provision-filebeat",
        "password": "pw",
        "index": "filebeat-journal",
        "ssl": {
            "supported_protocols": ["TLSv1.2", "TLSv1.3"],
            "certificate_authorities": ["/etc/provision/tls/ca.crt"],
        },
    }


FILEBEAT = [
    "install gpg curl",
    "key of elastic",
    "write /etc/apt/sources.list.d/provision-elastic.sources",
    "install filebeat",
    "write /etc/filebeat/provision.yml, by filebeat test config -c {}",
    "write /etc/systemd/system/filebeat.service.d/provision.conf",
    "run filebeat",
]


def test_what_is_done_on_the_collector_with_elasticsearch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path, logs=OURS)
    assert done_on(site, "g1", monkeypatch) == ([], FILEBEAT)
    received, sent = done_on(site, "h1", monkeypatch)
    assert sent == FILEBEAT
    assert received == [
        # Elasticsearch, "Install Elasticsearch with a Debian package"; Kibana, the same: key, entry, apt-get install
        *FILEBEAT[:3],
        "install elasticsearch kibana curl",
        "write /etc/provision/elasticsearch.curl",
        "directory /etc/elasticsearch/provision",
        "directory /etc/elasticsearch/provision/jvm.options.d",
        "write /etc/default/elasticsearch",
        "write /etc/elasticsearch/provision/elasticsearch.yml",
        "write /etc/elasticsearch/provision/users",
        "write /etc/elasticsearch/provision/users_roles",
        "write /etc/elasticsearch/provision/roles.yml",
        "a heap by the node's memory",
        "write /etc/systemd/system/elasticsearch.service.d/provision.conf",
        "run elasticsearch",
        "write /etc/kibana/provision.yml",
        "write /etc/systemd/system/kibana.service.d/provision.conf",
        "run kibana",
        "wait: Kibana answers",
        "how long logs are kept",
        "what lines become",
        "the data view in Kibana",
    ]


@pytest.mark.parametrize(
    ("on", "path"), [("debian 12", "default"), ("ubuntu 26.04", "default"), ("rocky 10", "sysconfig")]
)
def test_where_packages_read_their_variables_differs(on: str, path: str) -> None:
    """Elasticsearch, "Configuring Elasticsearch": /etc/default for Debian packages, /etc/sysconfig for RPMs."""
    profile = distribution(*on.split())
    assert profile.path("elasticsearch.environment") == f"/etc/{path}/elasticsearch"
    assert profile.packages("elasticsearch") == ["elasticsearch", "kibana", "curl"]


GREEN, REFUSED = Output(0, '{"status":"green"}', ""), Output(0, "401", "")


@dataclass
class Answering:
    """The collector: what systemctl and what each address answers."""

    unit: str = "active"
    health: Output = GREEN
    stranger: Output = REFUSED

    def run(self, command: str, *_: str) -> Output:
        if command.startswith("systemctl"):
            return Output(0, "enabled\n" if "is-enabled" in command else f"{self.unit}\n", "")
        return self.health if "_cluster/health" in command else self.stranger


@pytest.mark.parametrize(
    ("host", "verdict"),
    [
        (Answering(), Verdict.PASS),
        (Answering(health=Output(0, '{"status":"yellow"}', "")), Verdict.PASS),
        (Answering(unit="inactive"), Verdict.FAIL),
        (Answering(health=Output(0, '{"status":"red"}', "")), Verdict.FAIL),
        (Answering(stranger=Output(0, "200", "")), Verdict.FAIL),
        (Answering(unit=""), Verdict.UNKNOWN),
        (Answering(health=Output(7, "", "refused")), Verdict.UNKNOWN),
        (Answering(stranger=Output(60, "", "certificate")), Verdict.UNKNOWN),
    ],
)
def test_the_collector_with_elasticsearch_is_looked_at(
    tmp_path: Path, host: Answering, verdict: Verdict
) -> None:
    site = make_site(tmp_path, logs=OURS)
    target = Target(site, site.head, "logs", Lock(), distribution("debian", "13"), host)
    assert checks.listens.run(target).verdict is verdict
