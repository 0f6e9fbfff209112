"""Training steps that compute their batch in two halves (`TensorParallel(overlap="two_batches")`).

Owns how a batch is cut, and how the results of its halves are joined. The turns of the halves and the order of the backward
pass are in parallel/two_batches.py.

I1: the loss is the mean over the samples of both halves. With as many samples in each, it and its gradients are those of two
    micro-batches (`accumulate_grad_batches=2`).
I2: what the halves log under a name is logged once, as of the whole batch (trainer/halves_results.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.two_batches import TwoHalves
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.terms import Mode
from lightning_ptm.torch_internals import BatchNorm, is_compiled, node_numbering
from lightning_ptm.trainer.batch_steps import BatchSteps, Iteration
from lightning_ptm.trainer.halves_check import HalvesCheck
from lightning_ptm.trainer.halves_results import (
    SETTING,
    WITHOUT,
    Logged,
    logged_of_batch,
    loss_in,
    result_of_batch,
    shares_of,
    skipped,
)
from lightning_ptm.trainer.module_state import arguments_of_step

SUMS_AT_ONCE = (
    "TensorParallel(overlap='two_batches') does not pay here: tensor ranks on the CPUs of one machine exchange activations "
    "through shared memory, which takes their cores' own time, so no sum passes while a half computes, and two halves take "
    "longer than the batch; use TensorParallel(overlap='none')"
)
"""Warning where exchanges are done at once."""


class TwoBatchSteps(BatchSteps):
    """The steps of a run that computes training batches in two halves.

    Args:
        iteration: context of a step of the engine.
        module: the module that trains.
        group: this rank's tensor group.

    Raises:
        ConfigError: the module trains in a way that cannot be cut into halves.
    """

    def __init__(
        self, iteration: Iteration, module: LightningModule, group: TensorGroup, engine: Engine, backend: Backend
    ) -> None:
        super().__init__(iteration)
        refuse_module(module)
        node_numbering()  # a version of torch without it is refused here
        self._module = module
        self._group = group
        self._engine = engine
        self._backend = backend
        self._check = HalvesCheck(module, group)
        # State.
        self._alone: int | None = None
        """The half of the next batch that trains alone (`HalvesCheck.check`)."""
        self._warned_of_one = False

    @override
    def batch_starts(self, batch: Any, index: int) -> None:
        """Checks that a batch trains the same in halves as whole, if it is of a new kind or enough steps have passed."""
        samples = samples_of(batch)
        if samples < 2:
            return
        module, trainer = self._module, self._module.trainer
        plugin = trainer.precision_plugin

        def step(part: Any) -> Any:
            with plugin.train_step_context():
                return module.training_step(*arguments_of_step(module, plugin.convert_input(part), index))

        self._alone = self._check.check(
            batch,
            halves_of(samples),
            lambda batch, rows: rows_of(batch, samples, rows),
            step,
            partial(self._iteration, Mode.FORWARD),
            trainer.global_step,
        )

    @override
    def train(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the halves of a batch; a batch of one sample as a whole. Returns what the step returns: the mean of the
        losses, and other results of the whole batch."""
        with self._iteration(Mode.TRAIN):
            samples = samples_of(batch)
            if samples < 2:
                self._warn_of_one()
                return step(batch, *args, **kwargs)
            return self._in_halves(lambda part: step(part, *args, **kwargs), batch, samples)

    def _in_halves(self, step: Callable[[Any], Any], batch: Any, samples: int) -> Any:
        sizes = halves_of(samples)
        halves = TwoHalves(self._group)
        logged: tuple[list[Logged], list[Logged]] = ([], [])

        def half(me: int) -> Any:
            part = rows_of(batch, sum(sizes), slice(sizes[0] * me, sizes[0] + sizes[1] * me))
            return step(part)

        with self._module.trainer.precision_plugin.train_step_context(), self._recording(halves, logged):
            outputs = halves.compute(half, self._second_thread)
        alone, self._alone = self._alone, None
        for name, value, given, named in logged_of_batch(*logged, sizes) if alone is None else logged[alone]:
            self._module.log(name, value, *given, **named)
        if skipped(*outputs):
            return None
        if alone is not None:
            return outputs[alone]
        losses = [loss_in(each) for each in outputs]
        halves.order_backward(losses)
        # One chain of nodes behind both losses, which comes first in the backward.
        loss = torch.stack(losses)
        loss = loss.mean() if sizes[0] == sizes[1] else (loss * shares_of(sizes).to(loss)).sum()
        return result_of_batch(*outputs, loss, sizes)

    def _warn_of_one(self) -> None:
        if not self._warned_of_one:
            self._warned_of_one = True
            rank_zero_warn(
                f"{SETTING}: a batch has 1 sample, so it is computed as a whole, and its sums block; use a batch_size "
                f"of 2 or more"
            )

    @contextmanager
    def _second_thread(self) -> Iterator[None]:
        self._backend.make_current()
        with self._engine.hooks.half_step():
            yield

    @contextmanager
    def _recording(self, halves: TwoHalves, logged: Sequence[list[Logged]]) -> Iterator[None]:
        """Context in which `self.log` of the module records what each half logs."""

        def log(name: str, value: Any, *args: Any, **named: Any) -> None:
            logged[halves.turn].append((name, value, args, named))

        own = vars(self._module).get("log")
        vars(self._module)["log"] = log
        try:
            yield
        finally:
            del vars(self._module)["log"]
            if own is not None:
                vars(self._module)["log"] = own


def halves_of(samples: int) -> tuple[int, int]:
    """Returns the numbers of samples of a batch's halves."""
    return samples - samples // 2, samples // 2


def samples_of(batch: Any) -> int:
    """Returns the number of samples of a batch: dimension 0 of its first tensor that has one, and not of length 1.

    Raises:
        UsageError: there is no such tensor.
    """
    found: list[int] = []
    apply_to_collection(batch, dtype=Tensor, function=lambda each: found.append(each.shape[0]) if each.dim() else None)
    if not found:
        raise UsageError(
            f"{SETTING} cuts each batch by dimension 0 of its tensors, and this batch ({type(batch).__name__}) has no "
            f"tensor with a dimension; let the data loader give tensors of (batch, ...), or {WITHOUT}"
        )
    return next((each for each in found if each != 1), 1)


def rows_of(batch: Any, samples: int, rows: slice | list[int]) -> Any:
    """Returns some samples of a batch, by a slice, or in the order of their numbers."""

    def cut(each: Any) -> Any:
        if isinstance(each, tuple):  # of texts, one for each sample, as default_collate gives them
            if hasattr(each, "_fields"):
                return type(each)(*(rows_of(item, samples, rows) for item in each))
            if len(each) != samples or not all(isinstance(item, (str, bytes)) for item in each):
                return tuple(rows_of(item, samples, rows) for item in each)
            return each[rows] if isinstance(rows, slice) else tuple(each[row] for row in rows)
        if isinstance(each, list):  # of texts or numbers, one for each sample; others may contain tensors
            plain = len(each) == samples and not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in each)
            if not plain:
                return [rows_of(item, samples, rows) for item in each]
            return each[rows] if isinstance(rows, slice) else [each[row] for row in rows]
        if not each.dim() or each.shape[0] == 1:
            return each
        if each.shape[0] != samples:
            raise UsageError(
                f"a batch has tensors of {samples} and of {each.shape[0]} rows (shape {tuple(each.shape)}), and {SETTING} "
                f"cuts each batch by dimension 0 of its tensors; let the data loader give tensors of (batch, ...), or "
                f"{WITHOUT}"
            )
        return each[rows]

    return apply_to_collection(batch, dtype=(Tensor, list, tuple), function=cut)


def refuse_module(module: LightningModule) -> None:
    """Checks that a module can train on halves.

    Raises:
        ConfigError: it uses manual optimization, is compiled, or has a BatchNorm.
    """
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            f"{SETTING}: the {kind} uses manual optimization, and one backward pass has to follow both halves of a batch; "
            f"return the loss from training_step, or {WITHOUT}"
        )
    for name, each in module.named_modules():
        if isinstance(each, BatchNorm):
            raise ConfigError(
                f"{SETTING}: {name} is a {type(each).__name__}, whose statistics would be those of half of a batch; use a "
                f"norm that does not depend on the batch (GroupNorm, LayerNorm), or {WITHOUT}"
            )
        if is_compiled(each):
            raise ConfigError(
                f"{SETTING}: {name or kind} is compiled by torch.compile, which does not trace code that another thread "
                f"interrupts; leave compile out, or {WITHOUT}"
            )
