"""What was declared means what it says, and contradictions are named by their least part."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import ExitCode, InfeasibleError, InputError
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    MemoryLimit,
    RecomputePin,
    SplitRule,
    StagePin,
    allows,
    check_names,
    constraints_of,
    covers,
    minimal_conflict,
)
from autopar.planner.plan.declared.file import parse_pins
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import BatchFacts
from autopar.planner.plan.search.space import check_degrees, legal_degrees
from autopar.planner.precision import Compression
from tests.planner.plan.plans import arrangement, parts_of


def declared(**places: object) -> Constraints:
    """Constraints by their places in a file, with two underscores for the dot."""
    return constraints_of(
        declare(place.replace("__", "."), value, origin="test", where=place)
        for place, value in places.items()
    )


def test_the_last_declaration_of_a_place_holds() -> None:
    constraints = constraints_of((*parse_pins(["tp=2"]), *parse_pins(["tp=4"])))
    assert constraints.tensor == 4
    assert [str(one) for one in constraints.declared] == ["tp=4 (--pin)"]


def test_choices_narrow_each_other() -> None:
    constraints = declared(choices__zero=[0, 1, 2], pins__zero=2)
    assert constraints.zero_levels == (Zero.GRADIENTS,)
    assert declared(choices__zero=[0, 1], pins__zero=3).zero_levels == ()


def test_nothing_declared_leaves_every_choice() -> None:
    free = constraints_of(())
    assert free == Constraints()
    assert free.schedules == tuple(ScheduleKind)
    assert allows(free, arrangement())
    assert not allows(free, arrangement(compression=Compression.HALF))  # only where asked for


@pytest.mark.parametrize(
    "place_and_value",
    [
        ("pins.tp", 2), ("pins.dp", 1), ("pins.shard", 1), ("pins.microbatch", 1),
        ("pins.zero", 1), ("limits.dp", 1), ("global_batch", 8), ("precision", "fp32"),
        ("choices.bucket_sizes", ["1 MiB"]), ("choices.compressed_gradients", True),
    ],
)  # fmt: skip
def test_an_arrangement_that_breaks_one_constraint_is_not_allowed(
    place_and_value: tuple[str, object],
) -> None:
    place, value = place_and_value
    one = declare(place, value, origin="test", where=place)
    assert not allows(constraints_of([one]), arrangement())


def test_an_arrangement_that_keeps_all_constraints_is_allowed() -> None:
    constraints = declared(
        pins__dp=2, pins__microbatch=2, limits__tp=1, global_batch=16, choices__zero=[0, 3]
    )
    assert allows(constraints, arrangement())


def test_a_memory_limit_is_never_more_than_the_device_has() -> None:
    assert MemoryLimit(size_bytes=100).bytes_of(80) == 80
    assert MemoryLimit(size_bytes=70).bytes_of(80) == 70
    assert MemoryLimit(share=0.5).bytes_of(80) == 40


def test_a_pattern_means_a_module_and_what_is_inside() -> None:
    assert covers("h.0", "h.0")
    assert covers("h.0", "h.0.attn.c_attn")
    assert covers("h.*.attn", "h.11.attn.c_attn")
    assert covers("*", "")
    assert not covers("h.1", "h.11")
    assert not covers("attn", "h.0.attn")


def test_degrees_multiply_to_the_devices_and_keep_pins_and_limits() -> None:
    legal = legal_degrees(12, declared(limits__tp=2, pins__pp=3))
    assert legal == ((3, 4, 1), (3, 2, 2))
    assert len(legal_degrees(8, Constraints())) == 10  # 2³: C(3+2, 2) ways to hand out three twos


def test_the_batch_divides_over_the_data_ranks() -> None:
    assert {d for _, d, _ in legal_degrees(8, declared(global_batch=12))} == {1, 2, 4}
    both = declared(global_batch=12, pins__microbatch=3)
    assert {d for _, d, _ in legal_degrees(8, both)} == {1, 2, 4}
    fixed = legal_degrees(8, declared(global_batch=12), BatchFacts(fixed=6))
    assert {d for _, d, _ in fixed} == {1, 2}


@given(
    st.integers(1, 64),
    st.dictionaries(
        st.sampled_from(["pins__tp", "pins__dp", "pins__pp", "limits__tp", "pins__shard"]),
        st.integers(1, 16),
    ),
)
def test_legal_degrees_are_all_that_brute_force_finds(devices: int, places: dict[str, int]) -> None:
    constraints = declared(**places)
    every = (
        (p, d, t)
        for p, d, t in product(range(1, devices + 1), repeat=3)
        if p * d * t == devices and d % places.get("pins__shard", 1) == 0
    ) if devices <= 16 else ()  # fmt: skip
    wanted = {
        (p, d, t)
        for p, d, t in every
        if places.get("pins__pp", p) == p
        and places.get("pins__dp", d) == d
        and places.get("pins__tp", t) == t
        and t <= places.get("limits__tp", t)
    }
    if devices <= 16:
        assert set(legal_degrees(devices, constraints)) == wanted


@pytest.mark.parametrize(
    ("devices", "places", "named", "offered"),
    [
        (8, {"pins__tp": 3}, "tp=3 (test)", "legal are pp=1,dp=2,tp=4; pp=2,dp=1,tp=4"),
        (8, {"pins__tp": 4, "pins__dp": 4}, "tp=4 (test) and dp=4 (test)", "pp=1,dp=4,tp=2"),
        (8, {"pins__tp": 8, "limits__tp": 4}, "tp=8 (test) and at most tp=4 (test)", "tp="),
        (8, {"pins__pp": 2, "pins__tp": 2, "pins__dp": 3}, "dp=3 (test)", "pp=2,dp=2,tp=2"),
        (8, {"pins__dp": 8, "pins__shard": 3}, "shard=3 (test)", "pp="),
        (8, {"pins__dp": 4, "global_batch": 30}, "dp=4 (test) and a global batch", "28 or 32"),
        (
            8,
            {"pins__dp": 8, "global_batch": 4},
            "dp=8 (test) and a global batch of 4 (test)",
            "fits is 8",
        ),
        (8, {"choices__zero": [0, 1], "pins__zero": 3}, "ZeRO levels 0, 1 (test) and", "allow"),
        (6, {"limits__tp": 1, "limits__pp": 1, "limits__dp": 4}, "at most dp=4", "pp="),
    ],
)
def test_a_contradiction_is_named_and_what_is_legal_is_offered(
    devices: int, places: dict[str, object], named: str, offered: str
) -> None:
    with pytest.raises(InfeasibleError) as raised:
        check_degrees(devices, declared(**places))
    assert named in raised.value.found
    assert offered in raised.value.expected + raised.value.fix
    assert raised.value.exit_code is ExitCode.INFEASIBLE


def test_of_many_constraints_only_those_that_conflict_are_named() -> None:
    constraints = declared(
        pins__pp=2, limits__tp=2, limits__dp=64, objective="cost", pins__dp=16, global_batch=64
    )
    assert check_degrees(64, constraints) == ((2, 16, 2),)
    with pytest.raises(InfeasibleError) as raised:
        check_degrees(128, constraints)
    assert "pp=2" in raised.value.found
    assert "at most tp=2" in raised.value.found
    assert "dp=16" in raised.value.found
    assert "cost" not in raised.value.found
    assert "batch" not in raised.value.found


def test_a_model_that_fixes_its_batch_takes_no_other_microbatch() -> None:
    with pytest.raises(InfeasibleError, match=r"fixes its batch to 6.* at clip\.py:48"):
        check_degrees(8, declared(pins__microbatch=4), BatchFacts(fixed=6, fixed_at="clip.py:48"))
    assert check_degrees(8, declared(pins__microbatch=6), BatchFacts(fixed=6))


@given(st.sets(st.frozensets(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_conflict_is_minimal(conflicts: set[frozenset[int]]) -> None:
    every = [
        Declared(place=str(i), field="tensor", value=i, text=str(i), origin="") for i in range(8)
    ]

    def is_feasible(chosen: object) -> bool:
        assert isinstance(chosen, (list, tuple))
        values = {one.value for one in chosen}
        return not any(conflict <= values for conflict in conflicts)

    found = minimal_conflict(every, is_feasible)
    assert not is_feasible(found)
    assert all(is_feasible([one for one in found if one is not other]) for other in found)


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("tp", "is not of the form key=value"),
        ("tp=", "is not of the form key=value"),
        ("tp=2,,dp=2", "is not of the form key=value"),
        ("pt=2", "did you mean 'tp'"),
        ("tp=0", "'0' is not a count"),
        ("tp=-1", "'-1' is not a count"),
        ("tp=8.5", "'8.5' is not a count"),
        ("tp=two", "'two' is not a count"),
        ("tp=99999999999999999999999", "is not a count"),
        ("tp=٢", "is not a count"),
        ("zero=4", "'4' is not a ZeRO level"),
        ("schedule=1f2b", "did you mean '1f1b'"),
        ("tp=2,tp=4", "pins tp twice"),
    ],
)
def test_a_pin_that_cannot_be_read_is_told(text: str, telling: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_pins([text])
    assert telling in str(raised.value)


def test_pins_may_come_together_or_apart() -> None:
    together = constraints_of(parse_pins(["dp=2,tp=4, zero=1,schedule=1f1b"]))
    apart = constraints_of(parse_pins(["dp=2", "tp=4", "zero=1", "schedule=1f1b"]))
    assert together == apart
    assert (together.data, together.tensor) == (2, 4)
    assert together.zero_levels == (Zero.OPTIMIZER,)


def rule(value: SplitRule | StagePin | RecomputePin) -> Constraints:
    field = {SplitRule: "splits", StagePin: "stages", RecomputePin: "recompute"}[type(value)]
    one = Declared(place=f"{field} 1", field=field, value=value, text="", origin="c.toml, line 3")
    return constraints_of([one])


@pytest.mark.parametrize(
    ("value", "telling"),
    [
        (SplitRule(modules="*", axis="voacb", is_required=True), "did you mean 'vocab'"),
        (SplitRule(modules="*", axis="qqq", is_required=True), "there are batch, embed"),
        (SplitRule(modules="*", axis="hiddens", is_required=True), "there are batch, embed"),
        (SplitRule(modules="h.0.atn", axis="vocab", is_required=True), "did you mean 'h.0.attn'"),
        (StagePin(modules="wtee", stage=0), "did you mean 'wte'"),
        (StagePin(modules="wte", stage=99), "there is no stage 99"),
        (RecomputePin(modules="block.*", mode=Recompute.FULL), "no module 'block.*'"),
    ],
)
def test_a_name_that_the_model_has_not_is_told_with_the_nearest(
    value: SplitRule | StagePin | RecomputePin, telling: str
) -> None:
    graph, axes, layers = parts_of("gpt2.py")
    with pytest.raises(InputError) as raised:
        check_names(rule(value), graph, axes, layers=len(layers.layers))
    assert telling in str(raised.value)
    assert raised.value.where == "c.toml, line 3"


def test_names_that_the_model_has_are_taken() -> None:
    graph, axes, layers = parts_of("gpt2.py")
    for value in (
        SplitRule(modules="h.*.mlp", axis="ffn", is_required=True),
        StagePin(modules="h.1", stage=1),
        RecomputePin(modules="*", mode=Recompute.FULL),
    ):
        check_names(rule(value), graph, axes, layers=len(layers.layers))
