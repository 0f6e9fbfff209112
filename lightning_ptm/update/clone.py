"""Clones of the user's optimizer: other objects of its class, with its settings and without its parameters, states and hooks.

The trial and updates page by page call `step` far more often than training does. They call it on clones, so that what a class
counts, caches or logs on its object is not the user's.

I1: plain data in attributes is copied, and so are bound methods of the optimizer and partials of them; every other object
    (functions, modules, handles, process groups) is shared with the user's optimizer, of which nothing is written.
I2: the class is the user's own, and so is what it keeps outside of its objects; trial/side_effects.py refuses classes whose
    steps change that.
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
    """An object of the optimizer's class with its attributes, and with no parameter group, state or hook."""
    clone: Optimizer = object.__new__(type(optimizer))
    hooks = {name: type(value)() for name, value in vars(optimizer).items() if _holds_hooks(name)}
    vars(clone).update(hooks, state=defaultdict(dict), param_groups=[])
    _copy_attributes(optimizer, clone)
    return clone


def constructed_clone(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An object that went through the constructor of the optimizer's class, with the optimizer's attributes afterwards."""
    cls = type(optimizer)
    made = cls(groups, **_accepted(cls, optimizer.defaults))
    _copy_attributes(optimizer, made)
    return made


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that the optimizer's own class or its user has set."""
    return {
        name: value for name, value in vars(optimizer).items() if name not in _OF_THE_RUN and not _holds_hooks(name)
    }


def _holds_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _copy_attributes(source: Optimizer, target: Optimizer) -> None:
    vars(target).update(copy_plain(attributes_of(source), {id(source): target}))


def _accepted(cls: type[Optimizer], defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's defaults that its constructor takes."""
    code = cls.__init__.__code__ if isinstance(cls.__init__, types.FunctionType) else None
    if code is None or code.co_flags & 0x08:  # **anything
        return dict(defaults)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {key: value for key, value in defaults.items() if key in names}


# -- plain data -------------------------------------------------------------------------------------------------------


def is_container(value: Any) -> bool:
    """Whether a value is a list, dictionary, set or deque, or an object with numbers and containers alone (statistics)."""
    if isinstance(value, _CONTAINERS):
        return type(value).__module__ in ("builtins", "collections")
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | types.ModuleType | types.FunctionType | Optimizer):
        return False
    if type(value).__module__.partition(".")[0] in LIBRARIES and not isinstance(value, types.SimpleNamespace):
        return False
    return all(isinstance(item, (*_NUMBERS, *_CONTAINERS, tuple)) for item in attributes.values())


def is_large(value: Any) -> bool:
    """Whether a value is a table, which code reads and does not change: a container or tensor of many items."""
    if isinstance(value, torch.Tensor):
        return value.numel() > _MAX_ITEMS
    return isinstance(value, (*_CONTAINERS, tuple)) and len(value) > _MAX_ITEMS


def parts_of(value: Any) -> list[Any]:
    """What a container, a bound method or a partial holds; nothing for other values."""
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
    """A value and all that it holds, each object once; with `tables` also what large containers hold."""
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
    """A deep copy of plain data that shares all other objects, and tables.

    Args:
        replaced: objects to put in the places of others, by the identity of those.
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
    """Whether plain data is what it was before, bit for bit; other objects and tables are not compared."""
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
