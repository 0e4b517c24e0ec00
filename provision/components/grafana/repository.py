"""Grafana Labs' repository of packages: Grafana, Loki and Alloy come from it."""

from __future__ import annotations

from provision.components.grafana import exports
from provision.engine import ops
from provision.engine.deploy import Context


def repository(on: Context) -> None:
    """The repository, trusted by its own key alone."""
    source, text, key = (on.profile.path(f"grafana.{part}") for part in ("source", "entry", "key"))
    ops.packages(*on.profile.packages("grafana-repository"))
    ops.ensure(
        "Grafana's key", test=exports.key_test(key), make=exports.key_make(key), requires="gpg", owns=(key,)
    )
    ops.file(source, text)
