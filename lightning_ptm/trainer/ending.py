"""How a run ends: everything of others is given back, whatever fails on the way.

I1: after a run the module has ordinary parameters again, when RAM holds them, and its optimizers their states, when they
were in RAM all the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints import afterwards, restore
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.checkpoints.saves import Saves
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.planning.boxes import Box
from lightning_ptm.runtime.audits import UpdateAudit
from lightning_ptm.runtime.closed import COPIED_IN_A_RUN
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.parts import put_together
from lightning_ptm.runtime.rendezvous import Together
from lightning_ptm.runtime.statistics import last_audit
from lightning_ptm.trainer.building import BuildingStrategy
from lightning_ptm.trainer.paged_states import unguard
from lightning_ptm.trainer.spent import spend


class EndingStrategy(BuildingStrategy):
    """Ends runs, and is copied without them."""

    def _close_engine(self) -> None:
        try:
            self._close()
        finally:
            self._cut_off = ""

    def _close(self) -> None:
        engine, communicator = self._engine, self._communicator
        if self._tensor_group is not None:
            self._tensor_group.connect(None)
        if engine is None:
            self._communicator = None
            with ExitStack() as steps:
                steps.callback(self._uncut)
                if communicator is not None:  # set-up failed
                    steps.callback(communicator.close)
                self._forget_shown_states()
            return
        torn = self._interruption is not None and self._interruption.torn
        before, self._ended = self._ended, afterwards.remember(engine, torn=torn)
        if not self._trains:  # of optimizers, and of weights that nobody has loaded since, the fit before has told
            self._ended = dataclasses.replace(
                self._ended, optimizer_states=before.optimizer_states, torn=torn or before.torn
            )
        replaced: list[Optimizer] = []
        told_later: list[Exception] = []
        with ExitStack() as steps:  # each of them, whatever becomes of those before; the last one first
            steps.callback(self._saves.forget)
            steps.callback(engine.close)
            if communicator is not None:
                # First: a collective in flight may still write into the pages that the engine frees.
                steps.callback(communicator.close)
            steps.callback(self._uncut)
            steps.callback(self._settle_accounts, engine, before.audits)
            try:
                self._detach(replaced)
            except Exception as error:  # the weights are the user's all the same
                told_later.append(error)
            try:
                self._give_back(engine, replaced, told_later)
            except Exception as error:
                engine.fail(error)  # the others wait for this rank, and Lightning can no longer tell them
                if not self._ended.weights:
                    engine.lending.let_go()
                raise
        for each in told_later:
            raise each

    def _detach(self, replaced: list[Optimizer]) -> None:
        """What the run has put into objects of others is taken out of all of them.

        Args:
            replaced: gets the optimizers whose `state` the user has replaced.
        """

        def give_back_state(optimizer: Optimizer) -> None:
            if not unguard(optimizer):
                replaced.append(optimizer)

        paged, watches, before_steps = self._paged_optimizers(), self._watches, self._steps
        self._engine = self._communicator = self._watches = self._interruption = None
        self._steps = ()
        with ExitStack() as steps:  # the last one first
            steps.callback(self.precision_plugin.attach, None)
            for each in before_steps:
                steps.callback(each.close)
            if watches is not None:
                steps.callback(watches.undo)
            for optimizer in reversed(paged):
                steps.callback(give_back_state, optimizer)
            steps.callback(self._forget_shown_states)

    def _give_back(self, engine: Engine, replaced: Collection[Optimizer], told_later: list[Exception]) -> None:
        """Weights and optimizer states are the user's again, as far as that is wanted and can be. Collective.

        Args:
            replaced: optimizers whose states are not.
            told_later: gets why the last checkpoint was not written, and what was written to weights in vain.
        """
        if engine.rendezvous.failed:
            self._saves.farewell()
        else:
            engine.rendezvous.meet(Together.END_OF_RUN)
            try:
                self._saves.finish()
            except CheckpointError as error:  # the weights are the user's all the same
                told_later.append(error)
        if engine.heap is not None:
            engine.heap.steps_end()  # what follows takes RAM of its own
        wanted, ranks_here = self.settings.restore_weights, max(1, self.num_processes)
        cut_here = self._cut is not None
        if restore.weights(engine, told_later, wanted=wanted, ranks_here=ranks_here, whole=cut_here):
            self._uncut(partial(put_together, communicator=engine.communicator))
            self._ended = dataclasses.replace(self._ended, weights=True, parts=self._ended.parts and not cut_here)
            self.precision_plugin.over = not self._has_ranks and self.precision_plugin.loss_scale is None
            kept = [each for each in self._trained if plain_optimizer(each) not in replaced]
            keep_here = kept if self.is_global_zero else ()
            if (
                self._trains
                and not self._cut_off
                and restore.optimizer_states(engine, self.optimizers, keep_here, whole=cut_here)
            ):
                self._ended = dataclasses.replace(self._ended, optimizer_states=True)

    def _uncut(self, whole: Callable[[Tensor, Box], Tensor] | None = None) -> None:
        """The module's parameters are whole again, if it was cut here.

        Args:
            whole: puts parts together, collectively; None: they have no values.
        """
        if self._cut is not None:
            self._cut.undo(whole)
            self._cut = None

    def _settle_accounts(self, engine: Engine, known_audits: tuple[UpdateAudit, ...]) -> None:
        """Before pages go: what can be told of the run afterwards, and which optimizers have lost their states."""
        self._ended = dataclasses.replace(self._ended, audits=last_audit(engine) or known_audits)
        if not self._ended.optimizer_states:
            spend(having_states(engine))

    def __getstate__(self) -> dict[str, Any]:
        # torch.save(trainer) and copy.deepcopy(trainer) come here.
        state = {**super().__getstate__(), "_began_with": None, "_spent": [], "_before_laid_out": None}
        del state["_events"]  # who listens to this run listens to no copy
        engine = self._engine
        if engine is None:
            return state
        if not engine.hooks.copyable:
            raise UsageError(COPIED_IN_A_RUN)
        # A copy is in no run. What its optimizers have learnt is in pages, which are not copied.
        ended = having_states(engine)
        of_the_run = ("_signals", "_engine", "_communicator", "_interruption", "_watches", "_restored", "_resuming")
        return {
            **state,
            **dict.fromkeys(of_the_run),
            "_steps": (),
            "_shown_states": {},
            "_saves": Saves(self.settings.failed_save),
            "_ended": afterwards.Ended(weights=True, optimizer_states=not ended),
            "_spent": ended,
        }

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        spend(state["_spent"])
        self._events = Events()
        super().__setstate__({name: value for name, value in state.items() if name != "_spent"})


def having_states(engine: Engine) -> list[Optimizer]:
    """Optimizers of which pages hold what they know from earlier steps."""
    optimizers = enumerate(engine.updates.groups.optimizers)
    return [each for index, each in optimizers if engine.optimizer_values.has_states(index)]
