"""Fixtures for tests on real nodes. They need root and what `provision lab up` needs."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from provision.lab import Lab
from tests.lab.admitted import SNAPSHOT, Admitted
from tests.lab.command import provision

BARE = "bare"  # the snapshot of nodes as they were made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing here can be tried without root."""
    if os.geteuid() != 0:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="a lab needs root on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What fails in a run of more than an hour is told as it happens, not at the end."""
    report = yield
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and reporter is not None:
        reporter.write_line(f"\n{item.nodeid} failed in {report.when}:\n{report.longreprtext}")
    return report


@pytest.fixture(scope="session", autouse=True)
def _one_session_at_a_time() -> Iterator[None]:
    """Tests on nodes of one checkout run one after another: a second session waits for the first."""
    folder = os.open(Path(__file__).parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    yield
    os.close(folder)


@pytest.fixture(scope="session")
def _lab() -> Iterator[Lab]:
    """The checkout's lab with a head and two workers, made anew; it stays where there was one."""
    cluster = Lab()
    there = bool(cluster.nodes)
    cluster.up(fresh=True)
    cluster.snapshot(BARE)
    yield cluster
    if not there:
        cluster.down()


@pytest.fixture(scope="module")
def lab(_lab: Lab) -> Lab:
    """The lab; at the start of each module nothing has been configured on its nodes."""
    _lab.restore(BARE)
    return _lab


@pytest.fixture(scope="session")
def _admitted(_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Admitted:
    """The cluster of inventories/lab.yml on fresh nodes, admitted, its disks kept."""
    folder = tmp_path_factory.mktemp("admitted")
    text, found = re.subn(
        r"(?m)^(\s*ssh_config:).*$",
        rf"\1 {_lab.paths.ssh_config}",
        Path("inventories/lab.yml").read_text(),
    )
    assert found == 1
    (folder / "lab.yml").write_text(text)
    _lab.restore(BARE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        up = provision("up", str(folder / "lab.yml"))
    assert up.rc == 0, up
    _lab.snapshot(SNAPSHOT)
    return Admitted(_lab, str(folder / "lab.yml"), whole=True)


@pytest.fixture(scope="module")
def _admitted_in_module(_admitted: Admitted) -> Iterator[Admitted]:
    """Modules that come between do to the lab what they want."""
    yield _admitted
    _admitted.whole = False


@pytest.fixture
def admitted(_admitted_in_module: Admitted, monkeypatch: pytest.MonkeyPatch) -> Admitted:
    """An admitted cluster, whole."""
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(_admitted_in_module.site).parent / "state"))
    _admitted_in_module.give_back()
    return _admitted_in_module
