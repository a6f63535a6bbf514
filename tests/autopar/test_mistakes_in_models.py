"""Mistakes in the model file and in its name: what `autopar inspect` says of them."""

from __future__ import annotations

import pytest

from tests.autopar.mistakes import MODEL, Commit, Mistake, Tell, changed, mistake

ON_CPU = "the emitted script moves the model and each batch"


def model(addition: str, *telling: str, code: int = 2) -> Mistake:
    return mistake("inspect model.py", *telling, files=changed(addition), code=code)


def source(text: str, *telling: str, code: int = 2) -> Mistake:
    return mistake("inspect model.py", *telling, files={"model.py": text}, code=code)


def named(name: str, telling: str) -> Mistake:
    """Name a model file, of which there is models/net.py."""
    return mistake(f"inspect {name}", telling, files={"models/net.py": MODEL})


NAMES = {
    "a notebook": mistake(
        "inspect net.ipynb", "is not a Python file … jupyter nbconvert", files={"net.ipynb": "{}"}
    ),
    "a plan": mistake(
        "plan plan.json --gpus 2 -o out",
        "plan.json is a plan, of the model file net.py … autopar plan net.py … emit plan.json",
        files={"plan.json": '{"model": {"spec": "net.py"}}'},
    ),
    "other JSON": mistake(
        "inspect net.json", "is not a Python file … in Python", files={"net.json": "{}"}
    ),
    "a dotted module": named(
        "models.net:build_model", "there is no file models.net … did you mean models/net.py?"
    ),
    "a dot in the place of the colon": named(
        "models/net.py.build_model", "did you mean models/net.py:build_model?"
    ),
    "two colons": named(
        "models/net.py::build_model",
        "there is no file models/net.py: … did you mean models/net.py?",
    ),
    "a call": named(
        "models/net.py:build_model()",
        "there is no function build_model() … did you mean build_model?",
    ),
    "a model of Hugging Face": mistake(
        "inspect meta-llama/Llama-2-7b",
        "there is no file … for one of Hugging Face see docs/model-file.md",
    ),
    "another folder": named("net.py", "there is no file net.py … the working directory is"),
    "the name of an installed module": mistake(
        "inspect torch.py",
        "torch.py would hide the module torch … my_torch.py",
        files={"torch.py": MODEL},
    ),
    "the name of one of Python's modules": mistake(
        "inspect random.py", "random.py would hide the module random", files={"random.py": MODEL}
    ),
    "an option for an argument": mistake(
        "inspect model.py --args width=8",
        "there is no option --args … did you mean --arg?",
        files=changed(""),
    ),
    "a misspelt command": mistake(
        "inspekt model.py", "there is no command 'inspekt' … did you mean 'inspect'?"
    ),
}

IMPORTS = {
    "a misspelt package": source(
        "import transformerz\n",
        "No module named 'transformerz' … did you mean transformers? … model.py:1",
    ),
    "a relative import": mistake(
        "inspect model.py",
        "attempted relative import … put an __init__.py beside … without the dot",
        files={"model.py": "from .net import build_model\n", "net.py": MODEL},
    ),
    "a relative import that leaves the package": mistake(
        "inspect net/model.py",
        "beyond top-level package … __init__.py into each folder",
        files={"net/__init__.py": "", "net/model.py": "from ..parts import x\n", "parts.py": ""},
    ),
    "a package that would hide another": mistake(
        "inspect json/model.py",
        "json would hide the module json … rename it, such as my_json",
        files={"json/__init__.py": "", "json/model.py": "from .net import x\n"},
    ),
    "a package that needs its parent on the path": mistake(
        "inspect zzz/model.py",
        "No module named 'zzz' … run with PYTHONPATH= … , where zzz is",
        files={"zzz/model.py": "from zzz.net import build_model\n", "zzz/net.py": MODEL},
    ),
}

FUNCTIONS = {
    "a factory of another name": source(
        "def make_net(): ...\n", "there is no function build_model … model.py:make_net"
    ),
    "a class and no factory": source(
        "class Net: ...\n", "there is no function build_model … def build_model(): return Net(…)"
    ),
    "a misspelt example_batch": source(
        MODEL.replace("example_batch", "exmaple_batch"),
        "there is no function example_batch … did you mean exmaple_batch?",
    ),
    "a misspelt optional function": model(
        "def build_optimiser(params): ...",
        "no function build_optimiser … did you mean build_optimizer?",
    ),
    "a collate without a dataset": model(
        "def build_collate(): return list",
        "a build_collate, and no build_dataset … define build_dataset()",
    ),
    "a loss of another name": source(
        MODEL.replace("def loss", "def loss_fn"),
        "the loss has shape [B, 8] … has no function `loss` … define loss(outputs",
    ),
    "a loss for each row": model(
        "def loss(outputs, batch): return outputs.square().mean(1)",
        "the loss has shape [B] … at: loss of … the mean over the rows",
    ),
    "a loss with more behind it": model(
        "def loss(outputs, batch): return outputs.mean(), {'accuracy': 0.5}",
        "loss returned a tuple … a scalar tensor … return it alone",
    ),
    "a model in place of its factory": model(
        "build_model = Model()",
        "build_model is a model, a Model … fix: def build_model(): return …",
    ),
    "a batch without names": model(
        "def example_batch(n): return torch.randn(n, 4), torch.randn(n)",
        'example_batch returned a tuple … name each: {"x": …',
    ),
    "a batch of arrays": model(
        "def example_batch(n): return {'x': torch.randn(n, 4).numpy()}",
        "batch['x'] is a ndarray … torch.as_tensor",
    ),
    "a batch in a batch": model(
        "def example_batch(n): return {'x': {'left': torch.randn(n, 4)}}",
        "batch['x'] is a dict … a key of its own",
    ),
    "an argument that the batch does not name": model(
        "def example_batch(n): return {'input': torch.randn(n, 4)}",
        "forward needs x … the batch has ['input'] … let example_batch name it x",
    ),
    "a model that does not learn": model(
        "def build_model(): return Model().eval()",
        "the model is in eval mode … return Model().train()",
    ),
    "a loss of one argument": model(
        "def loss(outputs): return outputs.mean()",
        "loss(outputs) in … it is called as loss(outputs, batch)",
    ),
    "an example_batch of two arguments": model(
        "def example_batch(batch_size, length): return {}",
        "missing a required argument: 'length' … give it by --arg",
    ),
}

DEVICES_AND_TYPES = {
    "a model on whatever device is there": model(
        "def build_model(): return Model().to('cuda' if torch.cuda.is_available() else 'cpu')",
        "the model file moves the model to a device",
        ON_CPU,
    ),
    "whole numbers for a linear layer": model(
        "def example_batch(n): return {'x': torch.ones(n, 4, dtype=torch.long)}",
        "linear multiplies int64 by the model's own type … in module embed",
        code=4,
    ),
    "float64 from numpy": model(
        "def example_batch(n): return {'x': torch.ones(n, 4).double()}",
        "linear multiplies float64 by the model's own type … give float32",
        code=4,
    ),
    "a model in float64": model(
        "def build_model(): return Model().double()",
        "the model is in float64 … leave out .double()",
    ),
    "classes in 32 bits": model(
        "def loss(outputs, batch):\n"
        "    classes = batch['x'][:, 0].int()\n"
        "    return torch.nn.functional.cross_entropy(outputs, classes)",
        "cross_entropy_loss is given classes in int32 … expected: int64",
        code=4,
    ),
    "float tokens": source(
        MODEL.replace("nn.Linear(4, width)", "nn.Embedding(9, width)"),
        "an embedding gets indices that are not integers … torch.randint",
        code=4,
    ),
    "a key that the batch does not have": model(
        "def loss(outputs, batch): return (outputs - batch['target']).mean()",
        "KeyError: 'target' … outputs are a Tensor[rows, 8], the batch is a dict of x",
    ),
    "outputs that are no object": model(
        "def loss(outputs, batch): return outputs.logits.mean()",
        "'Tensor' object has no attribute 'logits' … the outputs are a Tensor[rows, 8]",
    ),
    "a loop over values": source(
        MODEL.replace("x = self.embed(x)", "x = x * len(range(int(x.max())))"),
        "decides on the values of a tensor (x = x * len(range(int(x.max()))))",
        code=4,
    ),
}

MISTAKES = NAMES | IMPORTS | FUNCTIONS | DEVICES_AND_TYPES


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_model_file_is_told(tell: Tell, mistake: Mistake) -> None:
    tell(mistake)


@pytest.mark.parametrize("folder", ["new\nline", "a space", "é 模型", "quo'\"te", "[bold]"])
def test_a_folder_of_any_name_will_do(commit: Commit, folder: str) -> None:
    name = f"{folder}/model.py"
    ran = commit(Mistake(arguments=("inspect", name), files={name: MODEL}, telling=()))
    assert (ran.code, ran.err) == (0, "")
    assert "4 layers" in ran.out
