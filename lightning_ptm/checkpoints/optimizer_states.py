"""Optimizer states as an optimizer's own state dict: saved, loaded, taken over when a run begins, given back at its end.

Full tensors, in the optimizer's own format. Every function that is given an engine is collective."""

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
    """The user's optimizer, out of Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """An optimizer's parameters, in its own order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """The optimizer's state dict with full state tensors; empty where not `keep`."""
    engine.drain("optimizer state")
    engine.executor.release_all()
    optimizer = plain_optimizer(optimizer)
    index = engine.updates.groups.index_of(optimizer)
    order = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states: dict[int, dict[str, Any]] = {}
    copy_of = copies(engine)
    for parameter, state in engine.optimizer_values.states(index, copy_of if keep else lambda name, value: value):
        if keep and id(parameter) in order:  # else its group was taken away since
            states[order[id(parameter)]] = state
    if not keep:
        return {}
    with opened(optimizer):
        result = optimizer.state_dict()
    if engine.stepping.steps_itself(optimizer) or not order:  # or Lightning's stand-in for none
        return result
    # What the optimizer itself keeps is of parameters that this run does not train.
    states = result["state"] | states
    result["state"] = {place: states[place] for place in sorted(states) if states[place]}
    return result


def load_optimizer_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    """Writes an optimizer's state dict into pages and its groups into the user's object.

    Returns:
        What takes the tensors that were given out of the optimizer's `state` again. They can be looked at there until the
        first step; those that updates write are in pages.

    Raises:
        ConfigError: it was saved by an optimizer with other parameter groups, or whose settings keep states for which this
            run has no pages.
    """
    optimizer = plain_optimizer(optimizer)
    if engine.stepping.steps_itself(optimizer) or not parameters_of(optimizer):  # or Lightning's stand-in for none
        optimizer.load_state_dict(dict(state))
        return lambda: None
    saved, ours = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in ours]:
        raise ConfigError(
            f"the checkpoint's optimizer has parameter groups of {[len(group['params']) for group in saved]} parameters, "
            f"this run's of {[len(group['params']) for group in ours]}; configure the optimizer as it was saved"
        )
    states = _states_in(state, optimizer)
    _check_kept(engine, optimizer, states, saved)
    forget = _take_states(engine, optimizer, states)
    for group, loaded in zip(ours, saved, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
    return forget


def _states_in(state: Mapping[str, Any], optimizer: Optimizer) -> dict[int, Mapping[str, Any]]:
    """A state dict's states by id of parameter."""
    parameters = parameters_of(optimizer)
    places = [place for group in state["param_groups"] for place in group["params"]]
    return {id(parameters[i]): state["state"][place] for i, place in enumerate(places) if place in state["state"]}


def follow_loaded_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    """Takes into pages what the optimizer's own `load_state_dict` was given; its groups are loaded already. Collective.

    Returns, raises: as `take_over_optimizer_state`.
    """
    return _take_states(engine, optimizer, _states_in(state, optimizer))


def take_over_optimizer_state(engine: Engine, optimizer: Optimizer) -> Callable[[], None] | None:
    """Takes the states that an optimizer has when a run begins into pages: an earlier run's, or loaded by hand.

    Where rank 0 alone has them, as a run leaves them, all ranks get them from there. Collective.

    Returns:
        As `load_optimizer_state`; None where there are no states.

    Raises:
        ConfigError: the run has no pages for one of them, or another shape.
        UsageError: ranks have them, and rank 0 has none.
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
                f"the {type(optimizer).__name__} has states on some ranks, and none on rank 0; load them on all ranks"
            )
    states = {id(parameters[place]): state for place, state in here.items()}
    return _take_states(engine, optimizer, states)


def _take_states(engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> Callable[[], None]:
    """Writes states by id of parameter into pages and shows them; see `load_optimizer_state`."""
    lacking = _lacking(engine, optimizer, states)
    if lacking:
        raise ConfigError(
            f"the {type(optimizer).__name__} was given {', '.join(lacking)} of earlier steps, for which this run has no "
            f"pages, since its settings were others when the run began or are now; return a new optimizer with the settings "
            f"of these states from configure_optimizers"
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
            for parameter in paged:  # of others the optimizer itself keeps them, as ever
                optimizer.state.pop(parameter, None)

    hook = optimizer.register_step_post_hook(forget)
    return forget


def _lacking(engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Names of states of a parameter for which the run has no pages."""
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
    """Training would go on with the checkpoint's settings, and fail at the first update for want of pages."""
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
            f"the checkpoint's {type(optimizer).__name__} keeps {', '.join(lacking)}, and this run has no pages for that: "
            f"its settings were {', '.join(sorted(differing))}, with which training would go on; give these to the optimizer "
            f"in configure_optimizers"
        )


def give_back_optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> None:
    """Puts full state tensors into the user's optimizer, whose parameters are ordinary again (nothing where not `keep`)."""
    optimizer = plain_optimizer(optimizer)
    found: dict[int, dict[str, Any]] = {}
    for parameter, state in engine.optimizer_values.states(engine.updates.groups.index_of(optimizer), letting_go=True):
        if keep and state:
            found[id(parameter)] = state
    for parameter in parameters_of(optimizer):  # in this order, as a plain optimizer has them
        if id(parameter) in found:
            optimizer.state[parameter] = found[id(parameter)]
