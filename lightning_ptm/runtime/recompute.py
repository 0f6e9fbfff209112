"""Units whose activations are recomputed in the backward pass: what is put in place of their forward.

Owns torch's checkpoints around units. Knows nothing of pages; who is told that a recomputed forward starts gathers them.

I1: what a checkpoint of the user's recomputes already is recomputed once, not twice.
I2: a forward that does not repeat itself is refused with the name of its unit.
I3: buffers that a forward changes (running statistics, the vectors of a spectral norm) are for the recomputed forward what
they were for the first, and are changed once. I4: what ranks have exchanged in a forward (`once`) is kept, and not exchanged
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.saved import inside_checkpoint
from lightning_ptm.runtime.units import Unit

Call = Callable[..., Any]

_SMALL_NUMEL = 1 << 14
"""Buffers of no more elements are kept for a recomputed forward whether it is known that they change or not."""

_SELF_CHECKPOINTING = "GradientCheckpointingLayer"
"""Base class of transformers' layers. They can checkpoint themselves (`gradient_checkpointing`), and where the models
around them are told of it, these fill no cache of keys and values, which a recomputed forward would fill twice."""


@torch.compiler.disable
def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


@torch.compiler.disable
def in_transform() -> bool:
    """Whether this is computed inside of a transform of torch.func, such as vmap."""
    return bool(torch._C._functorch.maybe_current_level() is not None)


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


class _Buffers:
    """A module's buffers as they are before a call; after `keep_changed`, of large ones those that it has changed only."""

    def __init__(self, module: nn.Module) -> None:
        self._known = [
            (owner, name, buffer, buffer._version, buffer.clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def keep_changed(self) -> None:
        # Running statistics are small, and torch's batch_norm writes to them without counting it as a change.
        self._known = [
            (owner, name, buffer, version, before)
            for owner, name, buffer, version, before in self._known
            if buffer.numel() <= _SMALL_NUMEL or owner._buffers.get(name) is not buffer or buffer._version != version
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, they have their old values, in memory of their own; what happens to these is forgotten."""
        now = [(owner, name, owner._buffers.get(name)) for owner, name, *_ in self._known]
        for owner, name, _, _, before in self._known:
            owner._buffers[name] = before.clone()
        try:
            yield
        finally:
            for owner, name, buffer in now:
                owner._buffers[name] = buffer


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
    """

    def __init__(self, root: nn.Module, starts: Callable[[int], None]) -> None:
        self._root = root
        self._starts = starts
        self._last: Unit | None = None
        self._restore: list[Callable[[], None]] = []

    def close(self) -> None:
        """Takes back what was changed of the modules around units."""
        while self._restore:
            self._restore.pop()()

    def of(self, unit: Unit, original: Call) -> Call:
        """`original`, a call of the unit's module, recomputed in the backward pass."""
        module = unit.module
        by_itself = _checkpoints_itself(module)
        if by_itself:
            self._tell_models_around(module)

        def again(buffers: _Buffers, kept: _Kept, *args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                with kept.inside(again=False):
                    output = original(*args, **kwargs)
                buffers.keep_changed()
                return output
            self._last = unit
            self._starts(unit.index)
            with buffers.as_before(), kept.inside(again=True):
                try:
                    return original(*args, **kwargs)
                except StopIteration as error:  # loops, Lightning's too, would take it for their end
                    raise _differs(unit) from error

        def call(*args: Any, **kwargs: Any) -> Any:
            # Inside a user's checkpoint, which recomputes this unit already, it must do the same both times. What a
            # transform computes cannot be computed again outside of it.
            if not torch.is_grad_enabled() or in_backward() or inside_checkpoint() or in_transform():
                return original(*args, **kwargs)
            if by_itself and module.gradient_checkpointing and module.training:
                return original(*args, **kwargs)  # the user has switched it on
            return checkpoint(again, _Buffers(module), _Kept(), *args, use_reentrant=False, **kwargs)

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
