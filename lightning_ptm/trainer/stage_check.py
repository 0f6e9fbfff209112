"""Check that all pipeline stages compute the same loss of a micro-batch.

Every stage runs the module's own code and has its own blocks alone. What a block passes on in another way than by its output
(a list that a hook fills, a global, a number) is missing on other stages, and a step that depends on it would train something
else without an error. So before the first training step, and before some later ones, one micro-batch is computed to its end
on every stage: each stage gets the output of the last block and computes the loss from it. Losses have to be equal, and so
have the arguments that code outside of blocks gives to each block. There is no backward pass; attributes and logs are
restored afterwards.

I1: all ranks of a batch check the same micro-batches: the first one, and one after 1, 2, 4... optimizer steps, since a term
    of the loss may have a factor of zero at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.autograd.stage_cut import AbsentOutput
from lightning_ptm.runtime.tensors.random_functions import NoRandomNumbers
from lightning_ptm.trainer.batch_steps import CheckSchedule
from lightning_ptm.trainer.loss_check import undone

_SAMPLED = 1 << 16
"""Approximate limit of the elements of a tensor that are compared."""
_TOLERANCES = {1: 0.1, 2: 1e-2, 4: 1e-6}
_OF_DOUBLE = 1e-9
"""Largest differences, by bytes of a floating-point number, relative to values above 1: stages compute the same from the same
numbers, but devices may differ in the last bit."""
_OF_HALVES, _OF_HALVES_NARROW = 1e-4, 2e-2
"""Largest differences of the losses of a micro-batch and of its halves, relative to losses above 1."""
_LARGEST = 1e30

Numbers = tuple[float, ...]


@dataclass(slots=True)
class StageResults:
    """Results of a step on one stage.

    Attributes:
        given: arguments of blocks other than hidden states, by the argument's place and the block's name.
        logged: numbers that the step has logged, by name.
    """

    given: dict[str, Numbers] = field(default_factory=dict)
    loss: Numbers | None = None
    logged: dict[str, Numbers] = field(default_factory=dict)

    def see(self, block: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Records the arguments of a block."""
        for place, value in (*enumerate(args), *kwargs.items()):
            for path, numbers in _summaries(value):
                self.given[f"argument {place}{path} of {block}"] = numbers


class StageCheck:
    """The checks of one module in one run.

    Args:
        module: the module that trains.
        stages: how many there are.
        tell: broadcasts the value of the last stage and returns it; collective among the stages of a batch.
    """

    def __init__(self, module: LightningModule, stages: int, tell: Callable[[Any], Any]) -> None:
        self._module = module
        self._stages = stages
        self._tell = tell
        # state
        self._schedule = CheckSchedule()

    def wanted(self, steps: int) -> bool:
        """Returns whether a micro-batch is checked after so many optimizer steps (I1)."""
        return self._schedule.due(steps)

    def check(self, compute: Callable[[StageResults], Any], steps: int) -> None:
        """Checks a micro-batch. Collective among the stages of its batch.

        Args:
            compute: computes the micro-batch to its end; returns what the step returns.
            steps: optimizer steps so far.

        Raises:
            ConfigError: stages have computed different losses, or have different arguments for a block.
        """
        self._schedule.checked(steps)
        results = self._computed(compute)
        self._compare(results, self._tell(results))

    def compare_halves(self, computes: Sequence[Callable[[StageResults], Any]], *, narrow: bool) -> None:
        """Warns if the loss of a micro-batch is not the mean of its halves' losses. Collective among the stages of its batch.

        Args:
            computes: compute the micro-batch and its halves.
            narrow: whether numbers have 16 bits.
        """
        with NoRandomNumbers():
            found = [self._computed(compute).loss for compute in computes]
        losses = [each[-1] for each in found if each is not None]
        if len(losses) < len(computes):
            return  # a step that skips this batch
        whole, mean = losses[0], sum(losses[1:]) / len(losses[1:])
        if not abs(mean - whole) <= (_OF_HALVES_NARROW if narrow else _OF_HALVES) * max(1.0, abs(whole)):
            rank_zero_warn(
                f"pipeline_parallel_size={self._stages}: the loss of a micro-batch is {whole:.6g}, and the mean of its "
                f"halves' losses {mean:.6g}: the loss is no mean over equally many terms of each sample (labels are ignored, "
                f"samples of a batch meet, or it is a sum), so a step trains the mean over its micro-batches, as with "
                f"accumulate_grad_batches, and not the loss of the whole batch"
            )

    def _computed(self, compute: Callable[[StageResults], Any]) -> StageResults:
        results = StageResults()
        with undone(self._module), torch.enable_grad():  # hooks of the user's may need a graph
            names = vars(self._module)
            names.pop("log_dict", None)  # it calls `log`
            names["log"] = lambda name, value, *_args, **_options: self._logged(results, name, value)
            try:
                found = compute(results)
            except Exception as error:
                error.add_note(
                    f"pipeline_parallel_size={self._stages}: raised while one micro-batch was computed to its end on every "
                    f"stage, to compare its loss; a step can use outputs of blocks and what all stages have, and no "
                    f"gradients of its inputs"
                )
                raise
            loss = found.get("loss") if isinstance(found, Mapping) else found
            results.loss = _numbers(loss) if isinstance(loss, Tensor) else None
        return results

    @staticmethod
    def _logged(results: StageResults, name: str, value: Any) -> None:
        if not isinstance(value, Metric) and isinstance(value, (Tensor, int, float)):
            results.logged[name] = _numbers(value)

    def _compare(self, own: StageResults, last: StageResults) -> None:
        for name in sorted(own.given.keys() | last.given.keys()):
            ours, theirs = own.given.get(name, ()), last.given.get(name, ())
            if not _equal(ours, theirs):
                raise self._refusal(
                    f"{name} is {_in_words(ours)} here and {_in_words(theirs)} on the last stage, in the same micro-batch",
                )
        if own.loss is not None and last.loss is not None and not _equal(own.loss, last.loss):
            raise self._refusal(
                f"from the same output of the last block, the loss of a micro-batch is {_in_words(own.loss)} here and "
                f"{_in_words(last.loss)} on the last stage",
            )
        names = sorted(own.logged.keys() | last.logged.keys())
        different = [each for each in names if not _equal(own.logged.get(each), last.logged.get(each))]
        if different:
            rank_zero_warn(
                f"pipeline_parallel_size={self._stages}: self.log({different[0]!r}, ...) has other values on other stages; "
                f"the value of the last stage is logged, without what blocks of other stages pass on in attributes"
            )

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"pipeline_parallel_size={self._stages} would train something else than {type(self._module).__name__}: {what}; "
            f"it depends on what blocks pass on in another way than by their output (a list that hooks fill, a global), "
            f"or on an attribute that a step changes after the last block; use outputs of blocks alone, change attributes "
            f"in on_train_batch_end, or train with pipeline_parallel_size=1"
        )


def _summaries(value: Any) -> Iterator[tuple[str, Numbers]]:
    """Yields the numbers and sampled tensors in a value, in its mappings and sequences, by their paths."""
    if isinstance(value, AbsentOutput):
        return
    if isinstance(value, (Tensor, bool, int, float)):
        yield "", _numbers(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from ((f"[{name!r}]{path}", numbers) for path, numbers in _summaries(each))
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from ((f"[{place}]{path}", numbers) for path, numbers in _summaries(each))


def _numbers(value: Tensor | float) -> Numbers:
    """Returns a tolerance, and numbers that represent a value: itself, or the shape of a tensor and two sums over it."""
    if not isinstance(value, Tensor):
        return _TOLERANCES[4], float(value)
    value = value.detach()
    tolerance = _TOLERANCES.get(value.itemsize, _OF_DOUBLE) if value.is_floating_point() else _OF_DOUBLE
    if value.is_complex() or value.layout is not torch.strided or not value.numel():
        return tolerance, *map(float, value.shape)
    most = max(1, int(_SAMPLED ** (1 / max(1, value.dim()))))
    sampled = value[tuple(slice(None, None, -(-size // most)) for size in value.shape)]
    flat = sampled.reshape(-1).double().nan_to_num(nan=1.0).clamp(-_LARGEST, _LARGEST)
    if flat.numel() == 1:
        return tolerance, *map(float, value.shape), float(flat)
    weights = torch.arange(flat.numel(), device=flat.device).double().cos()
    size = float(flat.abs().mean())
    return tolerance, *map(float, value.shape), size, float((flat * weights).sum()) / flat.numel()


def _equal(one: Numbers | None, other: Numbers | None) -> bool:
    if not one or not other or len(one) != len(other):
        return one == other
    return all(
        math.isclose(a, b, rel_tol=one[0], abs_tol=one[0]) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one[1:], other[1:], strict=True)
    )


def _in_words(numbers: Numbers) -> str:
    return ", ".join(f"{each:.6g}" for each in numbers[1:]) or "absent"
