"""Layers with low-rank adapters (LoRA, as PEFT builds it): a rule for such a layer is one for the layers inside of it.

Knows the names that PEFT gives: `base_layer`, and `lora_A` and `lora_B` with a linear layer for each adapter. The adapters
add B(A(x)) to what the base layer gives, so that outputs are cut in the base and in B, inputs in the base and in A, and the
other one is whole. A module of which PEFT trains a copy (`modules_to_save`: a head, an embedding with new tokens) is not
adapted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.rules import ColwiseParallel, Place, RowwiseParallel, VocabParallel
from lightning_ptm.torch_internals import children_in


def is_adapted(module: nn.Module) -> bool:
    """Whether a layer is a base layer with something around it."""
    return isinstance(children_in(module).get("base_layer"), nn.Module)


def is_copied(module: nn.Module) -> bool:
    """Whether PEFT trains a copy of a module, which is called in its place."""
    copies = isinstance(children_in(module).get("modules_to_save"), nn.ModuleDict)
    return copies and isinstance(children_in(module).get("original_module"), nn.Module)


def with_adapters(place: Place) -> Iterator[Place]:
    """The place itself and, where it is an adapted layer, those of the layers inside.

    Raises:
        ConfigError: it is adapted in a way that is not known here.
    """
    if place.parameter is not None or not is_adapted(place.module):
        yield place
        return
    module: Any = place.module
    lora = isinstance(children_in(module).get("lora_A"), nn.ModuleDict) and not len(
        children_in(module).get("lora_variant") or ()
    )
    of_embedding = len(getattr(module, "lora_embedding_A", None) or ()) > 0
    plain = not len(getattr(module, "lora_magnitude_vector", None) or ()) and not getattr(module, "lora_variant", None)
    cuts = isinstance(place.rule, (ColwiseParallel, RowwiseParallel)) and not of_embedding
    if not (lora and plain and (cuts or isinstance(place.rule, VocabParallel))):
        raise ConfigError(
            f"tensor_parallel_plan has {place.rule} for {place.name}, a {type(module).__name__} around a "
            f"{type(module.base_layer).__name__}; of adapted layers, linear ones with plain LoRA adapters are cut (no DoRA) "
            f"and no others; use such adapters, or give a tensor_parallel_plan without this layer: it is then whole on every "
            f"rank"
        )
    yield place
    yield Place(f"{place.name}.base_layer", module.base_layer, None, place.around, place.rule, inside=True)
    if cuts:
        side = "lora_B" if isinstance(place.rule, ColwiseParallel) else "lora_A"
        # Heads are counted once, by the base layer.
        rule = dataclasses.replace(place.rule, heads=()) if isinstance(place.rule, ColwiseParallel) else place.rule
        for key, each in children_in(module)[side].items():
            yield Place(f"{place.name}.{side}.{key}", each, None, module, rule, inside=True)
