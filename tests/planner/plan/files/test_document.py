"""plan.json holds a plan exactly, and what is not a sound plan is refused with one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import ExitCode, InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import Layout, LayoutKind, ParameterLayout
from autopar.planner.graph.ops import DType, Extent, Listed, Mapped, Ref, Value
from autopar.planner.plan.declared.constraints import Declared, RecomputePin, SplitRule, StagePin
from autopar.planner.plan.declared.file import declared_document, declared_of
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.files.consistency import layout_faults
from autopar.planner.plan.files.document import (
    cluster_document,
    cluster_of,
    parse_plan,
    plan_text,
    read_plan,
    summary,
    write_plan,
)
from autopar.planner.plan.files.graph import graph_document, graph_of, value_document, value_of
from autopar.planner.plan.plan import PlannedCount, with_graph
from tests.clock import least_seconds
from tests.planner.plan.plans import parts_of, prediction, small_plan, split_plan, without_graph
from tests.planner.subjects import ZOO_MODELS, zoo_graph

texts = st.text(st.characters(codec=None))  # lone surrogates too: names come from users
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), texts,
    texts.map(Ref), texts.map(DType),
    st.lists(st.integers()).map(lambda sizes: Extent(tuple(sizes))),
)  # fmt: skip
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner).map(tuple)
        | st.lists(inner).map(Listed)
        | st.lists(st.tuples(st.text(), inner)).map(Mapped)
    ),
)


@given(values)
def test_every_argument_comes_back_with_its_type(value: Value) -> None:
    document = json.loads(json.dumps(value_document(value)))
    assert _typed(value_of(document)) == _typed(value)


def _typed(value: Value) -> str:
    """Return a value as text: == takes 1, 1.0 and True for equal, and lists for tuples."""
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_typed, value))})"
    return repr(value)


@pytest.mark.parametrize(
    "document",
    [{}, {"tensor": 1}, {"tensor": "x", "more": 1}, {"size": [1.5]}, {"size": [True]}, 1.5,
     {"float": "1"}, {"float": None}, {"float": True}, {"complex": [1.0, 2.0]}, [{"unknown": 1}]],
)  # fmt: skip
def test_what_stands_for_no_argument_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="not an argument"):
        value_of(document)


def assert_same_graph(one: Graph, other: Graph) -> None:
    """Equal in every type, and in the order of mappings, on which the names of axes depend."""
    for field in fields(Graph):
        assert repr(getattr(one, field.name)) == repr(getattr(other, field.name)), field.name


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_a_graph_comes_back_exactly(name: str) -> None:
    graph = zoo_graph(name)
    again = graph_of(graph_document(graph))
    assert_same_graph(again, graph)
    assert infer_axes(again).names == infer_axes(graph).names


@pytest.mark.parametrize("name", ["mnist.py", "gpt2.py", "resnet.py", "t5.py"])
def test_a_plan_comes_back_exactly(name: str, tmp_path: Path) -> None:
    plan = small_plan(name, pipeline=2)
    path = tmp_path / "out" / "plan.json"
    write_plan(plan, path)
    again = read_plan(path)
    assert repr(again) == repr(without_graph(plan))
    assert repr(with_graph(again, plan.graph)) == repr(plan)
    assert read_plan(path.parent) == again
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_a_plan_of_rows_that_differ_comes_back_exactly() -> None:
    plan = small_plan("gpt2.py")
    uneven = replace(plan.arrangement, data=2, rows=(3, 1), microbatch=3)
    changed = replace(
        plan, arrangement=uneven, machines=replace(plan.machines, devices=2),
        cluster=choose_cluster(2, "h100-sxm"),
    )  # fmt: skip
    assert parse_plan(plan_text(changed), where="plan.json") == without_graph(changed)


def test_a_split_plan_comes_back_exactly() -> None:
    plan = split_plan("gpt2.py")
    assert any(one.splits and one.conversions for one in plan.classes)
    assert parse_plan(plan_text(plan), where="plan.json") == without_graph(plan)


def test_a_plan_without_the_newest_fields_is_read() -> None:
    """Plans were written before devices and rows could differ."""
    plan = small_plan("gpt2.py")
    document = json.loads(plan_text(plan))
    del document["arrangement"]["rows"], document["machines"]["limits"]
    assert "order" not in document["arrangement"]
    assert parse_plan(json.dumps(document), where="plan.json") == without_graph(plan)


def test_the_order_of_nodes_in_the_search_is_in_no_arrangement_of_the_file() -> None:
    plan = small_plan("gpt2.py")
    ordered = replace(plan.arrangement, order=1)
    other = replace(plan.runners_up[0], arrangement=ordered)
    count = PlannedCount(arrangement=ordered, step_seconds=1.0, device_bytes=1, usd_per_hour=None)
    changed = replace(plan, arrangement=ordered, fastest=other, runners_up=(other,), curve=(count,))
    assert '"order":' not in plan_text(changed)


@pytest.mark.parametrize("field", ["format", "autopar", "arrangement", "prediction"])
def test_the_text_has_each_field_on_a_line_of_its_own(field: str) -> None:
    assert f'\n "{field}": ' in plan_text(small_plan())


def test_a_summary_leaves_out_what_only_emission_needs() -> None:
    table = summary(small_plan())
    assert "layouts" not in table
    assert table["arrangement"] == json.loads(plan_text(small_plan()))["arrangement"]


def changed(path: str, value: object) -> Callable[[str], str]:
    """Return a change of a plan's text: the value at a path such as "stages.0.count"."""

    def change(text: str) -> str:
        table = json.loads(text)
        *outer, last = path.split(".")
        place = table
        for key in outer:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[int(last) if isinstance(place, list) else last] = value
        return json.dumps(table)

    return change


@pytest.mark.parametrize(
    ("change", "telling"),
    [
        (lambda _: "", "the plan is empty"),
        (lambda text: text[: len(text) // 2], "damaged or cut off"),
        (lambda text: text[:-3], "damaged or cut off"),
        (lambda _: "import torch", "damaged or cut off"),
        (lambda _: "[" * 100_000, "damaged or cut off"),
        (lambda _: "[1, 2]", "this JSON file is not a plan"),
        (lambda _: '{"format": "1", "autopar": "1"}', "this JSON file is not a plan"),
        (lambda _: '{"name": "package", "version": "1.0.0"}', "this JSON file is not a plan"),
        (lambda _: '{"format": 2, "autopar": "0.1.0"}', "model: Field required"),
        (changed("format", 3), "update autopar, or plan again"),
        (changed("format", 1), "wrote this plan in format 1"),
        (changed("autopar", "1\nimport os"), "is no version"),
        (changed("machines.devices", 3), "but the machines have 3 devices"),
        (changed("machines.devices", 2.0), "machines.devices: Input should be a valid integer"),
        (changed("machines.colour", "red"), "machines.colour: Unexpected keyword argument"),
        (changed("colour", "red"), "colour: Unexpected keyword argument"),
        (changed("arrangement.schedule", "2f2b"), "arrangement.schedule: Input should be 'gpipe'"),
        (changed("arrangement.shard", 0), "arrangement.shard: Input should be greater"),
        (changed("arrangement.microbatches", 10**12), "arrangement.microbatches: Input should be"),
        (changed("machines.nodes", 0), "machines.nodes: Input should be greater"),
        (changed("machines.nodes", 2), "machines.nodes is 2, but the cluster has 1"),
        (changed("machines.limit_bytes", 0), "machines.limit_bytes: Input should be greater"),
        (changed("machines.limits", [["b200", 1]]), "machines.limits: of 'b200', but"),
        (changed("machines.backend", "mpi"), "machines.backend: 'mpi' is none of nccl, gloo"),
        (changed("objective", "luck"), "objective: 'luck' is none of step-time"),
        (changed("cluster.nodes.0.count", 10**9), "cluster.nodes.0.count: Input should be less"),
        (changed("cluster.nodes.0.count", 262_144), "expected 1 to 262144"),
        (
            changed("cluster.levels.0.units.0.unit.ranks", 3),
            "cluster.levels.0: 3 ranks for 2 devices",
        ),
        (changed("proof.gap", 1e300), "proof.gap: Input should be less than or equal to 1"),
        (changed("proof.gap", -0.1), "proof.gap: Input should be greater"),
        (changed("runners_up.0.step_seconds", -1.0), "runners_up.0.step_seconds: Input should"),
        (changed("prediction.terms", []), "prediction.terms: together 0 seconds"),
        (changed("prediction.terms.1.name", "compute"), "terms: 'compute' more than once"),
        (changed("prediction.stages.0.memory.margin_bytes", -1), "memory.margin_bytes: Input"),
        (changed("prediction.model_flops", -1), "prediction.model_flops: Input"),
        (changed("crossing", {"x": "whole"}), "crossing.x: String should match"),
        (changed("parameters", {"x": "S(d0)"}), "parameters.x: String should match"),
        (changed("layouts.0.rows.0.2", ["Z"]), "layouts.0.rows.0.2.0: String should match"),
        (changed("layouts.0.rows", []), "layouts.0: 0 for 3 ops of"),
        (changed("graph", {}), "graph: Unexpected keyword argument"),
        (changed("arrangement.shard", 3), "shard 3 does not divide data 2"),
        (changed("stages.0.count", 1), "recompute modes"),
        (changed("stages.0.rank", 1), "there is no rank 1"),
        (changed("stages", []), "the arrangement needs 1"),
        (changed("prediction.step_seconds", float("nan")), "should be a finite number"),
    ],
)
def test_a_file_that_is_not_a_sound_plan_is_one_clear_error(
    change: Callable[[str], str], telling: str
) -> None:
    with pytest.raises(InputError) as raised:
        parse_plan(change(plan_text(small_plan())), where="plan.json")
    message = str(raised.value)
    assert telling in message
    assert "plan.json" in raised.value.where
    assert raised.value.fix or raised.value.expected
    assert len(message) < 1000
    assert raised.value.exit_code is ExitCode.USAGE


def test_sharding_that_zero_bubble_undoes_is_refused() -> None:
    text = changed("arrangement.zero", 3)(plan_text(small_plan(pipeline=2)))
    assert parse_plan(text, where="plan.json")
    text = changed("arrangement.schedule", "interleaved-zero-bubble")(text)
    with pytest.raises(InputError, match="ZeRO-3 under interleaved-zero-bubble, which keeps"):
        parse_plan(text, where="plan.json")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_plan(tmp_path / "nothing.json")
    with pytest.raises(InputError, match="No such file"):
        read_plan(tmp_path)  # a folder without a plan.json
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no text in UTF-8"):
        read_plan(tmp_path)


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(small_plan(), path)
    old = path.read_text()
    broken = small_plan(autopar=object())
    with pytest.raises(Exception, match="serialize"):
        write_plan(broken, path)
    endless = small_plan(prediction=prediction(step_seconds=float("inf")))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_plan(endless, path)
    assert path.read_text() == old
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_plan(small_plan(), tmp_path / "file" / "plan.json")


def test_layouts_have_to_fit_the_layers() -> None:
    plan = small_plan("gpt2.py")
    _, axes, layers = parts_of("gpt2.py")
    assert list(layout_faults(plan, axes, layers)) == []
    assert list(layout_faults(replace(plan, layouts=plan.layouts[1:]), axes, layers))
    cut = (plan.layouts[0][1:], *plan.layouts[1:])
    assert list(layout_faults(replace(plan, layouts=cut), axes, layers))
    swapped = (plan.layouts[0][::-1], *plan.layouts[1:])
    assert list(layout_faults(replace(plan, layouts=swapped), axes, layers))
    split = split_plan("gpt2.py")
    assert list(layout_faults(split, axes, layers)) == []
    edits: tuple[tuple[dict[str, Any], str], ...] = (
        ({"letter": "?"}, "letter: aten.linear.default has no letter '?'"),
        ({"axis": "nowhere"}, "axis: 'nowhere' is no axis of"),
        (
            {"gives": (Layout(LayoutKind.SPLIT, "nowhere", 2),)},
            "gives.0: the axis 'nowhere' is not in",
        ),
        ({"gives": (Layout(LayoutKind.SPLIT, "nowhere", 9),)}, "has no dim 9"),
        ({"gives": (Layout(LayoutKind.WHOLE, "nowhere", 0),)}, "but the tensor is not split"),
    )
    for edit, telling in edits:
        kind, position = next(
            (kind, position)
            for kind, own in enumerate(split.layouts)
            for position, one in enumerate(own)
            if one.letter and len(one.needs) == 3
        )
        own = list(split.layouts[kind])
        own[position] = replace(own[position], **edit)
        layouts = (*split.layouts[:kind], tuple(own), *split.layouts[kind + 1 :])
        (fault,) = layout_faults(replace(split, layouts=layouts), axes, layers)
        assert fault.startswith(f"layouts.{kind}.{position}")
        assert telling in fault
    short = small_plan("gpt2.py", stages=small_plan("gpt2.py", pipeline=2).stages[:1])
    assert "they hold" in next(layout_faults(short, axes, layers))


def test_a_deep_model_is_written_and_read_in_little_time() -> None:
    graph = zoo_graph("llama.py", "size=405b")
    half = Layout(LayoutKind.SPLIT, "d0", 0)
    parameters = tuple(ParameterLayout(name=one.name, layout=half) for one in graph.parameters)
    plan = small_plan(graph=graph, parameters=parameters)
    text = plan_text(plan)
    assert len(text) < 1e5
    assert parse_plan(text, where="x") == without_graph(plan)
    assert least_seconds(lambda: parse_plan(plan_text(plan), where="x"), tries=2) < 0.5


def test_a_thousand_equal_nodes_take_the_room_of_one() -> None:
    def length(devices: int) -> int:
        return len(json.dumps(asdict(cluster_document(choose_cluster(devices, "h100-sxm")))))

    assert length(8192) < length(16) + 20


def test_a_cluster_of_unequal_nodes_comes_back() -> None:
    text = "".join(
        f'[[nodes]]\ncount = {count}\ndevice = "{device}"\n'
        for count, device in ((2, "h100-sxm"), (1, "a100-80gb-sxm"), (2, "h100-sxm"))
    )
    cluster = parse_cluster(f'{text}[network]\nlike = "infiniband-hdr"\n', where="test")
    assert cluster_of(cluster_document(cluster)) == cluster


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("pins.tp", 2), ("limits.memory", "90%"), ("limits.memory", "70 GiB"),
        ("choices.zero", [0, 3]), ("choices.schedules", ["gpipe"]), ("objective", "memory"),
        ("choices.compressed_gradients", "either"), ("choices.bucket_sizes", ["1 MiB"]),
    ],
)  # fmt: skip
def test_a_constraint_comes_back_with_its_type(place: str, value: object) -> None:
    one = declare(place, value, origin="test", where=place)
    document = declared_document(one)
    again = declared_of(replace(document, value=json.loads(json.dumps(document.value))))
    assert repr(again) == repr(one)


@pytest.mark.parametrize(
    "rule",
    [
        SplitRule(modules="h.*", axis="ffn", is_required=False),
        StagePin(modules="wte", stage=0),
        RecomputePin(modules="*", mode=Recompute.FULL),
    ],
)
def test_a_rule_comes_back_with_its_type(rule: SplitRule | StagePin | RecomputePin) -> None:
    field = {SplitRule: "splits", StagePin: "stages", RecomputePin: "recompute"}[type(rule)]
    one = Declared(place=f"{field} 1", field=field, value=rule, text="a rule", origin="c.toml")
    assert declared_of(declared_document(one)) == one


@pytest.mark.parametrize(("field", "value"), [("colour", 1), ("tensor", "two"), ("splits", 1)])
def test_a_constraint_that_is_none_is_refused(field: str, value: object) -> None:
    text = changed(
        "constraints", [{"place": "x", "field": field, "value": value, "text": "x", "origin": "x"}]
    )(plan_text(small_plan()))
    with pytest.raises(InputError, match="constraints: "):
        parse_plan(text, where="test")
