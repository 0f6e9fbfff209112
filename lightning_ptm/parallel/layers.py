"""Forwards of cut layers: for each rule and kind of module, which parameters are cut and how the forward changes.

One function for each rule and kind of module; all knowledge of kinds of modules is in this file. Parameters stay plain
tensors: a layer computes its own forward with its part, between exchanges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.adapters import is_adapted, is_copied
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.logits import head_logits
from lightning_ptm.parallel.rules import (
    ColwiseParallel,
    Entering,
    Part,
    Partial,
    Place,
    RowwiseParallel,
    Summed,
    VocabParallel,
)
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.autograd.recompute import Forward, ForwardWrapper
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import parameters_in


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Changes to a module under a rule.

    Attributes:
        boxes: by name of a parameter of the module, its part of the whole.
        partial: names of whole parameters of the module whose gradient is the sum of the ranks' gradients.
        forward: forward that replaces the module's own; None: its own stays.
        counts: by name of an attribute of the module around it (numbers of heads), the new value.
    """

    boxes: dict[str, TensorSlice] = dataclasses.field(default_factory=dict)
    partial: tuple[str, ...] = ()
    forward: Forward | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def layer(place: Place, between: BetweenLayers) -> Layer:
    """Returns the changes to a module under its rule.

    Args:
        between: interface to the activations around the layer.

    Raises:
        ConfigError: the module cannot be cut by the rule.
    """
    made = _layer(place, between)
    own, group = made.forward, between.group
    if own is None or isinstance(own, ForwardWrapper):
        return made

    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        with group.of_layer(place.name):
            return own(*args, **kwargs)

    return dataclasses.replace(made, forward=forward)


def _layer(place: Place, between: BetweenLayers) -> Layer:
    rule, module, group = place.rule, place.module, between.group
    if place.parameter is not None:
        return _parameter(place, group)
    if isinstance(rule, Partial):
        return Layer(partial=tuple(name for name, it in parameters_in(module).items() if it is not None))
    if isinstance(rule, Summed):
        return Layer(forward=_summed(place, between))
    if isinstance(rule, Part):
        return Layer(forward=_part(rule, place, between))
    if isinstance(rule, Entering):
        return Layer(forward=_entering(rule, place, between))
    if is_adapted(module):
        return _adapted(place, between)
    if isinstance(module, nn.Embedding):
        return _embedding(place, group)
    if isinstance(rule, VocabParallel) or _outputs_first(module) is None:
        raise _unknown(place)
    return _columns(place, rule, between) if isinstance(rule, ColwiseParallel) else _rows(place, rule, between)


def _unknown(place: Place) -> ConfigError:
    return ConfigError(
        f"tensor_parallel's plan has {place.rule} for {place.name}, a {type(place.module).__name__}; ColwiseParallel and "
        f"RowwiseParallel are for torch's Linear and Transformers' Conv1D with their own forward and plain weights (not "
        f"quantized ones), VocabParallel is for Embeddings; name the layers inside of it, or leave it out of the plan: it is "
        f"then whole on every rank"
    )


def _outputs_first(module: nn.Module) -> bool | None:
    """Whether the first dimension of a linear layer's weight is that of the outputs; None: it is not a linear layer."""
    weight = parameters_in(module).get("weight")
    # Quantized weights are packed integers or tensors of special classes. A GuardedParameter stands for a plain one.
    kind_of = type(weight).opens_to if isinstance(weight, GuardedParameter) else type(weight)
    if "forward" in vars(module) or kind_of is not nn.Parameter or weight is None or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return True
    kind = next((base for base in type(module).__mro__ if base.__module__ == "transformers.pytorch_utils"), None)
    own = kind is not None and kind.__name__ == "Conv1D" and type(module).forward is getattr(kind, "forward", None)
    return False if own else None


def _box(name: str, shape: torch.Size, dimension: int, sections: int, group: TensorGroup) -> TensorSlice:
    try:
        return TensorSlice(tuple(shape), dimension, group.size, group.index, sections)
    except ConfigError as error:
        raise ConfigError(
            f"{name} cannot be cut for tensor_parallel_size={group.size}: {error}; or give a plan of tensor_parallel that "
            f"leaves it whole"
        ) from error


def divides(place: Place, size: int, *, strict: bool) -> bool:
    """Whether a layer that may as well stay whole (a vocabulary, a layer with whole input and output) has equal parts.

    Args:
        strict: whether to return True for a module that cannot be cut, too, so that cutting it raises an error.
    """
    rule, module = place.rule, getattr(place.module, "base_layer", place.module)
    free = (
        rule.gather
        if isinstance(rule, ColwiseParallel)
        else isinstance(rule, VocabParallel) or (isinstance(rule, RowwiseParallel) and rule.split)
    )
    if free and not strict and is_copied(module):
        return False
    weight = parameters_in(module).get("weight")
    if not free or weight is None or weight.dim() != 2:
        return True
    first = isinstance(rule, VocabParallel) if isinstance(module, nn.Embedding) else isinstance(rule, ColwiseParallel)
    if _outputs_first(module) is False:
        first = not first
    return weight.shape[0 if first else 1] % size == 0


_WIDTHS = ("head_dim", "head_size")
"""Attributes of attention modules with the width of a head."""


def _whole_heads(place: Place, rule: ColwiseParallel, outputs: int, group: TensorGroup) -> None:
    """Refuses a cut that does not give each rank a whole number of heads."""
    found = ((name, getattr(place.around, name, None)) for name in _WIDTHS)
    for name, width in found:
        if isinstance(width, int) and width > 0 and not outputs % (width * rule.parts) and not rule.gather:
            heads = outputs // (width * rule.parts)
            if heads % group.size:
                raise ConfigError(
                    f"{place.name} has {heads} heads of {name}={width}, which tensor_parallel_size={group.size} ranks cannot "
                    f"divide equally; use a number of ranks that divides {heads} (keys and values may have fewer heads than "
                    f"queries), or give a plan of tensor_parallel that leaves this attention whole"
                )


def _divided(place: Place, name: str, group: TensorGroup) -> int:
    count = getattr(place.around, name, None)
    if not isinstance(count, int) or count % group.size:
        raise ConfigError(
            f"tensor_parallel_size={group.size} divides {name} of a {type(place.around).__name__} ({place.name}), which is "
            f"{count}; use a number of ranks that divides it"
        )
    return count // group.size


def _columns(place: Place, rule: ColwiseParallel, between: BetweenLayers) -> Layer:
    module: Any = place.module
    group = between.group
    outputs = 0 if _outputs_first(module) else 1
    _whole_heads(place, rule, module.weight.shape[outputs], group)
    counts = {name: _divided(place, name, group) for name in rule.counts}
    boxes = {"weight": _box(f"{place.name}.weight", module.weight.shape, outputs, rule.parts, group)}
    if module.bias is not None:
        boxes["bias"] = _box(f"{place.name}.bias", module.bias.shape, 0, rule.parts, group)
    if rule.gather and rule.parts > 1:
        raise ConfigError(
            f"tensor_parallel's plan has {rule} for {place.name}, and the outputs of packed projections cannot be gathered; "
            f"use parts=1, or gather=False"
        )
    weight = _weight(module, outputs_first=outputs == 0)

    def forward(x: Tensor) -> Tensor:
        if rule.gather and not place.inside:
            return head_logits(x, weight(), module.bias, between)
        if rule.gather:
            return group.put_together(between.columns(x, weight(), module.bias))
        if not place.inside:
            between.begin(training=module.training)
        return between.columns(x, weight(), module.bias)

    return Layer(boxes, forward=forward, counts=counts)


def _rows(place: Place, rule: RowwiseParallel, between: BetweenLayers) -> Layer:
    module: Any = place.module
    group = between.group
    inputs = 1 if _outputs_first(module) else 0
    boxes = {"weight": _box(f"{place.name}.weight", module.weight.shape, inputs, rule.parts, group)}
    weight = _weight(module, outputs_first=inputs == 1)

    def forward(x: Tensor) -> Tensor:
        part = group.part_of(x) if rule.split else x
        if not place.inside:
            # Before the product, which draws no random numbers: a recomputed forward may stop once the product is saved.
            between.end()
        out = between.leave(F.linear(part, weight()))
        return out if module.bias is None else out + module.bias.to(out.dtype)

    partial = ("bias",) if between.partial and module.bias is not None else ()
    return Layer(boxes, partial, forward=forward)


def _weight(module: Any, *, outputs_first: bool) -> Callable[[], Tensor]:
    """Returns a function for the weight as (outputs, inputs), whichever is first in the module."""
    return lambda: module.weight if outputs_first else module.weight.t()


def _adapted(place: Place, between: BetweenLayers) -> Layer:
    """Layer around a base layer and its adapters: all of them compute in one random region, before it changes."""
    module, rule = place.module, place.rule
    own = type(module).forward
    if isinstance(rule, VocabParallel) or (isinstance(rule, ColwiseParallel) and rule.gather):
        return Layer()

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(module, *args, **kwargs)
        if isinstance(rule, RowwiseParallel):
            between.end()
        else:
            between.begin(training=module.training)
        return out

    return Layer(forward=forward)


class _Lookup(TorchFunctionMode):
    """Context in which an embedding's forward finds rows by `find` instead of F.embedding."""

    def __init__(self, weight: Tensor, find: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._weight, self._find = weight, find

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.embedding and args[1] is self._weight:
            return self._find(args[0])
        return function(*args, **(kwargs or {}))


def _embedding(place: Place, group: TensorGroup) -> Layer:
    module, rule = place.module, place.rule
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or not module.weight.is_floating_point():
        raise _unknown(place)
    if not isinstance(rule, VocabParallel) and not (isinstance(rule, ColwiseParallel) and rule.parts == 1):
        raise _unknown(place)
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise ConfigError(
            f"{place.name} is an Embedding with max_norm, sparse or scale_grad_by_freq, which need all of its rows; leave it "
            f"out of tensor_parallel's plan: it is then whole on every rank"
        )
    find = _rows_of(place, group) if isinstance(rule, VocabParallel) else _columns_of(place, rule, group)
    box = _box(f"{place.name}.weight", module.weight.shape, 0 if isinstance(rule, VocabParallel) else 1, 1, group)
    own = type(module).forward

    def forward(tokens: Tensor) -> Tensor:
        if own is nn.Embedding.forward:
            return find(tokens)
        with _Lookup(module.weight, find):  # a subclass, e.g. one that scales the rows
            return own(module, tokens)

    return Layer({"weight": box}, forward=forward)


def _rows_of(place: Place, group: TensorGroup) -> Callable[[Tensor], Tensor]:
    module: Any = place.module
    rows = module.weight.shape[0] // group.size
    first = group.index * rows
    padding = module.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + rows else None

    def find(tokens: Tensor) -> Tensor:
        here = (tokens >= first) & (tokens < first + rows)
        # A token outside of the vocabulary is an error on every rank, as with a whole embedding.
        unknown = (tokens < 0) | (tokens >= rows * group.size)
        found = F.embedding(torch.where(here, tokens - first, 0).masked_fill(unknown, rows), module.weight, own_padding)
        return group.add_up(found.masked_fill(~here.unsqueeze(-1), 0))

    return find


def _columns_of(place: Place, rule: ColwiseParallel, group: TensorGroup) -> Callable[[Tensor], Tensor]:
    module: Any = place.module

    def find(tokens: Tensor) -> Tensor:
        found = F.embedding(tokens, module.weight, module.padding_idx)
        return group.put_together(found) if rule.gather else found

    return find


def _part(rule: Part, place: Place, between: BetweenLayers) -> Forward:
    group = between.group
    if type(place.module) is not nn.Identity:
        raise _unknown(place)

    def forward(value: Tensor | None) -> Tensor | None:
        if value is None or value.shape[rule.dimension] == 1:
            return value
        return between.enter(value).chunk(group.size, rule.dimension)[group.index]

    return forward


def _entering(rule: Entering, place: Place, between: BetweenLayers) -> Forward:
    module, last = place.module, getattr(place.around, rule.last, None)
    if not isinstance(last, int) or "forward" in vars(module):
        raise ConfigError(
            f"tensor_parallel's plan has {rule} for {place.name}, and the {type(place.around).__name__} around it has no "
            f"integer attribute {rule.last}; name an attribute with the number of outputs that ranks use with their parts"
        )
    own = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = own(module, *args, **kwargs)
        first, entering = out.split([out.shape[-1] - last, last], -1)
        return torch.cat([first, between.enter(entering)], -1)

    return forward


def _summed(place: Place, between: BetweenLayers) -> Forward:
    module, group = place.module, between.group

    def around(own: Forward) -> Forward:
        @torch.compiler.disable
        def forward(*args: Any, **kwargs: Any) -> Any:
            def entered(value: Any) -> Any:
                floats = isinstance(value, Tensor) and value.is_floating_point()
                return between.enter(value) if floats else value

            with group.of_layer(place.name):
                between.begin(training=module.training)
                try:
                    out = own(*map(entered, args), **{name: entered(value) for name, value in kwargs.items()})
                finally:
                    between.end()
                return between.leave(out)

        return forward

    return ForwardWrapper(around, MethodType(type(module).forward, module))


def _parameter(place: Place, group: TensorGroup) -> Layer:
    rule, name = place.rule, place.parameter
    assert name is not None
    parameter = parameters_in(place.module)[name]
    assert parameter is not None
    if isinstance(rule, Partial):
        return Layer(partial=(name,))
    if (
        not isinstance(rule, (ColwiseParallel, RowwiseParallel))
        or not parameter.dim()
        or (parameter.dim() == 1 and isinstance(rule, RowwiseParallel))
    ):
        raise ConfigError(
            f"tensor_parallel's plan has {rule} for {place.name}, a parameter of shape {tuple(parameter.shape)}; the rules "
            f"for a parameter are ColwiseParallel(), which cuts the last but one dimension (of a vector its only one), "
            f"RowwiseParallel(), which cuts the last, and Partial()"
        )
    dimension = max(0, parameter.dim() - (2 if isinstance(rule, ColwiseParallel) else 1))
    return Layer({name: _box(place.name, parameter.shape, dimension, rule.parts, group)})
