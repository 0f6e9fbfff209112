"""Units whose activations are recomputed in the backward pass: what is put in place of their forward.

Owns torch's checkpoints around units. Knows nothing of pages; who is told that a recomputed forward starts gathers them.

I1: what a checkpoint of the user's recomputes already is recomputed once, not twice.
I2: a forward that does not repeat itself is refused with the name of its unit: what it saves for the backward is compared
with what the first has saved, by fingerprints (on a CPU; on other devices by number, shapes and dtypes alone).
I3: what a module holds (parameters, buffers, other attributes, submodules, hooks, its class) and the containers among its
arguments are for the recomputed forward what they were for the first, and what a forward changes of them is changed once.
I4: what ranks have exchanged in a forward (`once`) is kept, and not exchanged again. I5: weights that have changed since, and
tensors among the arguments that were written to, are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import is_fake
from torch.utils.checkpoint import CheckpointError, _allowed_determinism_checks_to_fns, checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.fingerprint import sampled
from lightning_ptm.runtime.binding import refuse_older
from lightning_ptm.runtime.graphs import in_backward, in_transform, tensors_in
from lightning_ptm.runtime.saved import inside_checkpoint, refuse_changed
from lightning_ptm.runtime.units import Unit

Call = Callable[..., Any]

_SMALL_NUMEL = 1 << 14
"""Buffers of no more elements are kept for a recomputed forward whether it is known that they change or not."""

_SELF_CHECKPOINTING = "GradientCheckpointingLayer"
"""Base class of transformers' layers. They can checkpoint themselves (`gradient_checkpointing`), and where the models
around them are told of it, these fill no cache of keys and values, which a recomputed forward would fill twice."""


def _checkpoints_itself(module: nn.Module) -> bool:
    return any(base.__name__ == _SELF_CHECKPOINTING for base in type(module).__mro__)


class _StateWithoutOurs:
    """`__getstate__` of a module to which `replace` has given attributes: copies and pickles have what was there before."""

    def __init__(self, module: nn.Module) -> None:
        self._theirs = module.__getstate__
        self.replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of ours, and what the module itself had there, the oldest first."""

    def __call__(self) -> Any:
        state = self._theirs()  # may be the module's own dictionary
        if isinstance(state, tuple) and state and isinstance(state[0], dict):  # of a class with slots
            return self._without_ours(state[0]), *state[1:]
        return self._without_ours(state) if isinstance(state, dict) else state

    def _without_ours(self, state: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in state.items() if value is not self}
        for ours, before in reversed(self.replaced):
            for name, value in ours.items():
                if found.get(name) is value:
                    del found[name]
                    found.update({name: before[name]} if name in before else {})
        return found


def replace(module: nn.Module, **attributes: Any) -> Callable[[], None]:
    """Gives one module attributes of its own, which its copies do not have; returns what takes them back."""
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
        for name in attributes:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)
        state.replaced[:] = [each for each in state.replaced if each is not entry]
        if len(state.replaced) == 1:
            del module.__dict__["__getstate__"]
            module.__dict__.update(state.replaced[0][1])

    module.__dict__.update(attributes)
    return restore


def compiled_around(root: nn.Module, units: Iterable[Unit]) -> list[str]:
    """Names of the modules that torch.compile compiles as a whole and that have one of `units` inside of them.

    torch's checkpoint turns compilation off for what it calls, so such a unit is computed as it is; one that is compiled by
    itself is not.
    """
    inner = {id(unit.module) for unit in units}
    found = []
    for name, module in root.named_modules():
        compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
        if compiled and any(id(each) in inner for each in module.modules() if each is not module):
            found.append(name or type(module).__name__)
    return found


_CONTAINERS = (list, dict, set, deque)
"""Attributes of these classes are copied before a call, one level deep."""
_REGISTRIES = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold others, under names."""


class _Held:
    """What a module and its submodules hold before a call: which objects, and tensors that a forward may write to as copies.

    Parameters are objects here, whose values I5 is about; `keep_changed` lets go of copies of large tensors that the call has
    not changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [
            (owner, type(owner), dict(vars(owner)), {name: dict(vars(owner)[name]) for name in _REGISTRIES})
            for owner in module.modules()
        ]
        self._tensors = [
            (held, name, value, value._version, value.clone())
            for owner in module.modules()
            for held in (owner._buffers, vars(owner))
            for name, value in held.items()
            if isinstance(value, Tensor) and not value.is_inference() and not isinstance(value, nn.Parameter)
        ]
        self._copies = [
            (vars(owner), name, value.copy())
            for owner in module.modules()
            for name, value in vars(owner).items()
            if type(value) in _CONTAINERS and name not in _OF_TORCH
        ]

    def addresses(self) -> frozenset[int]:
        """Of the tensors, where they have memory."""
        return frozenset(value.data_ptr() for *_, value, _, _ in self._tensors if torch._C._has_storage(value))

    def keep_changed(self) -> None:
        # Running statistics are small, and torch's batch_norm writes to them without counting it as a change.
        self._tensors = [
            (held, name, value, version, before)
            for held, name, value, version, before in self._tensors
            if value.numel() <= _SMALL_NUMEL or held.get(name) is not value or value._version != version
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, all of it is as it was, tensors and containers as copies; what happens to these is forgotten."""
        now = [
            (owner, type(owner), dict(vars(owner)), {name: dict(vars(owner)[name]) for name in _REGISTRIES})
            for owner, *_ in self._owners
        ]
        buffers: list[tuple[Any, str, Any]] = [
            (held, name, held.get(name, _nothing)) for held, name, *_ in self._tensors
        ]
        _put(self._owners)
        for held, name, *_, before in self._tensors:
            held[name] = before.clone()
        for attributes, name, copy in self._copies:
            attributes[name] = copy.copy()
        try:
            yield
        finally:
            _put(now)
            for held, name, value in buffers:
                if value is _nothing:
                    held.pop(name, None)
                else:
                    held[name] = value


_nothing = object()
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def _put(owners: Iterable[tuple[nn.Module, type, dict[str, Any], dict[str, dict[str, Any]]]]) -> None:
    """Gives modules their class, attributes and registered objects."""
    for owner, kind, attributes, registries in owners:
        if type(owner) is not kind:
            owner.__class__ = kind
        _set_items(vars(owner), attributes)
        for name, items in registries.items():
            _set_items(vars(owner)[name], items)


def _set_items(target: dict[str, Any], items: dict[str, Any]) -> None:
    """Makes `target` hold the same objects under the same names as `items`, in their order, where it does not."""
    if len(target) != len(items) or any(target.get(name, _nothing) is not value for name, value in items.items()):
        target.clear()
        target.update(items)


class _Arguments:
    """Arguments of a call as they are before it: containers among them as copies, and versions of tensors inside of these
    or given by name. Those that are given in order are torch's to keep, and to compare."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._args = {at: _copied(value) for at, value in enumerate(args) if type(value) in _NESTED}
        self._kwargs = {name: _copied(value) for name, value in kwargs.items() if type(value) in _NESTED}
        inside = (*self._args.values(), *kwargs.values())
        self._versions = [(each, each._version) for each in tensors_in(inside) if not each.is_inference()]

    def changed(self) -> Tensor | None:
        """A tensor that was written to since."""
        return next((tensor for tensor, version in self._versions if tensor._version != version), None)

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The same arguments, containers as they were before the call."""
        again = [_copied(self._args[at]) if at in self._args else value for at, value in enumerate(args)]
        return again, kwargs | {name: _copied(value) for name, value in self._kwargs.items()}


_NESTED = (list, tuple, dict)


def _copied(value: Any) -> Any:
    """Lists, tuples and dicts, and those inside of them, as new ones with the same contents."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return value


class _Kept:
    """What a call has exchanged with other ranks, for when it is computed again."""

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, int]] = []
        self._given: Iterator[tuple[Tensor, int]] | None = None

    @contextmanager
    def inside(self, *, again: bool) -> Iterator[None]:
        """Inside, `once` keeps results in this, or takes them from it."""
        before = getattr(_of_thread, "kept", None)
        self._given = iter(self._results) if again else None
        _of_thread.kept = self
        try:
            yield
        finally:
            _of_thread.kept = before

    def result(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._given is None:
            result = compute().detach()
            self._results.append((result, result._version))
            return result.detach()
        found = next(self._given, None)
        # What was written to since, in place, is not what was exchanged; it was so on all ranks, which do the same.
        return compute() if found is None or found[0]._version != found[1] else found[0].detach()


@dataclasses.dataclass(frozen=True, slots=True)
class _FirstCall:
    """One call of a unit, for when it is computed again."""

    forward: Call
    held: _Held
    kept: _Kept
    saves: _Saves
    arguments: _Arguments
    changes: dict[str, int]

    def check(self, changes: dict[str, int]) -> None:
        """Raises UsageError (I5).

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
"""Of what a call saves, one tensor in so many is sampled: by turns, so that each has been after as many calls of its unit."""


class _Saves:
    """Samples of what a call saves for the backward: of what it saves last, which depends on nearly all that it computes, and
    by turns of the rest. More would take over a hundredth of a step.

    Args:
        turn: how many calls of the unit there were before.
        buffers: addresses of the module's tensors.
    """

    def __init__(self, turn: int, buffers: frozenset[int]) -> None:
        self._turn = turn
        self._buffers = buffers
        self._last: tuple[_Looks, Tensor, int] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the call computes."""
        before = getattr(_of_thread, "saves", None)
        _of_thread.saves = self
        try:
            yield
        finally:
            _of_thread.saves = before
            last, self._last = self._last, None
        if last is not None:
            looks, tensor, version = last
            # What was written to since it was saved is refused by torch, if it is read.
            looks.sample = sampled(tensor) if tensor._version == version else None

    def come(self, looks: _Looks, tensor: Tensor) -> None:
        """A tensor is saved."""
        base = tensor if tensor._base is None else tensor._base
        if (base.is_leaf and base.requires_grad) or not _is_compared(tensor) or tensor.data_ptr() in self._buffers:
            return  # a weight is compared by its changes (I5); a buffer is another one in the recomputed forward
        self._turn += 1
        if self._turn % _SAMPLES_ONE_IN == 0:
            looks.sample = sampled(tensor)
        self._last = looks, tensor.detach(), tensor._version


class _Looks:
    """What a checkpoint compares of a tensor that a forward saves: shape, dtype, and a sample if `_Saves` has taken one."""

    __slots__ = ("_known", "_tensor", "sample")

    def __init__(self, tensor: Tensor) -> None:
        self._known = tensor.shape, tensor.dtype, tensor.device
        self.sample: int | None = None
        self._tensor = tensor if in_backward() else None
        saves: _Saves | None = getattr(_of_thread, "saves", None)
        if self._tensor is None and saves is not None:
            saves.come(self, tensor)

    def __eq__(self, recomputed: object) -> bool:
        if not isinstance(recomputed, _Looks) or self._known != recomputed._known:
            return False
        tensor = recomputed._tensor
        return tensor is None or self.sample is None or self.sample == sampled(tensor)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self._known}"


def _is_compared(tensor: Tensor) -> bool:
    """Whether it is a plain strided tensor of numbers in RAM. Others are masks, places, and what kernels keep for their
    backward, of which they leave some bytes as they are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and in_ram(tensor)
    return plain and not (tensor.is_nested or tensor.is_quantized or is_fake(tensor) or in_transform())


_SAME_BYTES = "same bytes"
_allowed_determinism_checks_to_fns[_SAME_BYTES] = _Looks

_of_thread = threading.local()


def once(compute: Callable[[], Tensor]) -> Tensor:
    """What an exchange with other ranks results in; inside of a unit that is recomputed, that of its first forward (I4).

    Source: Oases ("Automated Tensor Model Parallelism with Overlapped Communication for Efficient Foundation Model
    Training"), section 3.2, which has each recomputation begin behind an exchange and so keeps what was exchanged. Here a
    unit is recomputed from its input, and what was exchanged within is put in its place.

    Args:
        compute: exchanges; the result is without a graph.
    """
    kept: _Kept | None = getattr(_of_thread, "kept", None)
    return compute() if kept is None else kept.result(compute)


@contextmanager
def none_kept() -> Iterator[None]:
    """Inside, `once` exchanges for something else than the unit's forward, which does not come again with it."""
    before, _of_thread.kept = getattr(_of_thread, "kept", None), None
    try:
        yield
    finally:
        _of_thread.kept = before


class Recompute:
    """Makes calls that are computed again in the backward pass.

    Args:
        root: the module that all units are in.
        starts: is told the index of the unit whose forward is about to be computed again.
        changes: how often each parameter of a module has changed, by name.
    """

    def __init__(
        self,
        root: nn.Module,
        starts: Callable[[int], None],
        changes: Callable[[nn.Module], Callable[[], dict[str, int]]],
    ) -> None:
        self._root = root
        self._starts = starts
        self._changes = changes
        self._last: Unit | None = None
        self._restore: list[Callable[[], None]] = []

    def close(self) -> None:
        """Takes back what was changed of the modules around units."""
        while self._restore:
            self._restore.pop()()

    def of(self, unit: Unit, original: Call | None = None) -> Call:
        """A call of the unit's module that is recomputed in the backward pass.

        Args:
            original: what is called and recomputed; by default the forward of the class that the module has then.
        """
        module = unit.module
        by_itself = _checkpoints_itself(module)
        if by_itself:
            self._tell_models_around(module)
        changes = self._changes(module)
        turns = itertools.count()
        compiled = any(each._compiled_call_impl is not None for each in module.modules())
        # A compiled forward may be computed again by other code than the first, which rounds otherwise.
        check = "default" if compiled else _SAME_BYTES

        def again(first: _FirstCall, *args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                with first.kept.inside(again=False), first.saves.watched():
                    output = first.forward(*args, **kwargs)
                first.held.keep_changed()
                first.changes.update(changes())  # behind it: lock-free units get newer values when they are first read
                return output
            self._last = unit
            self._starts(unit.index)
            first.check(changes())
            args_again, kwargs_again = first.arguments.of(args, kwargs)
            with first.held.as_before(), first.kept.inside(again=True):
                try:
                    return first.forward(*args_again, **kwargs_again)
                except StopIteration as error:  # loops, Lightning's too, would take it for their end
                    raise _differs(unit) from error

        def call(*args: Any, **kwargs: Any) -> Any:
            forward = partial(type(module).forward, module) if original is None else original
            # Inside a user's checkpoint, which recomputes this unit already, it must do the same both times. What a
            # transform computes cannot be computed again outside of it.
            if not torch.is_grad_enabled() or in_backward() or inside_checkpoint() or in_transform():
                return forward(*args, **kwargs)
            if by_itself and module.gradient_checkpointing and module.training:
                return forward(*args, **kwargs)  # the user has switched it on
            held = _Held(module)
            saves = _Saves(next(turns), held.addresses())
            known = _FirstCall(forward, held, _Kept(), saves, _Arguments(args, kwargs), {})
            return checkpoint(again, known, *args, use_reentrant=False, determinism_check=check, **kwargs)

        # Not to be traced as a part of what is compiled around it; what it calls may be.
        return cast(Call, torch.compiler.disable(call, recursive=False))

    def _tell_models_around(self, layer: nn.Module) -> None:
        for module in self._root.modules():
            off = getattr(module, "gradient_checkpointing", None) is False and not _checkpoints_itself(module)
            if off and any(inner is layer for inner in module.modules()):
                self._restore.append(replace(module, gradient_checkpointing=True))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Inside, a backward pass runs.

        Raises:
            UsageError: a unit's recomputed forward differs from the first.
        """
        try:
            yield
        except CheckpointError as error:
            if self._last is None:
                raise  # of a checkpoint of the user's
            raise _differs(self._last) from error
        finally:
            self._last = None


def _differs(unit: Unit) -> UsageError:
    return UsageError(
        f"{unit.name} ({type(unit.module).__name__}) did something else when it was recomputed in the backward pass than in "
        f"its forward, so its activations are not those of the loss; a forward must not depend on what it left behind, such "
        f"as a cache of keys and values (transformers: config.use_cache=False), an iterator or a counter; mend that, or set "
        f"recompute='none'"
    )


def recomputed_units(count: int, every: int) -> frozenset[int]:
    """Of `count` units, those whose activations are recomputed: every so-many-th behind the root; 0: none."""
    return frozenset(index for index in range(1, count) if every and (index - 1) % every == 0)


def recomputed_around(units: Sequence[Unit], recomputed: Collection[int]) -> dict[int, int]:
    """Of units that are parts of recomputed units, the outermost of these, with which they are recomputed.

    Args:
        units: all of a model, in their order: a unit before those inside of it.
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
