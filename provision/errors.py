"""The one distinction that every part of the program makes between errors."""

from __future__ import annotations


class InputError(Exception):
    """What was given, or what this machine keeps, is wrong or missing: no node was touched. Exit status 2."""
