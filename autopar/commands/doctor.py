"""`autopar doctor`: checks what autopar needs on this machine, and says how to get it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated

import typer

import autopar
from autopar.commands import AS_JSON
from autopar.console import print_json, results
from autopar.planner.errors import AutoparError, ExitCode

# The examined packages are imported in the functions, because --help and --version do not need
# them.
LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 11)
TRIED_TORCH = (2, 15)  # the latest version that the tests have run with


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPart:
    """A part that was examined, and what was found; `fix` is advice, even if nothing is missing."""

    name: str
    found: str
    is_fine: bool = True
    fix: str = ""


def _versions(wanted: bool) -> None:
    if wanted:
        print(f"autopar {autopar.__version__}, Python {platform.python_version()}", end="")
        print(f", torch {version('torch')}")
        raise typer.Exit


def doctor(
    as_json: AS_JSON = False,
    versions: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_versions,
            is_eager=True,
            help="Print the versions of autopar, Python and torch.",
        ),
    ] = False,
) -> None:
    """Check Python, torch, devices, process groups, solver and cache; exit with 1 if one fails.

    Example: autopar doctor
    """
    from autopar.pages.plan_page import plain_table

    del versions  # printed before
    findings = list(examine())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = plain_table(
            f"autopar {autopar.__version__} on this machine", "", "part", "found", left=3
        )
        table.show_header = False
        for one in findings:
            table.add_row("ok" if one.is_fine else "missing", one.name, one.found)
        results().print(table)
        for one in findings:
            if one.fix:
                results().print(f"{one.name}: {one.fix}")
    if not all(finding.is_fine for finding in findings):
        raise typer.Exit(ExitCode.NEGATIVE)


def examine() -> Iterator[CheckedPart]:
    """Examine this machine, and yield the findings."""
    yield CheckedPart(
        name="Python",
        found=f"{platform.python_version()} ({sys.executable})",
        is_fine=sys.version_info >= LEAST_PYTHON,
        fix="" if sys.version_info >= LEAST_PYTHON else "install Python 3.11 or later",
    )
    yield _torch()
    yield _devices()
    yield _process_groups()
    yield _solver()
    yield _cache()


def _cache() -> CheckedPart:
    """Return the cache's folder, and the number and size of the entries in it."""
    from autopar.planner.cluster.toml_reading import bytes_text
    from autopar.planner.plan.files.cache import MOST_BYTES, PLACE, cache_folder, cached_sizes

    folder = cache_folder()
    if folder is None:
        return CheckedPart(name="cache", found=f"none, as {PLACE} is empty")
    sizes = cached_sizes(folder)
    entries = "1 entry" if len(sizes) == 1 else f"{len(sizes)} entries"
    found = f"{entries}, {bytes_text(sum(sizes.values()))} of {bytes_text(MOST_BYTES)} in {folder}"
    return CheckedPart(name="cache", found=found)


def _torch() -> CheckedPart:
    import torch

    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return CheckedPart(
        name="torch",
        found=f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
        is_fine=number >= LEAST_TORCH,
        fix=_advice(number),
    )


def _advice(number: tuple[int, ...]) -> str:
    """Return advice about a version of torch, or "" if everything works with it."""
    from autopar.runtime.pipeline.torch_stage import PIPELINED_TORCH

    least, pipelined, tried = (
        ".".join(map(str, known)) for known in (LEAST_TORCH, PIPELINED_TORCH, TRIED_TORCH)
    )
    if number < LEAST_TORCH:
        return f"pip install 'torch>={least}'"
    if number < PIPELINED_TORCH:
        return f"pipelines need {pipelined} or later; everything else works with this one"
    if number > TRIED_TORCH:
        return f"newer than {tried}, the last that autopar was tried with: verify scripts first"
    return ""


def _devices() -> CheckedPart:
    import torch

    from autopar.planner.cluster.toml_reading import bytes_text

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return CheckedPart(
            name="GPUs",
            found="none",
            fix="plans for other machines need none (--gpus 8 --device h100-sxm); scripts run here "
            "on CPU processes",
        )
    kinds = [torch.cuda.get_device_properties(place) for place in range(count)]
    names = ", ".join(dict.fromkeys(f"{one.name} {bytes_text(one.total_memory)}" for one in kinds))
    return CheckedPart(name="GPUs", found=f"{count} × {names}")


def _process_groups() -> CheckedPart:
    import torch
    import torch.distributed as dist

    needed = {"gloo": dist.is_gloo_available()}
    if torch.cuda.is_available():
        needed["nccl"] = dist.is_nccl_available()
    missing = [name for name, is_there in needed.items() if not is_there]
    return CheckedPart(
        name="process groups",
        found=", ".join(name for name in needed if name not in missing) or "none",
        is_fine=not missing,
        fix=f"install a build of torch with {' and '.join(missing)}" if missing else "",
    )


def _solver() -> CheckedPart:
    """Solve a program of one variable; return the solver, and whether it worked."""
    import pulp

    from autopar.planner.programs.solver import Solved, default_solver, new_program, solve

    program = new_program("doctor")
    one = pulp.LpVariable("one", lowBound=1, cat="Integer")
    program += one
    try:
        is_fine = isinstance(solve(program, most_nodes=100), Solved)
    except AutoparError:
        is_fine = False
    return CheckedPart(
        name="solver",
        found=f"{default_solver()} through PuLP {pulp.VERSION}",
        is_fine=is_fine,
        fix="" if is_fine else "pip install highspy",
    )
