"""Long lists of names become short, and mean the same."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.codegen.script.parameter_tables import numbered_tuple, outermost, patterns
from autopar.runtime.tensor.shards import expand, is_listed, named, starred
from tests.cells import examples

PARTS = st.sampled_from(("0", "1", "2", "a", "b"))
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


def test_equal_layers_are_one_line() -> None:
    table = {f"h.{i}.w": "split" for i in range(3)}
    assert patterns(table, [*table, "out.w"]) == {"h.*.w": "split"}


def test_modules_of_which_all_is_chosen_stand_for_what_is_in_them() -> None:
    names = ["a.0.w", "a.0.b", "a.1.w", "b.w", "b.c.w", "d"]
    assert list(outermost({"a.0.w", "a.0.b", "b.c.w", "d"}, names)) == ["a.0", "b.c", "d"]
    assert list(outermost(set(names[:4]), names)) == ["a", "b.w"]


def test_a_star_takes_in_nothing_that_the_table_does_not_have() -> None:
    table = {"h.0.w": "split", "h.1.w": "split"}
    found = patterns(table, [*table, "h.2.w"])
    assert found == table


def test_layers_that_differ_are_named_one_by_one() -> None:
    table = {"h.0.w": "a", "h.1.w": "b"}
    assert patterns(table, table) == table


def test_a_first_layer_that_differs_stands_beside_the_star_of_the_others() -> None:
    table = {f"h.{i}": "first" if i == 0 else "other" for i in range(9)}
    found = patterns(table, table)
    assert found == {"h.0": "first", "h.*": "other"}
    assert named(found, table) == table


def test_numbers_inside_a_layer_stay_where_the_layers_are_alike() -> None:
    table = {f"h.{i}.mlp.{j}.w": f"split {j}" for i in range(5) for j in (0, 2)}
    found = patterns(table, [*table, *(f"h.{i}.mlp.1.w" for i in range(5))])
    assert found == {"h.*.mlp.0.w": "split 0", "h.*.mlp.2.w": "split 2"}
    assert named(found, table) == table


@given(st.dictionaries(NAMES, st.integers(0, 2)), st.lists(NAMES))
def test_patterns_give_every_name_its_own_and_nothing_to_others(
    table: dict[str, int], others: list[str]
) -> None:
    known = [*others, *table]
    found = patterns(table, known)
    assert len(found) <= len(table)
    assert named(found, known) == {name: table[name] for name in known if name in table}


def test_a_pattern_gives_the_names_back() -> None:
    table = {f"h.{i}.{w}": w for i in range(4) for w in ("q", "k")} | {"out": "x"}
    assert named(patterns(table, table), table) == table


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["wte", "h.0", "h.1", "h.2", "head"], '("wte", *expand("h.*", range(3)), "head")'),
        (["h.4", "h.5"], 'expand("h.*", range(4, 6))'),
        (["h.0", "h.2"], '("h.0", "h.2")'),
        (["h.0", "g.1"], '("h.0", "g.1")'),
        (["a"], '("a",)'),
        (["h.00", "h.01"], '("h.00", "h.01")'),
        (["h*.0", "h*.1"], '("h*.0", "h*.1")'),
    ],
)
def test_names_that_count_up_are_told_as_a_range(names: list[str], expected: str) -> None:
    text = numbered_tuple(names).flat
    assert text == expected
    ast.parse(text)
    assert list(eval(text, {"expand": expand})) == names


def test_only_whole_numbers_between_dots_are_starred() -> None:
    assert starred("h.0.attn.c1.2") == ("h.*.attn.c1.2", "h.0.attn.c1.*", "h.*.attn.c1.*")
    assert starred("h1.attn") == ()
    assert is_listed("h.3.w", ("h.*.w",))
    assert not is_listed("h.w", ("h.*.w",))


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda at: f"f.{at[0]}.b.{at[1]}.w"),
        st.integers(0, 2),
        min_size=4,
    )
)
@settings(max_examples=examples(1000))
def test_no_name_falls_under_two_stars_of_different_values(table: dict[str, int]) -> None:
    assert named(patterns(table, table), table) == table
