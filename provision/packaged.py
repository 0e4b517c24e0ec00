"""Data that is part of this program: YAML files beside the code."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

# libyaml where this PyYAML was built with it: the same answers, ten times as fast
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def data(package: str, name: str) -> Any:
    """The content of the YAML file `name` of `package` ("provision.profiles", "gpus.yml")."""
    return yaml.load(files(package).joinpath(name).read_bytes(), Loader=_LOADER)
