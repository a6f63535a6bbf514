"""Nothing gets into a template without a filter."""

import pytest
from jinja2 import UndefinedError

from autopar.codegen.script.render import environment
from autopar.codegen.text.values import Source


@pytest.mark.parametrize("value", ["text", 1, None, ("a",)])
def test_a_value_without_a_filter_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no source text of ours"):
        environment().from_string("{{ value }}").render(value=value)


def test_text_that_is_not_ours_is_no_source() -> None:
    with pytest.raises(TypeError, match="no source text of ours"):
        environment().from_string("{{ value|source }}").render(value="import os")


def test_a_missing_value_is_refused() -> None:
    with pytest.raises((UndefinedError, TypeError)):
        environment().from_string("{{ value|source }}").render()


def test_filtered_values_stand_as_they_are() -> None:
    template = "{{ a|literal }} {{ b|identifier }} {{ c|source }} {{ d|remark }}"
    values = {"a": 'x"\n', "b": "name", "c": Source("f()"), "d": "a\nb"}
    assert environment().from_string(template).render(**values) == "'x\"\\n' name f() # a b"
