"""The parameters, hyper-parameters and gradients of a trial: small parameters like those of the user's groups."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch


def settings_of(group: Mapping[str, Any], names: Collection[str] = ()) -> tuple[tuple[str, str], ...]:
    """Hyper-parameters of a parameter group, but for its learning rate and what is under the keys `names`."""
    return tuple(
        (key, repr(value))
        for key, value in sorted(group.items(), key=lambda item: item[0])
        if key not in ("params", "param_names", "lr", "initial_lr", *names)
    )


_HIGH_LR = 0.05
"""A learning rate with which a difference is not lost in rounding to 16 bits."""


class Gradient(enum.Enum):
    """The kind of gradient of a step."""

    MIXED = "many magnitudes, a few zeros"
    ORTHOGONAL = "orthogonal to the parameter, and to each of its rows"
    PARALLEL = "parallel to the parameter"
    LARGE = "a large norm"
    TINY = "a tiny norm"
    HOLES = "all zeros in one piece"
    BROKEN = "one inf, one NaN"


USUAL_STEPS = (
    Gradient.MIXED,
    Gradient.ORTHOGONAL,
    Gradient.PARALLEL,
    Gradient.LARGE,
    Gradient.HOLES,
    Gradient.TINY,
    Gradient.MIXED,
)
MANY_STEPS = (Gradient.MIXED,) * 24
"""Enough steps to see what an optimizer does every few of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrialParameter:
    """A parameter of the trial: its group, its shape, and the attributes that the user has set on parameters of this kind."""

    group: int
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """The parameters of a trial, their hyper-parameters by group, and the kind of gradient of each step.

    `without_gradient` holds pairs (step, parameter).
    """

    parameters: tuple[TrialParameter, ...]
    groups: tuple[Mapping[str, Any], ...]
    steps: tuple[Gradient, ...] = USUAL_STEPS
    without_gradient: frozenset[tuple[int, int]] = frozenset()

    def at_step(self, group: int, step: int) -> dict[str, Any]:
        """Hyper-parameters of a group that differ at a step: the learning rate is high in two steps, and halved later."""
        lr = self.groups[group].get("lr")
        if not isinstance(lr, float | int | torch.Tensor) or isinstance(lr, bool):
            return {}
        factor = 0.5 if step >= len(self.steps) // 2 else 1.0
        value = float(lr) or 1e-3  # a warm-up begins with 0, which would hide everything
        if step in (1, 4):
            value = max(value, _HIGH_LR)
        value *= factor
        return {"lr": torch.full_like(lr, value) if isinstance(lr, torch.Tensor) else value}


_MAX_KINDS = 6
"""Kinds of shapes that are tried for a group, the most frequent first."""
_MAX_GROUPS = 6
"""Groups that are tried with all kinds of shapes; others with small parameters alone."""
_MAX_NUMEL = 160_000


def kinds_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """The kind of each group; groups of one kind differ in learning rate and names alone."""
    names = _names_in(groups)
    return [
        (*settings_of(group, names), *sorted({spec.shape for spec in parameters_like(0, members)}))
        for group, members in zip(groups, _members(groups), strict=True)
    ]


def _members(groups: Sequence[Mapping[str, Any]]) -> list[Sequence[torch.Tensor]]:
    """Parameters of each group; those of all groups for one that has none, since the class may take no other kinds (Muon)."""
    all_parameters = [parameter for group in groups for parameter in group["params"]]
    return [group["params"] or all_parameters for group in groups]


def _names_in(groups: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Keys of the names of groups: text that differs in each of many groups. Other text may choose an algorithm."""
    if len(groups) <= _MAX_GROUPS:
        return frozenset()
    texts = {key for key in groups[0] if all(isinstance(group.get(key), str) for group in groups)}
    return frozenset(key for key in texts if len({group[key] for group in groups}) == len(groups))


def groups_to_try(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    """One group of each kind, and two in all where there are several, so that one can influence the other."""
    first = list({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    first = sorted(first)
    if len(first) == 1 and len(kinds) > 1:
        first.append(next(index for index in range(len(kinds)) if index != first[0]))
    return first


def trial_with(groups: Sequence[Mapping[str, Any]], values: Sequence[dict[str, Any]]) -> Trial:
    """A trial of parameters like those of the groups, with these values; after many groups, of small parameters alone."""
    found: list[TrialParameter] = []
    for index, members in enumerate(_members(groups)):
        specs = parameters_like(index, members)
        found.extend(specs if index < _MAX_GROUPS else _few_of(specs))
    return Trial(tuple(found), tuple(values))


def with_few_parameters(trial: Trial) -> Trial:
    """A trial of the same groups with at most two small parameters each."""
    found: list[TrialParameter] = []
    for index in range(len(trial.groups)):
        found.extend(_few_of([each for each in trial.parameters if each.group == index]))
    return dataclasses.replace(trial, parameters=tuple(found))


def _few_of(specs: Sequence[TrialParameter]) -> list[TrialParameter]:
    members = sorted(specs, key=lambda each: each.numel)
    return ([each for each in members if each.numel >= 32] or members)[:2]


def parameters_like(group: int, parameters: Sequence[torch.Tensor]) -> list[TrialParameter]:
    """Small parameters of the kinds that a group has: as many dimensions, each of them 1, small, medium or large.

    Each kind twice: once of ragged length, where the last vector of a kernel is not full, and once of full vectors, after
    which the next parameter may be updated in the same piece. A single parameter comes once.
    """
    kinds = Counter((_sizes(parameter.shape), _attributes_set_on(parameter)) for parameter in parameters)
    found: list[TrialParameter] = []
    for (sizes, attributes_set), count in kinds.most_common(_MAX_KINDS):
        attributes = MappingProxyType(dict(attributes_set))
        found.append(TrialParameter(group, _shape(sizes, ragged=True), attributes))
        if count > 1 or len(kinds) == 1:
            found.append(TrialParameter(group, _shape(sizes, ragged=False), attributes))
    if all(spec.numel == 1 for spec in found):
        # To tell states with one number for each element from numbers such as `step`.
        found.append(TrialParameter(group, (8,)))
    return found


def _attributes_set_on(parameter: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """Numbers and texts that the user has set as attributes of a parameter."""
    found = getattr(parameter, "__dict__", {})
    return tuple(sorted((key, value) for key, value in found.items() if isinstance(value, bool | int | float | str)))


def _sizes(shape: torch.Size) -> tuple[int, ...]:
    return tuple(0 if size == 1 else 1 if size < 32 else 2 if size < 128 else 3 for size in shape)


@functools.cache
def _shape(sizes: tuple[int, ...], *, ragged: bool) -> tuple[int, ...]:
    if len(sizes) == 1:
        table = (1, 7, 45, 1001) if ragged else (1, 8, 64, 960)
    elif len(sizes) == 2:
        table = (1, 7, 45, 149) if ragged else (1, 8, 64, 192)
    else:
        table = (1, 3, 35, 131) if ragged else (1, 4, 32, 32)
    shape = [table[size] for size in sizes]
    while torch.Size(shape).numel() > _MAX_NUMEL:
        largest = shape.index(max(shape))
        shape[largest] = shape[largest] // 4 + 1
    return tuple(shape)


def trial_of_some(trial: Trial, places: Sequence[int]) -> Trial:
    """A trial of some parameters of one group, which is then the only group."""
    group = trial.parameters[places[0]].group
    specs = tuple(dataclasses.replace(trial.parameters[place], group=0) for place in places)
    return dataclasses.replace(trial, parameters=specs, groups=(trial.groups[group],), without_gradient=frozenset())
