"""Makes the page of `every_type`: counts by task, then what was refused or wrong, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TypeAlias

from tests.field.trial import Cell, ExitReason

CellKey: TypeAlias = tuple[str, str, str]  # task, type, kind of plan
NOT_MADE = "not made"
_LEAST_SHARE = 0.6
_OTHERS = (ExitReason.REFUSED, ExitReason.TOLD, ExitReason.WRONG)


def page(cells: Mapping[CellKey, Cell]) -> str:
    """Return the page as Markdown."""
    tasks = list(dict.fromkeys(task for task, _, _ in cells))
    kinds = list(dict.fromkeys(kind for _, _, kind in cells if kind != NOT_MADE))
    told = [
        "# Every model type of transformers, made tiny, and models of other libraries",
        "",
        f"Written by `benchmarks/every_type.py`: transformers {version('transformers')}, torch "
        f"{version('torch')}. Each script trains three steps in float64 on two processes and is "
        "equal where losses, gradients and parameters are those of one process (1e-9). In "
        "brackets: tensor plans that divide 60 % of the matmul FLOPs or more. `full`: every layer "
        "is recomputed, in models that keep their caches of keys and values. Not made are types "
        "that plain PyTorch does not train in the sizes tried, or not in the time of a trial. A "
        "task that is a library's name has the smallest model of each of its families, on small "
        "images.",
        "",
        f"| task | types | {' | '.join(f'{kind} equal' for kind in kinds)} | "
        "refused | told | wrong |",
        f"|---|--:|{'--:|' * len(kinds)}--:|--:|--:|",
        *(_row(task, cells, kinds) for task in tasks),
        *_reasons("Refused", cells, ExitReason.REFUSED),
        *_reasons("Told by `autopar plan`", cells, ExitReason.TOLD),
        *_reasons("Wrong", cells, ExitReason.WRONG),
        *_not_made(cells),
    ]
    return "\n".join(told) + "\n"


def _row(task: str, cells: Mapping[CellKey, Cell], kinds: Sequence[str]) -> str:
    own = {key: one for key, one in cells.items() if key[0] == task and key[2] != NOT_MADE}
    types = {key[1] for key in own}
    verdicts = [one.verdict for one in own.values()]
    counts = [_count([own[key] for key in own if key[2] == kind], of=len(types)) for kind in kinds]
    numbers = [len(types), *counts, *map(verdicts.count, _OTHERS)]
    return f"| {task} | {' | '.join(map(str, numbers))} |"


def _count(cells: Sequence[Cell], *, of: int) -> str:
    """Return the number of equal cells, such as "7 of 9 (3)" if only 9 of all types were tried.

    In 3 of the 7, tensor ranks divide at least _LEAST_SHARE of the matmul FLOPs.
    """
    if not cells:
        return "–"
    equal = [one for one in cells if one.verdict is ExitReason.EQUAL]
    shares = [one.divided for one in equal if one.divided is not None]
    divided = sum(share >= _LEAST_SHARE for share in shares)
    count = str(len(equal)) if len(cells) == of else f"{len(equal)} of {len(cells)}"
    return f"{count} ({divided})" if shares else count


def _reasons(title: str, cells: Mapping[CellKey, Cell], verdict: ExitReason) -> Iterator[str]:
    """Yield each reason once, with the types and kinds of plan that it applies to."""
    found = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for (task, kind, name), one in cells.items():
        if one.verdict is verdict and name != NOT_MADE:
            reason = " ".join(one.detail.split()).replace("|", "¦")
            found[reason][f"{kind} ({task})"].append(name)
    yield from ("", f"## {title}", "") if found else ()
    for reason, types in found.items():
        names = (f"{kind}: {', '.join(kinds)}" for kind, kinds in types.items())
        yield f"- {'; '.join(names)} — {reason}"


def _not_made(cells: Mapping[CellKey, Cell]) -> Iterator[str]:
    by_task = defaultdict[str, list[str]](list)
    for task, kind, name in cells:
        if name == NOT_MADE:
            by_task[task].append(kind)
    yield from ("", "## Not made", "") if by_task else ()
    for task, kinds in by_task.items():
        yield f"- {task}: {', '.join(kinds)}"
