"""Files for Kubernetes are what the published schemas of JobSet and Kubeflow's Trainer allow."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.codegen.launch.test_views import files
from tests.codegen.plans import pinned_plan

SCHEMAS = Path(__file__).parent / "kubernetes_schemas.json"
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
EVERY_SETTING = (
    *("image=me/x:1", "volume=disk", "queue=q", "namespace=team", "time=1-00:00:00", "notice=60"),
    *("cpus=8", "memory=64", "restarts=0", "topology=cloud.provider.com/rack", "name=mine"),
)


@cache
def schemas() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    return found


def faults_of(document: Mapping[str, Any]) -> list[str]:
    """Return what an API server would refuse in a document."""
    kind = f"{document['apiVersion']} {document['kind']}"
    assert kind in schemas()["kinds"], kind
    return list(_faults(document, schemas()["kinds"][kind], kind))


def _faults(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    schema = schemas()["parts"][schema["$ref"]] if "$ref" in schema else schema
    if schema.get("x-kubernetes-int-or-string"):
        if type(value) not in (int, str):
            yield f"{where} is neither a number nor a text"
        return
    wanted = TYPES.get(schema.get("type", ""))
    if wanted is not None and type(value) is not wanted:
        yield f"{where} is {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where} is {value!r}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for place, one in enumerate(value):
            yield from _faults(one, schema.get("items", {}), f"{where}[{place}]")
    elif isinstance(value, dict):
        yield from _faults_of_keys(value, schema, where)
    elif isinstance(value, int) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        yield f"{where} is {value}"


def _faults_of_keys(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    is_open = not known and others is None
    is_open = is_open or schema.get("x-kubernetes-preserve-unknown-fields", False)
    yield from (f"{where} has no {key}" for key in schema.get("required", ()) if key not in value)
    for key, one in value.items():
        if key in known:
            yield from _faults(one, known[key], f"{where}.{key}")
        elif isinstance(others, dict):
            yield from _faults(one, others, f"{where}.{key}")
        elif not is_open:
            yield f"{where} has an unknown {key}"


@cache
def documents(*settings: str, on_cpus: bool = False) -> tuple[dict[str, Any], ...]:
    plan = pinned_plan("mnist.py", data=2, microbatch=4) if on_cpus else None
    texts = files("kubernetes", *settings, of=plan, words=["--steps", "10"])
    found = [text for name, text in texts.items() if name.endswith(".yaml")]
    return tuple(one for text in found for one in yaml.safe_load_all(text) if one is not None)


@pytest.mark.parametrize("settings", [(), EVERY_SETTING, ("resource=amd.com/gpu",)])
def test_jobs_are_what_the_published_schemas_allow(settings: tuple[str, ...]) -> None:
    for on_cpus in (False, True):
        kinds = [one["kind"] for one in documents(*settings, on_cpus=on_cpus)]
        assert sorted(kinds) == ["JobSet", "TrainJob", "TrainingRuntime"]
        for one in documents(*settings, on_cpus=on_cpus):
            assert faults_of(one) == []


def test_each_field_with_another_name_or_value_is_refused() -> None:
    for document in documents(*EVERY_SETTING):
        changed = list(_misspelt(document))
        assert len(changed) > 20
        for place, one in changed:
            assert faults_of(one), place


def _misspelt(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the document with one key of its spec misspelt, for every key that has a schema."""
    for path in _paths(document["spec"]):
        names = [one for one in path if isinstance(one, str)]
        if {"labels", "annotations", "limits", "nodeSelector", "emptyDir"} & set(names[:-1]):
            continue  # whose keys are the user's
        whole = copy.deepcopy(document)
        inner: Any = whole["spec"]
        for one in path[:-1]:
            inner = inner[one]
        inner[f"{path[-1]}x"] = inner.pop(path[-1])
        yield ".".join(map(str, path)), whole


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in pairs:
        if isinstance(value, dict):
            yield (*path, key)
        if isinstance(one, dict | list):
            yield from _paths(one, (*path, key))
