"""Ops compute the same as printed, and in every layout; and a trial notices where they do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopar.codegen.forward.ops import arguments as op_arguments
from autopar.planner.rules import table
from tests.cells import cells
from tests.field.op_trial import Kind, database, findings

# Each was wrong once, or is printed, or split, in a way of its own.
NAMES = (
    "amax", "roll", "mT", "topk", "diff", "matmul", "squeeze", "tensordot", "cdist", "stft",
    "einsum", "block_diag", "as_strided", "real", "nn.functional.pad.reflect",
    "nn.functional.max_unpool2d", "nn.functional.interpolate.trilinear",
    "nn.functional.adaptive_max_pool2d", "nn.functional.conv1d", "nn.functional.embedding_bag",
    "nn.functional.cross_entropy",
)  # fmt: skip


@pytest.fixture(scope="module")
def ops() -> dict[str, object]:
    return {
        ".".join(filter(None, (info.name, info.variant_test_name))): info for info in database()
    }


# For these stand others that are printed, or split, like them.
MORE = {
    "nn.functional.conv1d", "nn.functional.pad.reflect", "nn.functional.max_unpool2d",
    "nn.functional.adaptive_max_pool2d", "nn.functional.embedding_bag", "squeeze", "amax", "diff",
    "stft", "as_strided", "tensordot", "block_diag",
}  # fmt: skip


@pytest.mark.parametrize("name", cells(NAMES, set(NAMES) - MORE))
def test_an_op_is_the_same_as_printed_and_in_every_layout(
    name: str, ops: dict[str, object]
) -> None:
    found = list(findings(ops[name]))
    assert any(one.kind is Kind.SAME for one in found)
    assert [one for one in found if one.kind not in (Kind.SAME, Kind.REFUSED)] == []


def _sample(value: torch.Tensor, *args: object, **kwargs: object) -> SimpleNamespace:
    return SimpleNamespace(input=value, args=args, kwargs=kwargs)


def _info(function: object, *samples: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        op=function, inplace_variant=None, sample_inputs=lambda *_, **__: samples
    )


def test_a_dim_that_is_not_printed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_arguments.Arguments, "is_default", lambda *_: True)
    (found,) = findings(_info(torch.amax, _sample(torch.rand(2, 3), 1)))
    assert found.kind is Kind.PRINTED


def test_a_split_along_a_dim_that_belongs_together_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = {**table.TABLE, "aten.cumsum.default": table.TABLE["aten.relu.default"]}
    monkeypatch.setattr(table, "TABLE", wrong)
    (found,) = findings(_info(torch.cumsum, _sample(torch.rand(4, 4), 1)))
    assert found.kind is Kind.SPLIT
