"""Gives the parts of a model their weights: from files, or as the constructor makes them."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from torch import nn

from autopar.runtime.model.layer_names import named
from autopar.runtime.model.parts import names_of
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.options import StartingWeights
from autopar.runtime.tensor.shards import Split
from autopar.runtime.weights.agreement import check_same
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.safetensors_weights import load_safetensors, note_left, note_unused
from autopar.runtime.weights.saving.saved_form import SavedForm, UnsavableError

NOTHING_SPLIT: Mapping[str, Split] = MappingProxyType({})


def load_weights(
    parts: Sequence[nn.Module],
    recipe: Recipe,
    weights: StartingWeights | None,
    mesh: Mesh,
    *,
    splits: Mapping[str, Split] = NOTHING_SPLIT,
) -> None:
    """Give parameters and buffers on meta their numbers, on each rank those that it holds.

    They are from safetensors where these are given and have them. Names in `splits` may have stars.
    """
    check_same(recipe.digests(), mesh)

    @cache
    def ask() -> SavedForm | None:
        try:
            return recipe.saved_form()
        except UnsavableError as error:
            if mesh.rank == 0:
                say(f"note: {error}, so --weights has to have the names of the model")
            return None

    if weights is not None:
        note_unused(weights.files, recipe.shapes, mesh, ask)
    left: list[str] = []
    for part in parts:
        own = named(splits, names_of(part))
        if weights is not None:
            left += load_safetensors(
                part,
                weights.files,
                own,
                mesh.tensor,
                device=mesh.device,
                may_lack=weights.may_lack,
                ask=ask,
            )
        recipe.materialise(part, own, mesh.tensor, mesh.device)
    note_left(left, mesh)
