"""A loss in chunks is the loss and has the gradients of plain PyTorch, without whole logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.tensor.chunked_logits import ChunkedLogits, chunk_logits

ROWS, POSITIONS, WIDTH, CLASSES = 3, 13, 16, 37
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """An embedding and a head, which may share their weights."""

    def __init__(self, *, bias: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        logits: Tensor = self.head(torch.tanh(self.embedding(ids)))
        return logits


def trained(
    loss_of: Loss, *, chunks: int, bias: bool = False, tied: bool = False, backward: bool = True
) -> list[Tensor]:
    """Return the loss and all gradients; 0 chunks are plain PyTorch."""
    torch.manual_seed(0)
    model = Model(bias=bias, tied=tied).double()
    ids = torch.randint(CLASSES, (ROWS, POSITIONS))
    labels = ids.clone()
    labels[0, 3], labels[2] = -100, -100
    if chunks:
        chunk_logits(model.head, chunks)
    loss = loss_of(model(ids), labels)
    if backward:
        (3.7 * loss).backward()  # type: ignore[no-untyped-call]
    gradients = (one.grad for one in model.parameters())
    return [loss.detach(), *(one for one in gradients if one is not None)]


def flat(logits: Tensor, labels: Tensor, **given: Any) -> Tensor:
    """Return the loss as nanoGPT has it."""
    return cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), **given)


def shifted_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss as Hugging Face's causal models have it: wide logits, shifted labels."""
    labels = pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    rows = logits.to(torch.float64).view(-1, CLASSES)
    return cross_entropy(rows, labels.view(-1), ignore_index=-100, reduction="sum") / 7


def shifted_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss without the last position, as older models have it."""
    return flat(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits between -5 and 5, as Gemma has it."""
    return flat(torch.tanh(logits / 5.0) * 5.0, labels)


def regularised(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that reads the logits twice."""
    return flat(logits, labels) + 0.01 * logits.logsumexp(-1).pow(2).mean()


def of_each(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of losses of their own, which cannot be made in chunks."""
    return flat(logits, labels, reduction="none").mean()


def crossed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits whose classes are not the last dim."""
    return cross_entropy(logits.transpose(1, 2), labels)


def two_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of two losses of the same logits, and leave a third one unused."""
    flat(logits, labels)
    return flat(logits, labels) + 2 * flat(logits, labels.flip(0), reduction="sum")


LOSSES: dict[str, Loss] = {
    "mean": flat,
    "sum": partial(flat, reduction="sum"),
    "smoothing": partial(flat, label_smoothing=0.1),
    "ignored class": partial(flat, ignore_index=3),
    "weights": partial(flat, weight=torch.linspace(0, 2, CLASSES, dtype=torch.float64)),
    "shifted labels": shifted_labels,
    "shifted logits": shifted_logits,
    "capped": capped,
    "regularised": regularised,
    "of each": of_each,
    "crossed": crossed,
    "two": two_losses,
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("model", [{}, {"bias": True}, {"tied": True}], ids=str)
def test_a_loss_in_chunks_and_its_gradients_are_plain_pytorchs(
    kind: str, model: dict[str, bool]
) -> None:
    loss_of = LOSSES[kind]
    if kind == "ignored class":  # -100 is no class any more
        loss_of = partial(_without_ignored, loss_of)
    plain, found = (trained(loss_of, chunks=chunks, **model) for chunks in (0, 4))
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)


OTHER_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "a flat view": lambda logits: logits.float().view(-1),
    "a view of other classes": lambda logits: logits.view(ROWS, -1),
    "transposed matrices": lambda logits: logits.double().mT,
    "data": lambda logits: logits.data,
}


@pytest.mark.parametrize("kind", OTHER_READS)
def test_what_is_not_of_rows_reads_the_logits_as_an_ordinary_tensor(kind: str) -> None:
    head, x = nn.Linear(WIDTH, CLASSES), torch.randn(ROWS, POSITIONS, WIDTH)
    expected = OTHER_READS[kind](head(x))
    chunk_logits(head, 4)
    found = OTHER_READS[kind](head(x))
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected)


def _without_ignored(loss_of: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    return loss_of(logits, labels.clamp(min=0))


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that any op makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not isinstance(made, ChunkedLogits):
            self.size = max(self.size, made.untyped_storage().size() // made.element_size())
        return made


@pytest.mark.parametrize("kind", ["mean", "shifted labels", "shifted logits", "capped"])
def test_logits_never_exist_as_a_whole(kind: str) -> None:
    sizes = {}
    for chunks in (0, 13):
        with Largest() as largest:  # type: ignore[no-untyped-call]
            trained(LOSSES[kind], chunks=chunks)
        sizes[chunks] = largest.size
    assert sizes[0] >= ROWS * (POSITIONS - 1) * CLASSES
    assert sizes[13] == max(WIDTH * CLASSES, ROWS * POSITIONS * WIDTH)  # weight, hidden states


def test_a_loss_without_gradients_computes_none() -> None:
    def evaluated(logits: Tensor, labels: Tensor) -> Tensor:
        return flat(logits, labels)

    with torch.no_grad():
        (plain,), (found,) = (
            trained(evaluated, chunks=chunks, backward=False) for chunks in (0, 5)
        )
    torch.testing.assert_close(found, plain)


def test_a_frozen_head_gets_no_gradient_and_hands_on_its_inputs() -> None:
    gradients = []
    for chunks in (0, 3):
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, CLASSES).double().requires_grad_(False)
        if chunks:
            chunk_logits(head, chunks)
        x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
        cross_entropy(head(x), torch.arange(6)).backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is None
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_hooks_of_the_layer_and_of_its_result_run_as_ever() -> None:
    calls = []
    head = nn.Linear(WIDTH, CLASSES)
    chunk_logits(head, 2)
    head.register_forward_hook(lambda *_: calls.append("forward"))
    logits = head(torch.randn(6, WIDTH))
    logits.register_hook(lambda _: calls.append("backward"))
    cross_entropy(logits, torch.arange(6)).backward()  # type: ignore[no-untyped-call]
    assert calls == ["forward", "backward"]


def test_what_would_be_lost_is_refused() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    chunk_logits(head, 2)
    logits = head(torch.randn(6, WIDTH))
    with pytest.raises(TypeError, match="div_ would write to logits"):
        logits.div_(2)
    loss = cross_entropy(logits, torch.arange(6))
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="only one backward"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_16_bit_losses_are_summed_in_32() -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(WIDTH, CLASSES).bfloat16(), torch.randn(4096, WIDTH).bfloat16()
    target = torch.randint(CLASSES, (4096,))
    expected = cross_entropy(linear(x, head.weight, head.bias).float(), target)
    chunk_logits(head, 8)
    loss = cross_entropy(head(x), target)
    assert loss.dtype is torch.bfloat16
    assert loss.item() == pytest.approx(expected.item(), rel=2**-8)
