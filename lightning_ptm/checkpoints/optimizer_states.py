"""Optimizer states in a run: `optimizer.state` while they are in pages, and the way of states in and out of pages.

During a run `optimizer.state` is a dict that raises where states are in pages, instead of seeming to be empty
(`PagedStates`, from `guard` to `unguard`). Loaded states can be read in it until the first step, and states of
parameters outside of pages are ordinary ones. States in pages can be dropped (`del`, `pop`, `clear`, or an empty
dict as the new value): the parameter's next update starts from fresh states.

States are loaded from an optimizer's state dict, taken into pages at the start of a run, and restored to the
optimizer at its end. State tensors are full tensors. Every function with an engine argument is collective.

An optimizer whose states were lost at the end of its run is stale: a further step would silently start from fresh states.
Hooks refuse such a step, and a `state_dict` without states, anywhere: in another run, of another Trainer, or in a loop of
the user's own.
I1: an optimizer that was given states since, also by `load_state_dict`, is no longer stale. Its hooks stay and do nothing,
since torch may be iterating over them when that is detected.
I2: a copy of a stale optimizer, by `copy` or through pickle, is stale, too.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet, ref

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.update.trial.traits import same_value

_READ = (
    "call optimizer.state_dict() or trainer.strategy.optimizer_state(optimizer) on all ranks, which copy "
    "them, or read optimizer.state after fit"
)
_WRITE = (
    "change them in a state_dict() of the optimizer and give that to its load_state_dict, or edit optimizer.state between "
    "two fits; to start a parameter with fresh states, `del optimizer.state[parameter]`"
)


class PagedStates(defaultdict[Any, Any]):
    """The `state` of an optimizer whose states are in pages. It overrides every method of dict that reads or writes.

    Args:
        name: of the optimizer's class.
        shown: the states that can be read.
        paged: parameters whose states are in pages; None, in a copy of the optimizer: all that are not in `shown`.
        forget: called with a parameter whose states are to be dropped.
    """

    def __init__(
        self,
        name: str,
        shown: Mapping[Any, Any],
        paged: Iterable[Tensor] | None,
        forget: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(dict, shown)
        self._name = name
        self._paged = None if paged is None else {id(parameter): parameter for parameter in paged}
        self._forget = forget
        self.is_open = False
        """Whether the run itself is using it, so that nothing is refused."""

    def _refuse(self, done: str, remedy: str) -> NoReturn:
        raise UsageError(
            f"optimizer.state of {self._name} was {done} during a run, and the states are in pages: {remedy}"
        )

    def _is_paged(self, key: Any) -> bool:
        return self._paged is None or id(key) in self._paged

    def _check_read(self, *keys: Any) -> None:
        if not self.is_open and any(self._is_paged(key) and not dict.__contains__(self, key) for key in keys):
            self._refuse("read", _READ)

    def _check_all_read(self) -> None:
        if not self.is_open and (self._paged is None or not self._paged.keys() <= {id(key) for key in dict.keys(self)}):
            self._refuse("read", _READ)

    def _check_written(self, *keys: Any) -> None:
        if not self.is_open and any(map(self._is_paged, keys)):
            self._refuse("written to", _WRITE)

    def __missing__(self, key: Any) -> Any:
        self._check_read(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check_read(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._check_all_read()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self._check_all_read()
        return super().__reversed__()

    def __len__(self) -> int:
        self._check_all_read()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._check_all_read()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return f"<state of {self._name}, in pages>"

    def get(self, key: Any, default: Any = None) -> Any:
        if self._paged is not None:  # torch's own classes look for old formats when they are copied
            self._check_read(key)
        return super().get(key, default)

    def keys(self) -> Any:
        self._check_all_read()
        return super().keys()

    def values(self) -> Any:
        if self._paged is not None:  # as in `get`
            self._check_all_read()
        return super().values()

    def items(self) -> Any:
        self._check_all_read()
        return super().items()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (isinstance(value, Mapping) and not value and self._let_go(key)):
            self._check_written(key)
            super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        if not self._let_go(key):
            self._check_written(key)
            super().__delitem__(key)

    def _let_go(self, key: Any) -> bool:
        """Drops the states of a parameter, if they are in pages."""
        if self._forget is None or self._paged is None or self.is_open or id(key) not in self._paged:
            return False
        self._forget(key)
        dict.pop(self, key, None)
        return True

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check_written(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        shown = dict.get(self, key)
        if self._let_go(key):
            return PagedStates(self._name, {}, None) if shown is None else shown  # raises if the caller reads it
        self._check_written(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        if not self.is_open and (self._paged is None or self._paged):
            self._refuse("written to", _WRITE)
        return super().popitem()

    def clear(self) -> None:
        for parameter in () if self._paged is None else self._paged.values():
            self._let_go(parameter)
        if not self.is_open and self._paged is None:
            self._refuse("written to", _WRITE)
        super().clear()

    def update(self, *others: Any, **named: Any) -> None:
        self._check_written(*dict(*others))
        super().update(*others, **named)

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        self._check_all_read()
        return self.plain()

    __copy__ = copy  # type: ignore[assignment]

    def plain(self) -> defaultdict[Any, Any]:
        """The readable states, in the type that torch's optimizers use."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update(dict.items(self))
        return found

    # A copy of the optimizer has no pages, so reads of missing states raise there, too.

    def __reduce__(self) -> Any:
        return PagedStates, (self._name, dict(dict.items(self)), None)

    def __deepcopy__(self, known: Any) -> PagedStates:
        return PagedStates(self._name, copy.deepcopy(dict(dict.items(self)), known), None)


def guard(optimizer: Optimizer, paged: Iterable[Tensor], forget: Callable[[Tensor], None]) -> None:
    """Replaces an optimizer's `state`, at the start of a run or after its `load_state_dict`, which makes a plain dict.

    Args:
        paged: parameters whose states are in pages.
        forget: called with a parameter whose states are to be dropped.
    """
    if not isinstance(optimizer.state, PagedStates):
        optimizer.state = PagedStates(type(optimizer).__name__, optimizer.state, paged, forget)


def unguard(optimizer: Optimizer) -> bool:
    """Restores a plain `state`; returns False if the user has assigned another one since, which is kept."""
    if not isinstance(optimizer.state, PagedStates):
        return False
    optimizer.state = optimizer.state.plain()
    return True


def check_can_step(optimizer: Optimizer) -> None:
    """Checks an optimizer before a step of a run.

    Raises:
        UsageError: its states were lost, or its `state` was replaced.
    """
    check_not_stale(optimizer)
    if not isinstance(optimizer.state, PagedStates):
        raise UsageError(
            f"the state of {type(optimizer).__name__} was replaced during a run, whose states are in pages, so the new one "
            f"would be ignored: {_WRITE}"
        )


def is_opened(optimizer: Optimizer) -> bool:
    """Whether no use of `state` is refused: it is no PagedStates, or the run itself is using it (`opened`)."""
    return not isinstance(optimizer.state, PagedStates) or optimizer.state.is_open


@contextmanager
def opened(optimizer: Optimizer) -> Iterator[None]:
    """Lets the run read and write an optimizer's `state` inside the block."""
    if is_opened(optimizer):
        yield
        return
    state = optimizer.state
    assert isinstance(state, PagedStates)
    state.is_open = True
    try:
        yield
    finally:
        state.is_open = False


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the user's optimizer, which Lightning's wrapper holds."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


STALE: WeakSet[Optimizer] = WeakSet()
"""The stale optimizers. Read by others."""
_WATCHED: WeakSet[Optimizer] = WeakSet()
"""Optimizers that have the hooks."""


def mark_stale(optimizers: Iterable[Optimizer]) -> None:
    """Marks optimizers as stale: their states are lost."""
    for optimizer in optimizers:
        STALE.add(optimizer)
        # On the object, where copy and pickle look first; a weak reference, so that the optimizer can be freed.
        vars(optimizer)["__reduce_ex__"] = partial(_reduce_stale, ref(optimizer))
        if optimizer not in _WATCHED:
            _WATCHED.add(optimizer)
            optimizer.register_step_pre_hook(check_not_stale)
            optimizer.register_state_dict_pre_hook(check_not_stale)
            optimizer.register_load_state_dict_post_hook(_look_for_states)


class StaleInCopies(list[Optimizer]):
    """Optimizers that are not stale themselves, but whose copies, by `copy.deepcopy` or through pickle, are."""

    def __deepcopy__(self, known: dict[int, Any]) -> StaleInCopies:
        return _all_stale(copy.deepcopy(list(self), known))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _all_stale, (list(self),)


def _all_stale(optimizers: list[Optimizer]) -> StaleInCopies:
    mark_stale(optimizers)
    return StaleInCopies(optimizers)


def renew(optimizer: Optimizer) -> None:
    """Marks an optimizer as having states again."""
    STALE.discard(optimizer)
    vars(optimizer).pop("__reduce_ex__", None)


def check_not_stale(optimizer: Optimizer, *_: Any) -> None:
    """Raises UsageError if the optimizer is stale."""
    if optimizer in STALE:
        raise UsageError(
            f"the states of this {type(optimizer).__name__} were lost at the end of an earlier run, since RAM had no room "
            f"for a copy (of states on disk, half of the free RAM), so it cannot continue; give fit a ckpt_path, or "
            f"return a new optimizer from configure_optimizers"
        )


def _look_for_states(optimizer: Optimizer) -> None:
    if optimizer.state:
        renew(optimizer)


def _reduce_stale(weak: ref[Optimizer], _protocol: Any) -> tuple[Callable[..., Optimizer], tuple[Any, ...]]:
    optimizer = weak()
    assert optimizer is not None  # it is being copied
    kind = type(optimizer)
    return _stale_copy, (kind, kind.__getstate__(optimizer))


def _stale_copy(kind: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    mark_stale([optimizer])
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Returns an optimizer's parameters, in its own order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
            "pages: they are of other settings (amsgrad, momentum) than the optimizer began this run with; return a "
            "new optimizer with the settings of these states from configure_optimizers"
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
