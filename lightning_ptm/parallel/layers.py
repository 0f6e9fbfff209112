"""How modules compute with parts of their parameters: what of a module is cut, and what is put around its forward.

One function for each rule and kind of module; what is known of a kind of module is told here alone. Parameters stay plain
tensors: a layer computes its own forward with the part that it has, between exchanges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.rules import Columns, Partial, Place, Rows, Summed, Vocabulary
from lightning_ptm.planning.boxes import Box

Forward = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """What becomes of a module.

    Attributes:
        boxes: by its own parameters' names, which parts they are.
        partial: its own parameters of which every rank's gradient is a part of the sum.
        forward: in the place of its own; None: its own stays.
        counts: attributes of the module around it that are divided.
    """

    boxes: dict[str, Box] = dataclasses.field(default_factory=dict)
    partial: tuple[str, ...] = ()
    forward: Forward | None = None
    counts: tuple[str, ...] = ()


def layer(place: Place, group: TensorGroup) -> Layer:
    """What a rule makes of a module.

    Raises:
        ConfigError: it cannot be cut so.
    """
    rule, module = place.rule, place.module
    if place.parameter is not None:
        return _parameter(place, group)
    if isinstance(rule, Partial):
        return Layer(partial=tuple(name for name, it in module._parameters.items() if it is not None))
    if isinstance(rule, Summed):
        return Layer(forward=_summed(module, group))
    if isinstance(rule, Vocabulary):
        return _embedding(place, group)
    if _outputs_first(module) is None:
        raise _unknown(place)
    return _columns(place, rule, group) if isinstance(rule, Columns) else _rows(place, rule, group)


def _unknown(place: Place) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_plan has {place.rule} for {place.name}, a {type(place.module).__name__}; Columns and Rows are for "
        f"torch's Linear and Transformers' Conv1D with their own forward, Vocabulary for torch's Embedding; name the layers "
        f"inside of it, or leave it out of the plan: it is then whole on every rank"
    )


def _outputs_first(module: nn.Module) -> bool | None:
    """Of a linear layer, whether the first dimension of its weight is that of the outputs; None: it is no linear layer."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return True
    kind = next((base for base in type(module).__mro__ if base.__module__ == "transformers.pytorch_utils"), None)
    own = kind is not None and kind.__name__ == "Conv1D" and type(module).forward is getattr(kind, "forward", None)
    return False if own else None


def _box(name: str, shape: torch.Size, dimension: int, sections: int, group: TensorGroup) -> Box:
    try:
        return Box(tuple(shape), dimension, group.size, group.index, sections)
    except ConfigError as error:
        raise ConfigError(
            f"{name} cannot be cut for tensor_parallel_size={group.size}: {error}; or give a tensor_parallel_plan that "
            f"leaves it whole"
        ) from error


def divides(place: Place, size: int) -> bool:
    """Whether what may be whole as well (a vocabulary) has equal parts."""
    weight = place.module._parameters.get("weight")
    free = isinstance(place.rule, Vocabulary) or (isinstance(place.rule, Columns) and place.rule.gather)
    if not free or weight is None:
        return True
    return weight.shape[0 if _outputs_first(place.module) is not False else 1] % size == 0


def _columns(place: Place, rule: Columns, group: TensorGroup) -> Layer:
    module: Any = place.module
    outputs = 0 if _outputs_first(module) else 1
    boxes = {"weight": _box(f"{place.name}.weight", module.weight.shape, outputs, rule.parts, group)}
    if module.bias is not None:
        boxes["bias"] = _box(f"{place.name}.bias", module.bias.shape, 0, rule.parts, group)
    if rule.gather and rule.parts > 1:
        raise ConfigError(
            f"tensor_parallel_plan has {rule} for {place.name}: gathered outputs are those of one projection"
        )
    compute = _linear(module, outputs_first=outputs == 0)

    @torch.compiler.disable
    def forward(x: Tensor) -> Tensor:
        entered = group.enter(x)
        if rule.gather:
            return group.put_together(compute(entered, module.bias))
        if module.training:
            group.begin_divided()
        return compute(entered, module.bias)

    return Layer(boxes, forward=forward, counts=rule.counts)


def _rows(place: Place, rule: Rows, group: TensorGroup) -> Layer:
    module: Any = place.module
    inputs = 1 if _outputs_first(module) else 0
    boxes = {"weight": _box(f"{place.name}.weight", module.weight.shape, inputs, rule.parts, group)}
    compute = _linear(module, outputs_first=inputs == 1)

    @torch.compiler.disable
    def forward(x: Tensor) -> Tensor:
        part = group.part_of(x) if rule.split else x
        # Before the product, which draws nothing: a forward that is recomputed may end at what the product saves.
        group.end_divided()
        out = group.add_up(compute(part, None))
        return out if module.bias is None else out + module.bias.to(out.dtype)

    return Layer(boxes, forward=forward)


def _linear(module: Any, *, outputs_first: bool) -> Callable[[Tensor, Tensor | None], Tensor]:
    if outputs_first:
        return lambda x, bias: F.linear(x, module.weight, bias)

    def conv1d(x: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = torch.mm(flat, module.weight) if bias is None else torch.addmm(bias, flat, module.weight)
        return out.view(*x.shape[:-1], -1)

    return conv1d


def _embedding(place: Place, group: TensorGroup) -> Layer:
    module = place.module
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        raise _unknown(place)
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise ConfigError(
            f"{place.name} is an Embedding with max_norm, sparse or scale_grad_by_freq, which look at all of its rows; leave "
            f"it out of tensor_parallel_plan: it is then whole on every rank"
        )
    box = _box(f"{place.name}.weight", module.weight.shape, 0, 1, group)
    rows = box.part_shape[0]
    first = group.index * rows
    padding = module.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + rows else None

    @torch.compiler.disable
    def forward(tokens: Tensor) -> Tensor:
        here = (tokens >= first) & (tokens < first + rows)
        found = F.embedding((tokens - first).clamp(0, rows - 1), module.weight, own_padding)
        return group.add_up(found.masked_fill(~here.unsqueeze(-1), 0))

    return Layer({"weight": box}, forward=forward)


def _summed(module: nn.Module, group: TensorGroup) -> Forward:
    own = type(module).forward

    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        def entered(value: Any) -> Any:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return group.enter(value) if floats else value

        if module.training:
            group.begin_divided()
        try:
            out = own(module, *map(entered, args), **{name: entered(value) for name, value in kwargs.items()})
        finally:
            group.end_divided()
        return group.add_up(out)

    return forward


def _parameter(place: Place, group: TensorGroup) -> Layer:
    rule, name = place.rule, place.parameter
    assert name is not None
    parameter = place.module._parameters[name]
    assert parameter is not None
    if isinstance(rule, Partial):
        return Layer(partial=(name,))
    if not isinstance(rule, (Columns, Rows)) or parameter.dim() < 2:
        raise ConfigError(
            f"tensor_parallel_plan has {rule} for {place.name}, a parameter of shape {tuple(parameter.shape)}; a parameter "
            f"can have Columns() or Rows(), which cut the dimension before the last and the last, or Partial()"
        )
    dimension = parameter.dim() - (2 if isinstance(rule, Columns) else 1)
    return Layer({name: _box(place.name, parameter.shape, dimension, rule.parts, group)})


__all__ = ["Layer", "divides", "layer"]
