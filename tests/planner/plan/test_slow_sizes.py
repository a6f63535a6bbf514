"""Tests of sizes with slow products."""

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.telling.comparison import Unaligned, unaligned
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.planner.rules.multiplying_models import function

ROWS, WIDTH = 4096, 768


def found(columns: int, precision: Precision, device: str) -> Unaligned | None:
    """Return what is found of logits over so many columns."""
    file = function(lambda x, w: x @ w.t(), (ROWS, WIDTH), (columns, WIDTH)).file()
    graph = trace(file, precision=precision)
    (node,) = choose_cluster(1, device).nodes
    return unaligned(graph, infer_axes(graph), batch=1, precision=precision, device=node.device)


def test_an_odd_size_slows_down_products_of_16_bits() -> None:
    one = found(50257, Precision.BF16, "h200")
    assert one is not None
    assert (one.size, one.padded) == (50257, 50304)
    # Three products of 2 · 4096 · 768 · 50,257 FLOPs: at 0.15 of the 833 TFLOP/s that endless tiles
    # of 128 × 256 reach, or at 761 TFLOP/s; and what starting tiles and storing the result take.
    flops = 3 * 2 * ROWS * WIDTH * 50257
    assert one.seconds == pytest.approx(flops / (0.15 * 833e12), rel=0.2)
    assert one.aligned_seconds == pytest.approx(flops / 761e12, rel=0.25)
    assert one.total_seconds >= one.seconds


@pytest.mark.parametrize(
    ("columns", "precision", "device"),
    [
        (50304, Precision.BF16, "h200"),
        (50257, Precision.FP32, "h200"),
        (50257, Precision.BF16, "cpu"),
    ],
)
def test_aligned_sizes_wide_types_and_cpus_have_none(
    columns: int, precision: Precision, device: str
) -> None:
    assert found(columns, precision, device) is None
