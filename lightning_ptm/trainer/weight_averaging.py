"""Support for Lightning's weight averaging callbacks: weights are gathered while the callbacks copy them.

The callbacks read and write parameters directly, which is refused between steps (runtime/units/parameter_guard.py). Knows
the callbacks' methods; pages belong to the strategy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging

from lightning_ptm.errors import ConfigError
from lightning_ptm.trainer.internals import COPY_WEIGHTS, average_of

Gathered = Callable[..., AbstractContextManager[None]]
"""`AngelPTMStrategy.gathered`."""


def gather_for_averaging(
    callbacks: Iterable[Callback], gathered: Gathered
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Replacements for the methods that copy weights, of callbacks that average them: (object, method name, wrapper that
    gathers the weights).

    Call it after the callbacks' `setup`.
    """
    for callback in callbacks:
        reading: list[tuple[Any, str]] = []
        writing: list[tuple[Any, str]] = []
        if isinstance(callback, WeightAveraging):
            if average_of(callback) is None:
                continue  # an evaluation without a fit before it
            # Not the hooks that call these methods: most of their calls copy nothing, and gathering is expensive.
            reading = [(average_of(callback), "update_parameters")]
            writing = [(callback, name) for name in (*COPY_WEIGHTS, "on_load_checkpoint")]
        elif isinstance(callback, StochasticWeightAveraging):
            reading = [(callback, "update_parameters")]
            writing = [(callback, "transfer_weights")]
        for owner, name in (*reading, *writing):
            yield owner, name, _wrapped(getattr(owner, name), gathered, write=(owner, name) in writing)


def refuse_sharded(callbacks: Iterable[Callback]) -> None:
    """Raises:
    ConfigError: a callback puts a second set of weights into checkpoints, which sharded checkpoints cannot hold.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} saves two sets of weights, and Checkpoints(state_dict_type='sharded') can "
                "hold only one; use checkpoints=Checkpoints(state_dict_type='full')"
            )


def refuse_parts(callbacks: Iterable[Callback], *, cut_here: bool = False) -> None:
    """Raises:
    ConfigError: a callback averages weights, of which ranks have only slices.

    Args:
        cut_here: whether parameters are sliced only when the run begins, after these callbacks have copied the module.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) or (cut_here and isinstance(callback, StochasticWeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} averages the weights of one rank, which has only slices of parameters (tensor "
                f"parallelism), so the whole weights could be neither averaged nor saved; leave it out, or use "
                f"tensor_parallel_size=1"
            )


def _wrapped(method: Callable[..., Any], gathered: Gathered, *, write: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with gathered(write=write):
            return method(*args, **kwargs)

    return call
