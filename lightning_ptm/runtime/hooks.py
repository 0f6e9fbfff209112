"""Turns what autograd and modules do into events: a unit's forward, its backward, the end of a backward pass.

Owns every hook that is put on the user's modules and tensors, and takes them all off again. Knows nothing of tiers.

How far a unit is in a backward pass, and what follows from an event, is calls.py's.

I1: a unit is gathered during its forward, during its recomputed forward, and from the start to the end of its backward.
I2: parameters that autograd saves are named instead of kept (saved.py); those saved inside a recomputed forward are not,
so a unit gathered for recompute stays until its backward ends.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.runtime.calls import Action, Calls
from lightning_ptm.runtime.closed import COPIED_IN_A_RUN
from lightning_ptm.runtime.executor import Executor
from lightning_ptm.runtime.forwards import AroundRecomputed
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


_light = skip
"""For hooks of each parameter, which nearly always do next to nothing: torch.compile does not trace their own code. What they
call when there is more to do is `_not_compiled`, and the way there takes longer than they do."""


class BackwardListener(Protocol):
    """Who is told of the backward pass."""

    def backward_begins(self) -> None:
        """A backward pass has begun, which nobody has announced."""

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """A further gradient is about to be added to a parameter's `.grad`, in this pass."""

    def unit_backward_ended(self, unit: int) -> None:
        """All gradients of `unit` that this backward pass computes are in its parameters' `.grad`."""

    def backward_ended(self) -> None:
        """The backward pass is over; every unit has been ended."""

    def progress(self) -> None:
        """A good moment for work in the background to be moved on."""


_OPAQUE = (str, int, float, type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, partial)
"""Kinds of arguments that hold no tensors of a call."""

_DERIVATIVES = "a derivative of torch.func (grad, vjp, jvp, jacrev, hessian...)"


def _in_derivative() -> bool:
    """Whether this is computed inside of a derivative of torch.func, which autograd's hooks hear nothing of. Not to be asked
    where torch.compile traces."""
    stack = torch._C._functorch.get_interpreter_stack() if torch._C._functorch.maybe_current_level() else None
    kinds = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return stack is not None and any(each.key() in kinds for each in stack)


def tensors_in(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples, dicts, dataclasses and other objects, but modules; out of vmap's wrappers."""
    if isinstance(value, Tensor):
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        yield value
        return
    seen = {} if seen is None else seen
    if isinstance(value, _OPAQUE) or id(value) in seen:
        return
    seen[id(value)] = value  # which keeps its id from others
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__"):
        items = tuple(vars(value).values())
    for item in items:
        yield from tensors_in(item, seen)


class _Ours(partial[Any]):
    """A hook of ours on a tensor."""


def others_hear_of(tensor: Tensor) -> bool:
    """Whether somebody else is to get a tensor's gradient (`register_hook`, `retain_grad`). Hooks over several tensors, ours
    among them, change no gradient and do not count."""
    hooks = (tensor._backward_hooks or {}).values()
    return tensor.retains_grad or any(
        not isinstance(each, _Ours) and getattr(each, "__module__", "") != torch.autograd.graph.__name__
        for each in hooks
    )


def _before_outputs(tensor: Tensor, key: int) -> None:
    """A hook on what a unit takes is called before those on it as what another unit gave, which were there first."""
    hooks = tensor._backward_hooks
    assert hooks is not None
    ids = list(hooks)
    first = next((place for place, each in enumerate(ids) if isinstance(hooks[each], _Ours)), len(ids))
    for each in ids[first:]:
        if each != key:
            hooks[each] = hooks.pop(each)


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
        offload: takes activations to RAM; None: they stay.
    """

    of_a_copy = False
    """Nobody hears of calls."""

    def __init__(
        self,
        units: Sequence[Unit],
        stores: Sequence[UnitStore],
        executor: Executor,
        listener: BackwardListener,
        recompute: frozenset[int],
        stream: ComputeStream,
        offload: Offload | None = None,
    ) -> None:
        self.stream = stream
        self._units = units
        self._stores = stores
        self._executor = executor
        self._listener = listener
        self._handles: list[Any] = []
        self._restore: list[Callable[[], None]] = []
        self._recompute = Recompute(units[0].module, self._recompute_starts)
        self._saved = SavedTensors(stores, executor, stream, offload)
        self._owned: dict[int, list[int]] = {}
        self._guarded: list[tuple[int, nn.Module, int | None]] = []
        self._input_hooks: list[RemovableHandle] = []
        self._nodes: dict[int, tuple[Any, ...]] = {}
        """By number of a call, nodes of its graph by which autograd tells whether a pass goes through it."""
        self._began: dict[int, int] = {}
        """By unit, how many nodes of graphs there were when its last call began."""
        self._inside = [frozenset(map(id, unit.module.parameters())) for unit in units]
        self._calls = Calls(len(units), self._trained, self._takes_part)
        self._in_pass = False
        self._wrapped = False
        self._plain_calls = not recompute and offload is None
        self.copyable = all(store.readable for store in stores) and self._plain_calls
        """Whether a copy of a module may be made: its parameters can be read at any time, and calls need nothing of ours."""
        try:
            for unit in units:
                self._attach(unit, unit.index in recompute)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Inside, parameters are in the user's hands: these can be copied, and so can modules that have no others."""
        before, self.copyable = self.copyable, self.copyable or self._plain_calls
        try:
            yield
        finally:
            self.copyable = before

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
        self._calls.forget()
        self._give_pass_up()
        for index, *_ in self._guarded:
            self._executor.leave(index)
        self._guarded = []
        self._saved.abandon()
        self._forget_inputs()

    def _give_pass_up(self) -> None:
        """A backward pass, if one is in progress, is over in its middle."""
        for unit in self._units:
            self._executor.leave_backward(unit.index)
        self._in_pass = self._wrapped = False
        self._executor.computation_ends(Phase.BACKWARD)

    def abandon(self) -> None:
        """An iteration failed half-way: close what is open."""
        self._saved.abandon()
        self._forget_inputs()
        self._guarded = []
        self._in_pass = False
        self._wrapped = False
        self._calls.forget()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, a backward pass of the whole loss runs; what it has left open is ended after it."""
        self._wrapped = True
        self._start_pass()
        try:
            with self._recompute.checked():
                yield
        except BaseException:  # which the step may survive, and go on with another pass
            self._give_pass_up()
            raise
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
        name = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"
        self._restore.append(replace(module, **{name: partial(call, getattr(module, name))}))

    def _recompute_calls(self, unit: Unit) -> None:
        name = "forward" if unit.module._compiled_call_impl is None else "_compiled_call_impl"
        original = getattr(unit.module, name)
        if isinstance(original, AroundRecomputed):
            recomputed: Callable[..., Any] = original.with_inside(self._recompute.of(unit, original.inside))
        else:
            recomputed = self._recompute.of(unit, original)
        self._restore.append(replace(unit.module, **{name: recomputed}))

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
        known = self._owned.setdefault(id(owner), [])
        known.append(index)
        if len(known) == 1:
            self._put_around(owner, partial(self._call_of_owner, owner))

    def _call_of_owner(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.of_a_copy:
            return original(*args, **kwargs)
        if torch.compiler.is_compiling():
            # It would cut the compiled code of a unit in two; a call from outside is refused when autograd saves.
            return original(*args, **kwargs)
        for index in self._owned[id(module)]:
            self._guard_starts(index, module, args)
        output = original(*args, **kwargs)
        self._guard_ends(module, output)
        return output

    @on_compute_stream
    def _guard_starts(self, index: int, module: nn.Module, args: Any) -> None:
        if _in_derivative():
            self._refuse_derivative(index)
        if self._executor.used(index):
            return
        if self._executor.held(index):
            self._executor.read_held(index)
        elif index == 0:
            self._executor.hold(0)  # outside an iteration: it stays until the next one ends
        else:
            call = self._before_forward(index, args, {})
            if not in_backward():
                self._guarded.append((index, module, call))
        if index == 0 and not self._executor.computing:
            self._executor.use(0)
            self._guarded.append((0, module, None))

    def _guard_ends(self, module: nn.Module, output: Any) -> None:
        while self._guarded and self._guarded[-1][1] is module and not in_backward():
            index, _, call = self._guarded.pop()
            if index == 0:
                self._executor.leave(0)
            else:
                self._after_forward(index, call, output)

    @_not_compiled
    @on_compute_stream
    def _before_forward(self, index: int, args: Any, kwargs: Any) -> int | None:
        """Returns the number of the call, if its inputs want gradients."""
        if _in_derivative() and (self._stores[index].readable or self._refuse_derivative(index)):
            return None
        if in_backward():
            self._recompute_starts(index)
            if torch.is_grad_enabled() and not inside_checkpoint():
                self._calls.called_again(index)
                self._began[index] = torch._C._autograd._get_sequence_nr()
                self._watch_inputs(index, args, kwargs)
            return None
        if self._in_pass and not self._wrapped:
            self._give_pass_up()  # one of the user's own, which has ended in an error that he caught
        if torch._C._get_tracing_state() is not None and not self._stores[index].resident:
            raise UsageError(
                f"{self._units[index].name} is traced (torch.jit.trace, or a logger with log_graph=True) while its weights "
                f"are in pages, and the trace would hold their moves; trace the module before or after the run"
            )
        self._executor.enter(index, Phase.FORWARD)
        self._listener.progress()
        self._began[index] = torch._C._autograd._get_sequence_nr()
        if not torch.is_grad_enabled():
            self._calls.called_blind(index)
            return None
        if self._saved.hooks_in(index) and not inside_checkpoint():
            self._saved.begin(index)
        return self._watch_inputs(index, args, kwargs)

    def _refuse_derivative(self, index: int) -> NoReturn:
        raise UsageError(
            f"{self._units[index].name or 'the root'} is called inside of {_DERIVATIVES}, which keeps its weights for longer "
            f"than its pages are there; use torch.autograd.grad(output, inputs), or keep everything in RAM, in a true "
            f"precision on one rank"
        )

    def _watch_inputs(self, index: int, args: Any, kwargs: Any) -> int | None:
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return None
        call = self._calls.called(index)
        self._nodes[call] = _nodes_of(inputs)
        # autograd.grad refuses to say whether it comes to a leaf: where there are no others, the call ends with the pass.
        # What a reentrant checkpoint calls with are leaves, too, and come in a backward pass of its own.
        told_of = [tensor for tensor in inputs if in_backward() or not tensor.is_leaf]
        if told_of:
            done, come = partial(self._inputs_done, index, call), partial(self._inputs_come, index, call)
            self._input_hooks.append(torch.autograd.graph.register_multi_grad_hook(told_of, done, mode="all"))
            first: Any = torch.autograd.graph.register_multi_grad_hook(told_of, come, mode="all")
            for tensor, each in zip(told_of, first.handles, strict=True):
                _before_outputs(tensor, each.id)
            self._input_hooks.append(first)
        return call

    def _takes_part(self, call: int) -> bool:
        """Whether the backward pass in progress, in this thread, may go through a call."""
        nodes = self._nodes[call]
        return not nodes or any(map(torch._C._will_engine_execute_node, nodes))

    def _forget_inputs(self) -> None:
        # A hook over several inputs holds the nodes of all of them, and each node holds the hook. Where units share an input
        # (a bias, an encoder's output) Python's collector cannot see through such a cycle: every graph would stay for ever.
        for handle in self._input_hooks:
            handle.remove()
        self._input_hooks = []
        self._nodes = {}

    @_not_compiled
    @on_compute_stream
    def _after_forward(self, index: int, call: int | None, output: Any) -> None:
        if _in_derivative():
            return
        if in_backward():
            if torch.is_grad_enabled() and not inside_checkpoint():
                self._watch_ways_out(index, None, [each for each in tensors_in(output) if each.requires_grad])
            return
        self._saved.end(index)
        self._executor.leave(index)
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for tensor in outputs:
                tensor.register_hook(_Ours(self._output_gradient, index))
            self._watch_ways_out(index, call, outputs)
            if call is not None and outputs:
                # Besides those of the inputs, which calls of several micro-batches may share, so that nobody waits for a call
                # in vain, and none is missed: what changes an output in place may leave no way to its own node.
                self._nodes[call] += _nodes_of(outputs)

    def _watch_ways_out(self, index: int, call: int | None, outputs: Sequence[Tensor]) -> None:
        """The gradients of inputs that arguments did not show (in closures, slots, attributes of modules) are waited for, as
        a call's of their own. Where no output shows, nothing is known, and the call ends with the pass."""
        known = self._nodes[call] if call is not None else ()
        nodes = _ways_out(outputs, self._began[index], known, self._inside[index])
        if not nodes and outputs:
            return
        another = self._calls.called(index)
        self._nodes[another] = nodes
        to_come: dict[int, int] = {}

        def executed(*_: Any) -> None:
            task = torch._C._current_graph_task_id()
            if task not in to_come:
                to_come[task] = sum(map(torch._C._will_engine_execute_node, nodes))
            to_come[task] -= 1
            if not to_come[task]:
                self._inputs_done(index, another, None)

        self._input_hooks += [node.register_hook(executed) for node in nodes]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _start_pass(self) -> None:
        if not self._in_pass:
            self._begin_pass()

    @on_compute_stream
    def _begin_pass(self) -> None:
        self._in_pass = True
        self._executor.computation_begins(Phase.BACKWARD)
        self._calls.begin_pass()
        if not self._wrapped:
            self._listener.backward_begins()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)
        self._act(0, self._calls.output(0))

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

    def _act(self, index: int, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Action.ENTER:
                    self._executor.enter(index, Phase.BACKWARD)
                case Action.HOLD:
                    self._executor.hold(index)
                case Action.LEAVE:
                    self._executor.leave_backward(index)
                case Action.END:
                    self._executor.end_backward(index)
                    self._listener.unit_backward_ended(index)
                case Action.REFUSE:
                    raise UsageError(
                        f"a gradient arrived for unit {self._units[index].name or 'root'} after its backward had ended; the "
                        f"unit is used in a way that two graphs share it; set update_in_backward=False and report this"
                    )

    @_not_compiled
    @on_compute_stream
    def _output_gradient(self, index: int, gradient: Tensor) -> None:
        self._refuse_double_backward()
        self._start_pass()
        actions = self._calls.output(index)
        self._act(index, actions)
        if actions:
            self._listener.progress()

    @on_compute_stream
    def _recompute_starts(self, index: int) -> None:
        self._start_pass()
        self._act(index, self._calls.recompute(index))

    @_not_compiled
    @on_compute_stream
    def _inputs_come(self, index: int, call: int, gradients: Any) -> None:
        # The gradient that ends one unit is what another begins with: there need not be room for the parameters of both. The
        # gradients of the one are laid out when the other has begun, and those before them have left.
        if self._calls.ends_with(index, call):
            self._executor.end_backward(index)

    @_not_compiled
    @on_compute_stream
    def _inputs_done(self, index: int, call: int, gradients: Any) -> None:
        self._act(index, self._calls.inputs(index, call))

    @_light
    def _gradient_comes(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.grad is not None:
            self._another_comes(index, parameter)

    @_not_compiled
    @on_compute_stream
    def _another_comes(self, index: int, parameter: Tensor) -> None:
        self._start_pass()  # of the user's own: until then `.grad` may be a view of pages, or what a step has used up
        if parameter.grad is not None:
            self._listener.another_gradient(index, parameter)

    @_light
    def _gradient_arrived(self, index: int, parameter: Tensor) -> None:
        if torch.is_grad_enabled() or not (self._in_pass and self._calls.one_of_many(index)):
            self._gradient_counts(index)

    @_not_compiled
    @on_compute_stream
    def _gradient_counts(self, index: int) -> None:
        self._refuse_double_backward()
        self._start_pass()
        self._act(index, self._calls.gradient(index))

    @_not_compiled
    @on_compute_stream
    def _finish_pass(self) -> None:
        if not self._in_pass:
            return
        for index, actions in self._calls.end_pass():
            self._act(index, actions)
        self._in_pass = False
        self._executor.computation_ends(Phase.BACKWARD)
        self._listener.backward_ended()


def _nodes_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Of tensors that are no leaves, and of what they are views of."""
    bases = (tensor._base for tensor in tensors)
    return tuple(each.grad_fn for each in (*tensors, *bases) if each is not None and each.grad_fn is not None)


def _ways_out(outputs: Sequence[Tensor], began: int, known: Sequence[Any], inside: frozenset[int]) -> tuple[Any, ...]:
    """The nodes of a call's graph that hand gradients to others than `known` and the parameters `inside`, by id.

    Args:
        began: nodes with a lower number are of before the call.
    """
    found: dict[Any, None] = {}
    ours = [node for node in _nodes_of(outputs) if node._sequence_nr() >= began]
    met = {*known, *ours}
    while ours:
        node = ours.pop()
        for following, _ in node.next_functions:
            if type(following).__name__ == "AccumulateGrad":
                if id(following.variable) not in inside:
                    found[node] = None
            elif following is not None and following not in met:
                if following._sequence_nr() >= began:
                    met.add(following)
                    ours.append(following)
                else:
                    found[node] = None
    return tuple(found)


class _OfACopy(Hooks):
    """What a copy of a module has in their place: its calls are what they were, and nobody hears of them."""

    of_a_copy = True

    def __init__(self) -> None:
        self.copyable = True

    def _before_forward(self, index: int, args: Any, kwargs: Any) -> int | None:
        return None

    def _after_forward(self, index: int, call: int | None, output: Any) -> None:
        return None
