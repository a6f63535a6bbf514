"""The columns of the table name arguments that PyTorch's ops have."""

from __future__ import annotations

import pytest
import torch

from autopar.planner.rules.table import TABLE, rule_out_of_place

_ATEN = [target for target in TABLE if target.startswith("aten.")]


def _arguments(target: str) -> set[str]:
    _, name, overload = target.split(".")
    schema = getattr(getattr(torch.ops.aten, name), overload)._schema
    return {argument.name for argument in schema.arguments}


@pytest.mark.parametrize("target", _ATEN)
def test_columns_name_arguments_of_the_op(target: str) -> None:
    rule = TABLE[target]
    named = {*rule.factors, *rule.cuts, rule.sizes, "" if rule.added == "bias" else rule.added}
    assert named - {""} <= _arguments(target)
    assert not rule.cuts or "dim" in _arguments(target)
    assert not rule.written_by or rule.written_by in TABLE


def test_an_op_that_writes_in_place_has_the_rule_of_the_op_that_does_not() -> None:
    assert rule_out_of_place("aten.exp_.default") is TABLE["aten.exp.default"]
    assert rule_out_of_place("aten.add_.Tensor") is TABLE["aten.add_.Tensor"]
