"""Optimizer states in the format of an optimizer's own state dict: saved, loaded, taken into pages at the start of a
run, and restored to the optimizer at its end.

State tensors are full tensors. Every function with an engine argument is collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.checkpoints.assembly_memory import copies
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.trainer.paged_optimizer_state import guard, opened
from lightning_ptm.update.trial.traits import same_value


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the user's optimizer, which Lightning's wrapper holds."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Returns an optimizer's parameters, in its own order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """Returns the optimizer's state dict with full state tensors; empty unless `keep`."""
    engine.drain("optimizer state")
    engine.executor.release_all()
    optimizer = plain_optimizer(optimizer)
    index = engine.updates.groups.index_of(optimizer)
    order = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states: dict[int, dict[str, Any]] = {}
    copy_of = copies(engine)
    for parameter, state in engine.optimizer_values.states(index, copy_of if keep else lambda name, value: value):
        if keep and id(parameter) in order:  # else it was removed from the optimizer's groups
            states[order[id(parameter)]] = state
    if not keep:
        return {}
    with opened(optimizer):
        result = optimizer.state_dict()
    if engine.stepping.steps_itself(optimizer) or not order:  # or it is Lightning's mock optimizer
        return result
    # States that the optimizer itself holds are those of parameters that this run does not train.
    states = result["state"] | states
    result["state"] = {place: states[place] for place in sorted(states) if states[place]}
    return result


def load_optimizer_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    """Writes an optimizer's state dict into pages, and its groups into the user's optimizer.

    The loaded tensors also appear in the optimizer's `state`, where the user can read them until the first step.
    Updates write to pages only.

    Returns:
        Function that removes these tensors from the optimizer's `state`.

    Raises:
        ConfigError: the state dict is of an optimizer with other parameter groups, or with settings that need states
            for which this run has no pages.
    """
    optimizer = plain_optimizer(optimizer)
    if engine.stepping.steps_itself(optimizer) or not parameters_of(optimizer):  # or it is Lightning's mock optimizer
        optimizer.load_state_dict(dict(state))
        return lambda: None
    saved, ours = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in ours]:
        raise ConfigError(
            f"the checkpoint's optimizer has parameter groups of {[len(group['params']) for group in saved]} "
            f"parameters, and this run's of {[len(group['params']) for group in ours]}, so its states cannot be "
            "assigned; configure the optimizer as it was saved"
        )
    states = _states_in(state, optimizer)
    _check_kept(engine, optimizer, states, saved)
    forget = _take_states(engine, optimizer, states)
    for group, loaded in zip(ours, saved, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
    return forget


def _states_in(state: Mapping[str, Any], optimizer: Optimizer) -> dict[int, Mapping[str, Any]]:
    """Returns a state dict's states by id of parameter."""
    parameters = parameters_of(optimizer)
    places = [place for group in state["param_groups"] for place in group["params"]]
    return {id(parameters[i]): state["state"][place] for i, place in enumerate(places) if place in state["state"]}


def follow_loaded_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    """Writes states into pages that the user has loaded with the optimizer's own `load_state_dict`, which has loaded
    the groups already. Collective.

    Returns, raises: as `take_over_optimizer_state`.
    """
    return _take_states(engine, optimizer, _states_in(state, optimizer))


def take_over_optimizer_state(engine: Engine, optimizer: Optimizer) -> Callable[[], None] | None:
    """Writes the states that an optimizer has at the start of a run into pages: those of an earlier run, or loaded by
    the user.

    A run leaves the states on rank 0 only, which then broadcasts them. Collective.

    Returns:
        As `load_optimizer_state`; None if there are no states.

    Raises:
        ConfigError: the run has no pages for a state, or it has another shape.
        UsageError: other ranks have states, and rank 0 has none.
    """
    optimizer = plain_optimizer(optimizer)
    parameters = parameters_of(optimizer)
    with opened(optimizer):
        here = {place: optimizer.state[p] for place, p in enumerate(parameters) if optimizer.state.get(p)}
    if engine.barriers.all_agree(not here):
        return None
    if not engine.barriers.all_agree(bool(here)):
        here = engine.barriers.broadcast(here)
        if not here:
            raise UsageError(
                f"the {type(optimizer).__name__} has states on some ranks and none on rank 0, so ranks would go on "
                "with different states; load them on all ranks"
            )
    states = {id(parameters[place]): state for place, state in here.items()}
    return _take_states(engine, optimizer, states)


def _take_states(engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> Callable[[], None]:
    """Writes states, by id of parameter, into pages and shows them in the optimizer; see `load_optimizer_state`."""
    lacking = _lacking(engine, optimizer, states)
    if lacking:
        raise ConfigError(
            f"the {type(optimizer).__name__} was given the states {', '.join(lacking)}, for which this run has no "
            "pages, since it had other settings when the run began or has others now; return a new optimizer with the "
            "settings of these states from configure_optimizers"
        )
    engine.drain("load optimizer state")
    index = engine.updates.groups.index_of(optimizer)
    engine.optimizer_values.load(index, states)
    paged = engine.updates.groups.parameters_of(index)
    guard(optimizer, paged, partial(engine.stepping.forget_states, index))
    with opened(optimizer):
        for parameter in paged:
            optimizer.state.pop(parameter, None)
        for parameter in parameters_of(optimizer):
            if id(parameter) in states:
                optimizer.state[parameter] = dict(states[id(parameter)])

    def forget(*_: Any) -> None:
        hook.remove()
        with opened(optimizer):
            for parameter in paged:  # states of other parameters stay in the optimizer
                optimizer.state.pop(parameter, None)

    hook = optimizer.register_step_post_hook(forget)
    return forget


def _lacking(engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Returns names of the first parameter's states for which the run has no pages; empty if it has pages for all."""
    for _, flat in engine.updates.groups.flats_of(engine.updates.groups.index_of(optimizer)):
        binding = flat.store.binding
        for slot, parameter in enumerate(binding.parameters):
            lacking = [
                name
                for name, value in states.get(id(parameter), {}).items()
                if isinstance(value, Tensor) and value.numel() > 1
                if (
                    name not in flat.states.state_names(slot)
                    if flat.states.traits.whole
                    else binding.arrangement.fits(slot, value) and name not in flat.states.slots
                )
            ]
            if lacking:
                return lacking
    return []


def _check_kept(
    engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]], saved: list[dict[str, Any]]
) -> None:
    """Raises ConfigError if the checkpoint's settings, with which training would go on, need states without pages. The
    first update would fail otherwise."""
    differing = {
        f"{key}={value!r}"
        for group, loaded in zip(optimizer.param_groups, saved, strict=True)
        for key, value in loaded.items()
        if key in group and key not in ("params", "lr", "initial_lr") and not same_value(group[key], value)
    }
    if not differing:
        return
    lacking = _lacking(engine, optimizer, states)
    if lacking:
        raise ConfigError(
            f"the checkpoint's {type(optimizer).__name__} has states {', '.join(lacking)}, for which this run has no "
            f"pages: it was saved with {', '.join(sorted(differing))}, and training would go on with these settings; "
            "give them to the optimizer in configure_optimizers"
        )


def restore_optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> None:
    """Restores full state tensors to the user's optimizer (only if `keep`), whose parameters are ordinary again."""
    optimizer = plain_optimizer(optimizer)
    found: dict[int, dict[str, Any]] = {}
    for parameter, state in engine.optimizer_values.states(engine.updates.groups.index_of(optimizer), last_read=True):
        if keep and state:
            found[id(parameter)] = state
    for parameter in parameters_of(optimizer):  # in the order of a plain optimizer
        if id(parameter) in found:
            optimizer.state[parameter] = found[id(parameter)]
