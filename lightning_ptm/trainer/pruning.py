"""Lightning's ModelPruning, for which the weights are gathered while it prunes or rewinds them.

A pruned parameter stays the same one under another name (`weight_orig`), and its mask is a buffer, so pages have nothing to
learn but new values. Knows the callback's methods; pages are the strategy's.
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
    """What is to take the place of methods that prune: (object, name of its method, another one around it)."""
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            for name in ("apply_pruning", "make_pruning_permanent"):
                yield callback, name, _wrapped(getattr(callback, name), gathered)
            yield callback, "apply_lottery_ticket_hypothesis", _rewinding(callback, gathered)


def refuse_pruning(callbacks: Iterable[Callback], *, sharded: bool, divided: bool) -> None:
    """What pruning cannot be together with.

    Args:
        sharded: checkpoints are folders of shards.
        divided: ranks have parts of parameters, or experts of their own.

    Raises:
        ConfigError: a callback prunes, and it is asked for.
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
                f"state_dict_type='sharded' writes weights as pages have them; use "
                f"checkpoints=Checkpoints(state_dict_type='full'), or "
                f"make_pruning_permanent=False"
            )


def _wrapped(method: Callable[..., Any], gathered: Gathered) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with gathered():
            return method(*args, **kwargs)

    return call


def _rewinding(callback: ModelPruning, gathered: Gathered) -> Callable[[], None]:
    """Lightning rewinds a parameter by giving it the data of the copy that it has kept of it. That is trained from then on,
    so the next rewinding leaves the parameter where it is. Pages take values: of each the first one alone is carried out."""
    theirs = callback.apply_lottery_ticket_hypothesis

    @functools.wraps(theirs)
    def rewind() -> None:
        with gathered():
            theirs()
        for kept in (layers_before_pruning(callback) or {}).values():
            if not (resamples(callback) and callable(getattr(kept["data"], "reset_parameters", None))):
                kept["names"].clear()

    return rewind
