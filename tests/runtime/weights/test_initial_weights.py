"""Initial weights that are replayed: as the user's own, and the same under every split."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from autopar.runtime.model.parts import shard_parameters
from autopar.runtime.ranks.mesh import Axis, start
from autopar.runtime.tensor.shards import Split, chunks_by_name, local_part
from autopar.runtime.weights.initial_weights import build, record
from autopar.runtime.weights.loading import load_safetensors
from autopar.runtime.weights.plain_model import plain_model
from tests.models_zoo.model_files import load
from tests.runtime.processes import run_on_ranks

CPU = torch.device("cpu")
ALONE = Axis(0, 1, None)
ZOO = ("gpt2", "llama", "bert", "t5", "vit", "resnet", "mnist", "intent", "transformer_lm")
SMALL = {"num_hidden_layers": 2, "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4}


def _hugging_face(name: str) -> Callable[[], nn.Module]:
    import transformers as hf

    ids = {"bos_token_id": 0, "eos_token_id": 1}
    wide = {**SMALL, "intermediate_size": 128}
    configs: dict[str, tuple[Any, Any]] = {
        "GPT2": (hf.GPT2LMHeadModel, hf.GPT2Config(**SMALL, **ids)),
        "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**wide, **ids)),
        "Bert": (hf.BertForMaskedLM, hf.BertConfig(**wide)),
        "T5": (
            hf.T5ForConditionalGeneration,
            hf.T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
        ),
        "Swin": (  # reads its drop rates with .item() while it is built
            hf.SwinForImageClassification,
            hf.SwinConfig(embed_dim=32, depths=[2, 2], num_heads=[2, 4]),
        ),
    }
    model, config = configs[name]
    return partial(model, config)


def _factory(name: str) -> Callable[[], nn.Module]:
    factory: Callable[[], nn.Module] = (
        load(name).build_model if name in ZOO else _hugging_face(name)
    )
    return factory


def _assert_drawn_alike(name: str, real: Tensor, replayed: Tensor) -> None:
    assert (real.shape, real.dtype, replayed.device) == (replayed.shape, replayed.dtype, CPU), name
    if real.numel() == 1 or real.std() == 0:
        assert torch.equal(real, replayed), name
        return
    noise = 6 / math.sqrt(real.numel())  # six standard errors and more of either estimate
    assert abs(replayed.std() / real.std() - 1) < noise, name
    assert abs(replayed.mean() - real.mean()) < 2 * noise * real.std(), name
    assert not torch.equal(real, replayed), name


def _pairs(real: nn.Module, replayed: nn.Module) -> Iterator[Any]:
    yield from zip(real.named_buffers(), replayed.named_buffers(), strict=True)


def _aliases(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


@pytest.mark.filterwarnings("error:the model is built in full")
@pytest.mark.parametrize("name", [*ZOO, "GPT2", "Llama", "Bert", "T5", "Swin"])
def test_replayed_weights_are_drawn_as_the_user_draws_them(name: str) -> None:
    factory = _factory(name)
    torch.manual_seed(0)
    real, replayed = factory(), build(factory, seed=1)
    for (key, a), (_, b) in zip(real.named_parameters(), replayed.named_parameters(), strict=True):
        _assert_drawn_alike(key, a.detach(), b.detach())
    for (key, mine), (_, theirs) in _pairs(real, replayed):
        assert torch.equal(mine, theirs), key
    assert _aliases(real) == _aliases(replayed)
    assert real.state_dict().keys() == replayed.state_dict().keys()


@pytest.mark.parametrize("name", ["gpt2", "llama", "GPT2"])
def test_every_split_is_cut_from_the_same_weights(name: str) -> None:
    factory = _factory(name)
    whole = dict(build(factory, seed=3).named_parameters(remove_duplicate=False))
    splits = {
        key: Split(0, ((tensor.shape[0], 1),)) for key, tensor in whole.items() if tensor.ndim == 2
    }
    for axis in (Axis(0, 3, None), Axis(2, 3, None)):
        model, recipe = record(factory, seed=3, dtype=torch.float64)
        recipe.materialise(model, splits, axis, CPU)
        for key, parameter in model.named_parameters(remove_duplicate=False):
            expected = local_part(whole[key], splits[key], axis) if key in splits else whole[key]
            assert torch.equal(parameter, expected.double()), key
            assert chunks_by_name(model)[key].local_shape == parameter.shape


def test_another_seed_gives_other_weights() -> None:
    factory = partial(nn.Linear, 4, 4)
    assert torch.equal(build(factory, seed=1).weight, build(factory, seed=1).weight)  # type: ignore[arg-type]
    assert not torch.equal(build(factory, seed=1).weight, build(factory, seed=2).weight)  # type: ignore[arg-type]


class _Foreign(nn.Linear):
    """Draws from other generators than torch's."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("drawn", torch.tensor([random.random(), float(np.random.rand())]))


def test_numbers_drawn_in_python_are_the_same_in_every_process_and_leave_no_trace() -> None:
    random.seed(1)
    np.random.seed(1)
    first = build(_Foreign, seed=5).get_buffer("drawn")
    follows = (random.random(), np.random.rand())
    random.seed(2)
    np.random.seed(2)
    assert torch.equal(build(_Foreign, seed=5).get_buffer("drawn"), first)
    random.seed(1)
    np.random.seed(1)
    assert (random.random(), np.random.rand()) == follows


def test_recording_leaves_the_generator_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    build(_factory("mnist"), seed=0)
    assert torch.equal(torch.rand(2), expected)


class _Unrecordable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight.untyped_storage().resize_(64)  # no op, but the memory itself


def test_a_constructor_that_cannot_be_recorded_is_run_in_full() -> None:
    with pytest.warns(UserWarning, match="built in full"):
        model, recipe = record(_Unrecordable, seed=4)
    assert all(parameter.is_meta for parameter in model.parameters())
    recipe.materialise(model, {"weight": Split(0, ((3, 1),))}, Axis(1, 3, None), CPU)
    expected = plain_model(_Unrecordable, seed=4).get_parameter("weight")
    assert torch.equal(model.get_parameter("weight"), expected[1:2])


class _GoesOn(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.is_noted = True
        try:
            self.weight.untyped_storage().resize_(64)
        except Exception:  # as libraries catch what they can do without
            self.is_noted = False


def test_a_constructor_that_goes_on_where_it_cannot_be_recorded_is_run_in_full() -> None:
    with pytest.warns(UserWarning, match="built in full"):
        model, _ = record(_GoesOn, seed=4)
    assert model.is_noted


class _Places(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("places", torch.arange(3).nonzero())


@pytest.mark.filterwarnings("error:the model is built in full")
def test_what_torch_computes_without_knowing_its_shape_before_is_recorded() -> None:
    model = build(lambda: parametrizations.orthogonal(_Places(6, 4)), seed=0)
    assert model.get_buffer("places").tolist() == [[1], [2]]
    with torch.no_grad():
        weight = torch.as_tensor(model.weight)
    torch.testing.assert_close(weight @ weight.T, torch.eye(4))
    assert not torch.equal(weight, torch.eye(4, 6))


def test_a_constructor_that_fails_tells_its_own_error() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such size")

    with pytest.raises(ValueError, match="no such size"):
        record(broken, seed=0)


class _Counted(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device == CPU:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def test_no_tensor_larger_than_one_parameter_is_made() -> None:
    factory = partial(load("gpt2").build_model, layers=2, vocab_size=1000)
    with _Counted() as recording:
        model, recipe = record(factory, seed=0)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert recording.largest < largest / 50
    splits = {name: Split(0, ((p.shape[0], 1),)) for name, p in model.named_parameters()}
    with _Counted() as made:
        recipe.materialise(model, splits, Axis(0, 4, None), CPU)
    assert made.largest == largest
    kept = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert kept == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_dry_run_makes_shapes_only() -> None:
    model, recipe = record(_factory("gpt2"), seed=0)
    name = next(n for n, p in model.named_parameters() if p.ndim == 2)
    size = model.get_parameter(name).shape[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        splits = {name: Split(0, ((size, 1),))}
        recipe.materialise(model, splits, Axis(0, 2, None), CPU)
        assert all(parameter.device == CPU for parameter in model.parameters())
    assert model.get_parameter(name).shape[0] == size // 2
    assert fake is not None


def _materialise_fully_sharded(folder: Path | None) -> None:
    mesh = start(pipeline=1, data=2, tensor=2)
    factory = load("gpt2").build_model
    expected = build(factory, seed=3)
    model, recipe = record(factory, seed=3)
    splits = {n: Split(0, ((p.shape[0], 1),)) for n, p in model.named_parameters() if p.ndim == 2}
    shard_parameters(model, splits, mesh.tensor)
    fully_shard(model, mesh=mesh.device_mesh["shard"])
    if folder is not None:
        load_safetensors(model, folder, splits, mesh.tensor, device=CPU)
    recipe.materialise(model, splits, mesh.tensor, CPU)
    whole = dict(expected.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        mine = whole[name].detach()
        if name in splits or mine.ndim == 2:
            mine = local_part(mine, Split(0, ((mine.shape[0], 1),)), mesh.tensor)
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), mine), name
    assert _aliases(model) == _aliases(expected)
    _run_one_step(model)


def _run_one_step(model: nn.Module) -> None:
    """Let fully_shard gather and shard the new parameters once."""
    before = [parameter.detach().to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    model.unshard()  # type: ignore[operator]
    model.reshard()  # type: ignore[operator]
    after = [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_model_that_was_fully_sharded_on_meta_gets_its_rows() -> None:
    run_on_ranks(_materialise_fully_sharded, 4, None)


def test_files_fill_a_model_that_was_fully_sharded_on_meta(tmp_path: Path) -> None:
    weights = dict(build(load("gpt2").build_model, seed=3).named_parameters())
    save_file(
        {name: p.detach().contiguous() for name, p in weights.items()}, tmp_path / "m.safetensors"
    )
    run_on_ranks(_materialise_fully_sharded, 4, tmp_path)


def test_a_renamed_parameter_is_refused() -> None:
    model, recipe = record(partial(nn.Linear, 2, 2), seed=0)
    with pytest.raises(KeyError, match=r"no 0\.weight"):
        recipe.materialise(nn.Sequential(model), {}, ALONE, CPU)
