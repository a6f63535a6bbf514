"""How printed code of a module reaches what the module holds: children, parameters, settings."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.codegen.forward.opening.changes import argument
from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS
from autopar.codegen.forward.reading.modules import Container
from autopar.codegen.forward.reading.split import Split
from autopar.codegen.forward.text.expressions import Form, text
from autopar.codegen.forward.text.identifiers import is_identifier, string
from autopar.planner.errors import InputError
from autopar.planner.graph import Graph
from autopar.planner.ops import Call, Op, Origin
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of


class NeedsInlineError(Exception):
    """A call cannot be printed as a call: its code must stand in its caller's."""

    def __init__(self, key: str, record: Call, *, reason: str = "") -> None:
        super().__init__(key)
        self.key, self.record, self.reason = key, record, reason

    @staticmethod
    def for_module(path: str, scope: str, graph: Graph) -> NeedsInlineError:
        """Return which call hides a module from code: its own, whose module does not hold it."""
        return NeedsInlineError._for(scope, f"module {path}", graph)

    @staticmethod
    def for_tensor(tensor: str, scope: str, opening: Opening) -> NeedsInlineError:
        """Return which call hides a tensor from the code of a call."""
        tree = opening.tree
        maker = tree.graph.index.made_by.get(tensor)
        chain = tree.chain(maker) if maker is not None else ()
        key = scope
        if scope in chain:
            below = chain[chain.index(scope) + 1 :]
            key = next((c for c in below if c not in opening.inlined), LOSS)
        return NeedsInlineError._for(key, tensor, tree.graph)

    @staticmethod
    def _for(key: str, what: str, graph: Graph) -> NeedsInlineError:
        if key == LOSS or not key:
            raise InputError(f"{what} is not at hand where the code of the model needs it")
        return NeedsInlineError(key, graph.calls[key])


class Owner:
    """The module whose code is printed, under the name `self`."""

    def __init__(self, split: Split, path: str) -> None:
        self.split, self.root = split, path

    def path(self, path: str) -> Form:
        """Return the expression for a module inside this one."""
        return text(f"self{self.steps(path)}")

    def steps(self, path: str) -> str:
        """Return how a module inside this one is reached from it."""
        path = self.within(path) or path
        inside = path.removeprefix(self.root).removeprefix(".")
        at, steps = self.root, ""
        for name in inside.split(".") if inside else ():
            module = self.split.modules.get(at)
            container = module.container if module is not None else Container.ATTRIBUTE
            if container is Container.INDEX and name.isdigit():
                steps += f"[{int(name)}]"
            elif container is Container.KEY:
                steps += f"[{string(name)}]"
            elif is_identifier(name):
                steps += f".{name}"
            else:
                steps += f".get_submodule({string(name)})"
            at = f"{at}.{name}" if at else name
        return steps

    def within(self, path: str) -> str | None:
        """Return by which of its paths a module is reached from this one; None if it is not."""
        modules = self.split.modules
        if path == self.root or self.holds(path) or path not in modules:
            return path
        first = modules[path].first
        return next((p for p in modules if modules[p].first == first and self.holds(p)), None)

    def holds(self, name: str) -> bool:
        """Whether a parameter or buffer lies in this module."""
        return not self.root or name.startswith(f"{self.root}.")

    def tensor(self, name: str, op: Op | None) -> Form | None:
        """Return a parameter or buffer as this module reaches it, None where another holds it."""
        is_lifted = name.rpartition(".")[2].startswith("lifted_tensor")
        if is_lifted and self.split.graph.tensors[name].origin is Origin.CONSTANT:
            raise InputError(
                "the code of a forward that makes a tensor of many numbers has to be printed",
                where=op.location if op is not None else "",
                expected="at most 64 numbers, or a tensor that the module holds",
                fix='make it in __init__: self.register_buffer("table", …, persistent=False)',
            )
        best = self.name_near(name, op)
        if not self.holds(best):
            return None
        owner, _, leaf = best.rpartition(".")
        if not is_identifier(leaf):
            return text(f"self.get_parameter({string(best.removeprefix(self.root).strip('.'))})")
        return text(f"self{self.steps(owner)}.{leaf}")

    def name_near(self, name: str, op: Op | None) -> str:
        """Return the name of a parameter, tied ones having several, in or near an op's module."""
        graph = self.split.graph
        tied = next((p for p in graph.parameters if p.name == name), None)
        names = (name, *tied.aliases) if tied is not None else (name,)
        near = "" if op is None or op.call == LOSS else graph.calls[op.call].path
        usable = [n for n in names if self.holds(n)]
        return next((n for n in usable if near and n.startswith(f"{near}.")), (*usable, name)[0])

    def training(self, op: Op) -> Form:
        """Return whether the module trains, as its code asks it; no loss and no weights do."""
        is_always = kind_of(op) is OpKind.BATCH_NORM and op.argument("running_mean") is None
        if op.call == LOSS or is_always:
            return text("True")
        path, modules = self.split.graph.calls[op.call].path, self.split.modules
        is_alike = path not in modules or modules[path].trains == modules[self.root].trains
        return text("self.training") if is_alike else text(f"self{self.steps(path)}.training")

    def rate(self, op: Op) -> Form | None:
        """Return the module's own name for the dropout rate of an op, where it has one."""
        rate = next(
            (v for v in (argument(op, "p"), argument(op, "dropout_p")) if v is not None), None
        )
        name = self._number(op, "drop", rate) or self._number(op, "p", rate, exact=True)
        return text(name) if name is not None else None

    def scale(self, op: Op) -> Form | None:
        """Return the module's own name for the factor of an attention's scores, if it has one."""
        name = self._number(op, "scal", argument(op, "scale"))
        return text(name) if name is not None else None

    def _number(self, op: Op, word: str, value: object, *, exact: bool = False) -> str | None:
        if op.call == LOSS or value is None:
            return None
        path = self.split.graph.calls[op.call].path
        module = self.split.modules.get(path)
        for name, number in module.numbers if module is not None else ():
            if number == value and (name == word if exact else word in name):
                return f"self{self.steps(path)}.{name}"
        return None

    def parameter_fact(self, what: str, ops: Iterable[Op]) -> Form | None:
        """Return the type or device of a parameter of this module, by preference one that ops read.

        A stage holds no others.
        """
        read = {name for op in ops for name in op.inputs}
        parameters = self.split.graph.parameters
        for parameter in sorted(parameters, key=lambda one: one.name not in read):
            for name in (parameter.name, *parameter.aliases):
                owner, _, leaf = name.rpartition(".")
                if self.holds(name) and is_identifier(leaf):
                    return text(f"self{self.steps(owner)}.{leaf}.{what}")
        return None
