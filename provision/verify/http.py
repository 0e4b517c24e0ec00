"""Asks a service by HTTP from the node that it runs on, with the node's own curl."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Any

_REFUSED = 7  # curl: nothing listens there
_CURL = "curl --silent --show-error --noproxy '*' --globoff"


@dataclass(frozen=True)
class Answer:
    """What a service said: its text, or why there is none."""

    text: str | None
    error: str = ""
    refused: bool = False  # nothing listens there


def get(host: Any, address: str, config: str, seconds: int = 20) -> Answer:
    """The page at `address`; `config` is a curl configuration on the node, by which passwords stay out of arguments."""
    # curl alone does not say whether its configuration is missing or cannot be read
    words = f"--fail --max-time {seconds} --config {config} {quote(address)}"
    return _asked(host, words, first=f"cat {config} >/dev/null && ")


def status(host: Any, address: str, trust: str) -> Answer:
    """The status that a stranger gets; `trust` is curl's option for the certificate: --insecure, --cacert FILE."""
    return _asked(
        host, f"{trust} --max-time 20 --output /dev/null --write-out '%{{http_code}}' {quote(address)}"
    )


def _asked(host: Any, words: str, first: str = "") -> Answer:
    result = host.run(f"{first}{_CURL} {words}")
    if result.rc == 0:
        return Answer(result.stdout)
    said = result.stderr.strip() or f"curl: exit status {result.rc}"
    return Answer(None, said, refused=result.rc == _REFUSED)
