"""The encrypted copy of a cluster's secrets beside its site file: what a reinstalled head is given back.

`inventories/atlas.yml` has `inventories/atlas.secrets`, which may be committed: it is encrypted (Fernet: AES-128-CBC
with HMAC-SHA256) with a key that is never beside it, ~/.config/provision/atlas.key, made once. Keep that key where
you keep other keys; without it the copy cannot be read.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from provision import atomic
from provision.errors import InputError
from provision.site.models import Site


class EscrowError(InputError):
    """The copy cannot be read or written; says which file, and what to do."""


def copy_path(site: Site) -> Path:
    return site.path.with_suffix(".secrets")


def key_path(site: Site) -> Path:
    """Below XDG_CONFIG_HOME (~/.config)."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "provision" / f"{site.cluster}.key"


def load(site: Site) -> dict[str, bytes]:
    """The secrets in the copy; none where there is no copy yet. Raises EscrowError."""
    path, key = copy_path(site), key_path(site)
    if not path.exists():
        return {}
    if not key.exists():
        raise EscrowError(
            f"{path} is there, but not its key {key}: bring the key from the machine that wrote the copy, or move "
            "the copy away if the head still has its secrets"
        )
    try:
        content = key.read_bytes().strip(), path.read_bytes()
    except OSError as error:
        raise EscrowError(f"{error.filename}: cannot be read: {error.strerror}") from error
    try:
        document = json.loads(Fernet(content[0]).decrypt(content[1]))
        return {name: base64.b64decode(value) for name, value in document.items()}
    except (InvalidToken, ValueError, AttributeError) as error:
        raise EscrowError(f"{path} cannot be decrypted with {key}: is it the key of this cluster?") from error


def save(site: Site, secrets: Mapping[str, bytes]) -> None:
    """Write the copy where it differs, both files readable to their owner alone. Raises EscrowError."""
    if load(site) == dict(secrets):
        return
    key = key_path(site)
    text = json.dumps({name: base64.b64encode(value).decode() for name, value in sorted(secrets.items())})
    try:
        if not key.exists():
            key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic.write(key, Fernet.generate_key() + b"\n")
        atomic.write(copy_path(site), Fernet(key.read_bytes().strip()).encrypt(text.encode()) + b"\n")
    except OSError as error:
        raise EscrowError(f"{error.filename}: the copy cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise EscrowError(f"{key} is no key: bring it back from where you keep other keys") from error
