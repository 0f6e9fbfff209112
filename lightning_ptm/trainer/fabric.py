"""AngelPTMFabricStrategy (`Fabric(strategy="angel_ptm")`): pages for one module in a loop that the user writes.

`PagedLoop` is an AngelPTMStrategy with a Trainer that runs no loop. It gets the calls that a Trainer with manual optimization
would make, in the same order, when Fabric calls its strategy: at `setup`, at each forward, backward and optimizer step.

I1: one module at a time, from `fabric.setup` to `teardown`. I2: an iteration of the engine begins at the first forward with
gradients after a backward or a step, after parameters were unfrozen, or after `setup`; forwards before the next of these
belong to it. Others are iterations of their own.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.config import Settings, listing_settings
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.torch_internals import CONTENTS_OF_MODULE
from lightning_ptm.trainer import relayout
from lightning_ptm.trainer.internals import reduced_over_ranks
from lightning_ptm.trainer.launched_ranks import LaunchedRanks
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.run import Run
from lightning_ptm.trainer.strategy import AngelPTMStrategy

_NEEDS_TRAINER = {
    "parallel": "none",
    "expert_parallel_size": 1,
    "context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "micro_batches": 1,
    "slices": 1,
}
"""Settings that divide a Trainer's batches or losses, with the value that leaves them whole."""
_MOST_FORWARDS = 1024
"""Most forwards with gradients in an iteration. Its trace, and so the plan that is made of it, grow with them."""
_OWN_STATE = ("state_dict", "load_state_dict", "get_extra_state", "set_extra_state")


class _ModuleOfLoop(LightningModule):
    """The LightningModule that stands for the user's module: it has the same parameters, buffers and children, by the same
    names, and never computes."""

    def __init__(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.users_optimizers = optimizers
        vars(self).update({name: vars(module)[name] for name in CONTENTS_OF_MODULE})

    @override
    def configure_optimizers(self) -> Any:
        return self.users_optimizers


class PagedLoop(AngelPTMStrategy):
    """The AngelPTMStrategy of a loop that the user writes. Owns its Trainer.

    Arguments are those of AngelPTMStrategy.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # State.
        self._forwards = 0
        """Number of forwards with gradients since the last backward or step (I2)."""
        self._batches = 0

    def begin(self, trainer: Trainer, module: LightningModule, function: TrainerFn) -> None:
        """Sets a run of `trainer` up. Collective."""
        trainer.state.fn, trainer.state.status = function, TrainerStatus.RUNNING
        trainer.training = function is TrainerFn.FITTING
        self.connect(module)
        module.trainer = trainer
        self.setup_environment()
        self.setup(trainer)

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls the module that is in pages; after the run, the ordinary module."""
        run = self._run
        if run is None:
            return module(*args, **kwargs)
        try:
            return self._forward(run, module, *args, **kwargs)
        except BaseException:
            self._forwards = 0  # the iteration has ended
            raise

    def _forward(self, run: Run, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A forward that trains other parameters begins an iteration, and thereby a re-layout.
        if self._forwards and not (torch.is_grad_enabled() and run.outgrown):
            self._forwards += torch.is_grad_enabled()
            if self._forwards > _MOST_FORWARDS:
                raise UsageError(
                    f"{type(module).__name__} was called {_MOST_FORWARDS:,} times with gradients, without a backward or a "
                    f"step between the calls; call it under torch.no_grad() where you only evaluate, and "
                    f"fabric.backward(loss) after the forwards of a batch"
                )
            with run.engine.further_forward():
                return module(*args, **kwargs)
        if run.fits and torch.is_grad_enabled():
            self._forwards = 1
            self.on_train_batch_start((args, kwargs), self._batches)
            self._batches += 1
            return run.steps.train(lambda _: module(*args, **kwargs), (args, kwargs))
        relayout.make_room_for_evaluation(run, self._checkpoints, (args, kwargs))
        return run.steps.evaluate(partial(module, *args, **kwargs))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self._forwards = 0
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Takes an optimizer's step."""
        trainer = self._module.trainer
        result = self.optimizer_step(optimizer, closure or (lambda: None), self._module, **kwargs)
        self._forwards = 0  # a backward through weights that have changed since is refused
        trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_completed()
        return result

    def clip_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float, *, finite: bool) -> Tensor:
        """Clips gradients by their norm over all ranks, and returns the norm before. Collective.

        Raises:
            ConfigError: it is not the 2-norm.
            RuntimeError: the norm is not finite, and `finite` asks for one, as torch raises it.
        """
        if norm_type != 2.0:
            raise ConfigError(
                f"fabric.clip_gradients(norm_type={norm_type:g}): pages clip gradients by their 2-norm; leave norm_type "
                f"out, or clip each element by its value"
            )
        norm = self.gradient_norm(optimizer)
        if finite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable this "
                "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        self.precision_plugin.clip_grad_by_norm(optimizer, max_norm)
        return norm


class _InPages(nn.Module):
    """The module that Fabric calls: the user's, with the engine's hooks around its forward."""

    def __init__(self, module: nn.Module, pages: PagedLoop) -> None:
        super().__init__()
        self.module = module
        self._pages = pages

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._pages.forward(self.module, *args, **kwargs)


class _FabricPrecision(Precision):
    """Fabric's precision plugin, but for the weights, which pages convert, and the forward's context."""

    def __init__(self, plugin: Precision, pages: PagedLoop) -> None:
        self.precision = plugin.precision
        self._plugin = plugin
        self._pages = pages

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return self._plugin.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._plugin.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._plugin.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._plugin.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self._pages.precision_plugin.forward_context()


class _SyncControl:
    """Implementation of `fabric.no_backward_sync`."""

    def __init__(self, pages: PagedLoop) -> None:
        self._pages = pages

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Context of backward passes whose gradients are reduced later."""
        return self._pages.block_backward_sync() if enabled else nullcontext()


def _shown(optimizer: Optimizer) -> Optimizer:
    """Returns another view of an optimizer for Fabric to wrap: it shares all attributes, and its methods are the optimizer's.

    Fabric's wrapper derives from the class of what it wraps and inherits `zero_grad`, which would not reach the gradients in
    pages: the run replaces the method of the one object.
    """

    class Shown(type(optimizer)):  # type: ignore[misc]
        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            optimizer.zero_grad(*args, **kwargs)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            optimizer.load_state_dict(state_dict)

        def state_dict(self) -> dict[str, Any]:
            return optimizer.state_dict()

    Shown.__name__ = Shown.__qualname__ = type(optimizer).__name__
    shown: Optimizer = Shown.__new__(Shown)
    shown.__dict__ = vars(optimizer)
    return shown


@listing_settings
class AngelPTMFabricStrategy(LaunchedRanks, ParallelStrategy):
    """Lightning Fabric's strategy with pages over device, host and disk, for one module and its optimizers.

    `fabric.setup(module, optimizer)` puts the module into pages, where it stays until `fabric.strategy.teardown()` gives the
    weights back. Meanwhile `fabric.save` and `fabric.load` have its weights and optimizer states, in a file like any of
    Fabric's.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as for any strategy of Fabric.
        timeout: how long a collective waits for the other ranks.
        settings: see `lightning_ptm.config.Settings`. Settings that divide batches or losses need a Trainer: parallel sizes
            other than data parallelism, micro_batches, slices.
    """

    _unused = "no Fabric has this strategy yet, so it has no devices; pass it to Fabric(strategy=...)"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
        **settings: Any,
    ) -> None:
        self.pages = PagedLoop(timeout=timeout, **settings)
        """The strategy that has the pages: `statistics()`, `gathered(module)`, `inventory()`... during the run."""
        _refuse_settings(self.pages.settings)
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        self._backward_sync_control = _SyncControl(self.pages)  # type: ignore[assignment]
        self._num_nodes = 1
        self._timeout = timeout
        # State.
        self._module: nn.Module | None = None
        """The module in pages (I1)."""
        self._shown: dict[int, Optimizer] = {}
        """The optimizers by the id of what `_shown` returned for each."""

    # -- ranks --------------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        self._num_nodes = nodes

    @override
    def _configure_launcher(self) -> None:
        self._number_ranks()
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._connect()

    @override
    def all_reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        alone = self._is_alone() or not isinstance(tensor, Tensor)
        return tensor if alone else reduced_over_ranks(tensor, group, reduce_op=reduce_op)

    # -- set-up -------------------------------------------------------------------------------------------------------

    @property
    @override
    def precision(self) -> Precision:
        return _FabricPrecision(self._precision or Precision(), self.pages)

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = precision

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Leaves the module where it is: `fabric.setup` copies it into pages unit by unit."""

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.device("meta" if empty_init else "cpu"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        in_pages = self._begin(module, optimizers, TrainerFn.FITTING)
        shown = [_shown(each) for each in optimizers]
        self._shown = {id(view): each for view, each in zip(shown, optimizers, strict=True)}
        return in_pages, shown, scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        return self._begin(module, [], TrainerFn.VALIDATING)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise UsageError(
            "fabric.setup_optimizers: pages of weights and of optimizer states are laid out together; call "
            "`model, optimizer = fabric.setup(model, optimizer)`; a module that was set up alone only computes"
        )

    def _begin(self, module: nn.Module, optimizers: list[Optimizer], function: TrainerFn) -> nn.Module:
        if self._module is not None:
            raise UsageError(
                f"fabric.setup was called for a {type(module).__name__}, and the pages have a "
                f"{type(self._module).__name__} already; call fabric.strategy.teardown() before, or put both modules into "
                f"one nn.Module, or use another Fabric"
            )
        own = [name for name in _OWN_STATE if getattr(type(module), name) is not getattr(nn.Module, name)]
        if own:
            raise ConfigError(
                f"{type(module).__name__} overrides {', '.join(own)}, which fabric.save would not call; let it be a child "
                f"of the module that fabric.setup gets"
            )
        inner = (module.named_children(), module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        taken = [name for each in inner for name, _ in each if hasattr(LightningModule, name)]
        if taken and not isinstance(module, LightningModule):
            raise ConfigError(
                f"{type(module).__name__} has parts named {', '.join(taken)}, as a LightningModule has attributes, and the "
                f"run in pages reads them by these names; rename them, or let the module be a child of the one that "
                f"fabric.setup gets"
            )
        loop, trainer = _ModuleOfLoop(module, optimizers), self._trainer()
        try:
            self.pages.begin(trainer, loop, function)
        except BaseException as error:
            self.pages.on_exception(error)
            self.pages.teardown()
            raise
        self._module = module
        return _InPages(module, self.pages)

    def _trainer(self) -> Trainer:
        """A Trainer that runs no loop."""
        device, numbered = self.root_device.type, backend_of(self.root_device).has_own_memory
        plugin = self._precision or Precision()
        assert self.parallel_devices is not None
        log = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # Fabric has said what the Trainer would say
        level = log.level
        log.setLevel(logging.WARNING)
        try:
            return Trainer(
                strategy=self.pages,
                accelerator=device,
                devices=[each.index for each in self.parallel_devices] if numbered else self.num_processes,
                num_nodes=self._num_nodes,
                plugins=[self.cluster_environment, AngelPTMPrecision.replacing(plugin)],  # type: ignore[list-item]
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        finally:
            log.setLevel(level)

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self.pages.backward(tensor, None, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return self.pages.step(self._plain(optimizer), closure, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        return self.pages.clip_norm(
            self._plain(optimizer), float(max_norm), float(norm_type), finite=error_if_nonfinite
        )

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.pages.precision_plugin.clip_grad_by_value(self._plain(optimizer), float(clip_val))

    def _plain(self, optimizer: Optimizer) -> Optimizer:
        return self._shown.get(id(optimizer), optimizer)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _is_in_pages(self, module: nn.Module) -> bool:
        return self._module is not None and (module is self._module or getattr(module, "module", None) is self._module)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        if self._is_in_pages(module):
            return self.pages.lightning_module_state_dict()
        return super().get_module_state_dict(_unwrapped(module))

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if self._is_in_pages(module):
            self.pages.load_model_state_dict({"state_dict": state_dict}, strict)
        else:
            super().load_module_state_dict(_unwrapped(module), state_dict, strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.pages.optimizer_state(self._plain(optimizer))

    # -- the end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Ends the run: the module and its optimizers get their values back, if RAM can hold them. Collective. Fabric does
        not call this; a process may also end without it."""
        module, self._module = self._module, None
        if module is not None:
            self.pages.teardown()
        self._shown = {}
        super().teardown()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Returns the user's module, whose names a checkpoint has also after `teardown`."""
    return module.module if isinstance(module, _InPages) else module


def _refuse_settings(settings: Settings) -> None:
    """Raises:
    ConfigError: a setting needs a Trainer.
    """
    needs = [name for name, whole in _NEEDS_TRAINER.items() if getattr(settings, name) != whole]
    if needs:
        raise ConfigError(
            f"{', '.join(needs)}: these settings divide the batches or losses of a Trainer, and in Fabric the loop is "
            f"yours; leave them out, or use lightning.pytorch.Trainer(strategy='angel_ptm')"
        )
    checkpoints = settings.checkpoints
    if checkpoints.state_dict_type != "full" or checkpoints.async_save or checkpoints.resume != "never":
        raise ConfigError(
            "fabric.save writes one full file when it is called; leave Checkpoints(state_dict_type='sharded'), "
            "Checkpoints(async_save=True) and Checkpoints(resume='auto') out, or use "
            "lightning.pytorch.Trainer(strategy='angel_ptm')"
        )
