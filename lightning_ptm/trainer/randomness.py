"""The random states of a run: those of every generator that training draws from, saved in and restored from checkpoints.

Lightning's own checkpoints do not have them; without them a resumed run draws other dropout masks and another data order than
a run that never stopped. A checkpoint file has them next to Lightning's own keys; hooks that get a checkpoint see only
Lightning's own keys.
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
"""Key of the list of states, by rank; of a tensor group, whose ranks draw the same numbers, only one rank's."""


def with_states(checkpoint: Mapping[str, Any], states: Sequence[Any]) -> dict[str, Any]:
    """The dict to write in place of `checkpoint`, which is left unchanged, since hooks may keep it."""
    return {**checkpoint, KEY: states}


def set_aside(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Moves the random states of a checkpoint that was read to where hooks do not see them and `found` finds them."""
    states = checkpoint.pop(KEY, None)
    if states is not None and isinstance(checkpoint.get("loops"), dict):
        checkpoint["loops"][KEY] = states
    return checkpoint


def found(checkpoint: Mapping[str, Any]) -> Sequence[Any]:
    """The random states of a checkpoint, as read from the file or after `set_aside`; empty if there are none."""
    return checkpoint.get(KEY) or (checkpoint.get("loops") or {}).get(KEY) or ()


def states(backend: Backend) -> dict[str, Any]:
    """The random states of this process, in types that `torch.load(weights_only=True)` accepts."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    own = backend.random_state()
    if own is not None:
        found[backend.name] = own
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def as_message(states: Mapping[str, Any]) -> dict[str, Any]:
    """Random states in a form for broadcasts: bytes in place of tensors, since pickling a tensor calls torch.save,
    which only ranks that write a file should call."""
    return {name: state.numpy().tobytes() if isinstance(state, Tensor) else state for name, state in states.items()}


def from_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `as_message`."""
    return {
        name: torch.frombuffer(bytearray(state), dtype=torch.uint8) if isinstance(state, bytes) else state
        for name, state in message.items()
    }


def restore(found: Mapping[str, Any], backend: Backend) -> None:
    """Sets the generators to these states. Generators without a state in `found` are left as they are."""
    version, internal, gauss = found["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(found["torch"].cpu())
    if backend.name in found:
        backend.set_random_state(found[backend.name])
    if "numpy" in found:
        import numpy

        kind, keys, *rest = found["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
