"""What a node cannot do, as whoever made it declared: containers and virtual machines have such limits.

/etc/provision/limits.json on the node: {"limits": [{"what": "sysctl:vm.*", "reason": "..."}]}. What is named there is
skipped with its reason, by deploys and by checks; it is never taken for healthy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase

PATH = "/etc/provision/limits.json"


class LimitsError(ValueError):
    """The file is there but cannot be understood."""


def command() -> str:
    """Shell text that prints the file, or one without limits where there is none."""
    return f"""if [ -e {PATH} ]; then cat {PATH}; else echo '{{"limits": []}}'; fi"""


def parse(text: str) -> dict[str, str]:
    """Patterns (with `*`) and their reasons, from what `command` prints. Raises LimitsError."""
    try:
        return {str(entry["what"]): str(entry["reason"]) for entry in json.loads(text)["limits"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise LimitsError(
            f"{PATH} is not of the form {{'limits': [{{'what', 'reason'}}]}}: {error}"
        ) from error


def limit(limits: Mapping[str, str], what: str) -> str | None:
    """The reason why `what` cannot be done, None when nothing stands against it."""
    return next((reason for pattern, reason in limits.items() if fnmatchcase(what, pattern)), None)
