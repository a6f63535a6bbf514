"""Lines that are too long are broken into the same code."""

from __future__ import annotations

import ast

import pytest

from autopar.codegen.forward.wrapping import wrapped

PATH = ".".join(["self", *(f"a_module_with_a_long_name_{number}" for number in range(4))])


@pytest.mark.parametrize(
    "line",
    [
        f"q = q.view(batch, seq, -1, {PATH})",
        f"q = {PATH}",
        f"return {PATH}",
        f"q = {PATH} + {PATH}",
        f"q = view(batch, {PATH} * 2)",
        f'q = einsum("b h i d, b h j d -> b h i j", {PATH}, 2)',
        f'q = view("a) if (b = c", {PATH}, "\\"), ", 3)',
        f'q = "one if two = three" + {PATH}',
        f'q = {PATH} if way == " if else " else 1',
        f"q = view(batch, {PATH})[0]",
        f"q = view(batch, {PATH})[0][:, 1]",
    ],
)
def test_a_line_that_is_broken_means_what_it_meant(line: str) -> None:
    broken = wrapped(line, indent=0)
    assert ast.dump(ast.parse("\n".join(broken))) == ast.dump(ast.parse(line))


def test_a_call_of_which_one_result_is_taken_breaks_inside_the_call() -> None:
    given = ", ".join(f"name_of_some_length_{number}" for number in range(4))
    broken = wrapped(f"q = view({given})[0]", indent=0)
    assert broken == ["q = view(", f"    {given}", ")[0]"]
