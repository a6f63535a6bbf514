"""Draws predicted against measured step times and memory of published runs, as one picture.

python -m benchmarks.validate TABLE.csv … -o predictions.csv
python benchmarks/draw_validation.py predictions.csv docs/accuracy.png
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a picture in a file, no window

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

BAND = 0.2  # the largest relative error in the shaded band


def drawn(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write the picture of some predictions."""
    tables = sorted({row["table"] for row in rows})
    colours = {table: f"C{number}" for number, table in enumerate(tables)}
    figure, (time, memory) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    _panel(time, rows, colours, ("measured_seconds", "predicted_seconds", "s"))
    time.set_title("step time")
    remembered = [row for row in rows if row["measured_gib"]]
    _panel(memory, remembered, colours, ("measured_gib", "predicted_gib", "GiB"))
    memory.set_title("peak memory of a device")
    time.legend(fontsize="small", loc="upper left", markerscale=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(
    axes: Axes,
    rows: Sequence[Mapping[str, str]],
    colours: Mapping[str, str],
    columns: tuple[str, str, str],
) -> None:
    """Draw one point for each row, a colour for each table, and the band of the error."""
    measured, predicted, unit = columns
    for table in sorted({row["table"] for row in rows}):
        own = [row for row in rows if row["table"] == table]
        axes.scatter(
            [float(row[measured]) for row in own],
            [float(row[predicted]) for row in own],
            s=8,
            alpha=0.6,
            color=colours[table],
            label=f"{table.removesuffix('.csv')} ({len(own)})",
        )
    everything = [float(row[name]) for row in rows for name in (measured, predicted)]
    if everything:
        ends = [min(everything) * 0.8, max(everything) * 1.25]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.fill_between(
            ends,
            [end * (1 - BAND) for end in ends],
            [end * (1 + BAND) for end in ends],
            alpha=0.12,
            color="grey",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"measured [{unit}]")
    axes.set_ylabel(f"predicted [{unit}]")
    axes.grid(visible=True, which="major", linewidth=0.3)


def main(source: str, target: str) -> None:
    """Draw the predictions of a CSV file."""
    with Path(source).open(newline="", encoding="utf-8") as file:
        drawn(list(csv.DictReader(file)), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:3])
