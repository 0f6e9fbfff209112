"""What the user's module and optimizers get back when a run ends: ordinary tensors, where RAM holds them.

Knows the engine; decides nothing about pages. Every function is collective.
I1: what a run has trained is never dropped for want of RAM: where all weights do not fit, those that were trained come back
alone; where these do not, the caller writes them to disk. What was never trained is where it came from.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Collection, Iterable

from torch.optim import Optimizer

from lightning_ptm.checkpoints.optimizer_states import give_back_optimizer_state
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import PageIOError, UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.tensors.page_io import in_pages
from lightning_ptm.runtime.units.binding import ENDED, FlatBinding

log = logging.getLogger(__name__)


class GivenBack(enum.Enum):
    """Which of the weights come back at the end of a run."""

    NONE = "none: they are not wanted, or not known"
    ALL = "all"
    TRAINED = "those that were trained, since RAM has no room for all"
    WRITTEN = "none: they go to disk, since RAM has no room for those that were trained"


def _needed(engine: Engine, ranks_here: int, *, whole: bool) -> tuple[int, int]:
    """RAM that all weights take, and that those which were trained do, on this machine."""
    every, left_out = list(engine.gathered_flats.bindings()), engine.lent_parameters.untrained()
    trained = [each for each in every if each not in left_out]
    # What the user has built, and pages have rounded, was in RAM all the time.
    total = engine.precise_bytes(with_other_parts=whole) - engine.values.bytes_of_originals()
    return total * ranks_here, engine.precise_bytes_of(trained, with_other_parts=whole) * ranks_here


def decided(engine: Engine, *, wanted: bool, ranks_here: int, whole: bool = False) -> GivenBack:
    """What will be given back, by the RAM that is free now.

    Args:
        wanted: the user wants weights.
        ranks_here: ranks that share this machine's RAM.
        whole: parts of parameters will be put together.
    """
    if (engine.barriers.failed and not engine.communicator.alone) or engine.values.unknown or not wanted:
        return GivenBack.NONE
    every, trained = _needed(engine, ranks_here, whole=whole)
    every += _read_at_once(engine, ()) * ranks_here
    trained += _read_at_once(engine, engine.lent_parameters.untrained()) * ranks_here
    if engine.barriers.all_agree(every <= _free_bytes(engine)):
        return GivenBack.ALL
    return GivenBack.TRAINED if engine.barriers.all_agree(trained <= _free_bytes(engine)) else GivenBack.WRITTEN


def _read_at_once(engine: Engine, left_out: Collection[FlatBinding]) -> int:
    """RAM that the largest flat takes for a moment beside its parameters, where it is read from a file."""
    flats = (flat for store in engine.stores for flat in store.flats if flat.binding not in left_out)
    homes = (engine.gathered_flats.precise_home(flat) for flat in flats)
    return max((home.numel * home.dtype.itemsize for home in homes if not in_pages(home).tier.addressable), default=0)


def _free_bytes(engine: Engine) -> int:
    free = free_host_bytes()
    return free if engine.heap is None else min(free, engine.heap.free_bytes())


def _untouched_bytes(engine: Engine) -> int:
    """Of pools in RAM, what only steps will touch: gradients, states, staging."""
    ram = engine.blueprint.ram
    laid = sum(engine.gathered_flats.bytes_of_homes(flat) for store in engine.stores for flat in store.flats)
    return max(0, engine.blueprint.pool_bytes[ram] - laid)


def foretold(engine: Engine, *, ranks_here: int, whole: bool = False) -> str:
    """What will not be given back, as far as can be told before the first step; empty: all will be. Not collective."""
    every, trained = _needed(engine, ranks_here, whole=whole)
    free = free_host_bytes() - _untouched_bytes(engine) * ranks_here
    if every <= free:
        return ""
    if trained <= free:
        return (
            f"RAM will have no room for all weights at the end of this run ({format_bytes(every)} in full precision, "
            f"{format_bytes(max(free, 0))} free): the module gets those back that are trained ({format_bytes(trained)}), so "
            f"that adapters can be saved (save_pretrained, save_checkpoint(..., weights_only=True)), and its frozen "
            f"parameters have no values then; to have all, make more RAM available, or load the result over the base model"
        )
    return (
        f"RAM will have no room for the trained weights at the end of this run ({format_bytes(trained)} in full precision, "
        f"{format_bytes(max(free, 0))} free): they are written to disk then, as a sharded checkpoint, and the module's "
        f"parameters have no values; restore_weights=False says that they are not wanted, as where ModelCheckpoint saves them"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """What became of the weights.

    Attributes:
        given: what was trained has its values.
        failure: what an update has raised that nobody has heard of yet.
    """

    given: bool
    failure: Exception | None = None


def weights(
    engine: Engine, back: GivenBack, told_later: list[Exception], *, again: str = "", path: str = ""
) -> Returned:
    """Puts whole, precise weights into the module's parameters; lets go of others: they cannot be read then.

    Args:
        back: what `decided` has said.
        told_later: gets the error of what was written to copies since the last step began, and is lost.
        again: how frozen parameters get their values in a next run; empty: somebody has to load them.
        path: where weights were written to instead.

    Raises:
        What the last updates of a run have met that nobody else has heard of yet, if no weights come back, e.g. PageIOError.
    """
    if engine.barriers.failed and not engine.communicator.alone:
        log.warning(
            "this run has failed, so the module's parameters have no values any more; load them from a checkpoint"
        )
        engine.lent_parameters.let_go()
        return Returned(False)
    if back in (GivenBack.NONE, GivenBack.WRITTEN):
        absent = f"were written to {path} when its run ended, for want of RAM; load them from there" if path else ENDED
        try:
            if not engine.barriers.failed:
                engine.drain("weights at the end", at_end=True)
                _look_for_lost_writes(engine, told_later)
        finally:
            engine.lent_parameters.let_go(absent)
        return Returned(False)
    left_out = engine.lent_parameters.untrained() if back is GivenBack.TRAINED else []
    try:
        failure = _drained(engine)
        engine.executor.release_all()
        _look_for_lost_writes(engine, told_later)
        engine.lent_parameters.restore(left_out, _left_out(again))
    except Exception as error:
        engine.lent_parameters.let_go()
        if not engine.barriers.failed:
            raise  # the first to hear of the last step's update: nobody else would report it
        log.warning("the weights could not be given back to the module: %s", error)
        return Returned(False)
    if failure is not None:
        log.warning("an update has failed, so that some of the module's weights may be of the step before: %s", failure)
    return Returned(True, None if engine.barriers.failed else failure)


def _drained(engine: Engine) -> Exception | None:
    """All updates are done, or none is under way any more: the error that has ended them.

    Raises:
        It, where it says nothing of pages (PageIOError: what they hold is unknown), or where ranks would have to agree.
    """
    try:
        engine.drain("weights at the end", at_end=True)
    except Exception as error:
        if isinstance(error, PageIOError) or not engine.update_failed or not engine.communicator.alone:
            raise
        engine.stop_updates()
        return error
    return None


def _left_out(again: str) -> str:
    then = again or "load them from where they came from (the base model's files)"
    return f"ended with a run that did not train it, since RAM had no room for them; {then}, or make more RAM available"


def _look_for_lost_writes(engine: Engine, told_later: list[Exception]) -> None:
    try:
        engine.lent_parameters.check_written()
        engine.updates.check_stepped()
    except UsageError as error:
        if not engine.barriers.failed:  # else the run's own error has been told, which may be this one
            told_later.append(error)


def optimizer_states(
    engine: Engine, optimizers: Iterable[Optimizer], kept: Collection[Optimizer], *, whole: bool = False
) -> bool:
    """Puts the optimizers' states back, so that `save_checkpoint` after `fit` saves all that it saves with any strategy.

    Args:
        kept: those that get them on this rank; fetching is collective.
        whole: the module has whole parameters again, of which it had parts in the run.

    Returns:
        Whether they have them: not when RAM cannot hold a copy (in half of what is free, where any lived on disk: its owner
        wanted RAM for other things), or a run on several ranks has failed, or the module has parts of parameters, and whole
        states would fit none.
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
        give_back_optimizer_state(engine, optimizer, keep=optimizer in kept)
    return True
