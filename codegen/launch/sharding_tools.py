"""Turns the facts of a plan into settings of accelerate, transformers and DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from autopar.codegen.launch.tool_facts import (
    BlockStage,
    ToolFacts,
    ToolFiles,
    ToolSettings,
    half_flags,
    price,
)
from autopar.planner.costs.prediction import Arrangement, Recompute, Zero
from autopar.planner.errors import InputError
from autopar.planner.plan.telling.words import CLIP_NORM, degrees_words, sharding_words
from autopar.planner.precision import Compression, Precision

_ONCE_A_STEP, _GATHERED, _GATHERED_EACH_PASS = Zero(1), Zero(2), Zero(3)


def sharded_instead(tool: str, facts: ToolFacts) -> tuple[ToolFacts, tuple[str, ...]]:
    """Return the nearest facts that FSDP can express, and notes on what was changed.

    The ranks of a pipeline become data ranks that share the parameters. ZeRO-1 becomes ZeRO-2. So
    does a plan without ZeRO, if it has both data ranks and tensor ranks.
    """
    chosen = facts.arrangement
    if chosen.pipeline > 1:
        return _without_pipeline(tool, facts)
    is_joined = chosen.tensor > 1 and facts.shard == 1 and chosen.data > 1
    if not is_joined and not (chosen.zero.gathers_updated and facts.shard > 1):
        return facts, ()
    nearest = replace(chosen, zero=_GATHERED, shard=chosen.data if is_joined else chosen.shard)
    fault = "cannot join tensor ranks and data ranks without ZeRO" if is_joined else "has no ZeRO-1"
    known = price(facts, data=nearest.data, tensor=nearest.tensor, zero=nearest.zero)
    note = f"{tool} {fault}; the nearest is ZeRO-2, whose parameters stay gathered{known}"
    return replace(facts, arrangement=nearest), (note,)


def _without_pipeline(tool: str, facts: ToolFacts) -> tuple[ToolFacts, tuple[str, ...]]:
    chosen = facts.arrangement
    if chosen.microbatches % chosen.pipeline:
        raise InputError(
            f"{tool} trains without pipelines: the {chosen.pipeline} pipeline ranks would be data "
            f"ranks, which cannot divide the microbatches of a step ({chosen.microbatches})",
            fix="plan again with --pin pp=1",
        )
    nearest = replace(
        chosen,
        pipeline=1,
        stages_per_rank=1,
        data=chosen.data * chosen.pipeline,
        shard=facts.shard * chosen.pipeline,
        microbatches=chosen.microbatches // chosen.pipeline,
        zero=_GATHERED_EACH_PASS,
    )
    words = f"{degrees_words(nearest).replace(' · ', ' + ')}, {sharding_words(nearest)}"
    known = price(facts, pipeline=1, data=nearest.data, tensor=nearest.tensor, zero=nearest.zero)
    note = f"{tool} trains without pipelines; the nearest is {words}{known}"
    stages = (_joined(facts.stages),)
    return replace(facts, arrangement=nearest, stages=stages), (note,)


def _joined(stages: Sequence[BlockStage]) -> BlockStage:
    """Return all stages as one."""
    return BlockStage(
        blocks=tuple(chain.from_iterable(one.blocks for one in stages)),
        modes=tuple(chain.from_iterable(one.modes for one in stages)),
        before=tuple(chain.from_iterable(one.before for one in stages)),
        after=tuple(chain.from_iterable(one.after for one in stages)),
    )


def accelerate_files(facts: ToolFacts, mode: Recompute) -> ToolFiles:
    """Return accelerate's configuration file."""
    chosen = facts.arrangement
    if chosen.tensor > 1 and facts.shard == 1:
        raise InputError(
            "accelerate launch refuses tensor ranks without data ranks that share parameters",
            fix="--for transformers has them, or plan again with --pin zero=3",
        )
    is_sharded, blocks = facts.shard > 1, facts.block_class
    top: ToolSettings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU",
        "mixed_precision": chosen.precision.value if chosen.precision.is_half else "no",
        "num_machines": facts.nodes,
        "num_processes": chosen.ranks,
    }
    fsdp: ToolSettings = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": chosen.zero.divides_parameters,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if blocks else "NO_WRAP",
        **({"fsdp_transformer_layer_cls_to_wrap": blocks} if blocks else {}),
        "fsdp_activation_checkpointing": mode.runs_again,
    }
    degrees: ToolSettings = {
        "parallelism_config_dp_replicate_size": facts.replicas,
        "parallelism_config_dp_shard_size": facts.shard,
        "parallelism_config_tp_size": chosen.tensor,
    }
    parts = {"fsdp_config": fsdp, "parallelism_config": degrees} if is_sharded else {}
    return {"accelerate.yaml": {"": top, **parts}}


def accelerate_notes(facts: ToolFacts) -> Iterator[str]:
    """Yield notes on what accelerate takes from the user's Python code, not from its file."""
    chosen = facts.arrangement
    yield (
        f"accelerate takes the batch in Python: DataLoader(batch_size={chosen.microbatch}), "
        f"Accelerator(gradient_accumulation_steps={chosen.microbatches})"
    )
    if facts.shard == 1 and any(mode.runs_again for mode in facts.modes):
        yield "accelerate recomputes blocks only with FSDP; wrap them with torch.utils.checkpoint"


def transformers_files(facts: ToolFacts, mode: Recompute) -> ToolFiles:
    """Return the arguments of DistributedConfig and of TrainingArguments."""
    chosen, halves = facts.arrangement, half_flags(facts.arrangement.precision)
    degrees: ToolSettings = {
        "tp_size": chosen.tensor,
        "fsdp_size": facts.shard,
        "dp_replicate_size": facts.replicas,
        "fsdp_mixed_precision": facts.shard > 1 and halves["bf16"],
    }
    training: ToolSettings = {
        "per_device_train_batch_size": chosen.microbatch,
        "gradient_accumulation_steps": chosen.microbatches,
        **halves,
        "activation_checkpointing": mode.runs_again,
        "torch_compile": chosen.compile.takes_layers,
    }
    return {"transformers_plan.py": {"DISTRIBUTED": degrees, "TRAINING": training}}


def transformers_notes(facts: ToolFacts) -> Iterator[str]:
    """Yield a note on a setting that needs names of the user's modules."""
    zero = facts.arrangement.zero
    if facts.shard > 1 and zero.keeps_gathered:
        yield (
            "transformers frees gathered parameters after each forward (ZeRO-3), unless fsdp_plan "
            'gives the modules of your model "keep_full_weight" (ZeRO-2)'
        )


def deepspeed_instead(facts: ToolFacts) -> tuple[ToolFacts, tuple[str, ...]]:
    """Return the nearest facts that DeepSpeed can express, and notes that tell the changes.

    DeepSpeed's pipelines have ZeRO-1 at most, and its ZeRO shards over all data ranks.
    """
    chosen, notes = facts.arrangement, []
    if chosen.pipeline > 1 and facts.shard > 1 and chosen.zero > _ONCE_A_STEP:
        chosen = replace(chosen, zero=_ONCE_A_STEP)
        known = price(facts, pipeline=chosen.pipeline, zero=chosen.zero)
        notes.append(f"DeepSpeed's pipelines have ZeRO-1 at most; the nearest is ZeRO-1{known}")
    if 1 < facts.shard < chosen.data:
        shards, chosen = facts.shard, replace(chosen, shard=chosen.data)
        known = price(facts, data=chosen.data, shard=chosen.data, zero=chosen.zero)
        notes.append(
            f"the plan divides by {shards} of {chosen.data} data ranks, DeepSpeed by all: less "
            f"memory, longer messages{known}"
        )
    return replace(facts, arrangement=chosen), tuple(notes)


def deepspeed_files(facts: ToolFacts, mode: Recompute) -> ToolFiles:
    """Return DeepSpeed's configuration file."""
    chosen = facts.arrangement
    is_half = chosen.compression is Compression.HALF
    batch: ToolSettings = {
        "train_batch_size": chosen.microbatch * chosen.microbatches * chosen.data,
        "train_micro_batch_size_per_gpu": chosen.microbatch,
        "gradient_accumulation_steps": chosen.microbatches,
        "gradient_clipping": CLIP_NORM,
        "communication_data_type": (chosen.precision if is_half else Precision.FP32).value,
    }
    stage = chosen.zero.value if facts.shard > 1 else 0
    halves = half_flags(chosen.precision).items()
    pipeline: ToolSettings = {
        "stages": chosen.pipeline,
        "partition": _partition(facts),
        "activation_checkpoint_interval": int(mode.runs_again),  # blocks recomputed at once
    }
    sections: dict[str, ToolSettings] = {
        "": batch,
        **{name: {"enabled": True} for name, is_on in halves if is_on},
        "zero_optimization": {"stage": stage, "overlap_comm": chosen.data > 1},
        "tensor_parallel": {"autotp_size": chosen.tensor} if _splits_itself(chosen) else {},
        "pipeline": pipeline if chosen.pipeline > 1 else {},
    }
    return {"deepspeed.json": {name: own for name, own in sections.items() if own}}


def _splits_itself(chosen: Arrangement) -> bool:
    """Whether DeepSpeed splits tensors itself; in a pipeline, the user's layers have to."""
    return chosen.tensor > 1 and chosen.pipeline == 1


def _partition(facts: ToolFacts) -> str:
    return f"type:{facts.block_class}" if facts.block_class else "uniform"


def deepspeed_notes(facts: ToolFacts) -> Iterator[str]:
    """Yield notes on what DeepSpeed takes from Python code, and on what it cannot express."""
    chosen = facts.arrangement
    if chosen.pipeline > 1:
        yield from _deepspeed_pipeline_notes(facts)
    elif any(mode.runs_again for mode in facts.modes):
        yield (
            "DeepSpeed recomputes where the model says so: gradient_checkpointing_enable() of "
            "transformers' models, or deepspeed.checkpointing.checkpoint"
        )
    if _splits_itself(chosen):
        yield "DeepSpeed keeps the embedding whole, and the head unless vocab_parallel_lm_head"
    if chosen.tensor > 1 and facts.splits_sequence:
        yield "the plan splits activations between blocks along seq; DeepSpeed does not"
    if chosen.compile.takes_layers:
        yield "DeepSpeed compiles after its initialization: engine.compile()"
    if chosen.precision.products:
        products = chosen.precision.products
        yield f'{chosen.precision} is told in Python: set_float32_matmul_precision("{products}")'


def _deepspeed_pipeline_notes(facts: ToolFacts) -> Iterator[str]:
    chosen = facts.arrangement
    words = f'num_stages={chosen.pipeline}, partition_method="{_partition(facts)}"'
    yield f"DeepSpeed takes the pipeline in Python: PipelineModule(layers, {words})"
    sizes = [len(stage.blocks) for stage in facts.stages]
    if chosen.stages_per_rank > 1 or len(set(sizes)) > 1:
        yield (
            f"the plan's stages have {', '.join(map(str, sizes))} blocks; DeepSpeed divides blocks "
            f"evenly into {chosen.pipeline} stages"
        )
    if chosen.tensor > 1:
        yield (
            "DeepSpeed splits no tensors inside pipelines: give PipelineModule layers that do, and "
            f"topology=PipeModelDataParallelTopology({chosen.pipeline}, {chosen.tensor}, "
            f"{chosen.data})"
        )
