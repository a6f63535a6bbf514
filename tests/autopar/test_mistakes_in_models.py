"""Mistakes in the model file and in its name: what `autopar inspect` says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.autopar.mistakes import MODEL, Mistake, assert_clear, changed, commit

INSPECT = ("inspect", "model.py")
ON_CPU = "the emitted script moves the model and each batch"
SAME_MODULE = {"models/net.py": MODEL}


def inspecting(name: str) -> tuple[str, ...]:
    return ("inspect", name)


NAMES = {
    "a folder of a package": Mistake(
        arguments=inspecting("net"),
        files={"net/__init__.py": "", "net/net.py": MODEL},
        telling=("net is a folder", "name it: net/net.py"),
    ),
    "a notebook": Mistake(
        arguments=inspecting("net.ipynb"),
        files={"net.ipynb": "{}"},
        telling=("is not a Python file", "jupyter nbconvert"),
    ),
    "a plan": Mistake(
        arguments=inspecting("plan.json"),
        files={"plan.json": "{}"},
        telling=("is not a Python file", "emit, explain, verify and dryrun"),
    ),
    "a dotted module": Mistake(
        arguments=inspecting("models.net:build_model"),
        files=SAME_MODULE,
        telling=("there is no file models.net", "did you mean models/net.py?"),
    ),
    "a dot in the place of the colon": Mistake(
        arguments=inspecting("models/net.py.build_model"),
        files=SAME_MODULE,
        telling=("did you mean models/net.py:build_model?",),
    ),
    "two colons": Mistake(
        arguments=inspecting("models/net.py::build_model"),
        files=SAME_MODULE,
        telling=("there is no file models/net.py:", "did you mean models/net.py?"),
    ),
    "a call": Mistake(
        arguments=inspecting("models/net.py:build_model()"),
        files=SAME_MODULE,
        telling=("there is no function build_model()", "did you mean build_model?"),
    ),
    "a model of Hugging Face": Mistake(
        arguments=inspecting("meta-llama/Llama-2-7b"),
        telling=("there is no file", "for one of Hugging Face see docs/model-file.md"),
    ),
    "another folder": Mistake(
        arguments=inspecting("net.py"),
        files=SAME_MODULE,
        telling=("there is no file net.py", "it is seen from"),
    ),
    "the name of an installed module": Mistake(
        arguments=inspecting("torch.py"),
        files={"torch.py": MODEL},
        telling=("torch.py would hide the module torch", "my_torch.py"),
    ),
    "the name of one of Python's modules": Mistake(
        arguments=inspecting("random.py"),
        files={"random.py": MODEL},
        telling=("random.py would hide the module random",),
    ),
    "an option for an argument": Mistake(
        arguments=(*INSPECT, "--args", "width=8"),
        files=changed(""),
        telling=("there is no option --args", "did you mean --arg?"),
    ),
    "a misspelt command": Mistake(
        arguments=("inspekt", "model.py"),
        telling=("there is no command 'inspekt'", "did you mean 'inspect'?"),
    ),
}

IMPORTS = {
    "a misspelt package": Mistake(
        arguments=INSPECT,
        files={"model.py": "import transformerz\n"},
        telling=("No module named 'transformerz'", "did you mean transformers?", "model.py:1"),
    ),
    "a package that is not installed": Mistake(
        arguments=INSPECT,
        files={"model.py": "import zzz_not_there\n"},
        telling=("No module named 'zzz_not_there'", "install the package that has it"),
    ),
    "a relative import": Mistake(
        arguments=INSPECT,
        files={"model.py": "from .net import build_model\n", "net.py": MODEL},
        telling=("attempted relative import", "put an __init__.py beside", "without the dot"),
    ),
    "a relative import that leaves the package": Mistake(
        arguments=inspecting("net/model.py"),
        files={"net/__init__.py": "", "net/model.py": "from ..parts import x\n", "parts.py": ""},
        telling=("beyond top-level package", "__init__.py into each folder"),
    ),
    "a package that would hide another": Mistake(
        arguments=inspecting("json/model.py"),
        files={"json/__init__.py": "", "json/model.py": "from .net import x\n"},
        telling=("json would hide the module json", "rename it, such as my_json"),
    ),
    "a package that needs its parent on the path": Mistake(
        arguments=inspecting("zzz/model.py"),
        files={"zzz/model.py": "from zzz.net import build_model\n", "zzz/net.py": MODEL},
        telling=("No module named 'zzz'", "run with PYTHONPATH=", ", where zzz is"),
    ),
}

FUNCTIONS = {
    "a factory of another name": Mistake(
        arguments=INSPECT,
        files={"model.py": "def make_net(): ...\n"},
        telling=("there is no function build_model", "model.py:make_net"),
    ),
    "a class and no factory": Mistake(
        arguments=INSPECT,
        files={"model.py": "class Net: ...\n"},
        telling=("there is no function build_model", "def build_model(): return Net(…)"),
    ),
    "a misspelt example_batch": Mistake(
        arguments=INSPECT,
        files={"model.py": MODEL.replace("example_batch", "exmaple_batch")},
        telling=("there is no function example_batch", "did you mean exmaple_batch?"),
    ),
    "a misspelt optional function": Mistake(
        arguments=INSPECT,
        files=changed("def build_optimiser(params): ..."),
        telling=("no function build_optimiser", "did you mean build_optimizer?"),
    ),
    "a collate without a dataset": Mistake(
        arguments=INSPECT,
        files=changed("def build_collate(): return list"),
        telling=("a build_collate, and no build_dataset", "define build_dataset()"),
    ),
    "a loss of another name": Mistake(
        arguments=INSPECT,
        files={"model.py": MODEL.replace("def loss", "def loss_fn")},
        telling=("the loss has shape [B, 8]", "has no function `loss`", "define loss(outputs"),
    ),
    "a loss for each row": Mistake(
        arguments=INSPECT,
        files=changed("def loss(outputs, batch): return outputs.square().mean(1)"),
        telling=("the loss has shape [B]", "at: loss of", "the mean over the rows"),
    ),
    "a loss with more behind it": Mistake(
        arguments=INSPECT,
        files=changed("def loss(outputs, batch): return outputs.mean(), {'accuracy': 0.5}"),
        telling=("loss returned a tuple", "a scalar tensor", "return it alone"),
    ),
    "a model in place of its factory": Mistake(
        arguments=INSPECT,
        files=changed("build_model = Model()"),
        telling=("build_model is a model, a Model", "fix: def build_model(): return …"),
    ),
    "a batch without names": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(n): return torch.randn(n, 4), torch.randn(n)"),
        telling=("example_batch returned a tuple", 'name each: {"x": …'),
    ),
    "a batch of arrays": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(n): return {'x': torch.randn(n, 4).numpy()}"),
        telling=("batch['x'] is a ndarray", "torch.as_tensor"),
    ),
    "a batch in a batch": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(n): return {'x': {'left': torch.randn(n, 4)}}"),
        telling=("batch['x'] is a dict", "a key of its own"),
    ),
    "an argument that the batch does not name": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(n): return {'input': torch.randn(n, 4)}"),
        telling=("forward needs x", "the batch has ['input']", "let example_batch name it x"),
    ),
    "a model that does not learn": Mistake(
        arguments=INSPECT,
        files=changed("def build_model(): return Model().eval()"),
        telling=("the model is in eval mode", "leave out .eval(), or return model.train()"),
    ),
    "a loss of one argument": Mistake(
        arguments=INSPECT,
        files=changed("def loss(outputs): return outputs.mean()"),
        telling=("loss(outputs) in", "it is called as loss(outputs, batch)"),
    ),
    "an example_batch of two arguments": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(batch_size, length): return {}"),
        telling=("missing a required argument: 'length'", "give it by --arg"),
    ),
}

DEVICES_AND_TYPES = {
    "a model on a GPU": Mistake(
        arguments=INSPECT,
        files=changed("def build_model(): return Model().cuda()"),
        telling=("it moves the model to a device", ON_CPU),
    ),
    "a model on whatever device is there": Mistake(
        arguments=INSPECT,
        files=changed(
            "def build_model(): return Model().to('cuda' if torch.cuda.is_available() else 'cpu')"
        ),
        telling=("it moves the model to a device", ON_CPU),
    ),
    "whole numbers for a linear layer": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(n): return {'x': torch.ones(n, 4, dtype=torch.long)}"),
        telling=("linear multiplies int64 by the model's own type", "in module embed"),
        code=4,
    ),
    "float64 from numpy": Mistake(
        arguments=INSPECT,
        files=changed("def example_batch(n): return {'x': torch.ones(n, 4).double()}"),
        telling=("linear multiplies float64 by the model's own type", "give float32"),
        code=4,
    ),
    "a model in float64": Mistake(
        arguments=INSPECT,
        files=changed("def build_model(): return Model().double()"),
        telling=("the model is in float64", "leave out .double()"),
    ),
    "classes in 32 bits": Mistake(
        arguments=INSPECT,
        files=changed(
            "def loss(outputs, batch):\n"
            "    classes = batch['x'][:, 0].int()\n"
            "    return torch.nn.functional.cross_entropy(outputs, classes)"
        ),
        telling=("cross_entropy_loss is given classes in int32", "expected: int64"),
        code=4,
    ),
    "float tokens": Mistake(
        arguments=INSPECT,
        files={"model.py": MODEL.replace("nn.Linear(4, width)", "nn.Embedding(9, width)")},
        telling=("an embedding is looked up by what are no whole numbers", "torch.randint"),
        code=4,
    ),
    "a key that the batch does not have": Mistake(
        arguments=INSPECT,
        files=changed("def loss(outputs, batch): return (outputs - batch['target']).mean()"),
        telling=("KeyError: 'target'", "outputs are a Tensor[rows, 8], the batch is a dict of x"),
    ),
    "outputs that are no object": Mistake(
        arguments=INSPECT,
        files=changed("def loss(outputs, batch): return outputs.logits.mean()"),
        telling=("'Tensor' object has no attribute 'logits'", "the outputs are a Tensor[rows, 8]"),
    ),
    "a decision on values": Mistake(
        arguments=INSPECT,
        files={"model.py": MODEL.replace("x = self.embed(x)", "x = x if x.sum() > 0 else -x")},
        telling=("decides on the values of a tensor (x = x if x.sum() > 0 else -x)", "torch.where"),
        code=4,
    ),
    "a loop over values": Mistake(
        arguments=INSPECT,
        files={"model.py": MODEL.replace("x = self.embed(x)", "x = x * len(range(int(x.max())))")},
        telling=("decides on the values of a tensor (x = x * len(range(int(x.max()))))",),
        code=4,
    ),
    "numpy in the forward": Mistake(
        arguments=INSPECT,
        files={
            "model.py": MODEL.replace(
                "x = self.embed(x)", "x = self.embed(torch.tensor(x.detach().numpy()))"
            )
        },
        telling=("the model leaves torch for numpy", "compute with torch in the forward"),
        code=4,
    ),
}

MISTAKES = NAMES | IMPORTS | FUNCTIONS | DEVICES_AND_TYPES


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_model_file_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    mistake: Mistake,
) -> None:
    assert_clear(commit(monkeypatch, capsys, tmp_path, mistake), mistake)


@pytest.mark.parametrize("folder", ["new\nline", "a space", "é 模型", "quo'\"te", "[bold]"])
def test_a_folder_of_any_name_will_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    folder: str,
) -> None:
    name = f"{folder}/model.py"
    odd = Mistake(arguments=("inspect", name), files={name: MODEL}, telling=())
    ran = commit(monkeypatch, capsys, tmp_path, odd)
    assert (ran.code, ran.err) == (0, "")
    assert "4 layers" in ran.out
