"""Restores weights and optimizer states to the user's module and optimizers when a run ends, as far as RAM has room.

Knows the engine; decides nothing about pages. Every function is collective unless it says otherwise.
I1: weights that a run has trained are never dropped for want of RAM. If not all weights fit, only trained ones are
restored; if these do not fit, the caller writes them to disk. Weights that were never trained can be loaded from their
source again.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Collection, Iterable

from torch.optim import Optimizer

from lightning_ptm.checkpoints.optimizer_states import restore_optimizer_state
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import PageIOError, UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.units.binding import ENDED, FlatBinding

log = logging.getLogger(__name__)


class RestoredWeights(enum.Enum):
    """Parameters whose weights are restored at the end of a run."""

    NONE = "none: they are not wanted, or have no values"
    ALL = "all"
    TRAINED = "those that were trained, since RAM has no room for all"
    WRITTEN = "none: they are written to disk, since RAM has no room for those that were trained"


def _needed(engine: Engine, ranks_here: int, *, whole: bool) -> tuple[int, int]:
    """Returns the RAM of this machine that all weights take, and that trained ones take."""
    every, left_out = list(engine.gathered_flats.bindings), engine.gathered_parameters.untrained()
    trained = [each for each in every if each not in left_out]
    # The user's original tensors, which pages have rounded, are in RAM already.
    total = engine.precise_bytes(with_other_parts=whole) - engine.values.bytes_of_originals()
    return total * ranks_here, engine.precise_bytes_of(trained, with_other_parts=whole) * ranks_here


def decide(engine: Engine, *, wanted: bool, ranks_here: int, whole: bool = False) -> RestoredWeights:
    """Decides which weights are restored, by the RAM that is free now.

    Args:
        wanted: whether the user wants them (restore_weights).
        ranks_here: number of ranks that share this machine's RAM.
        whole: whether slices of parameters will be assembled to whole ones.
    """
    if (engine.barriers.failed and not engine.communicator.alone) or engine.values.unknown or not wanted:
        return RestoredWeights.NONE
    every, trained = _needed(engine, ranks_here, whole=whole)
    every += _read_at_once(engine, ()) * ranks_here
    trained += _read_at_once(engine, engine.gathered_parameters.untrained()) * ranks_here
    if engine.barriers.all_agree(every <= _free_bytes(engine)):
        return RestoredWeights.ALL
    return (
        RestoredWeights.TRAINED
        if engine.barriers.all_agree(trained <= _free_bytes(engine))
        else RestoredWeights.WRITTEN
    )


def _read_at_once(engine: Engine, left_out: Collection[FlatBinding]) -> int:
    """Returns the RAM that restoring takes besides the parameters: that of reading the flat that takes most."""
    flats = (flat for store in engine.stores for flat in store.flats if flat.binding not in left_out)
    return max(map(engine.values.bytes_to_read, flats), default=0)


def _free_bytes(engine: Engine) -> int:
    free = free_host_bytes()
    return free if engine.heap is None else min(free, engine.heap.free_bytes())


def _untouched_bytes(engine: Engine) -> int:
    """Returns the bytes of pools in RAM that only steps will touch: gradients, optimizer states, staging."""
    ram = engine.blueprint.ram
    laid = sum(engine.gathered_flats.bytes_of_homes(flat) for store in engine.stores for flat in store.flats)
    return max(0, engine.blueprint.pool_bytes[ram] - laid)


_GROWTH_SHARE = 1 / 8
"""Share of the RAM that is free before the first step which steps may take for good: heaps of threads, kernels, libraries
that are loaded when they are first used. Fine-tuning a model of 255 million parameters took 110 MiB of 1.1 GiB."""


def prediction(engine: Engine, *, ranks_here: int, whole: bool = False) -> str:
    """Returns a message that says what will not be restored, as predicted before the first step; empty if all will be.
    Not collective."""
    every, trained = _needed(engine, ranks_here, whole=whole)
    free = min(free_host_bytes() - _untouched_bytes(engine) * ranks_here, _free_bytes(engine))
    sure = int(free * (1 - _GROWTH_SHARE))
    if every + _read_at_once(engine, ()) * ranks_here <= sure:
        return ""
    if trained + _read_at_once(engine, engine.gathered_parameters.untrained()) * ranks_here <= sure:
        return (
            f"RAM may have no room for all weights at the end of this run ({format_bytes(every)} in full precision, "
            f"{format_bytes(max(free, 0))} free now), and then the module gets only its trained weights back "
            f"({format_bytes(trained)}), {_ENOUGH}; to have all, make more RAM available, or load the result over the base "
            "model"
        )
    will = "will" if trained > free else "may"
    return (
        f"RAM {will} have no room for the trained weights at the end of this run ({format_bytes(trained)} in full "
        f"precision, {format_bytes(max(free, 0))} free now); then they are written to disk as a sharded checkpoint, and the "
        "module's parameters have no values; give tuning=Tuning(restore_weights=False) if they are not wanted, as where "
        "ModelCheckpoint saves them"
    )


_ENOUGH = (
    "enough to save the adapters that were trained (save_pretrained, with selected_adapters if the module has others, and "
    "save_checkpoint(..., weights_only=True)), and its frozen parameters have no values"
)


def lacking(reload_hint: str) -> str:
    """Returns a message for a run at whose end only trained weights are restored. Args: as for `weights`."""
    source = _source(reload_hint)
    return f"RAM has no room for all weights, so the module gets only its trained ones back, {_ENOUGH}; {source}"


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """The result of restoring weights.

    Attributes:
        given: whether the trained parameters have their values.
        failure: error of an update that was not raised yet.
    """

    given: bool
    failure: Exception | None = None


def weights(
    engine: Engine, back: RestoredWeights, lost_writes: list[BaseException], *, reload_hint: str = "", path: str = ""
) -> Returned:
    """Restores precise, whole weights to the module's parameters. Parameters that are not restored cannot be read then.

    Args:
        back: the result of `decide`.
        lost_writes: list to which an error is added if the user has written to copies of parameters since the last step
            began, so that the writes are lost.
        reload_hint: how frozen parameters get their values in the next run; empty: the user has to load them.
        path: folder to which weights were written instead.

    Raises:
        The error of the last updates that was not raised yet, if no weights are restored, e.g. PageIOError.
    """
    if engine.barriers.failed and not engine.communicator.alone:
        log.warning("this run has failed, so the module's parameters have no values; load them from a checkpoint")
        engine.gathered_parameters.detach()
        return Returned(False)
    if back in (RestoredWeights.NONE, RestoredWeights.WRITTEN):
        absent = (
            f"were written to {path} at the end of their run, for want of RAM; load them from there" if path else ENDED
        )
        try:
            if not engine.barriers.failed:
                engine.drain("weights at the end", at_end=True)
                _check_lost_writes(engine, lost_writes)
        finally:
            engine.gathered_parameters.detach(absent)
        return Returned(False)
    left_out = engine.gathered_parameters.untrained() if back is RestoredWeights.TRAINED else []
    try:
        failure = _drained(engine)
        engine.executor.release_all()
        _check_lost_writes(engine, lost_writes)
        engine.gathered_parameters.restore(left_out, _left_out(reload_hint))
    except Exception as error:
        engine.gathered_parameters.detach()
        if not engine.barriers.failed:
            raise  # the error of the last step's update, which nothing else reports
        log.warning("the weights could not be restored to the module: %s", error)
        return Returned(False)
    if failure is not None:
        log.warning("an update has failed, so that some of the module's weights may be of the step before: %s", failure)
    return Returned(True, None if engine.barriers.failed else failure)


def _drained(engine: Engine) -> Exception | None:
    """Drains all updates. Returns the error that has ended them, if the weights can be restored all the same.

    Raises:
        The error, if it makes pages unreliable (PageIOError), or if there are several ranks, which would have to agree.
    """
    try:
        engine.drain("weights at the end", at_end=True)
    except Exception as error:
        if isinstance(error, PageIOError) or not engine.update_failed or not engine.communicator.alone:
            raise
        engine.stop_updates()
        return error
    return None


def _left_out(reload_hint: str) -> str:
    return (
        "ended with a run that did not train it, since RAM had no room for them; "
        f"{_source(reload_hint)}, or make more RAM available"
    )


def _source(reload_hint: str) -> str:
    return reload_hint or "load them from where they came from (the base model's files)"


def _check_lost_writes(engine: Engine, lost_writes: list[BaseException]) -> None:
    try:
        engine.gathered_parameters.check_written()
        engine.updates.check_stepped()
    except UsageError as error:
        if not engine.barriers.failed:  # else the run's error was reported, which may be this one
            lost_writes.append(error)


def optimizer_states(
    engine: Engine, optimizers: Iterable[Optimizer], kept: Collection[Optimizer], *, whole: bool = False
) -> bool:
    """Restores the optimizers' states, so that `save_checkpoint` after `fit` saves what it saves with any strategy.

    Args:
        kept: optimizers whose states this rank keeps; all ranks take part in gathering them.
        whole: whether the module has whole parameters again, after a run with slices.

    Returns:
        Whether they were restored. They are not if RAM has no room for a copy (in half of the free RAM if any states
        are on disk, whose owner wants RAM for other things), if a run on several ranks has failed, or if the module has
        slices of parameters, which whole states would not fit.
    """
    if engine.barriers.failed and not engine.communicator.alone:
        return False
    if engine.blueprint.holders.in_parts and not whole:
        return False
    in_memory, on_disk = engine.optimizer_state_bytes(on_disk=False), engine.optimizer_state_bytes(on_disk=True)
    room = _free_bytes(engine) // 2 if on_disk else _free_bytes(engine)
    # Ranks that hold different experts may keep them in different tiers.
    if not engine.barriers.all_agree(in_memory + on_disk <= room):
        return False
    for optimizer in optimizers:
        restore_optimizer_state(engine, optimizer, keep=optimizer in kept)
    return True
