"""The run in progress: its engine, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints.interruption import Interruption
from lightning_ptm.comm import Communicator, Gathering
from lightning_ptm.errors import UsageError
from lightning_ptm.events import Listener
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.engine.inspection import (
    OptimizerBytes,
    PageUse,
    PlannedBytes,
    StateBytes,
    TierRoom,
    flat_names,
    inventory,
    optimizers_in_pages,
    planned_bytes,
    rooms,
    states_at_home,
)
from lightning_ptm.runtime.engine.statistics import Statistics, collect, together
from lightning_ptm.runtime.ranks.barriers import Together
from lightning_ptm.runtime.tensors.parts import Boxes, declared
from lightning_ptm.terms import Mode
from lightning_ptm.trainer.connected import ConnectedStrategy


class RunningStrategy(ConnectedStrategy):
    """Has a run, between its set-up and its end, and answers users' questions about it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._engine: Engine | None = None
        self._communicator: Communicator | None = None
        self._interruption: Interruption | None = None
        self._before_laid_out: Statistics | None = None
        """Of the run in progress, of the time before it was laid out anew."""
        self._cut_off = ""
        """Why the run in progress has no states any more of which a checkpoint could be made; empty while it has."""
        self._cut: CutModule | None = None
        """The module's parameters are cut over ranks (`tensor_parallel_size`)."""
        self._trains = False
        """The run in progress is a fit. Others have no optimizers, though `optimizers` has those of the last fit."""

    @property
    def engine(self) -> Engine:
        """The engine of the run in progress."""
        if self._engine is None:
            raise UsageError(
                "no run is in progress: pages exist between the start and the end of fit/validate/test/predict"
            )
        return self._engine

    def boxes(self) -> Mapping[str, TensorSlice]:
        """Of parameters of this rank's module that are parts of larger ones, which part: by name, none. For subclasses that
        cut a model over ranks (tensor parallelism): the module has the parts and computes with them, exchanging what that
        takes; pages, norms, checkpoints and weights from files do the rest. Ranks r of equal r // parts are a group, each
        with the part r % parts; they need the same batches (`distributed_sampler_kwargs`). Where `tensor_parallel_size` cuts
        the model, they are those of its plan."""
        return {} if self._cut is None else self._cut.boxes()

    def _boxes(self) -> Boxes:
        """Those that count, by id of parameter."""
        return declared(self._module, self.boxes())

    @property
    def _trained(self) -> list[Optimizer]:
        """The optimizers of the run in progress."""
        return self.optimizers if self._trains else []

    def _paged_optimizers(self) -> list[Optimizer]:
        """Of the run's own, whatever the Trainer has been given since."""
        known = self.engine.updates.groups.optimizers
        return [optimizer for optimizer in known if not self.engine.stepping.steps_itself(optimizer)]

    @property
    def _unsaved(self) -> str:
        """Why the run in progress writes no checkpoint any more; empty while it does, and when there is none."""
        return self._cut_off or ("" if self._interruption is None else self._interruption.unsaved)

    def _settle(self) -> None:
        if self._interruption is not None:
            self._interruption.settle()

    @override
    def _is_alone(self) -> bool:
        # Callbacks ask for collectives, too, when the run was cut short on this rank.
        self._settle()
        failed = self._engine is not None and self._engine.barriers.failed
        return failed or bool(self._unsaved) or super()._is_alone()

    def _meet(self, what: Together) -> None:
        if not self._is_alone():
            self.engine.barriers.meet(what)

    def _gather_for(self, gathering: Gathering) -> None:
        self._settle()
        self.engine.barriers.gather_for(gathering)

    def statistics(self) -> Statistics:
        """What this rank has moved, waited for and updated since the run began. Cheap; see also `callbacks.PageMonitor`."""
        return together(self._before_laid_out, collect(self.engine))

    def plan_text(self) -> str:
        """The plan that is followed, as a table: what is issued before each tick. See `callbacks.PlanPrinter`."""
        return self.engine.plan_text(self._mode())

    @property
    def plans_made(self) -> int:
        """How often the run has made its plan anew from a traced iteration."""
        return self.engine.executor.plans.remade

    def states_at_home(self) -> tuple[StateBytes, ...]:
        """What kind of model states lives in which tier between steps, in bytes of this rank."""
        return states_at_home(self.engine)

    def optimizers_in_pages(self) -> tuple[OptimizerBytes, ...]:
        """For each optimizer whose states are in pages, what it updates at once, and bytes of these states on this rank."""
        return optimizers_in_pages(self.engine.blueprint)

    def tier_rooms(self) -> tuple[TierRoom, ...]:
        """Bytes of each tier of this rank, and of its pages in use now. Cheap."""
        return rooms(self.engine)

    def tier_names(self) -> tuple[str, ...]:
        """The tiers of this run, nearest first, also those without pages: as `Event.tier_bytes` has them."""
        return tuple(tier.name.lower() for tier in self.engine.blueprint.budget)

    def inventory(self) -> tuple[PageUse, ...]:
        """What all pages of this rank are for; they add up to what each tier has (`tier_rooms`)."""
        return inventory(self.engine)

    def planned_bytes(self) -> tuple[PlannedBytes, ...]:
        """Bytes of pages in each tier at each tick of the plan; see `callbacks.MemoryTimeline`. Replays the plan."""
        return planned_bytes(self.engine, self._mode())

    def last_trace(self) -> Trace | None:
        """The last iteration that was traced: its ticks, and the paper's table of tensors; None before there is one. An
        iteration is traced to its end when the next one begins. See `callbacks.PageTracer`."""
        return self.engine.executor.plans.trace(self._mode())

    def flat_names(self) -> dict[int, str]:
        """Names of units by the numbers of their flats, which events of copies and updates tell: `flat 4 ...`, `4/4/master`
        (unit, flat, state)."""
        return flat_names(self.engine)

    @contextmanager
    def trace_events(self, listener: Listener) -> Iterator[None]:
        """Inside the block, `listener` is called with an `Event` whenever a tick, a copy between tiers, a collective, the
        arithmetic of an update or a stall of compute has ended on this rank. Begin it in a run; the run's end ends it.

        It is called in any thread, also in those that move pages: it must be quick and not raise; `list.append` is a good
        one. Nothing is measured outside such blocks. See `callbacks.PerfettoTrace`.
        """
        engine = self.engine
        with engine.events.heard_by(listener):
            try:
                yield
            finally:
                collect(engine)  # copies on a CUDA stream are told when somebody looks

    def _mode(self) -> Mode:
        return Mode.TRAIN if self._module.trainer.state.fn is TrainerFn.FITTING else Mode.FORWARD

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The global norm of an optimizer's gradients over all ranks, wherever they are kept: complete, not yet clipped,
        and without the loss scale. Between backward and step only (`on_before_optimizer_step`), on all ranks.

        On one rank it is what `torch.nn.utils.clip_grad_norm_` returns, to the last bit. See `callbacks.GradNormMonitor`.
        """
        return self.engine.stepping.gradient_norm(optimizer, norm_type, self.precision_plugin.loss_scale)
