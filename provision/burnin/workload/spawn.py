"""Starts this node's ranks where no scheduler does, and stays until all of them have ended.

Unlike torchrun it lets the others live when one rank dies: they find out which one it was and write it down.
"""

from __future__ import annotations

import os
import signal
import subprocess
from types import FrameType

from . import child


def main(place: str, arguments: list[str]) -> int:
    """`place`: FIRST:LOCAL:RANKS:ADDRESS:PORT, the first rank here, ranks here and in all, where rank 0 listens.

    The exit status is the worst of the ranks'. SIGTERM is passed on to them.
    """
    first, local, ranks, rest = place.split(":", 3)
    address, port = rest.rsplit(":", 1)
    processes = []
    for number in range(int(local)):
        environment = {
            **os.environ,
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            "RANK": str(int(first) + number),
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": local,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        command = child.command("program", "main", arguments)
        processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def stop(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    return max(abs(process.wait()) for process in processes)
