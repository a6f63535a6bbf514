"""What holds for every model file: the contract, the meta device, float64, and learning."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.cells import cells
from tests.models_zoo.model_files import MODEL_FILES, WithLoss, call, in_double, load, tiny

ALL_SIZES = [(name, size) for name in MODEL_FILES for size in load(name).SIZES]

# Steps of AdamW on batches of 16, their rate, and the fraction of the first loss to fall below. The
# languages begin near ln(vocabulary) = 5.5; knowing only how often each word occurs gives 4.2.
LEARNS = {
    "gpt2": (60, 3e-3, 0.5),
    "llama": (60, 3e-3, 0.5),
    "bert": (120, 3e-3, 0.5),
    "t5": (80, 1e-2, 0.5),
    "vit": (40, 1e-3, 0.25),
    "resnet": (40, 3e-3, 0.25),
    "mnist": (40, 1e-3, 0.25),
    "intent": (100, 2e-2, 0.25),
    "dlrm": (150, 1e-2, 0.75),  # clicks are random to a part
    "transformer_lm": (60, 3e-3, 0.5),
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny tensors are slower on many threads, and sums come out the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "size"), ALL_SIZES)
def test_model_and_batch_build_on_the_meta_device(name: str, size: str) -> None:
    file = load(name)
    with torch.device("meta"):
        model = file.build_model(size=size)
        batch = call(file.example_batch, 3, size=size)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(tensor.is_meta and len(tensor) == 3 for tensor in batch.values())


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_model_from_the_meta_device_computes_the_same_once_its_weights_are_loaded(
    name: str,
) -> None:
    built = tiny(name).eval()
    with torch.device("meta"):
        empty = WithLoss(name, load(name).build_model()).eval()
    empty.to_empty(device="cpu").load_state_dict(built.state_dict())
    batch = load(name).example_batch(2)
    assert torch.equal(empty(batch), built(batch))


@pytest.mark.parametrize(("name", "size"), ALL_SIZES)
def test_rows_of_the_data_set_look_like_rows_of_the_example_batch(name: str, size: str) -> None:
    file = load(name)
    rows = call(file.build_dataset, size=size, items=4)
    batch = call(file.example_batch, 2, size=size)
    shapes = {key: (tensor.shape[1:], tensor.dtype) for key, tensor in batch.items()}
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in rows[0].items()} == shapes


@pytest.mark.parametrize("name", MODEL_FILES)
def test_the_generated_data_set_is_the_same_every_time(name: str) -> None:
    first, second = (load(name).build_dataset(items=8) for _ in range(2))
    assert len(first) == 8
    for one, other in zip(list(first), list(second), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", MODEL_FILES)
def test_in_float64_the_loss_and_every_gradient_are_finite(name: str) -> None:
    model = tiny(name).double()
    loss = model(in_double(load(name).example_batch(4)))
    loss.backward()
    assert loss.dtype == torch.float64
    assert loss.ndim == 0
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.dtype == torch.float64, path
        assert parameter.grad.isfinite().all(), path


@pytest.mark.parametrize("name", cells(MODEL_FILES, ("gpt2", "resnet")))
def test_a_tiny_model_learns_the_generated_data(name: str) -> None:
    steps, rate, fraction = LEARNS[name]
    model = tiny(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    rows = DataLoader(load(name).build_dataset(), batch_size=16, shuffle=True)
    losses = []
    for batch in itertools.islice(itertools.cycle(rows), steps):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < fraction * losses[0]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_optimizer_and_scheduler_of_the_file_train_its_model(name: str) -> None:
    file, model = load(name), tiny(name)
    optimizer = file.build_optimizer(model.parameters())
    scheduler = file.build_scheduler(optimizer)
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert held == len(list(model.parameters()))
    batch = file.example_batch(4)
    before = model(batch).item()
    for _ in range(10):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        scheduler.step()
    assert model(batch).item() < before


def test_a_schedule_without_warm_up_begins_at_the_full_rate() -> None:
    optimizer = load("gpt2").build_optimizer(tiny("gpt2").parameters(), learning_rate=0.5)
    load("gpt2").build_scheduler(optimizer, warmup=0)
    assert optimizer.param_groups[0]["lr"] == 0.5
