"""Has the exporter tell the lines of plain functions, the loss's too: it keeps forwards alone."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.fx.proxy import TracerBase


@contextmanager
def every_frame_told() -> Iterator[None]:
    """Keep of the stack of each op all that is called in the first forward."""
    plain = TracerBase._filter_traceback_frames

    def whole(self: TracerBase, stack: traceback.StackSummary) -> traceback.StackSummary:
        self._record_forward_stack_traces_only = False
        return plain(self, stack)

    with patch.object(TracerBase, "_filter_traceback_frames", whole):
        yield
