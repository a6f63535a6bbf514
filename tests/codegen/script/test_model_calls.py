"""A script imports the classes that it needs, under names that hide nothing."""

from __future__ import annotations

import pytest

from autopar.codegen.forward.reading.modules import Imported
from autopar.codegen.script.model_calls import model_calls
from autopar.planner.errors import InputError
from tests.planner.subjects import zoo_file


def imports(*classes: Imported) -> list[str]:
    """Return the lines that import some classes in a script beside the model file."""
    file = zoo_file("mnist.py")
    text = model_calls(file, classes, file.path.parent / "train.py", is_half=False).imports
    return text.splitlines()[2:]


def test_classes_are_imported_under_their_names_in_the_script() -> None:
    plain = Imported(module="net.encoder", qualname="Block", name="EncoderBlock")
    own = Imported(module="mnist", qualname="Mlp.Inner", name="MlpInner")
    inner = Imported(module="net.decoder", qualname="Net.Block", name="NetBlock")
    assert imports(plain, own, inner) == [
        "import mnist as model_file",
        "from net.decoder import Net",
        "from net.encoder import Block as EncoderBlock",
        "",
        "MlpInner = model_file.Mlp.Inner",
        "NetBlock = Net.Block",
    ]


def test_a_function_that_would_hide_what_a_script_has_is_refused() -> None:
    with pytest.raises(InputError, match="but Split already has another meaning"):
        imports(Imported(module="net", qualname="Split", name="Split"))
