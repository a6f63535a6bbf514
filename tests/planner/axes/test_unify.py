"""Unification refines dims until they agree, and says when they cannot."""

from autopar.planner.axes.naming import Unifier
from autopar.planner.graph.ops import BATCH, constant
from autopar.planner.rules.signature import UNIT, Dim, FlattenedDims, concat, product, text_of


def size(unifier: Unifier, number: int) -> Dim:
    return unifier.fresh(constant(number))


def test_a_dim_of_size_one_has_no_axis() -> None:
    assert Unifier().fresh(constant(1)) == UNIT


def test_a_leaf_takes_the_structure_of_what_it_equals() -> None:
    unifier = Unifier()
    width, heads, head_dim = size(unifier, 12), size(unifier, 3), size(unifier, 4)
    assert unifier.unify(width, product((heads, head_dim)))
    assert unifier.resolved(width) == FlattenedDims((heads, head_dim))


def test_products_with_other_borders_are_refined_to_common_factors() -> None:
    unifier = Unifier()
    a, b, c = size(unifier, 12), size(unifier, 2), size(unifier, 6)
    rest = size(unifier, 4)
    assert unifier.unify(product((a, b)), product((c, rest)))  # 12·2 = 6·4 = 6·2·2
    left = unifier.resolved(product((a, b)))
    assert isinstance(left, FlattenedDims)
    assert left == unifier.resolved(product((c, rest)))
    assert len(left.factors) == 3


def test_products_whose_borders_do_not_divide_do_not_agree() -> None:
    unifier = Unifier()
    four, six = size(unifier, 4), size(unifier, 6)
    eight, three = size(unifier, 8), size(unifier, 3)
    unifier.unify(four, product((size(unifier, 2), size(unifier, 2))))
    assert unifier.unify(product((four, six)), product((eight, three)))  # 2·2·6 = 2·2·2·3
    other = Unifier()
    five, seven = size(other, 5), size(other, 7)
    assert not other.unify(product((five, seven)), product((seven, five)))


def test_concatenations_are_cut_at_each_others_borders() -> None:
    unifier = Unifier()
    long, short = size(unifier, 5), size(unifier, 2)
    rest = size(unifier, 3)
    assert unifier.unify(concat((long, short)), concat((short, rest, size(unifier, 2))))
    assert text_of(unifier.resolved(long)).count("|") == 1


def test_a_dim_is_never_a_part_of_itself() -> None:
    unifier = Unifier()
    whole, part = size(unifier, 6), size(unifier, 2)
    assert unifier.unify(whole, product((part, size(unifier, 3))))
    assert not unifier.unify(part, whole)


def test_k_equal_parts_are_the_product_of_k_and_one_part() -> None:
    unifier = Unifier()
    three, width = size(unifier, 3), size(unifier, 4)
    parts = [size(unifier, 4) for _ in range(3)]
    assert unifier.unify(product((three, width)), concat(parts))
    assert {unifier.representative(part) for part in parts} == {unifier.representative(width)}


def test_the_batch_is_split_from_a_flattened_dim() -> None:
    unifier = Unifier()
    flat = unifier.fresh(BATCH * constant(8))
    batch, seq = unifier.fresh(BATCH), size(unifier, 8)
    assert unifier.unify(flat, product((batch, seq)))
    assert unifier.resolved(flat) == FlattenedDims((batch, seq))
