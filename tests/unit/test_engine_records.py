"""What is kept: manifests on nodes, the journal, limits, facts of the first look."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision.engine import limits, manifest, preflight
from provision.engine.journal import Journal
from provision.engine.record import Owned

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


def test_limits_match_by_pattern_and_a_wrong_file_is_said() -> None:
    known = limits.parse('{"limits": [{"what": "sysctl:vm.*", "reason": "shared kernel"}]}')
    assert limits.limit(known, "sysctl:vm.swappiness") == "shared kernel"
    assert limits.limit(known, "sysctl:net.core.somaxconn") is None
    with pytest.raises(limits.LimitsError, match=r"limits.json"):
        limits.parse('{"limits": [{"what": "x"}]}')
    with pytest.raises(limits.LimitsError):
        limits.parse("")


def test_the_journal_keeps_runs_facts_and_states(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "site")
    journal.begin("r1", "apply", "ann@ctl", "d1", "2026-01-01T00:00:00+00:00")
    journal.add("r1", [(1.0, {"event": "op", "node": "n1", "title": "x"})])
    journal.end("r1", "2026-01-01T00:01:00+00:00", "pass")
    journal.remember_facts("*", {"n1": ["cat /etc/os-release"]})
    journal.mark_applied(["n1"], "d1", "r1")
    again = Journal(tmp_path / "site")
    assert [(run["run"], run["verdict"]) for run in again.runs()] == [("r1", "pass")]
    assert again.facts("*") == {"n1": ["cat /etc/os-release"]}
    assert again.applied() == {"n1": "d1"}
    assert (tmp_path / "site" / "journal.db").stat().st_mode & 0o077 == 0
