"""Whether two runs of an optimizer's trial did the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_ptm.update.trial.runs import Whole
from lightning_ptm.update.trial.traits import same_value


def replayed(whole: Whole, places: Sequence[int]) -> Whole:
    """Starts and gradients of some of the parameters, to be run again."""
    starts = [whole.starts[place] for place in places]
    gradients = [[gradients[place] for place in places] for gradients in whole.gradients]
    return Whole(whole.trial, starts, gradients, slot_names=whole.slot_names)


def same_parts(whole: Whole, places: Sequence[int], part: Whole) -> bool:
    """Whether these parameters moved as they do in a run of them alone."""
    for values, ours in zip(whole.values, part.values, strict=True):
        if not all(same_value(values[place], mine) for place, mine in zip(places, ours, strict=True)):
            return False
    return True


def same_values(first: Whole, second: Whole) -> bool:
    """Whether two runs over the same numbers, in whatever shapes, moved parameters and states alike."""
    for step in range(len(first.values)):
        for one, other in zip(first.values[step], second.values[step], strict=True):
            if not same_value(one.reshape(-1), other.reshape(-1)):
                return False
        for ours, theirs in zip(first.slots[step], second.slots[step], strict=True):
            if not same_value(_flat(ours), _flat(theirs)):
                return False
    return True


def _flat(slots: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.reshape(-1) for key, value in slots.items()}


def agree(fused: Whole, other: Whole) -> bool:
    """Whether two runs are the same arithmetic, but for rounding; values that overflowed in `other` are not judged."""
    pairs = [
        pair for ours, theirs in zip(fused.values, other.values, strict=True) for pair in zip(ours, theirs, strict=True)
    ]
    for ours_, theirs_ in zip(fused.slots, other.slots, strict=True):
        for mine, yours in zip(ours_, theirs_, strict=True):
            pairs.extend((value, yours[key]) for key, value in mine.items() if key in yours)
    for ours__, theirs__ in pairs:
        known = theirs__.isfinite()
        a, b = ours__[known].double(), theirs__[known].double()
        if b.numel() and not torch.allclose(a, b, rtol=0.1, atol=0.02 * float(b.abs().max())):
            return False
    return True
