"""A script may hold only what training needs."""

import pytest

from autopar.codegen.script.render import UnsafeScriptError, check_script

SOUND = '''"""A script."""

import torch
import gpt2 as model_file

X = 1


def main() -> None:
    print(torch.zeros(X), model_file.loss)


if __name__ == "__main__":
    main()
'''


def test_a_sound_script_passes() -> None:
    check_script(SOUND)


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import subprocess",
        "print(1)",
        "__import__('os')",
        "X = eval('1')",
        "X = globals()",
        "X = open('f')",
        "X = ().__class__",
        "for x in (1,): pass",
        "X = exec",
        "sys.path.insert(0, 'x')",
        "X = getattr(torch, 'x')",
    ],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(UnsafeScriptError, match="would not be safe"):
        check_script(SOUND.replace("X = 1", line))


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        check_script("a b")
