"""Turns what autograd and modules do into events: a unit's forward, its backward, the end of a backward pass.

Owns every hook that is put on the user's modules and tensors, and takes them all off again. Knows nothing of tiers.

How far a unit is in a backward pass, and what follows from an event, is calls.py's.

I1: a unit is gathered during its forward, during its recomputed forward, and from the start to the end of its backward.
I2: parameters that autograd saves are named instead of kept (saved_tensors.py); those saved inside a recomputed
forward are not,
so a unit gathered for recompute stays until its backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.runtime.autograd.backward_pass import BackwardListener, BackwardPass
from lightning_ptm.runtime.autograd.call_ends import CallCompletion
from lightning_ptm.runtime.autograd.forward_wrappers import RecomputedForwardWrapper
from lightning_ptm.runtime.autograd.offload import Offload
from lightning_ptm.runtime.autograd.parametrizations import parametrizing_is_no_write
from lightning_ptm.runtime.autograd.recompute import Recompute, replace
from lightning_ptm.runtime.autograd.saved_tensors import SavedTensors, inside_checkpoint
from lightning_ptm.runtime.autograd.submodule_hooks import SubmoduleHooks
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.tensors.autograd_graphs import (
    DERIVATIVES,
    OwnHook,
    in_backward,
    in_derivative,
    not_compiled,
    refuse_derivative,
    refuse_double_backward,
    tensors_in,
)
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.page_views import PageViews
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Phase
from lightning_ptm.torch_internals import CALL, COMPILED_CALL, compiled_call_of, not_traced

_light = not_traced
"""For hooks of each parameter, which nearly always do next to nothing: torch.compile does not trace their own code. What they
call when there is more to do is `not_compiled`, and the way there takes longer than they do."""


def _refuse_elsewhere(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
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
        stream: of the run.
        views: knows whose storage lies where in pages.
        offload: takes activations to RAM; None: they stay.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stores: Sequence[UnitStore],
        executor: Executor,
        listener: BackwardListener,
        recompute: frozenset[int],
        stream: ComputeStream,
        views: PageViews,
        offload: Offload | None = None,
    ) -> None:
        self.stream = stream
        self._units = units
        self._stores = stores
        self._executor = executor
        self._listener = listener
        self._handles: list[Any] = []
        self._restore: list[Callable[[], None]] = []
        self._recompute = Recompute(units[0].module, self._recompute_starts, self._changes_of)
        self._saved = SavedTensors(stores, executor, stream, views, offload)
        names = [unit.name for unit in units]
        self._ends = CallCompletion(units, self._inputs_come, self._inputs_done)
        self._calls = self._ends.calls
        self._pass = BackwardPass(names, executor, listener, self._calls, stream)
        self._submodule_hooks = SubmoduleHooks(
            names, executor, self._before_forward, self._after_forward, self._root_begins, self._root_ends, stream
        )
        try:
            for unit in units:
                self._attach(unit, unit.index in recompute)
        except BaseException:
            self.close()
            raise

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
        self._calls.forget()
        self._pass.give_up()
        self._submodule_hooks.give_up()
        self._saved.abandon()
        self._ends.forget()

    def abandon(self) -> None:
        """An iteration failed half-way: close what is open."""
        self._saved.abandon()
        self._ends.forget()
        self._submodule_hooks.forget()
        self._pass.forget()
        self._calls.forget()

    @contextmanager
    def backward(self, *, by_user: bool = False) -> Iterator[None]:
        """Inside, a backward pass of the whole loss runs; what it has left open is ended after it.

        Args:
            by_user: see BackwardPass.of_the_loss.
        """
        of_the_loss = self._pass.of_the_loss(self._recompute.checked(), by_user=by_user)
        with self._saved.watching(), of_the_loss, parametrizing_is_no_write():
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the user's step runs: what it saves of the root outside any hooked forward is packed by name too."""
        if torch.is_grad_enabled() and self._saved.any_to_name:
            self._saved.begin(0)
        try:
            with self._saved.watching(), parametrizing_is_no_write():
                yield
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" not in str(error):
                raise
            raise UsageError(
                f"{DERIVATIVES} is taken in a step whose weights are fetched and released; use "
                f"torch.autograd.grad(output, inputs), or keep everything in RAM, in a true precision on one rank"
            ) from error
        finally:
            self._saved.end(0)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _attach(self, unit: Unit, recompute: bool) -> None:
        if self._stores[unit.index].elsewhere:
            self._put_around(unit.module, partial(_refuse_elsewhere, unit.name, unit.module))
            return
        if unit.index != 0:
            if recompute:
                self._recompute_calls(unit)
            self._put_around(unit.module, partial(self._call_of_unit, unit.index, unit.module))
        # Where parameters can be read at any time, nobody has to be told that a part of the unit is called by itself.
        if not self._stores[unit.index].readable:
            for owner in self._read_by_themselves(unit):
                self._guard(owner, unit.index)
        for item in unit.parameters:
            if item.parameter.requires_grad:
                self._handles.append(
                    item.parameter.register_post_accumulate_grad_hook(partial(self._gradient_arrived, unit.index))
                )
                self._handles.append(
                    item.parameter.register_hook(partial(self._gradient_comes, unit.index, item.parameter))
                )

    def _read_by_themselves(self, unit: Unit) -> Iterable[nn.Module]:
        """Modules whose calls read the unit's parameters and may be made from outside of its own."""
        if unit.index:
            return [owner for owner in unit.owners if owner is not unit.module]
        # Units whose vectors are the root's may read these in code of their own, or compiled, which nobody hears of.
        blocks = [each.module for each in self._units if len(each.own) > len(each.parameters)]
        return {id(module): module for module in (*unit.owners, *blocks)}.values()

    def _put_around(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Calls of `module` become `call(what they were, *args, **kwargs)`, which is around all hooks, the module's own and
        global ones, whenever they were registered: they read weights (weight_norm, spectral_norm, pruning). It is also around
        what a module compiled in place (`module.compile()`) runs."""
        name = CALL if compiled_call_of(module) is None else COMPILED_CALL
        self._restore.append(replace(module, **{name: partial(call, getattr(module, name))}))

    def _recompute_calls(self, unit: Unit) -> None:
        name = "forward" if compiled_call_of(unit.module) is None else COMPILED_CALL
        original = vars(unit.module).get(name)
        if isinstance(original, RecomputedForwardWrapper):
            recomputed: Callable[..., Any] = original.with_inside(self._recompute.of(unit, original.inside))
        else:
            recomputed = self._recompute.of(unit, original)
        self._restore.append(replace(unit.module, **{name: recomputed}))

    def _changes_of(self, module: nn.Module) -> Callable[[], dict[str, int]]:
        """What tells how often each parameter of a module has changed, by name."""
        inside = {id(parameter) for parameter in module.parameters()}
        places = [
            (binding, slot, place.spec.name)
            for store in self._stores
            for binding in store.bindings
            for slot, place in enumerate(binding.layout.slots)
            if id(binding.parameters[slot]) in inside
        ]
        return lambda: {name: binding.changes[slot] for binding, slot, name in places}

    def _call_of_unit(
        self, index: int, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        call = self._before_forward(index, args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            self._after_forward(index, call, output)
        return output

    def _guard(self, owner: nn.Module, index: int) -> None:
        """A submodule that is called from outside its unit's forward makes a call of its unit by itself."""
        if self._submodule_hooks.own(owner, index):
            self._put_around(owner, partial(self._call_of_owner, owner))

    def _call_of_owner(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # It would cut the compiled code of a unit in two; a call from outside is refused when autograd saves.
            return original(*args, **kwargs)
        self._submodule_hooks.call_begins(module, args)
        output = original(*args, **kwargs)
        self._submodule_hooks.call_ends(module, output)
        return output

    @not_compiled
    @on_compute_stream
    def _before_forward(self, index: int, args: Any, kwargs: Any) -> int | None:
        """Returns the number of the call, if its inputs want gradients."""
        if in_derivative():
            if not self._stores[index].readable:
                refuse_derivative(self._units[index].name)
            return None
        if in_backward():
            self._recompute_starts(index)
            if torch.is_grad_enabled() and not inside_checkpoint():
                self._calls.called_again(index)
                self._ends.watch_inputs(index, args, kwargs)
            return None
        if self._pass.begun and not self._pass.announced:
            self._pass.give_up()  # one of the user's own, which has ended in an error that he caught
        if torch.jit.is_tracing() and not self._stores[index].resident:  # type: ignore[attr-defined]
            raise UsageError(
                f"{self._units[index].name} is traced (torch.jit.trace, or a logger with log_graph=True) while its weights "
                f"are in pages, and the trace would hold their moves; trace the module before or after the run"
            )
        self._executor.enter(index, Phase.FORWARD)
        self._listener.progress()
        if not torch.is_grad_enabled():
            self._ends.call_begins(index)
            self._calls.called_blind(index)
            return None
        if self._saved.hooks_in(index) and not inside_checkpoint():
            self._saved.begin(index)
        return self._ends.watch_inputs(index, args, kwargs)

    def _root_begins(self) -> None:
        self._executor.use(0)
        if torch.is_grad_enabled() and self._saved.any_to_name and not inside_checkpoint():
            self._saved.begin(0)

    def _root_ends(self) -> None:
        self._saved.end(0)
        self._executor.leave(0)

    @not_compiled
    @on_compute_stream
    def _after_forward(self, index: int, call: int | None, output: Any) -> None:
        if in_derivative():
            return
        if in_backward():
            if torch.is_grad_enabled() and not inside_checkpoint():
                self._ends.watch_ways_out(index, None, [each for each in tensors_in(output) if each.requires_grad])
            return
        self._saved.end(index)
        self._executor.leave(index)
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for tensor in outputs:
                tensor.register_hook(OwnHook(self._output_gradient, index))
            self._ends.watch_ways_out(index, call, outputs)

    # -- backward -----------------------------------------------------------------------------------------------------

    @not_compiled
    @on_compute_stream
    def _output_gradient(self, index: int, gradient: Tensor) -> None:
        refuse_double_backward()
        self._pass.start()
        actions = self._calls.output(index)
        self._pass.act(index, actions)
        if actions:
            self._listener.progress()

    @on_compute_stream
    def _recompute_starts(self, index: int) -> None:
        self._pass.start()
        self._pass.act(index, self._calls.recompute(index))

    @not_compiled
    @on_compute_stream
    def _inputs_come(self, index: int, call: int, gradients: Any) -> None:
        # The gradient that ends one unit is what another begins with: there need not be room for the parameters of both. The
        # gradients of the one are laid out when the other has begun, and those before them have left.
        if self._calls.ends_with(index, call):
            self._executor.end_backward(index)

    @not_compiled
    @on_compute_stream
    def _inputs_done(self, index: int, call: int, gradients: Any) -> None:
        self._pass.act(index, self._calls.inputs(index, call))

    @_light
    def _gradient_comes(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.grad is not None:
            self._another_comes(index, parameter)

    @not_compiled
    @on_compute_stream
    def _another_comes(self, index: int, parameter: Tensor) -> None:
        self._pass.start()  # of the user's own: until then `.grad` may be a view of pages, or what a step has used up
        if parameter.grad is not None:
            self._listener.another_gradient(index, parameter)

    @_light
    def _gradient_arrived(self, index: int, parameter: Tensor) -> None:
        if torch.is_grad_enabled() or not (self._pass.begun and self._calls.one_of_many(index)):
            self._gradient_counts(index)

    @not_compiled
    @on_compute_stream
    def _gradient_counts(self, index: int) -> None:
        refuse_double_backward()
        self._pass.start()
        self._pass.act(index, self._calls.gradient(index))
