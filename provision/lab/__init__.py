"""The lab: a throwaway cluster of systemd containers on this machine, with faults to inject."""

from provision.lab.command import InputError, LabError
from provision.lab.lab import Lab

__all__ = ["InputError", "Lab", "LabError"]
