"""Estimates of a model's operations and activation memory, unit by unit, from one forward on the meta device.

counting.py defines what is counted. This module makes the batch, and computes the activation bytes on the device at each tick
of a trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_ptm.data import SpanCorruption, TextBytes
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.forecasting.counting import WHOLE, Anatomy, Counter, Divided, UnitWork, anatomy
from lightning_ptm.models.base import LanguageModel
from lightning_ptm.models.moe import MixtureOfExperts
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.planning.token_chunks import divides
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.autograd.recompute import replace
from lightning_ptm.runtime.autograd.stage_cut import StageCut
from lightning_ptm.runtime.autograd.token_slices import TokenCut
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.terms import Phase
from lightning_ptm.torch_internals import tree_leaves, tree_map


def example_batch(data: LightningDataModule) -> Any:
    """Returns a batch of the data module, on the meta device.

    For this package's text modules no data is read; another module is set up, and its first batch is taken.

    Raises:
        ConfigError: the module gives no batch.
    """
    if isinstance(data, SpanCorruption):
        lengths = (data.input_length, data.target_length)
    elif isinstance(data, TextBytes):
        lengths = (data.sequence_length, data.sequence_length)
    else:
        try:
            data.prepare_data()
            data.setup("fit")
            batch = next(iter(data.train_dataloader()))
        except Exception as error:  # a user's data module may raise anything
            raise ConfigError(
                f"{type(data).__name__} gives no training batch, which a plan needs ({type(error).__name__}: {error}); make "
                f"its data available on this machine"
            ) from error
        return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)
    return tuple(torch.empty(data.batch_size, length, dtype=torch.long, device="meta") for length in lengths)


def resized(batch: Any, samples: int) -> Any:
    """Returns a batch with another number of samples, the first dimension of every tensor."""
    return tree_map(
        lambda leaf: leaf.new_empty((samples, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.ndim else leaf,
        batch,
    )


def sample_count(batch: Any) -> int:
    """Returns the number of samples of a batch: the first dimension of its first tensor."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def estimate(
    model: LightningModule,
    units: Sequence[Unit],
    batch: Any,
    dtype: torch.dtype,
    experts: DividedExperts | None = None,
    known: Anatomy | None = None,
    group: CountedTensorGroup | None = None,
    divided: Divided = WHOLE,
    token_slices: Mapping[str, TokenCut] | None = None,
) -> tuple[UnitWork, ...]:
    """Returns the counts of each unit for one batch, whose floating-point tensors are cast to `dtype`, the model's dtype.

    Args:
        experts: the experts that ranks divide: rank 0's compute the tokens of its whole group, others nothing.
        known: the model's anatomy, if it was looked up before.
        group: the tensor group that the model is cut for.
        divided: which part of the sequences a rank computes.
        token_slices: modules in slices of their tokens.

    Raises:
        ConfigError: the model cannot compute on the meta device; its sequences cannot be divided; or ranks divide experts of
            layers with unknown routing.
    """
    batch = _cast(batch, dtype)
    for name, layer in experts.layers if experts is not None else ():
        if not isinstance(layer, MixtureOfExperts):
            raise ConfigError(
                f"{name} ({type(layer).__name__}) divides its experts over ranks, and the number of tokens sent to each is "
                f"known for lightning_ptm.models.moe.MixtureOfExperts alone, so a step cannot be timed; plan with "
                f"expert_parallel_size=1, or use a MixtureOfExperts"
            )
    batch = _part(batch, divided.size)
    counter = Counter(known or anatomy(model, units), units, experts, group, divided, token_slices)
    with warnings.catch_warnings(), counter.counting():
        warnings.simplefilter("ignore")  # `self.log` without a Trainer
        try:
            _step(model, batch)
        except Exception as error:  # a user's model may raise anything
            raise ConfigError(
                f"{type(model).__name__} cannot compute on the meta device ({type(error).__name__}: {error}), so its "
                f"operations cannot be counted: its batch is {_in_words(batch)}; if the module takes another one, give that; "
                f"a forward that depends on values of tensors cannot be planned, only run"
            ) from error
    return counter.works()


def check_stages(
    model: LightningModule, units: Sequence[Unit], runs: Sequence[range], stages: int, batch: Any, dtype: torch.dtype
) -> None:
    """Checks that a model, which `estimate` has counted, computes in pipeline stages.

    Args:
        runs: the units of each run of blocks, in order; run i is on stage i modulo `stages`.

    Raises:
        ConfigError: it does not.
    """
    batch, received = _cast(batch, dtype), None
    for position, run in enumerate(runs):
        cut = StageCut(units, runs, position % stages, stages)
        restore = []
        for unit in units[1:]:
            wrapper = cut.wrapper(unit.index, absent=unit.index not in run)
            restore.append(replace(unit.module, forward=partial(wrapper, unit.module.forward)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `self.log` without a Trainer
                micro, result = cut.forward(lambda: _step(model, batch), received, chunk=position // stages)
            found = result.get("loss") if isinstance(result, Mapping) else result
            cut.check_loss(micro, found if isinstance(found, Tensor) else None)
        except UsageError as error:
            raise ConfigError(str(error)) from error
        finally:
            for undo in reversed(restore):
                undo()
        received = None if micro.output is None else micro.output.detach()


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating-point tensors have the model's dtype."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _step(model: LightningModule, batch: Any) -> Any:
    return model.loss(batch) if isinstance(model, LanguageModel) else training_step(model, batch)


def _part(batch: Any, ranks: int) -> Any:
    """Returns as many tokens of a batch as one of `ranks` has, along dimension 1 of tensors with as many as the first."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    length = next((leaf.shape[1] for leaf in leaves if leaf.dim() > 1), 0)
    if ranks == 1 or not length:
        return batch
    if not divides(length, ranks):
        raise ConfigError(
            f"context_parallel_size={ranks} cuts sequences into {2 * ranks} chunks, and the batch has sequences of {length} "
            f"tokens; give a multiple of {2 * ranks}"
        )

    def cut(leaf: Any) -> Any:
        divided = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == length
        return leaf[:, : length // ranks] if divided else leaf

    return tree_map(cut, batch)


def _in_words(batch: Any) -> str:
    """Dtypes and shapes of a batch: `float32 of 8x3`, `input_ids: int64 of 8x2048`."""
    if isinstance(batch, Mapping):
        return ", ".join(f"{name}: {_in_words(part)}" for name, part in batch.items())
    if isinstance(batch, Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        return f"{dtype} of {'x'.join(map(str, batch.shape)) or 'one element'}"
    if isinstance(batch, (tuple, list)):
        return f"({', '.join(map(_in_words, batch))})"
    return type(batch).__name__


def training_step(model: LightningModule, batch: Any) -> Any:
    """A training step for one batch, with its index if the method takes one."""
    takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
    return model.training_step(batch, 0) if takes_index else model.training_step(batch)


def activation_bytes(
    works: Sequence[UnitWork],
    recomputed: frozenset[int],
    trace: Trace,
    *,
    away: Collection[int] = (),
    around: Mapping[int, int] | None = None,
    of_slice: Mapping[int, int] | None = None,
    gradients: Sequence[int] = (),
    ends_with: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """Returns the bytes of activations on the device, at the peak of each tick of a training trace.

    The root unit's activations are counted for the whole step, though its head's exist only around the loss: this errs on the
    safe side. A backward tick has the saved tensors of all units whose backward is to come, all of its own unit's, the
    gradients of two of its inputs, and the gradients of parameters that autograd has put into `.grad`: they move to pages
    when their unit's backward ends. Those of the root are there from the first backward tick (the head's) to the last. Those
    of a unit come while what it has saved goes: they are counted beside it where it was computed again, and else as far as
    they take more. Measured peaks of a recomputed block are between the larger of both and their sum.

    Args:
        away: units whose saved tensors are offloaded (`offload_activations`): they are on the device while their unit
            computes, during the next forward, which copies them out, and during the backward before theirs, which copies them
            back.
        around: by unit, the recomputed unit around it, with which it is recomputed: both are in memory at once.
        of_slice: by unit among those that are recomputed, the saved bytes of one slice of the batch (`slices`): its results
            exist twice when they are joined.
        gradients: by unit, bytes of the gradients that move to pages; empty: none do.
        ends_with: for units whose gradients are complete only with those of another unit: that one (see UnitWork).
    """
    around, of_slice = around or {}, of_slice or {}
    kept = _kept_bytes(works, recomputed, around)
    saved = [of_slice.get(index, work.saved_bytes) for index, work in enumerate(works)]
    again = [saved[index] if index in recomputed else 0 for index in range(len(works))]
    for unit, outer in around.items():
        again[outer] += works[unit].saved_bytes
    again = [
        size + (0 if index in of_slice else work.slice_bytes)
        for index, (size, work) in enumerate(zip(again, works, strict=True))
    ]
    gradients = gradients or [0] * len(works)
    in_grad = _in_grad(trace, gradients, ends_with or {})
    held, found = list[int](), []
    is_held = [False] * len(works)
    held_bytes = away_bytes = 0  # the latter: of units whose saved tensors are offloaded
    for tick, waiting in zip(trace.ticks, in_grad, strict=True):
        work = works[tick.unit]
        # In a backward this unit is among those that are held.
        before = held_bytes
        if away:
            others = [unit for unit in held if unit != 0]
            if tick.phase is Phase.FORWARD:
                others = others[-1:]
            else:
                others = others[max(others.index(tick.unit) - 1, 0) :][:2] if tick.unit in others else others[-1:]
            before += sum(kept[unit] for unit in others if unit in away) - away_bytes
        if tick.phase is Phase.FORWARD:
            results = work.input_bytes if tick.unit in of_slice else 0
            found.append(before + max(kept[tick.unit] + results, saved[tick.unit]))
            if not is_held[tick.unit]:
                held.append(tick.unit)
                is_held[tick.unit] = True
                held_bytes += kept[tick.unit]
                away_bytes += kept[tick.unit] if tick.unit in away else 0
        else:
            own = gradients[tick.unit] if tick.unit else 0  # the root's are among those that wait
            if tick.unit not in recomputed:
                own = max(0, own - kept[tick.unit])
            found.append(before + again[around.get(tick.unit, tick.unit)] + 2 * work.input_bytes + own + waiting)
            if is_held[tick.unit]:
                # Most often the last one.
                if held[-1] == tick.unit:
                    held.pop()
                else:
                    held.remove(tick.unit)
                is_held[tick.unit] = False
                held_bytes -= kept[tick.unit]
                away_bytes -= kept[tick.unit] if tick.unit in away else 0
    return tuple(found)


def _in_grad(trace: Trace, gradients: Sequence[int], ends_with: Mapping[int, int]) -> list[int]:
    """Returns the bytes of gradients in `.grad` at each tick, without those of its own unit; arguments as in
    `activation_bytes`."""
    found: list[int] = []
    held: set[int] = set()
    for tick in trace.ticks:
        if tick.phase is Phase.BACKWARD:
            held.add(0)
        found.append(sum([gradients[unit] for unit in held]))
        if tick.phase is Phase.BACKWARD:
            held = {unit for unit in (*held, tick.unit) if unit == 0 or ends_with.get(unit, unit) != tick.unit}
    return found


def offloaded_bytes(
    works: Sequence[UnitWork],
    recomputed: frozenset[int],
    around: Mapping[int, int] | None = None,
    *,
    away: Collection[int] | None = None,
) -> int:
    """Returns the bytes of the units `away`, by default all but the root, that are offloaded in a forward and copied back in
    the backward (`offload_activations`)."""
    kept = _kept_bytes(works, recomputed, around or {})
    return sum(kept[unit] for unit in (range(1, len(works)) if away is None else away))


def _kept_bytes(works: Sequence[UnitWork], recomputed: frozenset[int], around: Mapping[int, int]) -> list[int]:
    return [
        0 if index in around else work.input_bytes if index in recomputed else work.saved_bytes
        for index, work in enumerate(works)
    ]


def forwards(phase: Phase, *, recomputed: bool) -> int:
    """Returns the number of forwards that one tick of a unit counts for."""
    return 1 if phase is Phase.FORWARD else 3 if recomputed else 2
