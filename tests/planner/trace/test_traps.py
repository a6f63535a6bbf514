"""Models that a trace would get wrong without a word: each is refused, or kept right."""

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from autopar.planner.graph.ops import Ref
from tests.planner.trace.model_source import line_of, ops_of, traced, written

RANDOM = """
    import random
    import numpy as np

    GENERATOR = np.random.default_rng(0)
    OLD_GENERATOR = np.random.RandomState(0)
    PYTHON_GENERATOR = random.Random(0)
    DRAW = random.random

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.generator = random.Random(0)

        def forward(self, x):
            noise = {draw}  # the draw
            return self.linear(x) * float(noise)

    def build_model():
        return Noisy()
"""

DOUBLED_BACKWARD = """
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient * ctx.scale, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return Doubled.apply(self.linear(x), 3.0)

    def build_model():
        return {model}
"""


def test_the_backward_of_a_custom_function_is_not_lost(tmp_path: Path) -> None:
    graph = traced(tmp_path, DOUBLED_BACKWARD.format(model="Model()"))
    (call,) = (call for call in graph.calls.values() if call.is_function)
    (linear,) = ops_of(graph, "linear")
    (scaled,) = (op for op in graph.ops if op.call == call.key)
    assert (call.class_name, call.parent) == ("Doubled", "")
    assert call.arguments == (Ref(linear.outputs[0]), 3.0)
    assert call.result == Ref(scaled.outputs[0])


def test_a_custom_function_is_seen_in_each_of_equal_blocks(tmp_path: Path) -> None:
    graph = traced(tmp_path, DOUBLED_BACKWARD.format(model="Stack(Model(), Model())"))
    functions = [call for call in graph.calls.values() if call.is_function]
    assert [call.parent for call in functions] == ["0", "1"]


def test_a_custom_function_in_the_loss_is_seen(tmp_path: Path) -> None:
    custom_loss = """
    def loss(outputs, batch):
        return Doubled.apply(outputs, 2.0).mean()
    """
    graph = traced(tmp_path, DOUBLED_BACKWARD.format(model="Stack(nn.Linear(4, 4))") + custom_loss)
    (call,) = (call for call in graph.calls.values() if call.is_function)
    assert call.parent is None


@pytest.mark.parametrize(
    "draw",
    [
        "random.random()",
        "random.choice([1, 2, 3])",
        "random.triangular()",
        "PYTHON_GENERATOR.random()",
        "self.generator.random()",
        "DRAW()",
        "np.random.rand()",
        "np.random.standard_normal()",
        "OLD_GENERATOR.rand()",
        "np.random.default_rng(0).random()",
        "GENERATOR.random()",
    ],
)
def test_randomness_outside_torch_is_refused(tmp_path: Path, draw: str) -> None:
    with pytest.raises(TraceError, match="random numbers of Python or numpy"):
        traced(tmp_path, RANDOM.replace("{draw}", draw))


@pytest.mark.parametrize(
    "draw", ["random.random()", "np.random.rand()", "np.random.default_rng().random()"]
)
def test_the_draw_is_named_by_file_and_line(tmp_path: Path, draw: str) -> None:
    source = RANDOM.replace("{draw}", draw)
    with pytest.raises(TraceError) as raised:
        traced(tmp_path, source)
    path = written(tmp_path, source)
    assert raised.value.where == f"{path}:{line_of(path, 'the draw')}"


def test_randomness_of_torch_stays_random(tmp_path: Path) -> None:
    graph = traced(tmp_path, RANDOM.replace("{draw}", "1").replace("float(noise)", "torch.rand(4)"))
    assert len(ops_of(graph, "rand")) == 1


def test_randomness_while_the_model_is_built_is_fine(tmp_path: Path) -> None:
    source = RANDOM.replace("{draw}", "1").replace(
        "return Noisy()", "return Noisy() if DRAW() < 2 else 0"
    )
    assert ops_of(traced(tmp_path, source), "linear")


COUNTER = """
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            {initial}

        def forward(self, x):
            {change}
            return self.linear(x)

    def build_model():
        return Counter()
"""


@pytest.mark.parametrize(
    ("initial", "change"),
    [
        ("self.steps = 0", "self.steps += 1"),
        ("self.warm = False", "self.warm = True"),
        ("self.history = []", "self.history.append(1)"),
        ("self.state = torch.zeros(4)", "self.state = self.state + 1"),
        ("self.seen = {'steps': 0}", "self.seen['steps'] += 1"),
    ],
)
def test_a_step_counter_is_refused(tmp_path: Path, initial: str, change: str) -> None:
    with pytest.raises(TraceError, match=r"the forward changes the attribute \w+") as raised:
        traced(tmp_path, COUNTER.format(initial=initial, change=change))
    assert raised.value.where == "module (root)"
    assert "register_buffer" in raised.value.fix


@pytest.mark.parametrize(
    ("initial", "change"),
    [
        ("self.width = 4", "self.width = 4"),
        ("self.width = None", "self.width = x.shape[1]"),
        ("pass", "self.width = x.shape[1]"),
    ],
)
def test_a_cache_that_is_filled_once_is_fine(tmp_path: Path, initial: str, change: str) -> None:
    assert ops_of(traced(tmp_path, COUNTER.format(initial=initial, change=change)), "linear")


TIED = """
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.again = self.head

        def forward(self, x):
            return self.again(self.embedding(x.long()))

    def build_model():
        return Tied()
"""


def test_tied_weights_are_one_parameter_under_its_first_name(tmp_path: Path) -> None:
    graph = traced(tmp_path, TIED)
    (parameter,) = graph.parameters
    assert parameter.name == "embedding.weight"
    assert parameter.aliases == ("head.weight", "again.weight")
    (embedding,), (linear,) = ops_of(graph, "embedding"), ops_of(graph, "linear")
    assert embedding.argument("weight") == linear.argument("weight") == Ref("embedding.weight")


@pytest.mark.parametrize(
    "mapped",
    ["torch.vmap(lambda row: row * row.sum())(self.linear(x))", "torch.vmap(self.linear)(x)"],
)
def test_what_is_mapped_over_rows_is_refused(tmp_path: Path, mapped: str) -> None:
    source = f"""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return {mapped}

        def build_model():
            return Model()
    """
    with pytest.raises(TraceError, match=r"torch\.vmap") as told:
        traced(tmp_path, source)
    line = line_of(tmp_path / "subject.py", "torch.vmap")
    assert f"subject.py:{line}" in told.value.where
    assert "broadcasting" in told.value.fix


CHANGING = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = {linear}
            self.register_buffer("top", torch.zeros(()))

        def forward(self, x):
            {change}
            return self.linear(x)

    def build_model():
        return Model()
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("self.linear.weight.data.clamp_(-1, 1)", "writes to the parameter linear.weight"),
        ("self.linear.weight.detach().mul_(2)", "writes to the parameter linear.weight"),
        ("self.linear.weight.data = x[:4] + 0", "replaces the numbers of a tensor"),
        ("x.data = x + 1", "replaces the numbers of a tensor"),
        (
            "self.linear.weight = nn.Parameter(self.linear.weight / 2)",
            "changes the attribute weight",
        ),
    ],
)
def test_a_forward_that_changes_its_weights_is_refused(
    tmp_path: Path, change: str, told: str
) -> None:
    with pytest.raises(TraceError, match=told):
        traced(tmp_path, CHANGING.format(change=change, linear="nn.Linear(4, 4)"))


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_norm_of_weights_in_torch_s_older_way_is_refused_with_the_newer(
    tmp_path: Path, name: str
) -> None:
    linear = f"nn.utils.{name}(nn.Linear(4, 4))"
    with pytest.raises(TraceError) as told:
        traced(tmp_path, CHANGING.format(change="pass", linear=linear))
    assert f"torch.nn.utils.parametrizations.{name}" in told.value.fix


def test_what_is_read_by_data_comes_from_its_tensor(tmp_path: Path) -> None:
    change = "x = self.linear(x); x = x / x.data.abs().max(); self.top.data.copy_(x.data.max())"
    graph = traced(tmp_path, CHANGING.format(change=change, linear="nn.Linear(4, 4)"))
    first, _ = ops_of(graph, "linear")
    (size,) = ops_of(graph, "abs")
    assert graph.tensors[size.inputs[0]].storage == first.outputs[0]
    assert graph.tensors[first.outputs[0]].requires_grad
    assert not graph.tensors[size.outputs[0]].requires_grad
    assert [buffer.updated for buffer in graph.buffers] == [True]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("x = x.to_sparse().to_dense()", "makes a sparse tensor"),
        (
            "x = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)",
            "cannot compute the shapes that aten.fake_quantize_per_tensor_affine_cachemask",
        ),
        ("x = F.embedding(x.long(), self.linear.weight, sparse=True)[:, 0]", "sparse gradients"),
    ],
)
def test_what_torch_cannot_trace_is_refused_with_its_line(
    tmp_path: Path, change: str, told: str
) -> None:
    with pytest.raises(TraceError, match=told) as error:
        traced(tmp_path, CHANGING.format(change=change, linear="nn.Linear(4, 4)"))
    line = line_of(tmp_path / "subject.py", change[:20])
    assert error.value.where.endswith(f"subject.py:{line}")
