"""The random numbers of a run: the state of every generator that training draws from, in a checkpoint and back.

Lightning's own checkpoints do not have it; without it, a run that goes on draws other dropout masks and another order of
the data than one that never stopped. They are filed in `loops`, with how far the run has come: hooks and other Trainers find
the checkpoint's own keys to be Lightning's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

KEY = "random_states"
"""The states of each rank, in order."""


def filed(checkpoint: dict[str, Any], states: Sequence[Any]) -> dict[str, Any]:
    """The checkpoint with them; the one that is given may be hooks' own. Where a hook has taken the loops out, nothing can
    go on from there."""
    loops = checkpoint.get("loops")
    return {**checkpoint, "loops": {**loops, KEY: states}} if loops else checkpoint


def found(checkpoint: Mapping[str, Any]) -> Sequence[Any]:
    """Of a checkpoint; empty where it has none."""
    return (checkpoint.get("loops") or {}).get(KEY) or checkpoint.get(KEY) or ()  # the latter in earlier versions


def states(device: torch.device) -> dict[str, Any]:
    """The states of this process, of types that `torch.load(weights_only=True)` takes."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def restore(found: Mapping[str, Any], device: torch.device) -> None:
    """Go on from there. Generators without a state keep theirs."""
    version, internal, gauss = found["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(found["torch"].cpu())
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"].cpu(), device)
    if "numpy" in found:
        import numpy

        kind, keys, *rest = found["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
