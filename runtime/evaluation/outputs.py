"""Turns what the code of a script has at hand into outputs as the model itself returns them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NoReturn

from torch.utils._pytree import tree_iter

from autopar.runtime.ranks.refusal import refuse


class Outputs(dict[str, Any]):
    """A dataclass, or what a model of a library returns.

    An entry is found by its name, as an attribute, and by its place among those that are not None.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the outputs have no {name}, but {', '.join(self)}")

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return [value for value in self.values() if value is not None][key]


def named_outputs(**values: Any) -> Any:
    """Return a namedtuple with the names and values of the model's own."""
    return namedtuple("NamedOutputs", values)(**values)


class Absent:
    """Stands where the code of a script has nothing of what the model returns.

    That is what the loss does not depend on, or an object that no trace sees into. Metrics that use
    it end the script with a message.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def _leave(self, *_: Any, **__: Any) -> NoReturn:
        refuse(
            f"metrics() of the model file uses {self._place}, which this script does not compute: "
            "its code has what the loss depends on, where the loss is computed",
            fix="compute it in metrics() from the other outputs, or plan without tensor and "
            "pipeline ranks (--pin tp=1 --pin pp=1)",
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._leave(name)

    @classmethod
    def __torch_function__(cls, *given: Any, **_: Any) -> NoReturn:
        """Leave where torch is given what is absent."""
        next(one for one in tree_iter(given) if isinstance(one, cls))._leave()


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "neg", "abs",
    "getitem", "iter", "len", "bool", "float", "int", "call",
):  # fmt: skip
    setattr(Absent, f"__{_name}__", Absent._leave)
