"""The lab: a throwaway cluster of systemd containers on this machine, with faults to inject."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provision.lab.command import InputError, LabError
    from provision.lab.lab import Lab

__all__ = ["InputError", "Lab", "LabError"]
_HOMES = {"InputError": "command", "Lab": "lab", "LabError": "command"}


def __getattr__(name: str) -> Any:
    """Import on first use: each node's supervisor is a small process out of this package."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"provision.lab.{_HOMES[name]}"), name)
