"""The random numbers of a run: the state of every generator that training draws from, in a checkpoint and back.

Lightning's own checkpoints do not have it; without it, a run that goes on draws other dropout masks and another order of
the data than one that never stopped. A file has them beside Lightning's own keys;
hooks that are shown a checkpoint find Lightning's own alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.memory.backend import Backend

KEY = "random_states"
"""The states of each rank, in order; of a tensor group, whose ranks draw the same, those of one."""


def filed(checkpoint: Mapping[str, Any], states: Sequence[Any]) -> dict[str, Any]:
    """What is written in place of `checkpoint`, which hooks have been shown, and may keep."""
    return {**checkpoint, KEY: states}


def set_aside(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Takes them out of what was read, and of the sight of hooks, to where `found` finds them."""
    states = checkpoint.pop(KEY, None)
    if states is not None and isinstance(checkpoint.get("loops"), dict):
        checkpoint["loops"][KEY] = states
    return checkpoint


def found(checkpoint: Mapping[str, Any]) -> Sequence[Any]:
    """Of a checkpoint, as it is in a file or as it was read; empty where it has none."""
    return checkpoint.get(KEY) or (checkpoint.get("loops") or {}).get(KEY) or ()


def states(backend: Backend) -> dict[str, Any]:
    """The states of this process, of types that `torch.load(weights_only=True)` takes."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    own = backend.random_state()
    if own is not None:
        found[backend.name] = own
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def sent(states: Mapping[str, Any]) -> dict[str, Any]:
    """As they go to another rank: without tensors, which are pickled by `torch.save`, and that is for who writes a file."""
    return {name: state.numpy().tobytes() if isinstance(state, Tensor) else state for name, state in states.items()}


def received(sent: Mapping[str, Any]) -> dict[str, Any]:
    """What `sent` was made of."""
    return {
        name: torch.frombuffer(bytearray(state), dtype=torch.uint8) if isinstance(state, bytes) else state
        for name, state in sent.items()
    }


def restore(found: Mapping[str, Any], backend: Backend) -> None:
    """Go on from there. Generators without a state keep theirs."""
    version, internal, gauss = found["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(found["torch"].cpu())
    if backend.name in found:
        backend.set_random_state(found[backend.name])
    if "numpy" in found:
        import numpy

        kind, keys, *rest = found["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
