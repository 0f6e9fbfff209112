"""Pages that are handed on without engines: those of one layout to another one of the same module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decided_by_hand import LaidOut, adam, decided, laid_out
from torch import nn
from torch.optim import Optimizer
from values_by_hand import PLACES, states_for

from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.runtime.relayout.reused_tensors import ReusedTensors, reused_tensors

UPDATED = ("head", "turned", "blocks.1.weight")
"""Parameters of which there are states."""


def handed_by(made: LaidOut, disk: Path, optimizer: Optimizer) -> PreviousState:
    """Returns the state in the pages of a run without an engine."""
    return PreviousState(
        made.gathered_flats,
        optimizers=[optimizer],
        scalars=made.optimizer_values.scalars(),
        originals=made.values.pop_originals(),
        of_files=made.values.of_files,
        disk_paths=(disk,),
    )


@contextmanager
def old_pages(
    module: nn.Module, disk: Path, place: str, **options: Any
) -> Iterator[tuple[LaidOut, PreviousState, Optimizer, dict[int, Any]]]:
    """(pages, what is handed on of them, the optimizer of what trains, states of it) of a module."""
    optimizer = adam([each for each in module.parameters() if each.requires_grad])
    with laid_out(decided(module, [optimizer], **PLACES[place], **options), [disk]) as made:
        made.take_over(keep_frozen=True)
        states = states_for(module, *UPDATED)
        made.optimizer_values.load(0, states)
        yield made, handed_by(made, disk, optimizer), optimizer, states


@contextmanager
def new_pages(
    module: nn.Module, disk: Path, place: str, handed: PreviousState, optimizer: Optimizer, **options: Any
) -> Iterator[tuple[LaidOut, ReusedTensors]]:
    """Pages for what the module's parameters are now, not laid yet."""
    blueprint = decided(module, [optimizer], **PLACES[place], **options)
    kept = reused_tensors(blueprint, handed, [optimizer], [disk])
    with laid_out(blueprint, [disk], kept) as made:
        yield made, kept


def scalars_of(states: dict[int, Any]) -> dict[int, Any]:
    return {key: {"step": state["step"]} for key, state in states.items()}


def assert_states(made: LaidOut, states: dict[int, Any]) -> None:
    found = {id(parameter): state for parameter, state in made.optimizer_values.states(0)}
    assert found.keys() == states.keys()
    for key, state in states.items():
        assert all(torch.equal(found[key][name], value) for name, value in state.items())
