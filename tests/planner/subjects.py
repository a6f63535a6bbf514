"""Small factories: graphs of zoo models, traced once per run, and of Hugging Face families."""

from functools import cache
from pathlib import Path

from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from autopar.planner.trace.build import TracedSubject, build
from tests.planner.huggingface.families import FAMILIES
from tests.planner.shared_graphs import SHARED

ZOO = Path(__file__).parents[2] / "models_zoo"
ZOO_MODELS = (
    "gpt2.py", "llama.py", "bert.py", "t5.py", "vit.py", "resnet.py", "mnist.py", "intent.py",
    "dlrm.py", "transformer_lm.py",
)  # fmt: skip


def zoo_file(name: str, *arguments: str) -> ModelFile:
    """Load a model file of the zoo."""
    return load_model_file(str(ZOO / name), arguments)


@cache
def zoo_graph(name: str, *arguments: str, precision: Precision = Precision.FP32) -> Graph:
    """Trace a model of the zoo, or take the graph that another worker of this run has traced."""
    file = zoo_file(name, *arguments)
    return SHARED.graph((name, arguments, precision), lambda: trace(file, precision=precision))


@cache
def family_graph(name: str) -> Graph:
    """Trace a tiny Hugging Face model as the product would, from its config."""
    family = next(family for family in FAMILIES if family.name == name)
    file = ModelFile(
        path=Path(f"{name}.py"),
        factory="build_model",
        arguments=(),
        build_model=family.build_model,
        example_batch=family.example_batch,
        loss=None,
        build_dataset=None,
        build_optimizer=None,
        build_scheduler=None,
    )
    return trace(file)


def meta_subject(name: str, *arguments: str, batch_size: int) -> TracedSubject:
    """Build a zoo model on the meta device, ready to run."""
    return build(zoo_file(name, *arguments), device="meta", dtype=None, batch_size=batch_size)
