"""Journals of all nodes: where they go, and how questions and answers are written."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from provision.cli import logs as cli
from provision.components.logs import exports
from provision.components.logs.ask import Answer
from provision.components.logs.exports import Query
from provision.report.model import Document, Verdict
from provision.site.models import Site, SiteFile


def make_site(tmp_path: Path, roles: tuple[str, ...] = ("head", "monitor")) -> Site:
    document: dict[str, Any] = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "addresses": "2001:db8::1", "roles": list(roles)},
            "gpu": {"hosts": "g[1-2]", "addresses": "192.0.2.[11-12]", "roles": ["worker"]},
        },
        "logs": {},
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
