"""What was read, whatever it was read from: NVML, sysfs, or a file that somebody recorded.

A device (node, GPU, port, disk) is a name and values under the names that `nvidia-smi --query-gpu` or the kernel
use. A value that is not there says why: nobody asked for it, it does not exist here, or it could not be read. Taking
such a value raises, so a check need not ask for each of the three, and none of them can be taken for a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Missing(Exception):
    """A value that is not there; the message says why."""


class Untold(Missing):
    """The source is silent about it: a recording of something else, or of an older release."""


class NotApplicable(Missing):
    """It does not exist on this device."""


class Unwanted(NotApplicable):
    """The site expects nothing of it."""


class Unreadable(Missing):
    """It could not be read."""


@dataclass(frozen=True)
class Absent:
    """Stands for a value that does not exist on this device."""

    why: str


@dataclass(frozen=True)
class Unread:
    """Stands for a value that could not be read."""

    why: str


@dataclass
class Device:
    """A thing and what was read of it."""

    subject: str
    values: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def __getitem__(self, name: str) -> Any:
        """The value of `name`. Raises Untold, NotApplicable, Unreadable."""
        if name not in self.values:
            raise Untold(f"{self.source or 'the source'} does not tell {name}")
        value = self.values[name]
        if isinstance(value, Absent):
            raise NotApplicable(value.why)
        if isinstance(value, Unread):
            raise Unreadable(value.why)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, or `default` where there is none, for whatever reason."""
        value = self.values.get(name, default)
        return default if isinstance(value, (Absent, Unread)) else value

    def first(self, *names: str) -> Any:
        """The value of the first of `names` that has one. Raises as the most telling of them."""
        raised = []
        for name in names:
            try:
                return self[name]
            except Missing as missing:
                raised.append(missing)
        raise max(raised, key=lambda missing: (Untold, NotApplicable, Unreadable).index(type(missing)))

    def told(self, name: str) -> bool:
        """Whether the source says anything about `name`, also that it cannot be read."""
        return name in self.values


# ---- recordings: readings as JSON and back


def plain(value: Any) -> Any:
    """`value` with devices and missing values as JSON can hold them."""
    if isinstance(value, Device):
        return {"subject": value.subject, "source": value.source, "values": plain(value.values)}
    if isinstance(value, Absent):
        return {"absent": value.why}
    if isinstance(value, Unread):
        return {"unread": value.why}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def revived(value: Any) -> Any:
    """What `plain` was given; lists come back as lists."""
    if isinstance(value, list):
        return [revived(each) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"absent"} and isinstance(value["absent"], str):
        return Absent(value["absent"])
    if set(value) == {"unread"} and isinstance(value["unread"], str):
        return Unread(value["unread"])
    if set(value) == {"subject", "source", "values"} and isinstance(value["values"], dict):
        return Device(str(value["subject"]), revived(value["values"]), str(value["source"]))
    return {key: revived(each) for key, each in value.items()}
