"""The expectations themselves: they name real parameters, fit their sizes, and can fail."""

import itertools
import math
from collections.abc import Mapping

import pytest
import torch

from tests.planner.huggingface.expectation import NAME_IN_STRUCTURE, Expectation, accepts
from tests.planner.huggingface.expectations import EXPECTATIONS
from tests.planner.huggingface.families import FAMILIES
from tests.planner.huggingface.family import Family

NAMES = [family.name for family in FAMILIES]


def possible_sizes(structure: str, sizes: Mapping[str, tuple[int, ...]]) -> set[int]:
    """Works out the size that a structure has, for each choice among the sizes of its axes."""
    names = sorted(set(NAME_IN_STRUCTURE.findall(structure)))
    choices = itertools.product(*(sizes[name.split(".")[0]] for name in names))
    return {size_of(structure, dict(zip(names, choice, strict=True))) for choice in choices}


def size_of(structure: str, sizes: Mapping[str, int]) -> int:
    """Multiplies products and adds concatenations up."""
    if not structure.startswith("[") and "[" not in structure:
        return math.prod(
            sizes[leaf] if leaf in sizes else int(leaf) for leaf in structure.split("·")
        )
    before, _, rest = structure.partition("[")
    parts, _, after = rest.partition("]")
    outer = [leaf for leaf in (before + after).split("·") if leaf]
    inner = sum(size_of(part, sizes) for part in parts.split(" | "))
    return inner * math.prod(size_of(leaf, sizes) for leaf in outer)


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_every_expected_structure_has_the_size_of_its_dim(family: Family) -> None:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in family.build_model().named_parameters()}
    for expected in EXPECTATIONS[family.name]:
        size = shapes[expected.parameter][expected.dim]
        assert size in possible_sizes(expected.structure, family.sizes), expected


def test_every_family_has_expectations_and_no_other_name_has() -> None:
    assert set(EXPECTATIONS) == set(NAMES)


@pytest.mark.parametrize(
    ("structure", "printed"),
    [
        ("heads·head_dim", "head_dim·heads"),
        ("heads·head_dim", "48"),
        ("heads·head_dim", "kv_heads·group·head_dim"),
        ("embed", "channels"),
        ("[ffn | ffn]", "[ffn | ffn2]"),
        ("[ffn | ffn]", "2·ffn"),
        ("[heads·head_dim | heads·head_dim]", "heads·[head_dim | head_dim]"),
        ("vocab", "vocab·embed"),
    ],
)
def test_another_structure_is_refused(structure: str, printed: str) -> None:
    assert not accepts(Expectation(parameter="w", dim=0, structure=structure), printed)
