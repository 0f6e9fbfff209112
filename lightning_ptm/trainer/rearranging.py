"""A run whose parameters are rearranged between two batches: unfrozen, put into groups that an optimizer had not, added,
replaced, removed, or given another shape.

Pages were laid out for what was there when the run began. Where a run can do without pages, it goes on without; elsewhere
it is laid out anew, for what there is now, and its states are carried over (checkpoints/carried.py).
I1: it goes on with the numbers of a plain Trainer: every parameter, master and optimizer state keeps its bits.
I2: what is looked at as a whole (an evaluation, a checkpoint) has the parameters that the module has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.checkpoints.carried import Carried, warn_of_resized
from lightning_ptm.checkpoints.carried_in_files import CarriedInFiles
from lightning_ptm.checkpoints.carried_in_pages import CarriedInPages
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.errors import UsageError, some
from lightning_ptm.trainer.checkpointing import RunCheckpoints
from lightning_ptm.trainer.ending import end, having_states
from lightning_ptm.trainer.paged_optimizer_state import opened
from lightning_ptm.trainer.run import Run
from lightning_ptm.trainer.stale_optimizers import spend

log = logging.getLogger(__name__)

_CUT_OFF = (
    "the run was cut short while it was laid out anew for the parameters that there are now, so that what its optimizers "
    "have learnt is incomplete; go on from an earlier checkpoint"
)


def follow_rearranging(run: Run, checkpoints: RunCheckpoints) -> None:
    """Between two batches: the run fits what the user has made of its parameters. Collective where it does not.

    Raises:
        UsageError: gradients wait for their step.
    """
    if not run.has_pages or not run.engine.changes.outgrown():
        return
    engine = run.engine
    for optimizer in run.paged_optimizers() if engine.lent_parameters.resized else ():
        warn_of_resized(engine, optimizer)
    counted = run.statistics()
    engine.barriers.check_relayout(engine.changes.differences())
    if engine.blueprint.may_be_outside and engine.changes.gradients_in_place:
        end(run, checkpoints)
        run.lay_out()
        run.watch(anew=True)
    else:
        _refuse(run)
        with engine.changes.frozen_as_trained():
            lay_out_anew(run)
    run.follow_loads(partial(follow_loaded_state, run, checkpoints))
    run.counts_from(counted)
    run.tell_where_states_are()


def follow_other_parameters(run: Run, checkpoints: RunCheckpoints) -> None:
    """I2. Collective where there are some."""
    if not run.has_pages or not run.fits or not run.engine.changes.other_parameters():
        return
    interruption = run.interruption
    if interruption is None or not interruption.here:
        with torch.inference_mode(False):  # an evaluation's, of which tensors could not train later
            follow_rearranging(run, checkpoints)
        return
    run.settle()
    if not run.unsaved:
        with interruption.told():
            raise UsageError(
                "parameters were added, replaced or resized just before the run was cut short, and no pages have them; "
                "go on from an earlier checkpoint"
            )


def follow_loaded_state(run: Run, checkpoints: RunCheckpoints, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """A hook of the user's has called the `load_state_dict` of an optimizer."""
    follow_other_parameters(run, checkpoints)
    run.follow_loaded_state(optimizer, state)


def lay_out_anew(run: Run) -> None:
    """From old pages to new ones. Collective."""
    run.saves.finish()
    optimizers = run.paged_optimizers()
    _check_parameters(run, optimizers)
    learnt = having_states(run.engine)
    with closing(carried_by(run, optimizers)) as carried:
        try:
            _leave_pages(run, carried)
            carried.left()
            run.lay_out(given=carried.given(), handed=carried.handed)
            run.watch(anew=True)
            carried.give_back(run.engine, run.module, optimizers)
            carried.fill(run.engine, optimizers)
            run.trainer.strategy.barrier()  # all have read
        except BaseException:
            run.lose_states(_CUT_OFF)
            spend(learnt)
            if not run.has_pages:
                _rescue(run, carried)
            raise


def _rescue(run: Run, carried: Carried) -> None:
    """There is no engine any more, and will be none."""
    try:
        if run.builder.settings.tuning.restore_weights and carried.rescue(run.module):
            run.builder.between.note(weights=True)
    except Exception as error:  # the first one is what is to be heard of
        log.warning("the weights could not be given back to the module: %s", error)


def carried_by(run: Run, optimizers: Sequence[Optimizer]) -> Carried:
    """From page to page; a device has no room for old pages and new ones."""
    builder = run.builder
    if not builder.place.backend.apart:
        return CarriedInPages(run.engine, run.module, optimizers)
    ranks_here, ops = builder.place.ranks_here, builder.save_ops()
    return CarriedInFiles(run.engine, run.module, optimizers, run.room, ranks_here=ranks_here, ops=ops)


def _check_parameters(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """What pages cannot have is refused while the old ones are there, so that the module gets its weights back."""
    assert run.communicator is not None
    with ExitStack() as states:
        for optimizer in optimizers:
            states.enter_context(opened(plain_optimizer(optimizer)))  # classes are tried
        run.builder.check(run.communicator, run.cut)


def _refuse(run: Run) -> None:
    """What would be lost is refused while everything is there.

    Raises:
        UsageError: gradients wait for their step, parameters were given values that no pages know, or nobody has said
            who is to have which part of new ones.
    """
    engine, builder = run.engine, run.builder
    for binding in engine.gathered_flats.bindings():
        if not binding.lent:
            binding.check()
    known = {id(parameter) for _, parameter in engine.gathered_flats.names()}
    new = [name for name, each in run.module.named_parameters() if id(each) not in known]
    used_are_forgotten = builder.precision.forgets_used_gradients(run.module)
    waiting = engine.changes.waiting_gradients(used_are_forgotten=used_are_forgotten)
    if waiting:
        raise UsageError(
            f"parameters were added, replaced, unfrozen, or put into groups of an optimizer, while gradients wait for "
            f"their step ({some(waiting, 2)}), and pages are laid out anew between two steps alone; do it when a step "
            f"has been taken and its gradients are forgotten (optimizer.zero_grad() behind the step, in manual "
            f"optimization)"
        )
    divided = run.boxes() or builder.groups.tensor is not None or builder.settings.expert_parallel_size > 1
    if new and divided:
        raise UsageError(
            f"parameters were added, replaced or resized ({some(new, 3)}) in a run in which ranks divide parameters or "
            f"experts, and nobody has said who is to have which part of them; end this fit and start another one, or "
            f"make them before, frozen until they are to train (requires_grad_(False))"
        )


def _leave_pages(run: Run, carried: Carried) -> None:
    """The engine ends, and nothing is given back: the run goes on with another one."""
    engine, communicator = run.engine, run.communicator
    run.disconnect_tensor_group()
    with ExitStack() as steps:  # the last one first
        steps.callback(engine.close)
        if communicator is not None:
            steps.callback(communicator.close)
        steps.callback(engine.changes.leave, carried.dtypes())
        run.leave([])
