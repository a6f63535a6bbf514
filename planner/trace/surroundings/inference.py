"""Has `torch.inference_mode` leave the mark in a trace that `torch.no_grad` leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Have regions of inference be ones without gradients: the exporter does not tell the former.

    The class itself is changed: a decorator was made with it long before.
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.set_grad_enabled(
            torch.is_grad_enabled() and not self.mode
        )
        self._inference_mode_context.__enter__()

    with patch.object(torch.inference_mode, "__enter__", enter):
        yield
