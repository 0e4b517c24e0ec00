"""What is kept: manifests on nodes, the journal, limits, facts of the first look."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from provision.engine import journal as journal_module
from provision.engine import limits, manifest, preflight, questions
from provision.engine.journal import Journal, journaled
from provision.engine.record import Owned
from provision.engine.remote import Output
from provision.profiles import distribution
from provision.report.store import KEEP
from provision.site.models import Access, Gpu, Node, Site, SiteFile

LSCPU = "Socket(s): 2\nCore(s) per socket: 32\nThread(s) per core: 2\nMemTotal:  1056269312 kB\n"


def test_what_a_switched_off_component_made_is_stale() -> None:
    before = {
        "time": {"files": ["/etc/a"], "units": ["a.service"]},
        "base": {"files": ["/etc/b"], "units": []},
    }
    now = {"base": Owned(["/etc/b"])}
    assert manifest.stale(before, now, {"base"}, whole=True) == {"time": Owned(["/etc/a"], ["a.service"])}
    assert manifest.stale(before, now, {"base"}, whole=False) == {}


def test_what_a_component_no_longer_writes_is_stale_and_what_moved_to_another_is_not() -> None:
    before = {"base": {"files": ["/etc/b", "/etc/c", "/etc/d"], "units": []}}
    now = {"base": Owned(["/etc/b"]), "time": Owned(["/etc/c"])}
    assert manifest.stale(before, now, {"base", "time"}, whole=True) == {"base": Owned(["/etc/d"])}


def test_a_run_of_one_component_keeps_what_others_made_in_the_manifest() -> None:
    before = {"time": {"files": ["/etc/a"], "units": []}}
    now = {"base": Owned(["/etc/b"], ["b.service"])}
    assert manifest.merged(before, now, {"base"}, whole=False) == {
        "time": {"files": ["/etc/a"], "units": []},
        "base": {"files": ["/etc/b"], "units": ["b.service"]},
    }
    assert set(manifest.merged(before, now, {"base"}, whole=True)) == {"base"}


def test_a_damaged_manifest_stops_the_node_with_advice() -> None:
    with pytest.raises(preflight.PreflightError, match=r"move it away and apply again"):
        preflight.parse_manifest('{"components": 3}')
    with pytest.raises(preflight.PreflightError, match=r"damaged"):
        preflight.parse_manifest("")  # cut short by a full disk: what was made here is not known


def test_hardware_is_read_from_lscpu_and_meminfo() -> None:
    hardware = preflight.parse_hardware(LSCPU)
    assert (hardware.sockets, hardware.cores, hardware.threads, hardware.memory) == (2, 32, 2, 1031513)
    assert hardware.cpus == 128
    with pytest.raises(preflight.PreflightError, match=r"do not tell the hardware"):
        preflight.parse_hardware(LSCPU.replace("MemTotal", "MemFree"))


FUNCTION = "0000:{:02x}:00.0|0x10de|{}|0x030200|0|16|16|32.0 GT/s PCIe|32.0 GT/s PCIe\n"


def facts_of(functions: Output) -> preflight.Facts:
    hardware = preflight.parse_hardware(LSCPU)
    return preflight.Facts(distribution("debian", "13"), {}, hardware, preflight.parse_gpus(functions), {})


def worker(gpu: Gpu | None) -> Node:
    return Node("g1", "gpu", frozenset({"worker"}), Access(), gpu=gpu)


def test_a_node_with_other_gpus_than_the_site_file_says_is_contradicted_by_both_names() -> None:
    seven = "".join(FUNCTION.format(bus, "0x2330") for bus in range(7))
    facts = facts_of(Output(0, seven, ""))
    (text,) = preflight.contradictions(worker(Gpu(model="h100-sxm", count=8)), None, facts)
    assert text == "GPUs are 7 x h100-sxm, the site file says 8 x h100-sxm"
    assert preflight.contradictions(worker(Gpu(model="h100-sxm", count=7)), facts.hardware, facts) == []
    (text,) = preflight.contradictions(worker(None), None, facts)
    assert text == "GPUs are 7 x h100-sxm, the site file says none"
    mixed = facts_of(Output(0, seven + FUNCTION.format(9, "0x1234"), ""))
    (text,) = preflight.contradictions(worker(Gpu(model="h100-sxm", count=8)), None, mixed)
    assert text.startswith("GPUs are 7 x h100-sxm, 1 x 10de:1234, ")


def test_a_model_without_a_profile_is_known_by_its_number_alone() -> None:
    two = facts_of(Output(0, FUNCTION.format(1, "0x1234") + FUNCTION.format(2, "0x1234"), ""))
    assert preflight.contradictions(worker(Gpu(model="rtx-of-ours", count=2)), None, two) == []
    assert preflight.contradictions(worker(Gpu(model="rtx-of-ours", count=3)), None, two) != []
    assert preflight.contradictions(worker(Gpu(model="h100-sxm", count=2)), None, two) != []


def test_gpus_that_cannot_be_seen_are_said_to_be_so() -> None:
    for functions in (Output(1, "", "cd: no such folder"), Output(0, "nonsense", "")):
        (text,) = preflight.contradictions(worker(Gpu(model="t4", count=1)), None, facts_of(functions))
        assert text.startswith("its GPUs cannot be seen on the PCI bus: ")
        assert preflight.contradictions(worker(None), None, facts_of(functions)) == []


def test_without_systemd_a_plan_skips_units_and_an_apply_begins_nothing() -> None:
    whole = facts_of(Output(0, "", ""))
    assert preflight.as_planned(whole) is whole
    preflight.require_systemd("g1", whole)
    facts = replace(whole, first="runit")
    reason = limits.limit(preflight.as_planned(facts).limits, "unit:slurmd.service")
    assert reason == "systemd does not run here, but runit"
    with pytest.raises(preflight.PreflightError, match="g1: process 1 is runit, not systemd"):
        preflight.require_systemd("g1", facts)


def test_other_cpus_or_memory_are_contradicted(tmp_path: Path) -> None:
    facts = facts_of(Output(0, "", ""))
    known = facts.hardware.model_copy(update={"threads": 1})
    (text,) = preflight.contradictions(worker(None), known, facts)
    assert "'threads': 2" in text
    assert "'threads': 1" in text
    memory = facts.hardware.memory
    for share, told in ((0.995, 0), (1.005, 0), (0.95, 1), (1.5, 1)):
        other = facts.hardware.model_copy(update={"memory": int(memory * share)})
        assert len(preflight.contradictions(worker(None), other, facts)) == told


def test_limits_match_by_pattern_and_a_wrong_file_is_said() -> None:
    known = limits.parse('{"limits": [{"what": "sysctl:vm.*", "reason": "shared kernel"}]}')
    assert limits.limit(known, "sysctl:vm.swappiness") == "shared kernel"
    assert limits.limit(known, "sysctl:net.core.somaxconn") is None
    with pytest.raises(limits.LimitsError, match=r"limits.json"):
        limits.parse('{"limits": [{"what": "x"}]}')
    with pytest.raises(limits.LimitsError):
        limits.parse("")


def test_the_journal_keeps_runs_questions_and_states(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "site")
    journal.begin("r1", "apply", "ann@ctl", "d1", "2026-01-01T00:00:00+00:00")
    journal.add("r1", [(1.0, {"event": "op", "node": "n1", "title": "x"})])
    journal.end("r1", "2026-01-01T00:01:00+00:00", "pass")
    asked = [questions.command("cat /etc/os-release"), questions.unit("munge.service")]
    journal.remember_questions("*", {"n1": asked})
    journal.mark_applied(["n1"], "d1", "r1")
    again = Journal(tmp_path / "site")
    assert [(run["run"], run["verdict"]) for run in again.runs()] == [("r1", "pass")]
    assert again.questions("*") == {"n1": asked}
    assert again.applied() == {"n1": "d1"}
    assert (tmp_path / "site" / "journal.db").stat().st_mode & 0o077 == 0


def kept_of(journal: Journal) -> dict[str, int]:
    """Run -> number of its events that the journal has."""
    with closing(sqlite3.connect(journal.path)) as db:
        return dict(db.execute("SELECT run, count(*) FROM events GROUP BY run"))


def test_the_journal_forgets_the_events_of_all_but_the_last_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_STEP", 60)  # less than what there is to forget
    journal = Journal(tmp_path / "site")
    for number in range(1, 5):
        journal.begin(f"r{number}", "apply", "ann@ctl", "d1", f"2026-01-0{number}T00:00:00+00:00")
        journal.add(f"r{number}", [(1.0, {"event": "op", "node": "n1", "title": "x" * 400})] * (50 * number))
    whole = journal.path.stat().st_size
    journal.forget(keep=2)
    assert kept_of(journal) == {"r3": 150, "r4": 200}
    assert journal.path.stat().st_size < 0.8 * whole
    assert [run["run"] for run in journal.runs()] == ["r4", "r3", "r2", "r1"], (
        "that they were is not forgotten"
    )
    journal.forget(keep=2)
    assert kept_of(journal) == {"r3": 150, "r4": 200}


def test_a_run_that_ends_makes_room_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    site = Site(SiteFile.model_validate({"cluster": "tiny", "groups": {}}), tmp_path / "tiny.yml", {})
    with journaled(site, "apply") as applied:
        applied.add([(1.0, {"event": "note", "text": "what others do often is no reason to forget this"})])
    for number in range(KEEP + 2):
        monkeypatch.setattr(
            journal_module, "now", lambda n=number: f"2026-01-01T00:{n // 60:02}:{n % 60:02}+00:00"
        )
        with journaled(site, "plan") as entry:
            entry.add([(1.0, {"event": "note", "text": "x"})])
    kept = kept_of(entry.journal)
    assert len(kept) == KEEP + 1
    assert {entry.run, applied.run} <= set(kept)
