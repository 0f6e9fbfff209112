"""What a unit's forward reads outside of its module: attributes of the user's objects, and of the modules around the unit.

Blocks share objects of the user's (a configuration), and may refer to the modules around them (in a list, by a bound method,
a weak reference or the closure of a function). A step may set attributes there between a forward and its recomputation.
Owns a snapshot by reference, of what can be reached from a unit, for a recomputed forward (recompute.py, I3).

I1: nothing is copied but references: a tensor that was written to in place is not restored. The graph of a tensor is not
    kept alive.
I2: globals, and what is reached through objects of other libraries, are not found.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_ptm.runtime.autograd.random_streams import is_generator
from lightning_ptm.runtime.tensors.user_objects import OF_EVERY_MODULE, ObjectsOf

_MOST = 1000
"""Most objects, and most elements of a container in one, that are looked into."""
_OUR_CODE, _OUR_MODELS = "lightning_ptm.", "lightning_ptm.models."
"""Prefixes of modules: what this package attaches to blocks is left alone."""

_absent = object()


class OuterState:
    """Snapshot of the attributes of objects and modules that can be reached from some values.

    Args:
        starts: what a unit's module holds, other than containers, tensors and its own submodules.
        around: ids of the modules that contain the unit.
        objects: tells the user's objects.
    """

    def __init__(self, starts: Iterable[Any], around: Collection[int], objects: ObjectsOf) -> None:
        self._objects = objects
        self._kept: list[tuple[Any, Any]] = []
        self.generators: list[Any] = []
        """Generators of random numbers."""
        todo, seen = list(starts), set[int]()
        while todo and len(self._kept) < _MOST:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                if id(value) in around:
                    attributes = _attributes_of(value)
                    self._kept.append((value, _without_graphs(attributes)))
                    self.generators += filter(is_generator, attributes.values())
            elif isinstance(value, tuple):
                todo += value
            elif is_generator(value):
                self.generators.append(value)
            elif isinstance(value, MethodType):
                todo.append(value.__self__)
            elif isinstance(value, weakref.ref):
                todo.append(value())
            elif isinstance(value, FunctionType):
                if not _is_ours(value.__module__):
                    todo += [each for cell in value.__closure__ or () if (each := _inside(cell)) is not _absent]
            elif isinstance(value, (dict, list, set, deque)):
                if len(value) <= _MOST:
                    self._kept.append((value, _without_graphs(value.copy())))
                    todo += value.values() if isinstance(value, dict) else value
            elif not _is_ours(type(value).__module__) and (inside := objects.attributes(value)) is not None:
                self._kept.append((value, _without_graphs(inside)))
                todo += inside.values()

    def unchanged(self) -> bool:
        """Whether all attributes are the same objects as in the snapshot."""
        return all(_alike(self._now(value), kept) for value, kept in self._kept)

    def restore(self) -> Callable[[], None]:
        """Restores all attributes; returns a function that undoes it. Objects that have got a lock or a thread are left."""
        now = [(value, contents) for value, _ in self._kept if (contents := self._now(value)) is not None]
        self._put(self._kept)
        return partial(self._put, now)

    def _now(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return _attributes_of(value)
        return value.copy() if isinstance(value, (dict, list, set, deque)) else self._objects.attributes(value)

    def _put(self, contents: Iterable[tuple[Any, Any]]) -> None:
        for value, wanted in contents:
            now = self._now(value)
            if now is None or _alike(now, wanted):
                continue
            if isinstance(value, nn.Module):
                for name in now.keys() - wanted.keys():
                    del vars(value)[name]
                vars(value).update(wanted)
            elif isinstance(value, (dict, list, set, deque)):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(wanted)
            else:
                self._objects.put(value, wanted)


def _is_ours(module: str | None) -> bool:
    return module is not None and module.startswith(_OUR_CODE) and not module.startswith(_OUR_MODELS)


def _inside(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _absent


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _without_graphs(contents: Any) -> Any:
    """Returns the contents with detached tensors in place of those with a graph, which would keep an earlier step's."""
    if isinstance(contents, set):
        return contents
    for name, value in list(contents.items() if isinstance(contents, dict) else enumerate(contents)):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            contents[name] = value.detach().requires_grad_()
    return contents


def _alike(one: Any, other: Any) -> bool:
    """Whether two copies of attributes or of a container have the same objects in the same places."""
    if one is None or len(one) != len(other) or isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return all(value is other.get(name, _absent) for name, value in one.items())
    return all(a is b for a, b in zip(one, other, strict=True))
