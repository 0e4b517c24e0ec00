"""Limits as data: what is known of each GPU model, and the thresholds of checks with whose they are.

Models are found by the whole product name, never by a part of it: a GH200 is no H200, an L40S no L40. A model that
is not in the data has no limits; another model's are never taken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "profiles", "health.json")


@dataclass(frozen=True)
class Model:
    """What is known of one GPU product."""

    product: str
    model: str  # as a site file names it
    nvlinks: tuple[int, ...]  # counts that a sound GPU may have; (0,): it has no NVLink
    nvlink_gbs: float | None  # of each link
    pcie_gen: int | None = None
    remaps: bool = True  # rows are remapped; older models retire pages


@dataclass(frozen=True)
class Limits:
    """Thresholds, models, and what the site expects of this node."""

    models: Mapping[str, Model] = field(default_factory=dict)  # by product
    thresholds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> value, source
    site: Mapping[str, Any] = field(default_factory=dict)  # "gpus": 8, "mig": false, ...

    def value(self, name: str) -> Any:
        """A threshold: the site's own where it names one, else the built-in."""
        over = self.site.get("thresholds", {})
        return over[name] if name in over else self.thresholds[name]["value"]

    def source(self, name: str) -> str:
        """Whose a threshold is."""
        return (
            "the site file"
            if name in self.site.get("thresholds", {})
            else str(self.thresholds[name]["source"])
        )

    def model(self, product: str) -> Model | None:
        """What is known of `product`, as the driver names it (older drivers leave out "NVIDIA")."""
        return self.models.get(product) or self.models.get(f"NVIDIA {product}")

    def is_model(self, product: str, wanted: str) -> bool:
        """Whether `product` is what a person calls `wanted`: a profile's name, a product, or whole words of it."""
        known = self.model(product)
        wanted_words = wanted.lower().replace("-", " ").split()
        words = product.lower().replace("-", " ").split()
        return (known is not None and known.model == wanted) or all(word in words for word in wanted_words)


def load(site: Mapping[str, Any] | None = None) -> Limits:
    """The data that comes with the program, with what the site expects."""
    data: dict[str, Any] = json.loads(__loader__.get_data(DATA).decode())  # type: ignore[name-defined]
    models = {
        product: Model(
            product,
            about["model"],
            tuple(about["nvlinks"]),
            about.get("nvlink_gbs"),
            about.get("pcie_gen"),
            about.get("remaps", True),
        )
        for product, about in data["products"].items()
    }
    return Limits(models, data["thresholds"], dict(site or {}))
