"""Charts as SVG text, drawn by Vega-Lite; colours are CSS variables, so a page can change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.planner.errors import InputError

WIDTHS = {"wide": 680, "narrow": 330}  # on a screen or paper, and on a phone
_INK, _RULE = "var(--ink)", "var(--rule)"
_COLORS = [f"var(--c{number})" for number in range(1, 10)]

Row = Mapping[str, object]  # a mark: its values by field, and its `words`, which hovering shows
Encoding = dict[str, Any]
Marks = Mapping[str, Any]  # a layer of a chart, in the terms of Vega-Lite


def svg(layers: Sequence[Marks], height: int | Mapping[str, int], width: int) -> str:
    """Return a chart as an <svg> element of a width in pixels, its axes included."""
    try:
        import vl_convert  # only reports need it
    except ImportError:
        raise InputError(
            "the charts of a report need the package vl-convert-python",
            fix='pip install "autopar[report]"',
        ) from None
    drawn: str = vl_convert.vegalite_to_svg(
        {
            "width": width,
            "height": height,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "background": None,
            "padding": 2,
            "layer": list(layers),
            "config": _config(width),
        }
    )
    return drawn


def _config(width: int) -> Mapping[str, Any]:
    """Return the look of a chart: the page's colours, and room for labels that suits the width."""
    labels = {"labelColor": _INK, "labelFontSize": 12, "labelLimit": 0.4 * width}
    lines = {"gridColor": _RULE, "domainColor": _RULE, "tickColor": _RULE}
    title = {"titleColor": _INK, "titleFontSize": 12, "titleFontWeight": "normal"}
    return {
        "font": "Arial, Liberation Sans, Helvetica, sans-serif",
        "view": {"stroke": None},
        "axis": {**labels, **lines, **title},
        "legend": {**labels, "title": None, "orient": "top", "columns": max(1, width // 160)},
        "text": {"color": _INK, "fontSize": 12},
    }


def marks(kind: str, rows: Sequence[Row], encoding: Encoding, **settings: Any) -> Marks:
    """Return a layer of marks of a kind; hovering over a mark shows its row's words."""
    return {
        "data": {"values": list(rows)},
        "mark": {"type": kind, **settings},
        "encoding": {**encoding, "description": {"field": "words", "type": "nominal"}},
    }


def number(field: str, title: str, **more: Any) -> Encoding:
    """Return the encoding of a field of numbers, on an axis with this title."""
    axis = {"axis": {"title": title, "tickCount": 5}}
    return {"field": field, "type": "quantitative", **axis, **more}


def name(field: str, title: str | None = None, **more: Any) -> Encoding:
    """Return the encoding of a field of names, in the order of the rows."""
    axis = {"axis": {"title": title, "grid": False, "ticks": False}}
    return {"field": field, "type": "ordinal", "sort": None, **axis, **more}


def color(field: str, names: Sequence[str]) -> Encoding:
    """Return the encoding of a field as a colour; the names are the legend, in their order."""
    scale = {"domain": list(names), "range": _COLORS[: len(names)]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {} if names[1:] else None}


def rule(at: float, words: str, axis: str = "y") -> Marks:
    """Return a dashed line at a value of an axis."""
    encoding = {axis: {"field": "at", "type": "quantitative"}}
    line = {"strokeDash": [5, 4], "color": _INK}
    return marks("rule", [{"at": at, "words": words}], encoding, **line)
