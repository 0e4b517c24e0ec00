"""How long a bring-up takes on a fresh lab, and what running it again costs. Ratios travel, seconds do not.

    python -m benchmarks.bringup [--workers 2] [--repeat 3]

Uses a lab of its own (.lab-benchmark) and the site of inventories/lab.yml; takes the lab down at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
STATE = ROOT / ".lab-benchmark"
PROVISION = [sys.executable, "-m", "provision"]


@dataclass(frozen=True)
class Figure:
    """One measurement: seconds of wall clock, median where it was taken several times."""

    what: str
    seconds: float
    changed: int
    times: int = 1


def run(*words: str) -> tuple[float, int]:
    """Run a verb, which must succeed: its wall clock in seconds and the number of changes it tells of."""
    started = time.monotonic()
    done = subprocess.run(
        [*PROVISION, *words, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    if done.returncode != 0:
        raise SystemExit(f"provision {' '.join(words)}: exit status {done.returncode}\n{done.stdout}")
    return seconds, sum(node["changed"] for node in json.loads(done.stdout)["nodes"].values())


def measure(what: str, *words: str, repeat: int = 1) -> Figure:
    print(f"{what}: provision {' '.join(words)}", file=sys.stderr, flush=True)
    runs = [run(*words) for _ in range(repeat)]
    return Figure(what, round(statistics.median(s for s, _ in runs), 2), max(c for _, c in runs), repeat)


def site_file(folder: Path, workers: int) -> Path:
    """inventories/lab.yml for the benchmark's lab and number of workers."""
    text = (ROOT / "inventories/lab.yml").read_text()
    text = re.sub(r"(?m)^(\s*ssh_config:).*$", rf"\1 {STATE}/ssh_config", text)
    text = text.replace("lab-gpu-[1-2]", f"lab-gpu-[1-{workers}]")
    text = text.replace("10.77.0.[11-12]", f"10.77.0.[11-{10 + workers}]")
    path = folder / "lab.yml"
    path.write_text(text)
    return path


def bring_up(workers: int, repeat: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="provision-benchmark-") as folder:
        site = str(site_file(Path(folder), workers))
        os.environ |= {"PROVISION_LAB_DIR": str(STATE), "XDG_STATE_HOME": f"{folder}/state"}
        try:
            return [
                measure("lab up, layers cached", "lab", "up", "--fresh", "--workers", str(workers)),
                measure("first plan, bare nodes", "plan", site),
                measure("first apply", "apply", site),
                measure("second apply", "apply", site, repeat=repeat),
                measure("plan, nothing to do", "plan", site, repeat=repeat),
                measure("verify", "verify", site, repeat=repeat),
                measure("up to admission", "up", site),
                measure("up again", "up", site, repeat=repeat),
            ]
        finally:
            subprocess.run([*PROVISION, "lab", "down"], stdin=subprocess.DEVNULL, check=True)


def show(figures: list[Figure], workers: int) -> None:
    first = next(figure.seconds for figure in figures if figure.what == "first apply")
    table = Table("what", "seconds", "of the first apply", "changed", title=f"1 head, {workers} workers")
    for figure in figures:
        table.add_row(
            figure.what, f"{figure.seconds:.1f}", f"{figure.seconds / first:.2f}", str(figure.changed)
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="of what changes nothing; the median counts")
    options = parser.parse_args()
    figures = bring_up(options.workers, options.repeat)
    show(figures, options.workers)
    kept = ROOT / "reports" / f"bringup-{datetime.now(UTC):%Y%m%dT%H%M%S}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(
        json.dumps({"workers": options.workers, "figures": [asdict(f) for f in figures]}, indent=2)
    )
    print(f"kept in {kept.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
