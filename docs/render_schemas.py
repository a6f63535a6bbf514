"""Writes the JSON schema of what commands print with --json: `python docs/render_schemas.py`."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from autopar.commands.doctor import CheckedPart
from autopar.planner.annotate import AnnotatedOp
from autopar.planner.cluster.detected import DetectedCluster
from autopar.planner.inspection import Inspection
from autopar.planner.plan.files.document import PlanDocument
from autopar.planner.plan.telling.comparison import PlanComparison
from autopar.planner.plan.telling.explanation import Explanation
from autopar.planner.plan.telling.timeline import Timeline
from autopar.planner.plan.why_not import WhyNot
from autopar.runs.run_metrics import Analysis
from autopar.runs.run_status import RunStatus

SCHEMAS = Path(__file__).parent / "schemas"
PRINTED: dict[str, Any] = {
    "plan-file": PlanDocument,
    "plan": PlanDocument,
    "explain": Explanation,
    "explain-why-not": WhyNot,
    "explain-timeline": Timeline,
    "explain-analyze": Analysis,
    "status": RunStatus,
    "diff": PlanComparison,
    "inspect": Inspection,
    "inspect-ops": list[AnnotatedOp],
    "doctor": list[CheckedPart],
    "cluster-detect": DetectedCluster,
}


def schema_text(name: str) -> str:
    """Return the schema of what a command prints."""
    schema = TypeAdapter(PRINTED[name]).json_schema(mode="serialization")
    if name == "plan":  # prints the file without layouts, and a row for each number of devices
        del schema["properties"]["layouts"]
        schema["required"].remove("layouts")
        schema["properties"]["counts"] = {"type": "array", "items": {"type": "object"}}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every schema."""
    SCHEMAS.mkdir(exist_ok=True)
    for name in PRINTED:
        (SCHEMAS / f"{name}.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
