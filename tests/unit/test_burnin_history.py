"""What nodes came to in their last burn-in: kept on the head, and what monitoring makes of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from provision.burnin import history
from provision.burnin.result import BurninResult
from provision.components.slurm_exporter import metrics
from provision.engine import headstate
from provision.engine.headstate import HeadError
from provision.engine.remote import RemoteError, RootShell, local_shell
from provision.report.model import Document, NodeResult, Verdict
from provision.site.models import Site, SiteFile

RECORDED = Path(__file__).parents[1] / "gpu/recorded/h200-x2-standard.json"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RootShell]:
    """A shell on this machine whose records are in a folder of the test."""
    monkeypatch.setattr(headstate, "DIRECTORY", str(tmp_path / "provision"))
    session = local_shell("head-1")
    yield session
    session.close()


def told(**verdicts: Verdict) -> dict[str, dict[str, Any]]:
    nodes = {name: NodeResult(verdict=verdict) for name, verdict in verdicts.items()}
    measured = {"g1": {"matmul_bf16_tflops": 645.2, "all_reduce_busbw_gbs": 350.8}}
    return history.records(nodes, set(nodes), measured)


def asked(tmp_path: Path) -> CollectorRegistry:
    """What Slurm's exporter makes of the head's records."""
    registry = CollectorRegistry()
    command = metrics.BURNIN[2].replace("/var/lib/provision", str(tmp_path / "provision"))
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    metrics.burnin_metrics(registry, answer.stdout)
    return registry


def samples(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_a_nodes_figures_are_those_of_its_slowest_gpu() -> None:
    result = BurninResult.parse(RECORDED.read_text(), "recorded")
    (figures,) = history.figures(result).values()
    slowest = min(row.tflops for row in result.compute if row.dtype == "bfloat16")
    assert figures["matmul_bf16_tflops"] == slowest
    assert figures["pair_gbs"] == min(pair.gbs for pair in result.pairs)
    largest = max(
        (row for row in result.collectives if row.operation == "all_reduce"), key=lambda row: row.bytes
    )
    assert figures["all_reduce_busbw_gbs"] == largest.busbw_gbs


def test_the_last_burn_in_of_each_node_becomes_metrics(shell: RootShell, tmp_path: Path) -> None:
    assert samples(asked(tmp_path), "provision_burnin") == {}, "before the first one"
    history.write(shell, told(g1=Verdict.FAIL, g2=Verdict.PASS))
    history.write(shell, told(g1=Verdict.PASS))
    registry = asked(tmp_path)
    assert samples(registry, "provision_burnin") == {("g1", "pass"): 1, ("g2", "pass"): 1}
    assert samples(registry, "provision_burnin_figure") == {
        ("g1", "matmul_bf16_tflops"): 645.2,
        ("g1", "all_reduce_busbw_gbs"): 350.8,
    }
    assert set(samples(registry, "provision_burnin_timestamp_seconds")) == {("g1",), ("g2",)}
    assert {path.name for path in (tmp_path / "provision/burnin").iterdir()} == {"g1.json", "g2.json"}


@pytest.mark.parametrize("text", ["?", "[]", "{}", '{"node": 1, "at": 1, "figures": {}}', '{"node": "g1"}'])
def test_a_record_that_is_none_is_told_apart_from_no_burn_in(text: str) -> None:
    with pytest.raises(metrics.Unreadable):
        metrics.burnin_metrics(CollectorRegistry(), text)


def test_a_head_that_cannot_write_says_so(shell: RootShell, tmp_path: Path) -> None:
    (tmp_path / "provision").write_text("in the way")
    with pytest.raises(HeadError, match=r"cannot write .*burnin"):
        history.write(shell, told(g1=Verdict.PASS))


def test_what_could_not_be_kept_is_a_warning_and_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"head": {"hosts": "h1", "roles": ["head"]}}
    site = Site.from_file(
        SiteFile.model_validate({"cluster": "tiny", "groups": groups}), tmp_path / "tiny.yml"
    )
    reached: list[Sequence[object]] = []

    def nobody(*words: object, **_: object) -> RootShell:
        reached.append(words)
        raise RemoteError("h1: no route")

    monkeypatch.setattr(headstate, "connect", nobody)
    document = Document(verb="burnin", verdict=Verdict.PASS)
    assert history.kept(document) == [], "nothing was burned in"
    document.details[history.DETAIL] = told(g1=Verdict.PASS)
    headstate.keep(site, document, history.kept(document), sudo_password=None)
    assert (document.verdict, len(reached)) == (Verdict.WARN, 1)
    assert "no route" in str(document.findings[0].why)
