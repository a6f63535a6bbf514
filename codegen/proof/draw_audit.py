"""Compares what the ranks of a script draw with what one process draws on the same rows.

numbers      over all ranks and microbatches, independent ones only, as many as in one process
sharing      no two modules, and no two data ranks, draw the same numbers
running again     a layer that is computed again draws what it drew before
seeding      numbers follow from the seed of the script
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.codegen.proof.draws import Draw

_KEEPING = "bernoulli_"  # how torch makes the mask of a dropout: by the chance to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """How many ranks each axis has; the tensor axis is the fastest, the pipeline the slowest."""

    pipeline: int
    data: int
    tensor: int
    microbatches: int = 1

    def named(self, ranks: Collection[int]) -> str:
        """Say which ranks some are, by the axes along which they differ."""
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
    """What is compared: the draws of one kind that one module makes."""

    module: str
    op: str
    settings: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.kind})"

    @property
    def kind(self) -> str:
        """The op as people call it, with its probability."""
        if self.op == _KEEPING and self.settings:
            return f"dropout, p {1 - self.settings[0]:.6g}"
        return " ".join((self.op.strip("_"), *(f"{one:.6g}" for one in self.settings)))


@dataclass(slots=True)
class _Drawn:
    """The numbers of a site by the state that they are drawn from, and who draws them."""

    numbers: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, set[int]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    @property
    def independent(self) -> int:
        return sum(self.numbers.values())


def draw_faults(
    ranks: Sequence[Sequence[Draw]], alone: Sequence[Draw], axes: Axes
) -> tuple[str, ...]:
    """Return what the ranks of a script draw otherwise than one process, a sentence each."""
    found = _sites(ranks)
    expected = _sites([alone])
    pairs = {site: site for site in expected.keys() & found.keys()}
    pairs |= _moved(found, expected)
    faults = [
        *_unseeded(ranks),
        *_not_again(ranks),
        *_lost(found, expected, pairs),
        *_otherwise(found, expected, pairs, axes),
        *_shared(found, expected, axes),
    ]
    return tuple(_joined(faults))


def drawn_otherwise_again(ranks: Sequence[Sequence[Draw]]) -> tuple[str, ...]:
    """Return which layers draw other numbers where they run again, a sentence each."""
    return tuple(_joined(_not_again(ranks)))


def _sites(ranks: Sequence[Sequence[Draw]]) -> dict[Site, _Drawn]:
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


def _moved(found: Mapping[Site, _Drawn], expected: Mapping[Site, _Drawn]) -> dict[Site, Site]:
    """Pair sites of one process with those of a script whose module's code stands in a caller's.

    The caller draws all that the modules inside it do, and where not, nothing is paired.
    """
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


def _unseeded(ranks: Sequence[Sequence[Draw]]) -> Iterator[tuple[str, str]]:
    draws = [draw for draws in ranks for draw in draws if not draw.is_seeded]
    if draws:
        at = next((f" at {one.place}" for one in draws if not one.seeds_a_split), "")
        yield "", f"nothing has seeded what is drawn{at}: the script's own seed_all is missing"


def _not_again(ranks: Sequence[Sequence[Draw]]) -> Iterator[tuple[str, str]]:
    for draws in ranks:
        first = {(draw.op, draw.state) for draw in draws if not draw.is_again}
        for draw in draws:
            if draw.seeds_a_split:  # what is drawn by its seed tells more
                continue
            if draw.is_again and (draw.op, draw.state) not in first:
                site = Site(draw.module, draw.op, draw.settings)
                text = f"draws another mask when it runs again in the backward, at {draw.place}"
                yield str(site), text


def _lost(
    found: Mapping[Site, _Drawn], expected: Mapping[Site, _Drawn], pairs: Mapping[Site, Site]
) -> Iterator[tuple[str, str]]:
    """Yield what only one of the two sides draws, or draws by another probability."""
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


def _otherwise(
    found: Mapping[Site, _Drawn],
    expected: Mapping[Site, _Drawn],
    pairs: Mapping[Site, Site],
    axes: Axes,
) -> Iterator[tuple[str, str]]:
    """Yield where more or fewer numbers are independent of each other than in one process."""
    for site, drawn in found.items():
        alone = [expected[one] for one, own in pairs.items() if own == site]
        whole = sum(one.independent for one in alone)
        if not alone or drawn.independent == whole or _for_all_rows(drawn, alone, axes):
            continue
        numbers = f"draws {drawn.independent:,} independent numbers, {whole:,} in one process"
        yield str(site), f"{numbers}: {_why(drawn, whole, axes)}"


def _why(drawn: _Drawn, whole: int, axes: Axes) -> str:
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


def _for_all_rows(drawn: _Drawn, alone: Sequence[_Drawn], axes: Axes) -> bool:
    """Whether each part of a batch draws for itself what one process draws once for all rows."""
    parts = axes.data * axes.microbatches
    each = drawn.independent == parts * sum(one.independent for one in alone)
    numbers = {count for one in alone for count in one.numbers.values()}
    return each and set(drawn.numbers.values()) == numbers


def _shared(
    found: Mapping[Site, _Drawn], expected: Mapping[Site, _Drawn], axes: Axes
) -> Iterator[tuple[str, str]]:
    """Yield modules that draw the same numbers, as no two of one process do."""
    before = {state for states in _repeated(expected).values() for state in states}
    for (first, second), states in _repeated(found).items():
        if states - before:
            state = min(states)
            ranks = found[first].ranks[state] | found[second].ranks[state]
            yield str(first), f"draws the same numbers as {second}, on {axes.named(ranks)}"


def _repeated(sites: Mapping[Site, _Drawn]) -> dict[tuple[Site, Site], set[str]]:
    first: dict[str, Site] = {}
    again: dict[tuple[Site, Site], set[str]] = defaultdict(set)
    for site, drawn in sites.items():
        for state in drawn.numbers:
            if first.setdefault(state, site) != site:
                again[first[state], site].add(state)
    return again


def _at(drawn: _Drawn) -> str:
    places = [place for place in drawn.places.values() if place]
    return f" at {places[0]}" if places else ""


def _joined(faults: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Say once what is wrong with modules that differ by their number alone."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for site, text in faults:
        path, mark, kind = site.partition(" (")
        alike[re.sub(r"\b\d+\b", "*", path) + mark + kind, text].append(site)
    for (pattern, text), sites in alike.items():
        names = dict.fromkeys(sites)
        name = next(iter(names)) if len(names) == 1 else f"{pattern} × {len(names)}"
        yield f"{name}: {text}" if name else text
