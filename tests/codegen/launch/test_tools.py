"""Other tools read the plan's own degrees, batch, stages and modes from what is emitted."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autopar.codegen.launch.tool_facts import ToolFacts, tool_facts
from autopar.codegen.launch.tools import TOOLS, tool_files
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind, rank_of
from autopar.planner.errors import InputError
from autopar.planner.layers import Compile
from autopar.planner.plan.plan import Plan, PlannedStage
from autopar.planner.precision import Compression, Precision
from tests.codegen.launch.test_quoting import HOSTILE
from tests.planner.plan.plans import arrangement, parts_of, small_plan, split_plan, whole_layouts

BLOCKS = 6
NONE, SELECTIVE, FULL, CHUNKED, HOST, FULL_HOST = Recompute
OPTIONS = Path(__file__).parent / "megatron_options.txt"
SETTINGS = Path(__file__).parent / "tool_settings.txt"


def llama(
    stages: Sequence[int] = (9,), *, modes: Mapping[int, Recompute] | None = None, **changes: Any
) -> Plan:
    """Return a plan of a Llama with six blocks; `stages` are numbers of layers.

    Layer 0 is the embedding, 1 to 6 are blocks, 7 is the norm, 8 the head. `modes` are those of
    layers; the others are not recomputed.
    """
    graph, _, layers = parts_of("llama.py", f"layers={BLOCKS}")
    own = {"pipeline": len(stages) // changes.get("stages_per_rank", 1), **changes}
    chosen = arrangement(**{"microbatches": 2 * len(stages), **own})
    return replace(
        small_plan("llama.py"),
        graph=graph,
        arrangement=chosen,
        stages=tuple(_stages(stages, modes or {}, chosen.schedule, chosen.pipeline)),
        layouts=whole_layouts(layers),
    )


def _stages(
    counts: Sequence[int], modes: Mapping[int, Recompute], kind: ScheduleKind, ranks: int
) -> Iterator[PlannedStage]:
    first = 0
    for stage, count in enumerate(counts):
        own = tuple(modes.get(place, NONE) for place in range(first, first + count))
        rank = rank_of(kind, stage, ranks)
        yield PlannedStage(rank=rank, first=first, count=count, recompute=own)
        first += count


INTERLEAVED: dict[str, Any] = {"schedule": ScheduleKind.INTERLEAVED_1F1B, "stages_per_rank": 2}
NAMES: tuple[str, ...] = ("data", "zero-1", "zero-2", "zero-3", "hsdp")
NAMES += ("tensor", "even", "uneven", "interleaved", "mixed")
ALL_FULL = dict.fromkeys(range(1, 7), FULL)


@cache
def plans() -> Mapping[str, Plan]:
    """Return the plans of NAMES."""
    return {
        "data": llama(data=4, shard=4),
        "zero-1": llama(data=4, shard=4, zero=Zero.OPTIMIZER),
        "zero-2": llama(data=4, shard=4, zero=Zero.GRADIENTS),
        "zero-3": llama(data=4, shard=4, zero=Zero.PARAMETERS, modes=ALL_FULL),
        "hsdp": llama(data=8, shard=4, zero=Zero.PARAMETERS),
        "tensor": llama(data=1, shard=1, tensor=4),
        "even": llama((4, 5), data=1, shard=1),
        "uneven": llama((2, 3, 4), data=2, shard=2, zero=Zero.OPTIMIZER, modes=ALL_FULL),
        "interleaved": llama((2, 2, 2, 3), **INTERLEAVED),
        "mixed": llama((4, 5), tensor=2, data=4, shard=2, zero=Zero.OPTIMIZER),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """A plan as the files of a tool say it."""

    pipeline: int
    tensor: int
    replicas: int
    shard: int
    microbatch: int
    global_batch: int
    recompute: str
    blocks: tuple[int, ...] = ()  # of each stage; () without a pipeline


def needed_by(plan: Plan) -> ToolPlan:
    """Return what the files of a tool should say."""
    chosen, facts = plan.arrangement, facts_of(plan)
    blocks = tuple(len(stage.blocks) for stage in facts.stages)
    return ToolPlan(
        pipeline=chosen.pipeline,
        tensor=chosen.tensor,
        replicas=chosen.data // chosen.shard if chosen.zero else chosen.data,
        shard=chosen.shard if chosen.zero else 1,
        microbatch=chosen.microbatch,
        global_batch=chosen.global_batch,
        recompute=next(iter(set(facts.modes))).value,
        blocks=blocks if chosen.pipeline > 1 else (),
    )


def facts_of(plan: Plan) -> ToolFacts:
    """Return a plan's facts."""
    return tool_facts(plan)


def files(tool: str, plan: Plan) -> dict[str, str]:
    return {one.name: one.text for one in tool_files(tool, facts_of(plan))[0]}


def notes(tool: str, plan: Plan) -> str:
    return "\n".join(tool_files(tool, facts_of(plan))[1])


def megatron_words(plan: Plan) -> list[str]:
    """Return the words that bash makes of the file."""
    text = files("megatron", plan)["megatron.sh"] + '\nprintf "%s\\0" "${PARALLELISM[@]}"'
    made = subprocess.run(["bash"], input=text, text=True, capture_output=True, check=True)
    return made.stdout.split("\0")[:-1]


def megatron_plan(plan: Plan) -> ToolPlan:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for word in megatron_words(plan):
        if word.startswith("--"):
            parser.add_argument(word, nargs="?", const="yes")
    found = vars(parser.parse_args(megatron_words(plan)))
    data = plan.arrangement.data  # Megatron's is the rest of the ranks
    replicas = int(found.get("num_distributed_optimizer_instances", 1))
    shard = data // replicas if "use_distributed_optimizer" in found else 1
    layout = found.get("pipeline_model_parallel_layout", "")
    return ToolPlan(
        pipeline=int(found["pipeline_model_parallel_size"]),
        tensor=int(found["tensor_model_parallel_size"]),
        replicas=data // shard,
        shard=shard,
        microbatch=int(found["micro_batch_size"]),
        global_batch=int(found["global_batch_size"]),
        recompute=found.get("recompute_granularity", "none"),
        blocks=tuple(layout_blocks(layout)) if layout else (),
    )


def layout_blocks(layout: str) -> Iterator[int]:
    for stage in layout.split("|"):
        blocks = stage.strip("EL")
        yield int(blocks[2:]) if "*" in blocks else len(blocks)


def titan_plan(parallelism: Mapping[str, Any], training: Mapping[str, Any], mode: str) -> ToolPlan:
    pipeline = parallelism["pipeline_parallel_degree"]
    local = training["local_batch_size"]
    size = parallelism["pipeline_parallel_microbatch_size"] if pipeline > 1 else local
    parts = parallelism.get("module_fqns_per_model_part") or ()
    return ToolPlan(
        pipeline=pipeline,
        tensor=parallelism["tensor_parallel_degree"],
        replicas=parallelism["data_parallel_replicate_degree"],
        shard=parallelism["data_parallel_shard_degree"],
        microbatch=size,
        global_batch=training["global_batch_size"],
        recompute=mode,
        blocks=tuple(sum("layers." in name for name in part) for part in parts),
    )


@pytest.mark.parametrize("name", NAMES)
def test_megatron_reads_the_plan(name: str) -> None:
    assert megatron_plan(plans()[name]) == needed_by(plans()[name])


@pytest.mark.parametrize("name", NAMES)
def test_torchtitans_toml_says_the_plan(name: str) -> None:
    found = tomllib.loads(files("torchtitan", plans()[name])["torchtitan.toml"])
    mode = found["activation_checkpoint"]["mode"]
    assert titan_plan(found["parallelism"], found["training"], mode) == needed_by(plans()[name])


def test_megatron_has_all_options() -> None:
    lines = OPTIONS.read_text(encoding="utf-8").splitlines()
    known = {line for line in lines if not line.startswith("#")}
    emitted = {
        word for plan in every_plan() for word in megatron_words(plan) if word.startswith("--")
    }
    assert len(emitted) > 15
    assert emitted <= known


def every_plan() -> list[Plan]:
    """Return plans that bring out every setting."""
    half = replace(plans()["hsdp"], arrangement=arrangement(compression=Compression.HALF))
    scaled = replace(half, arrangement=arrangement(precision=Precision.FP16))
    return [*plans().values(), half, scaled, llama(modes={1: SELECTIVE}), llama(modes={1: FULL})]


@pytest.mark.parametrize(
    ("tool", "file", "read"),
    [
        ("torchtitan", "torchtitan.toml", tomllib.loads),
        ("accelerate", "accelerate.yaml", yaml.safe_load),
        ("deepspeed", "deepspeed.json", json.loads),
    ],
)
def test_tools_have_all_settings(tool: str, file: str, read: Callable[[str], Any]) -> None:
    lines = (line.split() for line in SETTINGS.read_text(encoding="utf-8").splitlines())
    known = {words[1] for words in lines if words[0] == tool}
    alone = [one for one in every_plan() if tool != "accelerate" or one.arrangement.tensor == 1]
    emitted = {one for plan in alone for one in paths_in(read(files(tool, plan)[file]))}
    assert len(emitted) > 8
    assert emitted - {"autopar"} <= known


def paths_in(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of settings, "section.name"."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from (f"{name}.{one}" for one in value)
        else:
            yield name


def test_megatrons_own_parser_of_layouts_finds_the_stages() -> None:
    place = "megatron.core.transformer.pipeline_parallel_layer_layout"
    layouts = pytest.importorskip(place, reason="needs megatron-core")
    for plan in (plans()["uneven"], plans()["interleaved"]):
        words = megatron_words(plan)
        text = words[words.index("--pipeline-model-parallel-layout") + 1]
        found = layouts.PipelineParallelLayerLayout(text, plan.arrangement.pipeline)
        found.validate_layer_layout(BLOCKS, 0)
        assert found.virtual_pipeline_model_parallel_size == plan.arrangement.stages_per_rank


@pytest.mark.parametrize("name", NAMES)
def test_torchtitans_own_parser_of_toml_finds_the_plan(name: str, tmp_path: Path) -> None:
    config = pytest.importorskip("torchtitan.config", reason="needs torchtitan 0.2")
    if not hasattr(config, "JobConfig"):
        pytest.skip("torchtitan 0.2 reads TOML, later releases do not")
    path = tmp_path / "torchtitan.toml"
    path.write_text(files("torchtitan", plans()[name])["torchtitan.toml"], encoding="utf-8")
    found = config.ConfigManager().parse_args(["--job.config_file", str(path)])
    as_read = titan_plan(
        vars(found.parallelism), vars(found.training), found.activation_checkpoint.mode
    )
    assert as_read == needed_by(plans()[name])


@pytest.mark.parametrize("name", NAMES)
def test_torchtitans_own_configuration_becomes_the_plans(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "torchtitan.models.llama3.config_registry"
    pytest.importorskip(place, reason="needs torchtitan 0.3", exc_type=ImportError)
    manager = importlib.import_module("torchtitan.config.manager")
    for file, text in files("torchtitan", plans()[name]).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    joined = (
        f"from {place} import llama3_debugmodel\nfrom torchtitan_plan import planned\n"
        "def run():\n    return planned(llama3_debugmodel())\n"
    )
    (tmp_path / "titan_run.py").write_text(joined, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("titan_run", "torchtitan_plan"):
        sys.modules.pop(module, None)
    parsed = manager.ConfigManager().parse_args(["--module", "titan_run", "--config", "run"])
    policy = type(parsed.activation_checkpoint).__qualname__
    as_read = titan_plan(
        {one: getattr(parsed.parallelism, one) for one in parsed.parallelism.__slots__},
        {one: getattr(parsed.training, one) for one in parsed.training.__slots__},
        {"NoneType": "none", "FullAC.Config": "full", "SelectiveAC.Config": "selective"}[policy],
    )
    assert as_read == needed_by(plans()[name])


SHARDED = ("data", "zero-2", "zero-3", "hsdp")  # what both tools express as it is


def accelerate_plan(plan: Plan, found: Mapping[str, Any]) -> ToolPlan:
    """Return what a file of accelerate says; its batch is told in Python."""
    degrees = {key.removeprefix("parallelism_config_"): value for key, value in found.items()}
    return replace(
        needed_by(plan),
        tensor=degrees.get("tp_size", 1),
        replicas=degrees.get("dp_replicate_size", found["num_processes"]),
        shard=degrees.get("dp_shard_size", 1),
        recompute="full" if found.get("fsdp_activation_checkpointing") else "none",
    )


@pytest.mark.parametrize("name", SHARDED)
def test_accelerates_file_says_the_plan(name: str) -> None:
    parts = yaml.safe_load(files("accelerate", plans()[name])["accelerate.yaml"])
    inner = [one for one in parts.values() if isinstance(one, dict)]
    found = parts | {key: value for one in inner for key, value in one.items()}
    assert accelerate_plan(plans()[name], found) == needed_by(plans()[name])
    assert found["num_processes"] == plans()[name].arrangement.ranks


@pytest.mark.parametrize("name", [*SHARDED, "even", "mixed"])
def test_accelerates_own_launcher_accepts_the_file(name: str, tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="needs accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(files("accelerate", plans()[name])["accelerate.yaml"], encoding="utf-8")
    words = ["--config_file", str(path), "train.py"]
    arguments, *_ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(words)
    )
    if arguments.use_fsdp and name in SHARDED:
        assert accelerate_plan(plans()[name], vars(arguments)) == needed_by(plans()[name])
    assert arguments.num_processes == plans()[name].arrangement.ranks


@pytest.mark.parametrize("name", [*SHARDED, "tensor"])
def test_transformers_reads_the_plan(name: str) -> None:
    transformers = pytest.importorskip("transformers.distributed.configuration_utils")
    made: dict[str, Any] = {}
    exec(files("transformers", plans()[name])["transformers_plan.py"], made)
    degrees = transformers.DistributedConfig(**made["DISTRIBUTED"])
    training = importlib.import_module("transformers.training_args").TrainingArguments
    assert set(made["TRAINING"]) <= set(training.__dataclass_fields__)
    size, count = (
        made["TRAINING"][key]
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    as_read = ToolPlan(
        pipeline=degrees.pp_size,
        tensor=degrees.tp_size,
        replicas=degrees.dp_replicate_size,
        shard=degrees.fsdp_size,
        microbatch=size,
        global_batch=size * count * degrees.dp_size,
        recompute="full" if made["TRAINING"]["activation_checkpointing"] else "none",
    )
    assert as_read == needed_by(plans()[name])


@pytest.mark.parametrize("tool", ["accelerate", "transformers"])
def test_a_pipeline_becomes_data_ranks_that_share_parameters(tool: str) -> None:
    assert f"{tool} trains without pipelines" in notes(tool, plans()["uneven"])
    assert "the nearest is dp 6, ZeRO-3" in notes(tool, plans()["uneven"])
    made: dict[str, Any] = {}
    exec(files("transformers", plans()["uneven"])["transformers_plan.py"], made)
    training = made["TRAINING"]
    rows = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    assert made["DISTRIBUTED"]["fsdp_size"] == 6
    assert rows * 6 == plans()["uneven"].arrangement.global_batch


def deepspeed_found(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("deepspeed", plan)["deepspeed.json"])
    return found


def deepspeed_plan(
    plan: Plan, batch: Sequence[int], stage: int, pipeline: int, tensor: int
) -> ToolPlan:
    """Return what DeepSpeed makes of its batch (whole, of a pass, passes) and its ZeRO stage.

    It divides by all data ranks. Blocks and recomputation are told in Python.
    """
    whole, size, passes = batch
    data = whole // (size * passes)
    return replace(
        needed_by(plan),
        replicas=1 if stage else data,
        shard=data if stage else 1,
        microbatch=size,
        global_batch=whole,
        pipeline=pipeline,
        tensor=tensor,
    )


def needed_by_deepspeed(plan: Plan) -> ToolPlan:
    """Return what DeepSpeed should read: it divides by all data ranks, and splits no pipelines."""
    found = needed_by(plan)
    shard = found.replicas * found.shard if found.shard > 1 else 1
    tensor = 1 if found.pipeline > 1 else found.tensor
    replicas = found.replicas * found.shard // shard
    return replace(found, shard=shard, replicas=replicas, tensor=tensor)


BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeeds_file_says_the_plan(name: str) -> None:
    plan = plans()[name]
    found = deepspeed_found(plan)
    stages = found.get("pipeline", {}).get("stages", 1)
    tensor = found.get("tensor_parallel", {}).get("autotp_size", 1)
    stage = found["zero_optimization"]["stage"]
    batch = [found[one] for one in BATCH]
    as_read = deepspeed_plan(plan, batch, stage, stages, tensor)
    assert as_read == needed_by_deepspeed(plan)
    assert stage == plan.arrangement.zero
    assert found["bf16"] == {"enabled": True}


@pytest.mark.parametrize("name", NAMES)
def test_deepspeeds_own_parser_finds_the_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="needs deepspeed")
    plan = plans()[name]
    path = tmp_path / "deepspeed.json"
    path.write_text(files("deepspeed", plan)["deepspeed.json"], encoding="utf-8")
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: plan.arrangement.data)
    monkeypatch.setattr(runtime, "dist", SimpleNamespace(get_rank=lambda: 0))
    found = runtime.DeepSpeedConfig(str(path), mpu=ranks)
    stages = found.pipeline["stages"]
    as_read = deepspeed_plan(
        plan,
        [getattr(found, one) for one in BATCH],
        found.zero_optimization_stage,
        1 if stages == "auto" else stages,
        found.tensor_parallel_config.autotp_size or 1,
    )
    assert as_read == needed_by_deepspeed(plan)
    assert found.bfloat16_config.enabled
    assert found.gradient_clipping == 1.0


def test_deepspeed_says_what_its_file_cannot() -> None:
    found = notes("deepspeed", plans()["uneven"])
    assert 'num_stages=3, partition_method="type:Block"' in found
    assert "the plan's stages have 1, 3, 2 blocks" in found
    assert "DeepSpeed divides blocks" not in notes("deepspeed", llama((4, 5), modes=ALL_FULL))
    assert "divides by 4 of 8 data ranks, DeepSpeed by all" in notes("deepspeed", plans()["hsdp"])
    sharded = llama((4, 5), data=4, shard=4, zero=Zero.PARAMETERS)
    assert "the nearest is ZeRO-1" in notes("deepspeed", sharded)
    assert deepspeed_found(sharded)["zero_optimization"]["stage"] == 1
    assert "the nearest is 1f1b" in notes("deepspeed", plans()["interleaved"])
    assert "gradient_checkpointing_enable" in notes("deepspeed", plans()["zero-3"])
    assert "engine.compile()" in notes("deepspeed", llama(compile=Compile.LAYERS))


def test_accelerate_refuses_tensor_ranks_alone() -> None:
    with pytest.raises(InputError, match="refuses tensor ranks"):
        files("accelerate", plans()["tensor"])


def test_a_cut_inside_the_end_is_told_where_a_tool_has_no_such_stage() -> None:
    plan = llama((8, 1), data=1, shard=1)
    assert "the plan cuts after norm" in notes("megatron", plan)
    found = tomllib.loads(files("torchtitan", plan)["torchtitan.toml"])
    parts = found["parallelism"]["module_fqns_per_model_part"]
    assert (parts[0][-1], parts[1]) == ("norm", ["output"])


def test_a_schedule_that_a_tool_lacks_is_told_with_the_nearest() -> None:
    plan = llama((2, 2, 2, 3), schedule=ScheduleKind.ZERO_BUBBLE_V, stages_per_rank=2)
    nearest = "no schedule zero-bubble-v; the nearest is interleaved-1f1b"
    assert nearest in notes("megatron", plan)
    assert "schedule" not in notes("torchtitan", plan)
    assert "ZBVZeroBubble" in files("torchtitan", plan)["torchtitan.toml"]


def test_blocks_that_a_tool_cannot_recompute_alone_are_told() -> None:
    first = llama((4, 5), modes={1: FULL})
    assert "1 of 6 blocks (full), Megatron recomputes equally many" in notes("megatron", first)
    assert "torchtitan recomputes all blocks" in notes("torchtitan", first)
    each = llama((4, 5), modes={1: FULL, 4: FULL})
    assert "recomputes" not in notes("megatron", each)
    words = shlex.join(megatron_words(each))
    assert "--recompute-method block --recompute-num-layers 1" in words


def test_other_differences_are_told() -> None:
    assert "torchtitan has no ZeRO-1" in notes("torchtitan", plans()["zero-1"])
    assert "q_proj.weight and" in notes("megatron", split_plan("llama.py"))
    compiled = llama(compile=Compile.LAYERS)
    assert "torch.compile" in notes("megatron", compiled)
    assert "enable = true" in files("torchtitan", compiled)["torchtitan.toml"]
    assert "unlike numbers of rows (3, 2)" in notes("megatron", llama(microbatch=3, rows=(3, 2)))
    assert "logits of lm_head in chunks" in notes("megatron", llama(modes={8: CHUNKED}))
    there = notes("megatron", llama(modes={2: HOST}))
    assert "saves tensors of layers on the host" in there
    assert "recomputes" not in there
    again = notes("megatron", llama(modes=dict.fromkeys(range(1, 7), FULL_HOST)))
    assert "saves tensors of layers on the host" in again
    assert "recomputes" not in again  # all blocks in full, as Megatron can
    assert notes("megatron", plans()["data"]) == notes("torchtitan", plans()["data"]) == ""


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_cannot_express_stands_in_its_files(tool: str) -> None:
    plan = llama((4, 5), modes={1: FULL, 8: FULL}, compile=Compile.LAYERS)
    found = notes(tool, plan).splitlines()
    assert found
    for text in files(tool, plan).values():
        assert all(json.dumps(line)[1:-1] in text or line in text for line in found)


def test_hostile_names_of_models_stay_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = plans()["uneven"]
    for name in HOSTILE:
        plan = replace(whole, model=replace(whole.model, name=name))
        assert megatron_plan(plan) == needed_by(whole)
        assert "parallelism" in tomllib.loads(files("torchtitan", plan)["torchtitan.toml"])
        compile(files("torchtitan", plan)["torchtitan_plan.py"], "planned", "exec")
        assert deepspeed_found(plan).keys() == deepspeed_found(whole).keys()
    assert not list(tmp_path.iterdir())
