"""What is remembered between questions is never edited: a question has one answer."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch

import autopar
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.programs.stages.choice import QUICK
from tests.planner.programs.stages.stage_cases import choose_stages, random_case

ZOO = Path(__file__).parents[2] / "models_zoo"
_PLAIN = (int, float, str, bytes, bool, type(None), type, FunctionType, Enum, np.generic)


def test_an_answer_does_not_depend_on_earlier_questions() -> None:
    kind = ScheduleKind.ZERO_BUBBLE_V
    cases = [random_case(seed, kind=kind, most_layers=9, room=0.8) for seed in range(12)]

    def answers(order: list[int]) -> dict[int, tuple[float, float]]:
        found = {}
        for number in order:
            answer = choose_stages(cases[number].question, effort=QUICK)
            found[number] = (answer.best.seconds if answer.best else 0.0, answer.bound_seconds)
        return found

    numbers = list(range(len(cases)))
    assert answers(numbers) == answers(numbers[::-1])


def test_remembered_values_cannot_be_edited() -> None:
    autopar.plan(
        ZOO / "gpt2.py",
        gpus=4,
        device="h100-sxm",
        arguments={"size": "tiny"},
        pins={"pp": 2, "stages_per_rank": 2},
    )
    edited = {
        f"{module}.{name}: {fault}"
        for module, name, memo in _memos()
        for value in _values(memo)
        for fault in _faults(value)
    }
    assert not edited, "\n".join(sorted(edited))


def _memos() -> Iterator[tuple[str, str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("autopar.planner"):
            for name, value in vars(module).items():
                if hasattr(value, "cache_info") and value.__module__ == module_name:
                    yield module_name, name, value


def _values(memo: Any) -> Iterator[Any]:
    """Yield the questions and answers of a memo: the garbage collector sees into functools."""
    for held in gc.get_referents(memo):
        if not isinstance(held, dict):
            yield held
        elif held is not memo.__dict__ and not memo.cache_info().maxsize:
            yield from held.values()


def _faults(value: Any) -> Iterator[str]:
    """Yield the parts of a value that somebody could edit."""
    if isinstance(value, _PLAIN) or type(value) is object or hasattr(value, "cache_info"):
        return
    if isinstance(value, (tuple, frozenset)):
        for part in value:
            yield from _faults(part)
    elif isinstance(value, MappingProxyType):
        for part in value.values():
            yield from _faults(part)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            yield "an array that may be written to"
    elif is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            yield f"{type(value).__name__} is not frozen"
        for field in fields(value):
            yield from _faults(getattr(value, field.name))
    elif not isinstance(value, (torch.dtype, torch._ops.OpOverload)):
        yield f"a {type(value).__name__}"
