"""Lightning's weight averaging callbacks, for which the weights are gathered while they copy them.

They read and write parameters by hand, which are closed between steps (runtime/units/guarded_parameter.py). Knows the
callbacks' methods;
pages are the strategy's.
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
    """What is to take the place of methods that copy weights, in those of `callbacks` that average them: (object, name of
    its method, another one around it).

    Call it after the callbacks' `setup`.
    """
    for callback in callbacks:
        reading: list[tuple[Any, str]] = []
        writing: list[tuple[Any, str]] = []
        if isinstance(callback, WeightAveraging):
            # Not the hooks that call these: most of their calls copy nothing, and gathering has a price.
            reading = [(average_of(callback), "update_parameters")]
            writing = [(callback, name) for name in (*COPY_WEIGHTS, "on_load_checkpoint")]
        elif isinstance(callback, StochasticWeightAveraging):
            reading = [(callback, "update_parameters")]
            writing = [(callback, "transfer_weights")]
        for owner, name in (*reading, *writing):
            yield owner, name, _wrapped(getattr(owner, name), gathered, write=(owner, name) in writing)


def refuse_sharded(callbacks: Iterable[Callback]) -> None:
    """Raises:
    ConfigError: one of these puts whole weights into checkpoints, for which folders of shards have no place.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} saves two sets of weights, and state_dict_type='sharded' has a place for one; "
                f"use checkpoints=Checkpoints(state_dict_type='full')"
            )


def refuse_parts(callbacks: Iterable[Callback], *, cut_here: bool = False) -> None:
    """Raises:
    ConfigError: one of these cannot average parts of weights.

    Args:
        cut_here: parameters are whole until the run begins, when these callbacks have copied the module.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) or (cut_here and isinstance(callback, StochasticWeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} averages the weights that a rank has, and each has parts of parameters alone "
                f"(tensor parallelism), so nobody could average or save the whole ones; leave it out, or use "
                f"tensor_parallel_size=1"
            )


def _wrapped(method: Callable[..., Any], gathered: Gathered, *, write: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with gathered(write=write):
            return method(*args, **kwargs)

    return call
