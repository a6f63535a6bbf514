"""What a graph does not show is read in the source of a forward."""

from __future__ import annotations

import pytest

from autopar.codegen.forward.reading.forward_source import (
    keeps_state,
    left_on_others,
    own_attributes,
)

BEFORE = """
    def forward(self, x):
        y, state = self.scan(x, self.state)
        self.state = state
        return y
"""
BEHIND = """
    def forward(self, x):
        self.scale = x.mean()
        return x * self.scale
"""
IN_ONE = """
    def forward(self, x):
        self.state = x if self.state is None else x + self.state
        return self.state
"""
ADDED = """
    def forward(self, x):
        self.total += x.mean()
        return x
"""


@pytest.mark.parametrize("source", [BEFORE, IN_ONE, ADDED])
def test_an_attribute_that_is_read_before_it_is_set_is_state(source: str) -> None:
    assert keeps_state(source)


@pytest.mark.parametrize("source", [BEHIND, "", "lambda self, x: (self.layer(x),"])
def test_an_attribute_that_is_set_first_is_none(source: str) -> None:
    assert not keeps_state(source)


CLASS = """
    class Model:
        def __init__(self, config):
            self.child, config.seen, self.child.size = Child(), True, self.first

        def forward(self, x):
            self.width = x.shape[1]
            self.child.rows, x.note = len(x), self.width
            self.reset()
            return self.child(x)

        def reset(self):
            self.child.steps = 0

        def set_input_embeddings(self, value):
            self.child.table = value
"""


def test_what_a_built_class_leaves_on_others_is_told_from_its_own() -> None:
    assert left_on_others([CLASS], set()) == {"rows", "note", "steps"}
    assert own_attributes(CLASS) == {"child", "width", "reset"}


def test_a_method_that_a_function_calls_by_name_is_run_in_a_step() -> None:
    assert "table" in left_on_others([CLASS], {"set_input_embeddings"})


@pytest.mark.parametrize("source", ["", "x = 1", "class Broken(:"])
def test_what_is_no_class_leaves_nothing(source: str) -> None:
    assert not left_on_others([source], set())
    assert not own_attributes(source)
