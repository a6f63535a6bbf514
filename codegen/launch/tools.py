"""Turns a plan into configurations of other training tools, and tells what they cannot express."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from autopar.codegen.launch.sharding_tools import (
    accelerate_notes,
    accelerate_sections,
    deepspeed_instead,
    deepspeed_notes,
    deepspeed_sections,
    sharded_instead,
    transformers_notes,
    transformers_sections,
)
from autopar.codegen.launch.tool_facts import (
    BlockStage,
    SettingValue,
    ToolFacts,
    ToolSection,
    half_flags,
    price,
    some,
)
from autopar.codegen.launch.views import LaunchFile, rendered
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.precision import Compression, Float8, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolView:
    """The content of a tool's file: its settings, and notes on what they cannot express."""

    title: str
    notes: tuple[str, ...]
    sections: tuple[ToolSection, ...]
    recompute: str  # the mode of all blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A training tool: its name, its files, and what it can express.

    A file has the name of its template. The tool has the pipeline schedules in `schedules`.
    `nearest` returns the facts of the nearest plan that the tool can run, and notes on the changes.
    """

    name: str
    sections: Callable[[ToolFacts, Recompute], Mapping[str, Sequence[ToolSection]]]
    schedules: Mapping[ScheduleKind, str]
    notes: Callable[[ToolFacts], Iterator[str]]
    selective: str  # how its selective mode differs from the plan's, in words
    compiles: bool
    nearest: Callable[[ToolFacts], tuple[ToolFacts, tuple[str, ...]]] = lambda facts: (facts, ())
    splits: str = "all matrices of blocks, the embedding and the head"  # what tensor ranks split
    mixed: str = "all blocks"  # what it recomputes if the plan recomputes only some, in words
    mixes: Callable[[ToolFacts], bool] = lambda _: False  # whether it recomputes the same blocks


def tool_files(tool: str, facts: ToolFacts) -> tuple[tuple[LaunchFile, ...], tuple[str, ...]]:
    """Return the files of a tool, and what the tool cannot express."""
    row = TOOLS[tool]
    facts, changes = row.nearest(facts)
    mode = _mode(facts)
    notes = (*changes, *row.notes(facts), *_notes(row, facts, mode))
    views = {
        name: ToolView(title=facts.title, notes=notes, sections=tuple(made), recompute=mode.value)
        for name, made in row.sections(facts, mode).items()
    }
    return rendered(views), notes


def _mode(facts: ToolFacts) -> Recompute:
    """Return the mode of the blocks; of several modes, the one that keeps the least memory."""
    order = list(Recompute)
    return max((m for m in facts.modes if m.runs_again), key=order.index, default=Recompute.NONE)


def _notes(tool: Tool, facts: ToolFacts, mode: Recompute) -> Iterator[str]:
    """Yield what this tool cannot express of the plan."""
    chosen = facts.arrangement
    if facts.between:
        yield f"{tool.name} has nothing between blocks; the plan has {some(facts.between)} there"
    modes = {own if own.runs_again else Recompute.NONE for own in facts.modes}
    if len(modes) > 1 and not tool.mixes(facts):
        yield (
            f"the plan recomputes {facts.modes.count(mode)} of {len(facts.modes)} blocks ({mode}), "
            f"{tool.name} recomputes {tool.mixed}: slower, less memory"
        )
    if mode.saved_ops is not None:
        yield f"selective: the plan saves the results of matrix products, {tool.selective}"
    again = [call for call, own in facts.modes_outside if own.runs_again]
    if again:
        yield f"the plan recomputes {some(again)}; {tool.name} only blocks: more memory"
    chunked = [call for call, own in facts.modes_outside if own.makes_chunks]
    unsaid = [f"makes the logits of {some(chunked)} in chunks"] if chunked else []
    unsaid += [f"multiplies in float8 ({chosen.float8})"] * (chosen.float8 is not Float8.NONE)
    unsaid += ["fuses messages with products"] * chosen.compile.fuses_messages
    unsaid += [f"takes {chosen.sync_every} local steps at a time"] * chosen.is_local
    yield from (f"the plan {one}; no setting here says so" for one in unsaid)
    if chosen.compile.takes_layers and not tool.compiles:
        yield f"the plan compiles layers; {tool.name} has no setting for torch.compile"
    on_host = ["steps the optimizer"] * chosen.offload.has_states
    on_host += ["saves tensors of layers"] * facts.saves_on_host
    for what in on_host:
        yield f"the plan {what} on the host; no setting of {tool.name} here says so"
    if len(set(chosen.rows)) > 1:
        rows = ", ".join(map(str, chosen.rows))
        yield f"data ranks have unlike numbers of rows ({rows}); in {tool.name} equal ones"
    yield from _tensor_notes(tool, facts)
    if chosen.pipeline > 1 and chosen.schedule not in tool.schedules:
        nearest = _nearest_schedule(chosen, tool.schedules)
        yield (
            f"{tool.name} has no schedule {chosen.schedule}; the nearest is {nearest}"
            f"{price(facts, pipeline=chosen.pipeline, schedule=nearest)}"
        )


def _tensor_notes(tool: Tool, facts: ToolFacts) -> Iterator[str]:
    """Yield how the tool's split of tensors differs from the plan's."""
    if facts.arrangement.tensor == 1:
        return
    if facts.whole_weights:
        yield (
            f"the plan keeps {some(facts.whole_weights)} whole on tensor ranks; {tool.name} "
            f"splits {tool.splits}"
        )
    if any(facts.crossing) and not facts.splits_sequence:
        axes = sorted({one for one in facts.crossing if one})
        yield (
            f"the plan splits activations between blocks along {some(axes)}; {tool.name} does not"
        )


def _nearest_schedule(chosen: Arrangement, known: Mapping[ScheduleKind, str]) -> ScheduleKind:
    """Return the plan's schedule if a tool has it; else 1F1B, or interleaved 1F1B."""
    if chosen.schedule in known:
        return chosen.schedule
    several = chosen.stages_per_rank > 1 and ScheduleKind.INTERLEAVED_1F1B in known
    return ScheduleKind.INTERLEAVED_1F1B if several else ScheduleKind.ONE_F_ONE_B


_TORCH_SCHEDULES: Mapping[ScheduleKind, str] = MappingProxyType(
    {
        ScheduleKind.GPIPE: "GPipe",
        ScheduleKind.ONE_F_ONE_B: "1F1B",
        ScheduleKind.INTERLEAVED_1F1B: "Interleaved1F1B",
        ScheduleKind.INTERLEAVED_ZERO_BUBBLE: "InterleavedZeroBubble",
        ScheduleKind.ZERO_BUBBLE_V: "ZBVZeroBubble",
    }
)
_TITAN_CONFIG, _TITAN_TOML = "torchtitan_plan.py", "torchtitan.toml"


def _titan_sections(facts: ToolFacts, mode: Recompute) -> Mapping[str, Sequence[ToolSection]]:
    """Return torchtitan's settings: TOML until release 0.2, Python from 0.3 on."""
    chosen = facts.arrangement
    batch = _titan_batch(chosen)
    enabled = {"enable": chosen.compile.takes_layers}
    compiling = ToolSection(name="compile", settings=enabled)
    no_graphs = {"disable_cuda_graphs": True} if chosen.pipeline > 1 else {}  # or 0.3 refuses
    return {
        _TITAN_CONFIG: (
            _titan_degrees(facts, "lm_head", _titan_sequence(facts)),
            ToolSection(name="training", settings={**batch, **no_graphs}),
            compiling,
        ),
        _TITAN_TOML: (
            _titan_degrees(facts, "output", {}),
            ToolSection(name="training", settings=batch),
            compiling,
            ToolSection(name="activation_checkpoint", settings=_titan_recompute(mode)),
        ),
    }


def _titan_degrees(facts: ToolFacts, head: str, more: Mapping[str, SettingValue]) -> ToolSection:
    chosen = facts.arrangement
    degrees: dict[str, SettingValue] = {
        "data_parallel_replicate_degree": facts.replicas,
        "data_parallel_shard_degree": facts.shard,
        "tensor_parallel_degree": chosen.tensor,
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": chosen.pipeline,
    }
    if facts.shard > 1:
        is_always = chosen.zero.divides_parameters
        degrees["fsdp_reshard_after_forward"] = "always" if is_always else "never"
    if chosen.pipeline > 1:
        degrees["pipeline_parallel_schedule"] = _TORCH_SCHEDULES[chosen.schedule]
        degrees["pipeline_parallel_microbatch_size"] = chosen.microbatch
        degrees["module_fqns_per_model_part"] = tuple(_titan_parts(facts.stages, head))
    return ToolSection(name="parallelism", settings={**degrees, **more})


def _titan_sequence(facts: ToolFacts) -> Mapping[str, SettingValue]:
    """Return the setting that tells whether tensor ranks divide the sequence between blocks."""
    if facts.arrangement.tensor == 1:
        return {}
    return {"enable_sequence_parallel": facts.splits_sequence}


def _titan_parts(stages: Sequence[BlockStage], head: str) -> Iterator[tuple[str, ...]]:
    """Yield the modules of each stage, as torchtitan's models call them.

    Of the layers after the blocks, the first is taken for the norm and the last for the head.
    """
    after = [call for stage in stages for call in stage.after]
    for place, stage in enumerate(stages):
        has_head = bool(stage.after) and stage.after[-1] == after[-1]
        has_norm = bool(stage.after) and stage.after[0] == after[0]
        yield (
            *(["tok_embeddings"] if place == 0 else []),
            *(f"layers.{block}" for block in stage.blocks),
            *(["norm"] if has_norm else []),
            *([head] if has_head else []),
        )


def _titan_batch(chosen: Arrangement) -> Mapping[str, SettingValue]:
    """Return the rows of a step; a local batch is one microbatch, or in a pipeline all of them."""
    passes = chosen.microbatches if chosen.pipeline > 1 else 1
    return {
        "local_batch_size": chosen.microbatch * passes,
        "global_batch_size": chosen.microbatch * chosen.microbatches * chosen.data,
        "mixed_precision_param": _titan_precision(chosen.precision),
    }


def _titan_precision(precision: Precision) -> str:
    """Return the dtype in which torchtitan computes; without loss scaling, it has no fp16."""
    return "float32" if precision.scales_loss else precision.torch_name


def _titan_recompute(mode: Recompute) -> Mapping[str, SettingValue]:
    by_op: dict[str, SettingValue] = {"selective_ac_option": "op"}
    return {"mode": mode.value, **(by_op if mode.saved_ops is not None else {})}


def _titan_notes(facts: ToolFacts) -> Iterator[str]:
    chosen = facts.arrangement
    if chosen.zero.gathers_updated and facts.shard > 1:
        yield (
            "torchtitan has no ZeRO-1; the nearest is ZeRO-2: fully_shard, parameters stay "
            f"gathered{price(facts, data=chosen.data, shard=chosen.shard, zero=2)}"
        )
    if chosen.tensor > 1 and not facts.splits_sequence:
        yield "torchtitan 0.2 always splits sequences between blocks; the plan and 0.3 do not"
    if (own := chosen.compression) is not Compression.NONE:
        yield f"the plan sums gradients {own.sums}, torchtitan in 32"
    if chosen.precision.scales_loss or chosen.precision.products:
        yield f"torchtitan has no {chosen.precision.value}; the nearest is float32"


_MEGATRON_SCHEDULES: Mapping[ScheduleKind, str] = MappingProxyType(
    {ScheduleKind.ONE_F_ONE_B: "1F1B", ScheduleKind.INTERLEAVED_1F1B: "interleaved 1F1B"}
)
_FULLY_SHARDED = MappingProxyType({2: "optim_grads", 3: "optim_grads_params"})  # by ZeRO level


def _megatron_sections(facts: ToolFacts, mode: Recompute) -> Mapping[str, Sequence[ToolSection]]:
    """Return Megatron-LM's flags; a flag without a value is True here."""
    chosen = facts.arrangement
    flags: dict[str, SettingValue] = {
        "tensor-model-parallel-size": chosen.tensor,
        "pipeline-model-parallel-size": chosen.pipeline,
        "micro-batch-size": chosen.microbatch,
        "global-batch-size": chosen.microbatch * chosen.microbatches * chosen.data,
        "sequence-parallel": chosen.tensor > 1 and facts.splits_sequence,
        **half_flags(chosen.precision),
        "grad-reduce-in-bf16": chosen.compression is Compression.HALF,
        "overlap-grad-reduce": chosen.data > 1,
    }
    if chosen.pipeline > 1:
        flags["pipeline-model-parallel-layout"] = "|".join(_megatron_parts(facts.stages))
    flags.update(_megatron_sharding(facts))
    flags.update(_megatron_recompute(facts, mode))
    return {"megatron.sh": (ToolSection(name="", settings=_present(flags)),)}


def _present(flags: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
    return {name: value for name, value in flags.items() if value is not False}


def _megatron_parts(stages: Sequence[BlockStage]) -> Iterator[str]:
    """Yield each stage of a layout: E is the embedding, t a block, L the norm, head and loss."""
    for place, stage in enumerate(stages):
        count = len(stage.blocks)
        blocks = f"t*{count}" if count > 1 else "t" * count
        yield f"{'E' * (place == 0)}{blocks}{'L' * (place == len(stages) - 1)}"


def _megatron_sharding(facts: ToolFacts) -> Mapping[str, SettingValue]:
    chosen = facts.arrangement
    if facts.shard == 1:
        return {}
    flags: dict[str, SettingValue] = {"use-distributed-optimizer": True}
    if chosen.zero.shards_modules:
        flags["use-megatron-fsdp"] = True
        flags["data-parallel-sharding-strategy"] = _FULLY_SHARDED[chosen.zero.value]
    else:
        flags["overlap-param-gather"] = True
    if facts.replicas > 1:
        flags["num-distributed-optimizer-instances"] = facts.replicas
    return flags


def _megatron_recompute(facts: ToolFacts, mode: Recompute) -> Mapping[str, SettingValue]:
    """Return the flags of the mode; "block" recomputes equally many blocks in each stage."""
    if not mode.runs_again:
        return {}
    if mode.saved_ops is not None:
        return {"recompute-granularity": "selective"}
    most = max(stage.modes.count(mode) for stage in facts.stages)  # blocks of any stage
    is_all = all(one is mode for one in facts.modes)
    method = "uniform" if is_all else "block"
    return {
        "recompute-granularity": "full",
        "recompute-method": method,
        "recompute-num-layers": 1 if is_all else most,
    }


def _is_block_method(facts: ToolFacts) -> bool:
    """Whether all stages recompute equally many blocks in full, and other blocks not at all."""
    mode = _mode(facts)
    counts = {stage.modes.count(mode) for stage in facts.stages}
    is_full_or_none = mode.saved_ops is None and {*facts.modes} <= {mode, Recompute.NONE}
    return is_full_or_none and len(counts) == 1


def _megatron_notes(facts: ToolFacts) -> Iterator[str]:
    early = [call for stage in facts.stages[:-1] for call in stage.after]
    if early:
        yield f"the plan cuts after {some(early)}; Megatron keeps norm and head in one stage"
    late = [call for stage in facts.stages[1:] for call in stage.before]
    if late:
        yield f"the plan cuts before {some(late)}; Megatron embeds in the first stage"
    if facts.arrangement.zero.shards_modules and facts.arrangement.pipeline > 1:
        yield (
            "Megatron FSDP shards parameters in every microbatch of a pipeline; check that your "
            "release runs both, or take ZeRO-1: --use-distributed-optimizer alone"
        )


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "torchtitan": Tool(
            name="torchtitan",
            sections=_titan_sections,
            schedules=_TORCH_SCHEDULES,
            notes=_titan_notes,
            selective="torchtitan recomputes every second product: less memory, slower",
            compiles=True,
        ),
        "megatron": Tool(
            name="Megatron",
            sections=_megatron_sections,
            schedules=_MEGATRON_SCHEDULES,
            notes=_megatron_notes,
            selective="Megatron recomputes only the core of attention: more memory, faster",
            compiles=False,
            mixed="equally many blocks in every stage",
            mixes=_is_block_method,
        ),
        "accelerate": Tool(
            name="accelerate",
            sections=accelerate_sections,
            schedules={},
            notes=accelerate_notes,
            selective="accelerate saves none: slower, less memory",
            compiles=False,
            nearest=partial(sharded_instead, "accelerate"),
        ),
        "transformers": Tool(
            name="transformers",
            sections=transformers_sections,
            schedules={},
            notes=transformers_notes,
            selective="transformers saves none: slower, less memory",
            compiles=True,
            nearest=partial(sharded_instead, "transformers"),
        ),
        "deepspeed": Tool(
            name="DeepSpeed",
            sections=deepspeed_sections,
            schedules={ScheduleKind.ONE_F_ONE_B: "1F1B"},
            notes=deepspeed_notes,
            selective="DeepSpeed saves none: slower, less memory",
            compiles=True,
            nearest=deepspeed_instead,
            splits="the matrices of blocks",
        ),
    }
)
