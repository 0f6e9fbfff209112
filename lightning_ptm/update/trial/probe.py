"""What an optimizer keeps, and whether its update may be run page by page.

torch's own classes are known (known.py). Of every other class it is found out by trial (candidate.py), so third-party ones
pass or fail by what they do; one that fails is refused with the property that it lacks. The user's optimizer is only read.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.update.trial.candidate import Candidate, may_fuse, name_of
from lightning_ptm.update.trial.known import has_wrong_kernel, is_known, known_group, known_initial
from lightning_ptm.update.trial.traits import OptimizerTraits


def probe(
    optimizer: Optimizer, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> OptimizerTraits:
    """Learn an optimizer's traits.

    Args:
        optimizer: the user's object; neither it nor its class is changed, and no parameter of it is read.
        dtype: dtype that the master parameters will have.
        device: where updates will run.

    Returns:
        What it keeps for each parameter group.

    Raises:
        ConfigError: its update cannot be run page by page; says which property it lacks, and what to use instead.
    """
    device = torch.device(device)
    if is_known(optimizer, dtype, device):
        groups = tuple(
            known_group(optimizer, group, dtype, may_fuse=may_fuse(group, dtype, device))
            for group in optimizer.param_groups
        )
        return OptimizerTraits(name_of(optimizer), groups, known_initial(optimizer), device)
    if has_wrong_kernel(optimizer, dtype):
        raise ConfigError(
            f"{name_of(optimizer)} with fused=True and momentum keeps wrong momentum of {str(dtype).removeprefix('torch.')}: "
            f"torch's kernel does; use fused=False, or a mixed precision, with masters in fp32"
        )
    with _generators_as_they_are(device):
        return try_out(optimizer, dtype=dtype, device=device)


def try_out(optimizer: Optimizer, *, dtype: torch.dtype, device: torch.device) -> OptimizerTraits:
    """As `probe`, by trial whatever the class is."""
    return Candidate(optimizer, dtype, device).traits()


@contextlib.contextmanager
def _generators_as_they_are(device: torch.device) -> Iterator[None]:
    """A class that draws random numbers must not change those of the training."""
    python, here = random.getstate(), torch.get_rng_state()
    backend = backend_of(device)
    there = backend.random_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(here)
        if there is not None:
            backend.set_random_state(there)
