"""The plans whose scripts are reviewed like source, and the text that each has now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from autopar.codegen.emit import emit
from autopar.planner.costs.prediction import Zero
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from tests.codegen.plans import pinned_plan

FOLDER = Path(__file__).parent
H100 = {"device": "h100-sxm", "precision": Precision.BF16, "compile": None}
USUAL_TOLERANCE = 0.03


def _gpt2() -> Plan:
    degrees = {"data": 4, "tensor": 2, "tolerance": USUAL_TOLERANCE}
    pins = {"zero_levels": (Zero.OPTIMIZER,), "global_batch": 64}
    return pinned_plan("gpt2.py", ("size=124m",), **degrees, **pins, **H100)


def _llama_8b() -> Plan:
    degrees = {"pipeline": 4, "data": 2, "tensor": 2, "split": ("kv_heads", "ffn")}
    pins = {"zero_levels": (Zero.PARAMETERS,), "microbatch": 1, "global_batch": 32}
    pins["tolerance"] = USUAL_TOLERANCE
    return pinned_plan("llama.py", ("size=8b", "layers=12"), **degrees, **pins, **H100)


def _resnet50() -> Plan:
    pins = {"zero_levels": (Zero.OPTIMIZER,), "global_batch": 512}
    return pinned_plan("resnet.py", ("size=50",), data=8, **pins, **H100)


def _t5() -> Plan:
    return pinned_plan("t5.py", ("size=base",), pipeline=2, global_batch=32, **H100)


GOLDEN: Mapping[str, Callable[[], Plan]] = MappingProxyType(
    {
        "gpt2_124m_tp_dp": _gpt2,
        "llama_8b_tp_pp_dp": _llama_8b,
        "resnet50_dp": _resnet50,
        "t5_pp": _t5,
    }
)


def script_of(name: str) -> str:
    """Return the script of a golden plan as it is emitted now."""
    plan = GOLDEN[name]()
    # How long the search took, and by which version, is no part of what is reviewed.
    plan = replace(plan, proof=replace(plan.proof, search_seconds=0.0))
    return emit(plan, destination=FOLDER / f"{name}.py")


def golden_path(name: str) -> Path:
    """Return where a golden script lies."""
    return FOLDER / f"{name}.py"
