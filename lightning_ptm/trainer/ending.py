"""How a run ends: everything of others is given back, whatever fails on the way.

I1: after a run the module has ordinary parameters again, when RAM holds them, and its optimizers their states, when RAM has
room for these, too. I2: where RAM does not even hold what was trained, it is on disk before the pages go.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints import after_run, restore
from lightning_ptm.checkpoints.save_queue import SaveQueue
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.engine.statistics import last_audit
from lightning_ptm.runtime.ranks.barriers import Together
from lightning_ptm.runtime.tensors.parts import put_together
from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.trainer.building import BuildingStrategy, root_folder
from lightning_ptm.trainer.paged_optimizer_state import unguard
from lightning_ptm.trainer.stale_optimizers import StaleInCopies, spend


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
        before, self._ended = self._ended, after_run.remember(engine, torn=torn)
        if not self._trains:  # of optimizers, and of weights that nobody has loaded since, the fit before has told
            self._ended = dataclasses.replace(
                self._ended, optimizer_states=before.optimizer_states, torn=torn or before.torn
            )
        replaced: list[Optimizer] = []
        told_later: list[Exception] = []
        failure: Exception | None = None
        back, path = restore.GivenBack.NONE, ""
        with ExitStack() as steps:  # each of them, whatever becomes of those before; the last one first
            steps.callback(self._saves.forget)
            steps.callback(engine.close)
            if communicator is not None:
                # First: a collective in flight may still write into the pages that the engine frees.
                steps.callback(communicator.close)
            steps.callback(self._uncut)
            steps.callback(self._settle_accounts, engine, before.audits)
            try:  # while the strategy has the engine, with which it saves
                back, path = self._meet_at_the_end(engine, told_later)
            except Exception as error:
                failure = error
            try:
                self._detach(replaced)
            except Exception as error:  # the weights are the user's all the same
                told_later.append(error)
            try:
                if failure is not None:
                    raise failure
                self._give_back(engine, back, path, replaced, told_later)
            except Exception as error:
                engine.fail(error)  # the others wait for this rank, and Lightning can no longer tell them
                if not self._ended.weights:
                    engine.lent_parameters.let_go()
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

        paged, lightning_hooks, before_steps = self._paged_optimizers(), self._lightning_hooks, self._steps
        self._engine = self._communicator = self._lightning_hooks = self._interruption = None
        self._steps = ()
        with ExitStack() as steps:  # the last one first
            steps.callback(self.precision_plugin.attach, None)
            for each in before_steps:
                steps.callback(each.close)
            if lightning_hooks is not None:
                steps.callback(lightning_hooks.undo)
            for optimizer in reversed(paged):
                steps.callback(give_back_state, optimizer)
            steps.callback(self._forget_shown_states)

    def _meet_at_the_end(self, engine: Engine, told_later: list[Exception]) -> tuple[restore.GivenBack, str]:
        """All checkpoints are in place, and which weights will be given back is decided. Collective.

        Args:
            told_later: gets why the last checkpoint was not written, or why trained weights are lost.

        Returns:
            Which, and where they were written to instead.
        """
        if engine.barriers.failed:
            self._saves.farewell()
        else:
            engine.barriers.meet(Together.END_OF_RUN)
            try:
                self._saves.finish()
            except CheckpointError as error:  # the weights are the user's all the same
                told_later.append(error)
        if engine.heap is not None:
            engine.heap.steps_end()  # what follows takes RAM of its own
        wanted, ranks_here = self.settings.tuning.restore_weights, max(1, self.num_processes)
        back = restore.decided(engine, wanted=wanted, ranks_here=ranks_here, whole=self._cut is not None)
        if back is not restore.GivenBack.WRITTEN:
            return back, ""
        try:
            return back, str(self._write_at_the_end(engine))
        except (CheckpointError, OSError, UsageError) as error:
            told_later.append(error)
            return back, ""

    def _write_at_the_end(self, engine: Engine) -> Path:
        """A checkpoint of the weights, where RAM has no room for them (I2): sharded, unless some are strided. Collective.

        Returns:
            Its path: in the Trainer's root folder, or, where that has no room, beside the disk tier.

        Raises:
            CheckpointError: nowhere is room for it.
        """
        trainer = self._module.trainer
        root = root_folder(trainer)
        places = [*([] if root is None else [root]), *engine.disk_paths]
        own, failures = self.settings, []
        # Sharded ones hold parameters as they lie in pages: strided ones in another order than that of their shape.
        strided = any(slot.spec.stride for flat in engine.blueprint.layout.everywhere() for slot in flat.slots)
        self.settings = dataclasses.replace(
            own, checkpoints=dataclasses.replace(own.checkpoints, state_dict_type="full" if strided else "sharded")
        )
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
            for place in places:
                path = Path(engine.barriers.told(str(_unused(place, trainer.global_step))))
                try:
                    self._write_now(checkpoint, path)
                except (CheckpointError, OSError) as error:
                    failures.append(f"{place}: {error}")
                    continue
                rank_zero_warn(
                    f"RAM has no room for the trained weights, so they are not put back into the module but written to "
                    f"{path}: load them from there (lightning_ptm.sharded.load, weights={str(path)!r}, or ckpt_path of an "
                    f"evaluation)"
                )
                return path
        finally:
            self.settings = own
        raise CheckpointError(
            f"the trained weights are lost: RAM has no room for them, and they could not be written to disk "
            f"({'; '.join(failures)}); make room in one of these folders, or save in the run (ModelCheckpoint)"
        )

    def _give_back(
        self,
        engine: Engine,
        back: restore.GivenBack,
        path: str,
        replaced: Collection[Optimizer],
        told_later: list[Exception],
    ) -> None:
        """Weights and optimizer states are the user's again, as far as that is wanted and can be. Collective.

        Args:
            back, path: which weights, and where they were written to instead.
            replaced: optimizers whose states are not.
            told_later: gets what was written to weights in vain.
        """
        cut_here = self._cut is not None
        if path:
            self._ended = dataclasses.replace(self._ended, path=path)
        returned = restore.weights(engine, back, told_later, again=self._again(engine), path=path)
        if returned.given:
            self._uncut(partial(put_together, communicator=engine.communicator))
            self._ended = dataclasses.replace(self._ended, weights=True, parts=self._ended.parts and not cut_here)
            complete = not any(isinstance(each, GuardedParameter) for each in self._module.parameters())
            self.precision_plugin.over = complete and not self._has_ranks and self.precision_plugin.loss_scale is None
            # The run's, whatever the Trainer has been given since.
            optimizers = engine.updates.groups.optimizers
            kept = [each for each in optimizers if each not in replaced]
            keep_here = kept if self.is_global_zero else ()
            if (
                self._trains
                and not self._cut_off
                and not engine.update_failed
                and restore.optimizer_states(engine, optimizers, keep_here, whole=cut_here)
            ):
                self._ended = dataclasses.replace(self._ended, optimizer_states=True)
        if engine.update_failed:
            self._ended = dataclasses.replace(self._ended, torn=True)
        if returned.failure is not None:
            raise returned.failure

    def _again(self, engine: Engine) -> str:
        """How frozen parameters get their values in a next run of this strategy; empty: by the user alone."""
        self._ended = dataclasses.replace(self._ended, of_files=frozenset(engine.values.of_files))
        if not engine.values.of_files or self.settings.pretrained is None:
            return ""
        return f"a next run with this strategy reads them from {self.settings.pretrained.path} again"

    def _uncut(self, whole: Callable[[Tensor, TensorSlice], Tensor] | None = None) -> None:
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
        state = {**super().__getstate__(), "_began_with": None, "_before_laid_out": None}
        del state["_events"]  # who listens to this run listens to no copy
        engine = self._engine
        if engine is None:
            return state
        # A copy is in no run. What its optimizers have learnt is in pages, which are not copied. Where pages have their
        # parameters, too, it is without them: each fit makes its own.
        ended = having_states(engine)
        without: dict[str, Any] = (
            {} if engine.summon.always_readable(self._module) else {"_optimizers": [], "lr_scheduler_configs": []}
        )
        of_the_run = (
            "_signals",
            "_engine",
            "_communicator",
            "_interruption",
            "_lightning_hooks",
            "_restored",
            "_resuming",
        )
        return {
            **state,
            **without,
            **dict.fromkeys(of_the_run),
            "_steps": (),
            "_shown_states": {},
            "_saves": SaveQueue(self.settings.checkpoints.on_failure),
            "_ended": after_run.EndedRun(weights=True, optimizer_states=not ended),
            "_spent": StaleInCopies(() if without else ended),
        }

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        # Complete: a copy is copied, too.
        kept = {name: value for name, value in state.items() if name != "_spent"}
        super().__setstate__({**kept, "_events": Events()})


def _unused(place: Path, step: int) -> Path:
    """A name in a folder that nothing has."""
    versions = itertools.chain([""], (f"-v{number}" for number in itertools.count(1)))
    paths = (place / f"end-of-run-step={step}{version}.ckpt" for version in versions)
    return next(path for path in paths if not os.path.lexists(path))


def having_states(engine: Engine) -> list[Optimizer]:
    """Optimizers of which pages hold what they know from earlier steps."""
    optimizers = enumerate(engine.updates.groups.optimizers)
    return [each for index, each in optimizers if engine.optimizer_values.has_states(index)]
