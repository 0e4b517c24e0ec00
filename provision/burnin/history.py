"""What each node came to in its last burn-in, kept on the head for monitoring: /var/lib/provision/burnin/NODE.json.

Slurm's exporter makes metrics of it, and Prometheus the history.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from provision.burnin.judge.speed import readings
from provision.burnin.result import BurninResult
from provision.engine import headstate
from provision.engine.headstate import HeadError, Kept
from provision.engine.remote import RootShell
from provision.report.model import Document, NodeResult

DETAIL = "burned"  # the name of `records` in the details of a document
_WRITE = """set -e; install -d -m 755 {folder}; t=; trap 'rm -f "$t"' EXIT
while read -r node record; do
t=$(mktemp {folder}/.new.XXXXXX); printf '%s\\n' "$record" >"$t"
chmod 644 "$t"; sync "$t"; mv -f "$t" "{folder}/$node.json"
done"""


def folder() -> str:
    """Where the head keeps them."""
    return f"{headstate.DIRECTORY}/burnin"


def figures(result: BurninResult) -> dict[str, dict[str, float]]:
    """Node -> measure -> its slowest number; the all-reduce of the largest message is that of all nodes together."""
    found: dict[str, dict[str, float]] = {rank.host: {} for rank in result.ranks}
    reduced = [
        row for row in result.collectives if row.operation == "all_reduce" and row.busbw_gbs is not None
    ]
    if reduced:
        largest = max(reduced, key=lambda row: row.bytes)
        assert largest.busbw_gbs is not None
        for of_node in found.values():
            of_node["all_reduce_busbw_gbs"] = largest.busbw_gbs
    for reading in readings(result):
        of_node = found[reading.node]
        of_node[reading.measure] = min(reading.value, of_node.get(reading.measure, reading.value))
    return found


def records(
    nodes: Mapping[str, NodeResult], ran: Collection[str], measured: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """What is kept of the nodes that `ran`."""
    return {
        name: {
            "node": name,
            "at": round(time.time()),
            "verdict": str(nodes[name].verdict),
            "figures": dict(measured.get(name, {})),
        }
        for name in sorted(ran)
    }


def write(shell: RootShell, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep records on the head, each whole or not at all. Raises HeadError."""
    lines = "".join(f"{name} {json.dumps(record)}\n" for name, record in found.items())
    output = shell.run(_WRITE.format(folder=folder()), stdin=lines.encode())
    if not output.ok:
        raise HeadError(f"{shell.name}: cannot write {folder()}: {output.stderr.strip()}")


def kept(document: Document) -> list[Kept]:
    """What the burn-in of `document` came to; nothing where no node was burned in."""
    found = document.details.get(DETAIL)
    if not found:
        return []
    write_found = partial(write, found=found)
    return [Kept(write_found, "burnin-history", "monitoring does not know of this burn-in", folder())]
