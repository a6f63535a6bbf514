"""The published schemas are those of the code, and what commands print agrees with them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from autopar.planner.plan.files.document import write_plan
from docs.render_schemas import PRINTED, SCHEMAS, schema_text
from tests.autopar.commands import Autopar
from tests.autopar.conftest import autopar as autopar
from tests.planner.plan.plans import arrangement, runner_up, small_plan
from tests.planner.subjects import ZOO

MNIST = str(ZOO / "mnist.py")
COMMANDS = {
    "explain": ("explain", "PLAN", "--json"),
    "explain-timeline": ("explain", "PLAN", "--timeline", "--json"),
    "explain-why-not": ("explain", "PLAN", "--why-not", "tp=2", "--json"),
    "explain-analyze": ("explain", "PLAN", "--analyze", "METRICS", "--json"),
    "status": ("status", "RUN", "--json"),
    "diff": ("diff", "PLAN", "PLAN", "--json"),
    "inspect": ("inspect", MNIST, "--json"),
    "inspect-ops": ("inspect", MNIST, "--ops", "--json"),
    "doctor": ("doctor", "--json"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_schema_is_up_to_date(name: str) -> None:
    remade = "python docs/render_schemas.py"
    assert (SCHEMAS / f"{name}.json").read_text(encoding="utf-8") == schema_text(name), remade


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_agrees_with_its_schema(
    name: str, autopar: Autopar, tmp_path: Path
) -> None:
    other = arrangement(data=1, shard=1, tensor=2, microbatches=8)
    write_plan(small_plan(runners_up=(runner_up(arrangement=other),)), tmp_path / "plan.json")
    line = {"step": 2, "loss": 1.0, "seconds": 0.1, "per_second": 10.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    places = {"PLAN": str(tmp_path / "plan.json"), "METRICS": str(tmp_path / "metrics.jsonl")}
    places["RUN"] = str(tmp_path)
    ran = autopar(*(places.get(word, word) for word in COMMANDS[name]))
    assert ran.code in (0, 1), ran.err
    schema = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    adapter: TypeAdapter[Any] = TypeAdapter(PRINTED[name])
    printed = json.loads(ran.out)
    assert adapter.dump_python(adapter.validate_python(printed), mode="json") == printed
    first = printed[0] if isinstance(printed, list) else printed
    fields = schema if "properties" in schema else next(iter(schema["$defs"].values()))
    assert set(first) == set(fields["properties"])
