"""Element types in 16 bits: what a model casts there, and what torch would not compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph import MODEL_DTYPE, DType, Graph, Value
from autopar.planner.model_file import load_model_file
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.planner.trace.model_source import line_of, ops_of, written

MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x):
            {line}
            return self.linear(x)

    def build_model():
        return Model()
"""
HALF = [Precision.BF16, Precision.FP16]


def graph_of(folder: Path, line: str, precision: Precision) -> Graph:
    file = load_model_file(str(written(folder, MODEL.format(line=line))))
    return trace(file, precision=precision)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize(
    "line",
    [
        "x = x + torch.rand(4)",
        "x = x.float()",
        "x = torch.cat([x, torch.zeros(x.shape[0], 4)])",
        "x = x * torch.arange(4).float()",
        "x = self.norm(x.float())",
    ],
)
def test_float32_that_meets_16_bit_weights_is_refused(
    tmp_path: Path, line: str, precision: Precision
) -> None:
    with pytest.raises(TraceError, match=f"in {precision}, l.* multiplies float32 by") as told:
        graph_of(tmp_path, line, precision)
    assert "--precision fp32" in told.value.fix
    meets = line_of(tmp_path / "subject.py", "self.norm(x" if "norm" in line else "return self.lin")
    assert told.value.where.startswith(f"{tmp_path / 'subject.py'}:{meets}, in module ")
    assert graph_of(tmp_path, line, Precision.FP32).ops


@pytest.mark.parametrize(
    "line",
    [
        "x = (x + torch.rand(4)).to(x.dtype)",
        "x = x * torch.rand(())",  # a number does not decide
        "x = x + torch.rand(4, dtype=x.dtype)",
        "x = self.norm(x) + torch.zeros_like(x)",
    ],
)
def test_what_stays_in_16_bits_is_traced(tmp_path: Path, line: str) -> None:
    assert graph_of(tmp_path, line, Precision.BF16).ops


def test_ops_that_torch_lacks_in_16_bits_are_refused_there(tmp_path: Path) -> None:
    line = "x = torch.fft.fft(x).real"
    with pytest.raises(TraceError, match=r"in bf16, torch does not compute .*bfloat16") as told:
        graph_of(tmp_path, line, Precision.BF16)
    assert "x.float()" in told.value.fix
    assert graph_of(tmp_path, line, Precision.FP32).ops
    assert graph_of(tmp_path, "x = torch.fft.fft(x.float()).real.to(x.dtype)", Precision.BF16).ops


def test_a_model_that_asks_for_the_type_of_its_weights_casts_in_16_bits_alone(
    tmp_path: Path,
) -> None:
    line = "own = self.norm.weight.dtype; x = x.float(); x = x.to(own) if own.itemsize == 2 else x"
    graph = graph_of(tmp_path, line, Precision.BF16)
    assert DType(MODEL_DTYPE) in _casts(graph)
    assert DType(MODEL_DTYPE) not in _casts(graph_of(tmp_path, line, Precision.FP32))


def test_a_model_that_only_float32_can_trace_is_traced_in_that(tmp_path: Path) -> None:
    line = "assert self.norm.weight.dtype is torch.float32"
    assert graph_of(tmp_path, line, Precision.BF16).ops


def _casts(graph: Graph) -> list[Value]:
    return [op.argument("dtype") for op in ops_of(graph, "to")]
