"""Tensor parallelism of layers with PEFT's LoRA adapters: a rule for such a layer becomes rules for the layers inside it.

Knows PEFT's names: `base_layer`, and `lora_A` and `lora_B` with a linear layer for each adapter. The adapters add B(A(x)) to
the output of the base layer. So outputs are cut in the base layer and in B, inputs in the base layer and in A; the other
adapter matrix stays whole. A module of which PEFT trains a copy (`modules_to_save`: a head, an embedding with new tokens) is
not an adapted layer.
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
    """Whether a module wraps a base layer, as PEFT's adapted layers do."""
    return isinstance(children_in(module).get("base_layer"), nn.Module)


def is_copied(module: nn.Module) -> bool:
    """Whether PEFT trains a copy of a module and calls it in the module's place."""
    copies = isinstance(children_in(module).get("modules_to_save"), nn.ModuleDict)
    return copies and isinstance(children_in(module).get("original_module"), nn.Module)


def with_adapters(place: Place) -> Iterator[Place]:
    """Yields the place itself and, for an adapted layer, the places of the layers inside it.

    Raises:
        ConfigError: the layer has adapters of an unknown kind.
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
            f"tensor_parallel's plan has {place.rule} for {place.name}, a {type(module).__name__} around a "
            f"{type(module.base_layer).__name__}; the only adapted layers that can be cut are linear layers with plain LoRA "
            f"adapters (no DoRA); use such adapters, or give a plan of tensor_parallel without this layer: it is then whole "
            f"on every rank"
        )
    yield place
    yield Place(f"{place.name}.base_layer", module.base_layer, None, place.around, place.rule, inside=True)
    if cuts:
        side = "lora_B" if isinstance(place.rule, ColwiseParallel) else "lora_A"
        # Heads are counted once, by the base layer.
        rule = dataclasses.replace(place.rule, heads=()) if isinstance(place.rule, ColwiseParallel) else place.rule
        for key, each in children_in(module)[side].items():
            yield Place(f"{place.name}.{side}.{key}", each, None, module, rule, inside=True)
