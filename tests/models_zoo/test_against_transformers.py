"""With the same weights, our models compute what those of `transformers` compute, in float64."""

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from tests.models_zoo.model_files import load

transformers = pytest.importorskip("transformers")


def copy(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Copy weights into parameters that stand in the same order."""
    with torch.no_grad():
        for parameter, weight in zip(ours, theirs, strict=True):
            parameter.copy_(weight)


def drawn_anew(model: nn.Module) -> nn.Module:
    """Draw every weight, so that none is a one or a zero that could hide a mistake."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.double().eval()


def same(ours: Tensor, theirs: Tensor) -> None:
    # Their RMSNorm and rotary table are float32 whatever the model is.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.fixture
def words() -> Tensor:
    return torch.randint(200, (2, 40), generator=torch.Generator().manual_seed(0))


def test_gpt2_equals_theirs(words: Tensor) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=64, vocab_size=256)
    theirs = drawn_anew(transformers.GPT2LMHeadModel(config))
    ours = load("gpt2").build_model().double().eval()
    # Their Conv1D is a linear layer whose matrix lies on its side.
    turned = {name for name, module in theirs.named_modules() if "Conv1D" in repr(type(module))}
    copy(
        ours.parameters(),
        (
            weight.T if name.removesuffix(".weight") in turned else weight
            for name, weight in theirs.named_parameters()
        ),
    )
    same(ours(words), theirs(words).logits)


def test_llama_equals_theirs(words: Tensor) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        intermediate_size=192,
        vocab_size=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    theirs = drawn_anew(transformers.LlamaForCausalLM(config))
    ours = load("llama").build_model().double().eval()
    weights = theirs.named_parameters()
    ours.load_state_dict({name.removeprefix("model."): weight for name, weight in weights})
    same(ours.logits(words), theirs(words).logits)


def test_bert_equals_theirs(words: Tensor) -> None:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_size=64,
        intermediate_size=256,
        max_position_embeddings=64,
        vocab_size=260,
    )
    theirs = drawn_anew(transformers.BertForMaskedLM(config))
    ours = load("bert").build_model().double().eval()
    weights = dict(theirs.named_parameters())
    ours_first = weights.pop(
        "cls.predictions.bias"
    )  # it hangs on our root, which PyTorch lists first
    copy(ours.parameters(), [ours_first, *weights.values()])
    seen = torch.ones_like(words)
    seen[1, 30:] = 0
    kind = (torch.arange(40) > 15).long().expand(2, -1)
    outputs = theirs(words, attention_mask=seen, token_type_ids=kind).logits
    same(ours.logits(words, seen, kind), outputs)


def test_t5_equals_theirs(words: Tensor) -> None:
    config = transformers.T5Config(
        num_layers=2,
        num_heads=4,
        d_kv=16,
        d_model=64,
        d_ff=128,
        vocab_size=360,
        decoder_start_token_id=0,
    )
    theirs = drawn_anew(transformers.T5ForConditionalGeneration(config))
    ours = load("t5").build_model().double().eval()
    copy(ours.parameters(), theirs.parameters())
    labels = words.repeat(1, 3)
    words = words.repeat(1, 4)  # so that distances beyond the last bucket occur
    same(ours.logits(words, labels), theirs(words, labels=labels).logits)
    same(ours(words, labels), theirs(words, labels=labels).loss)


def test_vit_equals_theirs() -> None:
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_size=64,
        intermediate_size=256,
        image_size=32,
        patch_size=8,
        layer_norm_eps=1e-6,
        num_labels=10,
    )
    theirs = drawn_anew(transformers.ViTForImageClassification(config))
    ours = load("vit").build_model().double().eval()
    weights = dict(theirs.named_parameters())
    for layer, kind in itertools.product(range(2), ("weight", "bias")):
        block = f"vit.layers.{layer}"
        three: list[Tensor] = [weights.pop(f"{block}.attention.{x}_proj.{kind}") for x in "qkv"]
        copy([ours.get_parameter(f"layers.{layer}.attention.qkv.{kind}")], [torch.cat(three)])
        # The first norm stands before attention in our list, and after it in theirs.
        norm = weights.pop(f"{block}.layernorm_before.{kind}")
        copy([ours.get_parameter(f"layers.{layer}.norm_1.{kind}")], [norm])
    rest = [p for name, p in ours.named_parameters() if "qkv" not in name and "norm_1" not in name]
    copy(rest, weights.values())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    same(ours(images), theirs(images).logits)
