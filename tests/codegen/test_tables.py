"""Tables of embeddings that tensor ranks share train as whole ones, by rows and by columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.planner.graph.layouts import LayoutKind
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.plain_loop import train_by_script, train_plainly
from tests.codegen.plans import plan_for
from tests.field.cells import MODELS, Subject
from tests.planner.subjects import ZOO

TABLES, RECOMMENDER = MODELS / "bags.py", ZOO / "dlrm.py"
FORMS = {
    "sum": ("mode=sum", "form=plain"),
    "weighed": ("mode=sum", "form=weighed"),
    "mean": ("mode=mean", "form=padded"),
    "offsets": ("mode=sum", "form=offsets"),
    "last offset": ("mode=mean", "form=last offset"),
    "sparse": ("mode=mean", "form=sparse"),
    "max": ("mode=max", "form=padded"),
}
BY_ROWS, BY_COLUMNS = "vocab", "embed"
DIMS = {BY_ROWS: 0, BY_COLUMNS: 1}
CELLS = [
    (form, axis, data)
    for form in FORMS
    for axis in (BY_ROWS, BY_COLUMNS)
    for data in (1, 2)
    if (form, axis) != ("max", BY_ROWS)
]
STAND = {
    ("weighed", BY_ROWS, 2),
    ("last offset", BY_ROWS, 1),
    ("sparse", BY_ROWS, 2),
    ("max", BY_COLUMNS, 1),
}


def planned(path: Path, arguments: tuple[str, ...], axis: str, *, data: int) -> Plan:
    file = load_model_file(str(path), arguments)
    return plan_for(file, trace(file), arguments, degrees=(1, data, 2), split=(axis,))


def dims_split(plan: Plan) -> set[int]:
    """Return along which of their dims tables are split."""
    tables = (own.layout for own in plan.parameters if own.name.startswith("table"))
    return {layout.dim for layout in tables if layout.kind is LayoutKind.SPLIT}


@pytest.mark.parametrize(("form", "axis", "data"), cells(CELLS, STAND))
def test_a_table_that_ranks_share_trains_as_a_whole_one(form: str, axis: str, data: int) -> None:
    plan = planned(TABLES, FORMS[form], axis, data=data)
    assert dims_split(plan) == {DIMS[axis]}
    found = compare(plan)
    assert found.is_within(1e-10), found


@pytest.mark.parametrize("axis", [BY_ROWS, BY_COLUMNS])
def test_a_recommender_trains_on_shares_of_its_tables_as_a_plain_loop(axis: str) -> None:
    plan = planned(RECOMMENDER, (), axis, data=2)
    assert dims_split(plan) == {DIMS[axis]}
    found = train_by_script(plan)
    subject = Subject(path=RECOMMENDER, global_batch=8)
    plain = train_plainly(subject, torch.float64, rows=subject.global_batch)
    assert found.exact.losses == pytest.approx(plain.losses, abs=1e-10, rel=0.0)
    for name, value in plain.trained.items():
        own = found.exact.parameters[name]
        torch.testing.assert_close(own, value, atol=1e-10, rtol=0.0, msg=name)
