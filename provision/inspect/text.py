"""A file's bytes to the lines that a program printed: containers, encodings, colours, prefixes of launchers. Pure."""

from __future__ import annotations

import codecs
import json
import re
import textwrap
import zlib
from re import Pattern

_GZIP = b"\x1f\x8b"
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]")
# what a launcher or a collector of logs writes before each line
_PREFIXES: tuple[Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:\w{3} \w{3} +\d+ [\d:]+ \d{4})?\[(?:[\w.-]+@)?\d+,\d+\]<std(?:out|err)>: ?",  # mpirun --tag-output
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] ",  # a container's log file
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}Z (?!\S+ kernel: )",  # kubectl logs --timestamps
        r"(?:/[\w.+-]+)+:(?=\S| )",  # grep over files
        r">(?: |$)",  # a letter's quotation
        r" *\d{1,5}: ",  # srun --label
        r"\[\d{1,5}\] ",  # pdsh and others, by rank
        r"\d+[:-](?=\[|\w{3} +\d)",  # grep -n before a kernel's moment
    )
)
_HOST = re.compile(r"([A-Za-z][\w.-]*\d[\w.-]*):(?: (.*))?")


class Damaged(ValueError):
    """A container that cannot be opened."""


def decode(content: bytes, most: int) -> str:
    """The text in `content`; gzip and UTF-16 are undone. Bytes that are no text become replacement characters.

    most: so many bytes may come out of a compressed file. Raises Damaged for one that is cut off or larger.
    """
    if content.startswith(_GZIP):
        unpacker = zlib.decompressobj(wbits=31)
        try:
            content = unpacker.decompress(content, most + 1)
        except zlib.error as error:
            raise Damaged(f"not a sound gzip file ({error}); copy it again") from error
        if len(content) > most:
            raise Damaged(f"more than {most >> 20} MiB when unpacked; cut the time span")
        if not unpacker.eof:
            raise Damaged("a gzip file that is cut off; copy it again")
    for mark, name in _MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(name, errors="replace")
    return content.decode(errors="replace")


def clean(text: str) -> str:
    """`text` with plain line ends, without colours, spaces at ends and what a launcher wrote before every line."""
    text = _ESCAPE.sub("", _unwrapped(text.removeprefix("\ufeff").replace("\r\n", "\n")))
    text = re.sub(r"[ \t]+$", "", _unprefixed(text), flags=re.MULTILINE)
    return re.sub(r"\n+\Z", "\n", text)


def by_host(text: str) -> dict[str, str]:
    """Host -> its lines, where each line begins with a host's name (clush, pdsh); {} for other texts."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        told = _HOST.fullmatch(line)
        if told is None:
            return {}
        found.setdefault(told[1], []).append(told[2] or "")
    alike = [host for host, lines in found.items() if len(lines) > 1]
    return {host: "\n".join(lines) + "\n" for host, lines in found.items()} if alike else {}


def dedented(text: str) -> str:
    """`text` as it was before somebody indented all of it."""
    return textwrap.dedent(text)


def _unwrapped(text: str) -> str:
    """The lines of a log that a container runtime wrote as JSON objects."""
    if not text.startswith('{"log":'):
        return text
    told = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            return text
        if not isinstance(entry, dict) or not isinstance(entry.get("log"), str):
            return text
        told.append(entry["log"])
    return "".join(told)


def _unprefixed(text: str) -> str:
    lines = text.splitlines()
    full = [line for line in lines if line.strip()]
    if len(full) < 2:
        return text
    for prefix in _PREFIXES:
        # one line in ten may lack it: what a launcher itself says in between
        if prefix.match(full[0]) and sum(bool(prefix.match(line)) for line in full) * 10 >= len(full) * 9:
            bare = "\n".join(prefix.sub("", line, count=1) for line in lines)
            return _unprefixed(bare + ("\n" if text.endswith("\n") else ""))
    return text
