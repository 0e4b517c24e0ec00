"""What the controller hands to the process that runs a playbook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.site.models import Site


@dataclass(frozen=True)
class PlaybookJob:
    """One run of one playbook."""

    run: str
    site: Site
    playbook: Path  # absolute
    nodes: Sequence[str]
    variables: dict[str, Any]  # win over the site file's
    check: bool
    timeout: int | None  # seconds
    forks: int
    sudo_password: str | None = field(default=None, repr=False)
