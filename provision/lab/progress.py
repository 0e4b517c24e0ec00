"""What the lab tells while it works."""

from __future__ import annotations


class Progress:
    """Progress that nobody reads; the command line shows it in its own way."""

    def say(self, subject: str, text: str) -> None:
        """A step of `subject` (a node, a layer) has begun or ended."""

    def detail(self, subject: str, text: str) -> None:
        """One of very many lines from within a step."""
