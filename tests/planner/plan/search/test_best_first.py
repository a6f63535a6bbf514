"""The search of a tree, best first."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.plan.search.best_first import FoundLeaf, SearchNode, best_first

Tree = tuple[float, tuple["Tree", ...]]  # a bound's slack below the best leaf, or a leaf's value

leaves = st.tuples(st.integers(0, 50).map(float), st.just(()))
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(
        st.integers(0, 9).map(float), st.lists(inner, min_size=1, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


def _values(tree: Tree) -> Iterator[float]:
    if not tree[1]:
        yield tree[0]
    for child in tree[1]:
        yield from _values(child)


def _expand(tree: Tree) -> Iterator[SearchNode[Tree] | FoundLeaf[float]]:
    for child in tree[1]:
        if child[1]:
            yield _node(child)
        else:
            yield FoundLeaf(value=child[0], rank=(), leaf=child[0])


def _node(tree: Tree) -> SearchNode[Tree]:
    return SearchNode(bound=min(_values(tree)) - tree[0], rank=(), item=tree)


@given(st.lists(trees, min_size=1, max_size=4))
def test_the_first_leaf_that_comes_to_the_top_is_the_best_of_all(subtrees: list[Tree]) -> None:
    root: Tree = (0.0, tuple(subtrees))
    outcome = best_first([_node(root)], _expand)
    assert outcome.found[0].value == min(_values(root))
    assert outcome.gap == 0
    assert outcome.is_complete


@given(st.lists(trees, min_size=1, max_size=4))
def test_a_search_that_stops_early_tells_a_true_bound(subtrees: list[Tree]) -> None:
    root: Tree = (0.0, tuple(subtrees))
    looks = iter([False, False, *[True] * 100])
    outcome = best_first([_node(root)], _expand, is_late=lambda: next(looks))
    assert outcome.bound <= min(_values(root))


def test_what_the_bound_rules_out_is_never_expanded() -> None:
    expanded = []

    def expand(item: str) -> list[SearchNode[str] | FoundLeaf[str]]:
        expanded.append(item)
        return [FoundLeaf(value=5.0, rank=(), leaf=item)]

    nodes = [SearchNode(bound=bound, rank=(), item=str(bound)) for bound in (9.0, 1.0, 6.0)]
    outcome = best_first(nodes, expand)
    assert expanded == ["1.0"]
    assert sorted(node.item for node in outcome.waiting) == ["6.0", "9.0"]


@given(st.lists(trees, min_size=1, max_size=4))
def test_who_watches_sees_bounds_of_the_best_leaf_that_end_at_it(subtrees: list[Tree]) -> None:
    seen: list[float] = []
    root: Tree = (0.0, tuple(subtrees))
    outcome = best_first([_node(root)], _expand, watch=lambda bound, *_: seen.append(bound))
    assert seen == sorted(seen)
    assert max(seen) <= outcome.found[0].value
