"""Construction of a run's engine from the Trainer's arguments and the strategy's settings.

`Builder` is created at set-up, and used again when a run is laid out again. It owns nothing that belongs to a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_ptm.checkpoints import weights
from lightning_ptm.checkpoints.module_states import DeferredState
from lightning_ptm.checkpoints.optimizer_states import plain_optimizer
from lightning_ptm.comm import Communicator, Communicators
from lightning_ptm.config import DEFAULT_PAGE_BYTES, Settings, format_bytes
from lightning_ptm.errors import AngelPTMError, RankError
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import FileOps, check_folders, make_folders
from lightning_ptm.memory.page_rates import measured_rates, smallest_saturating
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.rules import plan_of
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.planning.mesh import Axis, Mesh, mesh_of
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.decide import CheckedParameters, check_parameters, decide_here
from lightning_ptm.runtime.engine.engine import Engine, RunInputs
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.tensors.parts import Boxes, declared, mesh_with
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.terms import Tier
from lightning_ptm.trainer.between_runs import BetweenRuns
from lightning_ptm.trainer.lightning_hooks import rearrangers
from lightning_ptm.trainer.matmul_precision import chosen_wide_matmuls
from lightning_ptm.trainer.precision import AngelPTMPrecision, has_its_class_s_step
from lightning_ptm.trainer.ranks import RankGroups, RankPlace


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """Factory of the engines of one run.

    Args:
        name: the strategy's name, for messages.
        settings: the user's settings.
        chosen: what `parallel="auto"` has chosen, in words; empty: nothing.
        fits: whether the run trains. Other runs have no optimizers, although the strategy still has those of the last fit.
        boxes: returns the slices that a subclass of the strategy has declared; called for each engine.
        further: tiers in addition to device, host and disk (`AngelPTMStrategy.further_tiers`).
        file_ops: the disk tier's file calls, for tests of failing disks.
        save_ops: returns the file calls of sharded checkpoints, when one begins.
    """

    name: str
    trainer: Trainer
    module: LightningModule
    fits: bool
    settings: Settings
    chosen: str
    precision: AngelPTMPrecision
    place: RankPlace
    groups: RankGroups
    boxes: Callable[[], Mapping[str, TensorSlice]]
    further: Mapping[Tier, int]
    between: BetweenRuns
    progress: Progress
    file_ops: FileOps | None
    save_ops: Callable[[], SaveOps | None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The run's optimizers."""
        return self.trainer.optimizers if self.fits else []

    @property
    def mesh(self) -> Mesh:
        """Axes of all ranks, by the settings."""
        return mesh_of(self.settings, self.place.world_size)

    def boxes_with(self, cut: CutModule | None) -> Boxes:
        """The slices in force, by id of parameter."""
        return declared(self.module, self.boxes() if cut is None else cut.boxes())

    def cut(self, group: TensorGroup, *, proven: bool = True) -> CutModule:
        """Replaces the module's parameters by this rank's slices (`tensor_parallel_size`); optimizers keep the parameters.

        Args:
            proven: whether each block is verified at its first call.
        """
        plan, strict = self.settings.tensor_parallel.plan, self.settings.tensor_parallel.plan != "auto"
        return CutModule(
            self.module,
            plan_of(self.module, plan),
            group,
            strict=strict,
            sequence_parallel=self.settings.tensor_parallel.sequence_parallel,
            proven=proven,
        )

    def engine(
        self,
        communicator: Communicator,
        events: Events,
        cut: CutModule | None,
        *,
        relayout: bool = False,
        restored: DeferredState | None = None,
        given: Given | None = None,
        handed: PreviousState | None = None,
        checked: CheckedParameters | None = None,
        beside_bytes: int | None = None,
        least_bytes: int = 0,
        handlings: Mapping[int, Handling] | None = None,
        before_edits: Callable[[], None] | None = None,
    ) -> Engine:
        """Builds the engine and its pages. Collective.

        Args:
            relayout: whether this is a re-layout in mid-run, after parameters were rearranged.
            restored: state of a checkpoint that was loaded before the engine existed.
            given: the parameters' first values, where the module has none.
            handed: the parameters' first values, where they are in pages of the previous engine.
            checked: result of `check`.
            beside_bytes, least_bytes: see Request.
            handlings: see RunInputs.
            before_edits: called before the user edits weights.
        """
        place, fitting = self.place, self.fits
        boxes = self.boxes_with(cut)
        mesh = mesh_with(boxes, self.settings, place.world_size, communicator.rank)
        # Exchanges between ranks with different slices belong to the module.
        behind = (Axis.TENSOR,) if self.settings.checkpoints.async_save and fitting else ()
        communicators = Communicators(mesh, communicator, behind)
        given = given or self._files_values(communicator, boxes, restored)
        settings = self.settings_here
        make_folders(settings.disk_paths)
        settings = self._chosen(settings, communicator)
        request = dataclasses.replace(self.request(settings, cut), beside_bytes=beside_bytes, least_bytes=least_bytes)
        if relayout:
            request = dataclasses.replace(request, rearranges=True)
        blueprint = self.decided(request, communicator, handed, checked)
        if fitting and not relayout and settings.frozen_dtype != "compute":
            _warn_without_codes(blueprint, settings.frozen_dtype)
        return Engine(
            self.module,
            blueprint,
            communicators,
            RunInputs(
                backend=place.backend,
                optimizers=self.optimizers,
                disk_paths=settings.disk_paths,
                root=root_folder(self.trainer),
                recompute=self.settings.recompute_every if fitting else 0,
                slices=self.settings.slices if fitting else 1,
                handlings=handlings,
                ranks_here=place.ranks_here,
                given=given or Given(),
                handed=handed,
                before_edits=before_edits,
                # A resumed run rounds stochastically with the seeds that the first run would have had.
                number_of_step=partial(getattr, self.trainer, "global_step"),
                events=events,
                progress=self.progress,
                poison=self.settings.debug.poison,
                file_ops=self.file_ops,
            ),
        )

    def decided(
        self,
        request: Request,
        communicator: Communicator,
        handed: PreviousState | None,
        checked: CheckedParameters | None = None,
    ) -> Blueprint:
        """Makes all layout decisions. Collective."""
        in_memory, on_disk = (0, 0) if handed is None else (handed.bytes_in_memory(), handed.bytes_on_disk())
        ranks_here = self.place.ranks_here
        return decide_here(request, communicator, ranks_here, checked=checked, in_memory=in_memory, on_disk=on_disk)

    def check(self, communicator: Communicator, cut: CutModule | None) -> CheckedParameters:
        """Checks before a re-layout that pages can hold the parameters. Collective.

        Raises:
            ConfigError: pages cannot hold some parameters.
        """
        return check_parameters(self._request_again(cut), communicator)

    def decided_ahead(self, engine: Engine, cut: CutModule | None, beside_bytes: int | None) -> Blueprint:
        """Makes the layout decisions of a re-layout while the engine that it would replace exists. Collective.

        Raises:
            CapacityError: no placement fits.
        """
        request = dataclasses.replace(self._request_again(cut), beside_bytes=beside_bytes)
        pools = engine.blueprint.pool_bytes
        return decide_here(
            request,
            engine.communicator,
            self.place.ranks_here,
            in_memory=pools[Tier.HOST],
            on_disk=pools[Tier.DISK],
            on_device=pools[Tier.DEVICE],
        )

    def _request_again(self, cut: CutModule | None) -> Request:
        """The request of a re-layout."""
        settings = self.settings_here
        if self.between.page_bytes is not None:
            settings = dataclasses.replace(settings, page_size=self.between.page_bytes)
        return dataclasses.replace(self.request(settings, cut), rearranges=True)

    def _chosen(self, settings: Settings, communicator: Communicator) -> Settings:
        """Resolves settings of "auto", once for all runs of this strategy."""
        between, backend = self.between, self.place.backend
        page_bytes, wide = between.page_bytes, between.wide_matmuls
        if settings.page_size == "auto":
            page_bytes = page_bytes or chosen_page_bytes(settings, communicator, backend)
            settings = dataclasses.replace(settings, page_size=page_bytes)
        if wide is None:
            wide = chosen_wide_matmuls(settings, self.precision.plan.compute, communicator, backend)
        between.choose(page_bytes=page_bytes, wide_matmuls=wide)
        return settings

    def request(self, settings: Settings, cut: CutModule | None = None) -> Request:
        """The layout request of a run whose optimizers exist; allocates nothing."""
        plan = self.precision.plan
        fitting = self.fits
        sums = fitting and self._sums_gradients()
        return Request(
            module=self.module,
            optimizers=self.optimizers,
            settings=settings,
            compute=plan.compute,
            mixed=plan.mixed,
            backend=self.place.backend,
            keep_gradients=sums or (fitting and not self._updates_in_backward()),
            gradients_outlive_step=not self.precision.forgets_gradients(self.module),
            transforms_gradients=self.precision.transforms_gradients(self.module),
            sums_gradients=sums,
            rearranges=fitting and bool(rearrangers(self.trainer)),
            # In manual optimization the step is taken within the forward.
            changes_default_dtype=plan.default_dtype is not None and self.module.automatic_optimization,
            further=self.further,
            boxes=self.boxes_with(cut),
            partial=() if cut is None else cut.partial,
        )

    def _updates_in_backward(self) -> bool:
        """Whether units may be updated before the backward pass is over, unless hooks are added later."""
        nothing_waits = self.precision._nothing_waits_for_gradients(self.module)  # then there is one optimizer
        return nothing_waits and has_its_class_s_step(plain_optimizer(self.trainer.optimizers[0]))

    def _files_values(self, communicator: Communicator, boxes: Boxes, restored: DeferredState | None) -> Given | None:
        """The first values from `weights`. A module that has had a run before may be trained, so it gets only the frozen
        parameters that this run had no room to give back."""
        if self.settings.weights is None:
            return None
        here = frozenset() if restored is None else restored.loaded
        if not self.between.had(self.module):
            given = weights.first_values(self.module, self.settings, communicator, self.progress, boxes)
            return given if restored is None else given.without(here)
        absent = {id(each) for each in self.module.parameters() if isinstance(each, GuardedParameter)}
        wanted = absent & self.between.ended.of_files
        if not wanted:
            return None
        given = weights.first_values(self.module, self.settings, communicator, self.progress, boxes)
        return Given({key: read for key, read in given.parameters.items() if key in wanted - here})

    @property
    def settings_here(self) -> Settings:
        """The user's settings, with the Trainer's root folder as disk path where a home is on disk and no path is set."""
        settings = self.settings
        if settings.disk_path is None and "disk" in (settings.offload_parameters, settings.wanted_offload_optimizer):
            root = Path(self.trainer.default_root_dir)
            root.mkdir(parents=True, exist_ok=True)
            return dataclasses.replace(settings, disk_path=str(root))
        return settings

    def _sums_gradients(self) -> bool:
        """Whether a step may use the gradients of several backward passes."""
        trainer = self.trainer
        schedules = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
        return (
            trainer.accumulate_grad_batches > 1
            or self.settings.micro_batches > 1
            or any(each.going_to_accumulate_grad_batches() for each in schedules)
            or not self.precision.forgets_gradients(self.module)
        )


def root_folder(trainer: Trainer) -> Path | None:
    """The Trainer's root folder; None if it is not a local path."""
    root = str(trainer.default_root_dir)
    return None if "://" in root else Path(root)


def _warn_without_codes(blueprint: Blueprint, name: str) -> None:
    if not any(flat.code for flat in blueprint.layout.all_flats()):
        rank_zero_warn(
            f"frozen_dtype={name!r} changes nothing in this run: no matrix of a unit other than the root is frozen; freeze "
            f"the model (model.requires_grad_(False)) before its adapters are made, name the units (units=['Block']), or "
            f"leave frozen_dtype out"
        )


def chosen_page_bytes(settings: Settings, communicator: Communicator, backend: Backend) -> int:
    """The page size that rank 0 measures to be the smallest that saturates its tiers, on all ranks. Collective.

    Raises:
        ConfigError: rank 0 cannot use the disk's folders; RankError on the other ranks.
    """
    failure: AngelPTMError | None = None
    page_size: int | str | None = None
    if communicator.rank == 0:
        try:
            check_folders(settings.disk_paths)
            page_size = smallest_saturating(measured_rates(settings.disk_paths, backend)) or DEFAULT_PAGE_BYTES
        except AngelPTMError as error:
            failure, page_size = error, str(error)
    page_size = communicator.broadcast_object(page_size)
    if failure is not None:
        raise failure
    if not isinstance(page_size, int):
        raise RankError(
            f"page_size='auto' failed: rank 0 could not measure transfer rates ({page_size}); give a size, such as "
            "page_size='4MiB'"
        )
    rank_zero_info(f"page_size='auto': pages of {format_bytes(page_size)}")
    return page_size
