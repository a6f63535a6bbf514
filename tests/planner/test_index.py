"""The index of a graph tells what a run of its ops would show."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

from autopar.planner.graph.graph import Graph, graph_hash, united
from autopar.planner.graph.ops import MODEL_DTYPE, Extent, ModuleCall, Op, Ref, Tensor, TensorOrigin
from tests.planner.subjects import zoo_graph

# name ← what it reads; "name = view" lies in the storage of what it reads first, "!" writes there
WRITTEN = (
    ("a", "x"),
    ("part = view", "a"),
    ("fill !", "part y"),
    ("read", "a"),  # by its old name, but with what was written
    ("late !", "a x"),
    ("loss", "read"),
    ("unread", "y"),
)


def graph_of(lines: tuple[tuple[str, str], ...]) -> Graph:
    storages, ops = {"x": "x", "y": "y"}, list[Op]()
    for made, read in lines:
        name, _, kind = made.partition(" ")
        inputs = tuple(read.split())
        storages[name] = storages[inputs[0]] if kind else name
        ops.append(
            Op(
                name=name, target="aten.some.op", outputs=(name,), call="inner",
                arguments=tuple((one, Ref(one)) for one in inputs), inputs=inputs,
                grad_enabled=True, writes=inputs[:1] if kind == "!" else (),
            )
        )  # fmt: skip
    tensors = {
        name: Tensor(
            name=name, shape=(Extent.of(4),), dtype=MODEL_DTYPE, storage=storage,
            origin=TensorOrigin.INPUT if name in ("x", "y") else TensorOrigin.OP,
            requires_grad=True,
        )
        for name, storage in storages.items()
    }  # fmt: skip
    calls = {
        key: ModuleCall(
            key=key, path=key, class_name="Block", is_function=False, parent=parent,
            arguments=(), keywords=(), result=None,
        )
        for key, parent in (("", None), ("outer", ""), ("inner", "outer"), ("unused", ""))
    }  # fmt: skip
    return Graph(
        ops=tuple(ops), tensors=tensors, parameters=(), buffers=(), constants={},
        inputs=("x", "y"), calls=calls, loss=ops[-1].name, fixed_batch=None,
    )  # fmt: skip


def names(ops: tuple[Op, ...]) -> list[str]:
    return [op.name for op in ops]


def test_what_is_read_after_a_write_needs_the_write_by_whatever_name() -> None:
    index = graph_of(WRITTEN).index
    assert names(index.needed_for(["loss"])) == ["a", "part", "fill", "read", "loss"]
    assert names(index.needed_for(["a"])) == ["a", "part", "fill", "late"]
    assert names(index.reached_from(["y"])) == ["fill", "read", "late", "loss", "unread"]


def test_what_only_an_op_left_out_needs_is_left_out() -> None:
    graph = graph_of(WRITTEN)
    (fill,) = (op for op in graph.ops if op.name == "fill")
    assert names(graph.index.needed_for(["loss"], without=[fill])) == ["a", "read", "loss"]
    without = graph.index.needed_for(["a"], without=[fill])
    assert names(without) == ["a", "late"]


def test_makers_readers_and_writers_come_in_order() -> None:
    index = graph_of(WRITTEN).index
    assert index.made_by["part"].name == "part"
    assert "x" not in index.made_by
    assert names(index.readers["a"]) == ["part", "read", "late"]
    assert index.readers["unread"] == ()
    assert names(index.writers["a"]) == ["fill", "late"]
    assert set(index.lying_in["a"]) == {"a", "part", "fill", "late"}
    assert list(map(index.is_written_later, ("x", "a", "fill", "late"))) == [0, 1, 1, 0]
    assert (index.made_at("x"), index.made_at("read"), index.last_read_at("read")) == (-1, 3, 5)


def test_a_graph_has_one_hash_wherever_its_code_lies() -> None:
    graph = zoo_graph("llama.py")
    assert any(one.spans for one in graph.functions)
    moved = replace(
        graph,
        ops=tuple(replace(one, spans=()) for one in graph.ops),
        calls={key: replace(one, spans=()) for key, one in graph.calls.items()},
        functions=tuple(replace(one, spans=()) for one in graph.functions),
    )
    assert graph_hash(moved) == graph_hash(graph)
    assert graph_hash(replace(graph, ops=graph.ops[:-1])) != graph_hash(graph)


def test_calls_are_known_with_those_around_them() -> None:
    index = graph_of(WRITTEN).index
    assert index.around("inner") == ("inner", "outer", "")
    assert index.around("(loss)") == index.around(None) == ()
    assert list(index.ops_in) == ["", "outer", "inner"]
    assert len(index.ops_in["outer"]) == len(WRITTEN)
    assert index.ops_in["unused"] == ()


def a_graph(seed: int) -> Graph:
    draw, lines = Random(seed), [("o0", "x y")]
    for number in range(1, 30):
        known = ["x", "y", *(f"o{i}" for i in range(number))]
        kind = draw.choice(["", "", " = view", " !"])
        lines.append((f"o{number}{kind}", " ".join(draw.sample(known, draw.choice([1, 2])))))
    return graph_of(tuple(lines))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_is_what_flowed_in_when_the_ops_run_in_order(seed: int) -> None:
    graph = a_graph(seed)
    made, memory = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for op in graph.ops:
        flowed = {op.name, *op.inputs}
        for name in op.inputs:
            flowed |= made[name] | memory[graph.tensors[name].storage]
        made[op.name] = flowed
        for name in op.writes:
            memory[graph.tensors[name].storage] |= flowed
    for name, tensor in graph.tensors.items():
        flowed = made[name] | memory[tensor.storage]
        assert set(names(graph.index.needed_for([name]))) == flowed - {"x", "y"}
        reached = {op.name for op in graph.ops if name in made[op.name] and name != op.name}
        assert set(names(graph.index.reached_from([name]))) == reached


def test_pairs_unite_names_in_sets_that_are_called_by_their_first_name() -> None:
    found = united("abcdef", [("e", "b"), ("c", "d"), ("d", "e")])
    assert found == {"a": "a", "b": "b", "c": "b", "d": "b", "e": "b", "f": "f"}
