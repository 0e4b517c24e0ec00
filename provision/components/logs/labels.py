"""Which job a line of a journal is about, as Slurm and the kernel say it: one pattern for all who send lines. Pure."""

from __future__ import annotations

import re

# JobId=77, job 77, StepId=77.0, [77.batch] (slurmstepd), /job_77/ (control groups, which the kernel names when it
# kills for memory). Go, JavaScript and Python read it alike.
_BEFORE = r"(?:\bjob(?:id)?[=: ]+|\bstepid=|/job_|^\[)"
_AFTER = r"(?:[^-\d]|$)"  # what [2026-03-01 has is a time
GO = rf"(?i){_BEFORE}(?P<slurm_job>\d+){_AFTER}"
JAVASCRIPT = "/{}/i".format(rf"{_BEFORE}(\d+){_AFTER}".replace("/", r"\/"))

_NAMED = re.compile(GO)
_SPEAKER = re.compile(r"slurm.*|kernel")


def job(source: str, message: str) -> str | None:
    """The job that a line is about; None where it names none, or others than Slurm and the kernel said it."""
    found = _NAMED.search(message) if _SPEAKER.fullmatch(source) else None
    return found["slurm_job"] if found else None
