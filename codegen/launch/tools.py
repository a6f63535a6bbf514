"""Turns a plan into configurations of other training tools, and tells what they cannot express."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from autopar.codegen.launch.sharding_tools import (
    accelerate_files,
    accelerate_notes,
    deepspeed_files,
    deepspeed_instead,
    deepspeed_notes,
    sharded_instead,
    transformers_files,
    transformers_notes,
)
from autopar.codegen.launch.tool_facts import (
    BlockStage,
    ToolFacts,
    ToolFiles,
    ToolSettings,
    half_flags,
    price,
    some,
)
from autopar.codegen.launch.views import LaunchFile, rendered
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.precision import Compression, Float8


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolView:
    """The content of a tool's file: its settings, and notes on what they cannot express."""

    title: str
    notes: tuple[str, ...]
    sections: Mapping[str, ToolSettings]
    recompute: str  # the mode of all blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A training tool: its name, its files, and what it can express."""

    name: str
    files: Callable[[ToolFacts, Recompute], ToolFiles]
    schedules: Collection[ScheduleKind]
    notes: Callable[[ToolFacts], Iterator[str]]
    selective: str  # how its selective mode differs from the plan's, in words
    compiles: bool
    # returns the facts of the nearest plan that the tool can run, and notes on the changes
    nearest: Callable[[ToolFacts], tuple[ToolFacts, tuple[str, ...]]] = lambda facts: (facts, ())
    splits: str = "all matrices of blocks, the embedding and the head"  # what tensor ranks split
    # for plans that recompute some of the blocks: which blocks the tool recomputes instead, and
    # whether it can recompute just those of the plan
    mixed: str = "all blocks"
    mixes: Callable[[ToolFacts], bool] = lambda _: False


def tool_files(tool: str, facts: ToolFacts) -> tuple[tuple[LaunchFile, ...], tuple[str, ...]]:
    """Return the files of a tool, and what the tool cannot express."""
    row = TOOLS[tool]
    facts, changes = row.nearest(facts)
    mode = _mode(facts)
    notes = (*changes, *row.notes(facts), *_notes(row, facts, mode))
    views = {
        name: ToolView(title=facts.title, notes=notes, sections=sections, recompute=mode.value)
        for name, sections in row.files(facts, mode).items()
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
    yield from (f"the plan {one}; this file cannot say so" for one in unsaid)
    if chosen.compile.takes_layers and not tool.compiles:
        yield f"the plan compiles layers; {tool.name} has no setting for torch.compile"
    on_host = ["steps the optimizer"] * chosen.offload.has_states
    on_host += ["saves tensors of layers"] * facts.saves_on_host
    for what in on_host:
        yield f"the plan {what} on the host; this file of {tool.name} cannot say so"
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


def _nearest_schedule(chosen: Arrangement, known: Collection[ScheduleKind]) -> ScheduleKind:
    """Return the schedule that a tool has in place of one that it lacks."""
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


def _titan_files(facts: ToolFacts, mode: Recompute) -> ToolFiles:
    """Return torchtitan's settings: TOML until release 0.2, Python from 0.3 on."""
    chosen = facts.arrangement
    passes = chosen.microbatches if chosen.pipeline > 1 else 1
    batch: ToolSettings = {
        "local_batch_size": chosen.microbatch * passes,
        "global_batch_size": chosen.microbatch * chosen.microbatches * chosen.data,
        # without loss scaling, torchtitan has no fp16
        "mixed_precision_param": (
            "float32" if chosen.precision.scales_loss else chosen.precision.torch_name
        ),
    }
    sequence = {"enable_sequence_parallel": facts.splits_sequence} if chosen.tensor > 1 else {}
    # torchtitan 0.3 refuses CUDA graphs in a pipeline
    no_graphs = {"disable_cuda_graphs": True} if chosen.pipeline > 1 else {}
    by_op = {"selective_ac_option": "op"} if mode.saved_ops is not None else {}
    compiling = {"enable": chosen.compile.takes_layers}
    return {
        "torchtitan_plan.py": {
            "parallelism": {**_titan_degrees(facts, "lm_head"), **sequence},
            "training": {**batch, **no_graphs},
            "compile": compiling,
        },
        "torchtitan.toml": {
            "parallelism": _titan_degrees(facts, "output"),
            "training": batch,
            "compile": compiling,
            "activation_checkpoint": {"mode": mode.value, **by_op},
        },
    }


def _titan_degrees(facts: ToolFacts, head: str) -> ToolSettings:
    """Return the degrees; `head` is the name of the model's last module."""
    chosen, stage = facts.arrangement, dict[str, Any]()
    is_always = chosen.zero.divides_parameters
    sharding = {"fsdp_reshard_after_forward": "always" if is_always else "never"}
    if chosen.pipeline > 1:
        stage = {
            "pipeline_parallel_schedule": _TORCH_SCHEDULES[chosen.schedule],
            "pipeline_parallel_microbatch_size": chosen.microbatch,
            "module_fqns_per_model_part": tuple(_titan_parts(facts.stages, head)),
        }
    return {
        "data_parallel_replicate_degree": facts.replicas,
        "data_parallel_shard_degree": facts.shard,
        "tensor_parallel_degree": chosen.tensor,
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": chosen.pipeline,
        **(sharding if facts.shard > 1 else {}),
        **stage,
    }


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


_FULLY_SHARDED = MappingProxyType({2: "optim_grads", 3: "optim_grads_params"})  # by ZeRO level


def _megatron_files(facts: ToolFacts, mode: Recompute) -> ToolFiles:
    """Return Megatron-LM's flags; a flag without a value is True here."""
    chosen = facts.arrangement
    layout = {"pipeline-model-parallel-layout": "|".join(_megatron_parts(facts.stages))}
    flags: ToolSettings = {
        "tensor-model-parallel-size": chosen.tensor,
        "pipeline-model-parallel-size": chosen.pipeline,
        "micro-batch-size": chosen.microbatch,
        "global-batch-size": chosen.microbatch * chosen.microbatches * chosen.data,
        "sequence-parallel": chosen.tensor > 1 and facts.splits_sequence,
        **half_flags(chosen.precision),
        "grad-reduce-in-bf16": chosen.compression is Compression.HALF,
        "overlap-grad-reduce": chosen.data > 1,
        **(layout if chosen.pipeline > 1 else {}),
        **_megatron_sharding(facts),
        **_megatron_recompute(facts, mode),
    }
    given = {name: value for name, value in flags.items() if value is not False}
    return {"megatron.sh": {"": given}}


def _megatron_parts(stages: Sequence[BlockStage]) -> Iterator[str]:
    """Yield each stage of a layout: E is the embedding, t a block, L the norm, head and loss."""
    for place, stage in enumerate(stages):
        count = len(stage.blocks)
        blocks = f"t*{count}" if count > 1 else "t" * count
        yield f"{'E' * (place == 0)}{blocks}{'L' * (place == len(stages) - 1)}"


def _megatron_sharding(facts: ToolFacts) -> ToolSettings:
    zero = facts.arrangement.zero
    if facts.shard == 1:
        return {}
    fsdp: ToolSettings = {
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": _FULLY_SHARDED.get(zero.value, ""),
    }
    copies = {"num-distributed-optimizer-instances": facts.replicas}
    return {
        "use-distributed-optimizer": True,
        **(fsdp if zero.shards_modules else {"overlap-param-gather": True}),
        **(copies if facts.replicas > 1 else {}),
    }


def _megatron_recompute(facts: ToolFacts, mode: Recompute) -> ToolSettings:
    """Return the flags of the mode; "block" recomputes equally many blocks in each stage."""
    if not mode.runs_again:
        return {}
    if mode.saved_ops is not None:
        return {"recompute-granularity": "selective"}
    most = max(stage.modes.count(mode) for stage in facts.stages)
    is_all = all(one is mode for one in facts.modes)
    return {
        "recompute-granularity": "full",
        "recompute-method": "uniform" if is_all else "block",
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
            files=_titan_files,
            schedules=_TORCH_SCHEDULES,
            notes=_titan_notes,
            selective="torchtitan recomputes every second product: less memory, slower",
            compiles=True,
        ),
        "megatron": Tool(
            name="Megatron",
            files=_megatron_files,
            schedules=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED_1F1B),
            notes=_megatron_notes,
            selective="Megatron recomputes only the core of attention: more memory, faster",
            compiles=False,
            mixed="equally many blocks in every stage",
            mixes=_is_block_method,
        ),
        "accelerate": Tool(
            name="accelerate",
            files=accelerate_files,
            schedules=(),
            notes=accelerate_notes,
            selective="accelerate saves none: slower, less memory",
            compiles=False,
            nearest=partial(sharded_instead, "accelerate"),
        ),
        "transformers": Tool(
            name="transformers",
            files=transformers_files,
            schedules=(),
            notes=transformers_notes,
            selective="transformers saves none: slower, less memory",
            compiles=True,
            nearest=partial(sharded_instead, "transformers"),
        ),
        "deepspeed": Tool(
            name="DeepSpeed",
            files=deepspeed_files,
            schedules=(ScheduleKind.ONE_F_ONE_B,),
            notes=deepspeed_notes,
            selective="DeepSpeed saves none: slower, less memory",
            compiles=True,
            nearest=deepspeed_instead,
            splits="the matrices of blocks",
        ),
    }
)
