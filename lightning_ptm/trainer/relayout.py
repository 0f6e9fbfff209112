"""Re-layout of a run whose parameters change between two batches: they are unfrozen, moved to other parameter groups, added,
replaced, removed, or given another shape; and once when the first step has shown how much device memory pages may take.

Pages were laid out for the parameters at the start of the run. If the run does not need pages, it continues without;
otherwise it is laid out again for the current parameters, and its states are carried over (checkpoints/carried_states.py).
I1: the run continues with the numbers of a plain Trainer: every parameter, master weight and optimizer state keeps its bits.
I2: evaluations and checkpoints see the parameters that the module has at that time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_ptm.checkpoints.carried_states import CarriedStates, StatesInFiles, StatesInPages, warn_of_resized
from lightning_ptm.checkpoints.optimizer_states import mark_stale, opened, plain_optimizer
from lightning_ptm.checkpoints.run_checkpoints import RunCheckpoints
from lightning_ptm.errors import CapacityError, UsageError, format_bytes, some
from lightning_ptm.runtime.autograd.recompute import recomputed_around, recomputed_units
from lightning_ptm.runtime.autograd.slices import slices_of
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import CheckedParameters
from lightning_ptm.runtime.engine.inspection import Statistics
from lightning_ptm.runtime.engine.predicted_memory import (
    SHARES_LEFT,
    decided_beside,
    gradients_at_peak,
    has_runs_of_pages,
)
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.ranks.barriers import BarrierReason
from lightning_ptm.terms import Tier
from lightning_ptm.trainer.device_budget import Wanted
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
    for optimizer in run.paged_optimizers() if run.engine.gathered_parameters.resized else ():
        warn_of_resized(run.engine, optimizer)
    run.engine.barriers.check_relayout(run.engine.changes.differences())
    if run.engine.blueprint.may_be_outside and run.engine.changes.gradients_in_place:
        counted = run.statistics()
        end(run, checkpoints)
        run.lay_out()
        run.watch(relayout=True)
        _continue(run, checkpoints, counted)
    else:
        _refuse(run)
        run.device_budget.forget(run.trainer.global_step)
        _lay_out_anew(run, checkpoints)


def _lay_out_anew(run: Run, checkpoints: RunCheckpoints, *, carries: bool = False) -> None:
    counted = run.statistics()
    carried = run.engine.stepping.carried() if carries else {}
    with run.engine.changes.frozen_as_trained():
        lay_out_again(run)
    run.engine.stepping.carry(carried)
    _continue(run, checkpoints, counted)


def _continue(run: Run, checkpoints: RunCheckpoints, counted: Statistics) -> None:
    run.follow_loads(partial(follow_loaded_state, run, checkpoints))
    run.continue_statistics(counted)
    run.log_where_states_are(relayout=True)


def follow_device_memory(run: Run, checkpoints: RunCheckpoints, batch: Any) -> None:
    """Lays a run out again, between two steps, if `device_memory` is "auto": for what the first step has left of the
    device, and for a batch that may take more than any before. Collective."""
    budget = run.device_budget
    if not run.has_pages:
        return
    executor, policy = run.engine.executor, run.engine.activation_policy
    wanted = budget.before_batch(
        batch,
        executor.backwards,
        run.trainer.global_step,
        executor.ever_called,
        handlings={} if policy is None else policy.in_force,
        settled=policy is None or policy.settled,
    )
    flags = run.engine.barriers.come_together(BarrierReason.TRAINING_BATCH, "device memory", wanted)
    _follow(run, checkpoints, Wanted(flags & (Wanted.FOLLOW | Wanted.LEAST)))


def make_room_for_evaluation(run: Run, checkpoints: RunCheckpoints, batch: Any) -> None:
    """Lays the run of a single rank out again before a batch of an evaluation that may take more than any before."""
    budget = run.device_budget
    if budget.follows and run.has_pages and run.engine.communicator.alone:
        with torch.inference_mode(False):  # tensors made in an evaluation's inference mode could not train later
            _follow(run, checkpoints, budget.before_evaluation(batch))


def _follow(run: Run, checkpoints: RunCheckpoints, wanted: Wanted) -> None:
    if not wanted:
        return
    used_are_forgotten = run.builder.precision.forgets_used_gradients(run.module)
    waiting = run.engine.changes.waiting_gradients(used_are_forgotten=used_are_forgotten)
    # Many loops of manual optimization zero gradients in the next step.
    carried_bytes = run.engine.stepping.carried_bytes() if waiting else 0
    # Else pages can be laid out again only between two steps.
    if not run.engine.barriers.all_agree(carried_bytes is not None):
        if wanted & Wanted.LEAST:
            run.device_budget.postpone()
        return
    if not _fits_ram(run, carried_bytes or 0):
        return
    if wanted & Wanted.LEAST:
        run.device_budget.fall(run.trainer.global_step)
        rank_zero_info("device_memory='auto': a batch may take more than any before, so pages take the least for it")
    else:
        peak_bytes = run.device_budget.follow(varies=_varies(run), classes=_classes(run))
        same = not _differs(run.engine.blueprint, _decided_ahead(run))
        if run.engine.barriers.all_agree(same):  # ranks with other parts of the model may have other homes
            run.device_budget.stay()
            return
        rank_zero_info(
            f"device_memory='auto': a step takes {format_bytes(peak_bytes)} in addition to pages and gradients, which get "
            f"what that leaves"
        )
    _lay_out_anew(run, checkpoints, carries=bool(waiting))


def _varies(run: Run) -> bool:
    """Returns whether later steps may compute more than the traced one: the model has experts, or some unit that trains has
    not been called."""
    blueprint, called = run.engine.blueprint, run.engine.executor.ever_called
    return bool(blueprint.by_need) or not called.issuperset(_classes(run).keys() - blueprint.by_need)


def _classes(run: Run) -> dict[int, type]:
    """Returns the classes of the units that train on this rank."""
    engine = run.engine
    return {unit: type(engine.blueprint.units[unit].module) for unit, flats in enumerate(engine.flats) if flats}


def _decided_ahead(run: Run) -> Blueprint | None:
    """Returns the decisions for the budget that follows, or for less of it where free pages would be scattered, or gradients
    in `.grad` would have no room; None: the least budget is what the model needs. If steps do not fit beside the present
    pages, there may be fewer pages with nothing to spare. Collective."""
    engine, budget = run.engine, run.device_budget
    units, settings = engine.blueprint.units, run.builder.settings
    recomputed = recomputed_units(len(units), settings.recompute_every, slices_of(units, settings.slices))
    again = frozenset(recomputed_around(units, recomputed))
    blueprint, precision = engine.blueprint, run.builder.precision
    waits = blueprint.placement.sums_gradients or blueprint.lock_free is not None
    stepped = precision.steps_after_each_pass(run.module) and not waits
    below_bytes = budget.below_peak() if stepped else None

    def searched(measured_bytes: int) -> Blueprint | None:
        given_bytes: list[int] = []
        """Device memory of pages in each decision so far: shares are of the first one."""

        def decided(beside_bytes: int) -> Blueprint:
            budget.leave(beside_bytes)
            with engine.changes.frozen_as_trained(), _for_trials(run.paged_optimizers()):
                made = run.builder.decided_ahead(engine, run.cut, beside_bytes)
            given_bytes.append(made.budget[Tier.DEVICE])
            return made

        for share in SHARES_LEFT:
            try:
                beside_bytes = measured_bytes + (int(share * given_bytes[0]) if given_bytes else 0)
                found = decided_beside(
                    decided, beside_bytes, engine.barriers.all_agree, below_bytes, read=budget.gradients_read
                )
            except CapacityError:  # on all ranks alike
                return None
            if found is not None and engine.barriers.all_agree(has_runs_of_pages(found[0], again)):
                budget.leave(found[1])
                return found[0]
        return None

    ahead = searched(budget.beside_bytes or 0)
    if ahead is None:
        present_bytes = blueprint.pool_bytes[Tier.DEVICE]
        gradient_bytes = gradients_at_peak(blueprint, below_bytes, read=budget.gradients_read)
        if not engine.barriers.all_agree(not budget.lacks(present_bytes + gradient_bytes)):
            ahead = searched(budget.without_headroom())
            fewer = ahead is not None and ahead.pool_bytes[Tier.DEVICE] < present_bytes
            if not engine.barriers.all_agree(fewer):
                return None
            if ahead is not None:
                budget.leave_least(ahead.device_limit_bytes)
    return ahead


def _differs(present: Blueprint, ahead: Blueprint | None) -> bool:
    """Whether a layout has other homes than the present one, less device memory, or more for what is fetched or gathered."""
    if ahead is None:
        return False
    fetches = present.layout.shared or not all(home.parameter.computes for home in present.placement.homes)
    more = ahead.pool_bytes[Tier.DEVICE] - present.pool_bytes[Tier.DEVICE]
    return more < 0 or (fetches and more > 0) or ahead.placement.homes != present.placement.homes


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
    """Replaces the engine and its pages by new ones, with all states. Collective.

    Callers keep no reference to the engine: it has device memory, which the new one needs.
    """
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
    if _fits_ram(run):
        return StatesInPages(run.engine, run.module, optimizers)
    engine, ranks_here, ops = run.engine, run.builder.place.ranks_here, run.builder.save_ops()
    return StatesInFiles(engine, run.module, optimizers, run.room, ranks_here=ranks_here, ops=ops)


def _fits_ram(run: Run, more_bytes: int = 0) -> bool:
    """Whether RAM has room for the states that go there meanwhile, on all ranks, and for more bytes. Collective."""
    needed_bytes = (run.engine.bytes_to_ram() + more_bytes) * run.builder.place.ranks_here
    lacking = torch.tensor([needed_bytes > 0 and needed_bytes > free_host_bytes()], dtype=torch.int64)
    return not bool(run.engine.communicator.all_reduce(lacking, maximum=True))


def _check_parameters(run: Run, optimizers: Sequence[Optimizer]) -> CheckedParameters:
    """Checks that pages can hold the parameters while the old pages exist, so that the module can get its weights back."""
    assert run.communicator is not None
    with _for_trials(optimizers):
        return run.builder.check(run.communicator, run.cut)


@contextmanager
def _for_trials(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Lets trials of optimizers read their `state`."""
    with ExitStack() as states:
        for optimizer in optimizers:
            states.enter_context(opened(plain_optimizer(optimizer)))
        yield


def _refuse(run: Run) -> None:
    """Refuses a re-layout that would lose something, before anything is changed.

    Raises:
        UsageError: gradients are pending, parameters were given values that are not in pages, or new parameters have no
            defined slice for each rank.
    """
    engine, builder = run.engine, run.builder
    for binding in engine.gathered_flats.bindings:
        if not binding.summoned:
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
