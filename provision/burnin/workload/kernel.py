"""What the kernel says of GPUs, links and memory, before a run and during it."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

DEVICE = "/dev/kmsg"
RECORD_BYTES = 8192
MOST_LINES = 200
# Graphics driver and switches, PCI errors, machine checks, network adapters, disks, stuck or killed processes.
TELLING = re.compile(
    r"NVRM|nvidia-nvswitch|Xid|AER:|PCIe Bus Error|\bmce:|Machine check|EDAC|mlx5|link is (not ready|down)|"
    r"I/O error|nvme.*(timeout|error)|soft lockup|hung task|blocked for more than|Out of memory|Killed process",
    re.IGNORECASE,
)

PARAMETERS = re.compile(r"\b(Kernel c|C)ommand line: ")  # names of drivers, and no message of theirs


class Messages:
    """The kernel's messages from now on, and those from the boot until now."""

    def __init__(self) -> None:
        """Reads what is there; `why` says what stands in the way, if anything does."""
        self.source: str | None = None
        self.why: str | None = None
        self._seen = 0
        try:
            self._file: int | None = os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK)
            self._last = -1
            self.before = telling(self._records())
            self.source = DEVICE
            return
        except OSError as error:
            self._file = None
            self.why = f"{DEVICE}: {error.strerror}"
        try:
            lines = self._dmesg()
            self.source, self.why = "dmesg", None
            self._seen = len(lines)
            self.before = telling(lines)
        except (OSError, subprocess.SubprocessError) as error:
            self.why = f"{self.why}; dmesg: {_said(error)}"
            self.before = []

    def row(self, host: str) -> dict[str, Any]:
        """For `KernelMessages`: what was said between the making of this and now."""
        during: list[str] = []
        try:
            if self._file is not None:
                during = telling(self._records())
            elif self.source:
                during = telling(self._dmesg()[self._seen :])
        except (OSError, subprocess.SubprocessError) as error:
            self.source, self.why = None, _said(error)
        return {"host": host, "source": self.source, "why": self.why, "before": self.before, "during": during}

    def _records(self) -> list[str]:
        """New records of /dev/kmsg, in the form "seconds text"."""
        assert self._file is not None
        lines: list[str] = []
        while True:
            try:
                record = os.read(self._file, RECORD_BYTES)
            except BlockingIOError:
                return lines
            except BrokenPipeError:  # older ones were overwritten before they were read
                lines.append("(the kernel's buffer ran over: some messages are lost)")
                continue
            lines.append(line_of(record.decode(errors="replace")))

    def _dmesg(self) -> list[str]:
        answer = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.splitlines()


def line_of(record: str) -> str:
    """A record of /dev/kmsg, "6,1234,5678901,-;text", as dmesg shows it: "[    5.678901] text"."""
    head, _, text = record.partition(";")
    fields = head.split(",")
    first = text.split("\n", 1)[0]
    return f"[{int(fields[2]) / 1e6:12.6f}] {first}" if len(fields) > 2 and fields[2].isdigit() else first


def telling(lines: list[str]) -> list[str]:
    """The last of the lines that tell of hardware. Pure."""
    told = [line for line in lines if TELLING.search(line) or "ran over" in line]
    return [line for line in told if not PARAMETERS.search(line)][-MOST_LINES:]


def _said(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or "").strip() or f"exit {error.returncode}"
    return str(error)
