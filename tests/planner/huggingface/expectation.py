"""What an axis of a parameter is called, and when a printed structure says just that.

A structure is text: axis names joined by `·` for a product (outermost first), `[a | b]` for a
concatenation, an integer for an axis of that size that has no name. Products and concatenations
are compared strictly. All leniency is in this file: `NAMES` and `NUMBERING` for what people may
call the same axis, `EQUAL_WRITINGS` for two ways to write the same structure.
"""

import re
from dataclasses import dataclass

ANY_NAME = r"[A-Za-z0-9_.]+"
NAMES = {
    "channels": "channels|embed",  # the residual stream of a convolutional net has both names
    "inner": "inner|ffn|channels",  # Mamba's wide axis is all three to different people
    "rank": ANY_NAME,  # these three have no name that everybody uses
    "state": ANY_NAME,
    "projection": ANY_NAME,
}
NUMBERING = r"(?:[._]?[0-9]+)?"  # tells apart axes of one name: embed, embed2, embed.2, embed_2

EQUAL_WRITINGS = {
    # a concatenation times an axis is the concatenation of the products
    "[heads | 1 | 1]·head_dim": "[heads·head_dim | head_dim | head_dim]",
    "kv_heads·[group | 1 | 1]·head_dim": "kv_heads·[group·head_dim | head_dim | head_dim]",
    # n times an axis is n of them side by side
    "heads·3·head_dim": "heads·[head_dim | head_dim | head_dim]",
    "heads·[head_dim | head_dim | head_dim]": "heads·3·head_dim",
    "[embed | embed | embed | embed]": "4·embed",
}

NAME_IN_STRUCTURE = re.compile(r"[a-z_]+(?:\.[0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The structure of one dim of one parameter, read from the modelling code."""

    parameter: str
    dim: int
    structure: str


def accepts(expectation: Expectation, printed: str) -> bool:
    """Says whether the printed structure is the expected one."""
    writings = (expectation.structure, EQUAL_WRITINGS.get(expectation.structure))
    return any(pattern_of(writing).fullmatch(printed) for writing in writings if writing)


def pattern_of(structure: str) -> re.Pattern[str]:
    """Turns a structure into a pattern in which equal names must be printed equal.

    A name that ends in a number (`channels.2`) may be another axis than the name without.
    """
    seen: dict[str, str] = {}
    pieces: list[str] = []
    end = 0
    for match in NAME_IN_STRUCTURE.finditer(structure):
        pieces.append(re.escape(structure[end : match.start()]))
        pieces.append(_pattern_of_name(match.group(), seen))
        end = match.end()
    return re.compile("".join(pieces) + re.escape(structure[end:]))


def _pattern_of_name(name: str, seen: dict[str, str]) -> str:
    if name in seen:
        return f"(?P={seen[name]})"
    seen[name] = f"axis{len(seen)}"
    base = name.split(".")[0]
    return f"(?P<{seen[name]}>(?:{NAMES.get(base, base)}){NUMBERING})"


def weight(module: str, *structures: str) -> tuple[Expectation, ...]:
    """Expects the first dims of the module's weight to have these structures."""
    return dims(f"{module}.weight", *structures)


def biased(module: str, *structures: str) -> tuple[Expectation, ...]:
    """Expects the same of the weight, and of the bias what the weight's dim 0 has."""
    return weight(module, *structures) + dims(f"{module}.bias", structures[0])


def dims(parameter: str, *structures: str) -> tuple[Expectation, ...]:
    """Expects the first dims of the parameter to have these structures."""
    return tuple(
        Expectation(parameter=parameter, dim=dim, structure=structure)
        for dim, structure in enumerate(structures)
    )


def one(parameter: str, dim: int, structure: str) -> tuple[Expectation, ...]:
    """Expects one dim of the parameter to have this structure, and nothing of its other dims."""
    return (Expectation(parameter=parameter, dim=dim, structure=structure),)


def each(prefix: str, count: int, *groups: tuple[Expectation, ...]) -> tuple[Expectation, ...]:
    """Repeats the expectations below `prefix.0` … `prefix.(count − 1)`."""
    return tuple(
        Expectation(
            parameter=f"{prefix}.{index}.{expected.parameter}",
            dim=expected.dim,
            structure=expected.structure,
        )
        for index in range(count)
        for group in groups
        for expected in group
    )
