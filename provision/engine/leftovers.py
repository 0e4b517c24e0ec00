"""What a run leaves: processes, found by the run's mark in their environment, and its folder.

Ansible and ssh put their children into sessions of their own, and a task on a node goes on when its connection
ends. So neither parents nor process groups tell what belongs to a run; an environment variable does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.engine.remote import RemoteError, connect

if TYPE_CHECKING:
    from provision.site.models import Site

MARK = "PROVISION_RUN"


@contextmanager
def private_directory(run: str) -> Iterator[Path]:
    """The folder of a run, for this user alone, gone afterwards; in memory where there is such a place."""
    directory = _directory(run)
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def remove_directory(run: str) -> None:
    """Remove the folder of a run whose process was killed."""
    if _directory(run).exists():
        shutil.rmtree(_directory(run))


def _directory(run: str) -> Path:
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    base = next(place for place in places if os.access(place, os.W_OK | os.X_OK))
    return base / f"provision-run-{run}"


def marked(run: str) -> list[int]:
    """Processes of this user on this machine that belong to `run`."""
    wanted = f"{MARK}={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or just gone
        if wanted in variables:
            found.append(int(entry.name))
    return found


def end_marked(run: str, *, grace: float = 3.0, limit: float = 10.0) -> list[int]:
    """End what is left of `run` here: TERM, after `grace` seconds KILL. What is still there after `limit` seconds."""
    started = time.monotonic()
    while left := marked(run):
        waited = time.monotonic() - started
        if waited > limit:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if waited < grace else signal.SIGKILL)
        time.sleep(0.1)
    return left


def end_on_node(run: str) -> str:
    """Shell text, for root on a node, that ends what is left of `run`; fails with the process ids of what stays."""
    mark = shlex.quote(f"{MARK}={run}")
    return f"""found() {{ grep -lzx -- {mark} /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }}
for s in TERM TERM KILL KILL KILL; do
  p=$(found); [ -n "$p" ] || exit 0
  kill -$s $p 2>/dev/null
  sleep 0.5
done
p=$(found); [ -z "$p" ] || {{ echo "still there:" $p >&2; exit 1; }}"""


def end_on_nodes(
    site: Site, nodes: Sequence[str], run: str, sudo_password: str | None
) -> Iterator[dict[str, Any]]:
    """End on `nodes`, and on the head to which tasks are delegated, what a run that was cut short started there.

    Yields a warning for each node where that is not certain.
    """
    script = end_on_node(run)

    def end(name: str) -> str | None:
        try:
            shell = connect(site, site.nodes[name], sudo_password=sudo_password)
            try:
                output = shell.run(script, timeout=30)
            finally:
                shell.close()
        except RemoteError as error:
            return f"what the playbook started may still run there: {error}"
        return None if output.ok else f"what the playbook started still runs there: {output.stderr.strip()}"

    names = [*nodes, *({site.head.name} - set(nodes))]
    with ThreadPoolExecutor(max_workers=32) as pool:
        for name, problem in zip(names, pool.map(end, names), strict=True):
            if problem:
                yield {"event": "warning", "node": name, "text": problem}
