"""How long the agent takes: start, the quick set, memory. On the machine where it is called; needs nvidia-ml-py.

python -m benchmarks.health
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provision.health import bundle

RUNS = 5
_QUICK = "from provision.health import agent; agent.examine(agent.configured(), {})"


def seconds(*words: str | Path) -> float:
    """The shortest of some runs."""
    best = float("inf")
    for _ in range(RUNS):
        began = time.monotonic()
        subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        best = min(best, time.monotonic() - began)
    return best


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder) / "source.pyz", Path(folder) / "agent"
        source.write_bytes(bundle.build())
        bundle.compiled(str(source), str(compiled))
        print(f"file, compiled: {source.stat().st_size >> 10} KiB, {compiled.stat().st_size >> 10} KiB")
        print(f"Python alone: {seconds(sys.executable, '-I', '-c', ''):.3f} s")
        for name, program in (("sources", source), ("byte code", compiled)):
            print(f"start, {name}: {seconds(sys.executable, '-I', program, '--help'):.3f} s (at most 0.15)")
        quick = f"import sys; sys.path.insert(0, {str(compiled)!r}); {_QUICK}"  # remembers nothing on this machine
        print(f"quick set: {seconds(sys.executable, '-I', '-c', quick):.3f} s (at most 1)")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"memory: {peak:.0f} MiB (at most 60)")


if __name__ == "__main__":
    main()
