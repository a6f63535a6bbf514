"""The table, fourth part: model files whose faults `autopar plan` finds by trying them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.autopar.mistakes import MODEL
from tests.field.bad_inputs.cases import PLANNING, Case

_ROWS = """
from torch.utils.data import Dataset, IterableDataset

class Rows(Dataset):
    def __len__(self):
        return length()

    def __getitem__(self, index):
        return row(index)

def length():
    return 64

def row(index):
    return {"x": torch.zeros(4)}

def build_dataset():
    return Rows()
"""
_EVALUATED = _ROWS + "\ndef build_eval_dataset():\n    return Rows()\n"
_SCHEDULES = "torch.optim.lr_scheduler"


def _cases(code: int, rows: str, *cases: tuple[str, str]) -> Iterator[tuple[str, Case]]:
    for addition, message in cases:
        text = f"{MODEL}\n{rows}\n{addition}\n"
        yield addition, Case(command=PLANNING, code=code, message=message, files={"model.py": text})


MODEL_FILES = {
    **dict(
        _cases(
            2,
            _ROWS,
            ("def length(): return -3", "the length of the dataset (Rows) is invalid: __len__()"),
            ("def length(): return 6.5", "'float' object cannot be interpreted as an integer"),
            ("def length(): return 10**12", "has 1,000,000,000,000 rows, and 1,000,000,000 are"),
            ("def length(): return 0", "the dataset (Rows) is empty"),
            ("def length(): return nothing", "the length of build_dataset() failed: NameError"),
            ("def row(n): return {'xs': 0}", "row 0 of build_dataset() has xs, but no x"),
            ("def row(n): return {'x': n}", "'x' is int64[] in row 0 of build_dataset()"),
            ("def row(n): return {'x': [True] * 4}", "'x' is bool[4] in row 0"),
            ("def row(n): return {'x': 'four'}", "'x' in row 0 of build_dataset() is a str"),
            ("def row(n): return [0]", "row 0 of build_dataset() is a list"),
            ("def row(n): return None", "row 0 of build_dataset() is a NoneType"),
            (
                "def row(n): return {'x': torch.zeros(4 - n // 63)}",
                "'x' has shape [3] in row 63 of build_dataset(), and [4] in example_batch",
            ),
            ("def row(n): return [{}][n]['x']", "reading row 0 of build_dataset() failed: KeyErr"),
            ("def row(n): raise SystemExit(0)", "reading row 0 of build_dataset() ended the proc"),
            ("def build_dataset(): return 5", "the dataset (int) gives no row for an index"),
            (
                "def build_collate(): return lambda rows: rows['x']",
                "calling the function that build_collate() returned failed: TypeError",
            ),
            ("def build_collate(): return list", "build_collate() makes a list of rows"),
            (
                "def build_collate(): return lambda rows: {'x': torch.zeros(len(rows), 4).long()}",
                "'x' of build_collate() has rows of int64[4], and the plan was made for float32[4]",
            ),
        )
    ),
    **dict(
        _cases(
            2,
            _EVALUATED,
            ("def metrics(outputs, batch): return batch['y']", "calling metrics failed: KeyError"),
            ("def metrics(outputs, batch): return {'m': 1.0}", "metrics() of the model file retu"),
            ("def metrics(outputs, batch): return {'m': outputs.sum()}", "is a single number"),
        )
    ),
    **dict(
        _cases(
            2,
            "",
            ("def build_optimizer(params): raise ValueError('no')", "build_optimizer failed: Val"),
            ("def build_optimizer(params): return torch.optim.SGD(params, lr=-1)", "learning rate"),
            (
                "def build_optimizer(params): return torch.optim.SGD([*params] * 2, lr=0.1)",
                "build_optimizer gives the optimizer ",
            ),
            (
                "def build_optimizer(params): return torch.optim.SparseAdam([*params])",
                "SparseAdam takes sparse gradients alone",
            ),
            (
                f"def build_scheduler(optimizer): return {_SCHEDULES}.OneCycleLR(optimizer, 0.1)",
                "calling build_scheduler failed: ValueError: You must define",
            ),
            (
                f"def build_scheduler(one): return {_SCHEDULES}.LambdaLR(one, lambda n: 1 / (n-1))",
                "the first step of build_scheduler's schedule fails: ZeroDivisionError",
            ),
            ("def build_scheduler(optimizer): raise SystemExit(0)", "build_scheduler ended the pr"),
            (
                "class Model(Model):\n    def forward(self, x):\n"
                "        self.more = nn.Parameter(torch.ones(8))\n"
                "        return super().forward(x) * self.more",
                "forward makes the parameter more",
            ),
            (
                "class Model(Model):\n    def parameters(self, recurse=True):\n"
                "        return iter([self.embed.weight])",
                "Model has a method parameters that finds something else",
            ),
        )
    ),
    **dict(
        _cases(
            0,
            _ROWS,
            (
                "def build_dataset(): raise OSError('no disk')",
                "could not be read here (OSError: no",
            ),
            ("def row(n): return open('/nowhere')", "could not be read here (FileNotFoundError"),
            (
                "class Stream(IterableDataset):\n    def __iter__(self):\n        yield row(0)\n"
                "def build_dataset(): return Stream()",
                "Written: out/plan.json",
            ),
            (
                f"def build_scheduler(one): return {_SCHEDULES}.OneCycleLR(one, 1, total_steps=9)",
                "note: build_scheduler's schedule fails in step 10 (ValueError: Tried to step 10",
            ),
        )
    ),
}
