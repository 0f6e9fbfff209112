"""Training steps that compute their batch in two halves (`TensorParallel(overlap="two_batches")`).

Owns how a batch is cut, and how what the halves return and log becomes what a step returns and logs. Whose turn it is, and
the order of the backward pass, are in parallel/two_batches.py.

I1: the loss is the mean over the samples of both halves. With as many samples in each, it and its gradients are those of two
    micro-batches (`accumulate_grad_batches=2`).
I2: what the halves log under a name is logged once, as of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.two_batches import TwoHalves
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.torch_internals import BatchNorm, is_compiled, node_numbering
from lightning_ptm.trainer.halves_check import HalvesCheck

_SETTING = "TensorParallel(overlap='two_batches')"
_WITHOUT = "use TensorParallel(overlap='none')"
SUMS_AT_ONCE = (
    "TensorParallel(overlap='two_batches') does not pay here: tensor ranks on the CPUs of one machine exchange activations "
    "through shared memory, which takes their cores' own time, so no sum passes while a half computes, and two halves take "
    "longer than the batch; use TensorParallel(overlap='none')"
)
"""Warning where exchanges are done at once."""
_OVER_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, shares: (values * shares).sum(),
    "sum": lambda values, shares: values.sum(),
    "max": lambda values, shares: values.max(),
    "min": lambda values, shares: values.min(),
}
"""By `reduce_fx` of `self.log`, the value of a batch from those of its halves, and their shares of the samples."""


class TwoBatchSteps:
    """The training steps of a run that computes batches in two halves.

    Args:
        module: the module that trains.
        group: this rank's tensor group.

    Raises:
        ConfigError: the module trains in a way that cannot be cut into halves.
    """

    def __init__(self, module: LightningModule, group: TensorGroup, engine: Engine, backend: Backend) -> None:
        refuse_module(module)
        node_numbering()  # a version of torch without it is refused here
        self._module = module
        self._group = group
        self._engine = engine
        self._backend = backend
        self._check = HalvesCheck(module, group)

    def check(self, batch: Any, index: int, iteration: Callable[[], AbstractContextManager[None]]) -> None:
        """Checks that the first batch trains the same in halves as whole. Collective.

        Args:
            index: its number in the epoch.
            iteration: context of a forward.
        """
        samples = samples_of(batch)
        plugin = self._module.trainer.precision_plugin

        def step(part: Any) -> Any:
            with plugin.train_step_context():
                return self._module.training_step(plugin.convert_input(part), index)

        self._check.check(batch, halves_of(samples), lambda batch, rows: rows_of(batch, samples, rows), step, iteration)

    def step(self, training_step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a training step.

        Args:
            training_step: computes a batch; it is called with each half, and with `args` and `kwargs`.
        Returns:
            What the step returns: the mean of the losses, and other results of the whole batch.
        """
        sizes = halves_of(samples_of(batch))
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        halves = TwoHalves(self._group)
        logged: tuple[_Log, _Log] = ([], [])

        def half(me: int) -> Any:
            part = rows_of(batch, sum(sizes), slice(sizes[0] * me, sizes[0] + sizes[1] * me))
            return training_step(part, *args, **kwargs)

        with self._module.trainer.precision_plugin.train_step_context(), self._recording(halves, logged):
            outputs = halves.compute(half, self._second_thread)
        self._log(logged, shares)
        if any(each is None for each in outputs):
            return _skipped(outputs)
        losses = [each["loss"] if isinstance(each, Mapping) else each for each in outputs]
        halves.order_backward(losses)
        # One chain of nodes behind both losses, which comes first in the backward.
        loss = torch.stack(losses)
        loss = loss.mean() if sizes[0] == sizes[1] else (loss * shares.to(loss)).sum()
        return loss if not isinstance(outputs[0], Mapping) else _together(outputs, loss, shares)

    @contextmanager
    def _second_thread(self) -> Iterator[None]:
        self._backend.make_current()
        with self._engine.hooks.half_step():
            yield

    @contextmanager
    def _recording(self, halves: TwoHalves, logged: tuple[_Log, _Log]) -> Iterator[None]:
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

    def _log(self, logged: tuple[_Log, _Log], shares: Tensor) -> None:
        first, second = logged
        names = [[name for name, *_ in each] for each in logged]
        if names[0] != names[1]:
            raise UsageError(
                f"with {_SETTING} one half of a batch has logged {names[0]} and the other one {names[1]}, so these have no "
                f"values of the whole batch; let training_step log the same names for each batch, or {_WITHOUT}"
            )
        for (name, value, args, named), (_, other, _, others) in zip(first, second, strict=True):
            if isinstance(value, Metric):
                if named.get("on_step") is not False:
                    raise UsageError(
                        f"with {_SETTING} self.log({name!r}, a {type(value).__name__}) would log the second half's value of "
                        f"each step; call it with on_step=False and on_epoch=True, or with a tensor"
                    )
                self._module.log(name, value, *args, **named)
                continue
            sizes = {"batch_size": named["batch_size"] + others["batch_size"]} if named.get("batch_size") else {}
            how = named.get("reduce_fx", "mean")
            how = how if isinstance(how, str) else getattr(how, "__name__", "")
            values = torch.stack([torch.as_tensor(each).detach().double() for each in (value, other)])
            of_batch = _OVER_STEPS.get(how, _OVER_STEPS["mean"])(values, shares.to(values.device))
            self._module.log(name, of_batch.to(_dtype_of(value)), *args, **{**named, **sizes})


_Log = list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]
"""Calls of `self.log`: name, value, and further arguments."""


def _dtype_of(value: Any) -> torch.dtype:
    given = torch.as_tensor(value).dtype
    return given if given.is_floating_point else torch.get_default_dtype()


def halves_of(samples: int) -> tuple[int, int]:
    """Returns the numbers of samples of a batch's halves.

    Raises:
        UsageError: there are fewer than two.
    """
    if samples < 2:
        raise UsageError(
            f"a batch has {samples} sample, and {_SETTING} computes two halves of each; use a batch_size of 2 or more, with "
            f"drop_last=True if a single sample would be left over, or {_WITHOUT}"
        )
    return samples - samples // 2, samples // 2


def samples_of(batch: Any) -> int:
    """Returns the number of samples of a batch: dimension 0 of its first tensor that has one.

    Raises:
        UsageError: there is no such tensor.
    """
    found: list[int] = []
    apply_to_collection(batch, dtype=Tensor, function=lambda each: found.append(each.shape[0]) if each.dim() else None)
    if not found:
        raise UsageError(
            f"{_SETTING} cuts each batch by dimension 0 of its tensors, and this batch ({type(batch).__name__}) has no "
            f"tensor with a dimension; let the data loader give tensors of (batch, ...), or {_WITHOUT}"
        )
    return found[0]


def rows_of(batch: Any, samples: int, rows: slice | list[int]) -> Any:
    """Returns some samples of a batch, by a slice, or in the order of their numbers."""

    def cut(each: Any) -> Any:
        if isinstance(each, list):  # of texts or numbers, one for each sample; others may contain tensors
            plain = len(each) == samples and not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in each)
            if not plain:
                return [rows_of(item, samples, rows) for item in each]
            return each[rows] if isinstance(rows, slice) else [each[row] for row in rows]
        if not each.dim() or each.shape[0] == 1:
            return each
        if each.shape[0] != samples:
            raise UsageError(
                f"a batch has tensors of {samples} and of {each.shape[0]} rows (shape {tuple(each.shape)}), and {_SETTING} "
                f"cuts each batch by dimension 0 of its tensors; let the data loader give tensors of (batch, ...), or "
                f"{_WITHOUT}"
            )
        return each[rows]

    return apply_to_collection(batch, dtype=(Tensor, list), function=cut)


def _skipped(outputs: tuple[Any, Any]) -> None:
    if any(each is not None for each in outputs):
        raise UsageError(
            f"with {_SETTING} training_step returned None for one half of a batch and a loss for the other, so it would "
            f"skip half of a batch; return a loss for both (outputs.sum() * 0 where nothing is to be learnt), or {_WITHOUT}"
        )


def _together(outputs: tuple[Any, Any], loss: Tensor, shares: Tensor) -> dict[str, Any]:
    """Returns the results of a whole batch: means of numbers, tensors with the rows of both."""
    first, second = outputs
    if first.keys() != second.keys():
        raise UsageError(
            f"with {_SETTING} training_step returned {sorted(first)} for one half of a batch and {sorted(second)} for the "
            f"other; return the same keys for each batch, or {_WITHOUT}"
        )
    found: dict[str, Any] = {"loss": loss}
    for name in first.keys() - {"loss"}:
        one, other = first[name], second[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            raise UsageError(
                f"with {_SETTING} training_step returned {name!r} of type {type(one).__name__}, and only tensors of two "
                f"halves make one of the batch; return a tensor, or {_WITHOUT}"
            )
        if one.dim():
            found[name] = torch.cat([one, other])
        else:
            values = torch.stack([one, other])
            found[name] = (values * shares.to(values)).sum()
    return found


def refuse_module(module: LightningModule) -> None:
    """Checks that a module can train on halves.

    Raises:
        ConfigError: it optimizes by hand, is compiled, or has a BatchNorm.
    """
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            f"{_SETTING}: the {kind} optimizes by hand, and one backward pass has to follow both halves of a batch; return "
            f"the loss from training_step, or {_WITHOUT}"
        )
    for name, each in module.named_modules():
        if isinstance(each, BatchNorm):
            raise ConfigError(
                f"{_SETTING}: {name} is a {type(each).__name__}, whose statistics would be those of half of a batch; use a "
                f"norm that does not depend on the batch (GroupNorm, LayerNorm), or {_WITHOUT}"
            )
        if is_compiled(each):
            raise ConfigError(
                f"{_SETTING}: {name or kind} is compiled by torch.compile, which does not trace code that another thread "
                f"interrupts; leave compile out, or {_WITHOUT}"
            )
