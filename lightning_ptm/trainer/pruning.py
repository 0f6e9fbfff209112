"""Support for Lightning's ModelPruning: weights are gathered while the callback prunes or rewinds them.

A pruned parameter stays the same object under another name (`weight_orig`), and its mask is a buffer, so for pages only the
values change. Knows the callback's methods; pages belong to the strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelPruning

from lightning_ptm.errors import ConfigError
from lightning_ptm.trainer.internals import layers_before_pruning, prunes_for_good, resamples
from lightning_ptm.trainer.weight_averaging import Gathered


def gather_for_pruning(
    callbacks: Iterable[Callback], gathered: Gathered
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Replacements for the methods that prune: (object, method name, wrapper that gathers the weights)."""
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            for name in ("apply_pruning", "make_pruning_permanent"):
                yield callback, name, _wrapped(getattr(callback, name), gathered)
            yield callback, "apply_lottery_ticket_hypothesis", _rewinding(callback, gathered)


def refuse_pruning(callbacks: Iterable[Callback], *, sharded: bool, divided: bool) -> None:
    """Refuses pruning together with sharded checkpoints or divided parameters.

    Args:
        sharded: whether checkpoints are folders of shards.
        divided: whether ranks have slices of parameters, or experts of their own.

    Raises:
        ConfigError: a callback prunes in such a run.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning) and divided:
            raise ConfigError(
                f"{type(callback).__name__} prunes the weights that a rank has, and ranks divide parameters or experts, so "
                f"each would prune what the others do not have; leave it out, or train without tensor_parallel_size and "
                f"expert_parallel_size"
            )
        if isinstance(callback, ModelPruning) and sharded and prunes_for_good(callback):
            raise ConfigError(
                f"{type(callback).__name__} puts masked weights under other names into checkpoints, and "
                "Checkpoints(state_dict_type='sharded') writes weights as pages have them; use "
                "checkpoints=Checkpoints(state_dict_type='full'), or make_pruning_permanent=False"
            )


def _wrapped(method: Callable[..., Any], gathered: Gathered) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with gathered():
            return method(*args, **kwargs)

    return call


def _rewinding(callback: ModelPruning, gathered: Gathered) -> Callable[[], None]:
    """A wrapper of `apply_lottery_ticket_hypothesis` that rewinds each parameter at most once, as Lightning does in effect.

    Lightning assigns the data of its kept copy to the parameter, and training then changes the copy, too, so that the next
    rewinding has no effect. Pages copy values instead, so later rewindings are suppressed here."""
    theirs = callback.apply_lottery_ticket_hypothesis

    @functools.wraps(theirs)
    def rewind() -> None:
        with gathered():
            theirs()
        for kept in (layers_before_pruning(callback) or {}).values():
            if not (resamples(callback) and callable(getattr(kept["data"], "reset_parameters", None))):
                kept["names"].clear()

    return rewind
