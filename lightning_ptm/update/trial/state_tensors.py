"""What an optimizer keeps, as a run of its trial shows it, and why pages could not keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lightning_ptm.update.trial.runs import Whole
from lightning_ptm.update.trial.traits import Shape, SlotTraits, StateShapes, same_value

_NUMBERS = (torch.Tensor, int, float, complex, bool, str, type(None))


class Lacks(Exception):
    """The optimizer lacks a property that pages need; the text says which."""


class Raises(Lacks):
    """It raises on the parameters of the trial."""


def told(error: Exception) -> str:
    """An error of foreign code, in a phrase."""
    return f"{type(error).__name__}: {error}"


def kept_shapes(state: Mapping[str, Any]) -> StateShapes:
    """Shapes of those states of a parameter that are tensors of several elements."""
    many = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    return MappingProxyType({key: tuple(value.shape) for key, value in many.items()})


def slots_of(whole: Whole, members: Sequence[int]) -> tuple[SlotTraits, ...]:
    """States with one number for each element that parameters at these places have, the same in every step."""
    found: dict[str, SlotTraits] = {}
    for step in range(len(whole.trial.steps)):
        for place in members:
            specimen = whole.trial.specimens[place]
            slots, scalars = whole.slots[step][place], whole.scalars[step][place]
            for key, value in slots.items():
                if value.shape != specimen.shape:
                    raise Lacks(
                        f"for a parameter of shape {specimen.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                    )
                if type(value) is not torch.Tensor:
                    raise Lacks(f"it keeps {key!r} as a {type(value).__name__}, whose elements share numbers")
                if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                    raise Lacks(
                        f"it keeps {key!r} in {value.dtype} for a parameter of shape {specimen.shape}, and in "
                        f"{found[key].dtype} for others"
                    )
            for key, value in scalars.items():
                if not isinstance(value, _NUMBERS):
                    raise Lacks(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise Lacks(
                        f"for a parameter of shape {specimen.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                    )
            if slots.keys() != whole.slots[0][place].keys():
                late = sorted(slots.keys() ^ whole.slots[0][place].keys())
                raise Lacks(f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first")
    for place in members:
        if whole.slots[0][place].keys() != found.keys():
            other = next(each for each in members if whole.slots[0][each].keys() - whole.slots[0][place].keys())
            raise Lacks(
                f"for a parameter of shape {whole.trial.specimens[place].shape} it keeps other states than for one of "
                f"shape {whole.trial.specimens[other].shape}"
            )
    return tuple(found.values())


def own_slots_of(whole: Whole, members: Sequence[int]) -> tuple[tuple[SlotTraits, ...], dict[Shape, StateShapes]]:
    """States of several elements that parameters at these places have, in whatever shapes, the same in every step: each name
    once, and their shapes by that of the parameter."""
    found: dict[str, SlotTraits] = {}
    shapes: dict[Shape, StateShapes] = {}
    for place in members:
        shape = whole.trial.specimens[place].shape
        for step in range(len(whole.trial.steps)):
            state = {**whole.slots[step][place], **whole.scalars[step][place]}
            for key, value in state.items():
                if not isinstance(value, _NUMBERS):
                    raise Lacks(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                if not isinstance(value, torch.Tensor) or value.numel() < 2:
                    continue
                if type(value) is not torch.Tensor:
                    raise Lacks(f"it keeps {key!r} as a {type(value).__name__}")
                if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                    raise Lacks(
                        f"it keeps {key!r} in {value.dtype} for some parameters, and in {found[key].dtype} for others"
                    )
            now = kept_shapes(state)
            if now != shapes.setdefault(shape, now):
                late = sorted(
                    key for key in now.keys() | shapes[shape].keys() if now.get(key) != shapes[shape].get(key)
                )
                raise Lacks(f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first")
    return tuple(found.values()), shapes


def group_values(whole: Whole) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...]]:
    """What steps do to groups: the values that they change, those that they make, and those that are containers."""
    advanced, created, containers = dict[str, None](), set[str](), dict[str, None]()
    for after in whole.groups:
        for before, now in zip(whole.trial.groups, after, strict=True):
            for key, value in now.items():
                if key == "lr":
                    continue
                if isinstance(value, list | dict | set):
                    containers[key] = None
                    if key not in before:
                        raise Lacks(f"its step makes group value {key!r}, a {type(value).__name__}")
                elif key not in before or not same_value(value, before[key]):
                    advanced[key] = None
                    if not _is_number(value):
                        raise Lacks(f"its step changes group value {key!r}, which is no number")
                if key not in before:
                    created.add(key)
    return tuple(advanced), frozenset(created), tuple(containers)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (*_NUMBERS, tuple))
