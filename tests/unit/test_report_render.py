"""One document with every verdict, and text that tries to break out, through every rendering."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from provision.cli.common import print_json
from provision.report import html, junit, terminal
from provision.report.figures import figures
from provision.report.model import Document, Finding, NodeResult, Verdict
from provision.report.plots import human_bytes, plots
from provision.report.text import next_steps, printable, sentence, tally, worst_first

AT = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
HOSTILE = (
    "<script>alert(1)</script>]]>&amp;\"' {{ 7*7 }} [red]x[/] \x1b[31m\x00\x07 \u202egnp.exe\nsecond line"
)


def finding(verdict: Verdict, check: str, subject: str, **more: Any) -> Finding:
    return Finding(verdict=verdict, check=check, subject=subject, **more)


DOCUMENT = Document(
    verb="verify",
    site="atlas",
    verdict=Verdict.FAIL,
    seconds=12.34,
    nodes={
        "gpu-1": NodeResult(verdict=Verdict.PASS, state="admitted"),
        "gpu-2": NodeResult(verdict=Verdict.FAIL, state="quarantined", changed=3, failed=1, reason="one"),
        "gpu-3": NodeResult(verdict=Verdict.UNKNOWN, reason=HOSTILE),
        "gpu-4": NodeResult(verdict=Verdict.WARN),
    },
    findings=[
        finding(Verdict.PASS, "clock", "gpu-1", read="2 ms", expected="below 100 ms"),
        finding(Verdict.SKIP, "governor", "gpu-1", why="not in a container", source="limits.json"),
        finding(Verdict.PASS, "clock", "gpu-2", read="1 ms"),
        finding(Verdict.FAIL, "gpu-count", "gpu-2", read="7", expected="8", action="drain", source="lspci"),
        finding(Verdict.UNKNOWN, HOSTILE, "gpu-3", why=HOSTILE, action=HOSTILE, source=HOSTILE, line=7),
        finding(Verdict.WARN, "clock", "gpu-4", read="84 ms", expected="below 50 ms"),
    ],
    details={"digest": "0123456789abcdef"},
)


def shown(document: Document, width: int = 120, *, colours: bool = False) -> str:
    out = io.StringIO()
    terminal.show(document, Console(file=out, width=width, force_terminal=colours))
    return out.getvalue()


def test_a_sentence_says_what_was_read_what_was_expected_and_why() -> None:
    assert sentence(finding(Verdict.FAIL, "c", "n", read="7", expected="8", why="one is gone")) == (
        "7, expected 8: one is gone"
    )
    assert sentence(finding(Verdict.FAIL, "c", "n", expected="8")) == "nothing, expected 8"
    assert sentence(finding(Verdict.PASS, "c", "n", read="8", expected="8")) == "8"
    assert sentence(finding(Verdict.UNKNOWN, "c", "n", expected="8", why="no answer")) == "no answer"
    assert sentence(finding(Verdict.FAIL, "c", "n", read="7", expected="8", why="7: 12 % below 8")) == (
        "7: 12 % below 8"
    )


@given(st.text())
def test_printable_text_is_one_line_that_nothing_acts_on(text: str) -> None:
    shown = printable(text)
    assert all(char.isprintable() for char in shown)
    assert shown.encode().decode() == shown  # no lone surrogate is left either


def test_the_worst_comes_first_and_the_order_is_kept_otherwise() -> None:
    assert [(item.verdict, item.subject) for item in worst_first(DOCUMENT.findings)] == [
        ("fail", "gpu-2"),
        ("unknown", "gpu-3"),
        ("warn", "gpu-4"),
        ("skip", "gpu-1"),
        ("pass", "gpu-1"),
        ("pass", "gpu-2"),
    ]
    assert tally(DOCUMENT.findings) == "1 fail, 1 unknown, 1 warn, 1 skip, 2 pass"
    assert tally([]) == "no findings"


class TestTerminal:
    def test_what_is_not_in_order_is_told_worst_first_with_its_action(self) -> None:
        lines = [line.rstrip() for line in shown(DOCUMENT).splitlines()]
        at = lines.index("fail    gpu-2: gpu-count: 7, expected 8 [lspci]")
        assert lines[at + 1] == "        -> drain"
        assert "skip    gpu-1: governor: not in a container [limits.json]" in lines[at:]
        assert not any("clock: 2 ms" in line for line in lines)  # what passed is not told

    def test_what_holds_for_many_nodes_is_said_once(self) -> None:
        names = [f"gpu-{number:03}" for number in range(1, 65)]
        document = Document(
            verb="verify",
            verdict=Verdict.FAIL,
            nodes={name: NodeResult(verdict=Verdict.FAIL) for name in names},
            findings=[
                Finding(verdict=Verdict.FAIL, check="clock", subject=name, read="2 s") for name in names
            ],
        )
        told = [line for line in shown(document).splitlines() if "clock" in line]
        assert [line.rstrip() for line in told] == ["fail    gpu-[001-064]: clock: 2 s"]

    def test_of_many_nodes_those_that_are_well_are_only_counted(self) -> None:
        nodes = {f"gpu-{number:03}": NodeResult(verdict=Verdict.PASS) for number in range(1, 65)}
        nodes["gpu-007"] = NodeResult(verdict=Verdict.UNKNOWN, reason="unreachable")
        text = shown(Document(verb="verify", verdict=Verdict.UNKNOWN, nodes=nodes))
        assert "gpu-007" in text
        assert "gpu-008" not in text
        assert "63 more" in text

    def test_the_last_line_is_the_summary(self) -> None:
        assert shown(DOCUMENT).splitlines()[-1] == (
            "fail: verify; atlas; 4 nodes; 1 fail, 1 unknown, 1 warn, 1 skip, 2 pass; 12.3 s"
        )

    def test_colours_are_for_terminals_only(self) -> None:
        assert "\x1b" not in shown(DOCUMENT)
        assert "\x1b[1;31mfail" in shown(DOCUMENT, colours=True)

    def test_text_from_nodes_neither_moves_the_cursor_nor_is_markup(self) -> None:
        text = shown(DOCUMENT, width=400)
        assert not set(text) & {"\x1b", "\x00", "\x07", "\u202e"}
        assert "[red]x[/] \\x1b[31m\\x00\\x07 \\u202egnp.exe second" in text

    @pytest.mark.parametrize("width", [50, 99, 100, 200])
    @pytest.mark.parametrize("colours", [True, False])
    def test_any_width_shows_reasons_and_findings_whole(self, width: int, colours: bool) -> None:
        text = re.sub(r"\x1b\[[0-9;]*m", "", shown(DOCUMENT, width, colours=colours))
        assert all(len(line) <= width for line in text.splitlines()[:-1])  # the summary is one line
        joined = "".join(text.split())
        assert "gpu-count:7,expected8[lspci]" in joined
        assert "quarantined31" in joined
        assert joined.count("\\u202egnp.exesecond") >= 4  # check, why, source, action

    @pytest.mark.parametrize("width", [60, 200])
    def test_a_reason_that_no_finding_tells_is_shown(self, width: int) -> None:
        nodes = {"gpu-1": NodeResult(verdict=Verdict.FAIL, failed=1, reason="apt: disk full")}
        text = shown(Document(verb="apply", verdict=Verdict.FAIL, nodes=nodes), width, colours=True)
        assert "apt: disk full" in text

    def test_a_document_without_nodes(self) -> None:
        document = Document(verb="inspect", verdict=Verdict.PASS, seconds=0.04)
        assert shown(document) == "pass: inspect; 0.0 s\n"


class TestJson:
    def test_the_document_is_the_contract(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_json(DOCUMENT)
        read = json.loads(capsys.readouterr().out)
        assert list(read) == ["verb", "site", "verdict", "seconds", "nodes", "findings", "details"]
        assert read["nodes"]["gpu-2"] == {
            "verdict": "fail",
            "state": "quarantined",
            "changed": 3,
            "failed": 1,
            "reason": "one",
        }
        assert read["findings"][3] == {
            "verdict": "fail",
            "check": "gpu-count",
            "subject": "gpu-2",
            "read": "7",
            "expected": "8",
            "action": "drain",
            "why": None,
            "source": "lspci",
            "line": None,
        }
        assert [item["verdict"] for item in read["findings"]] == [f.verdict for f in DOCUMENT.findings]

    def test_it_comes_back_unchanged(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_json(DOCUMENT)
        assert Document.model_validate_json(capsys.readouterr().out) == DOCUMENT


class TestJunit:
    def suites(self, document: Document) -> dict[str, ElementTree.Element]:
        root = ElementTree.fromstring(junit.render(document, AT))
        return {suite.attrib["name"]: suite for suite in root}

    def test_a_node_is_a_suite_and_a_finding_a_case(self) -> None:
        suite = self.suites(DOCUMENT)["gpu-2"]
        assert [(case.attrib["name"], [child.tag for child in case]) for case in suite] == [
            ("clock", []),
            ("gpu-count", ["failure"]),
        ]
        failure = suite[1][0]
        assert failure.attrib["message"] == "7, expected 8"
        assert failure.text == "7, expected 8\nread from: lspci\nnext: drain"
        assert suite.attrib["timestamp"] == "2031-02-03T04:05:06"

    def test_unknown_is_an_error_and_skip_is_skipped(self) -> None:
        suites = self.suites(DOCUMENT)
        assert [child.tag for child in suites["gpu-3"][0]] == ["error"]
        assert [child.tag for child in suites["gpu-1"][1]] == ["skipped"]
        assert [child.tag for child in suites["gpu-4"][0]] == ["system-out"]

    def test_the_counts_add_up(self) -> None:
        root = ElementTree.fromstring(junit.render(DOCUMENT, AT))
        keys = ("tests", "failures", "errors", "skipped")
        assert [root.attrib[key] for key in keys] == ["6", "1", "1", "1"]

    def test_a_node_that_failed_without_a_finding_is_no_green_suite(self) -> None:
        nodes = {"gpu-1": NodeResult(verdict=Verdict.FAIL, failed=1, reason="apt: disk full")}
        document = Document(verb="apply", site="atlas", verdict=Verdict.FAIL, nodes=nodes)
        (case,) = self.suites(document)["gpu-1"]
        assert case.attrib["name"] == "apply"
        assert case[0].attrib == {"message": "apt: disk full", "type": "fail"}

    @given(st.text(), st.text())
    def test_any_text_is_valid_xml(self, check: str, why: str) -> None:
        found = finding(Verdict.FAIL, check, "gpu-1", why=why, action=why, source=why)
        document = Document(verb="verify", site=why, verdict=Verdict.FAIL, findings=[found])
        assert ElementTree.fromstring(junit.render(document, AT)).attrib["failures"] == "1"


class _Page(HTMLParser):
    """Tags, and text by the tag that holds it; fails where the tags do not nest."""

    VOID = ("meta", "img", "br", "path", "use", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data.strip())


BURNIN = {
    "collectives": [
        {"operation": "all_reduce", "bytes": size, "busbw_gbs": size / 2**20}
        for size in (2**20, 2**24, 2**28)
    ]
    + [{"operation": "all_to_all", "bytes": 2**20, "busbw_gbs": None, "unsupported": "not with gloo"}],
    "compute": [{"rank": rank, "tflops": 700.0 + rank} for rank in range(4)],
    "training": {"losses": [5.0, 4.0, 3.5]},
}


WHOLE: dict[str, Any] = {
    **BURNIN,
    "ranks": [
        {"rank": rank, "host": "n1", "local_rank": rank, "gpu": {"name": "NVIDIA H200"}} for rank in range(2)
    ],
    "compute": [{"rank": rank, "dtype": "bfloat16", "tflops": 700.0 + rank} for rank in range(2)],
    "copies": [{"rank": 0, "kind": "host_to_device", "place": place, "gbs": 50.0} for place in ("near", "far")],
    "pairs": [{"source": 0, "target": 1, "gbs": 350.0}, {"source": 1, "target": 0, "gbs": 361.0}],
    "telemetry": [
        {
            "host": "n1", "subject": "gpu 0", "seconds": [0, 1, 2],
            "values": {"power_watts": [100.0, None, 700.0], "slowdown_reasons": [0, 4, 12]},
        }
    ],
    "phases": [{"name": "compute", "start": 0.0, "end": 2.0}],
    "training_runs": [
        {
            "strategy": "fsdp2", "parameters": 7 * 10**9, "tokens_per_second": 3e4, "tflops_per_gpu": 490.0,
            "step_seconds": [1.0, 1.1, 1.0],
        }
    ],
    "transports": [
        {"choices": [{"operation": "AllReduce", "bytes": 2**28, "algorithm": "RING", "protocol": "SIMPLE"}]}
    ],
    "skipped": [{"what": "far copies", "why": "one NUMA node", "host": None}],
}  # fmt: skip
LIMITS = {"matmul_bf16_tflops": {"fail": 580.0, "warn": 612.0, "bytes": 0, "source": "here"}}
ISOLATION = {
    "faults": [{"kind": "link", "name": "n2 rail mlx5_3", "evidence": ["one", "two", "three", "four"]}],
    "unexplained": None,
}


class TestFigures:
    def test_the_numbers_of_a_burn_in_are_tables(self) -> None:
        tables = {table.title: table for table in figures({"burnin": WHOLE, "isolation": ISOLATION})}
        nodes = tables["Each node, slowest to fastest rank"]
        row = dict(zip(nodes.columns, nodes.rows[0], strict=True))
        assert row == {
            "node": "n1",
            "ranks": "2 x H200",
            "bf16 TFLOP/s": "700-701",
            "to device GB/s": "50",
            "peers GB/s": "350-361",
        }
        (collective,) = tables["Collectives, all ranks"].rows
        assert collective == ("all_reduce", "256 MiB", "256.00", "0", "RING SIMPLE")
        (run,) = tables["Training"].rows
        assert run == ("fsdp2", "7 G", "30000", "490", "0.70", "1")
        assert tables["Not measured"].rows == (("far copies", "everywhere", "one NUMA node"),)
        assert tables["Isolation"].rows == (("link", "n2 rail mlx5_3", "one; two; three; and 1 more"),)

    def test_without_a_burn_in_there_are_none(self) -> None:
        assert figures({}) == []
        assert figures({"burnin": None}) == []

    def test_a_terminal_and_a_page_show_them(self) -> None:
        document = DOCUMENT.model_copy(update={"details": {"burnin": WHOLE, "isolation": ISOLATION}})
        page = " ".join(_Page(html.render(document, at=AT, version="1")).text)
        for text in (shown(document, width=200), page):
            for part in ("2 x H200", "RING SIMPLE", "n2 rail mlx5_3", "one NUMA node"):
                assert part in text


def test_what_to_do_next_is_said_once_for_all_that_asks_for_it() -> None:
    found = [
        finding(Verdict.WARN, "link", "n2", action="look at the cable"),
        finding(Verdict.FAIL, "rail", "n1", action="look at the cable"),
        finding(Verdict.PASS, "rail", "n3", action="nothing"),
        finding(Verdict.FAIL, "xid", "n1", action="call the vendor"),
    ]
    document = Document(verb="burnin", verdict=Verdict.FAIL, findings=found)
    assert [(step.verdict, step.action, step.subjects, step.checks) for step in next_steps(document)] == [
        (Verdict.FAIL, "look at the cable", "n[1-2]", ("rail", "link")),
        (Verdict.FAIL, "call the vendor", "n1", ("xid",)),
    ]
    assert "What to do next" in html.render(document, at=AT, version="1")


class TestHtml:
    def page(self, document: Document = DOCUMENT) -> _Page:
        return _Page(html.render(document, at=AT, version="1.2.3"))

    def test_it_says_what_when_and_by_what(self) -> None:
        text = " ".join(self.page().text)
        for part in ("verify of atlas", "2031-02-03 04:05:06 UTC", "12.3 s", "0123456789abcdef", "1.2.3"):
            assert part in text

    def test_the_worst_node_comes_first(self) -> None:
        text = html.render(DOCUMENT, at=AT, version="1")
        names = re.findall(r'<th scope="row" class="name"><a href="#(f\d)">(gpu-\d)</a>', text)
        assert [name for _, name in names] == ["gpu-2", "gpu-3", "gpu-4", "gpu-1"]
        for anchor, _ in names:
            assert f'id="{anchor}"' in text

    def test_it_fetches_and_runs_nothing(self) -> None:
        page = self.page()
        assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "img"}
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on")]
            assert tag == "a" or not attributes.keys() & {"src", "href"}

    def test_text_from_nodes_is_text(self) -> None:
        text = html.render(DOCUMENT, at=AT, version="1")
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "{{ 7*7 }}" in text
        assert not set(text) & {"\x1b", "\x00", "\u202e"}

    @given(st.text())
    def test_any_text_leaves_the_page_whole(self, text: str) -> None:
        found = finding(
            Verdict.UNKNOWN, text, text, read=text, expected=text, why=text, source=text, action=text
        )
        node = NodeResult(verdict=Verdict.UNKNOWN, state=text, reason=text)
        document = Document(
            verb=text, site=text, verdict=Verdict.UNKNOWN, nodes={text: node}, findings=[found]
        )
        page = self.page(document)
        assert {tag for tag, _ in page.tags} <= {tag for tag, _ in self.page().tags}

    def test_burn_in_numbers_are_drawn_in_the_page(self) -> None:
        document = DOCUMENT.model_copy(update={"details": {"burnin": BURNIN}})
        page = self.page(document)
        pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
        assert [picture["aria-label"] for picture in pictures] == [
            "Bus bandwidth of collectives",
            "Matrix products, each rank",
            "Training loss",
        ]
        assert all(picture["role"] == "img" for picture in pictures)


class TestPlots:
    def test_no_burn_in_no_plots(self) -> None:
        assert plots({}) == []
        assert plots({"burnin": None}) == []

    def test_only_what_was_measured_is_drawn(self) -> None:
        (loss,) = plots({"burnin": {"collectives": [], "compute": [], "training": {"losses": [2.0, 1.0]}}})
        assert "Training loss" in loss

    def test_what_was_no_number_leaves_a_gap(self) -> None:
        result = {"compute": [{"rank": 0, "tflops": None}], "training": {"losses": [2.0, None, 1.0]}}
        (loss,) = plots({"burnin": result})
        assert "Training loss" in loss

    def test_each_is_one_svg_element_in_the_pages_colour_and_the_same_each_time(self) -> None:
        drawn = plots({"burnin": BURNIN})
        assert drawn == plots({"burnin": BURNIN})
        for svg in drawn:
            assert ElementTree.fromstring(svg).tag.endswith("svg")
            assert "currentColor" in svg
        assert "all_reduce" in drawn[0]
        assert "all_to_all" not in drawn[0]

    def test_every_part_of_a_burn_in_has_its_picture(self) -> None:
        labels = [re.findall('aria-label="([^"]*)"', svg)[0] for svg in plots({"burnin": WHOLE})]
        assert labels == [
            "Bus bandwidth of collectives",
            "Matrix products, each rank",
            "Copies, each rank",
            "From GPU to GPU",
            "GPUs over time",
            "Training loss",
            "Training steps by strategy",
        ]

    def test_a_recorded_run_has_all_of_them(self) -> None:
        recorded = Path(__file__).parents[1] / "gpu" / "recorded" / "h200-x2-standard.json"
        result = json.loads(recorded.read_text())
        assert len(plots({"burnin": result})) == 7
        assert [table.title for table in figures({"burnin": result})] == [
            "Each node, slowest to fastest rank",
            "Collectives, all ranks",
            "Training",
            "Not measured",
        ]

    def test_no_picture_needs_another_file(self) -> None:
        for svg in plots({"burnin": WHOLE, "limits": LIMITS}):
            assert "<image" not in svg
            assert not re.findall(r'(?:href|src)="(?!#)', svg)

    def test_a_rank_below_the_limit_has_another_colour(self) -> None:
        rates = {"compute": [{"rank": 0, "tflops": 700.0}, {"rank": 1, "tflops": 500.0}]}
        low = {"compute": [{**row, "dtype": "bfloat16"} for row in rates["compute"]]}
        plain, limited = (plots({"burnin": low, "limits": limits})[0] for limits in ({}, LIMITS))
        assert "fails below 580" in limited
        assert limited.count("#d55e00") > plain.count("#d55e00") == 0

    def test_pairs_of_one_node_are_a_matrix_and_of_several_a_row_each(self) -> None:
        (one,) = plots({"burnin": {"pairs": WHOLE["pairs"], "ranks": WHOLE["ranks"]}})
        assert "to GPU" in one
        assert ">350<" in one
        ranks = [
            *WHOLE["ranks"],
            *({**rank, "rank": rank["rank"] + 2, "host": "n2"} for rank in WHOLE["ranks"]),
        ]
        pairs = [*WHOLE["pairs"], {"source": 2, "target": 3, "gbs": 200.0}]
        (several,) = plots({"burnin": {"pairs": pairs, "ranks": ranks}})
        assert "0→1" in several
        assert ">n2<" in several

    def test_of_many_gpus_the_range_is_drawn(self) -> None:
        gpu = WHOLE["telemetry"][0]
        many = [{**gpu, "host": f"n{number}"} for number in range(20)]
        (svg,) = plots({"burnin": {"telemetry": many, "phases": WHOLE["phases"]}})
        assert "range of 20 GPUs" in svg
        assert "hardware" in svg

    def test_labels_are_escaped_and_taken_as_they_are(self) -> None:
        rows = [{"operation": "<b>$x^2$ & co", "bytes": 1024, "busbw_gbs": 1.0}]
        (svg,) = plots({"burnin": {"collectives": rows}})
        assert "&lt;b&gt;$x^2$ &amp; co" in svg

    @pytest.mark.parametrize(
        ("size", "text"),
        [(512, "512 B"), (4096, "4 KiB"), (2**22, "4 MiB"), (2**33, "8 GiB"), (2**41, "2048 GiB")],
    )
    def test_sizes_are_told_in_binary_units(self, size: int, text: str) -> None:
        assert human_bytes(size) == text
