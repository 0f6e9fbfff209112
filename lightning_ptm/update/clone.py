"""Clones of the user's optimizer: objects of its class with its settings, without its parameters, states and hooks.

The optimizer trial and the page-by-page updates call `step` far more often than training does. They call it on clones, so
that counters, caches or logs that the class keeps on its object do not change on the user's.

I1: plain data in attributes is copied (but large tables, `is_large`, which steps only read), and so are bound methods of
    the optimizer and partials of them; every other object (functions, modules, handles, process groups) is shared with the
    user's optimizer. The user's optimizer is never written.
I2: the class is the user's own, and so is the state that it keeps outside of its objects; trial/side_effects.py refuses
    classes whose steps change such state.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.torch_internals import marks_of_schedulers
from lightning_ptm.update.trial.traits import same_value

# Schedulers and Lightning wrap some of these on the object; the wrappers point back at it.
_OF_THE_RUN = frozenset(
    ("state", "param_groups", "step", "zero_grad", "state_dict", "_step_count", marks_of_schedulers()[1])
)
LIBRARIES = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch"}
"""Packages whose classes and functions keep nothing from one step to the next."""
_MAX_ITEMS = 4096
_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float, complex, bool, str, bytes, type(None))


def clone_of(optimizer: Optimizer) -> Optimizer:
    """A new object of the optimizer's class with its attributes, without parameter groups, states or hooks."""
    clone: Optimizer = object.__new__(type(optimizer))
    hooks = {name: type(value)() for name, value in vars(optimizer).items() if _holds_hooks(name)}
    vars(clone).update(hooks, state=defaultdict(dict), param_groups=[])
    _copy_attributes(optimizer, clone)
    return clone


def constructed_clone(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new object made by the constructor of the optimizer's class, which then gets the optimizer's attributes."""
    cls = type(optimizer)
    made = cls(groups, **_accepted(cls, optimizer.defaults))
    _copy_attributes(optimizer, made)
    return made


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that the optimizer's own class or its user set, without those of torch.optim.Optimizer."""
    return {
        name: value for name, value in vars(optimizer).items() if name not in _OF_THE_RUN and not _holds_hooks(name)
    }


def _holds_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _copy_attributes(source: Optimizer, target: Optimizer) -> None:
    vars(target).update(copy_plain(attributes_of(source), {id(source): target}))


def _accepted(cls: type[Optimizer], defaults: dict[str, Any]) -> dict[str, Any]:
    """The defaults of an optimizer that its constructor accepts as arguments."""
    code = cls.__init__.__code__ if isinstance(cls.__init__, types.FunctionType) else None
    if code is None or code.co_flags & 0x08:  # **anything
        return dict(defaults)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {key: value for key, value in defaults.items() if key in names}


# -- plain data -------------------------------------------------------------------------------------------------------


def is_container(value: Any) -> bool:
    """Whether a value is a list, dictionary, set or deque, or an object whose attributes are numbers and containers."""
    if isinstance(value, _CONTAINERS):
        return type(value).__module__ in ("builtins", "collections")
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | types.ModuleType | types.FunctionType | Optimizer):
        return False
    if type(value).__module__.partition(".")[0] in LIBRARIES and not isinstance(value, types.SimpleNamespace):
        return False
    return all(isinstance(item, (*_NUMBERS, *_CONTAINERS, tuple)) for item in attributes.values())


def is_large(value: Any) -> bool:
    """Whether a value has so many items (a container or tensor) that it is taken for a read-only table."""
    if isinstance(value, torch.Tensor):
        return value.numel() > _MAX_ITEMS
    return isinstance(value, (*_CONTAINERS, tuple)) and len(value) > _MAX_ITEMS


def parts_of(value: Any) -> list[Any]:
    """The objects inside a container, a bound method or a partial; none for other values."""
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (*_CONTAINERS, tuple)):
        return list(value)
    return [vars(value)] if is_container(value) else []


def walk(value: Any, *, tables: bool = False) -> Iterator[Any]:
    """A value and all objects inside it, each once; those inside large containers only with `tables`."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            if tables or not is_large(each):
                todo.extend(parts_of(each))


def copy_plain(values: Mapping[str, Any], replaced: Mapping[int, Any] = types.MappingProxyType({})) -> dict[str, Any]:
    """A deep copy of plain data; tables (`is_large`) and all other objects are shared.

    Args:
        replaced: by the id of an object, the object that the copy has in its place.
    """
    memo: dict[int, Any] = dict(replaced)
    for each in walk(list(values.values())):
        if type(each) is torch.Tensor and not is_large(each):
            memo[id(each)] = each.detach().clone()
        elif is_large(each) or not (
            is_container(each) or isinstance(each, tuple | types.MethodType | functools.partial)
        ):
            memo.setdefault(id(each), each)
    return {name: copy.deepcopy(value, memo) for name, value in values.items()}


def same_plain(now: Any, before: Any) -> bool:
    """Whether plain data is bitwise what it was before; tables (`is_large`) and other objects are not compared."""
    if now is before or is_large(now):
        return True
    if isinstance(now, _NUMBERS) or type(now) is torch.Tensor:
        return same_value(now, before)
    if not is_container(now) and not isinstance(now, tuple):
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, set):
        return sorted(map(repr, now)) == sorted(map(repr, before))
    ours, theirs = parts_of(now), parts_of(before)
    return len(ours) == len(theirs) and all(map(same_plain, ours, theirs))
