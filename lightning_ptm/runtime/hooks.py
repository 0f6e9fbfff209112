"""Turns what autograd and modules do into events: a unit's forward, its backward, the end of a backward pass.

Owns every hook that is put on the user's modules and tensors, and takes them all off again. Knows nothing of tiers.

How the end of a unit's backward is known: all its parameters that require a gradient have got theirs, and the gradients
of all its inputs have been computed (a frozen weight may be needed for an input's gradient after the last parameter's).
What never completes (an unused parameter) is ended with the whole backward pass. Under a reentrant checkpoint a unit's
forward runs without gradients first: its backward has not ended before each such call has been recomputed.

I1: a unit is gathered during its forward, during its recomputed forward, and from the start to the end of its backward.
I2: parameters that autograd saves are named instead of kept (saved.py); those saved inside a recomputed forward are not,
so a unit gathered for recompute stays until its backward ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.closed import COPIED_IN_A_RUN
from lightning_ptm.runtime.executor import Executor
from lightning_ptm.runtime.offload import Offload
from lightning_ptm.runtime.recompute import Recompute, in_backward, replace
from lightning_ptm.runtime.saved import SavedTensors, inside_checkpoint
from lightning_ptm.runtime.store import UnitStore
from lightning_ptm.runtime.units import Unit
from lightning_ptm.terms import Phase

_not_compiled = partial(
    torch.compiler.disable, reason="angel_ptm fetches weights here; compile units (a transformer's blocks) one by one"
)
"""torch.compile must neither trace a hook nor remember what it did: the compiled code is cut in two around it."""


class BackwardListener(Protocol):
    """Who is told of the backward pass."""

    def backward_begins(self) -> None:
        """A backward pass has begun, which nobody has announced."""

    def unit_backward_ended(self, unit: int) -> None:
        """All gradients of `unit` that this backward pass computes are in its parameters' `.grad`."""

    def backward_ended(self) -> None:
        """The backward pass is over; every unit has been ended."""

    def progress(self) -> None:
        """A good moment for work in the background to be moved on."""


@dataclasses.dataclass(slots=True)
class _Watch:
    """Progress of one unit through the backward pass."""

    due: int = 0
    """Parameters whose gradient is still to come."""
    open_calls: int = 0
    """Forward calls whose inputs' gradients are still to come."""
    blind_calls: int = 0
    """Forward calls without gradients, which a reentrant checkpoint may still recompute."""
    active: bool = False
    using: bool = False
    """`executor.enter` has been called for the backward and `leave` has not."""
    ended: bool = False
    recomputed: bool = False
    reentrant: bool = False


_DERIVATIVES = "a derivative of torch.func (grad, vjp, jvp, jacrev, hessian...)"


@torch.compiler.disable
def _in_derivative() -> bool:
    """Whether this is computed inside of a derivative of torch.func, which autograd's hooks hear nothing of."""
    stack = torch._C._functorch.get_interpreter_stack() if torch._C._functorch.maybe_current_level() else None
    kinds = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return stack is not None and any(each.key() in kinds for each in stack)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def _refuse_absent(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        f"{name} ({type(module).__name__}) was called on a rank that does not hold it, so there are no weights to compute "
        f"with; with expert_parallel_size above 1 a layer calls its experts through `expert_group.compute`"
    )


class Hooks:
    """All hooks of one engine.

    Args:
        units, stores: by index.
        executor: is told of ticks.
        listener: is told of gradients.
        recompute: indices of the units whose activations are recomputed.
        offload: takes activations to RAM; None: they stay.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stores: Sequence[UnitStore],
        executor: Executor,
        listener: BackwardListener,
        recompute: frozenset[int],
        offload: Offload | None = None,
    ) -> None:
        self._units = units
        self._stores = stores
        self._executor = executor
        self._listener = listener
        self._handles: list[Any] = []
        self._restore: list[Callable[[], None]] = []
        self._recompute = Recompute(units[0].module, self._recompute_starts)
        self._saved = SavedTensors(stores, executor, offload)
        self._owned: dict[int, list[int]] = {}
        self._guarded: list[tuple[int, nn.Module]] = []
        self._input_hooks: list[RemovableHandle] = []
        self._watches = [_Watch() for _ in units]
        self._in_pass = False
        self._wrapped = False
        self.copyable = all(store.readable for store in stores) and not recompute and offload is None
        """Whether a copy of a module may be made: its parameters can be read at any time, and calls need nothing of ours."""
        for unit in units:
            self._attach(unit, unit.index in recompute)

    def __reduce__(self) -> tuple[Any, ...]:
        # Modules hold these hooks, so copy.deepcopy and pickle of a module in a run come here.
        if not self.copyable:
            raise UsageError(COPIED_IN_A_RUN)
        return _OfACopy, ()

    def close(self) -> None:
        """Takes every hook off; the modules are as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._restore:
            self._restore.pop()()
        self._recompute.close()
        self.abandon()

    def begin_iteration(self) -> None:
        """Forgets calls whose backward never came, and what ended in an error which the user caught."""
        for index, watch in enumerate(self._watches):
            if self._in_pass and watch.using:
                watch.using = False
                self._executor.leave(index)
            watch.open_calls = watch.blind_calls = 0
            watch.recomputed = False
        self._in_pass = self._wrapped = False
        self._executor.computation_ends(Phase.BACKWARD)
        for index, _ in self._guarded:
            self._executor.leave(index)
        self._guarded = []
        self._saved.abandon()
        self._forget_inputs()

    def abandon(self) -> None:
        """An iteration failed half-way: close what is open."""
        self._saved.abandon()
        self._forget_inputs()
        self._guarded = []
        self._in_pass = False
        self._wrapped = False
        self._watches = [_Watch() for _ in self._units]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, a backward pass of the whole loss runs; what it has left open is ended after it."""
        self._wrapped = True
        self._start_pass()
        with self._recompute.checked():
            yield
        self._wrapped = False
        if self._in_pass:
            self._finish_pass()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the user's step runs: what it saves of the root outside any hooked forward is packed by name too."""
        if torch.is_grad_enabled() and self._saved.any_to_name:
            self._saved.begin(0)
        try:
            yield
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" not in str(error):
                raise
            raise UsageError(
                f"{_DERIVATIVES} is taken in a step whose weights are fetched and released; use "
                f"torch.autograd.grad(output, inputs), or keep everything in RAM, in a true precision on one rank"
            ) from error
        finally:
            self._saved.end(0)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _attach(self, unit: Unit, recompute: bool) -> None:
        if self._stores[unit.index].absent:
            self._put_around(unit.module, partial(_refuse_absent, unit.name, unit.module))
            return
        if unit.index != 0:
            if recompute:
                self._recompute_calls(unit)
            self._put_around(unit.module, partial(self._call_of_unit, unit.index, unit.module))
        # Where parameters can be read at any time, nobody has to be told that a part of the unit is called by itself.
        if not self._stores[unit.index].readable:
            for owner in unit.owners:
                if owner is not unit.module or unit.index == 0:
                    self._guard(owner, unit.index)
        for item in unit.parameters:
            if item.parameter.requires_grad:
                self._handles.append(
                    item.parameter.register_post_accumulate_grad_hook(partial(self._gradient_arrived, unit.index))
                )

    def _put_around(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Calls of `module` become `call(what they were, *args, **kwargs)`, which is around all hooks, the module's own and
        global ones, whenever they were registered: they read weights (weight_norm, spectral_norm, pruning). It is also around
        what a module compiled in place (`module.compile()`) runs."""
        name = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"
        self._restore.append(replace(module, **{name: partial(call, getattr(module, name))}))

    def _recompute_calls(self, unit: Unit) -> None:
        name = "forward" if unit.module._compiled_call_impl is None else "_compiled_call_impl"
        original = getattr(unit.module, name)
        self._restore.append(replace(unit.module, **{name: self._recompute.of(unit, original)}))

    def _call_of_unit(
        self, index: int, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._before_forward(index, module, args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            self._after_forward(index, module, args, kwargs, output)
        return output

    def _guard(self, owner: nn.Module, index: int) -> None:
        """A submodule that is called from outside its unit's forward makes a call of its unit by itself."""
        known = self._owned.setdefault(id(owner), [])
        known.append(index)
        if len(known) == 1:
            self._put_around(owner, partial(self._call_of_owner, owner))

    def _call_of_owner(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # It would cut the compiled code of a unit in two; a call from outside is refused when autograd saves.
            return original(*args, **kwargs)
        for index in self._owned[id(module)]:
            self._guard_starts(index, module, args)
        output = original(*args, **kwargs)
        self._guard_ends(module, args, output)
        return output

    def _guard_starts(self, index: int, module: nn.Module, args: Any) -> None:
        if _in_derivative():
            self._refuse_derivative(index)
        store = self._stores[index]
        if store.users:
            return
        if store.held:
            self._executor.require(index)
        elif index == 0:
            self._executor.hold(0)  # outside an iteration: it stays until the next one ends
        else:
            self._before_forward(index, module, args, {})
            if not in_backward():
                self._guarded.append((index, module))
        if index == 0 and not self._executor.computing:
            self._executor.use(0)
            self._guarded.append((0, module))

    def _guard_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._guarded and self._guarded[-1][1] is module and not in_backward():
            index, _ = self._guarded.pop()
            if index == 0:
                self._executor.leave(0)
            else:
                self._after_forward(index, module, args, {}, output)

    @_not_compiled
    def _before_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_derivative() and (self._stores[index].readable or self._refuse_derivative(index)):
            return
        watch = self._watches[index]
        if in_backward():
            self._recompute_starts(index)
            if torch.is_grad_enabled() and not inside_checkpoint():
                watch.blind_calls -= 1
                if watch.reentrant:
                    watch.due += self._trained(index)  # each call has a backward of its own, with gradients for all
                watch.reentrant = True
                self._watch_inputs(index, args, kwargs)
            return
        if torch._C._get_tracing_state() is not None and not self._stores[index].resident:
            raise UsageError(
                f"{self._units[index].name} is traced (torch.jit.trace, or a logger with log_graph=True) while its weights "
                f"are in pages, and the trace would hold their moves; trace the module before or after the run"
            )
        self._executor.enter(index, Phase.FORWARD)
        self._listener.progress()
        if not torch.is_grad_enabled():
            watch.blind_calls += 1
            return
        if self._saved.hooks_in(index) and not inside_checkpoint():
            self._saved.begin(index)
        self._watch_inputs(index, args, kwargs)

    def _refuse_derivative(self, index: int) -> NoReturn:
        raise UsageError(
            f"{self._units[index].name or 'the root'} is called inside of {_DERIVATIVES}, which keeps its weights for longer "
            f"than its pages are there; use torch.autograd.grad(output, inputs), or keep everything in RAM, in a true "
            f"precision on one rank"
        )

    def _watch_inputs(self, index: int, args: Any, kwargs: Any) -> None:
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if inputs:
            self._watches[index].open_calls += 1
            done = partial(self._inputs_done, index)
            self._input_hooks.append(torch.autograd.graph.register_multi_grad_hook(inputs, done, mode="all"))

    def _forget_inputs(self) -> None:
        # A hook over several inputs holds the nodes of all of them, and each node holds the hook. Where units share an input
        # (a bias, an encoder's output) Python's collector cannot see through such a cycle: every graph would stay for ever.
        for handle in self._input_hooks:
            handle.remove()
        self._input_hooks = []

    @_not_compiled
    def _after_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or _in_derivative():
            return
        self._saved.end(index)
        self._executor.leave(index)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._output_gradient, index))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _start_pass(self) -> None:
        if self._in_pass:
            return
        self._in_pass = True
        self._executor.computation_begins(Phase.BACKWARD)
        for index, watch in enumerate(self._watches):
            watch.due = self._trained(index)
            watch.active = watch.using = watch.ended = watch.reentrant = False
        if not self._wrapped:
            self._listener.backward_begins()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)
        self._enter_backward(0)

    def _trained(self, index: int) -> int:
        return sum(item.parameter.requires_grad for item in self._units[index].parameters)

    @staticmethod
    def _refuse_double_backward() -> None:
        # Gradients run with grad mode off unless create_graph is set (a recomputed forward turns it on for itself).
        if torch.is_grad_enabled():
            raise UsageError(
                "backward with create_graph=True (double backward) was started; a unit's parameters may be released "
                "before the second pass reads them, so this is refused; compute that loss in a module outside this "
                "strategy, or use a strategy that keeps all parameters in place"
            )

    def _enter_backward(self, index: int) -> None:
        watch = self._watches[index]
        watch.active = watch.using = True
        self._executor.enter(index, Phase.BACKWARD)

    @_not_compiled
    def _output_gradient(self, index: int, gradient: Tensor) -> None:
        self._refuse_double_backward()
        self._start_pass()
        watch = self._watches[index]
        if not watch.active:
            self._enter_backward(index)
            self._listener.progress()

    def _recompute_starts(self, index: int) -> None:
        self._start_pass()
        watch = self._watches[index]
        watch.recomputed = True
        if not watch.using:
            self._executor.hold(index)

    @_not_compiled
    def _inputs_done(self, index: int, gradients: Any) -> None:
        watch = self._watches[index]
        watch.open_calls -= 1
        if watch.open_calls > 0:
            return
        if watch.due > 0 and watch.using and not watch.recomputed and index != 0:
            # Some parameter may get no gradient at all; do not hold the pages for it (a late reader fetches again).
            watch.using = False
            self._executor.leave(index)
        self._maybe_end(index)

    @_not_compiled
    def _gradient_arrived(self, index: int, parameter: Tensor) -> None:
        self._refuse_double_backward()
        self._start_pass()
        watch = self._watches[index]
        if watch.ended:
            raise UsageError(
                f"a gradient arrived for unit {self._units[index].name or 'root'} after its backward had ended; the unit "
                f"is used in a way that two graphs share it; set update_in_backward=False and report this"
            )
        watch.active = True
        watch.due -= 1
        self._maybe_end(index)

    def _maybe_end(self, index: int) -> None:
        watch = self._watches[index]
        waits = watch.open_calls > 0 or watch.blind_calls > 0
        if index != 0 and watch.due == 0 and waits and watch.using and not watch.recomputed:
            # An input that other units use too (an encoder's output) has its whole gradient only when they are done, and a
            # reentrant checkpoint may still compute a call again: do not hold the pages until then. A late reader fetches
            # again.
            watch.using = False
            self._executor.leave(index)
            return
        # The root computes before and after all others: it ends with the pass.
        if index != 0 and watch.active and not watch.ended and watch.due == 0 and not waits:
            self._end_unit(index)

    def _end_unit(self, index: int) -> None:
        watch = self._watches[index]
        watch.ended = True
        if watch.using:
            watch.using = False
            self._executor.leave(index)
        self._stores[index].held = False
        self._listener.unit_backward_ended(index)

    @_not_compiled
    def _finish_pass(self) -> None:
        if not self._in_pass:
            return
        for index in reversed(range(len(self._units))):
            if self._watches[index].active and not self._watches[index].ended:
                self._end_unit(index)
        self._in_pass = False
        self._executor.computation_ends(Phase.BACKWARD)
        self._listener.backward_ended()


class _OfACopy(Hooks):
    """What a copy of a module has in their place: its calls are what they were, and nobody hears of them."""

    def __init__(self) -> None:
        self.copyable = True

    def _before_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        return None

    def _after_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        return None
