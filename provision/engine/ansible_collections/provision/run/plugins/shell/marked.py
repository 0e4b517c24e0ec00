"""Ansible's POSIX shell, with the run's mark in the environment of everything that it starts on a node.

A task goes on when its ssh connection ends; by the mark it is found again and ended when the run is cancelled.
"""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.shell.sh import ShellModule as PosixShell

DOCUMENTATION = """
name: marked
short_description: POSIX shell that marks what it starts
description: The shell of all nodes in `provision run`.
extends_documentation_fragment: shell_common
"""


class ShellModule(PosixShell):  # type: ignore[misc]  # Ansible has no types
    def env_prefix(self, **kwargs: Any) -> str:
        return str(super().env_prefix(PROVISION_RUN=os.environ["PROVISION_RUN"], **kwargs))
