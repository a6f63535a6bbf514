"""Turns the facts of a plan into settings of accelerate and transformers, without pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from autopar.codegen.launch.tool_facts import (
    BlockStage,
    SettingValue,
    ToolFacts,
    ToolSection,
    price,
)
from autopar.planner.costs.prediction import Arrangement, Compile, Recompute, Zero
from autopar.planner.errors import InputError
from autopar.planner.plan.telling.words import degrees_words, sharding_words

_GATHERED, _GATHERED_EACH_PASS = Zero(2), Zero(3)


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


def accelerate_sections(facts: ToolFacts, mode: Recompute) -> Mapping[str, Sequence[ToolSection]]:
    """Return a configuration file of accelerate."""
    chosen = facts.arrangement
    if chosen.tensor > 1 and facts.shard == 1:
        raise InputError(
            "accelerate launch refuses tensor ranks without data ranks that share parameters",
            fix="--for transformers has them, or plan again with --pin zero=3",
        )
    is_sharded = facts.shard > 1
    top: dict[str, SettingValue] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU",
        "mixed_precision": _mixed(chosen),
        "num_machines": facts.nodes,
        "num_processes": chosen.ranks,
    }
    wrapping = {"fsdp_transformer_layer_cls_to_wrap": facts.block_class}
    fsdp: dict[str, SettingValue] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": chosen.zero.divides_parameters,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if facts.block_class else "NO_WRAP",
        **(wrapping if facts.block_class else {}),
        "fsdp_activation_checkpointing": mode.runs_again,
    }
    degrees: dict[str, SettingValue] = {
        "parallelism_config_dp_replicate_size": facts.replicas,
        "parallelism_config_dp_shard_size": facts.shard,
        "parallelism_config_tp_size": chosen.tensor,
    }
    parts = (
        ToolSection(name="fsdp_config", settings=fsdp),
        ToolSection(name="parallelism_config", settings=degrees),
    )
    sections = (ToolSection(name="", settings=top), *(parts if is_sharded else ()))
    return {"accelerate.yaml": sections}


def _mixed(chosen: Arrangement) -> str:
    return chosen.precision.value if chosen.precision.value in ("bf16", "fp16") else "no"


def accelerate_notes(facts: ToolFacts) -> Iterator[str]:
    """Yield notes on what accelerate takes from the user's Python code, not from its file."""
    chosen = facts.arrangement
    yield (
        f"accelerate takes the batch in Python: DataLoader(batch_size={chosen.microbatch}), "
        f"Accelerator(gradient_accumulation_steps={chosen.microbatches})"
    )
    if facts.shard == 1 and any(mode.runs_again for mode in facts.modes):
        yield "accelerate recomputes blocks only with FSDP; wrap them with torch.utils.checkpoint"


def transformers_sections(facts: ToolFacts, mode: Recompute) -> Mapping[str, Sequence[ToolSection]]:
    """Return the arguments of DistributedConfig and of TrainingArguments."""
    chosen = facts.arrangement
    degrees: dict[str, SettingValue] = {
        "tp_size": chosen.tensor,
        "fsdp_size": facts.shard,
        "dp_replicate_size": facts.replicas,
        "fsdp_mixed_precision": facts.shard > 1 and _mixed(chosen) == "bf16",
    }
    training: dict[str, SettingValue] = {
        "per_device_train_batch_size": chosen.microbatch,
        "gradient_accumulation_steps": chosen.microbatches,
        "bf16": _mixed(chosen) == "bf16",
        "fp16": _mixed(chosen) == "fp16",
        "activation_checkpointing": mode.runs_again,
        "torch_compile": chosen.compile is not Compile.NONE,
    }
    sections = (
        ToolSection(name="DISTRIBUTED", settings=degrees),
        ToolSection(name="TRAINING", settings=training),
    )
    return {"transformers_plan.py": sections}


def transformers_notes(facts: ToolFacts) -> Iterator[str]:
    """Yield a note on a setting that needs names of the user's modules."""
    zero = facts.arrangement.zero
    if facts.shard > 1 and zero.keeps_gathered:
        yield (
            "transformers frees gathered parameters after each forward (ZeRO-3), unless fsdp_plan "
            'gives the modules of your model "keep_full_weight" (ZeRO-2)'
        )
