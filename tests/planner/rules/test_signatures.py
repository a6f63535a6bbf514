"""Signatures say which dims of an op's tensors are split together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.planner.axes.infer import infer_axes
from autopar.planner.graph.ops import Op
from autopar.planner.rules.signature import Dim, Signature, leaves, size_of
from autopar.planner.trace import trace
from tests.planner.rules.calculating import Calculate, file_of


def signature_in(calculate: Calculate, target: str) -> tuple[Op, Signature]:
    """Trace a model of one calculation, and return its op of this name with its signature."""
    graph = trace(file_of(calculate))
    op = next(op for op in graph.ops if op.target.split(".")[1] == target)
    return op, infer_axes(graph).ops[op.name].signature


def letters(dim: Dim) -> set[str]:
    return {leaf.name for leaf in leaves(dim)}


def test_what_is_added_to_a_batched_product_has_its_letters() -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        added = x[:, :1, :].expand(-1, 1, 6)  # [batch, 1, 6]
        product = x.transpose(1, 2) @ x  # [batch, 6, 6]
        return torch.baddbmm(added, product, product) * weight.sum()

    op, signature = signature_in(calculate, "baddbmm")
    added, result = dict(signature.operands)[op.inputs[0]], signature.results[0][1]
    assert (added[0], added[2]) == (result[0], result[2])


def test_what_is_added_to_a_product_has_its_letters() -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        rows = x[:, 0]
        return torch.addmm(rows @ weight, rows, weight)

    op, signature = signature_in(calculate, "addmm")
    assert dict(signature.operands)[op.inputs[0]] == signature.results[0][1]


@pytest.mark.parametrize("equation", ["...d,de->...e", "b...d,de", "...md,de->...me"])
def test_what_dots_of_an_equation_stand_for_has_letters(equation: str) -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum(equation, x, weight)

    op, signature = signature_in(calculate, "einsum")
    (_, left), (_, right) = signature.operands
    if "->" not in equation:  # dots, then what is named once, by the alphabet: m b e
        assert signature.results[0][1] == (left[1], left[0], right[1])
    else:
        assert signature.results[0][1] == (*left[:2], right[1])
    assert left[2] == right[0]
    assert op.inputs == ("x", "weight")


def test_an_empty_part_of_a_concatenation_has_its_other_dims() -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat((x * weight.sum(), x[..., 6:]), dim=-1)

    _, signature = signature_in(calculate, "cat")
    whole, empty = (dims for _, dims in signature.operands)
    assert empty[:2] == whole[:2]
    assert letters(empty[2]) <= signature.whole
    assert signature.results[0][1] == whole


def test_a_mean_over_pairs_has_the_letters_of_both() -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        return functional.mse_loss(x @ weight, x)

    _, signature = signature_in(calculate, "mse_loss")
    (_, one), (_, other) = signature.operands
    assert one == other
    assert signature.results[0][1] == ()


def test_tensors_that_are_broadcast_have_the_dims_of_all() -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        alike: list[Tensor] = torch.functional.broadcast_tensors(x, weight[0])  # type: ignore[no-untyped-call]
        return alike[0] * alike[1]

    _, signature = signature_in(calculate, "broadcast_tensors")
    assert signature.operands[1][1] == signature.results[1][1][-1:]


def test_every_dim_of_a_view_whose_borders_do_not_meet_has_a_letter_of_its_own() -> None:
    def calculate(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).transpose(1, 2).reshape(-1, 9, 2).reshape(-1, 2, 9) * 2

    graph = trace(file_of(calculate))
    op = [op for op in graph.ops if op.target == "aten.reshape.default"][-1]
    signature = infer_axes(graph).ops[op.name].signature
    (_, taken), (_, given) = signature.operands[0], signature.results[0]
    assert [size_of(dim).at(0) for dim in (*taken[1:], *given[1:])] == [9, 2, 2, 9]
    assert taken[0] == given[0]
    assert letters(taken[1]) | letters(taken[2]) | letters(given[2]) <= signature.whole


def test_an_outer_product_has_the_letters_of_both() -> None:
    op, signature = signature_in(lambda x, w: torch.outer(x[0, 0], w[0]).sum() * w, "outer")
    (left,), (right,) = (dict(signature.operands)[name] for name in op.inputs)
    assert signature.results[0][1] == (left, right)


def test_what_only_tells_a_type_has_no_letters() -> None:
    op, signature = signature_in(lambda x, w: x.long()[:, :, 0].type_as(x).sum() * w, "type_as")
    assert [name for name, _ in signature.operands] == [op.inputs[0]]


def test_what_is_expanded_to_another_has_its_dims() -> None:
    op, signature = signature_in(lambda x, w: x[:, :1].expand_as(x) * w.sum(), "expand_as")
    assert dict(signature.operands)[op.inputs[1]] == signature.results[0][1]


def test_a_view_in_the_sizes_of_another_has_its_dims() -> None:
    op, signature = signature_in(lambda x, w: (x * w.sum()).flatten(1).view_as(x), "view_as")
    assert dict(signature.operands)[op.inputs[1]] == signature.results[0][1]


def test_a_part_that_is_written_anew_keeps_the_other_dims() -> None:
    _, signature = signature_in(
        lambda x, w: torch.slice_scatter(x @ w, x[..., :2], dim=2, end=2), "slice_scatter"
    )
    whole, part = (dims for _, dims in signature.operands)
    assert signature.results[0][1] == whole
    assert part[:2] == whole[:2]
    assert letters(whole[2]) | letters(part[2]) <= signature.whole
