"""What the user's module and optimizers get back when a run ends: ordinary tensors, where RAM holds them.

Knows the engine; decides nothing about pages. Every function is collective.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable

from torch.optim import Optimizer

from lightning_ptm.checkpoints.optimizer_states import give_back_optimizer_state
from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.machine import free_host_bytes

log = logging.getLogger(__name__)


def weights(engine: Engine, told_later: list[Exception], *, wanted: bool, ranks_here: int, whole: bool = False) -> bool:
    """Puts whole, precise weights into the module's parameters; otherwise lets them go: they cannot be read then.

    Args:
        told_later: gets the error of what was written to copies since the last step began, and is lost.
        wanted: the user wants them.
        ranks_here: ranks that share this machine's RAM.
        whole: parts of parameters will be put together.

    Returns:
        Whether the parameters have their values.

    Raises:
        What the last updates of a run have met that nobody else has heard of yet, e.g. PageIOError.
    """
    if engine.rendezvous.failed and not engine.communicator.alone:
        log.warning(
            "this run has failed, so the module's parameters have no values any more; load them from a checkpoint"
        )
        engine.lending.let_go()
        return False
    if engine.values.unknown:
        engine.lending.let_go()
        return False
    needed = engine.precise_bytes(with_other_parts=whole) * ranks_here
    room = wanted and engine.rendezvous.all_say(needed <= free_host_bytes())
    if wanted and not room:
        warnings.warn(
            f"the weights take {needed} bytes and RAM has {free_host_bytes()} free, so the module's parameters have no "
            f"values after this run; load them from a checkpoint",
            stacklevel=2,
        )
    if not room:
        try:
            if not engine.rendezvous.failed:
                engine.drain("weights at the end", at_end=True)
                _look_for_lost_writes(engine, told_later)
        finally:
            engine.lending.let_go()
        return False
    try:
        engine.drain("weights at the end", at_end=True)
        engine.executor.release_all()
        _look_for_lost_writes(engine, told_later)
        engine.lending.restore()
    except Exception as error:
        engine.lending.let_go()
        if not engine.rendezvous.failed:
            raise  # the first to hear of the last step's update: nobody else would report it
        log.warning("the weights could not be given back to the module: %s", error)
        return False
    return True


def _look_for_lost_writes(engine: Engine, told_later: list[Exception]) -> None:
    try:
        engine.lending.check_written()
        engine.updates.check_stepped()
    except UsageError as error:
        if not engine.rendezvous.failed:  # else the run's own error has been told, which may be this one
            told_later.append(error)


def optimizer_states(
    engine: Engine, optimizers: Iterable[Optimizer], kept: Collection[Optimizer], *, whole: bool = False
) -> bool:
    """Puts the optimizers' states back, so that `save_checkpoint` after `fit` saves all that it saves with any strategy.

    Args:
        kept: those that get them on this rank; fetching is collective.
        whole: the module has whole parameters again, of which it had parts in the run.

    Returns:
        Whether they have them: not when any lived on disk, or RAM cannot hold a copy, or a run on several ranks has failed,
        or the module has parts of parameters, and whole states would fit none.
    """
    if engine.rendezvous.failed and not engine.communicator.alone:
        return False
    if engine.blueprint.holders.in_parts and not whole:
        return False
    needed = engine.optimizer_state_bytes(on_disk=False)
    # Ranks that hold different experts may keep them in different tiers.
    if not engine.rendezvous.all_say(not engine.optimizer_state_bytes(on_disk=True) and needed <= free_host_bytes()):
        return False
    for optimizer in optimizers:
        give_back_optimizer_state(engine, optimizer, keep=optimizer in kept)
    return True
