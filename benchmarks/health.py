"""How long the agent takes: start, the quick set, memory. On the machine where it is called; needs nvidia-ml-py.

    python -m benchmarks.health [--simulated 8]

--simulated: as many H100 of the lab's libnvidia-ml stand for the machine's GPUs (needs a C compiler). Exit status 1
where something takes longer, or more memory, than it may.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from provision.health import bundle
from provision.lab import files, gpus

RUNS = 5
START, QUICK, MEMORY = 0.15, 1.0, 60.0  # seconds, seconds, MiB: at most
MODEL = "h100-sxm"
# Remembers nothing on this machine. The agent knows the machine's GPUs by itself, simulated ones by its configuration.
_QUICK = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
from provision.health import agent
config = agent.Config("node", json.loads(sys.argv[2])) if sys.argv[2] else agent.configured()
outcome = agent.examine(config, {})
# not by getrusage: that counts what the process was before it was started, too
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps([len(outcome.node.get("gpus", ())), outcome.seconds, peak / 1024]))
"""


def run(words: Sequence[str | Path], environment: Mapping[str, str]) -> tuple[float, str]:
    """Seconds of the shortest of some runs, and what it printed."""
    best, said = float("inf"), ""
    for _ in range(RUNS):
        began = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=dict(environment))
        took = time.monotonic() - began
        if took < best:
            best, said = took, done.stdout
    return best, said


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", type=int, default=0, metavar="GPUS")
    simulated = parser.parse_args().simulated
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder) / "source.pyz", Path(folder) / "agent"
        source.write_bytes(bundle.build())
        bundle.compiled(str(source), str(compiled))
        environment, expect = dict(os.environ), ""
        if simulated:
            files.compile_library(
                Path(gpus.__file__).parent / "nvml/nvml.c", Path(folder) / "libnvidia-ml.so.1"
            )
            state = Path(folder) / "state"
            state.write_text(gpus.state("node", MODEL, simulated, cpus=os.cpu_count() or 1))
            environment |= {"LD_LIBRARY_PATH": folder, "LAB_NVML_STATE": str(state)}
            expect = json.dumps({"gpus": simulated, "model": MODEL})
        python = (sys.executable, "-I")
        alone, _ = run((*python, "-c", ""), environment)
        start, _ = run((*python, compiled, "--help"), environment)
        plain, _ = run((*python, source, "--help"), environment)
        whole, said = run((*python, "-c", _QUICK, compiled, expect), environment)
    count, reading, memory = json.loads(said)
    print(
        f"GPUs: {count}{' simulated' if simulated else ''}; Python {sys.version.split()[0]} alone: {alone:.3f} s"
    )
    print(f"start, sources: {plain:.3f} s")
    limits = {
        f"start, byte code: {start:.3f} s (at most {START:g})": start <= START,
        f"quick set: {whole:.3f} s (at most {QUICK:g}), reading and judging {reading:.3f} s": whole <= QUICK,
        f"memory: {memory:.0f} MiB (at most {MEMORY:g})": memory <= MEMORY,
        f"all GPUs read: {count} of {simulated or count}": count == (simulated or count),
    }
    for line, kept in limits.items():
        print(line if kept else f"{line}: NOT KEPT")
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
