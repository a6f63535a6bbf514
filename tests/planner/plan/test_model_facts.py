"""A plan knows its model file: what it has, and whether it changed."""

from __future__ import annotations

from pathlib import Path

from autopar.planner.plan.plan import model_facts, source_hash
from tests.planner.subjects import zoo_file, zoo_graph


def test_facts_are_those_of_the_model_file_and_its_graph() -> None:
    facts = model_facts(
        zoo_file("gpt2.py", "size=tiny"),
        zoo_graph("gpt2.py", "size=tiny"),
        spec="models_zoo/gpt2.py",
        arguments=("size=tiny",),
    )
    assert facts.name == "gpt2 (size=tiny)"
    assert facts.spec == "models_zoo/gpt2.py"
    assert facts.arguments == (("size", "tiny"),)
    assert facts.has_dataset
    graph = zoo_graph("gpt2.py", "size=tiny")
    tokens = graph.tensors[graph.inputs[0]]
    assert facts.tokens_per_row == tokens.shape[1].at(1) > 1
    assert facts.parameters == sum(graph.tensors[p.name].numel.at(1) for p in graph.parameters)


def test_images_have_no_tokens() -> None:
    graph = zoo_graph("mnist.py")
    facts = model_facts(zoo_file("mnist.py"), graph, spec="mnist.py", arguments=())
    assert facts.tokens_per_row == 1


def test_the_hash_follows_the_file_and_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    model, near, far = tmp_path / "model.py", tmp_path / "blocks.py", tmp_path / "other.py"
    model.write_text("import torch\nfrom blocks import Block\n")
    near.write_text("from package.parts import one\n")
    far.write_text("x = 1\n")
    (tmp_path / "package").mkdir()
    part = tmp_path / "package" / "parts.py"
    part.write_text("one = 1\n")
    hashes = [source_hash(model)]
    far.write_text("x = 2\n")  # nobody imports it
    assert source_hash(model) == hashes[0]
    for file in (model, near, part):
        file.write_text(file.read_text() + "\n# changed\n")
        hashes.append(source_hash(model))
    assert len(set(hashes)) == 4


def test_the_hash_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    hashes = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "model.py").write_text("import parts\n")
        (folder / "parts.py").write_text("")
        hashes.add(source_hash(folder / "model.py"))
    assert len(hashes) == 1
