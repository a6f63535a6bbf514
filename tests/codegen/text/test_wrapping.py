"""Lines that are too long are broken into the same code."""

from __future__ import annotations

import ast

import pytest

from autopar.codegen.text.lines import wrapped

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


def test_a_long_call_is_broken_inside_and_not_in_what_follows_it() -> None:
    call = f"x = attend(values={PATH}, masked=True)"
    assert wrapped(f"{call}[0]", indent=4) == [
        "    x = attend(",
        f"        values={PATH},",
        "        masked=True,",
        "    )[0]",
    ]
    assert wrapped(f"{call}.view(-1, 3)", indent=4)[-1] == "    ).view(-1, 3)"
    short = f"x = attend(mask)[0].view({PATH})"
    assert wrapped(short, indent=0)[0] == "x = attend(mask)[0].view("
