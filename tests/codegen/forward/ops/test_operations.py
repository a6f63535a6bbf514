"""What is printed of an op computes what the op does."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.codegen.forward.ops.arguments import PrintedPlace
from autopar.codegen.forward.ops.special_ops import printed
from autopar.codegen.forward.ops.table import SPLIT_FUNCTIONS
from autopar.codegen.text.expressions import rendered, text
from autopar.planner.graph.ops import MODEL_DTYPE, Op, Ref, Value
from autopar.planner.graph.ops import Tensor as Traced
from autopar.planner.rules.table import split_functions
from autopar.planner.trace import trace
from autopar.runtime import tensor
from tests.planner.rules.calculating import file_of

ROWS = 4
MODULES = {"F": functional, "torch": torch, "operator": operator}
CALCULATIONS: dict[str, str] = {
    "mse_loss": "F.mse_loss(x, y, reduction='sum')",
    "l1_loss": "F.l1_loss(x, y, reduction='sum')",
    "smooth_l1_loss": "F.smooth_l1_loss(x, y, reduction='sum', beta=0.5)",
    "huber_loss": "F.huber_loss(x, y, reduction='sum', delta=0.5)",
    "kl_div": "F.kl_div(x, y, reduction='sum', log_target=True)",
    "binary_cross_entropy": "F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction='sum')",
    "binary_cross_entropy_with_logits": "F.binary_cross_entropy_with_logits(x, y.sigmoid())",
    "soft_margin_loss": "F.soft_margin_loss(x, y, reduction='sum')",
    "poisson_nll_loss": "F.poisson_nll_loss(x, y, reduction='sum')",
    "hinge_embedding_loss": "F.hinge_embedding_loss(x, y.sign(), margin=0.5)",
    "margin_ranking_loss": "F.margin_ranking_loss(x, y, y.sign(), margin=0.5, reduction='none')",
    "triplet_margin_loss": "F.triplet_margin_loss(x, y, x + y, p=1.0, swap=True)",
    "stft": "torch.stft(x[..., 0], 2, 1, center=False, return_complex=True).real",
    "batch_norm": "F.batch_norm(x, None, None, training=True)",
    "repeat_interleave": "x.repeat_interleave(2, dim=1, output_size=6)",
    "im2col": "F.unfold(x.unsqueeze(1), 2)",
    "col2im": "F.fold(F.unfold(x.unsqueeze(1), 2), (3, 6), 2)",
    "zeros_like": "x + torch.zeros_like(x, memory_format=torch.contiguous_format)",
    "mul": "(x * (0.5 - 2j)).imag",
    "__xor__": "(x > y) ^ (x < 0)",
    "bitwise_left_shift": "1 << x.long()",
    "__rshift__": "x.long() >> 1",
    "__iand__": "operator.iand((x > y).clone(), x < 0)",
    "__ixor__": "operator.ixor(x.long().clone(), 3)",
    "outer": "torch.outer(x[0, 0], y[0, 0])",
}


@pytest.mark.parametrize("name", CALCULATIONS)
def test_what_is_printed_computes_what_the_op_does(name: str) -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        given = {
            "F": functional,
            "torch": torch,
            "operator": operator,
            "x": x @ weight,
            "y": x.cos(),
        }
        found: Tensor = eval(CALCULATIONS[name], given)
        return found.sum() * weight

    graph = trace(file_of(calculate))
    op = next(op for op in graph.ops if op.target.split(".")[1] == name)
    given = [_drawn(graph.tensors[one]) for one in op.inputs]
    names = tuple(text(f"given[{i}]") for i in range(len(given)))
    place = PrintedPlace(inputs=names, training=text("True"), dtype=None, device=None, sizes={})
    line, _ = rendered(printed(op, place), lambda _: pytest.fail("a value without a name"))
    expected = _called(op, [one.clone() for one in given])
    assert "__" not in line  # which no script may say
    assert torch.equal(eval(line, {**MODULES, "given": given}), expected)


def _drawn(tensor: Traced) -> Tensor:
    numbers = torch.rand([size.at(ROWS) for size in tensor.shape])
    is_whole = tensor.dtype != MODEL_DTYPE
    return (8 * numbers - 4).to(getattr(torch, tensor.dtype)) if is_whole else numbers


def _called(op: Op, given: list[Tensor]) -> Tensor:
    namespace, packet, overload = op.target.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    rest = iter(given)
    named = {key: next(rest) if isinstance(v, Ref) else _meant(v) for key, v in op.arguments}
    result: Tensor = function(**named)
    return result


def _meant(value: Value) -> object:
    """Return what an argument stands for; the graph has torch's own constants by name."""
    is_name = isinstance(value, str) and value.startswith("torch.")
    return getattr(torch, str(value).removeprefix("torch.")) if is_name else value


@pytest.mark.parametrize("name", sorted(set(split_functions())))
def test_the_runtime_s_function_for_a_split_op_is_given_its_arguments(name: str) -> None:
    row = SPLIT_FUNCTIONS[name]
    parameters = inspect.signature(getattr(tensor, name)).parameters
    required = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty]
    assert len(row.positional) == len(required)
    assert row.positional[-1] == required[-1] == "axis"
    assert {keyword for keyword, _ in row.keywords} <= parameters.keys() - set(required)
