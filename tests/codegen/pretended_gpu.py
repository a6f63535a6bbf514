"""Dry-runs ranks of scripts on a device that is not there: `python -m … SCRIPT RANK/WORLD …`.

Tensors say that they lie on it and hold no values. As on a GPU, an op over tensors there and on the
CPU raises, and so does a message that nccl would refuse, which a dry run on the CPU would not show.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.codegen.proof.dryrun import watching
from autopar.codegen.proof.dryrun.watching import DryRunRecording, report_of
from autopar.codegen.proof.pretended_device import NAME, MadeOnDevice, pretend
from autopar.runtime import pipeline  # noqa: F401  loaded once for all processes
from autopar.runtime.optimizer import building
from autopar.runtime.ranks import mesh
from autopar.runtime.tensor.shards import made_like
from tests.strict.refusals import refuse


class _Refusing(DryRunRecording):  # type: ignore[no-untyped-call]
    """Refuses messages that nccl refuses."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor):
                    refuse(func.name(), one, NAME)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _made_like(tensor: Any, original: Any) -> Any:
    """Return what `made_like` does; the tensor goes on saying where it lies itself."""
    own = tensor.fake_device
    made = made_like(tensor, original)
    made.fake_device = own
    return made


def main(jobs: Sequence[str]) -> None:
    """Print a report for each script and rank, each from a process that has met no other."""
    vars(watching)["DryRunRecording"] = _Refusing
    vars(building)["made_like"] = _made_like
    pretend()
    for path, rank in zip(jobs[::2], jobs[1::2], strict=True):
        running = get_context("fork").Process(target=_dry_run, args=(path, rank))
        running.start()
        running.join()
        if running.exitcode:
            sys.exit(f"rank {rank} of {path} failed")


def _dry_run(path: str, rank: str) -> None:
    os.environ[mesh.DRY_RUN] = rank
    with MadeOnDevice():
        print(report_of(Path(path)).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
