"""What an idiom is, and what becomes of it under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

WAYS = ("dp", "ZeRO-3", "tp", "pp")


class ExitReason(StrEnum):
    """What becomes of a cell."""

    EQUAL = "equal"  # to the loop of one device, to 1e-5 in fp32
    REFUSED = "refused"  # by `autopar plan`, or by the script at its start
    TOLD = "told"  # by `autopar plan`: what the script trains otherwise than one device


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, and a part of the message where it is not equal."""

    verdict: ExitReason
    message: str = ""


EQUAL = Outcome(ExitReason.EQUAL)


def refused(message: str) -> Outcome:
    """Return that an idiom is refused, with a message that says so."""
    return Outcome(ExitReason.REFUSED, message)


def noted(message: str) -> Outcome:
    """Return that `autopar plan` notes what a script trains instead."""
    return Outcome(ExitReason.TOLD, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idiom:
    """A few lines that people write: the text that a model file has beside its base.

    `otherwise` are the ways in which it is not equal. Adaptive optimizers make much of gradients
    that are all rounding, so weights are compared where `compares_weights`.
    """

    text: str
    otherwise: Mapping[str, Outcome] = field(default_factory=lambda: MappingProxyType({}))
    compares_weights: bool = True
    compares_losses: bool = True  # which are other ones where numbers are dropped out
    options: tuple[str, ...] = ()  # of the script
    is_whole: bool = False  # the planner chooses the microbatch: rows meet, or statistics do

    def outcome(self, way: str) -> Outcome:
        """Return what becomes of it in a way."""
        return self.otherwise.get(way, EQUAL)


def idiom(text: str, **more: Any) -> Idiom:
    """Return an idiom; what is said of `every` way holds for all that are not named."""
    every = more.pop("every", None)
    given = dict(more.pop("otherwise", {}))
    otherwise = {way: given.get(way, every) for way in WAYS if given.get(way, every) is not None}
    return Idiom(text=text, otherwise=MappingProxyType(otherwise), **more)
