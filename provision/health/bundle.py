"""The agent as one file: a zip archive that Python runs, with nvidia-ml-py in it. Built alike from the same sources."""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import zipfile
from pathlib import Path

_MAIN = b"from provision.health.__main__ import run\nrun()\n"
_EPOCH = (2020, 1, 1, 0, 0, 0)  # the same archive whenever it is built


def contents() -> dict[str, bytes]:
    """The files of the agent, by their name in the archive. Raises ModuleNotFoundError without nvidia-ml-py."""
    package = Path(__file__).parent
    found = {
        f"provision/health/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*.py"))
    }
    found["provision/__init__.py"] = b""
    found["provision/profiles/health.json"] = (package.parent / "profiles" / "health.json").read_bytes()
    found["__main__.py"] = _MAIN
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("nvidia-ml-py is not installed here: it is part of the agent")
    found["pynvml.py"] = Path(spec.origin).read_bytes()
    return found


def archive(files: dict[str, bytes]) -> bytes:
    """A zip archive of `files` with a first line that starts Python; not compressed: it is read at each start."""
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env -S python3 -I\n")
    with zipfile.ZipFile(buffer, "a") as out:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            out.writestr(entry, content)
    return buffer.getvalue()


def build() -> bytes:
    """The agent for any Python from 3.9 on."""
    return archive(contents())


def compiled(source: str, target: str) -> None:
    """Write the archive `source` to `target` with byte code of this Python in place of the sources.

    Without it each start compiles nvidia-ml-py anew. Raises OSError, SyntaxError.
    """
    with zipfile.ZipFile(source) as archive_:
        files = {name: archive_.read(name) for name in archive_.namelist()}
    made: dict[str, bytes] = {}
    for name, content in files.items():
        if name.endswith(".py") and name != "__main__.py":
            made[name + "c"] = _byte_code(name, content)
        else:
            made[name] = content
    beside = f"{target}.{os.getpid()}"
    Path(beside).write_bytes(archive(made))
    os.chmod(beside, 0o755)
    os.replace(beside, target)


def _byte_code(name: str, source: bytes) -> bytes:
    """A .pyc that is not compared with any source."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    unchecked = (0b01).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked + bytes(8) + marshal.dumps(code)
