"""What a run has to hear of that Lightning and its users do without asking the strategy; and what it tells them beforehand.

Owns the methods that it puts in place of others', until `undo`. Knows objects of Lightning and torch; pages are the engine's.
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
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, ModelPruning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_ptm.comm import Gathering, ProcessGroupCommunicator, UserCollectives
from lightning_ptm.config import Settings
from lightning_ptm.errors import UsageError, some
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.autograd.recompute import compiled_around, replace
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.machine.machine import node_cores
from lightning_ptm.runtime.ranks.barriers import Together
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward
from lightning_ptm.torch_internals import is_compiled
from lightning_ptm.trainer.internals import BEFORE_BATCH, LINK, ON_REQUEUE, ON_SIGTERM, SUMMARY, signals_of
from lightning_ptm.trainer.metric_groups import InGroup, metrics_of
from lightning_ptm.trainer.paged_optimizer_state import is_opened
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.pruning import gather_for_pruning
from lightning_ptm.trainer.signals import Signals
from lightning_ptm.trainer.summaries import of_whole_parameters
from lightning_ptm.trainer.weight_averaging import Gathered, gather_for_averaging

_NOTHING = object()


class Replacement:
    """A method of ours in the place of one object's own, of whose class a copy of the object has its own again."""

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
    """See the file's contract."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """Objects, names of methods that are ours, these, and what the objects themselves had there."""
        self._hooks: list[RemovableHandle] = []
        self._restore: list[Callable[[], None]] = []
        self._foreign: UserCollectives | None = None

    def no_sync(self, module: nn.Module, blocked: Callable[[], AbstractContextManager[None]]) -> None:
        """`trainer.model` is what DDP wraps, whose users call this method of it."""
        if not hasattr(module, "no_sync"):
            self._restore.append(replace(module, no_sync=blocked))

    def zero_grad_of(self, optimizer: Optimizer, wrapper: LightningOptimizer) -> None:
        """Gradients in pages must be forgotten when the user's optimizer forgets its own, by either of its handles."""
        original = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if self._engine is not None:
                self._engine.stepping.zero_grad(optimizer, forget=set_to_none)
            original(set_to_none=set_to_none)
            if self._engine is not None and not set_to_none:
                self._engine.stepping.show_gradients(optimizer)

        self._replace(optimizer, "zero_grad", zero_grad)
        self._replace(wrapper, "zero_grad", zero_grad)  # inherited from Optimizer otherwise

    def steps_of_others(self, known: Collection[Optimizer]) -> None:
        """Steps of optimizers that are none of the run's are refused where they would update copies of weights: nobody would
        bring what they write to the precise values.

        Args:
            known: the run's.
        """

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._engine is None or any(optimizer is each for each in known):
                return
            # torch's own classes leave alone what has no gradient. A closure may compute some, and in a backward pass some
            # have been taken away already.
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
            names = self._engine.lent_parameters.names_of_copies(updated)
            if names:
                raise UsageError(
                    f"{type(optimizer).__name__}.step was called, of an optimizer that configure_optimizers has not "
                    f"returned, and would update {some(names, 3)}: the module has copies of these alone, of more precise "
                    f"values or of pages elsewhere, so what it writes would be lost; return it from configure_optimizers, "
                    f"which may return several, or keep everything in RAM, on one rank and in a true precision"
                )

        self._hooks.append(register_optimizer_step_pre_hook(before))

    def loads_of(self, optimizer: Optimizer, load: Callable[[Optimizer, Mapping[str, Any]], None]) -> None:
        """`load` is told what the optimizer's `load_state_dict` was given, which torch rounds to the parameters' dtype."""
        given: dict[str, Any] = {}

        def before(loading: Optimizer, state: dict[str, Any]) -> None:
            if loading is optimizer:  # and not Lightning's wrapper of it, which then has states of its own
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
        """Its `state_dict`, by either of its handles, holds what is in pages, too. Collective.

        Args:
            whole: makes it; asks the optimizer for what is in no pages.
        """
        original = optimizer.state_dict

        def state_dict() -> dict[str, Any]:
            return original() if self._engine is None or is_opened(optimizer) else whole(optimizer)

        self._replace(optimizer, "state_dict", state_dict)
        self._replace(wrapper, "state_dict", state_dict)

    def averaging(self, trainer: Trainer, gathered: Gathered) -> None:
        """Callbacks that average weights find them whole."""
        for owner, name, method in gather_for_averaging(trainer.callbacks, gathered):  # type: ignore[attr-defined]
            self._replace(owner, name, method)

    def pruning(self, trainer: Trainer, gathered: Gathered) -> None:
        """Callbacks that prune weights in pages find them whole."""
        assert self._engine is not None
        if not self._engine.blueprint.may_be_outside:
            for owner, name, method in gather_for_pruning(trainer.callbacks, gathered):  # type: ignore[attr-defined]
                self._replace(owner, name, method)

    def metrics(self, module: LightningModule, group: ProcessGroup) -> None:
        """The module's metrics add up over the ranks of a group."""
        for metric, name in metrics_of(module):
            self._put(metric, name, InGroup(metric, lambda: None if self._engine is None else group))

    def summaries(self, trainer: Trainer, boxes: Mapping[str, TensorSlice]) -> None:
        """Summaries of the module tell whole parameters."""
        for callback, summary in of_whole_parameters(trainer, boxes):
            self._replace(callback, SUMMARY, summary)

    def links(self, trainer: Trainer, link: Callable[[Trainer, str, str], None]) -> None:
        """Callbacks that link to a checkpoint call `link` instead."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._replace(callback, LINK, link)

    def ranks(
        self,
        trainer: Trainer,
        signals: Signals,
        communicator: ProcessGroupCommunicator,
        meet: Callable[[Together], None],
        gather: Callable[[Gathering], None],
    ) -> None:
        """Others may come with more batches, or need this rank for what it does not do itself.

        Args:
            meet: called where different numbers of batches show.
            gather: called before users, metrics or Lightning talk between ranks by torch.distributed.
        """
        self._foreign = UserCollectives(gather, communicator.group_names)

        self._replace(signals_of(trainer), ON_SIGTERM, signals.end)
        self._replace(signals_of(trainer), ON_REQUEUE, signals.put_back)

        def at(point: Together) -> None:
            meet(point)
            signals.settle()

        epochs = trainer.fit_loop
        for each in _evaluations(trainer):
            self._before(each, "on_run_end", partial(at, Together.END_OF_EVALUATION))
        # Lightning's own question whether rank 0 has received SIGTERM, before each batch.
        self._replace(epochs.epoch_loop, BEFORE_BATCH, partial(at, Together.TRAINING_BATCH))
        self._before(epochs, "on_advance_end", partial(meet, Together.END_OF_EPOCH), partial(at, Together.END_OF_EPOCH))

    def one_rank(self, trainer: Trainer, signals: Signals) -> None:
        """A signal must not save in the middle of a step. (SIGTERM alone is only remembered by Lightning, too.)"""
        self._replace(signals_of(trainer), ON_REQUEUE, signals.put_back)
        self._before(trainer.fit_loop.epoch_loop, "advance", signals.settle)
        self._before(trainer.fit_loop, "on_advance_end", _nothing, signals.settle)
        for each in _evaluations(trainer):
            self._before(each, "on_run_end", signals.settle)

    def _before(
        self, owner: Any, name: str, ours: Callable[[], None], behind: Callable[[], None] | None = None
    ) -> None:
        """Calls `ours` before a method, and `behind` when it has returned."""
        original = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            if self._engine is not None:
                ours()
            result = original(*args, **kwargs)
            if self._engine is not None and behind is not None:
                behind()
            return result

        self._replace(owner, name, both)

    def undo(self) -> None:
        """The run is over: all methods are their owners' again."""
        self._engine = None
        if self._foreign is not None:
            self._foreign.close()
        for owner, name, ours, before in reversed(self._replaced):
            if owner.__dict__.get(name) is not ours:
                continue  # somebody has put another one around it, which now calls the owner's
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
        """Callbacks that unfreeze parameters in mid-run look for those that an optimizer has already; values cannot be
        compared while pages have them."""
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
    """Names of the callbacks that will unfreeze parameters, or give them other data, during the run."""
    kinds = (BaseFinetuning, ModelPruning)
    return [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, kinds)]  # type: ignore[attr-defined]


def _knowing_parameters(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A `finetune_function` that knows a parameter again by its being the same one."""

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
    """What Lightning's own function finds and says, which compares values: it is shown a number for each parameter."""
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
    """Of hooks that would be refused, or find parts of what tensor parallelism divides."""
    readers = precision.gradient_readers(module, of_grad=True)
    if readers and not engine.communicator.alone and any(engine.flats):
        kept = "finds this rank's part alone" if engine.changes.gradients_in_place else "will be refused"
        rank_zero_warn(
            f"{', '.join(readers)}: a hook between backward and step that reads .grad {kept}, since each rank keeps "
            f"a part of the gradients alone; use gradient_clip_val or self.clip_gradients to clip, and "
            f"trainer.strategy.gradient_norm(optimizer) for the norm"
        )


def warn_of_threads(ranks_on_host: int) -> None:
    """Of more threads than cores, as in a container whose quota torch does not know: they wait for each other."""
    threads, cores = torch.get_num_threads(), max(1, node_cores(ranks_on_host) // ranks_on_host)
    if threads > cores:
        rank_zero_warn(
            f"PyTorch computes with {threads} threads, and {'a rank' if ranks_on_host > 1 else 'this process'} may use "
            f"{cores} of this machine's cores; set OMP_NUM_THREADS={cores} before Python starts, or call "
            f"torch.set_num_threads({cores}): threads that lack a core keep the others waiting"
        )


def warn_of_wide_products_uncompiled(module: LightningModule) -> None:
    """Of compiled parts where products are wide (matmul_precision.py): torch compiles nothing under a dispatch mode."""
    compiled = [name or type(each).__name__ for name, each in module.named_modules() if is_compiled(each)]
    if compiled:
        rank_zero_warn(
            f"{compiled[0]}{', ...' if len(compiled) > 1 else ''} will be computed without torch.compile, since products of "
            f"16-bit tensors are computed in fp32 on this CPU; for compiled code, set precision='32-true', or "
            f"matmul_precision='native' (slower here)"
        )


def warn_of_recomputing_uncompiled(module: LightningModule, engine: Engine, settings: Settings) -> None:
    """Of units inside of what was compiled as a whole."""
    recomputed = engine.blueprint.units[1 :: settings.recompute_every] if settings.recompute_every else ()
    around = compiled_around(module, recomputed)
    if around:
        rank_zero_warn(
            f"{', '.join(around)}: compiled as a whole, and recompute={settings.recompute!r}: the units inside "
            f"({recomputed[0].name}...) are computed without torch.compile; compile them one by one instead, as in "
            f"`for block in self.blocks: block.compile()`"
        )
