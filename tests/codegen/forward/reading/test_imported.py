"""Classes of a model have names of their own in a script."""

from __future__ import annotations

from torch import nn

from autopar.codegen.forward.reading.modules import imported_classes


def made(name: str, module: str, qualname: str = "") -> type:
    """Return a class as it would be of another file."""
    return type(name, (nn.Module,), {"__module__": module, "__qualname__": qualname or name})


def names(*kinds: type) -> list[str]:
    return [one.name for one in imported_classes(kinds).values()]


def test_a_class_keeps_its_name() -> None:
    assert names(made("Block", "model"), nn.Linear) == ["Block", "nn.Linear"]


def test_classes_of_one_name_take_those_of_their_files() -> None:
    assert names(made("Block", "net.encoder"), made("Block", "net.decoder")) == [
        "EncoderBlock",
        "DecoderBlock",
    ]
    assert names(nn.Linear, made("Linear", "my_layers")) == ["nn.Linear", "MyLayersLinear"]


def test_a_name_that_scripts_have_is_left_to_them() -> None:
    assert names(made("Pipeline", "model"), made("LastStage", "model")) == [
        "ModelPipeline",
        "ModelLastStage",
    ]


def test_a_class_in_a_class_has_the_names_of_both() -> None:
    inner = made("Inner", "model", "Outer.Inner")
    assert names(inner, made("Inner", "model")) == ["OuterInner", "ModelInner"]
    assert imported_classes([inner])[inner].qualname == "Outer.Inner"


def test_no_two_classes_ever_share_a_name() -> None:
    alike = [made("Block", "a.model"), made("Block", "b.model"), made("ModelBlock", "c")]
    assert len(set(names(*alike))) == 3
