"""Pipelines run on torch's own stages, of the versions whose stages can do what they need."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.pipeline.torch_stage import refuse_earlier_torch
from autopar.runtime.ranks.leaving import MISMATCH


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1", "2.12.1+cu130"])
def test_an_earlier_torch_is_refused_with_what_to_do(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(SystemExit, match=f"^{MISMATCH}$"):
        refuse_earlier_torch()
    told = capsys.readouterr().err
    assert version in told
    assert "torch>=2.13" in told
    assert "--max-pp 1" in told


@pytest.mark.parametrize("version", [torch.__version__, "2.13.0", "2.15.0+cu132", "3.0.0"])
def test_a_later_torch_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    refuse_earlier_torch()
