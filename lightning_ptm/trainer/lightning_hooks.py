"""Hooks into Lightning, its callbacks and the user's optimizers: events of a run that the strategy is not called for.

Owns the methods that it replaces on other objects, until `undo`. Also has the warnings of a run's start. Knows objects of
Lightning and torch; pages belong to the engine.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint, ModelPruning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_ptm.checkpoints.optimizer_states import is_opened
from lightning_ptm.comm import Gathering, ProcessGroupCommunicator, UserCollectives
from lightning_ptm.config import Settings
from lightning_ptm.errors import UsageError, some
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.autograd.recompute import compiled_around, recomputed_units, replace
from lightning_ptm.runtime.autograd.slices import slices_of
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.machine.machine import node_cores
from lightning_ptm.runtime.ranks.barriers import BarrierReason
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward
from lightning_ptm.torch_internals import is_compiled
from lightning_ptm.trainer.internals import BEFORE_BATCH, LINK, ON_REQUEUE, ON_SIGTERM, SUMMARY, signals_of
from lightning_ptm.trainer.metric_groups import InGroup, metrics_of
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.pruning import gather_for_pruning
from lightning_ptm.trainer.signals import Signals
from lightning_ptm.trainer.summaries import of_whole_parameters
from lightning_ptm.trainer.weight_averaging import Gathered, gather_for_averaging

_NOTHING = object()


class Replacement:
    """A replacement for a method of one object. A copy of the object has the original method of its class."""

    def __init__(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self._owner, self._name)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        return _own_method(copy.deepcopy(self._owner, known), self._name)


def _own_method(owner: Any, name: str) -> Any:
    return inspect.getattr_static(type(owner), name).__get__(owner, type(owner))


def _nothing() -> None:
    pass


def _evaluations(trainer: Trainer) -> tuple[Any, ...]:
    return trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop


class LightningHooks:
    """The methods of other objects that a run replaces, and its optimizer hooks; `undo` removes all of them.

    Args:
        keeps_gradients: whether `zero_grad` has to leave gradients alone, as the step that comes next uses them.
    """

    def __init__(self, engine: Engine, keeps_gradients: Callable[[], bool]) -> None:
        self._keeps_gradients = keeps_gradients
        self._engine: Engine | None = engine
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """(object, method name, replacement, what the object's `__dict__` had under the name) of each replacement."""
        self._hooks: list[RemovableHandle] = []
        self._restore: list[Callable[[], None]] = []
        self._user_collectives: UserCollectives | None = None

    def no_sync(self, module: nn.Module, blocked: Callable[[], AbstractContextManager[None]]) -> None:
        """Adds `no_sync` to `trainer.model`, as DDP's module has it."""
        if not hasattr(module, "no_sync"):
            self._restore.append(replace(module, no_sync=blocked))

    def zero_grad_of(self, optimizer: Optimizer, wrapper: LightningOptimizer) -> None:
        """Makes `zero_grad` of an optimizer and of its Lightning wrapper forget the gradients in pages, too."""
        original = optimizer.zero_grad

        def zero_grad(*given: bool, **named: bool) -> None:
            if self._engine is not None and self._keeps_gradients():
                return
            forget = given[0] if given else named.get("set_to_none", True)
            if self._engine is not None:
                self._engine.stepping.zero_grad(optimizer, forget=forget)
            original(*given, **named)  # Apex's FusedAdam has a method without arguments
            if self._engine is not None and not forget:
                self._engine.stepping.show_gradients(optimizer)

        self._replace(optimizer, "zero_grad", zero_grad)
        self._replace(wrapper, "zero_grad", zero_grad)  # inherited from Optimizer otherwise

    def refuse_unknown_steps(self, known: Collection[Optimizer]) -> None:
        """Refuses steps of optimizers that the run does not know, where they would update copies of weights: their results
        would not reach the master weights.

        Args:
            known: the run's optimizers.
        """

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._engine is None or any(optimizer is each for each in known):
                return
            # torch's own classes skip parameters without a gradient. But a closure may compute gradients, and in a backward
            # pass some gradients have been moved into pages already.
            torchs = type(optimizer).__module__.startswith("torch.optim") and not in_backward()
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            only_gradients = torchs and closure is None
            with torch.DisableTorchFunctionSubclass():
                updated = [
                    parameter
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                    if parameter.grad is not None or (parameter.requires_grad and not only_gradients)
                ]
            names = self._engine.gathered_parameters.names_of_copies(updated)
            if names:
                raise UsageError(
                    f"{type(optimizer).__name__}.step was called, but configure_optimizers did not return this optimizer. "
                    f"It would update 16-bit or other copies of {some(names, 3)}, and not the values in pages, so the "
                    "update would be lost; return the optimizer from configure_optimizers, which may return several, or "
                    "keep everything in RAM, on one rank and in a true precision"
                )

        self._hooks.append(register_optimizer_step_pre_hook(before))

    def loads_of(self, optimizer: Optimizer, load: Callable[[Optimizer, Mapping[str, Any]], None]) -> None:
        """Calls `load` with the argument of an optimizer's `load_state_dict`, which torch rounds to the parameters' dtype."""
        given: dict[str, Any] = {}

        def before(loading: Optimizer, state: dict[str, Any]) -> None:
            if loading is optimizer:  # and not Lightning's wrapper, which would then have states of its own
                given.update(state)

        def after(loading: Optimizer) -> None:
            if loading is optimizer:
                state = dict(given)
                given.clear()
                load(optimizer, state)

        self._hooks.append(optimizer.register_load_state_dict_pre_hook(before))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(after))

    def state_dict_of(
        self, optimizer: Optimizer, wrapper: LightningOptimizer, whole: Callable[[Optimizer], dict[str, Any]]
    ) -> None:
        """Makes `state_dict` of an optimizer and of its Lightning wrapper include the states in pages. Collective.

        Args:
            whole: returns the complete state dict; reads from the optimizer what is not in pages.
        """
        original = optimizer.state_dict

        def state_dict() -> dict[str, Any]:
            return original() if self._engine is None or is_opened(optimizer) else whole(optimizer)

        self._replace(optimizer, "state_dict", state_dict)
        self._replace(wrapper, "state_dict", state_dict)

    def averaging(self, trainer: Trainer, gathered: Gathered) -> None:
        """Gathers the weights for callbacks that average them."""
        for owner, name, method in gather_for_averaging(trainer.callbacks, gathered):  # type: ignore[attr-defined]
            self._replace(owner, name, method)

    def pruning(self, trainer: Trainer, gathered: Gathered) -> None:
        """Gathers the weights for callbacks that prune them, where they are in pages."""
        assert self._engine is not None
        if not self._engine.blueprint.may_be_outside:
            for owner, name, method in gather_for_pruning(trainer.callbacks, gathered):  # type: ignore[attr-defined]
                self._replace(owner, name, method)

    def metrics(self, module: LightningModule, group: Callable[[], ProcessGroup | None]) -> None:
        """Reduces the module's metrics over the ranks of the group that a function returns."""
        for metric, name in metrics_of(module):
            self._put(metric, name, InGroup(metric, lambda: None if self._engine is None else group()))

    def summaries(self, trainer: Trainer, boxes: Mapping[str, TensorSlice]) -> None:
        """Makes model summaries count whole parameters."""
        for callback, summary in of_whole_parameters(trainer, boxes):
            self._replace(callback, SUMMARY, summary)

    def links(self, trainer: Trainer, link: Callable[[Trainer, str, str], None]) -> None:
        """Makes callbacks that link to a checkpoint call `link` instead."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._replace(callback, LINK, link)

    def ranks(
        self,
        trainer: Trainer,
        signals: Signals,
        communicator: ProcessGroupCommunicator,
        meet: Callable[[BarrierReason], None],
        gather: Callable[[Gathering], None],
    ) -> None:
        """Installs the hooks of a run with several ranks: points where ranks compare what they do next, signals, and
        collectives that the user, a metric or Lightning calls.

        Args:
            meet: called at each point where ranks with different numbers of batches diverge.
            gather: called before the user, a metric or Lightning calls a collective of torch.distributed.
        """
        self._user_collectives = UserCollectives(gather, communicator.group_names)

        self._replace(signals_of(trainer), ON_SIGTERM, signals.end)
        self._replace(signals_of(trainer), ON_REQUEUE, signals.put_back)

        def at(point: BarrierReason) -> None:
            meet(point)
            signals.settle()

        epochs = trainer.fit_loop
        for each in _evaluations(trainer):
            self._around(each, "on_run_end", partial(at, BarrierReason.END_OF_EVALUATION))
        # Lightning calls this before each batch to ask whether rank 0 has received SIGTERM.
        self._replace(epochs.epoch_loop, BEFORE_BATCH, partial(at, BarrierReason.TRAINING_BATCH))
        self._around(
            epochs, "on_advance_end", partial(meet, BarrierReason.END_OF_EPOCH), partial(at, BarrierReason.END_OF_EPOCH)
        )

    def one_rank(self, trainer: Trainer, signals: Signals) -> None:
        """Installs the hooks of a run with one rank: a signal must not save in the middle of a step. (For SIGTERM alone,
        Lightning's handler only sets a flag, too.)"""
        self._replace(signals_of(trainer), ON_REQUEUE, signals.put_back)
        self._around(trainer.fit_loop.epoch_loop, "advance", signals.settle)
        self._around(trainer.fit_loop, "on_advance_end", _nothing, signals.settle)
        for each in _evaluations(trainer):
            self._around(each, "on_run_end", signals.settle)

    def exceptions(self, trainer: Trainer) -> None:
        """Ends the run if `on_exception` of a callback raises: Lightning then calls `teardown` of nothing, and pages, threads
        and these hooks would stay."""

        def on_exception(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return theirs(*args, **kwargs)
            except BaseException as error:  # Ctrl-C, too
                trainer.strategy.on_exception(error)
                trainer.strategy.teardown()
                signals_of(trainer).teardown()
                raise

        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback.on_exception, "__func__", None) is not Callback.on_exception:
                self._replace(callback, "on_exception", partial(on_exception, callback.on_exception))

    def _around(self, owner: Any, name: str, ours: Callable[[], None], after: Callable[[], None] | None = None) -> None:
        """Calls `ours` before a method, and `after` after it has returned."""
        original = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            if self._engine is not None:
                ours()
            result = original(*args, **kwargs)
            if self._engine is not None and after is not None:
                after()
            return result

        self._replace(owner, name, both)

    def undo(self) -> None:
        """Ends the run: restores all methods and removes all hooks."""
        self._engine = None
        if self._user_collectives is not None:
            self._user_collectives.close()
        for owner, name, ours, before in reversed(self._replaced):
            if owner.__dict__.get(name) is not ours:
                continue  # replaced again since, by a method that calls the original one now
            if before is _NOTHING:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = before
        self._replaced = []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._restore:
            self._restore.pop()()

    def finetuning(self, trainer: Trainer) -> None:
        """Makes callbacks that unfreeze parameters find those that an optimizer already has by identity: Lightning compares
        values, which are not readable while they are in pages."""
        assert self._engine is not None
        if self._engine.blueprint.may_be_outside:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                self._replace(callback, "finetune_function", _knowing_parameters(callback.finetune_function))

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._put(owner, name, Replacement(owner, name, method))

    def _put(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, ours, owner.__dict__.get(name, _NOTHING)))
        setattr(owner, name, ours)


def rearrangers(trainer: Trainer) -> list[str]:
    """Class names of the callbacks that will unfreeze parameters, or replace their data, during the run."""
    kinds = (BaseFinetuning, ModelPruning)
    return [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, kinds)]  # type: ignore[attr-defined]


def _knowing_parameters(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A `finetune_function` that recognizes parameters by identity."""

    @functools.wraps(theirs)
    def finetune_function(*args: Any, **kwargs: Any) -> Any:
        before = BaseFinetuning.__dict__["filter_on_optimizer"]
        filtered = partial(_not_in_optimizer, BaseFinetuning.filter_on_optimizer)
        BaseFinetuning.filter_on_optimizer = staticmethod(filtered)  # type: ignore[method-assign]
        try:
            return theirs(*args, **kwargs)
        finally:
            BaseFinetuning.filter_on_optimizer = before  # type: ignore[method-assign]

    return finetune_function


def _not_in_optimizer(
    theirs: Callable[..., list[torch.Tensor]], optimizer: Optimizer, params: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """The result and warnings of Lightning's own function, which compares values: it gets a number in place of each
    parameter."""
    numbers: dict[int, torch.Tensor] = {}

    def number(parameter: torch.Tensor) -> torch.Tensor:
        return numbers.setdefault(id(parameter), torch.tensor(len(numbers)))

    shown = type(optimizer).__new__(type(optimizer))
    shown.param_groups = [{"params": [number(each) for each in group["params"]]} for group in optimizer.param_groups]
    chosen = list(params)
    kept = theirs(shown, [number(each) for each in chosen])
    known = {id(each) for each in kept}
    return [each for each in chosen if id(number(each)) in known]


def warn_of_gradients_in_pages(module: LightningModule, engine: Engine, precision: AngelPTMPrecision) -> None:
    """Warns of hooks whose reads of `.grad` will be refused, or will find one part of what tensor parallelism divides."""
    readers = precision.gradient_readers(module, of_grad=True)
    if readers and not engine.communicator.alone and any(engine.flats):
        kept = "finds this rank's part alone" if engine.changes.gradients_in_place else "will be refused"
        rank_zero_warn(
            f"{', '.join(readers)}: a hook between backward and step that reads .grad {kept}, since each rank keeps only "
            f"a part of the gradients; use gradient_clip_val or self.clip_gradients to clip, and "
            f"trainer.strategy.gradient_norm(optimizer) for the norm"
        )


def warn_of_threads(ranks_on_host: int) -> None:
    """Warns of more threads than cores, as in a container with a quota that torch ignores: threads wait for each other."""
    threads, cores = torch.get_num_threads(), max(1, node_cores(ranks_on_host) // ranks_on_host)
    if threads > cores:
        rank_zero_warn(
            f"PyTorch computes with {threads} threads, and {'a rank' if ranks_on_host > 1 else 'this process'} may use "
            f"{cores} of this machine's cores; set OMP_NUM_THREADS={cores} before Python starts, or call "
            f"torch.set_num_threads({cores}): a thread without a core delays all the others"
        )


def warn_of_wide_matmuls_uncompiled(module: LightningModule) -> None:
    """Warns of compiled modules where 16-bit products are computed in fp32: torch compiles nothing under a dispatch mode."""
    compiled = [name or type(each).__name__ for name, each in module.named_modules() if is_compiled(each)]
    if compiled:
        rank_zero_warn(
            f"{compiled[0]}{', ...' if len(compiled) > 1 else ''} will be computed without torch.compile, since "
            "products of 16-bit tensors are computed in fp32 on this CPU; for compiled code, set "
            "precision='32-true', or tuning=Tuning(matmul_precision='native') (slower here)"
        )


def warn_of_recomputing_uncompiled(module: LightningModule, engine: Engine, settings: Settings) -> None:
    """Warns of recomputed units in a module that was compiled as a whole."""
    units = engine.blueprint.units
    sliced = slices_of(units, settings.slices)
    recomputed = [units[at] for at in sorted(recomputed_units(len(units), settings.recompute_every, sliced))]
    around = compiled_around(module, recomputed)
    if around:
        asked = f"slices={settings.slices!r}" if sliced else f"recompute={settings.recompute!r}"
        rank_zero_warn(
            f"{', '.join(around)}: compiled as a whole, and {asked}: the units inside "
            f"({recomputed[0].name}...) are computed without torch.compile; compile them one by one instead, as in "
            f"`for block in self.blocks: block.compile()`"
        )
