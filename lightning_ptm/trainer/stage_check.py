"""Check that all pipeline stages compute the same loss of a micro-batch.

Every stage runs the module's own code and has its own blocks alone. What a block passes on in another way than by its output
(a list that a hook fills, a global, a number) is missing on other stages, and a step that depends on it would train something
else without an error. So before the first training step, and before some later ones, one micro-batch is computed to its end
on every stage: each stage gets the output of the last block and computes the loss from it. Losses have to be equal, and so
have the arguments that code outside of blocks gives to each block. There is no backward pass, so the graph keeps no saved
tensors; attributes and logs are restored afterwards.

I1: all ranks of a batch check the same micro-batches: the first one, and one after 1, 2, 4... optimizer steps, since a term
    of the loss may have a factor of zero at first.
I2: where stages have several runs of blocks, code before the last block runs once for each of them. So it is run twice, with
    the same random numbers, and may leave nothing that depends on how often it has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchmetrics import Metric

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.autograd.stage_cut import AbsentOutput, StageEnds
from lightning_ptm.runtime.tensors.random_functions import NoRandomNumbers
from lightning_ptm.trainer.batch_steps import CheckSchedule
from lightning_ptm.trainer.module_state import LeftState, left_in, same, undone

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


Compute = Callable[[StageResults, Callable[[], None]], Any]
"""Computes a step to its end, unless the function that it calls after the last block ends it; returns the loss."""


class StageCheck:
    """The checks of one module in one run.

    Args:
        module: the module that trains.
        stages: how many there are.
        tell: broadcasts the value of the last stage and returns it; collective among the stages of a batch.
        schedule: the steps before which it checks.
        blocks: all blocks.
        several: the schedule, if stages have several runs of blocks with it; else empty.
    """

    def __init__(
        self,
        module: LightningModule,
        stages: int,
        tell: Callable[[Any], Any],
        schedule: CheckSchedule,
        blocks: Sequence[nn.Module] = (),
        several: str = "",
    ) -> None:
        self._module = module
        self._stages = stages
        self._tell = tell
        self._blocks = blocks
        self._several = several
        self._schedule = schedule

    def wanted(self, steps: int) -> bool:
        """Returns whether a micro-batch is checked after so many optimizer steps (I1)."""
        return self._schedule.due(steps)

    def check(self, compute: Compute, steps: int) -> None:
        """Checks a micro-batch. Collective among the stages of its batch.

        Args:
            compute: computes the micro-batch.
            steps: optimizer steps so far.

        Raises:
            ConfigError: stages have computed different losses, or have different arguments for a block; or code that runs
                once for each run of blocks leaves other values each time.
        """
        self._schedule.checked(steps)
        results = self._computed(compute, twice=bool(self._several))
        self._compare(results, self._tell(results))

    def compare_halves(self, computes: Sequence[Compute], *, narrow: bool) -> None:
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

    def _computed(self, compute: Compute, *, twice: bool = False) -> StageResults:
        """Computes a micro-batch.

        Args:
            twice: whether it is computed up to the last block before, and both results compared (I2).
        """
        results, before = StageResults(), StageResults()
        left: list[Mapping[str, LeftState]] = []

        def look(*, ends: bool) -> None:
            left.append(left_in(self._module, self._blocks))
            if ends:
                raise StageEnds

        # A graph, in which losses that arise in blocks are found, and which hooks of the user's may need.
        with undone(self._module), torch.enable_grad(), saved_tensors_hooks(_dropped, _no_backward):
            names = vars(self._module)
            names.pop("log_dict", None)  # it calls `log`
            names["log"] = lambda name, value, *_args, **_options: self._logged(results, name, value)
            try:
                if twice:
                    compute(before, partial(look, ends=True))
                found = compute(results, partial(look, ends=False) if twice else _nothing)
            except Exception as error:
                error.add_note(
                    f"pipeline_parallel_size={self._stages}: raised while one micro-batch was computed to its end on every "
                    f"stage, to compare its loss; a step can use outputs of blocks and what all stages have, and no "
                    f"gradients of its inputs"
                )
                raise
            results.loss = _numbers(found) if isinstance(found, Tensor) else None
        if twice:
            self._compare_runs((before, left[0]), (results, left[1]))
        return results

    def _compare_runs(
        self, one: tuple[StageResults, Mapping[str, LeftState]], other: tuple[StageResults, Mapping[str, LeftState]]
    ) -> None:
        """Raises:
        ConfigError: code before the last block does not do the same when it runs again (I2).
        """
        (first, left_before), (second, left) = one, other
        changed = [
            name for name in left.keys() | left_before.keys() if not _same(left_before.get(name), left.get(name))
        ]
        given = [name for name in second.given if not _equal(first.given.get(name), second.given[name])]
        if changed:
            what = f"leaves another value in {min(changed)} each time"
        elif given:
            what = (
                f"gives a block other arguments each time ({given[0]} is {_in_words(first.given.get(given[0], ()))}, then "
                f"{_in_words(second.given[given[0]])})"
            )
        else:
            return
        raise ConfigError(
            f"pipeline_schedule={self._several!r} would train something else than {type(self._module).__name__}: "
            f"training_step runs its code before the last block once for each run of blocks of a stage, and {what}; change "
            f"attributes in on_train_batch_start or on_train_batch_end, which are called once, or use "
            f"pipeline_schedule='1f1b'"
        )

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


def _nothing() -> None:
    """Lets a step go on after the last block."""


def _dropped(_saved: Tensor) -> None:
    """Keeps nothing of a tensor that autograd saves."""


def _no_backward(_kept: None) -> Tensor:
    raise UsageError(
        "a backward pass (backward(), torch.autograd.grad) runs in a training step, and pipeline stages compute one "
        "micro-batch without any, to compare its loss; leave it out, or train with pipeline_parallel_size=1"
    )


def _same(one: LeftState | None, other: LeftState | None) -> bool:
    return one is not None and same(one, other)


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
