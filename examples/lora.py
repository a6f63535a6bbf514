"""Trains low-rank adapters (LoRA) beside the frozen weights of a language model.

autopar plan examples/lora.py --arg base=BASE --arg data=answers.jsonl --gpus 8 -o tuned
torchrun --nproc-per-node 8 tuned/train.py --steps 1000 --export tuned/adapters/

The export has the adapters alone: PeftModel.from_pretrained(base_model, "tuned/adapters").
"""

from fine_tune import build_dataset, example_batch
from fine_tune import build_model as build_base
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import AdamW, Optimizer

__all__ = ["build_dataset", "build_model", "build_optimizer", "example_batch"]


def build_model(base: str, targets: str = "all-linear", rank: int = 16) -> nn.Module:
    """Return a model with adapters beside `targets`, by default all linear layers but the head."""
    adapters = LoraConfig(
        task_type="CAUSAL_LM", target_modules=targets, r=rank, lora_alpha=2 * rank
    )
    model: nn.Module = get_peft_model(build_base(base), adapters)
    return model.train()


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a larger rate than fine-tuning needs: adapters begin at zero."""
    return AdamW(params, lr=2e-4, weight_decay=0.0)
