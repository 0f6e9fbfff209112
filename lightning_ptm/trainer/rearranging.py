"""A run whose parameters are rearranged between two batches: unfrozen, put into groups that an optimizer had not, added,
replaced, removed, or given another shape.

Pages were laid out for what was there when the run began. Where a run can do without pages, it goes on without; elsewhere
it is laid out anew, for what there is now, and its states are carried over (checkpoints/carried.py).
I1: it goes on with the numbers of a plain Trainer: every parameter, master and optimizer state keeps its bits.
I2: what is looked at as a whole (an evaluation, a checkpoint) has the parameters that the module has.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints.carried import Carried, warn_of_resized
from lightning_ptm.checkpoints.carried_in_files import CarriedInFiles
from lightning_ptm.checkpoints.carried_in_pages import CarriedInPages
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.deciding.decide import check_parameters
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.storage.folder import remove_stale
from lightning_ptm.trainer.ending import EndingStrategy, having_states
from lightning_ptm.trainer.paged_optimizer_state import opened
from lightning_ptm.trainer.stale_optimizers import spend

log = logging.getLogger(__name__)

_CUT_OFF = (
    "the run was cut short while it was laid out anew for the parameters that there are now, so that what its optimizers "
    "have learnt is incomplete; go on from an earlier checkpoint"
)


class RearrangingStrategy(EndingStrategy):
    """Lays runs out anew."""

    def _follow_rearranging(self) -> None:
        """Between two batches: the run fits what the user has made of its parameters. Collective where it does not.

        Raises:
            UsageError: gradients wait for their step.
        """
        if self._engine is None or not self._engine.changes.outgrown():
            return
        for optimizer in self._paged_optimizers() if self._engine.lent_parameters.resized else ():
            warn_of_resized(self._engine, optimizer)
        counted = self.statistics()
        self._engine.barriers.rearranged(self._engine.changes.differences())
        if self._engine.blueprint.may_be_outside and self._engine.changes.gradients_in_place:
            self._close_engine()
            self._build(self._module.trainer, anew=True)
        else:
            self._refuse(self._engine)
            with self._engine.changes.at_rest_as_trained():
                self._lay_out_anew()
        self._before_laid_out = counted
        self._tell_where_states_are()

    def _follow_other_parameters(self) -> None:
        """I2. Collective where there are some."""
        if self._engine is None or not self._trains or not self._engine.changes.other_parameters():
            return
        interruption = self._interruption
        if interruption is None or not interruption.here:
            with torch.inference_mode(False):  # an evaluation's, of which tensors could not train later
                self._follow_rearranging()
            return
        self._settle()
        if not self._unsaved:
            with interruption.told():
                raise UsageError(
                    "parameters were added, replaced or resized just before the run was cut short, and no pages have them; "
                    "go on from an earlier checkpoint"
                )

    def _lay_out_anew(self) -> None:
        self._saves.finish()
        self._check_parameters(self._module.trainer)
        trainer, optimizers = self._module.trainer, self._paged_optimizers()
        learnt = having_states(self.engine)
        with closing(self._carried(optimizers)) as carried:
            try:
                self._leave_pages(carried)
                carried.left()
                self._build(trainer, anew=True, given=carried.given(), handed=carried.handed)
                carried.give_back(self.engine, self._module, optimizers)
                carried.fill(self.engine, optimizers)
                self.barrier()  # all have read
            except BaseException:
                self._cut_off = _CUT_OFF
                spend(learnt)
                if self._engine is None:
                    self._rescue(carried)
                raise

    def _rescue(self, carried: Carried) -> None:
        """There is no engine any more, and will be none."""
        try:
            if self.settings.tuning.restore_weights and carried.rescue(self._module):
                self._ended = dataclasses.replace(self._ended, weights=True)
        except Exception as error:  # the first one is what is to be heard of
            log.warning("the weights could not be given back to the module: %s", error)

    def _carried(self, optimizers: Sequence[Optimizer]) -> Carried:
        """From page to page; a device has no room for old pages and new ones."""
        if not self._backend.apart:
            return CarriedInPages(self.engine, self._module, optimizers)
        room, ranks_here = self._room(self._module.trainer), max(1, self.num_processes)
        return CarriedInFiles(self.engine, self._module, optimizers, room, ranks_here=ranks_here, ops=self.save_ops)

    def _check_parameters(self, trainer: Trainer) -> None:
        """What pages cannot have is refused while the old ones are there, so that the module gets its weights back."""
        settings = self._settings_for(trainer)
        if self._page_bytes is not None:
            settings = dataclasses.replace(settings, page_size=self._page_bytes)
        assert self._communicator is not None
        request = dataclasses.replace(self.request(trainer, settings), rearranges=True)
        with ExitStack() as states:
            for optimizer in self._paged_optimizers():
                states.enter_context(opened(plain_optimizer(optimizer)))  # classes are tried
            check_parameters(request, self._communicator, max(1, self.num_processes))

    def _refuse(self, engine: Engine) -> None:
        """What would be lost is refused while everything is there.

        Raises:
            UsageError: gradients wait for their step, parameters were given values that no pages know, or nobody has said
                who is to have which part of new ones.
        """
        for binding in engine.gathered_flats.bindings():
            if not binding.lent:
                binding.check()
        known = {id(parameter) for _, parameter in engine.gathered_flats.names()}
        new = [name for name, each in self._module.named_parameters() if id(each) not in known]
        used_are_forgotten = self.precision_plugin.forgets_used_gradients(self._module)
        waiting = engine.changes.waiting_gradients(used_are_forgotten=used_are_forgotten)
        if waiting:
            raise UsageError(
                f"parameters were added, replaced, unfrozen, or put into groups of an optimizer, while gradients wait for "
                f"their step ({some(waiting, 2)}), and pages are laid out anew between two steps alone; do it when a step "
                f"has been taken and its gradients are forgotten (optimizer.zero_grad() behind the step, in manual "
                f"optimization)"
            )
        if new and (self._boxes() or self._tensor_group is not None or self.settings.expert_parallel_size > 1):
            raise UsageError(
                f"parameters were added, replaced or resized ({some(new, 3)}) in a run in which ranks divide parameters or "
                f"experts, and nobody has said who is to have which part of them; end this fit and start another one, or "
                f"make them before, frozen until they are to train (requires_grad_(False))"
            )

    def _room(self, trainer: Trainer) -> Path:
        """The folder in which states are carried over; all ranks see it."""
        disks = self._settings_for(trainer).disk_paths
        return disks[0] if disks and self.num_nodes == 1 else Path(trainer.default_root_dir)

    @override
    def _build(
        self, trainer: Trainer, *, anew: bool = False, given: Given | None = None, handed: PreviousState | None = None
    ) -> None:
        remove_stale(self._room(trainer))  # what a run that was killed meanwhile has left
        super()._build(trainer, anew=anew, given=given, handed=handed)

    def _leave_pages(self, carried: Carried) -> None:
        """The engine ends, and nothing is given back: the run goes on with another one."""
        engine, communicator = self.engine, self._communicator
        if self._tensor_group is not None:
            self._tensor_group.connect(None)
        with ExitStack() as steps:  # the last one first
            steps.callback(engine.close)
            if communicator is not None:
                steps.callback(communicator.close)
            steps.callback(engine.changes.leave, carried.dtypes())
            self._detach([])

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._follow_other_parameters()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._follow_other_parameters()
        return super().lightning_module_state_dict()

    @override
    def _follow_loaded_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._follow_other_parameters()
        super()._follow_loaded_state(optimizer, state)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # A callback has put the groups back that it had made in the run of the checkpoint.
        self._follow_rearranging()
        super().load_optimizer_state_dict(checkpoint)
