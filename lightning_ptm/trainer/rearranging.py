"""A run whose parameters are rearranged between two batches: unfrozen, or put into groups that an optimizer had not.

Pages were laid out for what was there when the run began. Where a run can do without pages, it goes on without; elsewhere
it is laid out anew, for what there is now, and its states are carried over (checkpoints/carried.py).
I1: it goes on with the numbers of a plain Trainer: every parameter, master and optimizer state keeps its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_ptm.checkpoints.carried import Carried
from lightning_ptm.checkpoints.optimizer_states import parameters_of, plain_optimizer
from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.materialize import Given
from lightning_ptm.storage.folder import remove_stale
from lightning_ptm.trainer.ending import EndingStrategy


class RearrangingStrategy(EndingStrategy):
    """Lays runs out anew."""

    def _follow_rearranging(self) -> None:
        """Between two batches: the run fits what the user has made of its parameters. Collective where it does not.

        Raises:
            UsageError: gradients wait for their step.
        """
        engine = self._engine
        if engine is None or not engine.outgrown():
            return
        if engine.blueprint.may_be_outside and engine.gradients_in_place:
            self._close_engine()
            self._build(self._module.trainer, anew=True)
        else:
            self._lay_out_anew(engine)
        self._tell_where_states_are()

    def _lay_out_anew(self, engine: Engine) -> None:
        self._refuse_unknown(engine)
        waiting = engine.waiting_gradients()
        if waiting:
            raise UsageError(
                f"parameters were unfrozen, or put into groups of an optimizer, while gradients wait for their step "
                f"({some(waiting, 2)}), and pages are laid out anew between two steps alone; do it when a step has been "
                f"taken and its gradients are forgotten (optimizer.zero_grad() behind the step, in manual optimization)"
            )
        self._saves.finish()
        trainer, optimizers = self._module.trainer, self._paged_optimizers()
        room = self._room(trainer)
        ranks_here = max(1, self.num_processes)
        with closing(
            Carried(engine, self._module, optimizers, room, ranks_here=ranks_here, ops=self.save_ops)
        ) as carried:
            self._leave_pages(engine, carried)
            self._build(trainer, anew=True, given=carried.given())
            carried.fill(self.engine, optimizers)
            self.barrier()  # all have read

    def _refuse_unknown(self, engine: Engine) -> None:
        known = {id(parameter) for _, parameter in engine.values.names()}
        new = [name for name, parameter in self._module.named_parameters() if id(parameter) not in known]
        named = {id(parameter) for parameter in self._module.parameters()}
        for optimizer in self._paged_optimizers():
            plain = plain_optimizer(optimizer)
            if any(id(parameter) not in named | known for parameter in parameters_of(plain)):
                new.append(f"one of {type(plain).__name__} that is not of the module")
        if new:
            raise UsageError(
                f"parameters were added or replaced ({some(new, 3)}) when their module's pages had been laid out, which have "
                f"none for them; make them before fit, in __init__ or configure_model, frozen until they are to train "
                f"(requires_grad_(False)), or end this fit and start another one"
            )

    def _room(self, trainer: Trainer) -> Path:
        """The folder in which states are carried over; all ranks see it."""
        disks = self._settings_for(trainer).disk_paths
        return disks[0] if disks and self.num_nodes == 1 else Path(trainer.default_root_dir)

    @override
    def _build(self, trainer: Trainer, *, anew: bool = False, given: Given | None = None) -> None:
        remove_stale(self._room(trainer))  # what a run that was killed meanwhile has left
        super()._build(trainer, anew=anew, given=given)

    def _leave_pages(self, engine: Engine, carried: Carried) -> None:
        """The engine ends, and nothing is given back: the run goes on with another one."""
        communicator = self._communicator
        if self._tensor_group is not None:
            self._tensor_group.connect(None)
        with ExitStack() as steps:  # the last one first
            steps.callback(engine.close)
            if communicator is not None:
                steps.callback(communicator.close)
            steps.callback(engine.leave, carried.dtypes())
            self._detach([])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # A callback has put the groups back that it had made in the run of the checkpoint.
        self._follow_rearranging()
        super().load_optimizer_state_dict(checkpoint)
