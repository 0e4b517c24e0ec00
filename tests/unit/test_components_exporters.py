"""Exporters: how Slurm's answers become metrics, and what the others are asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from provision.components.dcgm_exporter import checks as dcgm_checks
from provision.components.dcgm_exporter import exports as dcgm
from provision.components.exported import scrapes
from provision.components.ipmi_exporter import checks as ipmi_checks
from provision.components.ipmi_exporter import exports as ipmi
from provision.components.slurm_exporter import metrics
from provision.engine.remote import Output
from provision.profiles import distribution
from provision.report.model import Verdict
from provision.site.lock import Lock
from provision.site.models import Site, SiteFile
from provision.verify.check import Target

NODES = {
    "nodes": [
        {"name": "g1", "state": ["MIXED"], "gres": "gpu:h100:8(S:0-1)", "gres_used": "gpu:h100:5(IDX:0-4)"},
        {"name": "g2", "state": ["IDLE", "DRAIN"], "gres": "gpu:h100:8(S:0-1)", "gres_used": "gpu:h100:0(IDX:N/A)",
         "reason": "rolling maintenance"},
        {"name": "g3", "state": "DOWN*", "gres": "gpu:4", "gres_used": "gpu:(null):0(IDX:N/A)", "reason": "no answer"},
    ]
}  # fmt: skip
JOBS = {
    "jobs": [
        {"job_state": ["RUNNING"], "account": "ml", "partition": "train",
         "tres_alloc_str": "cpu=8,gres/gpu=5,gres/gpu:h100=5"},
        {"job_state": "PENDING", "account": "ml", "partition": "train", "tres_req_str": "cpu=1,gres/gpu=2",
         "eligible_time": {"set": True, "infinite": False, "number": 1000}},
        {"job_state": ["COMPLETED"], "account": "", "partition": "train", "tres_alloc_str": ""},
    ]
}  # fmt: skip
STATISTICS = {
    "statistics": {
        "server_thread_count": 3,
        "schedule_cycle_last": {"set": True, "infinite": False, "number": 250},
        "bf_cycle_mean": {"set": False, "infinite": False, "number": 0},
    }
}
ANSWERS = {
    metrics.NODES: json.dumps(NODES),
    metrics.JOBS: json.dumps(JOBS),
    metrics.STATISTICS: json.dumps(STATISTICS),
    metrics.SHARES: "root||1.000000|0.000000|\nml|ada|0.250000|0.750000|0.5\n",
    metrics.DATABASE: "lab\n",
    metrics.ACCEPTANCE: json.dumps({"g1": {"state": "admitted", "since": "2026-03-01T12:00:00Z"}}),
    metrics.BURNIN: "",
}


def answer(command: Sequence[str]) -> str:
    return ANSWERS[tuple(command)]


@pytest.fixture
def registry() -> CollectorRegistry:
    found, failures = metrics.collect(answer)
    assert failures == {}
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:(null):4(IDX:0-3)", {"": 4}),
        ("gpu:tesla:0(IDX:N/A)", {"tesla": 0}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:2),lustre:1", {"a100": 2, "v100": 1}),
        ("cpu=8,mem=4G,gres/gpu=2,gres/gpu:h100=2", {"h100": 2}),
        ("gres/gpu=2", {"": 2}),
        ("gpu:a100_1g.5gb:7(S:0)", {"a100_1g.5gb": 7}),
        ("", {}),
        (None, {}),
        ("shard:8", {}),
    ],
)
def test_gpus_are_counted_in_every_spelling(text: str | None, found: dict[str, int]) -> None:
    assert metrics.gpus(text) == found


@given(st.text())
def test_no_text_breaks_the_count(text: str) -> None:
    assert all(count >= 0 for count in metrics.gpus(text).values())


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (["IDLE"], "idle"),
        ("MIXED+DRAIN", "draining"),
        (["IDLE", "DRAIN"], "drained"),
        ("DOWN*", "down"),
        (["DOWN", "DRAIN"], "down"),
        ("IDLE+MAINTENANCE", "maintenance"),
        (["ALLOCATED", "COMPLETING"], "completing"),
        ("PLANNED", "planned"),
        (["FUTURE"], "future"),
        ([], "unknown"),
        (None, "unknown"),
    ],
)
def test_a_node_is_in_one_state(state: Any, word: str) -> None:
    assert metrics.state_of(metrics.words(state)) == word


def test_nodes_and_their_gpus(registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("slurm_nodes", {"state": "mixed"}) == 1
    assert registry.get_sample_value("slurm_nodes", {"state": "drained"}) == 1
    assert registry.get_sample_value("slurm_nodes", {"state": "down"}) == 1
    told = {
        (name, state): registry.get_sample_value("slurm_node_state", {"slurm_node": name, "state": state})
        for name in ("g1", "g2")
        for state in ("mixed", "drained", "down", "not_responding")
    }
    assert told == {
        ("g1", "mixed"): 1,
        ("g1", "drained"): 0,
        ("g1", "down"): 0,
        ("g1", "not_responding"): 0,
        ("g2", "mixed"): None,
        ("g2", "drained"): 1,
        ("g2", "down"): 0,
        ("g2", "not_responding"): 0,
    }, "what alerts are about is told where it is not so, too"
    assert registry.get_sample_value("slurm_node_gpus", {"slurm_node": "g1", "type": "h100"}) == 8
    assert registry.get_sample_value("slurm_node_gpus_allocated", {"slurm_node": "g1", "type": "h100"}) == 5
    assert registry.get_sample_value("slurm_node_gpus_allocated", {"slurm_node": "g3", "type": ""}) == 0
    assert registry.get_sample_value("slurm_node_maintenance", {"slurm_node": "g2"}) == 1
    assert registry.get_sample_value("slurm_node_maintenance", {"slurm_node": "g3"}) == 0


def test_jobs_and_what_they_have_and_want(registry: CollectorRegistry) -> None:
    running = {"state": "running", "account": "ml", "partition": "train"}
    assert registry.get_sample_value("slurm_jobs", running) == 1
    assert registry.get_sample_value("slurm_jobs_gpus", running) == 5, "typed and untyped are the same GPUs"
    assert registry.get_sample_value("slurm_jobs_gpus", {**running, "state": "pending"}) == 2
    assert (registry.get_sample_value("slurm_longest_wait_seconds") or 0) > 1e6


def test_the_scheduler_and_fair_share(registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("slurm_schedule_cycle_last_microseconds") == 250
    assert registry.get_sample_value("slurm_backfill_cycle_mean_microseconds") is None, "it was not set"
    assert registry.get_sample_value("slurm_effective_usage", {"account": "ml", "user": "ada"}) == 0.75
    assert registry.get_sample_value("slurm_database_clusters") == 1


def test_how_far_nodes_have_come(registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("provision_acceptance", {"slurm_node": "g1", "state": "admitted"}) == 1
    metrics.acceptance_metrics(CollectorRegistry(), "")  # before the first bring-up
    with pytest.raises(metrics.Unreadable, match="no state of g1"):
        metrics.acceptance_metrics(CollectorRegistry(), '{"g1": "admitted"}')


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", "[]", "{}", '{"nodes": 1, "jobs": [2]}'])
def test_a_source_that_answers_nonsense_is_named_and_the_others_go_on(text: str) -> None:
    def broken(command: Sequence[str]) -> str:
        return text if tuple(command) in (metrics.NODES, metrics.JOBS) else answer(command)

    registry, failures = metrics.collect(broken)
    assert failures.keys() == {"nodes", "jobs"}
    assert registry.get_sample_value("slurm_source_up", {"source": "nodes"}) == 0
    assert registry.get_sample_value("slurm_source_up", {"source": "statistics"}) == 1
    assert registry.get_sample_value("slurm_nodes", {"state": "idle"}) is None
    assert registry.get_sample_value("slurm_controller_threads") == 3


SOURCES = {name: command for name, command, _ in metrics.SOURCES}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(["/nowhere/squeue"], id="absent"),
        pytest.param(["sleep", "5"], id="hangs"),
        pytest.param(["printf", "slurm_load: error \\377\n"], id="garbage"),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_may_be_away_hang_or_talk_nonsense_and_a_metric_says_so(
    source: str, broken: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "DEADLINE", 0.2)

    def run(command: Sequence[str]) -> str:
        return metrics.ask(broken) if tuple(command) == SOURCES[source] else answer(command)

    registry, failures = metrics.collect(run)
    assert failures.keys() == {source}
    for name in SOURCES:
        up = registry.get_sample_value("slurm_source_up", {"source": name})
        assert up == (0 if name == source else 1), name
    assert b"slurm_collected_timestamp_seconds" in generate_latest(registry)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["g1", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SHAPES = {
    "nodes": ("name", "state", "gres", "gres_used", "reason"),
    "jobs": ("job_state", "account", "partition", "tres_alloc_str", "tres_req_str", "eligible_time"),
    "statistics": tuple(metrics.STATISTIC),
}


@given(st.sampled_from(sorted(SHAPES)), st.data())
def test_no_answer_of_another_shape_stops_the_exporter(source: str, data: st.DataObject) -> None:
    inner = data.draw(st.dictionaries(st.sampled_from(SHAPES[source]), JSON))
    document = {source: inner if source == "statistics" else [inner]}

    def run(command: Sequence[str]) -> str:
        return json.dumps(document) if tuple(command) == SOURCES[source] else answer(command)

    registry, failures = metrics.collect(run)
    assert failures.keys() <= {source}
    assert generate_latest(registry)


def test_a_program_that_is_missing_fails_or_hangs_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "DEADLINE", 0.2)
    with pytest.raises(metrics.Unreadable, match="No such file"):
        metrics.ask(["/nowhere/sinfo"])
    with pytest.raises(metrics.Unreadable, match="out of order"):
        metrics.ask(["sh", "-c", "echo out of order >&2; exit 1"])
    with pytest.raises(metrics.Unreadable, match="no answer in"):
        metrics.ask(["sleep", "5"])


def make_site(tmp_path: Path, model: str = "h100-sxm", mig: Any = "none", **monitoring: Any) -> Site:
    document: dict[str, Any] = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head", "monitor"]},
            "gpu": {
                "hosts": "g1",
                "addresses": "192.0.2.11",
                "roles": ["worker"],
                "gpu": {"model": model, "count": 8},
            },
        },
        "nvidia": {"mig": mig},
        "monitoring": monitoring,
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def test_an_exporter_that_is_not_named_is_no_target(tmp_path: Path) -> None:
    assert {scrape.job for scrape in scrapes(make_site(tmp_path))} == {"node", "prometheus", "alertmanager"}
    named = make_site(tmp_path, dcgm={}, ipmi={})
    assert {scrape.job for scrape in scrapes(named)} >= {"dcgm", "ipmi"}
    assert not make_site(tmp_path).enabled("slurm_exporter"), "there is no Slurm here"


@pytest.mark.parametrize(
    ("model", "mig", "profiling", "told"),
    [
        ("h100-sxm", "none", True, {"nvlink", "hbm", "profiling"}),
        ("h100-sxm", {"all": {"1g.10gb": 7}}, True, {"hbm", "profiling"}),
        ("h100-sxm", "none", False, {"nvlink", "hbm"}),
        ("h100-pcie", "none", True, {"hbm", "profiling"}),
        ("l40s", "none", True, {"profiling"}),
        ("rtx-9999", "none", True, set()),
    ],
)
def test_dcgm_is_asked_for_what_the_model_can_tell(
    tmp_path: Path, model: str, mig: Any, profiling: bool, told: set[str]
) -> None:
    site = make_site(tmp_path, model, mig, dcgm={"profiling": profiling})
    asked = dcgm.fields(site, site.nodes["g1"])
    assert "DCGM_FI_DEV_FB_USED" in asked
    kinds = {
        "nvlink": "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "hbm": "DCGM_FI_DEV_MEMORY_TEMP",
        "profiling": "DCGM_FI_PROF_SM_ACTIVE",
    }
    assert {kind for kind, field in kinds.items() if field in asked} == told
    assert all(line.count(", ") == 2 for line in dcgm.fields_csv(site, site.nodes["g1"]).splitlines())


def test_dcgm_listens_on_the_management_address_alone(tmp_path: Path) -> None:
    site = make_site(tmp_path, dcgm={})
    dropin = dcgm.dropin("/usr/bin/dcgm-exporter", "nvidia-dcgm-exporter", site.nodes["g1"])
    assert "--address 192.0.2.11:9400" in dropin


def test_fields_that_dcgm_leaves_out_are_named() -> None:
    text = '# HELP x\nDCGM_FI_DEV_FB_USED{gpu="0"} 5\n'
    assert dcgm_checks.missing_fields(text, ["DCGM_FI_DEV_FB_USED", "DCGM_FI_PROF_SM_ACTIVE"]) == [
        "DCGM_FI_PROF_SM_ACTIVE"
    ]


@dataclass
class Curl:
    """A node on which an exporter answers so."""

    answer: Output

    def run(self, command: str, *_: str) -> Output:
        return self.answer


ABSENT = Output(7, "", "curl: (7) refused")
HANGS = Output(28, "", "curl: (28) Operation timed out")
GARBAGE = Output(0, "<html>", "")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (Output(0, 'ipmi_up{collector="sensors"} 1\n', ""), Verdict.PASS),
        (Output(0, 'ipmi_up{collector="sensors"} 0\n', ""), Verdict.FAIL),
        (ABSENT, Verdict.FAIL),
        (HANGS, Verdict.UNKNOWN),
        (GARBAGE, Verdict.UNKNOWN),
    ],
)
def test_a_bmc_that_does_not_answer_is_told_from_an_exporter_that_does_not(
    tmp_path: Path, answer: Output, verdict: Verdict
) -> None:
    site = make_site(tmp_path, ipmi={})
    at = Target(site, site.head, "ipmi_exporter", Lock(), distribution("debian", "13"), Curl(answer))
    assert ipmi_checks.answers.run(at).verdict is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"), [(ABSENT, Verdict.FAIL), (HANGS, Verdict.UNKNOWN), (GARBAGE, Verdict.FAIL)]
)
def test_an_exporter_of_gpus_that_is_away_hangs_or_talks_nonsense_is_told(
    tmp_path: Path, answer: Output, verdict: Verdict
) -> None:
    site = make_site(tmp_path, dcgm={})
    at = Target(site, site.nodes["g1"], "dcgm_exporter", Lock(), distribution("debian", "13"), Curl(answer))
    assert dcgm_checks.delivered.run(at).verdict is verdict


def test_the_ipmi_exporter_asks_the_bmc_as_root(tmp_path: Path) -> None:
    dropin = ipmi.dropin("/bin/e", "prometheus-ipmi-exporter", make_site(tmp_path).head)
    assert dropin.endswith("User=root\n")
    assert "--web.listen-address=192.0.2.1:9290" in dropin


def test_the_mark_of_maintenance_is_the_playbooks() -> None:
    defaults = Path(__file__).parents[2] / "roles/slurm_node/defaults/main.yml"
    assert f"slurm_node_reason: {metrics.MAINTENANCE}\n" in defaults.read_text()
