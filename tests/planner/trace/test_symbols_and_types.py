"""What a graph says of sizes, element types and gradients."""

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import BATCH, MODEL_DTYPE, DType, Extent, constant
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision
from autopar.planner.trace import trace_for_rows
from tests.planner.trace.model_source import line_of, ops_of, traced, written

MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            y = self.linear(x)
            return {value}

    def build_model():
        return Model()
"""


def of_value(folder: Path, value: str) -> Graph:
    return traced(folder, MODEL.format(value=value))


@pytest.mark.parametrize(
    ("value", "kind", "shape"),
    [
        ("y.sigmoid()", "sigmoid", (BATCH, constant(6))),
        ("y.flatten().sigmoid()", "sigmoid", (Extent.of(0, 6),)),
        ("torch.cat([y, y[:1]]).sigmoid()", "sigmoid", (BATCH + constant(1), constant(6))),
        ("(y @ y.T).sigmoid()", "sigmoid", (BATCH, BATCH)),
        ("(y @ y.T).flatten().sigmoid()", "sigmoid", (Extent.of(0, 0, 1),)),
        ("y.view(-1, 2, 3).sigmoid()", "sigmoid", (BATCH, constant(2), constant(3))),
    ],
)
def test_sizes_are_polynomials_in_the_batch(
    tmp_path: Path, value: str, kind: str, shape: tuple[Extent, ...]
) -> None:
    graph = of_value(tmp_path, value)
    (op,) = ops_of(graph, kind)
    assert graph.tensors[op.outputs[0]].shape == shape
    assert graph.fixed_batch is None


@pytest.mark.parametrize(("other", "count"), [("y.relu()", 0), ("y[:, :1]", 1)])
def test_only_tensors_of_unlike_shapes_are_broadcast(
    tmp_path: Path, other: str, count: int
) -> None:
    graph = of_value(tmp_path, f"F.mse_loss(y, {other})")  # which broadcasts whatever it gets
    assert len(ops_of(graph, "broadcast_tensors")) == count


def test_a_model_that_fixes_its_batch_says_so(tmp_path: Path) -> None:
    graph = of_value(tmp_path, "y.view(7, 2, 3).sigmoid()")
    (op,) = ops_of(graph, "sigmoid")
    assert graph.fixed_batch == 7
    assert graph.tensors[op.outputs[0]].shape == (constant(7), constant(2), constant(3))


LISTING = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        return torch.stack([self.out(row) for row in x])  # here

def build_model():
    return Model()
"""


def test_where_a_model_fixes_its_batch_is_named(tmp_path: Path) -> None:
    graph = traced(tmp_path, LISTING)
    path = tmp_path / "subject.py"
    assert (graph.fixed_batch, graph.fixed_at) == (7, f"{path}:{line_of(path, '# here')}")


def test_a_model_that_takes_any_number_of_rows_but_one_at_a_time_is_traced_for_that(
    tmp_path: Path,
) -> None:
    file = load_model_file(str(written(tmp_path, LISTING)))
    assert trace_for_rows(file, 6, Precision.FP32).fixed_batch == 6
    assert trace_for_rows(file, None, Precision.FP32).fixed_batch == 7


def test_a_model_whose_code_has_the_number_of_rows_keeps_it(tmp_path: Path) -> None:
    source = LISTING.replace("torch.stack([self.out(row) for row in x])", "self.out(x.view(7, 4))")
    file = load_model_file(str(written(tmp_path, source)))
    assert trace_for_rows(file, 6, Precision.FP32).fixed_batch == 7


def test_a_size_that_is_no_whole_multiple_of_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        of_value(tmp_path, "y[: x.shape[0] // 2 + 1].sigmoid()")


def test_what_the_model_pins_to_float32_stays_visible(tmp_path: Path) -> None:
    graph = of_value(tmp_path, "y.float().softmax(-1).type_as(y).sigmoid()")
    kinds = {"linear": MODEL_DTYPE, "softmax": "float32", "sigmoid": MODEL_DTYPE}
    for kind, dtype in kinds.items():
        (op,) = ops_of(graph, kind)
        assert graph.tensors[op.outputs[0]].dtype == dtype
    assert {parameter.dtype for parameter in graph.parameters} == {MODEL_DTYPE}


def test_a_type_as_an_argument_is_that_of_the_model(tmp_path: Path) -> None:
    graph = of_value(tmp_path, "y * torch.arange(6, dtype=x.dtype) + torch.arange(6)")
    first, second = ops_of(graph, "arange")
    assert first.argument("dtype") == DType(MODEL_DTYPE)
    assert graph.tensors[second.outputs[0]].dtype == "int64"


def test_a_region_without_gradient_is_marked(tmp_path: Path) -> None:
    source = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                scale = y.sigmoid()
                with torch.enable_grad():
                    again = y.tanh()
            return y * scale * again.relu() * y.detach().exp()

    def build_model():
        return Model()
    """
    graph = traced(tmp_path, source)
    enabled = {"linear": True, "sigmoid": False, "tanh": True, "relu": True, "exp": True}
    gradient = {"linear": True, "sigmoid": False, "tanh": True, "relu": True, "exp": False}
    for kind in enabled:
        (op,) = ops_of(graph, kind)
        assert op.grad_enabled is enabled[kind]
        assert graph.tensors[op.outputs[0]].requires_grad is gradient[kind]


def test_a_model_in_half_precision_is_traced_as_it_is(tmp_path: Path) -> None:
    graph = traced(
        tmp_path,
        """
        def example_batch(batch_size):
            return {"x": torch.randn(batch_size, 4, dtype=torch.bfloat16)}

        def build_model():
            return Stack(nn.Linear(4, 4).to(torch.bfloat16))
        """,
    )
    (linear,) = ops_of(graph, "linear")
    assert graph.tensors[linear.outputs[0]].dtype == MODEL_DTYPE
    assert graph.tensors["x"].dtype == MODEL_DTYPE


def test_what_a_constructor_puts_elsewhere_is_traced_with_the_rest(tmp_path: Path) -> None:
    source = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.FloatTensor(4).fill_(1))

        def forward(self, x):
            return self.linear(x).float().type(self.scale.dtype) * self.scale

    def build_model():
        return Model()
    """
    graph = traced(tmp_path, source)
    (scaled,) = ops_of(graph, "mul")
    assert {graph.tensors[name].dtype for name in scaled.inputs} == {MODEL_DTYPE}


@pytest.mark.parametrize("loss", ["F.cross_entropy", "F.nll_loss"])
def test_the_losses_of_single_rows_have_the_rows_as_their_dim(tmp_path: Path, loss: str) -> None:
    source = f"""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            classes = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
            return {loss}(self.linear(x), classes, reduction="none").exp()

    def build_model():
        return Model()
    """
    graph = traced(tmp_path, source)
    (op,) = ops_of(graph, "exp")
    assert [str(size) for size in graph.tensors[op.outputs[0]].shape] == ["B"]


def test_gradients_flow_through_complex_numbers(tmp_path: Path) -> None:
    value = "torch.view_as_real(torch.view_as_complex(y.float().view(-1, 3, 2)) * 2).type_as(y)"
    graph = of_value(tmp_path, value)
    made = [graph.tensors[name] for op in graph.ops for name in op.outputs]
    assert {one.requires_grad for one in made} == {True}
    assert "complex64" in {one.dtype for one in made}
