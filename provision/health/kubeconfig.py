"""How a node reaches the API server of its Kubernetes: the kubeconfig of its kubelet, or of another account.

Read are JSON, and YAML in block form as client-go, kubeadm and k3s write it. Anything else is refused by name, so that
nothing is ever taken for what it is not.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOT_UNDERSTOOD = {
    "cluster": ("proxy-url", "tls-server-name"),
    "user": ("exec", "auth-provider", "username"),
}


class KubeconfigError(Exception):
    """The file cannot be used; the message names it, and what is wrong."""


@dataclass(frozen=True)
class Access:
    """One API server, and who one is there. Certificates and key as PEM."""

    server: str  # https://HOST:PORT
    authority: str
    certificate: str | None = None
    key: str | None = None
    token: str | None = None


def load(path: Path) -> Access:
    """The access that the kubeconfig at `path` gives in its current context. Raises KubeconfigError."""
    try:
        return _access(parsed(path.read_text()), path.parent)
    except (OSError, ValueError) as error:
        raise KubeconfigError(f"{path}: {error}") from error


def _access(document: Any, folder: Path) -> Access:
    if not isinstance(document, Mapping):
        raise ValueError("not a kubeconfig: no mapping")
    context = _named(document, "context", _text(document, "current-context"))
    cluster = _named(document, "cluster", _text(context, "cluster"))
    user = _named(document, "user", _text(context, "user"))
    for kind, found in (("cluster", cluster), ("user", user)):
        for key in _NOT_UNDERSTOOD[kind]:
            if found.get(key):
                raise ValueError(f"{kind}: {key} is not understood: name one with a certificate or a token")
    server = _text(cluster, "server")
    if not server.startswith("https://"):
        raise ValueError(f"server {server}: expected https://")
    if cluster.get("insecure-skip-tls-verify") in (True, "true"):
        raise ValueError("insecure-skip-tls-verify: the server would not be known")
    authority = _pem(cluster, "certificate-authority", folder)
    if authority is None:
        raise ValueError("cluster: no certificate-authority")
    certificate, private = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    token = user.get("token") or _content(user, "tokenFile", folder)
    if (certificate is None or private is None) and not token:
        raise ValueError("user: neither a client certificate with its key nor a token")
    return Access(server, authority, certificate, private, str(token).strip() if token else None)


def _named(document: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    for each in document.get(f"{kind}s") or ():
        if isinstance(each, Mapping) and each.get("name") == name and isinstance(each.get(kind), Mapping):
            found: Mapping[str, Any] = each[kind]
            return found
    raise ValueError(f"no {kind} {name}")


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"no {key}")
    return value


def _content(found: Mapping[str, Any], key: str, folder: Path) -> str | None:
    return (folder / str(found[key])).read_text() if found.get(key) else None


def _pem(found: Mapping[str, Any], key: str, folder: Path) -> str | None:
    """What stands in KEY-data, or in the file that KEY names."""
    written = found.get(f"{key}-data")
    if not written:
        return _content(found, key, folder)
    try:
        return base64.b64decode(str(written), validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError(f"{key}-data: not base64 of PEM") from None


# ---- YAML in block form


_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""")


@dataclass
class _Line:
    number: int
    indent: int
    text: str


def parsed(text: str) -> Any:
    """Mappings, lists and texts. Raises ValueError with the line for what is not JSON, nor YAML in block form."""
    if text.lstrip().startswith("{"):
        return json.loads(text)
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip(" ")
        if content and not content.startswith("#") and content != "---":
            lines.append(_Line(number, len(line) - len(line.lstrip(" ")), content))
    if not lines:
        raise ValueError("empty")
    try:
        found, rest = _block(lines)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if rest:
        raise ValueError(f"line {rest[0].number}: not in line with what stands before it")
    return found


def _block(lines: list[_Line]) -> tuple[Any, list[_Line]]:
    """What begins at the first of `lines`, and the lines after it."""
    first = lines[0]
    if _is_item(first):
        return _list(lines)
    if _key(first.text) is None:
        return _scalar(first, first.text), lines[1:]
    return _mapping(lines)


def _list(lines: list[_Line]) -> tuple[list[Any], list[_Line]]:
    indent, found = lines[0].indent, []
    while lines and lines[0].indent == indent and _is_item(lines[0]):
        line = lines[0]
        content = line.text[1:].lstrip(" ")
        if not content:
            raise ValueError(f"line {line.number}: an item without content")
        # what follows the hyphen stands as deep as it is written
        inner = _Line(line.number, indent + len(line.text) - len(content), content)
        item, lines = _block([inner, *lines[1:]])
        found.append(item)
    return found, lines


def _mapping(lines: list[_Line]) -> tuple[dict[str, Any], list[_Line]]:
    indent = lines[0].indent
    found: dict[str, Any] = {}
    while lines and lines[0].indent == indent and not _is_item(lines[0]):
        line, lines = lines[0], lines[1:]
        split = _key(line.text)
        if split is None:
            raise ValueError(f"line {line.number}: expected a key")
        key, content = split
        if key in found:
            raise ValueError(f"line {line.number}: {key} stands there twice")
        if content:
            found[key] = _scalar(line, content)
        elif lines and (lines[0].indent > indent or (lines[0].indent == indent and _is_item(lines[0]))):
            found[key], lines = _block(lines)
        else:
            found[key] = None
    return found, lines


def _is_item(line: _Line) -> bool:
    return line.text == "-" or line.text.startswith("- ")


def _key(text: str) -> tuple[str, str] | None:
    """Key and what follows it; None where there is no key."""
    quoted = _QUOTED.match(text)
    if quoted is None:
        key, colon, content = f"{text} ".partition(": ")
    else:
        key, (colon, content) = _unquoted(quoted[0]), (text[quoted.end() :][:1], text[quoted.end() + 1 :])
        if content and not content.startswith(" "):
            return None
    content = content.strip(" ")
    return (key.strip(" "), "" if content.startswith("#") else content) if colon.startswith(":") else None


def _scalar(line: _Line, text: str) -> Any:
    if text in ("{}", "[]"):
        return json.loads(text)
    if text in ("null", "~"):
        return None
    if text[0] in "\"'":
        quoted = _QUOTED.match(text)
        if quoted is None or text[quoted.end() :].partition(" #")[0].strip(" "):
            raise ValueError(f"line {line.number}: a text in quotes that does not end")
        return _unquoted(quoted[0])
    if text[0] in "{[|>&*!%@`":
        raise ValueError(f"line {line.number}: {text[:20]}: only YAML in block form is understood")
    return text.partition(" #")[0].rstrip(" ")


def _unquoted(text: str) -> str:
    """Raises ValueError for an escape that JSON has not."""
    return text[1:-1].replace("''", "'") if text.startswith("'") else str(json.loads(text))
