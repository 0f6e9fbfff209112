"""The end of a run: weights and optimizer states go back to the user's objects, whatever fails on the way.

I1: after a run the module has ordinary parameters, if RAM can hold them, and its optimizers have their states, if RAM can
hold these, too. I2: if RAM cannot hold the trained weights, they are written to disk before the pages are freed.
I3: the caller delays Ctrl-C. A second one, which takes effect at once, abandons the checkpoint that is being written, or
loses the weights; all that the run has installed in other objects is removed all the same, and no thread reads freed pages.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_ptm.checkpoints import after_run, formats, restore
from lightning_ptm.checkpoints.optimizer_states import mark_stale
from lightning_ptm.checkpoints.run_checkpoints import RunCheckpoints
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.engine.inspection import last_audit
from lightning_ptm.runtime.ranks.barriers import BarrierReason
from lightning_ptm.runtime.tensors.parts import put_together
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.runtime.updates.audits import UpdateAudit
from lightning_ptm.trainer.builder import root_folder
from lightning_ptm.trainer.internals import checkpoints_of
from lightning_ptm.trainer.run import Run


def end(run: Run, checkpoints: RunCheckpoints) -> None:
    """Ends a run, with or without pages. Collective, unless the run has failed."""
    if run.has_pages:
        _Teardown(run, checkpoints).end()
    else:
        run.close_without_pages()


class _Teardown:
    """The end of a run that has pages.

    Args:
        checkpoints: saving and loading of the strategy.
    """

    def __init__(self, run: Run, checkpoints: RunCheckpoints) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._engine = run.engine
        self._between = run.builder.between
        # State.
        self._replaced: list[Optimizer] = []
        """Optimizers whose `state` the user has replaced, so that their states are not given back."""
        self._deferred_errors: list[BaseException] = []
        """Errors to raise at the end: the last checkpoint was not written, or trained weights are lost."""

    def end(self) -> None:
        run, engine, between = self._run, self._engine, self._between
        run.disconnect()
        communicator = run.communicator
        torn = run.interruption is not None and run.interruption.torn
        before, ended = between.ended, after_run.remember(engine, torn=torn)
        if not run.fits:  # the fit before determines optimizer states, and weights that were not loaded since
            ended = dataclasses.replace(ended, optimizer_states=before.optimizer_states, torn=torn or before.torn)
        between.end(ended)
        failure: BaseException | None = None
        back, path = restore.RestoredWeights.NONE, ""
        with ExitStack() as steps:  # each step runs even if an earlier one fails; last in, first out
            steps.callback(self._checkpoints.saves.forget)
            steps.callback(engine.close)
            if communicator is not None:
                # First, since a collective in flight may still write into the pages that the engine frees.
                steps.callback(communicator.close)
            steps.callback(run.uncut)
            steps.callback(self._record_ended_run, before.audits)
            try:  # while the run has its engine, which saving needs
                back, path = self._meet()
            except BaseException as error:  # a second Ctrl-C, too
                failure = error
                self._checkpoints.saves.abandon()  # its thread reads pages
            try:
                run.leave(self._replaced)
            except BaseException as error:  # weights are given back all the same
                self._deferred_errors.append(error)
            try:
                if failure is not None:
                    raise failure
                self._give_back(back, path)
            except BaseException as error:
                engine.fail(error)  # the other ranks wait for this one, and Lightning can no longer notify them
                if not between.ended.weights:
                    engine.gathered_parameters.detach()
                raise
        for each in self._deferred_errors:
            raise each

    def _meet(self) -> tuple[restore.RestoredWeights, str]:
        """Waits for all checkpoints, and decides which weights are given back. Collective.

        Returns:
            The decision, and the path that weights were written to instead, or "".
        """
        engine, saves = self._engine, self._checkpoints.saves
        if engine.barriers.failed:
            saves.end_after_failure()
        else:
            engine.barriers.meet(BarrierReason.END_OF_RUN)
            try:
                saves.finish()
            except CheckpointError as error:  # weights are given back all the same
                self._deferred_errors.append(error)
            except KeyboardInterrupt as error:
                if not engine.communicator.alone:
                    raise
                saves.abandon()
                self._deferred_errors.append(error)
        if engine.heap is not None:
            engine.heap.steps_end()  # the following steps allocate RAM
        wanted, ranks_here = self._run.builder.settings.tuning.restore_weights, self._run.builder.place.ranks_here
        back = restore.decide(engine, wanted=wanted, ranks_here=ranks_here, whole=self._run.cut is not None)
        if back is not restore.RestoredWeights.WRITTEN:
            return back, ""
        if engine.heap is not None:
            engine.heap.weights_are_written()
        try:
            return back, str(self._write())
        except (CheckpointError, OSError, UsageError) as error:
            self._deferred_errors.append(error)
            return back, ""

    def _write(self) -> Path:
        """Writes a checkpoint of the weights, if RAM has no room for them (I2): sharded, unless some are strided. Collective.

        Returns:
            Its path: in the Trainer's root folder, or, if that is full, in the disk tier's folder.

        Raises:
            CheckpointError: no folder has room for it.
        """
        engine, trainer = self._engine, self._run.trainer
        root = root_folder(trainer)
        places = [*([] if root is None else [root]), *engine.disk_paths]
        failures = []
        # Sharded checkpoints hold parameters in the memory order of pages, which differs from that of strided shapes.
        strided = any(slot.spec.stride for flat in engine.blueprint.layout.all_flats() for slot in flat.slots)
        with self._checkpoints.in_format(formats.FULL if strided else formats.SHARDED):
            checkpoint = checkpoints_of(trainer).dump_checkpoint(weights_only=True)
            for place in places:
                path = Path(engine.barriers.broadcast(str(_unused(place, trainer.global_step))))
                try:
                    self._checkpoints.write_now(self._run, checkpoint, path)
                except (CheckpointError, OSError) as error:
                    failures.append(f"{place}: {error}")
                    continue
                rank_zero_warn(
                    f"RAM has no room for the trained weights, so the module does not get them back; they were written to "
                    f"{path}: load them from there (lightning_ptm.sharded.load, weights={str(path)!r}, or ckpt_path of an "
                    f"evaluation)"
                )
                return path
        raise CheckpointError(
            "the trained weights are lost: RAM has no room for them, and they could not be written to disk "
            f"({'; '.join(failures)}); before the next run, make room in one of these folders, or save during it "
            f"(ModelCheckpoint)"
        )

    def _give_back(self, back: restore.RestoredWeights, path: str) -> None:
        """Gives weights and optimizer states back to the user's objects, as far as requested and possible. Collective.

        Args:
            back, path: the decision of `_meet`, and the path that weights were written to instead.
        """
        run, engine, between = self._run, self._engine, self._between
        cut_here, place = run.cut is not None, run.builder.place
        if path:
            between.note(path=path)
        returned = restore.weights(engine, back, self._deferred_errors, reload_hint=self._reload_hint(), path=path)
        if back is restore.RestoredWeights.TRAINED and returned.given and not run.foretold:
            rank_zero_warn(restore.lacking(self._reload_hint()))
        if returned.given:
            run.uncut(partial(put_together, communicator=engine.communicator))
            between.note(weights=True, parts=between.ended.parts and not cut_here)
            complete = not any(isinstance(each, GuardedParameter) for each in run.module.parameters())
            run.builder.precision.end_run(ordinary=complete and place.alone)
            # The run's optimizers, whatever the Trainer has been given since.
            optimizers = engine.updates.groups.optimizers
            kept: Collection[Optimizer] = [each for each in optimizers if each not in self._replaced]
            if place.rank:
                kept = ()
            if (
                run.fits
                and not run.cut_off
                and not engine.update_failed
                and restore.optimizer_states(engine, optimizers, kept, whole=cut_here)
            ):
                between.note(optimizer_states=True)
        if engine.update_failed:
            between.note(torn=True)
        if returned.failure is not None:
            raise returned.failure

    def _reload_hint(self) -> str:
        """Returns how a next run of this strategy gets the values of frozen parameters, in words; empty if the user
        must provide them."""
        of_files = frozenset(self._engine.values.of_files)
        self._between.note(of_files=of_files)
        files = self._run.builder.settings.pretrained
        if not of_files or files is None:
            return ""
        return f"a next run with this strategy reads them from {files.path} again"

    def _record_ended_run(self, known_audits: tuple[UpdateAudit, ...]) -> None:
        """Records, before pages are freed, the last update audits and the optimizers that lose their states."""
        self._between.note(audits=last_audit(self._engine) or known_audits)
        if not self._between.ended.optimizer_states:
            mark_stale(having_states(self._engine))


def having_states(engine: Engine) -> list[Optimizer]:
    """Optimizers that have states in pages."""
    optimizers = enumerate(engine.updates.groups.optimizers)
    return [each for index, each in optimizers if engine.optimizer_values.has_states(index)]


def _unused(place: Path, step: int) -> Path:
    """An unused path in a folder for the checkpoint at the end of a run."""
    versions = itertools.chain([""], (f"-v{number}" for number in itertools.count(1)))
    paths = (place / f"end-of-run-step={step}{version}.ckpt" for version in versions)
    return next(path for path in paths if not os.path.lexists(path))
