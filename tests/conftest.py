"""What all tests share: what is collected, and where chance comes from.

`pytest` runs tests/unit. Tests on nodes (tests/lab) and on GPUs (tests/gpu) run only where one of the paths given
leads into their folder. Chance has one seed, shown at the top of each run; --hypothesis-seed=N gives it again.
Property tests try few examples; --hypothesis-profile=thorough tries many.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import settings

# No deadlines: a test that is right on an idle machine must be right on a busy one.
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)

HERE = Path(__file__).parent
BY_NAME_ONLY = (HERE / "lab", HERE / "gpu")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run, and few examples, unless others were given."""
    if config.option.hypothesis_profile is None:
        config.option.hypothesis_profile = "quick"
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.hypothesis_seed} (again with --hypothesis-seed={config.option.hypothesis_seed})"


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Each test starts from the run's seed, whatever ran before it."""
    random.seed(request.config.option.hypothesis_seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the folders that need nodes or GPUs, unless a path given leads there."""
    given = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    for folder in BY_NAME_ONLY:
        inside = collection_path == folder or folder in collection_path.parents
        if inside and not any(path == folder or folder in path.parents for path in given):
            return True
    return None
