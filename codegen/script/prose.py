"""Writes what a script says of itself: how to run it, what it does, what was predicted, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from textwrap import wrap

from autopar.codegen.python_text import WIDTH, Source, prose
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.chosen import chosen
from autopar.planner.plan.telling.explanation import (
    MEMORY_CATEGORIES,
    TERM_PARTS,
    Part,
    simpler_words,
)
from autopar.planner.plan.telling.meaning import meaning_notes
from autopar.planner.plan.telling.words import (
    arrangement_words,
    nodes_words,
    other_words,
    recompute_words,
    unit_word,
    units_per_second,
)

_LEAST_SHARE = 0.01  # of a step or a device: less is left out


def docstring(plan: Plan, file_name: str, *notes: str) -> Source:
    """Return the docstring of a script; notes are told beside those of the plan."""
    paragraphs = (
        _title(plan),
        *([*_wrapped(f"Note: {note}")] for note in (*meaning_notes(plan), *notes)),
        _how_to_run(plan, file_name),
        _chosen(plan),
        _predicted(plan),
        _why(plan),
    )
    lines = [line for paragraph in paragraphs for line in [*paragraph, ""]]
    text = "\n".join(prose(line) for line in lines[:-1])
    return Source(f'"""{text}\n"""')


def _title(plan: Plan) -> Iterator[str]:
    machines = plan.machines
    devices = f"{machines.devices} devices" if machines.devices > 1 else "one device"
    yield from _wrapped(f"Train {plan.model.name} on {devices}.", width=WIDTH - 3)
    yield ""
    recompute = recompute_words(plan.stages)
    again = "" if recompute == "none" else f", recompute {recompute}"
    yield from _wrapped(f"The plan: {arrangement_words(plan.arrangement)}{again}.")


def _how_to_run(plan: Plan, file_name: str) -> Iterator[str]:
    ranks, nodes = plan.arrangement.ranks, plan.machines.nodes
    if nodes == 1:
        yield "Run it on one node (its options: --help):"
        yield f"    torchrun --nproc-per-node {ranks} {file_name}"
    nodes = max(nodes, 2)
    if ranks % nodes == 0:
        on = "Or on" if plan.machines.nodes == 1 else "Run it on each of"
        yield f"{on} {nodes} nodes; HOST is the first one's address, NODE 0 to {nodes - 1}:"
        places = f"--nnodes {nodes} --nproc-per-node {ranks // nodes} --node-rank NODE"
        yield f"    torchrun {places} --master-addr HOST {file_name}"
    elif plan.machines.nodes > 1:
        yield f"Run it on each of {nodes} nodes, NODE from 0 as told below; HOST is the first"
        yield f"one's address, DEVICES how many a node has, {ranks} on all together:"
        places = f"--nnodes {nodes} --nproc-per-node DEVICES --node-rank NODE"
        yield f"    torchrun {places} --master-addr HOST {file_name}"
    if not plan.cluster.has_equal_nodes:
        yield from _wrapped(f"Nodes are unlike, and NODE says which is which: {nodes_words(plan)}.")


def _chosen(plan: Plan) -> Iterator[str]:
    yield from _wrapped(f"Chosen here, as nobody said: {'; '.join(chosen(plan))}.")


def _predicted(plan: Plan) -> Iterator[str]:
    found, machines = plan.prediction, plan.machines
    rate = units_per_second(plan.arrangement, plan.model, found.step_seconds)
    yield from _wrapped(
        f"Predicted on {machines.devices} × {machines.device}: {seconds_text(found.step_seconds)} "
        f"per step, {rate:,.0f} {unit_word(plan.model)}/s, {found.mfu:.1%} of the peak FLOPs"
    )
    terms = ((term.name, term.seconds) for term in found.terms)
    yield from _shares(terms, found.step_seconds, seconds_text)
    shown = [one for one in found.communication if one.seconds > 0]
    if shown:
        yield "Communication of the busiest rank in a step:"
    for one in shown:
        times = f"{one.count:,} × {one.collective} " if one.count else ""
        size = f"{bytes_text(one.payload_bytes)}, " if one.payload_bytes else ""
        waits = f"waits {seconds_text(one.exposed_seconds)}" if one.exposed_seconds else "hidden"
        took = f"{size}{seconds_text(one.seconds)}, {waits}"
        yield from _wrapped(f"{one.reason}: {times}over {one.ranks} ranks, {took}", indent=4)
    rank, memory = plan.fullest
    limit = plan.limit_bytes(rank)
    yield (
        f"Memory of the fullest device: {bytes_text(memory.device_bytes)} "
        f"of {bytes_text(limit)} ({memory.device_bytes / limit:.0%})"
    )
    sizes = ((name, getattr(memory, field)) for name, field in MEMORY_CATEGORIES)
    yield from _shares(sizes, memory.device_bytes, bytes_text)


def _shares(
    parts: Iterable[tuple[str, float]], whole: float, text: Callable[[float], str]
) -> Iterator[str]:
    """Yield what a whole is made of, the smallest parts left out."""
    told = [f"{name} {text(part)}" for name, part in parts if part >= _LEAST_SHARE * whole]
    yield from _wrapped(", ".join(told), indent=4)


def _why(plan: Plan) -> Iterator[str]:
    proof, found = plan.proof, plan.prediction
    parts: dict[Part, float] = dict.fromkeys(Part, 0.0)
    for term in found.terms:
        parts[TERM_PARTS.get(term.name, Part.OVERHEAD)] += term.seconds
    most = max(parts, key=lambda part: parts[part])
    fastest = found.step_seconds if plan.fastest is None else plan.fastest.step_seconds
    than = "" if plan.fastest is None else f" than {seconds_text(fastest)}"
    by = "" if proof.gap <= 0 else f" by over {proof.gap:.2%}"
    certainty = f"none is faster{than}{by}"
    yield from _wrapped(
        f"Why this plan: {_ways(proof.enumerated)} {certainty}; "
        f"{most} takes {parts[most] / found.step_seconds:.0%} of its step."
    )
    if plan.fastest is not None:
        yield from _wrapped(f"{simpler_words(plan)}.")
    for other in plan.runners_up[:1]:
        slower = other.step_seconds / found.step_seconds - 1
        yield from _wrapped(
            f"The next best, {other_words(other.arrangement, plan.arrangement)}, takes "
            f"{seconds_text(other.step_seconds)} ({slower:+.1%}): {other.difference}."
        )


def _ways(count: int) -> str:
    return f"of {count:,} ways to arrange the training" if count > 1 else "as pinned,"


def _wrapped(text: str, *, indent: int = 0, width: int = WIDTH) -> list[str]:
    margin = " " * indent
    tied = _FIGURE.sub("\\1\N{NO-BREAK SPACE}\\2", text)  # a figure and its unit stay together
    lines = wrap(tied, width, initial_indent=margin, subsequent_indent=margin + margin[:2])
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


_FIGURE = re.compile(r"(\d) ([num]?s|[KMGTP]?i?B)\b")
