"""Burn-in numbers as SVG, to stand inside a page: text stays text, in the page's own colour."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from provision.report.figures import strategy

_INK = "#010203"  # stands for the page's text colour until the SVG is written
# Okabe and Ito's colours without black and yellow: told apart by colour-blind readers, on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7")
_GOOD, _WARN, _FAIL = _COLOURS[0], _COLOURS[1], _COLOURS[3]
_MARKERS = "osD^vP"
_MOST_LINES = 8  # of GPUs in one plot; of more, the median and the range
_MOST_CELLS = 100  # of a heat map with numbers in it
_BINS = 120  # points of a range over time
_MATRIX = {
    "bfloat16": "matmul_bf16_tflops",
    "float16": "matmul_fp16_tflops",
    "tf32": "matmul_tf32_tflops",
    "float8_e4m3fn": "matmul_fp8_tflops",
}
_COPIES = {
    ("device_copy", None): "device copy",
    ("triad", None): "triad",
    ("host_to_device", None): "host to device",
    ("device_to_host", None): "device to host",
    ("host_to_device", "near"): "host to device, near",
    ("device_to_host", "near"): "device to host, near",
    ("host_to_device", "far"): "host to device, far",
    ("device_to_host", "far"): "device to host, far",
}
_READINGS = {
    "sm_clock_mhz": "SM clock, MHz",
    "power_watts": "power, W",
    "temperature_c": "GPU, °C",
    "memory_temperature_c": "memory, °C",
}
_REASONS = {"power cap": 0x4, "software thermal": 0x20, "hardware": 0x8 | 0x40 | 0x80}

Points = list[tuple[float, float]]


def plots(details: Mapping[str, Any]) -> list[str]:
    """SVG elements for details["burnin"], the burn-in's result document; none where there is none. Pure.

    details["limits"] (measure -> fail, warn, bytes) are drawn where they are known.
    """
    result = details.get("burnin")
    if not isinstance(result, Mapping):
        return []
    limits = details.get("limits") or {}
    drawn = [
        _bandwidth(result.get("collectives") or [], limits.get("all_reduce_busbw_gbs")),
        _products(result.get("compute") or [], limits),
        _copies(result.get("copies") or [], limits),
        _heat(result),
        _telemetry(result),
        _losses((result.get("training") or {}).get("losses") or []),
        _steps(result.get("training_runs") or []),
    ]
    return [svg for svg in drawn if svg]


def _number(value: float | None) -> float:
    """What was no number when it was measured is null in JSON: a gap in the line."""
    return math.nan if value is None else value


def _bandwidth(rows: Sequence[Mapping[str, Any]], limit: Mapping[str, Any] | None) -> str | None:
    """Operation by operation over size; what the backend does not have is left out."""
    lines: dict[str, Points] = {}
    for row in rows:
        if row.get("busbw_gbs"):
            lines.setdefault(row["operation"], []).append((row["bytes"], row["busbw_gbs"]))
    if not lines:
        return None

    def fill(axes: Axes) -> None:
        for number, (operation, points) in enumerate(lines.items()):
            sizes, rates = zip(*sorted(points), strict=True)
            colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
            axes.plot(sizes, rates, color=colour, marker=marker, markersize=4, label=operation)
        axes.set_xscale("log", base=2)
        if limit:
            first = max(limit["bytes"], 1)
            last = max(size for points in lines.values() for size, _ in points)
            ends = [min(first, last) / math.sqrt(2), max(first, last) * math.sqrt(2)]
            axes.fill_between(ends, limit["fail"], limit["warn"], color=_WARN, alpha=0.35, linewidth=0)
            axes.plot(ends, [limit["fail"]] * 2, color=_FAIL, label="all_reduce fails below")
            axes.plot(ends, [limit["warn"]] * 2, color=_WARN, label="all_reduce expected from")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("message size")
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        axes.set_ylabel("GB/s")
        _legend(axes)

    return _draw("Bus bandwidth of collectives", [fill])


def _products(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> str | None:
    kinds: dict[str, Points] = {}
    for row in rows:
        if row.get("tflops"):
            kinds.setdefault(row.get("dtype") or "", []).append((row["rank"], row["tflops"]))
    panels = [
        _bars(points, limits.get(_MATRIX.get(dtype, "")), f"{dtype} TFLOP/s".strip())
        for dtype, points in kinds.items()
    ]
    return _draw("Matrix products, each rank", panels)


def _copies(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> str | None:
    kinds: dict[tuple[str, str | None], Points] = {}
    for row in rows:
        kinds.setdefault((row["kind"], row.get("place")), []).append((row["rank"], row["gbs"]))
    panels = [
        _bars(
            points,
            limits.get(f"{key[0]}_gbs") if key[1] != "far" else None,
            f"{_COPIES.get(key, key[0])}, GB/s",
        )
        for key, points in kinds.items()
    ]
    return _draw("Copies, each rank", panels)


def _bars(points: Points, limit: Mapping[str, Any] | None, label: str) -> Callable[[Axes], None]:
    """One bar a rank, in the colour of its verdict where a limit is known."""

    def colour(value: float) -> str:
        if not limit or value >= limit["warn"]:
            return _GOOD
        return _WARN if value >= limit["fail"] else _FAIL

    def fill(axes: Axes) -> None:
        ranks, values = zip(*sorted(points), strict=True)
        axes.bar(ranks, values, color=[colour(value) for value in values], width=0.7)
        if limit:
            axes.axhline(limit["fail"], color=_FAIL, label=f"fails below {limit['fail']:g}")
            axes.axhline(limit["warn"], color=_WARN, label=f"expected from {limit['warn']:g}")
        if len(values) > 2:
            middle = statistics.median(values)
            axes.axhline(middle, color=_INK, linestyle=":", label=f"median {middle:.4g}")
        axes.set_xlabel("rank")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
        _head(axes, label)

    return fill


def _heat(result: Mapping[str, Any]) -> str | None:
    """Pairs of GPUs: of one node source by target, of several nodes node by pair."""
    pairs, ranks = result.get("pairs") or [], result.get("ranks") or []
    if not pairs or not ranks:
        return None
    hosts = list(dict.fromkeys(ranks[pair["source"]]["host"] for pair in pairs))
    local = {rank["rank"]: rank["local_rank"] for rank in ranks}
    if len(hosts) == 1:
        size = max(local.values()) + 1
        rows, columns = [f"GPU {gpu}" for gpu in range(size)], [f"{gpu}" for gpu in range(size)]
        places = {
            (pair["source"], pair["target"]): (local[pair["source"]], local[pair["target"]]) for pair in pairs
        }
        axis = "to GPU"
    else:
        kinds = sorted({(local[pair["source"]], local[pair["target"]]) for pair in pairs})
        rows, columns = hosts, [f"{source}→{target}" for source, target in kinds]
        places = {
            (pair["source"], pair["target"]): (
                hosts.index(ranks[pair["source"]]["host"]),
                kinds.index((local[pair["source"]], local[pair["target"]])),
            )
            for pair in pairs
        }
        axis = "pair of GPUs"
    cells = [[math.nan] * len(columns) for _ in rows]
    for pair in pairs:
        row, column = places[pair["source"], pair["target"]]
        cells[row][column] = pair["gbs"]

    def fill(axes: Axes) -> None:
        colours = mpl.colormaps["viridis"].resampled(20)  # few levels: the scale stays vector graphics
        rates = [pair["gbs"] for pair in pairs]
        low = min(*rates, 0.8 * max(rates))  # pairs that differ by a percent are one colour
        mesh = axes.pcolormesh(cells, cmap=colours, vmin=low, vmax=max(rates), edgecolors="none")
        axes.set_xticks([column + 0.5 for column in range(len(columns))], columns)
        axes.set_yticks([row + 0.5 for row in range(len(rows))], rows)
        if len(columns) > 16:
            axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        if len(rows) * len(columns) <= _MOST_CELLS:
            middle = statistics.fmean(mesh.get_clim())
            for row, values in enumerate(cells):
                for column, value in enumerate(values):
                    if not math.isnan(value):
                        ink = "#000000" if value > middle else "#ffffff"
                        axes.text(
                            column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", color=ink
                        )
        figure = axes.figure
        assert isinstance(figure, Figure)
        scale = figure.colorbar(mesh, ax=axes)
        scale.ax.tick_params(colors=_INK, labelcolor=_INK)
        scale.set_label("GB/s", color=_INK)
        scale.outline.set_visible(False)

    return _draw("From GPU to GPU", [fill], height=min(9.0, max(3.6, 0.22 * len(rows) + 1)), grid=False)


def _telemetry(result: Mapping[str, Any]) -> str | None:
    """Readings of the GPUs over time, the parts of the run as bands; at the end why clocks were lowered."""
    gpus = [series for series in result.get("telemetry") or [] if series["subject"].startswith("gpu")]
    several = len({series["host"] for series in gpus}) > 1
    phases = result.get("phases") or []
    panels: list[Callable[[Axes], None]] = []
    for name, label in _READINGS.items():
        lines = [
            (
                f"{each['host']} {each['subject']}" if several else each["subject"],
                each["seconds"],
                each["values"][name],
            )
            for each in gpus
            if name in each["values"]
        ]
        if lines:
            panels.append(_over_time(lines, label, phases, named=not panels))
    masks = [
        (each["seconds"], each["values"]["slowdown_reasons"])
        for each in gpus
        if "slowdown_reasons" in each["values"]
    ]
    if masks:
        panels.append(_reasons(masks, phases))
    return _draw("GPUs over time", panels)


def _over_time(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float | None]]],
    label: str,
    phases: Sequence[Mapping[str, Any]],
    *,
    named: bool,
) -> Callable[[Axes], None]:
    """Each GPU's line, or median and range of many. `named`: this panel says which line and which part is which."""

    def fill(axes: Axes) -> None:
        _bands(axes, phases, named=named)
        if len(lines) <= _MOST_LINES:
            for number, (name, seconds, values) in enumerate(lines):
                axes.plot(
                    seconds,
                    [_number(value) for value in values],
                    color=_COLOURS[number % len(_COLOURS)],
                    linestyle="-" if number < len(_COLOURS) else "--",
                    linewidth=1,
                    label=name if named else None,
                )
        else:
            middles, ranges = _binned(
                [
                    (second, value)
                    for _, seconds, values in lines
                    for second, value in zip(seconds, values, strict=True)
                    if value is not None
                ]
            )
            times = [time for time, _ in middles]
            lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
            what = f"range of {len(lines)} GPUs" if named else None
            axes.fill_between(times, lows, highs, color=_GOOD, alpha=0.3, linewidth=0, label=what)
            axes.plot(
                times,
                [value for _, value in middles],
                color=_GOOD,
                linewidth=1,
                label="median" if named else None,
            )
        axes.set_xlabel("seconds")
        _head(axes, label, columns=4)

    return fill


def _binned(points: Points) -> tuple[Points, Points]:
    """Median, and lowest and highest, of what lies in each of _BINS stretches of time."""
    end = max((second for second, _ in points), default=0.0)
    width = max(end / _BINS, 1e-9)
    bins: dict[int, list[float]] = {}
    for second, value in points:
        bins.setdefault(int(second / width), []).append(value)
    order = sorted(bins)
    middles = [((index + 0.5) * width, statistics.median(bins[index])) for index in order]
    return middles, [(min(bins[index]), max(bins[index])) for index in order]


def _reasons(
    masks: Sequence[tuple[Sequence[float], Sequence[float | None]]], phases: Sequence[Mapping[str, Any]]
) -> Callable[[Axes], None]:
    """Which share of the GPUs was slowed down, by reason."""

    def fill(axes: Axes) -> None:
        _bands(axes, phases, named=False)
        for (name, bits), colour in zip(_REASONS.items(), (_COLOURS[4], _WARN, _FAIL), strict=True):
            points = [
                (second, 100.0 * bool(int(value) & bits))
                for seconds, values in masks
                for second, value in zip(seconds, values, strict=True)
                if value is not None
            ]
            end = max((second for second, _ in points), default=0.0)
            width = max(end / _BINS, 1.0)
            shares: dict[int, list[float]] = {}
            for second, value in points:
                shares.setdefault(int(second / width), []).append(value)
            times = sorted(shares)
            means = [statistics.fmean(shares[time]) for time in times]
            axes.plot([time * width for time in times], means, color=colour, linewidth=1, label=name)
        axes.set_ylim(-5, 105)
        axes.set_xlabel("seconds")
        _head(axes, "clocks lowered, % of GPUs", columns=3)

    return fill


def _bands(axes: Axes, phases: Sequence[Mapping[str, Any]], *, named: bool) -> None:
    """Every second part of the run as a band; the names of those that are long enough inside the plot."""
    for number, phase in enumerate(phases):
        if number % 2 == 0:
            axes.axvspan(phase["start"], phase["end"], color=_INK, alpha=0.06, linewidth=0)
        if named and phase["end"] - phase["start"] > 0.1 * phases[-1]["end"]:
            axes.text(
                (phase["start"] + phase["end"]) / 2,
                0.5,
                phase["name"],
                transform=axes.get_xaxis_transform(),
                va="center",
                ha="center",
                fontsize=8,
                color=_INK,
            )


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _losses(losses: Sequence[float | None]) -> str | None:
    def fill(axes: Axes) -> None:
        axes.plot(range(len(losses)), [_number(loss) for loss in losses], color=_GOOD)
        _step_axis(axes)
        axes.set_ylabel("loss")

    return _draw("Training loss", [fill] if losses else [])


def _steps(runs: Sequence[Mapping[str, Any]]) -> str | None:
    runs = [run for run in runs if run.get("step_seconds")]

    def fill(axes: Axes) -> None:
        for number, run in enumerate(runs):
            axes.plot(
                run["step_seconds"],
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=3,
                linewidth=1,
                label=strategy(run),
            )
        axes.set_ylim(bottom=0)
        _step_axis(axes)
        axes.set_ylabel("seconds, slowest rank")
        _legend(axes)

    return _draw("Training steps by strategy", [fill] if runs else [])


def _head(axes: Axes, label: str, columns: int = 3) -> None:
    """What a panel shows, and its legend, in one line above it."""
    axes.set_title(label, loc="left", color=_INK, fontsize="small")
    if axes.get_legend_handles_labels()[0]:
        _legend(
            axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderaxespad=0.1, columnspacing=1
        )


def _legend(axes: Axes, **place: Any) -> None:
    axes.legend(frameon=False, labelcolor=_INK, fontsize="small", **place)


def human_bytes(value: float) -> str:
    """4194304 as "4 MiB"."""
    units = ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:g} {units[0]}"


def _draw(
    title: str, panels: Sequence[Callable[[Axes], None]], *, height: float = 3.6, grid: bool = True
) -> str | None:
    """The panels one below the other, as one SVG element; None where there is none."""
    if not panels:
        return None
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10, "text.parse_math": False}
    ):
        tall = height if len(panels) == 1 else 1.9 * len(panels)
        figure = Figure(figsize=(6.4, tall), layout="constrained")
        every = figure.subplots(len(panels), squeeze=False)[:, 0]
        for fill, axes in zip(panels, every, strict=True):
            axes.set_axisbelow(True)
            fill(axes)
            axes.tick_params(which="both", colors=_INK, labelcolor=_INK)
            axes.patch.set_visible(False)
            if grid:
                axes.grid(visible=True, color=_INK, alpha=0.15)
            for label in (axes.xaxis.label, axes.yaxis.label):
                label.set_color(_INK)
            for name, spine in axes.spines.items():
                spine.set_visible(name in ("left", "bottom"))
                spine.set_color(_INK)
        for axes in every[:-1]:
            axes.set_xlabel("")
        figure.suptitle(title, color=_INK, fontsize="medium")
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    return _inline(out.getvalue(), title)


def _inline(document: str, title: str) -> str:
    """The <svg> element of a stand-alone SVG document, named for readers that cannot see it."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
