"""A cache that a step fills is told from state that a later step reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from tests.planner.trace.model_source import ops_of, traced

MODEL = """
from functools import cached_property, lru_cache

KEPT, LAST = {{}}, []


@lru_cache(maxsize=4)
def table(n):
    return torch.arange(float(n))


@lru_cache
def keyed(x):
    return x * 2


@lru_cache
def drawn():
    return torch.randn(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.found = {{}}

    {more}

    def forward(self, x):
        {line}
        return self.linear(x)


def build_model():
    return Model()
"""


def source(line: str, more: str = "") -> str:
    return MODEL.format(line="\n        ".join(line.split("; ")), more=more)


CACHES = {
    "by size": "x = x * KEPT.setdefault(x.shape[1], torch.arange(4.0)).to(x)",
    "on the module": "self.found['mask'] = torch.ones(4); x = x * self.found['mask'].to(x)",
    "filled once": "KEPT['w'] = KEPT['w'] if 'w' in KEPT else torch.ones(4); x = x + KEPT['w']",
    "a number": "KEPT['n'] = x.shape[1]",
    "by a function": "x = x * self.table(x.shape[1]).to(x)",
    "a property": "x = x * self.scale.to(x)",
    "what nobody reads": "LAST[:] = [x.detach().mean()]",
    "what one step reads of itself": "LAST[:] = [x]; x = LAST.pop() * 2",
    "a table by a cached function": "x = x + table(x.shape[1]).to(x)",
    "what a tensor is the key of": "x = keyed(x)",
    "weights put down for a page": "KEPT['norm'] = self.linear.weight.detach().norm()",
}
MORE = """
    @lru_cache
    def table(self, n):
        return torch.arange(float(n))

    @lru_cache
    def scaled(self):
        return self.linear.weight.mean()

    @cached_property
    def scale(self):
        return torch.linspace(0, 1, 4)
"""


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_no_state(tmp_path: Path, name: str) -> None:
    assert ops_of(traced(tmp_path, source(CACHES[name], MORE)), "linear")


STATE = {
    "the last batch": "x, KEPT['x'] = x + KEPT.get('x', 0), x.detach()",
    "a mean of batches": "self.found['m'] = 0.9 * self.found.get('m', 0) + x.detach().mean()",
    "a view of the last batch": "x, KEPT['x'] = x + KEPT.get('x', x).T.mean(), x.detach()",
    "a weight as it was": "x = x + KEPT.setdefault('w', self.linear.weight.detach().mean())",
    "numbers drawn once": "x = x + KEPT.setdefault('z', torch.randn(4)).to(x)",
    "a cached function of a weight": "x = x * self.scaled().detach()",
    "a cached draw": "x = x + drawn().to(x)",
    "whether it is the first": "x = x * (2 if LAST else 1); LAST.append(x.detach())",
}


@pytest.mark.parametrize("name", STATE)
def test_what_a_forward_leaves_for_the_next_step_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"changes what the next one computes|one value") as told:
        traced(tmp_path, source(STATE[name], MORE))
    assert "register_buffer" in told.value.fix
