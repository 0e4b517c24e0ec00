"""How checks are run; the nodes are root shells on this machine, as the user that runs the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from provision.components import registry
from provision.engine import limits
from provision.engine.remote import RemoteError, RootShell, local_shell
from provision.profiles import Distribution, UnsupportedDistribution
from provision.report.model import Finding, Verdict
from provision.site.lock import Lock
from provision.site.models import Node, Site, SiteFile
from provision.verify import run
from provision.verify.check import Check, Found, Target, expect, unknown
from provision.verify.checks import unit_names
from provision.verify.journaled import cut_short

GROUPS = {
    "head": {"hosts": "head-1", "roles": ["head"]},
    "gpu": {"hosts": "gpu-[1-2]", "roles": ["worker"]},
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    file = SiteFile.model_validate({"cluster": "test", "groups": GROUPS})
    return Site.from_file(file, tmp_path / "test.yml")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine's distribution is supported whatever it is, and it has no limits."""
    profile = Distribution.model_validate({"key": "this one", "family": "debian"})
    monkeypatch.setattr(run, "of_os_release", lambda text: profile)
    monkeypatch.setattr(limits, "PATH", str(tmp_path / "limits.json"))


Checks = Callable[..., None]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    """Makes the given checks those of the component `base`, in place of all others."""

    def use(*given: Check) -> None:
        monkeypatch.setattr(registry, "checks", lambda name: given if name == "base" else ())
        monkeypatch.setattr(run, "GENERIC_CHECKS", ())

    return use


def made(name: str, body: Callable[[Target], Found], role: str = "*", limit: str | None = None) -> Check:
    return Check(name, role, body, "base", limit)


def good(name: str = "good", role: str = "*", limit: str | None = None) -> Check:
    return made(name, lambda at: expect(at.host.check_output("echo yes"), "yes"), role, limit)


def verify(site: Site, **options: object) -> list[Finding]:
    return run.verify(
        site,
        Lock(),
        list(site.nodes.values()),
        reach=lambda site, node, password: local_shell(node.name),
        **options,  # type: ignore[arg-type]
    )


def told(findings: list[Finding], node: str) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings if finding.subject == node}


def test_every_node_gets_the_checks_of_its_roles_in_order(site: Site, checks: Checks) -> None:
    checks(good("on-all"), good("on-heads", "head"), good("on-workers", "worker"))
    assert [(finding.subject, finding.check) for finding in verify(site)] == [
        ("head-1", "node-reachable"),
        ("head-1", "on-all"),
        ("head-1", "on-heads"),
        ("gpu-1", "node-reachable"),
        ("gpu-1", "on-all"),
        ("gpu-1", "on-workers"),
        ("gpu-2", "node-reachable"),
        ("gpu-2", "on-all"),
        ("gpu-2", "on-workers"),
    ]


def test_nodes_are_checked_at_the_same_time(site: Site, checks: Checks) -> None:
    together = threading.Barrier(3, timeout=10)

    def meet(at: Target) -> Found:
        together.wait()
        return expect(1, 1)

    checks(made("meet", meet))
    assert {finding.verdict for finding in verify(site)} == {Verdict.PASS}


def test_a_check_that_raises_is_unknown_and_hides_no_other(site: Site, checks: Checks) -> None:
    def raises(at: Target) -> Found:
        at.host.check_output("echo reason >&2; exit 4")
        raise AssertionError

    checks(made("raises", raises), good())
    findings = verify(site)
    assert told(findings, "gpu-1") == {
        "node-reachable": Verdict.PASS,
        "raises": Verdict.UNKNOWN,
        "good": Verdict.PASS,
    }
    finding = next(finding for finding in findings if finding.check == "raises")
    assert finding.why is not None
    assert finding.why.startswith("AssertionError: Unexpected exit code 4")
    assert finding.action == "see what raises reads in checks.py of base"


def test_a_failing_check_hides_no_other(site: Site, checks: Checks) -> None:
    checks(made("count", lambda at: expect(7, 8, action="drain")), good())
    finding = next(finding for finding in verify(site) if finding.check == "count")
    assert (finding.verdict, finding.read, finding.expected, finding.action) == ("fail", "7", "8", "drain")


def test_a_check_that_answers_nothing_is_unknown(site: Site, checks: Checks) -> None:
    checks(made("forgetful", lambda at: None))  # type: ignore[arg-type, return-value]
    assert told(verify(site), "gpu-1")["forgetful"] is Verdict.UNKNOWN


def test_a_program_that_nobody_installed_is_a_failure_of_the_check_that_needs_it(
    site: Site, checks: Checks
) -> None:
    def reads(command: str) -> Callable[[Target], Found]:
        return lambda at: unknown(at.host.run(command).stderr.strip() or "silent")

    checks(
        made("gone", reads("timeout 5 no-such-program-here")),
        made("no-file", reads("cat /etc/no-such-file-here")),
        made("silent", reads("exit 3")),
        made("unreadable", reads("cat /etc")),
    )
    assert told(verify(site), "gpu-1") == {
        "node-reachable": Verdict.PASS,
        "gone": Verdict.FAIL,
        "no-file": Verdict.FAIL,
        "silent": Verdict.UNKNOWN,
        "unreadable": Verdict.UNKNOWN,
    }


def test_a_check_over_its_time_is_unknown_and_the_next_one_runs(
    site: Site, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHECK_SECONDS", 0.3)
    checks(made("slow", lambda at: expect(at.host.run("sleep 20").rc, 0)), good())
    begin = time.monotonic()
    findings = verify(site)
    assert time.monotonic() - begin < 10
    assert told(findings, "gpu-2") == {
        "node-reachable": Verdict.PASS,
        "slow": Verdict.UNKNOWN,
        "good": Verdict.PASS,
    }
    slow = next(finding for finding in findings if finding.check == "slow")
    assert "no answer within 0 s" in str(slow.why)


def test_when_a_nodes_time_is_over_the_checks_left_are_unknown(site: Site, checks: Checks) -> None:
    checks(made("slow", lambda at: expect(at.host.run("sleep 20").rc, 0)), good())
    findings = verify(site, timeout=0.3)
    assert told(findings, "head-1")["good"] is Verdict.UNKNOWN
    assert any("this node's time was over" in str(finding.why) for finding in findings)


def test_an_unreachable_node_is_one_unknown_finding_with_advice(site: Site, checks: Checks) -> None:
    def reach(site: Site, node: Node, password: str | None) -> RootShell:
        if node.name == "gpu-1":
            raise RemoteError("gpu-1: Connection refused", "is the node up?")
        return local_shell(node.name)

    checks(good(), good("second"))
    findings = run.verify(site, Lock(), list(site.nodes.values()), reach=reach)
    (finding,) = [finding for finding in findings if finding.subject == "gpu-1"]
    assert finding.check == "node-reachable"
    assert finding.verdict is Verdict.UNKNOWN
    assert finding.why == "Connection refused; 2 checks did not run"
    assert finding.action == "is the node up?"
    assert told(findings, "gpu-2")["second"] is Verdict.PASS


def test_a_node_lost_on_the_way_says_what_did_not_run(site: Site, checks: Checks) -> None:
    calls: list[str] = []

    def reach(site: Site, node: Node, password: str | None) -> RootShell:
        calls.append(node.name)
        if calls.count("gpu-2") > 1 and node.name == "gpu-2":
            raise RemoteError("gpu-2: No route to host")
        return local_shell(node.name)

    def end_shell(at: Target) -> Found:
        return expect(at.host.run("kill -9 $$").rc if at.node.name == "gpu-2" else 0, 0)

    checks(made("last-words", end_shell), good(), good("second"))
    findings = run.verify(site, Lock(), list(site.nodes.values()), reach=reach)
    lost = [finding for finding in findings if finding.subject == "gpu-2"]
    assert [(finding.check, finding.verdict) for finding in lost] == [
        ("node-reachable", Verdict.PASS),
        ("last-words", Verdict.UNKNOWN),
        ("node-reachable", Verdict.UNKNOWN),
    ]
    assert lost[-1].why == "No route to host; 2 checks did not run"


def test_what_a_node_cannot_do_is_skipped_with_its_reason(site: Site, checks: Checks, tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text(
        '{"limits": [{"what": "sysctl:vm.*", "reason": "read-only"}, {"what": "clock", "reason": "x"}],'
        ' "made_by": "somebody"}'
    )
    checks(good("swap", limit="sysctl:vm.swappiness"), good("net", limit="sysctl:net.core.somaxconn"))
    findings = verify(site)
    assert told(findings, "gpu-1") == {
        "node-reachable": Verdict.PASS,
        "swap": Verdict.SKIP,
        "net": Verdict.PASS,
    }
    assert next(finding for finding in findings if finding.check == "swap").why == "read-only"


@pytest.mark.parametrize("text", ["", "[]", '{"limits": [{"what": "clock"}]}', '{"limits": [{"what": ""}]}'])
def test_wrong_limits_are_unknown_and_name_the_file(
    site: Site, checks: Checks, tmp_path: Path, text: str
) -> None:
    (tmp_path / "limits.json").write_text(text)
    checks(good())
    findings = verify(site)
    assert told(findings, "gpu-1") == {"node-limits": Verdict.UNKNOWN}
    assert findings[0].source == str(tmp_path / "limits.json")


def test_an_unsupported_distribution_is_unknown(
    site: Site, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> Distribution:
        raise UnsupportedDistribution("plan9 1 is not supported; supported are: debian 13")

    monkeypatch.setattr(run, "of_os_release", refuse)
    checks(good())
    findings = verify(site)
    assert told(findings, "head-1") == {"node-distribution": Verdict.UNKNOWN}
    assert "is not supported" in str(findings[0].why)


def test_a_check_can_ask_another_node(site: Site, checks: Checks) -> None:
    def cross(at: Target) -> Found:
        head = at.on(at.site.head.name)
        return expect(head.check_output("echo %s", at.node.name), at.node.name)

    checks(made("cross", cross, "worker"))
    assert told(verify(site), "gpu-2")["cross"] is Verdict.PASS


def test_another_node_that_is_unreachable_is_none(site: Site, checks: Checks) -> None:
    def reach(site: Site, node: Node, password: str | None) -> RootShell:
        if node.name == "head-1":
            raise RemoteError("head-1: down")
        return local_shell(node.name)

    checks(made("cross", lambda at: expect(at.on("head-1"), None)))
    findings = run.verify(site, Lock(), [site.nodes["gpu-1"]], reach=reach)
    assert told(findings, "gpu-1")["cross"] is Verdict.PASS


def test_only_the_named_components_are_checked(site: Site, checks: Checks) -> None:
    checks(good())
    assert told(verify(site, components=["time"]), "gpu-1") == {"node-reachable": Verdict.PASS}


def test_progress_tells_each_finding_and_each_nodes_end(site: Site, checks: Checks) -> None:
    seen: list[tuple[str, str | None]] = []
    checks(good())
    verify(site, progress=lambda node, finding: seen.append((node, finding.check if finding else None)))
    assert [check for node, check in seen if node == "gpu-1"] == ["node-reachable", "good", None]


def test_an_interrupt_ends_the_commands_that_run(site: Site, checks: Checks) -> None:
    shells: list[RootShell] = []

    def reach(site: Site, node: Node, password: str | None) -> RootShell:
        shells.append(local_shell(node.name))
        return shells[-1]

    def stop(node: str, finding: Finding | None) -> None:
        if node == "gpu-1" and finding is not None:
            raise KeyboardInterrupt

    checks(made("slow", lambda at: expect(at.host.run("sleep 30").rc, 0)))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.verify(site, Lock(), list(site.nodes.values()), reach=reach, progress=stop)
    assert time.monotonic() - begin < 10
    for shell in shells:
        shell._process.wait(timeout=5)


def test_of_nodes_that_were_not_done_nothing_is_told(site: Site) -> None:
    def finding(node: str, verdict: Verdict) -> Finding:
        return Finding(verdict=verdict, check="gpu-count", subject=node)

    nodes = list(site.nodes.values())
    done, cut, *others = (node.name for node in nodes)
    told = [
        (done, finding(done, Verdict.FAIL)),
        (cut, finding(cut, Verdict.PASS)),
        (done, finding(done, Verdict.PASS)),
        (done, None),
    ]
    found = [(each.subject, each.check, each.verdict) for each in cut_short(nodes, told)]
    assert found == [
        (done, "gpu-count", Verdict.FAIL),
        (done, "gpu-count", Verdict.PASS),
        *((name, "verify-ended", Verdict.UNKNOWN) for name in (cut, *others)),
    ]


def test_the_document_names_the_worst_of_each_node(site: Site) -> None:
    def finding(node: str, verdict: Verdict, check: str) -> Finding:
        return Finding(verdict=verdict, check=check, subject=node, read="7", expected="8")

    findings = [
        finding("head-1", Verdict.PASS, "a"),
        finding("head-1", Verdict.SKIP, "b"),
        finding("gpu-1", Verdict.UNKNOWN, "a"),
        finding("gpu-1", Verdict.FAIL, "b"),
    ]
    document = run.document(site, list(site.nodes.values()), findings, 1.23456)
    assert document.verdict is Verdict.FAIL
    assert document.exit_status == 1
    assert document.nodes["head-1"].verdict is Verdict.PASS
    assert document.nodes["head-1"].reason is None
    assert document.nodes["gpu-1"].failed == 1
    assert document.nodes["gpu-1"].reason == "b: 7, expected 8"
    assert document.nodes["gpu-2"].verdict is Verdict.UNKNOWN  # nothing found is never healthy
    assert document.seconds == 1.235


def test_failed_units() -> None:
    listing = (
        "slurmd.service loaded failed failed Slurm node daemon\nmunge.service  loaded failed failed MUNGE\n"
    )
    assert unit_names(listing) == ["munge.service", "slurmd.service"]
    assert unit_names("\n") == []
