"""Training steps of which each rank of a context group computes its tokens: cut batches, and the check of the first ones.

Owns what is installed for them, until `close`: the interception of attention, and the preparation of Transformers' models.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.parallel.attention_calls import AttentionCalls
from lightning_ptm.parallel.context import ContextParallel, Way
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.transformers_models import TransformersModels
from lightning_ptm.runtime.autograd.recompute import replace
from lightning_ptm.terms import Mode
from lightning_ptm.torch_internals import is_compiled
from lightning_ptm.trainer.batch_steps import BatchSteps, Iteration
from lightning_ptm.trainer.loss_check import LossCheck, length_of
from lightning_ptm.trainer.module_state import arguments_of_step

Evaluate = Callable[[Callable[[], Any]], Any]

_COUNTING = "sum_over_text"
"""Attribute of layers that count tokens for their loss: a sum of counts over the ranks that have a text's other tokens."""


class DividedSteps(BatchSteps):
    """The steps of a run with a context group. Steps of evaluations compute whole sequences.

    Args:
        iteration: context of a step of the engine.
        module: the module that trains.
        group: this rank's context group.
        way: the way of attention.
        evaluate: computes a step without a backward pass; None: as this class does.
        alone: context in which experts of other ranks are not used, see `ExpertGroups.alone`.

    Raises:
        ConfigError: the module trains in a way that cannot be checked.
    """

    def __init__(
        self,
        iteration: Iteration,
        module: LightningModule,
        group: TensorGroup,
        way: Way,
        backend: Backend,
        evaluate: Evaluate | None = None,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(iteration)
        _refuse(module, group.size)
        self._context = ContextParallel(group, way)
        self._module = module
        self._evaluate = self.evaluate if evaluate is None else evaluate
        device_type = backend.device.type
        self._calls = AttentionCalls(
            device_type, lambda: self._context.divided, self._context.scaled_dot_product_attention
        )
        self._check = LossCheck(module, self._context, self._calls, alone)
        self._models = TransformersModels(module, self._context)
        counting = [each for each in module.modules() if hasattr(type(each), _COUNTING)]
        self._undo = [replace(each, **{_COUNTING: self._context.sum}) for each in counting]

    @override
    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._models.close()
        self._calls.close()

    @property
    @override
    def ranks_of_sequence(self) -> int:
        return self._context.group.size if self._context.divided else 1

    @override
    def positions(self, length: int, device: torch.device) -> Tensor:
        return self._context.positions(length, device)

    @override
    def train(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes this rank's part of a batch."""
        with self._iteration(Mode.TRAIN):
            part = self.part_of(batch)
            with self._context.of_step():
                return step(part, *args, **kwargs)

    @override
    def part_of(self, batch: Any) -> Any:
        """Raises:
        UsageError: its sequences cannot be divided.
        """
        length = length_of(batch)
        self._check_length(batch, length)
        return self._at(batch, self._context.own_positions(length // self._context.group.size))

    @override
    def of_forward(self) -> AbstractContextManager[None]:
        return self._context.of_step()

    @override
    def batch_starts(self, batch: Any, index: int) -> None:
        """Checks that a batch trains the same divided as whole: one of a new kind, or after 1, 2, 4... steps."""
        self._check_length(batch, length_of(batch))
        trainer = self._module.trainer
        if not self._check.wanted(batch, trainer.global_step):
            return
        plugin = trainer.precision_plugin

        def step(part: Any) -> Any:
            with plugin.train_step_context():
                return self._module.training_step(*arguments_of_step(self._module, part, index))

        self._check.check(batch, trainer.global_step, self._at, lambda part: self._evaluate(partial(step, part)))

    def _check_length(self, batch: Any, length: int) -> None:
        if not length:
            raise UsageError(
                f"context_parallel_size={self._context.group.size} divides the tokens of each batch, dimension 1 of its "
                f"tensors, and this batch ({type(batch).__name__}) has no tensor with two dimensions; let the data loader "
                f"give tensors of (batch, tokens), or train with context_parallel_size=1"
            )
        self._context.check_length(length)

    def _at(self, batch: Any, positions: Tensor) -> Any:
        """Returns the tokens of a batch at these positions."""
        length = length_of(batch)

        def cut(each: Tensor) -> Tensor:
            if each.dim() < 2 or each.shape[1] != length:
                return each
            if each.dim() > 2 and each.shape[2] == length:
                raise UsageError(
                    f"a batch has a tensor of shape {tuple(each.shape)} and sequences of {length} tokens, so it seems to "
                    f"be a mask of pairs of tokens, of which context_parallel_size={self._context.group.size} knows no part; "
                    f"leave it out (attention that is causal by is_causal needs none), or train with context_parallel_size=1"
                )
            return each.index_select(1, positions.to(each.device))

        return apply_to_collection(batch, dtype=Tensor, function=cut)


def _refuse(module: LightningModule, size: int) -> None:
    if not module.automatic_optimization:
        raise ConfigError(
            f"context_parallel_size={size}: the {type(module).__name__} uses manual optimization, so its training step "
            "cannot be tried on a short text to check its loss; return the loss from training_step, or use "
            "context_parallel_size=1"
        )
    compiled = next((name for name, each in module.named_modules() if is_compiled(each)), None)
    if compiled is not None:
        raise ConfigError(
            f"context_parallel_size={size}: {compiled} is compiled by torch.compile, which does not trace attention over "
            f"other ranks' tokens; leave compile out, or use context_parallel_size=1"
        )
