"""Turns texts into words of a shell, YAML, Slurm's directives and Dockerfiles, or refuses them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from autopar.codegen.text.values import Source, literal
from autopar.planner.errors import InputError

_MOST_CHARACTERS = 4096
_DIRECTIVE = re.compile(r"--[a-z-]+(=[\w.,:@+/=%-]+)?", re.ASCII)
_IMAGE = re.compile(r"\w[\w.:/@-]*", re.ASCII)
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(==[\w.]+)?", re.ASCII)
_KEY = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_PATH = re.compile(r"[\w.@+-]+(/[\w.@+-]+)*/?", re.ASCII)


def shell(text: str) -> Source:
    """Return a text as one word of a POSIX shell."""
    return Source(shlex.quote(_in_a_line(text, "a shell")))


def yaml(text: str) -> Source:
    """Return a text as a YAML string in double quotes."""
    return Source(json.dumps(_in_a_line(text, "YAML"), ensure_ascii=False))


def plain(value: object) -> Source:
    """Return a flag, a number, a text or lists of them, as JSON, YAML and TOML write them alike."""
    if isinstance(value, str):
        return yaml(value)
    if isinstance(value, tuple):
        return Source(f"[{', '.join(map(plain, value))}]")
    if type(value) in (bool, int):
        return Source(json.dumps(value))
    raise TypeError(f"{type(value).__name__} has no common form")


def flag(value: object) -> Source:
    """Return what follows the name of an option in a shell: a word, or nothing for True."""
    return Source("") if value is True else Source(f" {shell(str(value))}")


def lists(value: object) -> Source:
    """Return a plain value as Python, with lists in the place of tuples."""
    return literal([list(one) for one in value] if isinstance(value, tuple) else value)


def bare(text: str) -> Source:
    """Return a key, which needs no quotes."""
    return _matching(_KEY, text, "a key")


def pod_argument(text: str) -> Source:
    """Return an argument of a container as YAML; Kubernetes would replace $(NAME) in it."""
    return yaml(text.replace("$(", "$$("))


def directive(text: str) -> Source:
    """Return an option of sbatch for a #SBATCH line, which has no quotes to rely on."""
    return _matching(_DIRECTIVE, text, "an option in a #SBATCH line")


def image(text: str) -> Source:
    """Return the name of an image for a FROM line, which has no quotes."""
    return _matching(_IMAGE, text, "the name of an image")


def requirement(text: str) -> Source:
    """Return a line for pip: a package, and its version."""
    return _matching(_REQUIREMENT, text, "a requirement of pip")


def copied(paths: Sequence[str]) -> Source:
    """Return the paths of a COPY line; Docker would replace $NAME and wildcards in them."""
    return Source(json.dumps([_matching(_PATH, one, "a path in a Dockerfile") for one in paths]))


def command(words: Sequence[str]) -> Source:
    """Return a command in a Dockerfile, as JSON, which no shell reads."""
    return Source(json.dumps([_in_a_line(one, "a Dockerfile") for one in words]))


def _matching(pattern: re.Pattern[str], text: str, what: str) -> Source:
    if len(text) > _MOST_CHARACTERS or not pattern.fullmatch(text):
        raise InputError(
            f"{text[:60]!r} cannot be written as {what}",
            expected="letters, digits, and . , : @ + / = - where they have a meaning",
        )
    return Source(text)


def _in_a_line(text: str, language: str) -> str:
    """Return a text without control characters, which could end a line, or raise."""
    if len(text) > _MOST_CHARACTERS or not text.isprintable():
        raise InputError(
            f"{text[:60]!r} cannot be quoted for {language}",
            expected=f"printable characters on one line, at most {_MOST_CHARACTERS:,}",
        )
    return text
