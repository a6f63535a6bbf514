"""Answers questions about values while a model is traced, if only one answer is possible.

- A number that depends neither on the batch nor on weights is computed, such as
  `(positions.diff() != 1).any()` of an arange, or `mask.all()` of ones. The recorded ops run for
  several numbers of rows, and the results must agree.
- `len(x)` of a tensor is a symbol, like `x.shape[0]`; Python's own `len` would fix the number of
  rows.
- Checks of values count as passed: `assert ids.min() >= 0`, and
  `if labels.max() >= self.vocab: raise ValueError(…)`. For an `if` that only raises, the answer is
  the one that does not raise.
- If torch asks whether a mask that it applies anyway is causal, the answer is no.
- A decision by a random number is refused: if `torch.rand([]) < p` drops a layer, each step and
  each rank would run other code.
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any
from unittest.mock import patch

import networkx as nx
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.planner.trace.model_checks import TORCH, calling_place, is_library_file
from autopar.planner.trace.nodes import is_getitem, storages_of, writers_of

_ROWS = (2, 7, 64)  # the numbers of rows for which a number is computed
_MOST_ELEMENTS = 2**26  # of any intermediate tensor
_SYMBOLIC = (SymInt, SymFloat, SymBool)


def known_number(asked: Tensor) -> Any:
    """Return the number in a traced tensor if it is the same for every batch, else None."""
    mode: Any = proxy_tensor.get_proxy_mode()
    if mode is None or asked.numel() != 1:
        return None
    recorded: Any = proxy_tensor.get_proxy_slot(asked, mode.tracer, None)
    nodes = _known(recorded.proxy.node) if recorded is not None else ()
    if not nodes:
        return None
    with _disable_current_modes():
        found = {_computed(nodes, rows, mode.tracer.root) for rows in _ROWS}
    return found.pop() if len(found) == 1 else None


def _known(last: fx.Node) -> Sequence[fx.Node]:
    """Return the nodes that compute a value, in order; () if one of them may vary between steps.

    Nodes that write to the memory of such a value are included.
    """
    flow, writers = nx.DiGraph(), writers_of(last.graph)
    flow.add_node(last)
    for node in last.graph.nodes:
        if not _is_number(node):
            written = storages_of([node]) & writers.keys() if writers else ()
            before = chain(node.all_input_nodes, *(writers[one] for one in written))
            flow.add_edges_from((one, node) for one in before)
    needed = {last, *nx.ancestors(flow, last)}
    is_known = all(_is_number(one) or _is_steady(one) for one in needed)
    return [node for node in last.graph.nodes if node in needed] if is_known else ()


def _is_steady(node: fx.Node) -> bool:
    """Whether a node computes the same in every step, and its result is not too large."""
    values = [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    if any(_at(one.numel(), _ROWS[-1]) > _MOST_ELEMENTS for one in values):
        return False
    if node.op == "get_attr" or is_getitem(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return "empty" not in str(target) and torch.Tag.nondeterministic_seeded not in target.tags


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, *_SYMBOLIC))


def _computed(nodes: Sequence[fx.Node], rows: int, root: torch.nn.Module) -> Any:
    """Run nodes on the CPU for a number of rows; return the number that the last one computes."""
    values: dict[fx.Node, Any] = {}

    def given(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else _at(leaf, rows)

    for node in nodes:
        if _is_number(node):
            values[node] = _at(node.meta["val"], rows)
        elif node.op == "get_attr":
            values[node] = getattr(root, str(node.target)).clone()  # may be written to
        else:
            args, kwargs = pytree.tree_map(given, (node.args, node.kwargs))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]].item()


def _at(value: Any, rows: int) -> Any:
    """Return a number with every symbol replaced by the number of rows."""
    if not isinstance(value, _SYMBOLIC):
        return value
    expression = value.node.expr
    number = expression.xreplace(dict.fromkeys(expression.free_symbols, rows))
    return bool(number) if isinstance(value, SymBool) else type(value.node.hint)(number)


_ASKING: Mapping[Callable[..., Any], Callable[[Any], Any]] = MappingProxyType(
    {
        Tensor.__bool__: bool,
        Tensor.__float__: float,
        Tensor.__index__: operator.index,
        Tensor.__int__: int,
        Tensor.item: lambda number: number,
    }
)


def answered(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return the number that a call asks for; None for other calls, or if it is unknown."""
    if func not in _ASKING:
        return None
    asked = args[0]
    number = known_number(asked)
    if number is None and (func is Tensor.__bool__ or asked.dtype is torch.bool):
        number = passing_answer(asked)
    if number is None:
        refuse_drawn(asked)
        return None
    return _ASKING[func](number)


_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def tensor_of_numbers(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the meta tensor that a call makes of plain numbers; None for other calls."""
    if func is Tensor.new_tensor:
        like, *args = args
        kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
    elif func not in _MAKERS:
        return None
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type != "meta" or not args or isinstance(args[0], Tensor):
        return None
    made = torch.tensor(args[0], dtype=kwargs.get("dtype"), device="cpu").to(device)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


_len = len


@contextmanager
def lengths_as_sizes() -> Iterator[None]:
    """Make `len` of a tensor return its first size, which may be a symbol."""
    trace_rules.is_builtin_callable(len)  # dynamo lists Python's builtins when it is first asked
    with patch.object(builtins, "len", _length):
        yield


def _length(one: Sized, /) -> Any:
    if isinstance(one, Tensor) and type(one).__len__ is Tensor.__len__ and one.ndim:
        return one.shape[0]
    return _len(one)


@contextmanager
def fixing_noted() -> Iterator[list[str]]:
    """Collect `file:line` of the model wherever the exporter fixes a symbolic size."""
    places: list[str] = []
    original = ShapeEnv._set_replacement

    def noting(self: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        if value.is_number and not str(symbol).startswith("u"):  # u: sizes that depend on data
            places.append(calling_place())
        original(self, symbol, value, *rest)

    with patch.object(ShapeEnv, "_set_replacement", noting):
        yield places


# numbers of rows for which a comparison is made; torch traces no batch of one row
_COMPARED_ROWS = (*range(2, 34), *(2**power + more for power in range(6, 17) for more in (0, 1)))


@dataclass(frozen=True, slots=True)
class DecidingPlaces:
    """`file:line` of code that decides by the number of rows, or whether there is one row."""

    by_number: list[str] = field(default_factory=list)
    by_one: list[str] = field(default_factory=list)


@contextmanager
def deciding_noted() -> Iterator[DecidingPlaces]:
    """Collect `file:line` of code that decides by the number of rows, unless it only raises.

    The exporter takes the answer for the traced batch, and says nothing. A comparison that has the
    same answer for all batches (`x.shape[0] == y.shape[0]`) decides nothing. If a library asks
    whether there is a single row, it only wants to broadcast it.
    """
    places = DecidingPlaces()
    original: Callable[[SymBool], bool] = SymBool.__bool__

    def noting(self: SymBool) -> bool:
        frame = sys._getframe(1)
        if frame.f_code is SymInt.__bool__.__code__ and frame.f_back is not None:  # if B % 2:
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(TORCH) and line not in _answers(file):
            if _is_undecided(self, _COMPARED_ROWS):
                places.by_number.append(f"{file}:{line}")
            elif _is_undecided(self, (1, 2)) and not (is_library_file(file) or _is_called(frame)):
                places.by_one.append(f"{file}:{line}")
        return original(self)

    with patch.object(SymBool, "__bool__", noting):
        yield places


def _is_undecided(question: SymBool, numbers: Sequence[int]) -> bool:
    """Whether the answer differs between these numbers of rows, and depends on nothing else."""
    symbols = question.node.expr.free_symbols
    if not symbols or any(str(one).startswith("u") for one in symbols):
        return False
    return len({_at(question, rows) for rows in numbers}) > 1


def _is_called(frame: FrameType) -> bool:
    """Whether a frame is calling a function: max(1, B) asks, and decides nothing."""
    instruction = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[instruction].startswith(("CALL", "PRECALL"))


_OWN = str(Path(__file__).parent)
# this function of torch looks for a causal mask only to choose a faster kernel
_ONLY_FASTER = (transformer.__file__, "_detect_is_causal_mask")


def passing_answer(asked: torch.Tensor) -> bool | None:
    """Return the answer with which a check of a tensor passes; None if the line is no check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame):
        frame = frame.f_back
    if frame is None:
        return None
    if (frame.f_code.co_filename, frame.f_code.co_name) == _ONLY_FASTER:
        return False
    if not (asked.is_meta or isinstance(asked, FakeTensor)) or asked.numel() != 1:
        return None
    return _answers(frame.f_code.co_filename).get(frame.f_lineno)


def _is_between(frame: FrameType) -> bool:
    """Whether a frame belongs to the code that intercepts a question, not to the code that asks."""
    is_own = frame.f_code.co_filename.startswith(_OWN)
    return is_own or frame.f_code.co_name == "__torch_function__"


@cache
def _answers(filename: str) -> Mapping[int, bool]:
    """Return, for each line of a file that has a check, the answer with which it passes."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return MappingProxyType({})
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node)):
            answer = _answer(node.test, passes=isinstance(node, ast.Assert))
            for line in range(node.lineno, (node.test.end_lineno or node.lineno) + 1):
                if answer is not None:
                    found[line] = answer
    return MappingProxyType(found)


def _only_raises(node: ast.If) -> bool:
    return not node.orelse and all(isinstance(one, ast.Raise) for one in node.body)


def _answer(test: ast.expr, *, passes: bool) -> bool | None:
    """Return the value that all parts of a test must have to make the test equal to `passes`.

    The result is None if the parts may need different values (`a and not b`).
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answer(test.operand, passes=not passes)
    differ = any(isinstance(one, ast.Not | ast.IfExp) for one in ast.walk(test))
    return None if differ else passes


AT_RANDOM = "a decision at random"  # the text of an error, by which `export` recognises it

_DRAWS = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.bernoulli, torch.rand_like, torch.randn_like,
     torch.normal, Tensor.uniform_, Tensor.bernoulli_, Tensor.normal_, Tensor.random_}
)  # fmt: skip
_MARK = "_autopar_is_drawn"


def note_drawn(func: Callable[..., Any], args: Iterable[Any], result: Any) -> None:
    """Mark a scalar result that is random, or computed from a random one."""
    if not isinstance(result, Tensor) or any(type(n) is not int or n != 1 for n in result.shape):
        return
    if func in _DRAWS or any(_is_drawn(one) for one in args):
        setattr(result, _MARK, True)


def refuse_drawn(asked: Tensor) -> None:
    """Raise if a random number is used in a decision."""
    if _is_drawn(asked):
        raise RuntimeError(AT_RANDOM)


def _is_drawn(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, _MARK, False)
