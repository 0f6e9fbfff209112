"""Recomputation of a unit's activations in the backward pass: the replacement of the unit's forward.

Owns torch's checkpoints around units. Knows nothing of pages; a callback reports the start of a recomputed forward, and
the unit is gathered there.

I1: a forward that a checkpoint of the user recomputes already is recomputed once, not twice.
I2: a forward that does not repeat itself is refused with the name of its unit. The tensors that it saves for the
    backward are compared with those of the first forward by samples (on a CPU; on other devices by number, shapes
    and dtypes alone).
I3: the recomputed forward finds the state of the first one: all that a module holds, through modules and containers
    (parameters and whether they are trained, buffers, other attributes, submodules, hooks, its class), and the
    containers and modules among its arguments; and the attributes of objects of the user's and of modules around it that it
    can reach (outer_state.py). A change that a forward makes to these is made once. Random generators among them, and the
    global ones of Python and NumPy, have the states that they had before the first forward (random_streams.py).
I4: results of exchanges between ranks in a forward (`once`) are stored, and not exchanged again. So is how modules inside are
    cut into slices (`repeated`).
I5: weights that have changed since the first forward, and arguments that were written to, are refused; so is a forward
    that gives a parameter another value each time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import FunctionType, SimpleNamespace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.fingerprint import has_sample, sample_of
from lightning_ptm.runtime.autograd.outer_state import OuterState
from lightning_ptm.runtime.autograd.random_streams import RandomStreams, is_generator
from lightning_ptm.runtime.autograd.saved_tensors import inside_checkpoint, refuse_changed
from lightning_ptm.runtime.autograd.slices import CutTrial, Exchanges, ModuleQuestions, SlicedCalls
from lightning_ptm.runtime.autograd.slices_check import SlicesCheck
from lightning_ptm.runtime.autograd.token_slices import TokenCut, TokenSlices
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward, in_transform, not_compiled, tensors_in
from lightning_ptm.runtime.tensors.user_objects import ObjectsOf
from lightning_ptm.runtime.units.binding import refuse_older
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.torch_internals import (
    base_of,
    buffers_in,
    comparisons_of_recomputed,
    compiled_call_of,
    has_storage,
    is_compiled,
    is_fake,
    saving_hooks,
    storage_id,
    version_of,
)

Call = Callable[..., Any]
T = TypeVar("T")


_SMALL_NUMEL = 1 << 14

"""Buffers with at most this many elements are copied before a forward whether or not they are known to change."""


_SELF_CHECKPOINTING = "GradientCheckpointingLayer"

"""Base class of transformers' layers.

These can checkpoint themselves (`gradient_checkpointing`). If the models around them have this switched on, the layers
fill no cache of keys and values, which a recomputed forward would fill twice.
"""


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether a module is a layer of transformers that can checkpoint itself."""
    return any(base.__name__ == _SELF_CHECKPOINTING for base in type(module).__mro__)


class _StateWithoutOurs:
    """`__getstate__` for a module with attributes set by `replace`: copies and pickles get the module's own attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._theirs = module.__getstate__
        self.replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Pairs of our attributes and the module's own ones under these names, the oldest first."""

    def __call__(self) -> Any:
        state = self._theirs()  # may be the module's own dictionary
        if isinstance(state, tuple) and state and isinstance(state[0], dict):  # of a class with slots
            return self.without_ours(state[0]), *state[1:]
        return self.without_ours(state) if isinstance(state, dict) else state

    def without_ours(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of the module's dictionary with its own attributes."""
        found = {name: value for name, value in state.items() if value is not self}
        for ours, before in reversed(self.replaced):
            for name, value in ours.items():
                if found.get(name) is value:
                    del found[name]
                    found.update({name: before[name]} if name in before else {})
        return found


def replace(module: nn.Module, **attributes: Any) -> Callable[[], None]:
    """Sets attributes on one module that its copies do not get; returns a function that undoes it, in any order."""
    before = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    state = module.__dict__.get("__getstate__")
    if not isinstance(state, _StateWithoutOurs):
        own = {} if state is None else {"__getstate__": state}
        state = _StateWithoutOurs(module)
        state.replaced.append(({}, own))
        module.__dict__["__getstate__"] = state
    entry = (attributes, before)
    state.replaced.append(entry)

    def restore() -> None:
        at = next((at for at, each in enumerate(state.replaced) if each is entry), None)
        if at is None:  # undone before
            return
        for name in attributes:
            # What was set later stays, and finds in its turn what was there before this.
            later = next((values for given, values in state.replaced[at + 1 :] if name in given), module.__dict__)
            later.pop(name, None)
            if name in before:
                later[name] = before[name]
        del state.replaced[at]
        if len(state.replaced) == 1:
            del module.__dict__["__getstate__"]
            module.__dict__.update(state.replaced[0][1])

    module.__dict__.update(attributes)
    return restore


@contextmanager
def own_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules have their own attributes in place of those that `replace` has set."""
    replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        state, present = module.__dict__.get("__getstate__"), module.__dict__
        if isinstance(state, _StateWithoutOurs):
            own = state.without_ours(present)
            ours = {name: value for name, value in present.items() if own.get(name, _nothing) is not value}
            for name in ours:
                del present[name]
            present.update({name: own[name] for name in ours if name in own})
            replaced.append((present, ours))
    try:
        yield
    finally:
        for present, ours in replaced:
            present.update(ours)


def compiled_around(root: nn.Module, units: Iterable[Unit]) -> list[str]:
    """Names of the modules that torch.compile compiles as a whole and that contain one of `units`.

    torch's checkpoint turns compilation off for what it calls, so such a unit runs uncompiled. A unit that is compiled
    by itself stays compiled.
    """
    inner = {id(unit.module) for unit in units}
    found = []
    for name, module in root.named_modules():
        if is_compiled(module) and any(id(each) in inner for each in module.modules() if each is not module):
            found.append(name or type(module).__name__)
    return found


_DICTS = (dict, OrderedDict, defaultdict, Counter)

_LISTS = (list, deque)

_CONTAINERS = (*_DICTS, *_LISTS, set)

_STATISTICS = ("running_mean", "running_var")

"""Buffers that torch's batch_norm writes to without increasing their version."""


_nothing = object()


class _ModuleContents:
    """References to all objects that modules hold, and what is needed to restore them.

    These are attributes, registered members and the contents of containers among them, recursively through modules and
    containers. Attributes of objects of other classes, and of the modules around, are in `outer`.

    Args:
        roots: modules.
        around: ids of the modules that contain `roots`.
        objects: tells the user's objects from others.
    """

    def __init__(self, roots: Iterable[nn.Module], around: Collection[int], objects: ObjectsOf) -> None:
        self.kinds: list[tuple[nn.Module, type]] = []
        self.containers: list[tuple[Any, Any]] = []
        self.parameters: list[nn.Parameter] = []
        self.with_tensors: list[tuple[Any, Any, list[Any]]] = []
        self._empty: list[Any] = []
        self._tuples = False
        seen, todo, outer = set[int](), list[Any](roots), list[Any]()
        while todo:
            value = todo.pop()
            kind = type(value)
            if isinstance(value, nn.Module):
                if id(value) in around:
                    outer.append(value)
                elif id(value) not in seen:
                    seen.add(id(value))
                    self.kinds.append((value, kind))
                    todo.append(vars(value))
            elif kind is SimpleNamespace:
                todo.append(vars(value))
            elif isinstance(value, tuple):
                self._tuples |= any(isinstance(each, Tensor) and each.grad_fn is not None for each in value)
                todo += value
            elif kind in _CONTAINERS and id(value) not in seen:
                seen.add(id(value))
                if not value:
                    self._empty.append(value)
                    continue
                inside = value.values() if kind in _DICTS else value
                inside = list(inside)
                outer += [each for each in inside if type(each) is FunctionType and each.__closure__]
                inside = [each for each in inside if type(each) not in _OTHERS]
                todo += [each for each in inside if isinstance(each, _LEADS_ON)]
                outer += [each for each in inside if not isinstance(each, (*_LEADS_ON, Tensor))]
                self.parameters += [each for each in inside if type(each) is nn.Parameter]
                self._add(value, any(map(_is_state, inside)))
        self._detach_graphs()
        self._sets = [each for each in self.containers if type(each[0]) is set]
        self._dicts = [each for each, _ in self.containers if type(each) in _DICTS]
        self._lists = [each for each, _ in self.containers if type(each) in _LISTS]
        self._of_dicts = _items(copy for _, copy in self.containers if type(copy) in _DICTS)
        self._of_lists = _items(copy for _, copy in self.containers if type(copy) in _LISTS)
        self.outer = OuterState(outer, around, objects)

    def _add(self, container: Any, with_tensors: bool) -> None:
        copy = container.copy()
        if type(container) is set or not with_tensors:
            self.containers.append((container, copy))
            return
        items = list(copy.items() if type(copy) in _DICTS else enumerate(copy))
        self.with_tensors.append((container, copy, [name for name, each in items if _is_state(each)]))

    def _detach_graphs(self) -> None:
        """Replaces tensors with a graph by detached ones in the stored copies.

        The graph of an earlier call would keep what that call has stored, which would keep the graph of the call before
        it.
        """
        others: dict[int, Any] = {}
        for at, (container, copy, names) in enumerate(self.with_tensors):
            graphs = [name for name in names if copy[name].grad_fn is not None]
            for name in graphs:
                tensor = copy[name]
                copy[name] = others.setdefault(id(tensor), tensor.detach().requires_grad_())
            if graphs and not any(
                container is vars(module) or container is buffers_in(module) for module, _ in self.kinds
            ):
                others[id(container)] = copy.copy()
                self.with_tensors[at] = others[id(container)], copy, names
        if others or self._tuples:
            for _, copy, *_ in (*self.containers, *self.with_tensors):
                for name, value in (
                    [] if type(copy) is set else list(copy.items() if type(copy) in _DICTS else enumerate(copy))
                ):
                    copy[name] = _replaced(value, others)

    def unchanged(self) -> bool:
        """Whether all contents are unchanged, except those in `with_tensors` and `outer`."""
        of_dicts, of_lists = _items(self._dicts), _items(self._lists)
        return (
            not any(self._empty)
            and len(of_dicts) == len(self._of_dicts)
            and len(of_lists) == len(self._of_lists)
            and all(map(operator.is_, of_dicts, self._of_dicts))
            and all(map(operator.is_, of_lists, self._of_lists))
            and all(container == copy for container, copy in self._sets)
            and all(type(module) is kind for module, kind in self.kinds)
        )

    def all_unchanged(self) -> bool:
        """Whether all contents are unchanged."""
        with_tensors = all(_same(container, copy) for container, copy, _ in self.with_tensors)
        return with_tensors and self.unchanged() and self.outer.unchanged()

    def restore(self) -> Callable[[], None]:
        """Restores all contents, except those in `with_tensors` and `outer`; returns a function that undoes it."""
        if self.unchanged():
            return lambda: None if self.unchanged() else self._restore_contents(self.kinds, self.containers, ())
        kinds = [(module, type(module)) for module, _ in self.kinds]
        now = [(container, container.copy()) for container, _ in self.containers]
        filled = [(container, container.copy()) for container in self._empty if container]
        self._restore_contents(self.kinds, self.containers, ())
        return partial(self._restore_contents, kinds, now, filled)

    def _restore_contents(
        self,
        kinds: Iterable[tuple[nn.Module, type]],
        contents: Iterable[tuple[Any, Any]],
        filled: Iterable[tuple[Any, Any]],
    ) -> None:
        for container in self._empty:
            if container:
                container.clear()
        for module, kind in kinds:
            if type(module) is not kind:
                module.__class__ = kind
        _restore_containers(contents)
        _restore_containers(filled)


def _items(containers: Iterable[Any]) -> list[Any]:
    """The lengths of the containers, followed by all their items."""
    found = list(containers)
    inside = (dict.values(each) if isinstance(each, dict) else each for each in found)
    return [*map(len, found), *chain.from_iterable(inside)]


def _replaced(value: Any, others: dict[int, Any]) -> Any:
    """The replacement of `value`; within tuples, tensors with a graph are detached."""
    if type(value) is tuple:
        items = [
            each.detach().requires_grad_()
            if isinstance(each, Tensor) and each.grad_fn is not None
            else _replaced(each, others)
            for each in value
        ]
        return value if all(map(operator.is_, items, value)) else tuple(items)
    return others.get(id(value), value)


_OTHERS = frozenset(map(type, (None, True, 0, 0.0, "", _items, partial(_items), [].append)))

_is_trained = operator.attrgetter("requires_grad")

_LEADS_ON = (nn.Module, SimpleNamespace, tuple, dict, list, deque, set)


def _is_state(value: Any) -> bool:
    """Whether `value` is a tensor whose bytes a forward may change. Parameters are excluded: I5 covers them."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()


def _same(container: Any, copy: Any) -> bool:
    """Whether a container holds the same objects as its copy, in the same order."""
    if len(container) != len(copy) or type(container) is set:
        return bool(container == copy)
    if type(container) in _DICTS:
        return all(map(operator.is_, container, copy)) and all(map(operator.is_, container.values(), copy.values()))
    return all(map(operator.is_, container, copy))


def _restore_containers(containers: Iterable[tuple[Any, Any]]) -> None:
    """Restores the contents of containers."""
    for container, contents in containers:
        if not _same(container, contents):
            container.clear()
            if type(container) in _LISTS:
                container.extend(contents)
            elif type(container) is Counter:
                dict.update(container, contents)  # its own adds
            else:
                container.update(contents)


class _StateBefore:
    """Snapshot of modules before a call, so that the recomputed forward finds the same state (`as_before`, I3).

    It has references to the objects of the modules, and copies of the tensors that a forward may write to.

    Args:
        contents: what the modules hold when the snapshot is taken.
    """

    def __init__(self, contents: _ModuleContents) -> None:
        self._contents = contents
        self._tensors = {
            id(copy[name]): (name, copy[name], version_of(copy[name]))
            for _, copy, names in contents.with_tensors
            for name in names
        }
        values = [value for _, value, _ in self._tensors.values()]
        self._before = dict(zip(self._tensors, _copies(values), strict=True))
        self._trained = list(map(_is_trained, contents.parameters))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the modules."""
        return self._contents.parameters

    @property
    def ids(self) -> Collection[int]:
        """Ids of the tensors."""
        return self._tensors.keys()

    @property
    def generators(self) -> Sequence[Any]:
        """Generators of random numbers that can be reached from the modules."""
        return self._contents.outer.generators

    @not_compiled
    def drop_unchanged(self) -> None:
        """Drops the copies of large tensors that the call has not changed."""
        for key, (name, value, version) in self._tensors.items():
            before = self._before[key]
            if value.numel() <= _SMALL_NUMEL or version_of(value) != version:
                continue
            on_cpu = in_ram(value) and type(value) is Tensor and value.layout is torch.strided
            # Versions do not count writes to `.data`, so bytes are compared where that is cheap.
            if _equal(value, before) if on_cpu else name not in _STATISTICS:
                del self._before[key]

    @contextmanager
    def as_before(self, *, outer: bool = True) -> Iterator[None]:
        """Restores the state inside the block; tensors and containers are copies, so changes made inside are discarded.

        Args:
            outer: also what is outside of the modules. A check of what a call leaves there needs it as it is.
        """
        for key, (_, value, version) in self._tensors.items():
            if key not in self._before and version_of(value) != version:
                refuse_changed(value, version)
        trained = list(map(_is_trained, self._contents.parameters))
        self._train(trained, self._trained)
        back = self._contents.restore()
        outer_back = self._contents.outer.restore() if outer else None
        now = [(container, container.copy()) for container, *_ in self._contents.with_tensors]
        fresh = dict(zip(self._before, _copies(list(self._before.values())), strict=True))
        try:
            for container, contents, names in self._contents.with_tensors:
                _restore_containers([(container, contents)])
                for name in names:
                    value = fresh.get(id(contents[name]), contents[name])
                    # A clone of the leaf, since a computed tensor may be written to and a leaf may not.
                    container[name] = value.requires_grad_().clone() if contents[name].requires_grad else value
            yield
        finally:
            if outer_back is not None:
                outer_back()
            back()
            _restore_containers(now)
            self._train(self._trained, trained)

    def _train(self, now: list[bool], then: list[bool]) -> None:
        """Sets `requires_grad` of parameters from `now` to `then`: autograd saves nothing for frozen parameters."""
        if now != then:
            for parameter, wanted in zip(self._contents.parameters, then, strict=True):
                parameter.requires_grad_(wanted)


@torch.no_grad()
def _equal(one: Tensor, other: Tensor) -> bool:
    try:  # as 8-byte integers, ten times as fast as single bytes
        return torch.equal(one.view(torch.int64), other.view(torch.int64))
    except RuntimeError:  # the size is no multiple of 8, or the memory order differs
        return torch.equal(one, other)


@torch.no_grad()
def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors. Copies of tensors that share memory share memory, too."""
    if len(tensors) == 1:
        return [tensors[0].detach().clone()]
    places = [storage_id(each.untyped_storage()) if has_storage(each) else id(each) for each in tensors]
    times = Counter(places)
    if len(times) == len(tensors):
        return [each.detach().clone() for each in tensors]
    memory: dict[int, Any] = {}
    copies = []
    for tensor, place in zip(tensors, places, strict=True):
        if times[place] == 1 or type(tensor) is not Tensor:
            copies.append(tensor.detach().clone())
            continue
        if place not in memory:
            memory[place] = tensor.untyped_storage().clone()
        shape = tensor.storage_offset(), tensor.shape, tensor.stride()
        copies.append(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory[place], *shape))
    return copies


class _Arguments:
    """Arguments of a call before it runs: copies of containers, and versions of the tensors in containers or keywords.

    Tensors that are positional arguments are stored and compared by torch.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._args = {at: _copied(value) for at, value in enumerate(args) if type(value) in _NESTED}
        self._kwargs = {name: _copied(value) for name, value in kwargs.items() if type(value) in _NESTED}
        inside = (*self._args.values(), *kwargs.values())
        self._versions = [(each, version_of(each)) for each in tensors_in(inside) if not each.is_inference()]

    def changed(self) -> Tensor | None:
        """A tensor that was written to since the call, if any."""
        return next((tensor for tensor, version in self._versions if version_of(tensor) != version), None)

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the same arguments, with containers as they were before the call."""
        again = [_copied(self._args[at]) if at in self._args else value for at, value in enumerate(args)]
        return again, kwargs | {name: _copied(value) for name, value in self._kwargs.items()}


_NESTED = (list, tuple, dict)


def _copied(value: Any) -> Any:
    """Copies lists, tuples and dicts recursively; other values are the same objects."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return value


class _FirstResults:
    """Results of a call's exchanges with other ranks and of its decisions, stored for the recomputed call."""

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, int]] = []
        self._given: Iterator[tuple[Tensor, int]] | None = None
        self._decisions: list[Any] = []
        self._decided: Iterator[Any] = iter(())

    @contextmanager
    def inside(self, *, again: bool) -> Iterator[None]:
        """Inside, `once` and `repeated` store results here, or (`again`) return the stored ones."""
        self._given = iter(self._results) if again else None
        self._decided = iter(self._decisions)
        with _of_thread.storing_in(self):
            yield

    def decision(self, decide: Callable[[], T]) -> T:
        if self._given is None:
            self._decisions.append(decide())
            return cast(T, self._decisions[-1])
        found = next(self._decided, _nothing)
        return decide() if found is _nothing else cast(T, found)

    def result(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._given is None:
            result = compute().detach()
            self._results.append((result, version_of(result)))
            return result.detach()
        found = next(self._given, None)
        # A result that was written to in place is not what was exchanged. That is so on all ranks, since they compute
        # the same: all of them exchange again.
        return compute() if found is None or version_of(found[0]) != found[1] else found[0].detach()


class _Early:
    """Has the checkpoint around a call save one more tensor, whose reading begins the recomputation."""

    def __init__(self) -> None:
        self._saved: tuple[Callable[[Any], Tensor], Any] | None = None

    def save(self) -> None:
        """Saves the tensor; called at the same place of the first and of the recomputed call."""
        hooks = saving_hooks(False)
        assert hooks is not None
        pack, unpack = hooks
        packed = pack(torch.empty(0, dtype=torch.uint8))
        if self._saved is None:
            self._saved = unpack, packed

    def recompute(self) -> None:
        """Recomputes the call, within a backward pass, unless that was done before. Called once."""
        assert self._saved is not None
        unpack, packed = self._saved
        unpack(packed)


@dataclasses.dataclass(frozen=True, slots=True)
class _FirstCall:
    """The record of a unit's first call, for the recomputed one."""

    forward: Call
    before: _StateBefore
    streams: RandomStreams
    results: _FirstResults
    sampler: _SaveSampler
    arguments: _Arguments
    changes: dict[str, int]
    written: list[nn.Parameter]
    early: _Early | None

    def check(self, changes: dict[str, int]) -> None:
        """Raises UsageError if weights or arguments have changed since the call (I5).

        Args:
            changes: how often each parameter has changed by now.
        """
        for name, times in self.changes.items():
            if changes.get(name) != times:
                refuse_older(name, changes.get(name, times) - times)
        written = self.arguments.changed()
        if written is not None:
            refuse_changed(written)


_SAMPLES_ONE_IN = 8

"""One in this many saved tensors is sampled. The turn goes on from call to call, so each tensor is sampled once in as
many calls of its unit."""


class _SaveSampler:
    """Samples of the tensors that a call saves for the backward.

    The last saved tensor is always sampled, since it depends on nearly all that the call computes, and the others by
    turns. Sampling more would take over a hundredth of a step.

    Args:
        turn: number of earlier calls of the unit.
        state: ids of tensors that the module holds. These are skipped: I3 restores them, and they may be written to
            after they were saved.
    """

    def __init__(self, turn: int, state: Collection[int]) -> None:
        self._turn = turn
        self._state = state
        self._last: tuple[_SavedFingerprint, Tensor, int] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Samples the tensors that the call in the block saves."""
        before = getattr(_of_thread, "sampler", None)
        _of_thread.sampler = self
        try:
            yield
        finally:
            _of_thread.sampler = before
            last, self._last = self._last, None
        if last is not None:
            looks, tensor, version = last
            # torch refuses a saved tensor that was written to, if it is read.
            looks.sample = sample_of(tensor) if version_of(tensor) == version and _has_bytes(tensor) else None

    def add(self, looks: _SavedFingerprint, tensor: Tensor) -> None:
        """Handles a saved tensor."""
        base = base_of(tensor)
        base = tensor if base is None else base
        if base.is_leaf and base.requires_grad:
            return  # a weight, which is compared by its change counts (I5)
        # Integers get no gradients, and the byte buffers that kernels save have uninitialized parts.
        if (
            id(tensor) in self._state
            or id(base) in self._state
            or not (tensor.is_floating_point() or tensor.is_complex())
        ):
            return
        self._turn += 1
        if self._turn % _SAMPLES_ONE_IN == 0 and _has_bytes(tensor):
            looks.sample = sample_of(tensor)
        self._last = looks, tensor, version_of(tensor)


class _SavedFingerprint:
    """Properties of a saved tensor that the checkpoint compares: shape, dtype, device, and a sample if `_SaveSampler`
    took one."""

    __slots__ = ("_known", "_tensor", "sample")

    def __init__(self, tensor: Tensor) -> None:
        self._known = tensor.shape, tensor.dtype, tensor.device
        self.sample: Tensor | None = None
        self._tensor = tensor if in_backward() else None
        sampler: _SaveSampler | None = getattr(_of_thread, "sampler", None)
        if self._tensor is None and sampler is not None:
            sampler.add(self, tensor)

    def __eq__(self, recomputed: object) -> bool:
        if not isinstance(recomputed, _SavedFingerprint) or self._known != recomputed._known:
            return False
        tensor = recomputed._tensor
        return tensor is None or self.sample is None or has_sample(tensor, self.sample)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self._known}"


def _has_bytes(tensor: Tensor) -> bool:
    """Whether `tensor` is a plain strided tensor in RAM."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and in_ram(tensor)
    return plain and not (tensor.is_nested or tensor.is_quantized or is_fake(tensor) or in_transform())


_SAME_BYTES = "same bytes"

comparisons_of_recomputed[_SAME_BYTES] = _SavedFingerprint


class _OfThread(threading.local):
    """State of the forwards in this thread. An attribute exists while it is used.

    Attributes:
        last: what recomputes the call of a unit that ended last; empty: none has ended, or it is taken.
        first: where results of exchanges and decisions are stored, or come from.
    """

    last: tuple[_Early, ...]
    first: _FirstResults | None

    @contextmanager
    def storing_in(self, first: _FirstResults | None) -> Iterator[None]:
        before, self.first = getattr(self, "first", None), first
        try:
            yield
        finally:
            self.first = before


_of_thread = _OfThread()


def once(compute: Callable[[], Tensor]) -> Tensor:
    """Returns the result of an exchange with other ranks; in a recomputed unit, the result of its first forward (I4).

    Source: Oases ("Automated Tensor Model Parallelism with Overlapped Communication for Efficient Foundation Model
    Training"), section 3.2, where each recomputation begins after an exchange, whose result is stored. Here a unit is
    recomputed from its input, and the stored results replace the exchanges within it.

    Args:
        compute: runs the exchange; its result has no graph.
    """
    stored: _FirstResults | None = getattr(_of_thread, "first", None)
    return compute() if stored is None else stored.result(compute)


def repeated(decide: Callable[[], T]) -> T:
    """Returns the result of a decision; in a recomputed unit, the result in its first forward, for which the unit's backward
    is computed (I4)."""
    stored: _FirstResults | None = getattr(_of_thread, "first", None)
    return decide() if stored is None else stored.decision(decide)


@contextmanager
def early_recomputation() -> Iterator[None]:
    """Context of a forward in this thread whose recomputations may begin before a gradient needs them (`last_recomputed`)."""
    _of_thread.last = ()
    try:
        yield
    finally:
        del _of_thread.last


def last_recomputed() -> Callable[[], None] | None:
    """Returns a function that recomputes the call of a unit that ended last in this thread, for the backward pass that calls
    it; what asks for it first gets it. None: there is none, or this is not within `early_recomputation`.

    Source: Oases, section 3.1, whose cross-pass schedule recomputes a part of the model while a sum of the backward of the
    part behind it passes.
    """
    found: tuple[_Early, ...] = getattr(_of_thread, "last", ())
    if not found:
        return None
    _of_thread.last = ()
    return found[0].recompute


def _contents_of(
    module: nn.Module, around: Collection[int], objects: ObjectsOf
) -> Callable[[Sequence[Any], dict[str, Any]], _ModuleContents]:
    """Returns a function that gives the contents of a module, and of modules among the arguments, before a call."""
    last: _ModuleContents | None = None

    def contents(args: Sequence[Any], kwargs: dict[str, Any]) -> _ModuleContents:
        nonlocal last
        given = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, nn.Module)]
        if given:
            return _ModuleContents([module, *given], around, objects)
        if last is None or not last.all_unchanged():
            last = None  # frees it first: two would take twice the memory
            last = _ModuleContents([module], around, objects)
        return last

    return contents


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The items of nested lists, tuples and dicts."""
    for value in values:
        if type(value) in _NESTED:
            yield from _flat(value.values() if type(value) is dict else value)
        else:
            yield value


@contextmanager
def ignoring_stored_exchanges() -> Iterator[None]:
    """Inside, `once` exchanges without storing, for work that is not recomputed with the unit's forward."""
    with _of_thread.storing_in(None):
        yield


class Recompute:
    """Builds calls of units that are recomputed in the backward pass.

    Args:
        root: the module that contains all units.
        starts: called with the index of the unit whose forward is about to be recomputed.
        changes: returns a function that gives, by name, how often each parameter of a module has changed.
        quiet: context for computations of units that are no calls of the run: hooks on parameters do nothing.
        progress: advances background work; called before each slice of a unit, forward and backward.
    """

    def __init__(
        self,
        root: nn.Module,
        starts: Callable[[int], None],
        changes: Callable[[nn.Module], Callable[[], dict[str, int]]],
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = root
        self._starts = starts
        self._changes = changes
        self._quiet = quiet
        self._progress = progress
        self._exchanges: Exchanges | None = None
        """Exchanges of activations of the run, once it has any."""
        self._objects = ObjectsOf(root)
        self._last: Unit | None = None
        self._restore: list[Callable[[], None]] = []

    def close(self) -> None:
        """Undoes the changes to the modules around units."""
        while self._restore:
            self._restore.pop()()

    def of(
        self, unit: Unit, original: Call | None = None, wanted: Callable[[], bool] = lambda: True, slices: int = 1
    ) -> Call:
        """Returns a call of the unit's module that is recomputed in the backward pass.

        Args:
            wanted: returns whether the call that begins is recomputed.
            original: the function to call and recompute; by default the forward of the module's class at the time of
                the call.
            slices: number of slices of the batch that the unit is called on, one after another.
        """
        module = unit.module
        by_itself = checkpoints_itself(module)
        if by_itself:
            self._tell_models_around(module)
        contents = _contents_of(module, self._around(unit), self._objects)
        changes = self._changes(module)
        turns = itertools.count()
        compiled = any(compiled_call_of(each) is not None for each in module.modules())
        # The recomputed forward may run other compiled code than the first, which rounds differently.
        check = "default" if compiled else _SAME_BYTES

        def run(first: _FirstCall, *args: Any, **kwargs: Any) -> Any:
            if first.early is not None:
                first.early.save()
            if not in_backward():
                versions = [version_of(each) for each in first.before.parameters]
                with first.results.inside(again=False), first.sampler.watched():
                    output = first.forward(*args, **kwargs)
                first.before.drop_unchanged()
                first.written.extend(
                    each
                    for each, version in zip(first.before.parameters, versions, strict=True)
                    if version_of(each) != version
                )
                # after the forward: lock-free units get newer values at their first read
                first.changes.update(changes())
                return output
            self._last = unit
            self._starts(unit.index)
            if sliced is not None:
                self._progress()
            first.check(changes())
            args_again, kwargs_again = first.arguments.of(args, kwargs)
            again = first.results.inside(again=True)
            with first.before.as_before(), first.streams.as_before(), again, self._unwritten(unit, first):
                try:
                    return first.forward(*args_again, **kwargs_again)
                except StopIteration as error:  # for loops, Lightning's too, would take it for their own end
                    raise _differs(unit) from error
                except AssertionError as error:
                    if "target_frame.early_stop" not in str(error):
                        raise
                    # The forward caught the exception with which torch stops it early, and went on.
                    raise _differs(unit) from error

        def call(*args: Any, **kwargs: Any) -> Any:
            forward = partial(type(module).forward, module) if original is None else original
            # A user's checkpoint recomputes this unit already, and the unit must do the same both times. Computations
            # inside a torch.func transform cannot be recomputed outside it.
            if not torch.is_grad_enabled() or in_backward() or inside_checkpoint() or in_transform() or not wanted():
                return forward(*args, **kwargs)
            if by_itself and module.gradient_checkpointing and module.training:
                return forward(*args, **kwargs)  # the user has switched on the layer's own checkpointing
            if sliced is None:
                return recomputed(forward, *args, **kwargs)
            return sliced.call(partial(recomputed, forward), args, kwargs)

        def recomputed(forward: Call, *args: Any, **kwargs: Any) -> Any:
            before = _StateBefore(contents(args, kwargs))
            given = [each for each in _flat((*args, *kwargs.values())) if is_generator(each)]
            streams = RandomStreams([*before.generators, *given])
            sampler = _SaveSampler(next(turns), before.ids)
            early = _Early() if hasattr(_of_thread, "last") else None
            arguments = _Arguments(args, kwargs)
            first = _FirstCall(forward, before, streams, _FirstResults(), sampler, arguments, {}, [], early)
            output = checkpoint(run, first, *args, use_reentrant=False, determinism_check=check, **kwargs)
            if early is not None:
                _of_thread.last = (early,)
            return output

        def unchanged(args: Sequence[Any], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return _StateBefore(contents(args, kwargs)).as_before(outer=False)

        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            own = module.forward if compiled else original or partial(type(module).forward, module)
            with ignoring_stored_exchanges(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                return own(*args, **kwargs)

        sliced = None
        if slices > 1:
            slices_check = SlicesCheck(unit, uncompiled, unchanged, self._quiet)
            sliced = SlicedCalls(
                module, lambda _: slices, slices_check.shared_results, slices_check.refusal, self._progress
            )
        # torch.compile must not trace this as a part of a compiled module around it; it may compile what this calls.
        return cast(Call, torch.compiler.disable(call, recursive=False))

    def in_token_slices(self, module: Unit, cut: TokenCut, whole: Callable[[], bool]) -> Call:
        """Returns a forward of a module that computes slices of its tokens one after another.

        Args:
            module: the module as a unit, though it need not be one of the run.
            cut: how they are cut.
            whole: returns whether the call that begins is computed as a whole.
        """
        own = module.module
        forward = vars(own).get("forward") or partial(type(own).forward, own)
        contents = _contents_of(own, self._around(module), self._objects)

        @not_compiled
        def state(args: Sequence[Any], kwargs: dict[str, Any]) -> _StateBefore:
            return _StateBefore(contents(args, kwargs))

        def unchanged(args: Sequence[Any], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
            return state(args, kwargs).as_before(outer=False)

        slices = TokenSlices(own, forward, cut.count, self._changes(own), self._quiet, repeated, state)
        compiled = any(compiled_call_of(each) is not None for each in self._root.modules())

        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            with ignoring_stored_exchanges(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                return slices.transposed(*args, **kwargs)

        questions = ModuleQuestions(module.name, lambda: self._exchanges)
        check = SlicesCheck(
            module,
            uncompiled,
            unchanged,
            self._quiet,
            tokens=True,
            of_parameters=cut.by_trial,
            alone=lambda: not questions.of_ranks,
        )
        trial = CutTrial(questions, check.saves_more_than_inputs) if cut.by_trial else None
        slices.check_with(check, questions, trial)

        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if whole() else slices.call(*args, **kwargs)

        return cast(Call, torch.compiler.disable(call, recursive=False))

    @contextmanager
    def _unwritten(self, unit: Unit, first: _FirstCall) -> Iterator[None]:
        """Checks that the recomputed call in the block leaves the values of parameters that the first call wrote to.

        Raises:
            UsageError: a parameter got another value.
        """
        before = [each.detach().clone() for each in first.written]
        try:
            yield
        finally:
            for parameter, value in zip(first.written, before, strict=True):
                if not torch.equal(parameter.detach(), value):
                    name = next(
                        (name for name, each in self._root.named_parameters() if each is parameter), "a parameter"
                    )
                    raise UsageError(
                        f"{unit.name} ({type(unit.module).__name__}) writes to {name} in its forward, and wrote to it "
                        "a second time when it was recomputed in the backward pass, so the parameter has another "
                        "value than in the forward; keep values that a forward writes in a buffer (register_buffer), "
                        "or set recompute='none'"
                    )

    def _around(self, unit: Unit) -> set[int]:
        """Ids of the modules that contain the unit."""
        names = unit.name.split(".")
        around = {id(self._root.get_submodule(".".join(names[:depth]))) for depth in range(len(names))}
        return around - {id(unit.module)}

    def _tell_models_around(self, layer: nn.Module) -> None:
        for module in self._root.modules():
            off = getattr(module, "gradient_checkpointing", None) is False and not checkpoints_itself(module)
            if off and any(inner is layer for inner in module.modules()):
                self._restore.append(replace(module, gradient_checkpointing=True))

    def exchanges_with(self, exchanges: Exchanges) -> None:
        """Gives the run's exchanges of activations, whose ranks agree which modules are cut by trial."""
        self._exchanges = exchanges

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Turns errors of the checkpoints in the block, a backward pass, into errors with the unit's name.

        Raises:
            UsageError: a unit's recomputed forward differs from the first.
        """
        try:
            yield
        except CheckpointError as error:
            if self._last is None:
                raise  # raised by a checkpoint of the user
            raise _differs(self._last) from error
        finally:
            self._last = None


def _differs(unit: Unit) -> UsageError:
    return UsageError(
        f"{unit.name} ({type(unit.module).__name__}) did something else when it was recomputed in the backward pass "
        "than in its forward, so its gradients would not be those of the loss; a forward must not depend on state "
        "that it changed itself, such as a cache of keys and values (transformers: config.use_cache=False), an "
        "iterator or a counter; remove that dependence, or set recompute='none'"
    )


def recomputed_units(count: int, every: int, sliced: Collection[int] = ()) -> frozenset[int]:
    """Indices of the recomputed units among `count` units: every `every`-th after the root, none if `every` is 0; and those
    that are computed in slices."""
    return frozenset(index for index in range(1, count) if every and (index - 1) % every == 0) | frozenset(sliced)


def recomputed_around(units: Sequence[Unit], recomputed: Collection[int]) -> dict[int, int]:
    """Returns the outermost recomputed unit around each unit that is inside of one, by index.

    Args:
        units: all units of a model, in their order: a unit comes before those inside it.
    """
    found: dict[int, int] = {}
    outer: Unit | None = None
    for unit in units[1:]:
        if outer is not None and unit.name.startswith(f"{outer.name}."):
            found[unit.index] = outer.index
        elif unit.index in recomputed:
            outer = unit
        else:
            outer = None
    return found


Forward = Callable[..., Any]


class _Wrapped:
    """A forward wrapped around another forward.

    Args:
        make: makes the outer forward from the inner one.
        inside: the inner forward.
    """

    def __init__(self, make: Callable[[Forward], Forward], inside: Forward) -> None:
        functools.update_wrapper(self, inside)
        self._make = make
        self.inside = inside
        self._forward = make(inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def with_inside(self, inside: Forward) -> Self:
        """Returns the same wrapper around another inner forward."""
        return type(self)(self._make, inside)


class ForwardWrapper(_Wrapped):
    """Wrapper around a module's own forward, which `stand_in` may replace."""


class RecomputedForwardWrapper(_Wrapped):
    """Wrapper around the recomputed part of a unit's forward.

    The checkpoint stores the arguments of the inner forward, not those of the wrapper.
    """


def stand_in(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Replaces a module's own forward inside its wrapper, if it has one. Returns a function that undoes it."""
    around = vars(module).get("forward")
    return replace(module, forward=around.with_inside(forward) if isinstance(around, ForwardWrapper) else forward)
