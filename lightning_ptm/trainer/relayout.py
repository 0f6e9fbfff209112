"""Re-layout of a run whose parameters change between two batches: they are unfrozen, moved to other parameter groups, added,
replaced, removed, or given another shape.

Pages were laid out for the parameters at the start of the run. If the run does not need pages, it continues without;
otherwise it is laid out again for the current parameters, and its states are carried over (checkpoints/carried_states.py).
I1: the run continues with the numbers of a plain Trainer: every parameter, master weight and optimizer state keeps its bits.
I2: evaluations and checkpoints see the parameters that the module has at that time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.checkpoints.carried_states import CarriedStates, StatesInFiles, StatesInPages, warn_of_resized
from lightning_ptm.checkpoints.optimizer_states import mark_stale, opened, plain_optimizer
from lightning_ptm.checkpoints.run_checkpoints import RunCheckpoints
from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.deciding.decide import CheckedParameters
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.trainer.run import Run
from lightning_ptm.trainer.teardown import end, having_states

log = logging.getLogger(__name__)

_CUT_OFF = (
    "the run was cut short while pages were laid out again, after parameters were added, replaced or unfrozen, so the "
    "states of its optimizers are incomplete; resume from an earlier checkpoint"
)


def follow_rearranging(run: Run, checkpoints: RunCheckpoints) -> None:
    """Adapts a run with pages to changed parameters (`Run.outgrown`), between two batches. Collective.

    Raises:
        UsageError: gradients are pending.
    """
    engine = run.engine
    for optimizer in run.paged_optimizers() if engine.gathered_parameters.resized else ():
        warn_of_resized(engine, optimizer)
    counted = run.statistics()
    engine.barriers.check_relayout(engine.changes.differences())
    if engine.blueprint.may_be_outside and engine.changes.gradients_in_place:
        end(run, checkpoints)
        run.lay_out()
        run.watch(relayout=True)
    else:
        _refuse(run)
        with engine.changes.frozen_as_trained():
            lay_out_again(run)
    run.follow_loads(partial(follow_loaded_state, run, checkpoints))
    run.continue_statistics(counted)
    run.log_where_states_are()


def follow_other_parameters(run: Run, checkpoints: RunCheckpoints) -> None:
    """Adapts the run to added, replaced or resized parameters before they are read as a whole (I2). Collective if there are
    any."""
    if not run.has_pages or not run.fits or not run.engine.changes.other_parameters():
        return
    interruption = run.interruption
    if interruption is None or not interruption.on_this_rank:
        with torch.inference_mode(False):  # tensors made in an evaluation's inference mode could not train later
            follow_rearranging(run, checkpoints)
        return
    run.settle()
    if not run.unsaved:
        with interruption.recorded():
            raise UsageError(
                "parameters were added, replaced or resized just before the run was cut short, and are in no pages, "
                "so no checkpoint of this state can be written; resume from an earlier checkpoint"
            )


def follow_loaded_state(run: Run, checkpoints: RunCheckpoints, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Handles a call of an optimizer's `load_state_dict` by a hook of the user."""
    follow_other_parameters(run, checkpoints)
    run.follow_loaded_state(optimizer, state)


def lay_out_again(run: Run) -> None:
    """Replaces the engine and its pages by new ones, with all states. Collective."""
    run.saves.finish()
    optimizers = run.paged_optimizers()
    checked = _check_parameters(run, optimizers)
    learnt = having_states(run.engine)
    with closing(carried_by(run, optimizers)) as carried:
        try:
            _leave_pages(run, carried)
            carried.old_engine_closed()
            run.lay_out(given=carried.given(), handed=carried.handed, checked=checked)
            run.watch(relayout=True)
            carried.restore_removed(run.engine, run.module, optimizers)
            carried.fill(run.engine, optimizers)
            run.trainer.strategy.barrier()  # all ranks have read the carried states
        except BaseException:
            run.lose_states(_CUT_OFF)
            mark_stale(learnt)
            if not run.has_pages:
                _rescue(run, carried)
            raise
    run.engine.allocator.pin_host_memory()  # the old pages are freed: locked pages take RAM at once


def _rescue(run: Run, carried: CarriedStates) -> None:
    """Gives the weights back to the module after a failed re-layout, which leaves the run without an engine."""
    try:
        if run.builder.settings.tuning.restore_weights and carried.rescue(run.module):
            run.builder.between.note(weights=True)
    except Exception as error:  # the first error is the one to report
        log.warning("the weights could not be given back to the module: %s", error)


def carried_by(run: Run, optimizers: Sequence[Optimizer]) -> CarriedStates:
    """Carries the states from page to page, or through files where RAM has no room for those that are on the device, whose
    old and new pages do not fit there together. Collective."""
    builder, engine = run.builder, run.engine
    ranks_here, ops = builder.place.ranks_here, builder.save_ops()
    lacking = torch.tensor([engine.bytes_to_ram() * ranks_here > free_host_bytes()], dtype=torch.int64)
    if not bool(engine.communicator.all_reduce(lacking, maximum=True)):
        return StatesInPages(engine, run.module, optimizers)
    return StatesInFiles(engine, run.module, optimizers, run.room, ranks_here=ranks_here, ops=ops)


def _check_parameters(run: Run, optimizers: Sequence[Optimizer]) -> CheckedParameters:
    """Checks that pages can hold the parameters while the old pages exist, so that the module can get its weights back."""
    assert run.communicator is not None
    with ExitStack() as states:
        for optimizer in optimizers:
            states.enter_context(opened(plain_optimizer(optimizer)))  # trials read their classes' states
        return run.builder.check(run.communicator, run.cut)


def _refuse(run: Run) -> None:
    """Refuses a re-layout that would lose something, before anything is changed.

    Raises:
        UsageError: gradients are pending, parameters were given values that are not in pages, or new parameters have no
            defined slice for each rank.
    """
    engine, builder = run.engine, run.builder
    for binding in engine.gathered_flats.bindings:
        if not binding.lent:
            binding.check()
    known = {id(parameter) for _, parameter in engine.gathered_flats.names()}
    new = [name for name, each in run.module.named_parameters() if id(each) not in known]
    used_are_forgotten = builder.precision.forgets_used_gradients(run.module)
    waiting = engine.changes.waiting_gradients(used_are_forgotten=used_are_forgotten)
    if waiting:
        raise UsageError(
            f"parameters were added, replaced, unfrozen, or put into groups of an optimizer, while gradients are pending "
            f"({some(waiting, 2)}), and pages can be laid out again only between two steps; do it after a step has been "
            f"taken and its gradients are zeroed (optimizer.zero_grad() after the step, in manual optimization)"
        )
    divided = run.boxes() or builder.groups.tensor is not None or builder.settings.expert_parallel_size > 1
    if new and divided:
        raise UsageError(
            f"parameters were added, replaced or resized ({some(new, 3)}) in a run in which ranks divide parameters or "
            f"experts, and which slice of them each rank has is not defined; end this fit and start another one, or "
            f"create them before, frozen until they train (requires_grad_(False))"
        )


def _leave_pages(run: Run, carried: CarriedStates) -> None:
    """Closes the engine without giving anything back, since the run continues with a new one."""
    engine, communicator = run.engine, run.communicator
    run.disconnect()
    with ExitStack() as steps:  # the last one first
        steps.callback(engine.close)
        if communicator is not None:
            steps.callback(communicator.close)
        steps.callback(engine.changes.leave, carried.dtypes())
        run.leave([])
