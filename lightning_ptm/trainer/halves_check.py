"""Check that a step computes the same from two halves of a batch as from the whole batch.

Before a batch trains, the step computes it as a whole, and its halves one after the other, and the results are compared. They
differ where samples of a batch depend on each other (losses over pairs of samples, statistics of a batch), where the loss is
a sum over samples, or where a step counts its calls: without the check, training in halves would be wrong without an error.
The check computes without gradients and dropout, and with constants for random numbers; logs and changes of attributes are
undone.

I1: a loss that is a mean over tokens, of which the halves have different numbers (padding), is not refused. It is a
    weighted mean of the halves' losses, and the weights, found from the whole batch, have to explain the loss of a batch
    that has one half twice. Training is then as with accumulated micro-batches, and a warning says so.
I2: a term that is the same for every batch (`f - f.detach()`) is compared, too: the losses are compared once more with other
    values for the tensors that the step detaches. Terms whose constant part is computed under `torch.no_grad()` or by
    `item()` are not found.
I3: checked are the first batch, each batch with tensors of a new kind or whose halves have unequally many tokens of a value
    for the first time, and one batch after 1, 2, 4... optimizer steps, since a term that combines samples may have a factor
    of zero at first.
I4: buffers and integer attributes that differ after the halves are refused. Other attributes that differ give a warning,
    since they may be records that no later step reads.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_ptm.errors import ConfigError, RankError, UsageError
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.nested_tensors import tensors_in
from lightning_ptm.runtime.autograd.recompute import ignoring_stored_exchanges
from lightning_ptm.runtime.tensors.random_functions import NoRandomNumbers
from lightning_ptm.trainer.batch_steps import CheckSchedule
from lightning_ptm.trainer.halves_results import (
    SETTING,
    WITHOUT,
    Logged,
    logged_of_batch,
    loss_in,
    result_of_batch,
    skipped,
)
from lightning_ptm.trainer.loss_check import Compared, Comparison
from lightning_ptm.trainer.module_state import LeftState, left_in, same, undone

_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-9}
_OF_FP32, _OF_TF32 = 1e-5, 1e-3
"""Largest differences of losses, relative to the loss where that is above 1."""
_IGNORED = (-100, 0)
"""Values by which tokens are ignored (targets), masked or padded."""


@dataclasses.dataclass(slots=True)
class _Run:
    """Results of a step for the parts of a batch, one after the other.

    Attributes:
        left: attributes and buffers of modules afterwards, by name.
    """

    results: list[Any]
    logs: list[list[Logged]]
    left: dict[str, LeftState]


class _Detached(TorchFunctionMode):
    """Context that finds tensors which a step detaches, and may give them other values: an affine function of each element,
    which combines no samples that the step does not combine.

    It has to be the innermost of all modes, so that what calls it is the step's code.
    """

    _OTHERS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_ptm", "torchmetrics"})
    """Packages whose own calls of `detach` are no part of a loss."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self._changes = changes
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "detach" or not result.is_floating_point():
            return result
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.partition(".")[0] in self._OTHERS:
            return result
        self.found = True
        return result * 0.5 + 0.25 if self._changes else result


class HalvesCheck:
    """The checks of one run.

    Args:
        module: the module that trains.
        group: its tensor group.
    """

    def __init__(self, module: LightningModule, group: TensorGroup) -> None:
        self._module = module
        self._group = group
        # State.
        self._seen: dict[Any, set[int]] = {}
        """By kind of checked batches, what halves of some of them had unequally many of."""
        self._compared: dict[Comparison, None] = {}
        """Comparisons by which the step tells tokens apart: an ordered set."""
        self._detaches = False
        """Whether the step detaches tensors."""
        self._schedule = CheckSchedule()
        self._warned: set[str] = set()

    def check(
        self,
        batch: Any,
        sizes: tuple[int, int],
        rows: Callable[[Any, list[int]], Any],
        step: Callable[[Any], Any],
        iteration: Callable[[], AbstractContextManager[None]],
        steps: int,
    ) -> int | None:
        """Checks a batch if it is of a new kind or enough steps have passed (I2). Collective in the group.

        Args:
            sizes: numbers of samples of the halves.
            rows: returns some samples of a batch, by their numbers.
            step: computes a batch.
            iteration: context of a forward.
            steps: optimizer steps so far.

        Returns:
            The half that trains alone, as the other one has nothing of what the loss is a mean over (targets that are all
            ignored); None: both train.

        Raises:
            ConfigError: the halves train something else.
        """
        kind, uneven, empty = self._kind(batch, sizes)
        known = kind in self._seen and uneven <= self._seen[kind]
        if not empty and known and not self._schedule.due(steps):
            return None
        self._seen.setdefault(kind, set()).update(uneven)
        self._schedule.checked(steps)
        first, second = list(range(sizes[0])), list(range(sizes[0], sum(sizes)))

        def run(*parts: list[int], changes_detached: bool = False) -> _Run:
            return self._run([rows(batch, each) for each in parts], step, iteration, changes_detached=changes_detached)

        whole, halves = run(first + second), run(first, second)
        if whole.results[0] is None and skipped(*halves.results):
            return None
        loss = _number(whole.results[0])
        one, other = (_number(each) for each in halves.results)
        if loss is None or one is None or other is None:
            return None  # training_step returns no loss, which Lightning refuses
        if math.isfinite(one) != math.isfinite(other) and self._equal(one if math.isfinite(one) else other, loss):
            return int(math.isfinite(other))
        equal = self._compare_losses(loss, one, other, sizes, lambda: _number(run(first + first + second).results[0]))
        self._compare_left(whole.left, halves.left)
        if equal:
            self._compare_logs(whole, halves, sizes)
        if equal and self._detaches:
            self._compare_detached(
                run(first + second, changes_detached=True), run(first, second, changes_detached=True), sizes
            )
        return None

    # -- which batches ------------------------------------------------------------------------------------------------

    def _kind(self, batch: Any, sizes: tuple[int, int]) -> tuple[Any, set[int], bool]:
        """Returns the kind of a batch, the numbers of the counts that are unequal for its halves, and whether all tokens of
        exactly one half may be ignored, by their values."""
        of_tensors: list[Any] = [_names_in(batch)]
        kept: list[Tensor] = []
        always: list[Comparison] = [(torch.eq, value) for value in _IGNORED]
        for each in tensors_in(batch):
            cut = each.dim() > 0 and each.shape[0] == sum(sizes)
            of_tensors.append((each.dtype, each.dim(), cut))
            if not cut or each.is_complex():
                continue
            for compare, value in always[1:] if each.is_floating_point() else (*always, *self._compared):
                counted = ~compare(each, value)
                # Targets may be the tokens after the first one.
                for tokens in (counted, counted[:, 1:]) if each.dim() > 1 else (counted,):
                    kept.append(torch.stack([tokens[: sizes[0]].sum(), tokens[sizes[0] :].sum()]))
        counts = torch.stack(kept).tolist() if kept else []
        uneven = {at for at, (one, other) in enumerate(counts) if one * sizes[1] != other * sizes[0]}
        return (*of_tensors, len(counts)), uneven, any((one == 0) != (other == 0) for one, other in counts)

    # -- computing ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        parts: Sequence[Any],
        step: Callable[[Any], Any],
        iteration: Callable[[], AbstractContextManager[None]],
        *,
        changes_detached: bool,
    ) -> _Run:
        found = _Run([], [], {})
        with undone(self._module):
            of_module = vars(self._module)
            of_module.pop("log_dict", None)  # logs each of its values
            for part in parts:
                logged: list[Logged] = []
                of_module["log"] = lambda name, value, *args, to=logged, **named: to.append((name, value, args, named))
                with iteration():
                    found.results.append(self._computed(part, step, changes_detached=changes_detached))
                found.logs.append(logged)
            found.left = left_in(self._module)
        return found

    def _computed(self, part: Any, step: Callable[[Any], Any], *, changes_detached: bool) -> Any:
        detached = _Detached(changes=changes_detached)
        try:
            with (
                torch.no_grad(),
                NoRandomNumbers(),
                Compared(self._compared),
                isolate_rng(include_cuda=False),
                ignoring_stored_exchanges(),
                self._group.seeded(1),
                detached,
            ):
                return step(part)
        except (RankError, UsageError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{SETTING}: training_step was tried without gradients on a batch, to compare its loss with that of its "
                f"halves, and raised {type(error).__name__}: {error}; let it compute without gradients, or {WITHOUT}"
            ) from error
        finally:
            self._detaches = self._detaches or detached.found

    # -- comparison ---------------------------------------------------------------------------------------------------

    def _compare_losses(
        self, whole: float, one: float, other: float, sizes: tuple[int, int], of_first_twice: Callable[[], float | None]
    ) -> bool:
        """Returns whether the loss is the mean of its halves'; False: it is a mean over tokens (I1)."""
        mean = (sizes[0] * one + sizes[1] * other) / sum(sizes)
        if self._equal(mean, whole):
            return True
        # If the loss is a mean over tokens: the first half's share of them. If it comes twice, so do they.
        share = (whole - other) / (one - other) if one != other else -1.0
        expected = (2 * share * one + (1 - share) * other) / (1 + share) if 0 <= share <= 1 else None
        twice = of_first_twice()
        if twice is None or expected is None or not self._equal(twice, expected):
            raise self._refusal(
                f"the loss of a batch is {whole:.6g}, and the mean of its halves' losses {mean:.6g}, so the samples of a "
                f"batch meet, the loss is a sum over samples, or it depends on how often the step was called",
                "return a mean over samples that do not meet",
            )
        self._warn(
            "tokens",
            f"the loss of a batch is {whole:.6g}, and the mean of its halves' losses {mean:.6g}: halves have unequally "
            f"many of what the loss is a mean over (tokens other than padding), as micro-batches have with "
            f"accumulate_grad_batches",
        )
        return False

    def _compare_detached(self, whole: _Run, halves: _Run, sizes: tuple[int, int]) -> None:
        """Compares losses with other values for the tensors that the step detaches (I2)."""
        loss, one, other = (_number(each) for each in (whole.results[0], *halves.results))
        if loss is None or one is None or other is None or not all(map(math.isfinite, (loss, one, other))):
            return
        mean = (sizes[0] * one + sizes[1] * other) / sum(sizes)
        if not self._equal(mean, loss):
            raise self._refusal(
                f"with other values for the tensors that training_step detaches, the loss of a batch is {loss:.6g}, and the "
                f"mean of its halves' losses {mean:.6g}, so a term that is the same for each batch, such as f - f.detach(), "
                f"has gradients in which the samples of a batch meet",
                "let such terms combine no samples",
            )

    def _compare_left(self, whole: Mapping[str, LeftState], halves: Mapping[str, LeftState]) -> None:
        differ = [name for name, each in halves.items() if not same(each, whole.get(name))]
        counts = next((name for name in differ if halves[name].counts), None)
        if counts is not None:
            raise self._refusal(
                f"training_step is called twice, and leaves another value in {counts} than after the whole batch",
                "change it in on_train_batch_start or on_train_batch_end, which are called once",
            )
        if differ:
            self._warn(
                "attributes",
                f"training_step is called twice, and leaves other values in {', '.join(differ)} than after the whole batch; "
                f"if later steps depend on them, change them in on_train_batch_end, which is called once",
            )

    def _compare_logs(self, whole: _Run, halves: _Run, sizes: tuple[int, int]) -> None:
        combined = logged_of_batch(halves.logs[0], halves.logs[1], sizes)
        loss = torch.as_tensor(loss_in(whole.results[0]))
        returned = result_of_batch(halves.results[0], halves.results[1], loss, sizes)
        values = {f"self.log({name!r})": value for name, value, *_ in combined}
        of_whole = {f"self.log({name!r})": value for name, value, *_ in whole.logs[0]}
        if isinstance(returned, Mapping) and isinstance(whole.results[0], Mapping):
            values |= {f"the result {name!r}": value for name, value in returned.items()}
            of_whole |= {f"the result {name!r}": value for name, value in whole.results[0].items()}
            for name, value in returned.items():
                theirs = whole.results[0].get(name)
                if isinstance(theirs, Tensor) and theirs.shape != value.shape:
                    raise UsageError(
                        f"with {SETTING} training_step returned {name!r} of shape {tuple(theirs.shape)} for the whole batch, "
                        f"and its halves give {tuple(value.shape)}, as if it had rows of samples; leave it out, or {WITHOUT}"
                    )
        differ = [name for name, value in values.items() if not self._equal_values(value, of_whole.get(name))]
        if differ:
            self._warn(
                "logs",
                f"{', '.join(differ)}: the mean of the halves' values (or what reduce_fx says) is not that of the whole "
                f"batch; give reduce_fx='sum' to what counts, or log it in on_train_batch_end",
            )

    def _equal_values(self, value: Any, other: Any) -> bool:
        """Returns whether two values that were logged or returned are equal; other than numbers and tensors always are."""
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            return all(self._equal_values(each, other.get(name)) for name, each in value.items())
        if isinstance(value, Metric) or not all(isinstance(each, (Tensor, int, float)) for each in (value, other)):
            return True
        dtypes = [each.dtype for each in (value, other) if isinstance(each, Tensor)]
        one, two = (torch.as_tensor(each).detach().double().flatten() for each in (value, other))
        if one.shape != two.shape or not one.numel():
            return one.shape == two.shape
        most = two.abs().max().clamp(min=1.0) * max(
            [self._tolerance, *(_TOLERANCES.get(each, _OF_FP32) for each in dtypes)]
        )
        return bool((((one - two).abs() <= most) | (one.isnan() & two.isnan()) | (one == two)).all())

    def _refusal(self, why: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"{SETTING} would train something else than {type(self._module).__name__} does with whole batches: {why}; "
            f"{remedy}, or {WITHOUT}"
        )

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            rank_zero_warn(f"{SETTING}: {text}")

    @property
    def _tolerance(self) -> float:
        dtype = self._module.trainer.precision_plugin.plan.compute  # type: ignore[attr-defined]
        of_fp32 = _OF_FP32 if torch.get_float32_matmul_precision() == "highest" else _OF_TF32
        return _TOLERANCES.get(dtype, of_fp32)

    def _equal(self, one: float, other: float) -> bool:
        if math.isnan(one) or math.isnan(other):  # as where no token counts
            return math.isnan(one) and math.isnan(other)
        return abs(one - other) <= self._tolerance * max(1.0, abs(other)) or one == other


def _number(result: Any) -> float | None:
    loss = None if result is None else loss_in(result)
    return float(loss) if isinstance(loss, Tensor) else None


def _names_in(batch: Any) -> Any:
    """Returns the names in nested mappings, in their order."""
    if isinstance(batch, Mapping):
        return tuple((str(name), _names_in(each)) for name, each in batch.items())
    return tuple(map(_names_in, batch)) if isinstance(batch, (list, tuple)) else None
