"""Scripts of models that begin from a folder train as plain PyTorch does from the same folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn

from autopar.codegen.emit import write_script
from autopar.planner.costs.prediction import Zero
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.trace import trace
from autopar.runtime.ranks.randomness import mixed_seed
from tests.cells import cells
from tests.codegen.plans import plan_for
from tests.codegen.printed import printed_by
from tests.runtime.processes import run_on_ranks

STEPS = 4
ROWS = 8  # of a global batch, as plan_for has it
IMPORTS = {"whole": "", "LoRA": "from peft import LoraConfig, get_peft_model"}
BUILT = {
    "whole": "return base.train()",
    "LoRA": """torch.manual_seed(5)
    adapted = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return get_peft_model(base, adapted).train()""",
}
FILE = """
import torch
{imports}
from torch.optim import SGD
from transformers import AutoModelForCausalLM

FOLDER = {folder!r}


def build_model():
    base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    {built}


def example_batch(batch_size):
    ids = torch.randint(0, 64, (batch_size, 12), generator=torch.Generator().manual_seed(1))
    return {{"input_ids": ids, "labels": ids.clone()}}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, row):
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(row))
        return {{"input_ids": ids, "labels": ids.clone()}}


def build_dataset():
    return Rows()


def build_optimizer(params):
    return SGD(params, lr=0.5)
"""
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@cache
def _base() -> Path:
    import transformers as hf

    folder = Path(mkdtemp(prefix="pretrained-"))
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        dtype="bfloat16",
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(
            folder / "base", max_shard_size="20KB"
        )
    return folder


@cache
def _written(kind: str) -> Path:
    path = _base() / f"{kind}.py"
    path.write_text(
        FILE.format(folder=str(_base() / "base"), imports=IMPORTS[kind], built=BUILT[kind])
    )
    return path


@cache
def _traced(kind: str) -> tuple[ModelFile, Graph]:
    file = load_model_file(str(_written(kind)))
    return file, trace(file)


@cache
def _plain_losses(kind: str) -> tuple[float, ...]:
    """Train by a plain loop on one device, from what the model file builds in plain PyTorch."""
    namespace: dict[str, Any] = {}
    exec(_written(kind).read_text(), namespace)
    model, rows = namespace["build_model"](), namespace["build_dataset"]()
    optimizer = namespace["build_optimizer"]([p for p in model.parameters() if p.requires_grad])
    generator = torch.Generator().manual_seed(mixed_seed(0, 0))
    order = torch.randperm(len(rows), generator=generator).tolist()
    losses = []
    for _ in range(STEPS):
        chosen = [rows[order.pop(0)] for _ in range(ROWS)]
        batch = {key: torch.stack([one[key] for one in chosen]) for key in chosen[0]}
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return tuple(losses)


WAYS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": (1, 2, 1), "zero_levels": (Zero.NONE,)},
    "ZeRO-3": {"degrees": (1, 2, 1), "zero_levels": (Zero.PARAMETERS,)},
    "tp": {"degrees": (1, 1, 2), "split": ("ffn",)},
    "pp": {"degrees": (2, 1, 1)},
}


CELLS = [(kind, way) for kind in BUILT for way in WAYS]
# tests/field/test_pretrained_families.py has tensor ranks and ZeRO-3, tests/examples/ LoRA.
STAND: tuple[tuple[str, str], ...] = ()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), cells(CELLS, STAND))
def test_a_model_from_a_folder_trains_as_in_plain_pytorch(
    kind: str, way: str, tmp_path: Path
) -> None:
    if kind == "LoRA":
        pytest.importorskip("peft")
    file, graph = _traced(kind)
    script = write_script(plan_for(file, graph, (), **WAYS[way]), tmp_path)
    (losses, *_) = run_on_ranks(printed_by, 2, str(script), STEPS, timeout_seconds=120)
    assert losses == pytest.approx(_plain_losses(kind), abs=1e-5, rel=0.0)
