"""Records the random numbers of a training, and compares trainings by them.

Equal generator states give equal numbers, so states are compared in place of numbers. The checks:
a script draws as many independent numbers as one process; its modules share numbers only if modules
of one process do; a recomputed layer draws the same numbers again; the script seeds all draws.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.ranks import randomness

_OUR_FILES = str(Path(__file__).parent)
_SKIPPED = (str(Path(torch.__file__).parent), _OUR_FILES, "<")  # files that are not the model's
_SEEDING = "seeding"


@dataclass(frozen=True, slots=True)
class NotedDraw:
    """A random op that ran: where it did, what it drew, and from which state of its generator."""

    module: str  # the path of the module whose code draws
    place: str  # the line of the script or the model, "train.py:121"
    op: str
    settings: tuple[float, ...]  # the op's own numbers: a probability, a mean, a deviation
    numbers: int
    state: str
    is_again: bool  # in a backward that recomputes a layer
    is_seeded: bool  # the script has seeded its generator

    @property
    def seeds_a_split(self) -> bool:
        """Whether the number is a seed, drawn by `split_randomness`."""
        return self.op == _SEEDING


class DrawRecorder(TorchDispatchMode):
    """Records every op that advances a generator, in the forward and in recomputation.

    `unseeded` is the generators' seed before the script sets one.
    """

    def __init__(self, unseeded: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unseeded = unseeded
        self.seen: list[tuple[nn.Module | None, NotedDraw]] = []  # with the module whose code draws

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op without Python function modes, and record what it drew."""
        del types
        with torch._C.DisableTorchFunction():
            return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or _generator_of(args, kwargs)
        seed, before = generator.initial_seed(), _state_of(generator)
        made = func(*args, **kwargs)
        if _state_of(generator) != before:
            is_seeded = seed != self.unseeded
            self._note(func, settings_of(func, args, kwargs), made, before, is_seeded=is_seeded)
        return made

    def _note(
        self, func: Any, settings: tuple[float, ...], made: Any, state: str, *, is_seeded: bool
    ) -> None:
        module, place = _origin()
        draw = NotedDraw(
            module="",
            place=place,
            op=_SEEDING if place.startswith(_SEEDING) else func.name().split("::")[1].split(".")[0],
            settings=settings,
            numbers=max(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor)),
            state=state,
            is_again=torch._C._current_graph_task_id() != -1,
            is_seeded=is_seeded,
        )
        self.seen.append((module, draw))

    def draws(self, parts: Iterable[nn.Module]) -> tuple[NotedDraw, ...]:
        """Return the recorded draws; modules are named by their paths in these parts of a model."""
        names: dict[int, str] = {}
        for part in parts:
            for name, module in part.named_modules():
                names.setdefault(id(module), name)
        return tuple(
            draw
            if module is None
            else replace(draw, module=names.get(id(module), type(module).__name__))
            for module, draw in self.seen
        )


def settings_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the float arguments of an op, including defaults."""
    rest = func._schema.arguments[len(args) :]
    given = (*args, *(kwargs.get(one.name, one.default_value) for one in rest))
    return tuple(one for one in given if isinstance(one, float))


def _generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the generator of an op's device."""
    tensors = [one.device for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    device = torch.device((*tensors, kwargs.get("device") or "cpu")[0])
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _state_of(generator: torch.Generator) -> str:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()


def _origin() -> tuple[nn.Module | None, str]:
    """Return the innermost running module, and the innermost line of the model or script."""
    place, module = "", None
    for frame, line in walk_stack(sys._getframe()):
        file = frame.f_code.co_filename
        if not place and not file.startswith(_SKIPPED) and "contextlib" not in file:
            is_seeding = file == randomness.__file__
            place = _SEEDING if is_seeding else f"{Path(file).name}:{line}"
        if module is None and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            module = first if isinstance(first, nn.Module) else None
        if place and module is not None:
            break
    return module, place


_DROPOUT_MASK = "bernoulli_"  # makes a dropout's mask from the probability to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSizes:
    """How many ranks each axis has. Neighbouring ranks differ on the tensor axis."""

    pipeline: int
    data: int
    tensor: int
    microbatches: int = 1

    def named(self, ranks: Collection[int]) -> str:
        """Describe ranks by the axes along which they differ."""
        places = [
            (r // self.tensor // self.data, r // self.tensor % self.data, r % self.tensor)
            for r in ranks
        ]
        along = zip(("pipeline", "data", "tensor"), zip(*places, strict=True), strict=True)
        apart = [name for name, seen in along if len(set(seen)) > 1]
        axis = f" of the {' and the '.join(apart)} axis" if apart else ""
        return f"ranks {', '.join(map(str, sorted(ranks)))}{axis}"


@dataclass(frozen=True, slots=True)
class Site:
    """A module and the kind of its draws; draws are compared site by site."""

    module: str
    op: str
    settings: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.kind})"

    @property
    def kind(self) -> str:
        """The op's usual name, with its probability."""
        if self.op == _DROPOUT_MASK and self.settings:
            return f"dropout, p {1 - self.settings[0]:.6g}"
        return " ".join((self.op.strip("_"), *(f"{one:.6g}" for one in self.settings)))


@dataclass(slots=True)
class _Drawn:
    """How many numbers a site draws from each generator state, and on which ranks."""

    numbers: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, set[int]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    @property
    def independent(self) -> int:
        return sum(self.numbers.values())


def draw_faults(
    ranks: Sequence[Sequence[NotedDraw]], alone: Sequence[NotedDraw], axes: AxisSizes
) -> tuple[str, ...]:
    """Return a sentence for each difference between a script's draws and one process's."""
    found = _sites(ranks)
    expected = _sites([alone])
    pairs = {site: site for site in expected.keys() & found.keys()}
    pairs |= _inlined(found, expected)
    faults = [
        *_unseeded(ranks),
        *_drawn_differently(ranks),
        *_on_one_side(found, expected, pairs),
        *_miscounted(found, expected, pairs, axes),
        *_shared(found, expected, axes),
    ]
    return tuple(_joined(faults))


def recompute_draw_faults(ranks: Sequence[Sequence[NotedDraw]]) -> tuple[str, ...]:
    """Return a sentence for each layer that draws other numbers when it is recomputed."""
    return tuple(_joined(_drawn_differently(ranks)))


def _sites(ranks: Sequence[Sequence[NotedDraw]]) -> dict[Site, _Drawn]:
    sites: dict[Site, _Drawn] = defaultdict(_Drawn)
    for rank, draws in enumerate(ranks):
        for draw in draws:
            if draw.is_again or draw.seeds_a_split:
                continue
            drawn = sites[Site(draw.module, draw.op, draw.settings)]
            drawn.numbers[draw.state] = max(draw.numbers, drawn.numbers.get(draw.state, 0))
            drawn.ranks.setdefault(draw.state, set()).add(rank)
            drawn.places[draw.state] = draw.place
    return dict(sites)


def _inlined(found: Mapping[Site, _Drawn], expected: Mapping[Site, _Drawn]) -> dict[Site, Site]:
    """Pair the sites of inlined modules with the site of the caller that contains their code."""
    pairs: dict[Site, Site] = {}
    for own, drawn in found.items():
        inside = [
            site
            for site in expected.keys() - found.keys()
            if (site.op, site.settings) == (own.op, own.settings)
            and (not own.module or site.module.startswith(f"{own.module}."))
        ]
        itself = expected[own].independent if own in expected else 0
        if itself + sum(expected[site].independent for site in inside) == drawn.independent:
            pairs |= dict.fromkeys(inside, own)
    return pairs


def _unseeded(ranks: Sequence[Sequence[NotedDraw]]) -> Iterator[tuple[str, str]]:
    draws = [draw for draws in ranks for draw in draws if not draw.is_seeded]
    if draws:
        at = next((f" at {one.place}" for one in draws if not one.seeds_a_split), "")
        yield "", f"nothing has seeded what is drawn{at}: the script's own seed_all is missing"


def _drawn_differently(ranks: Sequence[Sequence[NotedDraw]]) -> Iterator[tuple[str, str]]:
    for draws in ranks:
        first = {(draw.op, draw.state) for draw in draws if not draw.is_again}
        for draw in draws:
            known = draw.seeds_a_split or (draw.op, draw.state) in first  # seeds may differ
            if draw.is_again and not known:
                site = Site(draw.module, draw.op, draw.settings)
                text = f"draws another mask when it runs again in the backward, at {draw.place}"
                yield str(site), text


def _on_one_side(
    found: Mapping[Site, _Drawn], expected: Mapping[Site, _Drawn], pairs: Mapping[Site, Site]
) -> Iterator[tuple[str, str]]:
    """Yield sites that draw only in the script or only in one process, or with other settings."""
    rest = [site for site in found if site not in pairs.values()]
    for site, drawn in expected.items():
        if site in pairs:
            continue
        others = [one for one in rest if (one.module, one.op) == (site.module, site.op)]
        if others:
            rest.remove(others[0])
            yield str(site), f"the script has {others[0].kind} there{_at(found[others[0]])}"
        else:
            numbers = f"{drawn.independent:,}"
            yield str(site), f"one process draws {numbers} numbers{_at(drawn)}, the script none"
    for site in rest:
        numbers = f"{found[site].independent:,}"
        yield str(site), f"the script draws {numbers} numbers{_at(found[site])}, one process none"


def _miscounted(
    found: Mapping[Site, _Drawn],
    expected: Mapping[Site, _Drawn],
    pairs: Mapping[Site, Site],
    axes: AxisSizes,
) -> Iterator[tuple[str, str]]:
    """Yield sites with more or fewer independent numbers than in one process."""
    for site, drawn in found.items():
        alone = [expected[one] for one, own in pairs.items() if own == site]
        whole = sum(one.independent for one in alone)
        if not alone or drawn.independent == whole or _for_all_rows(drawn, alone, axes):
            continue
        numbers = f"draws {drawn.independent:,} independent numbers, {whole:,} in one process"
        yield str(site), f"{numbers}: {_why(drawn, whole, axes)}"


def _why(drawn: _Drawn, whole: int, axes: AxisSizes) -> str:
    if drawn.independent > whole:
        return f"ranks draw different masks for the same elements{_at(drawn)}"
    for state, ranks in drawn.ranks.items():
        if len({rank // axes.tensor for rank in ranks}) > 1:
            return f"{axes.named(ranks)} share a mask at {drawn.places[state]}"
    repeated: dict[str, int] = defaultdict(int)
    for state, ranks in drawn.ranks.items():
        repeated[drawn.places[state]] += drawn.numbers[state] * (len(ranks) - 1)
    for place, numbers in repeated.items():
        if drawn.independent + numbers == whole:
            states = [state for state in drawn.ranks if drawn.places[state] == place]
            sharers = axes.named(max((drawn.ranks[state] for state in states), key=len))
            return f"{sharers} share a mask at {place}"
    return f"a mask is missing, or shared by elements{_at(drawn)}"


def _for_all_rows(drawn: _Drawn, alone: Sequence[_Drawn], axes: AxisSizes) -> bool:
    """Whether parts of a batch draw separately what one process draws once for all rows."""
    parts = axes.data * axes.microbatches
    is_repeated = drawn.independent == parts * sum(one.independent for one in alone)
    numbers = {count for one in alone for count in one.numbers.values()}
    return is_repeated and set(drawn.numbers.values()) == numbers


def _shared(
    found: Mapping[Site, _Drawn], expected: Mapping[Site, _Drawn], axes: AxisSizes
) -> Iterator[tuple[str, str]]:
    """Yield pairs of modules that draw equal numbers, which no two modules do in one process."""
    before = {state for states in _repeated(expected).values() for state in states}
    for (first, second), states in _repeated(found).items():
        if only_here := states - before:
            state = min(only_here)
            ranks = found[first].ranks[state] | found[second].ranks[state]
            yield str(first), f"draws the same numbers as {second}, on {axes.named(ranks)}"


def _repeated(sites: Mapping[Site, _Drawn]) -> dict[tuple[Site, Site], set[str]]:
    first, again = dict[str, Site](), defaultdict[tuple[Site, Site], set[str]](set)
    for site, drawn in sites.items():
        for state in drawn.numbers:
            if first.setdefault(state, site) != site:
                again[first[state], site].add(state)
    return again


def _at(drawn: _Drawn) -> str:
    place = next(filter(None, drawn.places.values()), "")
    return f" at {place}" if place else ""


def _joined(faults: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Combine the faults of modules that differ only by their numbers."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for site, text in faults:
        path, mark, kind = site.partition(" (")
        alike[re.sub(r"\b\d+\b", "*", path) + mark + kind, text].append(site)
    for (pattern, text), sites in alike.items():
        names = dict.fromkeys(sites)
        name = next(iter(names)) if len(names) == 1 else f"{pattern} × {len(names)}"
        yield f"{name}: {text}" if name else text
