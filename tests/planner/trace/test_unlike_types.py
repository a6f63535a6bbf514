"""Element types in 16 bits: what a model casts there, and what torch would not compute."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE, DType, Value
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.cells import cells
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


def graph_of(folder: Path, line: str, precision: Precision) -> Graph:
    file = load_model_file(str(written(folder, MODEL.format(line=line))))
    return trace(file, precision=precision)


def is_traced(folder: Path, line: str, precision: Precision) -> bool:
    """Whether a model that runs with weights of that precision alone is traced.

    A trace in 16 bits that fails for some other reason is followed by one with wider weights.
    """
    only = f"assert self.linear.weight.dtype.itemsize {'==' if precision.is_half else '>'} 2"
    (product,) = ops_of(graph_of(folder, f"{line}; {only}", precision), "linear")
    return product.location == f"{folder / 'subject.py'}:{_returns(folder)}"


def _returns(folder: Path) -> int:
    return line_of(folder / "subject.py", "return self.lin")


LINES = (
    "x = x + torch.rand(4)",
    "x = x.float()",
    "x = torch.cat([x, torch.zeros(x.shape[0], 4)])",
    "x = x * torch.arange(4).float()",
    "x = self.norm(x.float())",
)
HALF = (Precision.BF16, Precision.FP16)
STAND = [(line, HALF[number % 2]) for number, line in enumerate(LINES)]


@pytest.mark.parametrize(("line", "precision"), cells(product(LINES, HALF), STAND))
def test_float32_that_meets_16_bit_weights_is_refused(
    tmp_path: Path, line: str, precision: Precision
) -> None:
    with pytest.raises(TraceError, match=f"in {precision}, l.* multiplies float32 by") as told:
        graph_of(tmp_path, line, precision)
    assert "--precision fp32" in told.value.fix
    meets = line_of(tmp_path / "subject.py", "self.norm(x" if "norm" in line else "return self.lin")
    assert told.value.where.startswith(f"{tmp_path / 'subject.py'}:{meets}, in module ")
    assert is_traced(tmp_path, line, Precision.FP32)


PAIRS = {
    "cross_entropy_loss": "F.cross_entropy(x, torch.arange(7), {float32})",
    "nll_loss_nd": "F.nll_loss(x, torch.arange(7), {float32})",
    "binary_cross_entropy": "F.binary_cross_entropy(x.sigmoid(), {float32}.expand_as(x))",
    "index_add_": "x.clone().index_add_(0, torch.arange(4), {float32}.expand(4, 4))",
    "index_put": "x.index_put((torch.arange(4),), {float32}.expand(4, 4))",
    "grid_sampler": "F.grid_sample(x[None, None], {float32}.view(1, 2, 1, 2))",
    "embedding_bag": "F.embedding_bag(torch.arange(4)[None], x, mode='sum', "
    "per_sample_weights={float32}[None])",
}


@pytest.mark.parametrize("name", cells(PAIRS, ("cross_entropy_loss", "index_put")))
def test_arguments_that_torch_wants_in_one_type_are_refused_in_two(
    tmp_path: Path, name: str
) -> None:
    line = f"x = x + {PAIRS[name].format(float32='torch.ones(4)')}.mean()"
    with pytest.raises(
        TraceError, match=f"in bf16, {name} computes in .*own type, and its .* is f"
    ):
        graph_of(tmp_path, line, Precision.BF16)
    assert is_traced(tmp_path, line, Precision.FP32)
    cast = line.replace("torch.ones(4)", "torch.ones(4).to(x)")
    assert is_traced(tmp_path, cast, Precision.BF16)


def test_a_loss_of_the_model_file_takes_outputs_in_float32(tmp_path: Path) -> None:
    loss = """
    def loss(logits, batch):
        return F.cross_entropy(logits, logits.argmax(-1), weight=torch.ones(4))
    """
    path = written(tmp_path, MODEL.format(line="") + loss)
    graph = trace(load_model_file(str(path)), precision=Precision.BF16)
    assert graph.tensors[graph.loss].dtype == "float32"
    assert "model" in {tensor.dtype for tensor in graph.tensors.values()}
    refused = path.read_text().replace("torch.ones(4)", "torch.ones(4, dtype=torch.double)")
    path.write_text(refused)
    with pytest.raises(TraceError, match="cross_entropy_loss") as told:
        trace(load_model_file(str(path)), precision=Precision.BF16)
    assert told.value.where == f"{path}:{line_of(path, 'return F.cross_entropy')}"


def test_weights_of_classes_of_which_every_row_has_a_share_may_be_of_any_type(
    tmp_path: Path,
) -> None:
    line = "x = x + F.cross_entropy(x, x.softmax(-1), torch.ones(4))"
    assert is_traced(tmp_path, line + ".to(x)", Precision.BF16)


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
    assert is_traced(tmp_path, line, Precision.BF16)


def test_ops_that_torch_lacks_in_16_bits_are_refused_there(tmp_path: Path) -> None:
    line = "x = x + torch.linalg.inv(torch.diag(self.norm.weight))[0]"
    with pytest.raises(TraceError, match=r"in bf16, torch does not compute .*bfloat16") as told:
        graph_of(tmp_path, line, Precision.BF16)
    assert "x.float()" in told.value.fix
    assert is_traced(tmp_path, line, Precision.FP32)
    cast = line.replace("norm.weight", "norm.weight.float()").replace("[0]", "[0].to(x.dtype)")
    assert is_traced(tmp_path, cast, Precision.BF16)


@pytest.mark.parametrize(
    "line",
    [
        "x = x + torch.linalg.qr(x[:4])[0].sum()",
        "x = x + torch.cdist(x[None], x[None])[0].sum()",
        "x = x + torch.polar(x, x).abs()",
        "x = x + torch.fft.rfft(x).abs().sum()",
        "x = x + F.ctc_loss(x[None].log_softmax(-1).expand(6, -1, -1), torch.ones_like(x, "
        "dtype=int)[:, :2], *torch.tensor([[6], [2]]).expand(-1, x.shape[0]))",
    ],
)
def test_what_tensors_without_memory_let_pass_in_16_bits_is_refused(
    tmp_path: Path, line: str
) -> None:
    with pytest.raises(TraceError, match=r"in bf16, torch does not compute") as told:
        graph_of(tmp_path, line, Precision.BF16)
    assert told.value.where.startswith(f"{tmp_path / 'subject.py'}:")
    assert is_traced(tmp_path, line, Precision.FP32)


def test_a_model_that_asks_for_the_type_of_its_weights_casts_in_16_bits_alone(
    tmp_path: Path,
) -> None:
    line = "own = self.norm.weight.dtype; x = x.float(); x = x.to(own) if own.itemsize == 2 else x"
    graph = graph_of(tmp_path, line, Precision.BF16)
    assert DType(MODEL_DTYPE) in _casts(graph)
    assert DType(MODEL_DTYPE) not in _casts(graph_of(tmp_path, line, Precision.FP32))


def test_a_model_that_only_float32_can_trace_is_traced_in_that(tmp_path: Path) -> None:
    line = "assert self.norm.weight.dtype is torch.float32"
    (product,) = ops_of(graph_of(tmp_path, line, Precision.BF16), "linear")
    assert product.location == f"{tmp_path / 'subject.py'}:{_returns(tmp_path)}"


def _casts(graph: Graph) -> list[Value]:
    return [op.argument("dtype") for op in ops_of(graph, "to")]
