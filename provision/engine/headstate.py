"""What lives on the head below /var/lib/provision: secrets, for root alone, and the acceptance of nodes, for all.

Functions take the head's root shell. Secrets that exist are adopted before any is made anew, so that a cluster
which is already running keeps its keys, and a controller that was reinstalled finds them again.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from provision.engine.deploy import Secret
from provision.engine.remote import RemoteError, RootShell, connect
from provision.engine.replace import replace
from provision.report.model import Document, Finding, Verdict, worst

if TYPE_CHECKING:
    from provision.site.models import Site

DIRECTORY = "/var/lib/provision"
State = Literal["new", "configured", "verified", "burned-in", "admitted", "quarantined"]


class HeadError(Exception):
    """The head's own records cannot be read or written."""


class Acceptance(BaseModel):
    """How far one node has come, and why it is where it is."""

    model_config = ConfigDict(extra="forbid")

    state: State
    since: str  # ISO 8601, UTC
    reason: str | None = None


def silent(site: Site, error: Exception) -> Finding:
    """What it means for a verb that the head could not be talked to, or its records not be read."""
    return Finding(
        verdict=Verdict.UNKNOWN,
        check="head-answers",
        subject=site.head.name,
        why=str(error).removeprefix(f"{site.head.name}: "),
        action=getattr(error, "advice", None),
    )


@dataclass(frozen=True)
class Kept:
    """Something that a run keeps on the head, and what is told of by `check` where that cannot be done."""

    write: Callable[[RootShell], None]  # raises HeadError
    check: str
    action: str
    source: str


def keep(site: Site, document: Document, things: Sequence[Kept], *, sudo_password: str | None) -> None:
    """Keep `things` on the head, in one session; what could not be kept `document` says."""
    left = list(things)
    try:
        shell = connect(site, site.head, sudo_password=sudo_password)
        try:
            while left:
                try:
                    left[0].write(shell)
                except HeadError as error:
                    _not_kept(site, document, left[0], error)
                left.pop(0)
        finally:
            shell.close()
    except RemoteError as error:
        for thing in left:
            _not_kept(site, document, thing, error)


def _not_kept(site: Site, document: Document, thing: Kept, error: Exception) -> None:
    finding = Finding(
        verdict=Verdict.WARN,
        check=thing.check,
        subject=site.head.name,
        why=str(error),
        action=thing.action,
        source=thing.source,
    )
    document.findings.append(finding)
    document.verdict = worst([document.verdict, Verdict.WARN])


def read_secrets(shell: RootShell, wanted: Mapping[str, Secret]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The secrets that exist on the head: those in our own store, and those that a service there already has.

    Raises HeadError where one is there but cannot be read: it must not be made anew.
    """
    sources = [
        (secret, path, own)
        for secret in wanted.values()
        for path, own in [
            (f"{DIRECTORY}/secrets/{secret.name}", True),
            *((path, False) for path in secret.adopt),
        ]
    ]
    commands = [f"[ ! -s {quote(path)} ] || base64 -w0 <{quote(path)}" for _, path, _ in sources]
    stored: dict[str, bytes] = {}
    adopted: dict[str, bytes] = {}
    for (secret, path, own), output in zip(sources, shell.run_many(commands), strict=True):
        if not output.ok:
            raise HeadError(f"{shell.name}: cannot read {path}: {output.stderr.strip()}")
        if value := _value(secret, base64.b64decode(output.stdout), own=own):
            (stored if own else adopted).setdefault(secret.name, value)
    return stored, adopted


def write_secret(shell: RootShell, name: str, value: bytes) -> None:
    """Store one secret, 0600 below a 0700 folder; it travels on the shell's input."""
    folder = f"{DIRECTORY}/secrets"
    script = replace(f"{folder}/{name}", mode="600")
    output = shell.run(f"install -d -m 700 {folder} || exit 1\n{script}", stdin=value)
    if not output.ok:
        raise HeadError(f"{shell.name}: cannot store the secret {name}: {output.stderr.strip()}")


def read_acceptance(shell: RootShell) -> dict[str, Acceptance]:
    """The state of every node the head knows; none on a bare head. Raises HeadError when it cannot be read."""
    path = f"{DIRECTORY}/acceptance.json"
    output = shell.run(f"if [ -e {path} ]; then cat {path}; else echo '{{}}'; fi")
    if not output.ok:
        raise HeadError(f"{shell.name}: cannot read {path}: {output.stderr.strip()}")
    try:
        document = json.loads(output.stdout)
        return {node: Acceptance.model_validate(entry) for node, entry in document.items()}
    except (ValueError, AttributeError) as error:
        raise HeadError(f"{shell.name}: {path} is damaged: {error}; restore it from a backup") from error


def write_acceptance(shell: RootShell, states: Mapping[str, Acceptance]) -> None:
    """Replace the record of all nodes, atomically."""
    text = json.dumps({node: state.model_dump() for node, state in sorted(states.items())}, indent=1)
    output = shell.run(replace(f"{DIRECTORY}/acceptance.json", mode="644"), stdin=text.encode())
    if not output.ok:
        raise HeadError(f"{shell.name}: cannot write the acceptance of nodes: {output.stderr.strip()}")


def _value(secret: Secret, content: bytes, *, own: bool) -> bytes | None:
    """The secret in a file's content; a service's configuration is searched by the secret's pattern."""
    if own or secret.pattern is None:
        return content
    match = re.search(secret.pattern, content.decode("utf-8", "replace"), re.MULTILINE)
    return match.group(1).encode() if match else None
