"""A bar chart of benchmark rows as SVG: one panel per op and pass, one bar per implementation and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bench import rate_unit
from .errors import message

__all__ = ["render_svg"]

_COLORS = ("#2f6db3", "#7fb2e5", "#8c8c8c", "#bdbdbd", "#d98c3f", "#9f6fb5", "#6aa66a", "#c9605f")
_DARK = ("#2f6db3", "#9f6fb5", "#c9605f")
_BAR_INCHES = 0.22
_LONG = 0.12  # of the longest bar: one that holds its figure, at its base, where no whisker is
_GAP_INCHES = 0.18
_PANEL_MARGIN_INCHES = 0.95
_CEILINGS = {"tflops": ("matmul_tflops", "one large product"), "tbps": ("copy_tbps", "a copy")}


def render_svg(
    rows: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    title: str = "",
    ceilings: Mapping[str, float | None] | None = None,
) -> Path:
    """Draw the rows of a ``cake-bench/1`` document; the same rows give the same bytes.

    Args:
        rows: rows of one or several ops. A panel shows TFLOP/s where its rows count FLOP, else TB/s where they count
            bytes (giga below 0.1 tera), else milliseconds; the whisker spans the 20th to the 80th percentile.
        path: the ``.svg`` to write; its folder is made.
        title: heading of the figure.
        ceilings: the document's; drawn as a line where the panel's unit has one.

    Raises: ValueError without rows; RuntimeError when matplotlib is not installed.
    """
    if not rows:
        raise ValueError(message("render_svg", "rows", "empty", "at least one row"))
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise RuntimeError(
            message("render_svg", "matplotlib", "not installed", "it", "pip install 'cake-core[bench]'")
        ) from error

    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["op"], row["pass"]), []).append(row)
    labels = list(dict.fromkeys(_label(row) for row in rows))
    colors = {label: _COLORS[position % len(_COLORS)] for position, label in enumerate(labels)}
    heights = [_panel_inches(panel) for panel in panels.values()]
    # A fixed salt and no date: the file changes only when the figures do.
    settings: Any = mpl
    with settings.rc_context({"svg.hashsalt": "cake-bench", "svg.fonttype": "none", "font.size": 9}):
        figure: Any = Figure(figsize=(8.5, sum(heights) + 0.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axis, ((op, pass_), panel) in zip(axes[:, 0], panels.items(), strict=True):
            _draw(axis, panel, f"{op} {pass_}", colors, ceilings or {})
        handles = [Patch(color=colors[label], label=label) for label in labels]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
        if title:
            figure.suptitle(title)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _label(row: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (row["impl"], row["variant"] or row["version"])))


def _shapes(panel: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    shapes: dict[str, list[Mapping[str, Any]]] = {}
    for row in panel:
        shapes.setdefault(row["shape"], []).append(row)
    return shapes


def _panel_inches(panel: Sequence[Mapping[str, Any]]) -> float:
    return len(panel) * _BAR_INCHES + len(_shapes(panel)) * _GAP_INCHES + _PANEL_MARGIN_INCHES


def _metric(panel: Sequence[Mapping[str, Any]]) -> str:
    for metric in ("tflops", "tbps"):
        if all(row[metric] is not None for row in panel):
            return metric
    return "median_ms"


def _draw(
    axis: Any,
    panel: Sequence[Mapping[str, Any]],
    title: str,
    colors: Mapping[str, str],
    ceilings: Mapping[str, float | None],
) -> None:
    metric = _metric(panel)
    factor, unit, longest = 1.0, "ms (less is better)", max(row[metric] for row in panel)
    if metric != "median_ms":
        factor, unit = rate_unit(metric, longest)
        unit += " (more is better)"
    top = 0.0
    ticks: list[float] = []
    names: list[str] = []
    for shape, rows in _shapes(panel).items():
        ticks.append(top + (len(rows) - 1) * _BAR_INCHES / 2)
        names.append(shape)
        for row in rows:
            value = row[metric] * factor
            if metric == "median_ms":
                low, high = row["p20_ms"], row["p80_ms"]
            else:  # a rate: the fast percentile is the high one
                low, high = (value * row["median_ms"] / row[p] for p in ("p80_ms", "p20_ms"))
            spread = [[max(value - low, 0)], [max(high - value, 0)]]
            axis.barh(
                top, value, height=_BAR_INCHES * 0.9, color=colors[_label(row)], xerr=spread, error_kw={"lw": 0.8}
            )
            inside = value > _LONG * longest * factor
            place: Any = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "size": 7}
            color = "white" if inside and colors[_label(row)] in _DARK else "black"
            axis.annotate(f"{value:.3g}", (0 if inside else high, top), color=color, **place)
            top += _BAR_INCHES
        top += _GAP_INCHES
    name, what = _CEILINGS.get(metric, ("", ""))
    ceiling = ceilings.get(name)
    if ceiling is not None:
        axis.axvline(ceiling * factor, color="#444444", lw=0.8, ls="--", zorder=0)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "size": 7, "ha": "center"}
        axis.annotate(what, (ceiling * factor, 1), xytext=(0, 2), **place)
    axis.set_yticks(ticks, names)
    axis.invert_yaxis()
    axis.margins(x=0.1, y=_GAP_INCHES / max(top, _GAP_INCHES) / 2)
    axis.set_xlim(left=0)
    axis.set_xlabel(f"{unit}; whiskers from the 20th to the 80th percentile")
    axis.set_title(title, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
