"""Ops that draw random numbers, and those that only could."""

import pytest
import torch

from autopar.planner.graph.ops import Op, Value
from autopar.planner.rules.rule import _draws, is_random


def _op(target: str, **arguments: Value) -> Op:
    return Op(
        name="op",
        target=target,
        arguments=tuple(arguments.items()),
        inputs=(),
        outputs=("out",),
        call="",
        grad_enabled=True,
    )


@pytest.mark.parametrize(
    "op",
    [
        _op("aten.rand.default"),
        _op("aten.normal.float_float"),
        _op("aten.geometric_.default", p=0.5),
        _op("aten.dropout.default", p=0.1, train=True),
        _op("aten.scaled_dot_product_attention.default", dropout_p=0.1),
        _op("aten.rrelu.default", training=True),
    ],
    ids=lambda op: op.target,
)
def test_ops_that_draw_numbers_are_known(op: Op) -> None:
    assert is_random(op)


@pytest.mark.parametrize(
    "op",
    [
        _op("aten.linear.default"),
        _op("aten.dropout.default", p=0.0, train=True),
        _op("aten.dropout.default", p=0.1, train=False),
        _op("aten.rrelu.default", training=False),
        _op("aten.lstm.input", dropout=0.0, train=True),
        _op("aten.scaled_dot_product_attention.default", dropout_p=0.0),
        _op("of.no_library.at_all"),
    ],
    ids=lambda op: op.target,
)
def test_ops_that_draw_no_numbers_are_known(op: Op) -> None:
    assert not is_random(op)


def test_the_public_ops_that_draw_are_those_that_torch_marks() -> None:
    for schema in torch._C._jit_get_all_schemas():
        library, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None)
        overload = schema.overload_name or "default"
        if library == "aten" and not name.startswith("_") and hasattr(packet, overload):
            is_marked = torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
            assert _draws(f"aten.{name}.{overload}") == is_marked, schema
