"""Burn-in numbers as SVG, to stand inside a page: text stays text, in the page's own colour."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_INK = "#010203"  # stands for the page's text colour until the SVG is written
# Okabe and Ito's colours without black and yellow: told apart by colour-blind readers, on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
_MARKERS = "osD^vP"


def plots(details: Mapping[str, Any]) -> list[str]:
    """SVG elements for details["burnin"], the burn-in's result document; none where there is none. Pure."""
    result = details.get("burnin")
    if not isinstance(result, Mapping):
        return []
    bandwidth = _bandwidth(result.get("collectives") or [])
    rates = [(row["rank"], row["tflops"]) for row in result.get("compute") or [] if row.get("tflops")]
    losses = [_number(loss) for loss in (result.get("training") or {}).get("losses") or []]
    drawn = []
    if bandwidth:
        drawn.append(_draw("Bus bandwidth of collectives", lambda axes: _draw_bandwidth(axes, bandwidth)))
    if rates:
        drawn.append(_draw("Matrix products, each rank", lambda axes: _draw_rates(axes, rates)))
    if losses:
        drawn.append(_draw("Training loss", lambda axes: _draw_losses(axes, losses)))
    return drawn


def _bandwidth(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Operation -> (bytes, GB/s), by size; what the backend does not have is left out."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get("busbw_gbs"):
            lines.setdefault(row["operation"], []).append((row["bytes"], row["busbw_gbs"]))
    return {operation: sorted(points) for operation, points in lines.items()}


def _number(value: float | None) -> float:
    """What was no number when it was measured is null in JSON: a gap in the line."""
    return math.nan if value is None else value


def _draw_bandwidth(axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for number, (operation, points) in enumerate(lines.items()):
        sizes, rates = zip(*points, strict=True)
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        axes.plot(sizes, rates, color=colour, marker=marker, markersize=4, label=operation)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("message size")
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.set_ylabel("GB/s")
    axes.legend(frameon=False, labelcolor=_INK, fontsize="small")


def _draw_rates(axes: Axes, rates: Sequence[tuple[int, float]]) -> None:
    ranks, values = zip(*rates, strict=True)
    axes.bar(ranks, values, color=_COLOURS[0], width=0.7)
    axes.set_xlabel("rank")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("TFLOP/s")


def _draw_losses(axes: Axes, losses: Sequence[float]) -> None:
    axes.plot(range(len(losses)), losses, color=_COLOURS[0])
    axes.set_xlabel("step")
    axes.set_ylabel("loss")


def human_bytes(value: float) -> str:
    """4194304 as "4 MiB"."""
    units = ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:g} {units[0]}"


def _draw(title: str, fill: Callable[[Axes], None]) -> str:
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10, "text.parse_math": False}
    ):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.set_axisbelow(True)
        fill(axes)
        axes.set_title(title, color=_INK, fontsize="medium")
        axes.tick_params(which="both", colors=_INK, labelcolor=_INK)
        axes.patch.set_visible(False)
        axes.grid(visible=True, color=_INK, alpha=0.15)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(_INK)
        for name, spine in axes.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set_color(_INK)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    return _inline(out.getvalue(), title)


def _inline(document: str, title: str) -> str:
    """The <svg> element of a stand-alone SVG document, named for readers that cannot see it."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
