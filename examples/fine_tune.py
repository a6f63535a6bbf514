"""Fine-tunes all weights of a causal language model on answers to prompts.

autopar plan examples/fine_tune.py --arg base=BASE --arg data=answers.jsonl --gpus 8 -o tuned
torchrun --nproc-per-node 8 tuned/train.py --steps 1000 --export tuned/model/
"""

import torch
from text_data import Answers, random_tokens
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM


def build_model(base: str) -> nn.Module:
    """Return a model from a folder or from the hub."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, use_cache=False
    )
    return model.train()


def example_batch(batch_size: int, base: str, length: int = 512) -> dict[str, Tensor]:
    """Return random tokens; the model itself shifts the labels by one."""
    ids = random_tokens(base, batch_size, length)
    return {"input_ids": ids, "labels": ids}


def build_dataset(base: str, data: str, length: int = 512) -> Dataset[dict[str, Tensor]]:
    """Return the prompts and answers in a file of JSON lines."""
    return Answers(data, base, length, ("answer",))


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a small rate, so that the model keeps what it knows."""
    return AdamW(params, lr=1e-5, weight_decay=0.0)
