"""What multiplies has FLOPs: those that torch counts, or textbook figures where it counts none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autopar.planner.annotate import OpWork, annotate, total_work
from autopar.planner.axes.infer import infer_axes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op, Ref, Value
from autopar.planner.inspection import unpriced
from autopar.planner.precision import Precision
from autopar.planner.rules.rule import Computation
from autopar.planner.rules.table import TABLE, has_row, rule_of
from autopar.planner.trace import trace
from tests.cells import cells
from tests.planner.rules.multiplying_models import ALIKE, HOLDERS, MODULES, Subject, function

ROWS = 3


def work_of(graph: Graph) -> OpWork:
    done = annotate(graph, infer_axes(graph), batch=ROWS, precision=Precision.FP32)
    return total_work(graph.ops, done)


def counted(subject: Subject) -> tuple[int, int]:
    """Return what torch counts of a forward and a backward."""
    with torch.device("meta"):
        model, batch = subject.model(), subject.batch(ROWS)
    with FlopCounterMode(display=False) as forward:
        loss = model(**batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_every_module_of_torch_with_parameters_is_tried() -> None:
    tried = {name.split(" ")[0] for name in MODULES} | ALIKE | HOLDERS
    made = (getattr(nn, name) for name in dir(nn))
    with_parameters = {
        one.__name__
        for one in made
        if inspect.isclass(one) and issubclass(one, nn.Module) and "Parameter" in _source(one)
    }
    assert with_parameters - tried == set()


def _source(kind: type) -> str:
    """Return the source of a class and of those that it is derived from."""
    return "".join(inspect.getsource(one) for one in kind.__mro__ if one not in (object, nn.Module))


# Their layers are tried alone.
COMPOSED = {
    "Transformer",
    "TransformerDecoder",
    "TransformerEncoder",
    "GRU",
    "LSTM with a projection",
}


@pytest.mark.parametrize("name", cells(MODULES, MODULES.keys() - COMPOSED))
def test_modules_have_the_flops_that_torch_counts(name: str) -> None:
    graph = trace(MODULES[name].file())
    assert list(unpriced(graph, infer_axes(graph))) == []
    work, (forward, backward) = work_of(graph), counted(MODULES[name])
    if name == "Bilinear":  # torch counts none; 2·3·(6·4·5 + 6·5), and both inputs' gradients
        assert (work.forward_flops, work.backward_flops) == (900, 900)
        return
    assert work.forward_flops == forward
    if "Transformer" not in name:  # flash attention's backward has 5 products, torch's on meta 4
        assert work.backward_flops == backward


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_what_is_grouped_has_the_flops_of_its_groups(kind: type[nn.Module]) -> None:
    def flops(groups: int) -> int:
        subject = Subject(build=lambda: kind(4, 6, 3, groups=groups), shape=(4, 8))
        return work_of(trace(subject.file())).forward_flops

    assert flops(2) == flops(1) // 2


@pytest.mark.parametrize("kind", cells(("lstm", "gru", "rnn_tanh"), ("lstm",)))
def test_a_batch_in_the_second_dim_counts_alike(kind: str) -> None:
    make = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[kind]
    first = Subject(build=lambda: make(6, 5, batch_first=True), shape=(3, 6))
    second = Subject(
        build=lambda: make(6, 5), shape=(3, 6), run=lambda rnn, x: rnn(x.transpose(0, 1))
    )
    assert work_of(trace(first.file())).forward_flops == work_of(trace(second.file())).forward_flops


def test_every_op_of_torchs_registry_has_a_formula() -> None:
    # backwards are not in a traced model, and flex_attention is refused while it is traced
    targets = {str(op) for op in flop_registry if "backward" not in str(op)} - {"flex_attention"}
    formulas = {
        ".".join(name.split(".")[:2]) for name, rule in TABLE.items()
        if rule.contracts or rule.computes
    }  # fmt: skip
    assert targets - formulas == set()


class _Sized:
    """An op on tensors of some shapes, as formulas see it."""

    def __init__(self, target: str, shapes: Mapping[str, tuple[int, ...]], **given: Value) -> None:
        self.op = Op(
            name="op", target=target, inputs=tuple(shapes), outputs=("out",), call="",
            arguments=(*((name, Ref(name)) for name in shapes), *given.items()), grad_enabled=True,
        )  # fmt: skip
        self._shapes = shapes

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._shapes[tensor]


def formula(target: str, shapes: Mapping[str, tuple[int, ...]], **given: Value) -> Computation:
    computes = rule_of(target).computes
    assert computes is not None
    return computes(_Sized(target, shapes, **given))


_HEADS = {"query": (2, 3, 5, 4), "key": (2, 3, 7, 4), "value": (2, 3, 7, 6)}


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_by_the_name_of_its_kernel_has_the_flops_that_torch_counts(kind: str) -> None:
    name = f"_scaled_dot_product_{kind}_attention"
    counted = flop_registry[getattr(torch.ops.aten, name)](*_HEADS.values())
    assert formula(f"aten.{name}.default", _HEADS).forward_flops == counted


@pytest.mark.parametrize(
    "name", ["convolution", "_convolution", "cudnn_convolution", "convolution_overrideable",
             "_slow_conv2d_forward"],
)  # fmt: skip
def test_convolutions_by_the_name_of_their_kernel_have_their_flops(name: str) -> None:
    source = "self" if name in ("cudnn_convolution", "_slow_conv2d_forward") else "input"
    shapes = {source: (2, 4, 8, 8), "weight": (6, 4, 3, 3), "out": (2, 6, 6, 6)}
    found = formula(f"aten.{name}.default", shapes, transposed=False).forward_flops
    assert found == 2 * (2 * 6 * 6 * 6) * (4 * 3 * 3)


def test_a_product_of_scaled_numbers_has_the_flops_of_one() -> None:
    shapes = {"self": (8, 16), "mat2": (16, 4)}
    assert formula("aten._scaled_mm.default", shapes).forward_flops == 2 * 8 * 16 * 4
    groups = {"self": (8, 16), "mat2": (3, 16, 4)}
    assert formula("aten._scaled_grouped_mm.default", groups).forward_flops == 2 * 8 * 16 * 4


def test_a_packed_sequence_counts_its_rows() -> None:
    weights = {"w_ih": (20, 6), "w_hh": (20, 5)}
    shapes = {"data": (11, 6), "batch_sizes": (4,), "hx": (1, 3, 5), **weights}
    found = formula(
        "aten.lstm.data", shapes, params=(Ref("w_ih"), Ref("w_hh")), num_layers=1,
        bidirectional=False,
    )  # fmt: skip
    # 11 rows of 6 by 20 gates; in each of 4 steps 2 of them (11 // 4) of 5 by 20
    assert found.forward_flops == 2 * 11 * 6 * 20 + 4 * 2 * 2 * 5 * 20


# What is called with which shapes, and its FLOPs forward and backward, worked out by hand.
_A = (6, 6)
_CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, int]] = {
    "mv": (torch.mv, ((4, 6), (6,)), 48, 96),  # 2·4·6, and as much for each factor
    "dot": (torch.dot, ((6,), (6,)), 12, 24),
    "inner": (torch.inner, ((4, 6), (5, 6)), 240, 480),  # 2·4·5·6
    "addmv": (torch.addmv, ((4,), (4, 6), (6,)), 48, 96),
    "addbmm": (torch.addbmm, ((4, 5), (3, 4, 6), (3, 6, 5)), 720, 1440),  # 2·3·4·6·5
    "baddbmm": (torch.baddbmm, ((3, 4, 5), (3, 4, 6), (3, 6, 5)), 720, 1440),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, dims=2), ((3, 4, 5), (4, 5, 2)), 240, 480
    ),  # 2·3·(4·5)·2
    "einsum": (lambda a, b: torch.einsum("ij,jk", a, b), ((4, 6), (6, 5)), 240, 480),
    "multi_dot": (  # 6×2 by 2×9 and that by 9×3 is 2·108 + 2·162; from the right 2·54 + 2·36
        lambda *a: torch.linalg.multi_dot(a), ((6, 2), (2, 9), (9, 3)), 180, 360
    ),
    "linalg_matmul": (torch.linalg.matmul, ((4, 6), (6, 5)), 240, 480),
    "cdist": (torch.cdist, ((4, 6), (5, 6)), 240, 480),
    "bilinear": (functional.bilinear, ((3, 4), (3, 5), (6, 4, 5)), 900, 1800),  # 2·3·(6·4·5 + 6·5)
    "matrix_power": (lambda a: torch.matrix_power(a, 5), (_A,), 1296, 2592),  # a², a⁴, a⁵: 3·2·6³
    "inverse": (torch.inverse, (_A,), 432, 864),  # 2·6³, and two products
    "cholesky": (lambda a: torch.linalg.cholesky(a @ a.mT), (_A,), 72 + 432, 864 + 864),
    "solve": (torch.linalg.solve, (_A, (6, 2)), 288, 288),  # ⅔·6³ + 2·6²·2; 2·72 twice
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), (_A, (6, 2)), 72, 216
    ),  # 6²·2; as much again, and the product 2·6²·2
    "qr": (torch.linalg.qr, ((8, 6),), 864, 1728),  # 4·8·36 − 4/3·216; 6·8·36
    "svd": (torch.linalg.svd, (_A,), 5616, 1728),  # 26·6³, 8·6³
    "eigh": (torch.linalg.eigh, (_A,), 1944, 1296),  # 9·6³, 6·6³
    "matrix_exp": (torch.matrix_exp, (_A,), 3456, 27648),  # 16·6³; eight times as much
    "fft": (torch.fft.fft, ((3, 16),), 960, 960),  # 5·3·16·log₂ 16
    "rfft": (torch.fft.rfft, ((3, 16),), 480, 480),
    "fft2": (torch.fft.fft2, ((3, 4, 4),), 960, 960),  # 5·48·log₂ 16
    "weighed bag": (
        lambda w, s: functional.embedding_bag(torch.arange(6).view(2, 3), w, per_sample_weights=s,
                                     mode="sum"), ((6, 4), (2, 3)), 48, 48
    ),  # 2·6·4
}  # fmt: skip


@pytest.mark.parametrize("name", _CALLS)
def test_functions_have_their_flops(name: str) -> None:
    call, shapes, forward, backward = _CALLS[name]
    graph = trace(function(call, *shapes).file())
    done = work_of(graph)
    assert (done.forward_flops, done.backward_flops) == (forward, backward)


def test_moving_rows_has_a_line_and_no_flops() -> None:
    def run(prelu: nn.Module, x: Tensor) -> Tensor:
        return functional.fold(functional.unfold(prelu(x), 2), (5, 5), 2)

    fold = Subject(build=nn.PReLU, shape=(2, 5, 5), run=run)
    graph = trace(fold.file())
    assert work_of(graph).forward_flops == 0
    assert all(has_row(op.target) for op in graph.ops)


def test_an_op_without_a_formula_is_named_with_its_share() -> None:
    graph = trace(function(lambda a: torch.i0(a), (4, 4)).file())
    found, *more = unpriced(graph, infer_axes(graph))
    assert not more
    assert found.target == "aten.i0.default"
    assert 0.05 < found.share < 1
