"""A private copy of an optimizer: its object, its class and the plain data that their code writes.

Trials and updates page by page call `step` far more often than the user's training does. What a class counts, caches or
records about its steps must not be the user's then. Owns nothing of the user's and changes nothing of it; knows Python's
objects, and of tensors only that they are data.

I1: plain data that the copied code can reach by name (attributes of the object and of its classes, globals of its package,
    variables that functions close over, default arguments) is copied; all else (modules, handles, C extensions) is shared.
I2: the copied class is no subclass of the user's, and no `__init_subclass__` or metaclass of the user's hears of it.
I3: torch's and the standard library's own classes and functions are shared: they keep nothing from one step to the next.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.torch_internals import OPTIMIZER_HOOKS, marks_of_schedulers

# Schedulers and Lightning wrap these on the instance; the wrappers point back at the user's object.
_OF_THE_RUN = frozenset(
    (*OPTIMIZER_HOOKS, "state", "param_groups", "step", "zero_grad", "state_dict", marks_of_schedulers()[1])
)
_NOT_OF_A_NAMESPACE = frozenset(("__dict__", "__weakref__", "_abc_impl", "__abstractmethods__", "__init_subclass__"))
_MOST_ITEMS = 4096
"""Larger containers and tensors are tables, which are read; they are shared."""
_SHARED_PACKAGES = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch"}
_CONTAINERS = (list, dict, set, collections.deque)
_NUMBERS = (int, float, complex, bool, str, bytes, type(None))


class PrivateOptimizer:
    """A copy of the user's optimizer without parameters, state and hooks.

    Args:
        optimizer: the user's object. It is only read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        copier = _Copier(type(optimizer))
        self.cls: type[Optimizer] = copier.class_
        self.object: Optimizer = object.__new__(self.cls)
        copier.memo[id(optimizer)] = self.object
        self._copier = copier
        self._attributes = {name: value for name, value in vars(optimizer).items() if name not in _OF_THE_RUN}
        self._bare(self.object)
        self._put_attributes(self.object)

    def construct(self, groups: list[dict[str, Any]]) -> Optimizer:
        """An object of the copied class that went through its constructor, with the user's attributes afterwards."""
        made = self.cls(groups, **_accepted(self.cls, self.object.defaults))
        state, param_groups = made.state, made.param_groups
        self._put_attributes(made)
        made.state, made.param_groups = state, param_groups
        return made

    def outside(self) -> dict[str, Any]:
        """Copies of the data outside the object that its code can write, by a name that tells the user where it is."""
        return {place: _frozen(value) for place, value in self._copier.places()}

    @staticmethod
    def attributes_of(used: Optimizer) -> dict[str, Any]:
        """Copies of an object's own plain data, by attribute."""
        return {name: _frozen(value) for name, value in vars(used).items() if name not in (*_OF_THE_RUN, "defaults")}

    def _put_attributes(self, target: Optimizer) -> None:
        target.__dict__.update({name: self._copier.value(value) for name, value in self._attributes.items()})
        self._copier.finish()

    @staticmethod
    def _bare(target: Optimizer) -> None:
        for name in OPTIMIZER_HOOKS:
            target.__dict__[name] = OrderedDict()
        target.__dict__["state"] = defaultdict(dict)
        target.__dict__["param_groups"] = []


def _accepted(cls: type[Optimizer], defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's defaults that its constructor takes."""
    code = cls.__init__.__code__ if isinstance(cls.__init__, types.FunctionType) else None
    if code is None or code.co_flags & 0x08:  # **anything
        return dict(defaults)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {key: value for key, value in defaults.items() if key in names}


def is_data(value: Any) -> bool:
    """Whether a value is a number, text, tensor or container, and not code or somebody's object."""
    return isinstance(value, (*_NUMBERS, *_CONTAINERS, tuple, torch.Tensor)) or _is_record(value)


def _is_record(value: Any) -> bool:
    """An object of a class written in Python whose attributes are all numbers or small containers: a counter, statistics."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | types.ModuleType | types.FunctionType):
        return False
    if type(value).__module__.partition(".")[0] in _SHARED_PACKAGES and not isinstance(value, types.SimpleNamespace):
        return False
    return all(isinstance(item, (*_NUMBERS, *_CONTAINERS, tuple)) for item in attributes.values())


def _is_large(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > _MOST_ITEMS
    return isinstance(value, _CONTAINERS) and len(value) > _MOST_ITEMS


def _frozen(value: Any) -> Any:
    """A copy of plain data to compare with later; None for what is no data."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= _MOST_ITEMS else None
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return {repr(key): _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple | collections.deque) and len(value) <= _MOST_ITEMS:
        return [_frozen(item) for item in value]
    if isinstance(value, set) and len(value) <= _MOST_ITEMS:
        return sorted(map(repr, value))
    if isinstance(value, _NUMBERS):
        return value
    return {name: _frozen(item) for name, item in vars(value).items()} if _is_record(value) else None


class _Copier:
    """Copies a class and, by name, what its code can write."""

    def __init__(self, cls: type) -> None:
        self.memo: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._globals: dict[int, dict[str, Any]] = {}
        self._to_fill: list[Callable[[], None]] = []
        self._cells: list[tuple[str, types.CellType]] = []
        self._names: dict[tuple[int, str], tuple[str, dict[str, Any]]] = {}
        own = [each for each in cls.__mro__ if _package(each) not in _SHARED_PACKAGES]
        self._packages = {_package(each) for each in own}
        self._classes: list[type] = []
        for each in reversed(own):
            self.memo[id(each)] = self._class(each)
        self.class_: type = self.memo.get(id(cls), cls)
        self.finish()

    def finish(self) -> None:
        """Fills what functions name, once everything that they may name has its copy."""
        while self._to_fill:
            self._to_fill.pop()()

    def places(self) -> Iterator[tuple[str, Any]]:
        for cls in self._classes:
            for name, value in vars(cls).items():
                if not name.startswith("__") and is_data(value):
                    yield f"{cls.__qualname__}.{name}", value
        for label, cell in self._cells:
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not yet assigned
            if is_data(value):
                yield label, value
        for (_, name), (module, names) in self._names.items():
            if is_data(names.get(name)):
                yield f"{module}.{name}", names.get(name)

    def value(self, value: Any) -> Any:
        """The copy of a value, or the value itself where it is shared."""
        known = self.memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, types.FunctionType):
            return self._function(value) if self._is_own(value) else value
        if isinstance(value, types.MethodType):
            return types.MethodType(self.value(value.__func__), self.value(value.__self__))
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self.value(value.__func__))
        if isinstance(value, property):
            return property(*(self.value(each) for each in (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.partial):
            arguments = [self.value(each) for each in value.args]
            named = {name: self.value(each) for name, each in value.keywords.items()}
            return functools.partial(self.value(value.func), *arguments, **named)
        return self._data(value)

    def _data(self, value: Any) -> Any:
        if _is_large(value) or isinstance(value, torch.nn.Parameter):
            return value
        copied: Any
        if type(value) is torch.Tensor:
            copied = value.detach().clone()
        elif isinstance(value, tuple):
            items = [self.value(item) for item in value]
            same = all(ours is theirs for ours, theirs in zip(items, value, strict=True))
            return value if same else (type(value)(*items) if hasattr(value, "_fields") else tuple(items))
        elif isinstance(value, list | collections.deque | set) and type(value).__module__ in (
            "builtins",
            "collections",
        ):
            copied = value.copy()
            self._remember(value, copied)
            copied.clear()
            add = copied.add if isinstance(copied, set) else copied.append
            for item in value:
                add(self.value(item))
        elif isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
            copied = value.copy()
            self._remember(value, copied)
            for key, item in value.items():
                copied[key] = self.value(item)
        elif _is_record(value):
            copied = object.__new__(type(value))
            self._remember(value, copied)
            copied.__dict__.update({name: self.value(item) for name, item in vars(value).items()})
        else:
            return value
        self._remember(value, copied)
        return copied

    def _remember(self, value: Any, copied: Any) -> None:
        self.memo[id(value)] = copied
        self._kept.append(value)  # an id is only good while its object lives

    def _class(self, cls: type) -> type:
        slots = vars(cls).get("__slots__", ())
        namespace = {
            name: self.value(value)
            for name, value in vars(cls).items()
            if name not in _NOT_OF_A_NAMESPACE and name not in ((slots,) if isinstance(slots, str) else slots)
        }
        bases = tuple(self.memo.get(id(base), base) for base in cls.__bases__)
        meta = type(cls)
        maker = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type  # I2: not the user's own metaclass
        made = maker.__new__(meta, cls.__name__, bases, namespace)
        self._classes.append(made)
        return made

    def _is_own(self, function: types.FunctionType) -> bool:
        """Of the class's package, or a wrapper around such a function (torch.no_grad's, for one)."""
        if _package(function) in self._packages:
            return True
        for cell in function.__closure__ or ():
            content = _content(cell)
            if isinstance(content, types.FunctionType) and content is not function and self._is_own(content):
                return True
        return False

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        own = _package(function) in self._packages
        names = self._private_globals(function) if own else function.__globals__
        cells = tuple(self._cell(function, index) for index in range(len(function.__closure__ or ())))
        copied = types.FunctionType(_own_code(function.__code__), names, function.__name__, None, cells or None)
        self._remember(function, copied)
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__

        def fill() -> None:
            copied.__defaults__ = self.value(function.__defaults__)
            copied.__kwdefaults__ = self.value(function.__kwdefaults__)
            copied.__dict__.update({name: self.value(value) for name, value in vars(function).items()})
            for name in _names_in(function.__code__) if own else ():
                if (id(names), name) not in self._names and name in function.__globals__:
                    self._names[id(names), name] = (function.__module__, names)
                    names[name] = self.value(function.__globals__[name])

        self._to_fill.append(fill)
        return copied

    def _private_globals(self, function: types.FunctionType) -> dict[str, Any]:
        known = self._globals.get(id(function.__globals__))
        if known is None:
            known = self._globals[id(function.__globals__)] = dict(function.__globals__)
        return known

    def _cell(self, function: types.FunctionType, index: int) -> types.CellType:
        assert function.__closure__ is not None
        original = function.__closure__[index]
        known = self.memo.get(id(original))
        if known is None:
            known = types.CellType()
            self._remember(original, known)
            self._cells.append((f"{function.__code__.co_freevars[index]} (around {function.__qualname__})", known))

            def fill() -> None:
                with contextlib.suppress(ValueError):  # not yet assigned by the user's code either
                    known.cell_contents = self.value(original.cell_contents)

            self._to_fill.append(fill)
        return known


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _package(code: Any) -> str:
    return str(getattr(code, "__module__", None) or "").partition(".")[0]


def _own_code(code: types.CodeType) -> types.CodeType:
    """A copy of a function's code: torch.compile keeps what it has made of a code object, with one set of globals."""
    constants = (_own_code(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=tuple(constants))


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function and those defined in it use."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """Something by which an optimizer reaches parameters beside its groups: where it is, and what."""

    place: str
    value: Any

    @property
    def what(self) -> str:
        return type(self.value).__name__


def held_by(optimizer: Optimizer) -> Reached | None:
    """The first optimizer, module or parameter that an optimizer's attributes or group values hold."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    seen: set[int] = {id(optimizer), id(optimizer.param_groups)}

    def search(place: str, value: Any) -> Reached | None:
        if isinstance(value, Optimizer | torch.nn.Module) and value is not optimizer:
            return Reached(place, value)
        if id(value) in parameters or (type(value) is int and value in parameters):
            return Reached(place, value)
        if id(value) in seen or not isinstance(value, (*_CONTAINERS, tuple, functools.partial, types.MethodType)):
            return None
        seen.add(id(value))
        items: list[Any]
        if isinstance(value, dict):
            items = [*value.keys(), *value.values()]
        elif isinstance(value, functools.partial):
            items = [value.func, *value.args, *value.keywords.values()]
        else:
            items = [value.__self__] if isinstance(value, types.MethodType) else list(value)
        return next((found for item in items if (found := search(place, item)) is not None), None)

    for name, value in vars(optimizer).items():
        if name not in _OF_THE_RUN and (found := search(f"attribute {name!r}", value)) is not None:
            return found
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params" and (found := search(f"group value {key!r}", value)) is not None:
                return found
    return None
