"""Hooks on modules and autograd, turned into events: a unit's forward, its backward, the end of a backward pass.

Owns every hook on the user's modules and tensors, and removes all of them at the end. Knows nothing of tiers. How far a
unit is in a backward pass, and what follows from an event, is decided in calls.py.

I1: a unit is gathered during its forward, during its recomputed forward, and from the start to the end of its backward.
I2: parameters that autograd saves are packed by name (saved_tensors.py). Parameters saved inside a recomputed forward
    are not, so a unit gathered for recomputation stays gathered until its backward ends.
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
from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.page_views import PageViews
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Phase
from lightning_ptm.torch_internals import CALL, COMPILED_CALL, compiled_call_of, not_traced

_light = not_traced
"""Decorator for the hooks of each parameter, which nearly always return at once.

torch.compile does not trace their own code. What they call when there is more to do is `not_compiled`, whose overhead
is larger than the whole work of these hooks.
"""


def _refuse_remote(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        f"{name} ({type(module).__name__}) was called on a rank that does not hold it, so there are no weights to "
        "compute with; with expert_parallel_size above 1 a layer must call its experts through `expert_group.compute`"
    )


class Hooks:
    """All hooks of one engine.

    Args:
        units, stores: by index of the unit.
        executor: informed of ticks (forwards and backwards of units).
        listener: informed of gradients.
        recompute: indices of the units whose activations are recomputed.
        stream: the run's compute stream.
        views: finds which storages are views of pages.
        offload: moves activations to RAM; None: activations stay on the device.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stores: Sequence[UnitStore],
        executor: Executor,
        listener: BackwardListener,
        recompute: frozenset[int],
        stream: ComputeStream,
        views: PageViews[FlatBinding],
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
        self._completion = CallCompletion(units, self._inputs_ready, self._inputs_done)
        self._calls = self._completion.calls
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
        """Removes every hook; the modules are as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._restore:
            self._restore.pop()()
        self._recompute.close()
        self.abandon()

    def begin_iteration(self) -> None:
        """Forgets calls whose backward never came, and passes and calls that ended in an error which the user caught."""
        self._calls.forget()
        self._pass.give_up()
        self._submodule_hooks.give_up()
        self._saved.abandon()
        self._completion.forget()

    def abandon(self) -> None:
        """Closes what is open, after an iteration failed half-way."""
        self._saved.abandon()
        self._completion.forget()
        self._submodule_hooks.forget()
        self._pass.forget()
        self._calls.forget()

    @contextmanager
    def backward(self, *, by_user: bool = False) -> Iterator[None]:
        """Runs a backward pass of the whole loss in the block, and ends what the pass left open.

        Args:
            by_user: see BackwardPass.of_the_loss.
        """
        of_the_loss = self._pass.of_the_loss(self._recompute.checked(), by_user=by_user)
        with self._saved.watching(), of_the_loss, parametrizing_is_no_write():
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs the user's step in the block.

        Parameters of the root that are saved outside hooked forwards are packed by name too.
        """
        if torch.is_grad_enabled() and self._saved.releases_parameters:
            self._saved.begin(0)
        try:
            with self._saved.watching(), parametrizing_is_no_write():
                yield
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" not in str(error):
                raise
            raise UsageError(
                f"{DERIVATIVES} is taken in a step whose weights are fetched and released, and torch.func does not "
                "support the saved-tensor hooks that this needs; use torch.autograd.grad(output, inputs), or keep "
                "everything in RAM, in a true precision on one rank"
            ) from error
        finally:
            self._saved.end(0)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _attach(self, unit: Unit, recompute: bool) -> None:
        if self._stores[unit.index].elsewhere:
            self._wrap_calls(unit.module, partial(_refuse_remote, unit.name, unit.module))
            return
        if unit.index != 0:
            if recompute:
                self._recompute_calls(unit)
            self._wrap_calls(unit.module, partial(self._call_of_unit, unit.index, unit.module))
        # Calls of parts of the unit matter only if its parameters cannot be read at any time.
        if not self._stores[unit.index].readable:
            for owner in self._separately_called(unit):
                self._guard(owner, unit.index)
        for item in unit.parameters:
            if item.parameter.requires_grad:
                self._handles.append(
                    item.parameter.register_post_accumulate_grad_hook(partial(self._after_accumulation, unit.index))
                )
                self._handles.append(
                    item.parameter.register_hook(partial(self._before_accumulation, unit.index, item.parameter))
                )

    def _separately_called(self, unit: Unit) -> Iterable[nn.Module]:
        """Modules whose calls read the unit's parameters and may come from outside the unit's forward."""
        if unit.index:
            return [owner for owner in unit.owners if owner is not unit.module]
        # Units whose small vectors belong to the root may read them in their own or in compiled code, which triggers no
        # hook of the vectors' owners.
        blocks = [each.module for each in self._units if len(each.own) > len(each.parameters)]
        return {id(module): module for module in (*unit.owners, *blocks)}.values()

    def _wrap_calls(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Replaces calls of `module` by `call(original, *args, **kwargs)`, around all hooks of the module and global
        hooks.

        Hooks registered at any time are inside, since hooks may read weights (weight_norm, spectral_norm, pruning). The
        wrapper is also around the code of a module that was compiled in place (`module.compile()`).
        """
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
        """Returns a function that gives, by name, how often each parameter of a module has changed."""
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
        """Makes each call of a submodule from outside its unit's forward count as a call of the unit."""
        if self._submodule_hooks.add_owner(owner, index):
            self._wrap_calls(owner, partial(self._call_of_owner, owner))

    def _call_of_owner(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # A guard would be a graph break in a compiled unit. A call from outside is refused when autograd saves its
            # parameters.
            return original(*args, **kwargs)
        self._submodule_hooks.call_begins(module, args)
        output = original(*args, **kwargs)
        self._submodule_hooks.call_ends(module, output)
        return output

    @not_compiled
    @on_compute_stream
    def _before_forward(self, index: int, args: Any, kwargs: Any) -> int | None:
        """Begins a call of a unit. Returns the number of the call if some inputs require gradients."""
        if in_derivative():
            if not self._stores[index].readable:
                refuse_derivative(self._units[index].name)
            return None
        if in_backward():
            self._recompute_starts(index)
            if torch.is_grad_enabled() and not inside_checkpoint():
                self._calls.blind_call_recomputed(index)
                self._completion.watch_inputs(index, args, kwargs)
            return None
        if self._pass.begun and not self._pass.announced:
            self._pass.give_up()  # a pass that the user ran, and that ended in an error which the user caught
        if torch.jit.is_tracing() and not self._stores[index].resident:  # type: ignore[attr-defined]
            raise UsageError(
                f"{self._units[index].name} is traced (torch.jit.trace, or a logger with log_graph=True) while its "
                "weights are in pages, so the trace would contain fetches and releases of pages; trace the module "
                "before or after the run"
            )
        self._executor.enter(index, Phase.FORWARD)
        self._listener.progress()
        if not torch.is_grad_enabled():
            self._completion.call_begins(index)
            self._calls.called_blind(index)
            return None
        if self._saved.needs_hooks(index) and not inside_checkpoint():
            self._saved.begin(index)
        return self._completion.watch_inputs(index, args, kwargs)

    def _root_begins(self) -> None:
        self._executor.use(0)
        if torch.is_grad_enabled() and self._saved.releases_parameters and not inside_checkpoint():
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
                self._completion.watch_graph_exits(
                    index, None, [each for each in tensors_in(output) if each.requires_grad]
                )
            return
        self._saved.end(index)
        self._executor.leave(index)
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for tensor in outputs:
                tensor.register_hook(OwnHook(self._output_gradient, index))
            self._completion.watch_graph_exits(index, call, outputs)

    # -- backward ------------------------------------------------------------------------------------------------------

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
    def _inputs_ready(self, index: int, call: int, gradients: Any) -> None:
        # The gradient that ends one unit starts the backward of another, and there need not be room for the parameters
        # of both. So the leases are returned here; the first unit's gradients are collected after the second has begun.
        if self._calls.ends_with(index, call):
            self._executor.end_backward(index)

    @not_compiled
    @on_compute_stream
    def _inputs_done(self, index: int, call: int, gradients: Any) -> None:
        self._pass.act(index, self._calls.inputs(index, call))

    @_light
    def _before_accumulation(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.grad is not None:
            self._before_further_gradient(index, parameter)

    @not_compiled
    @on_compute_stream
    def _before_further_gradient(self, index: int, parameter: Tensor) -> None:
        # for a pass that the user runs: before, `.grad` may show pages, or a gradient that a step has used
        self._pass.start()
        if parameter.grad is not None:
            self._listener.another_gradient(index, parameter)

    @_light
    def _after_accumulation(self, index: int, parameter: Tensor) -> None:
        if torch.is_grad_enabled() or not (self._pass.begun and self._calls.count_if_idle(index)):
            self._count_gradient(index)

    @not_compiled
    @on_compute_stream
    def _count_gradient(self, index: int) -> None:
        refuse_double_backward()
        self._pass.start()
        self._pass.act(index, self._calls.gradient(index))
