"""What the controller hands to a worker process, and how both talk.

The job travels pickled on the worker's standard input, between two processes of the same program and user. After it
come lines of JSON: outcomes of other workers' nodes. The worker answers with lines of JSON on its standard output:
events, which are shown and journaled, and private words ("secrets"), which are only passed on to other workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from provision.site.lock import Lock
from provision.site.models import Site


@dataclass(frozen=True)
class Job:
    """The share of one run that one worker process does."""

    run: str  # identifier of the run
    holder: str  # "user@host", for the lock on nodes
    site: Site
    lock: Lock
    nodes: Sequence[str]  # of this worker
    all_nodes: Sequence[str]  # of the whole run
    components: Sequence[str] | None
    forecast: bool
    with_secrets: bool  # this worker talks to the head for the secrets
    sudo_password: str | None = field(default=None, repr=False)
    escrow: Mapping[str, bytes] = field(
        default_factory=dict, repr=False
    )  # secrets of the copy beside the site file
    facts: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # node -> fact commands read by its last run
    timeout: float | None = None  # seconds at most for an operation; None: what each operation is given
    reboot: bool = True  # nodes that must reboot do so; False: they only say it
    admitted: frozenset[str] = frozenset()
