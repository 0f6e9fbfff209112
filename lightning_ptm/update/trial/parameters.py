"""What is tried of an optimizer: a few small parameters of the kinds that its groups have, and gradients of several kinds."""

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
    """A parameter group's, but for learning rate and names: what is under the keys `names`."""
    return tuple(
        (key, repr(value))
        for key, value in sorted(group.items(), key=lambda item: item[0])
        if key not in ("params", "param_names", "lr", "initial_lr", *names)
    )


_LOUD_LR = 0.05
"""So that a rounding to 16 bit does not swallow what is looked for."""


class Gradient(enum.Enum):
    """What the gradient of a step is like."""

    MIXED = "many magnitudes, a few zeros"
    ORTHOGONAL = "orthogonal to the parameter, and to each of its rows"
    PARALLEL = "parallel to the parameter"
    LARGE = "a large norm"
    TINY = "a tiny norm"
    HOLES = "a page's part is all zeros"
    BROKEN = "one inf, one NaN"


USUAL = (
    Gradient.MIXED,
    Gradient.ORTHOGONAL,
    Gradient.PARALLEL,
    Gradient.LARGE,
    Gradient.HOLES,
    Gradient.TINY,
    Gradient.MIXED,
)
LONG = (Gradient.MIXED,) * 24
"""Long enough for what happens every few steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Specimen:
    """A parameter of the trial: its group, its shape, and what the user has set on parameters of this kind."""

    group: int
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What is tried: parameters, hyper-parameters by group, and the kind of gradient of each step.

    `absent` holds pairs (step, parameter) without a gradient.
    """

    specimens: tuple[Specimen, ...]
    groups: tuple[Mapping[str, Any], ...]
    steps: tuple[Gradient, ...] = USUAL
    absent: frozenset[tuple[int, int]] = frozenset()

    def at_step(self, group: int, step: int) -> dict[str, Any]:
        """A group's own hyper-parameters at a step: a schedule that is loud once and halves the learning rate later."""
        lr = self.groups[group].get("lr")
        if not isinstance(lr, float | int | torch.Tensor) or isinstance(lr, bool):
            return {}
        factor = 0.5 if step >= len(self.steps) // 2 else 1.0
        value = float(lr) or 1e-3  # a warm-up begins with 0, which would hide everything
        if step in (1, 4):
            value = max(value, _LOUD_LR)
        value *= factor
        return {"lr": torch.full_like(lr, value) if isinstance(lr, torch.Tensor) else value}


_MOST_KINDS = 6
"""Of shapes that are tried for a group, the most frequent first."""
_MOST_GROUPS = 6
"""Of different settings that are tried with all kinds of shapes."""
_MOST_NUMEL = 160_000


def kinds_of(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """By group: those of one kind differ in learning rate and names alone."""
    names = _names_in(groups)
    return [
        (*settings_of(group, names), *sorted({specimen.shape for specimen in specimens_of(0, members)}))
        for group, members in zip(groups, _members(groups), strict=True)
    ]


def _members(groups: Sequence[Mapping[str, Any]]) -> list[Sequence[torch.Tensor]]:
    """By group, parameters like those that it may have: where there are none now, all others', since the class may know what
    to do with no other kinds (Muon)."""
    everybody = [parameter for group in groups for parameter in group["params"]]
    return [group["params"] or everybody for group in groups]


def _names_in(groups: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Keys under which groups have names: text that is another one in each of many. Other text may choose an algorithm."""
    if len(groups) <= _MOST_GROUPS:
        return frozenset()
    texts = {key for key in groups[0] if all(isinstance(group.get(key), str) for group in groups)}
    return frozenset(key for key in texts if len({group[key] for group in groups}) == len(groups))


def chosen_groups(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    """A group of each kind; two where there are several groups at all, so that they could influence each other."""
    first = list({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    first = sorted(first)
    if len(first) == 1 and len(kinds) > 1:
        first.append(next(index for index in range(len(kinds)) if index != first[0]))
    return first


def trial_of(groups: Sequence[Mapping[str, Any]], values: Sequence[dict[str, Any]]) -> Trial:
    """Of the kinds of parameters that these groups have, with these values; of many groups, the later ones
    have small ones alone."""
    found: list[Specimen] = []
    for index, members in enumerate(_members(groups)):
        specimens = specimens_of(index, members)
        found.extend(specimens if index < _MOST_GROUPS else _few_of(specimens))
    return Trial(tuple(found), tuple(values))


def with_few(trial: Trial) -> Trial:
    """The same groups with at most two small parameters each."""
    found: list[Specimen] = []
    for index in range(len(trial.groups)):
        found.extend(_few_of([each for each in trial.specimens if each.group == index]))
    return dataclasses.replace(trial, specimens=tuple(found))


def _few_of(specimens: Sequence[Specimen]) -> list[Specimen]:
    members = sorted(specimens, key=lambda each: each.numel)
    return ([each for each in members if each.numel >= 32] or members)[:2]


def specimens_of(group: int, parameters: Sequence[torch.Tensor]) -> list[Specimen]:
    """Small parameters of the kinds that a group has: as many dimensions, each of them 1, small, medium or large.

    Each kind twice: once of ragged length, where the last vector of a kernel is not full, and once of full vectors, after
    which the next parameter may be updated in the same stretch. A single parameter comes once.
    """
    kinds = Counter((_sizes(parameter.shape), _noted(parameter)) for parameter in parameters)
    found: list[Specimen] = []
    for (sizes, noted), count in kinds.most_common(_MOST_KINDS):
        attributes = MappingProxyType(dict(noted))
        found.append(Specimen(group, _shape(sizes, ragged=True), attributes))
        if count > 1 or len(kinds) == 1:
            found.append(Specimen(group, _shape(sizes, ragged=False), attributes))
    if all(specimen.numel == 1 for specimen in found):
        found.append(Specimen(group, (8,)))  # to tell states with one number an element from numbers such as `step`
    return found


def _noted(parameter: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """What somebody has set on a parameter, as far as it is plain."""
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
    while torch.Size(shape).numel() > _MOST_NUMEL:
        largest = shape.index(max(shape))
        shape[largest] = shape[largest] // 4 + 1
    return tuple(shape)


def part_of(trial: Trial, places: Sequence[int]) -> Trial:
    """Some parameters of one group, as the only group."""
    group = trial.specimens[places[0]].group
    specimens = tuple(dataclasses.replace(trial.specimens[place], group=0) for place in places)
    return dataclasses.replace(trial, specimens=specimens, groups=(trial.groups[group],), absent=frozenset())
