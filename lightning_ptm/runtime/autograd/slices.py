"""Calls of a unit on slices of its batch, one after another.

Owns which arguments are cut and how results are joined: a tensor whose dimension 0 is that of the call's first floating-point
tensor has the batch's samples there, and is cut; all other arguments are passed whole. Knows nothing of pages or of what a
call on a slice does: recompute.py calls a unit on a slice as on a whole batch, so that its forward keeps inputs only, and is
computed again just before its backward.

I1: the slices are computed from the last to the first. Autograd takes the newest part of a graph first, so the backward goes
    through the slices in the order of the batch, and adds the gradients of a parameter in that order, in place.
I2: one slice's activations exist at a time: autograd ends the backward of a slice before it begins another one.
I3: whether samples meet in a unit is found out before it is first called on slices (slices_check.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.errors import ConfigError, some
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.torch_internals import tree_flatten, tree_unflatten

Call = Callable[..., Any]


def slices_of(units: Sequence[Unit], wanted: int | Mapping[str, int]) -> dict[int, int]:
    """Returns the number of slices of each sliced unit, by its index.

    Args:
        wanted: the setting `slices`.

    Raises:
        ConfigError: no unit has a name of the setting, or a sliced unit contains others.
    """
    if isinstance(wanted, int):
        wanted = {"*": wanted} if wanted > 1 else {}
    found: dict[int, int] = {}
    for pattern, count in wanted.items():
        named = [unit for unit in units[1:] if fnmatchcase(unit.name, pattern)]
        if not named:
            names = some([unit.name for unit in units[1:]], 3) or "none but the module itself, which is never cut"
            raise ConfigError(
                f"slices asks for {count} slices of each unit named {pattern!r}, and there is none, so nothing would be "
                f"computed in slices; the units are {names}; name some of these, with * for any text, or choose others with "
                f"units=[...], the class names of blocks"
            )
        found.update((unit.index, count) for unit in named)
    found = {index: count for index, count in found.items() if count > 1}
    for unit in (units[index] for index in found):
        inside = next((each.name for each in units if each.name.startswith(f"{unit.name}.")), None)
        if inside is not None:
            raise ConfigError(
                f"slices would compute {unit.name} ({type(unit.module).__name__}) in slices, and it contains the unit "
                f"{inside}, which would be fetched for each of them; name units without others inside, as in "
                f"slices={{'layers.*': 8}}, or choose them with units=[...]"
            )
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class CutArguments:
    """The arguments of a call, some of which are cut along dimension 0.

    Attributes:
        leaves: the arguments without their containers.
        spec: the containers.
        cut: indices of the leaves that are cut.
        samples: size of their dimension 0; 0: nothing is cut.
    """

    leaves: tuple[Any, ...]
    spec: Any
    cut: frozenset[int]
    samples: int

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CutArguments:
        """Finds what is cut."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        samples = next((each.shape[0] for each in leaves if _can_be_cut(each) and each.is_floating_point()), 0)
        cut = [at for at, each in enumerate(leaves) if samples and _can_be_cut(each) and each.shape[0] == samples]
        return cls(tuple(leaves), spec, frozenset(cut), samples)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Describes the call without its numbers and sizes."""
        kinds = [
            (each.dim(), each.dtype, at in self.cut) if isinstance(each, Tensor) else _kind(each)
            for at, each in enumerate(self.leaves)
        ]
        return (str(self.spec), *kinds)

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with other leaves."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def slices(self, sizes: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yields the arguments of the slices of these numbers of samples, the last one first (I1)."""
        # One operation for all slices, whose backward joins their gradients once.
        parts = {at: self.leaves[at].split(list(sizes)) for at in self.cut}
        for number in reversed(range(len(sizes))):
            yield self.with_leaves([parts[at][number] if at in parts else each for at, each in enumerate(self.leaves)])


def _can_be_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not value.is_nested and value.layout is torch.strided


def _kind(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, str)) else type(value)


def sizes_of(samples: int, count: int) -> list[int]:
    """Returns the numbers of samples of at most `count` slices; they differ by one at most."""
    count = max(1, min(count, samples))
    return [samples // count + (number < samples % count) for number in range(count)]


def joined(results: Sequence[Any], shared: frozenset[int]) -> Any:
    """Returns the result for the whole batch.

    Args:
        results: of the slices, in the order of the batch.
        shared: indices of leaves that are equal for all slices.
    """
    flat = [tree_flatten(result) for result in results]
    leaves = [
        torch.cat(each) if isinstance(each[0], Tensor) and at not in shared else each[0]
        for at, each in enumerate(zip(*(leaves for leaves, _ in flat), strict=True))
    ]
    return tree_unflatten(leaves, flat[0][1])


class SlicedCalls:
    """Calls of one unit on slices.

    Args:
        count: number of slices.
        check: finds out whether a call can be cut: `SlicesCheck.shared_results`.
    """

    def __init__(self, count: int, check: Callable[[CutArguments], frozenset[int]]) -> None:
        self.count = count
        self._check = check
        self._checked: dict[tuple[Any, ...], frozenset[int]] = {}
        """By structure of a call, the leaves of its result that are equal for all slices."""

    def call(self, compute: Call, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool) -> Any:
        """Calls `compute` on the slices, and returns the result for the whole batch."""
        cut = CutArguments.of(args, kwargs)
        sizes = sizes_of(cut.samples, self.count)
        if len(sizes) == 1:
            return compute(*args, **kwargs)
        known = cut.structure, training
        if known not in self._checked:
            self._checked[known] = self._check(cut)
        results = [compute(*args, **kwargs) for args, kwargs in cut.slices(sizes)]
        return joined(results[::-1], self._checked[known])
