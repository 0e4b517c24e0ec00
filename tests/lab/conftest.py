"""Fixtures for tests on real nodes. They need root and what `provision lab up` needs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.lab import Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing here can be tried without root."""
    if os.geteuid() != 0:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="a lab needs root on this machine"))


@pytest.fixture(scope="session", autouse=True)
def _one_session_at_a_time() -> Iterator[None]:
    """Tests on nodes of one checkout run one after another: a second session waits for the first."""
    folder = os.open(Path(__file__).parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    yield
    os.close(folder)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The checkout's lab with a head and two workers: the one that runs, or one made for this session."""
    cluster = Lab()
    there = bool(cluster.nodes)
    cluster.up()
    yield cluster
    if not there:
        cluster.down()


@pytest.fixture
def fresh(lab: Lab) -> Lab:
    """The lab with nothing installed or configured on its nodes since they were made."""
    lab.up(fresh=True)
    return lab
