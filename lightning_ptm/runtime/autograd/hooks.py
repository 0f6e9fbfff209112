"""Hooks on modules and autograd, turned into events: a unit's forward, its backward, the end of a backward pass.

Owns every hook on the user's modules and tensors, and removes all of them at the end. Knows nothing of tiers. How far a
unit is in a backward pass, and what follows from an event, is decided in calls.py. `Hooks` wraps calls of units; its parts:
`OneThread` refuses calls in two threads at once; `SubmoduleHooks` makes calls of submodules from outside their unit's forward
count as calls of the unit; `CallCompletion` reports that autograd has computed the gradients of everything that a call took;
`BackwardPass` owns whether a pass is in progress, and carries out the actions of calls.py.

I1: a unit is gathered during its forward, during its recomputed forward, and from the start to the end of its backward.
I2: parameters that autograd saves are packed by name (saved_tensors.py). Parameters saved inside a recomputed forward
    are not, so a unit gathered for recomputation stays gathered until its backward ends.
I3: hooks of a forgotten call never report anything, and keep no graph alive. Gradients of inputs that are not among the
    arguments (closures, slots, attributes of modules) are waited for, too.
I4: a unit that is in use or held already is not entered again. A call of a submodule inside a backward pass is a recomputed
    one, and ends with the unit's backward.
I5: a pass of the whole loss is announced by the strategy and ends when the strategy says so. A pass that the user runs, also
    inside `LightningModule.backward`, begins with its first autograd event and ends with autograd's final callback. The
    executor and the listener get the end of a pass once, after the end of each of its units. For a pass that is given up,
    only the executor is informed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.streams import ComputeStream, on_compute_stream
from lightning_ptm.planning.activation_choice import handling_of
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.calls import Action, Calls
from lightning_ptm.runtime.autograd.offload import Offload
from lightning_ptm.runtime.autograd.recompute import Recompute, RecomputedForwardWrapper, checkpoints_itself, replace
from lightning_ptm.runtime.autograd.saved_tensors import SavedTensors, inside_checkpoint, kept_in_place
from lightning_ptm.runtime.autograd.slices import Exchanges
from lightning_ptm.runtime.autograd.stage_cut import StageCut
from lightning_ptm.runtime.autograd.token_slices import TokenCut
from lightning_ptm.runtime.fetching.executor import Executor
from lightning_ptm.runtime.tensors.autograd_graphs import (
    DERIVATIVES,
    InputHook,
    OwnHook,
    double_backward,
    exit_nodes,
    in_backward,
    in_derivative,
    in_function,
    nodes_of,
    not_compiled,
    refuse_derivative,
    run_before_output_hooks,
    tensors_in,
)
from lightning_ptm.runtime.units.binding import PageViews
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Phase
from lightning_ptm.torch_internals import (
    CALL,
    COMPILED_CALL,
    PUT_ON,
    at_end_of_backward,
    collectives_so_far,
    compiled_call_of,
    graph_task,
    is_compiled,
    is_executed,
    is_reached,
    nodes_made,
    not_traced,
    transform_level,
)


@contextmanager
def parametrizing_is_no_write() -> Iterator[None]:
    """Inside, a parametrization that leaves its parameter's data alone does not count as a write to it.

    PEFT registers and removes parametrizations within a forward, for LoRA on packed experts (`target_parameters`). That sets
    the parameter's data to itself (`parameter.set_(parameter)`), which changes nothing but which torch counts as a write, and
    writes to parameters in pages are refused, since they would be lost (units/binding.py).
    """
    original: Any = getattr(parametrize, PUT_ON)

    def set_data(target: Tensor, source: Tensor) -> None:
        if target is not source:
            original(target, source)

    setattr(parametrize, PUT_ON, set_data)
    try:
        yield
    finally:
        setattr(parametrize, PUT_ON, original)


class BackwardListener(Protocol):
    """Receiver of the events of a backward pass."""

    def backward_begins(self) -> None:
        """A backward pass has begun that the strategy did not announce."""

    def adds_up(self, unit: int) -> bool:
        """Whether `another_gradient` has something to do for parameters of the unit."""

    def another_gradient(self, unit: int, parameter: Tensor) -> None:
        """A further gradient is about to be added to the parameter's `.grad` in this pass."""

    def call_begins(self, unit: int) -> None:
        """A call of `unit` begins in this pass: it is recomputed, or a hook calls it."""

    def unit_backward_ended(self, unit: int) -> None:
        """All gradients of `unit` that this backward pass computes are in `.grad` of its parameters."""

    def backward_ended(self) -> None:
        """The backward pass is over, and so is the backward of every unit."""

    def progress(self) -> None:
        """A convenient moment to advance background work."""


class BackwardPass:
    """State of the backward pass in progress; passes follow each other.

    Args:
        names: names of the units.
        calls: table of how far each unit is.
        in_stages: whether a schedule of pipeline stages runs all passes.
    """

    def __init__(
        self,
        names: Sequence[str],
        executor: Executor,
        listener: BackwardListener,
        calls: Calls,
        stream: ComputeStream,
        *,
        in_stages: bool = False,
    ) -> None:
        self.stream = stream
        self._in_stages = in_stages
        self._names = names
        self._executor = executor
        self._listener = listener
        self._calls = calls
        self.begun = False
        """Whether a pass is in progress. Read by others."""
        self.announced = False
        """Whether the pass is of the whole loss and ends when the strategy says so. Read by others."""

    @contextmanager
    def of_the_loss(self, checked: AbstractContextManager[None], *, by_user: bool = False) -> Iterator[None]:
        """Runs the announced pass in the block, inside `checked`, and ends what the pass left open.

        Args:
            by_user: the user's code runs one pass, several or none, and may read gradients after each: no pass is
                announced.
        """
        guards = self._executor.guard_policy
        opens = by_user and not guards.computing  # before autograd comes to a unit, it may read weights of the root
        if not by_user:
            self.announced = True
            self.start()
        elif opens:
            guards.computation_begins(Phase.FORWARD)
        try:
            with checked:
                yield
        except BaseException:  # the step may catch it and run another pass
            if self.begun:
                self.give_up()
            raise
        finally:
            if opens:
                guards.computation_ends(Phase.FORWARD)
        self.announced = False
        if self.begun:
            self._finish()

    def start(self) -> None:
        """Begins a pass if none is in progress; called at every autograd event."""
        if not self.begun:
            self._begin()

    @on_compute_stream
    def _begin(self) -> None:
        if self._in_stages and not self.announced:
            raise UsageError(
                "backward() was called by hand through units, and with a pipeline_parallel_size above 1 a rank has only the "
                "graph of its own blocks; return the loss from training_step, or train with pipeline_parallel_size=1"
            )
        self.begun = True
        self._executor.guard_policy.computation_begins(Phase.BACKWARD)
        self._calls.begin_pass()
        if not self.announced:
            self._listener.backward_begins()
            at_end_of_backward(self._finish)
        self.act(0, self._calls.output(0))

    def act(self, index: int, actions: Sequence[Action]) -> None:
        """Carries out the actions that the table returned for a unit."""
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
                        f"unit {self._names[index] or 'root'} got a gradient after its backward had ended and its "
                        "update may have begun, so gradients would be wrong; a backward pass that is started inside "
                        "another one causes this: start the second backward after the first has ended"
                    )

    @not_compiled
    @on_compute_stream
    def _finish(self) -> None:
        if not self.begun:
            return
        for index, actions in self._calls.end_pass():
            if actions:
                self.act(index, actions)
        self.begun = False
        self._executor.guard_policy.computation_ends(Phase.BACKWARD)
        self._listener.backward_ended()

    def give_up(self) -> None:
        """Ends a pass in its middle: the pass's references are given up, gradients are left as they are."""
        for index in range(len(self._names)):
            self._executor.leave_backward(index)
        self.forget()
        self._executor.guard_policy.computation_ends(Phase.BACKWARD)

    def forget(self) -> None:
        """Resets the state of the pass, after the executor has forgotten it."""
        self.begun = self.announced = False


def _once_all_came(tensors: Sequence[Tensor], report: Callable[[Any], None]) -> list[RemovableHandle]:
    """Has `report` called in each backward pass, once it has computed the gradients of all tensors that it reaches.

    As register_multi_grad_hook of torch, which refuses passes of autograd.grad that return the gradients of leaves.
    """
    nodes = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]
    remaining: dict[int, int] = {}
    lock = threading.Lock()  # autograd has a thread for each device

    def came(_: Tensor) -> None:
        task = graph_task()
        with lock:
            if task not in remaining:
                remaining[task] = sum(map(is_reached, nodes))
            remaining[task] -= 1
            if remaining[task]:
                return
            del remaining[task]
        report(None)

    return [tensor.register_hook(InputHook(came)) for tensor in tensors]


_is_trained = attrgetter("requires_grad")

CallReport = Callable[[int, int, Any], None]

"""Callback with the index of a unit, the number of a call and the gradients."""


class _OfThread(threading.local):
    """State of the calls that compute in this thread: two halves of a batch compute in two threads, each of which numbers
    its autograd nodes."""

    def __init__(self) -> None:
        self.began: dict[int, int] = {}
        """By unit, autograd's sequence number when the unit's last call began: nodes of the call have higher ones."""
        self.open: list[tuple[int, nn.Module, int | None]] = []
        """Calls of submodules in progress, the innermost last."""


class CallCompletion:
    """Hooks that report the end of the backward of each call, for all units.

    Args:
        ready: called when the gradients of a call's inputs have been computed, before the backward of the unit that
            produced the inputs begins.
        done: called for the same event, after `ready`.
    """

    def __init__(self, units: Sequence[Unit], ready: CallReport, done: CallReport) -> None:
        self._ready = ready
        self._done = done
        self._inside = [frozenset(map(id, unit.module.parameters())) for unit in units]
        self._parameters = [[item.parameter for item in unit.parameters] for unit in units]
        # state
        self._hooks: list[RemovableHandle] = []
        self._nodes: dict[int, tuple[Any, ...]] = {}
        """By number of a call, the nodes of its graph from which autograd tells whether a pass goes through it."""
        self._taken: dict[tuple[int, int], int] = {}
        """The unit that took an input first, by the input's node (`_nodes` keeps it alive) and its number there."""
        self._of_thread = _OfThread()
        self.calls = Calls(len(units), self._trained, self._takes_part)

    def _trained(self, index: int) -> int:
        with torch.DisableTorchFunctionSubclass():  # parameters may be closed
            return sum(map(_is_trained, self._parameters[index]))

    def call_begins(self, index: int) -> None:
        """Records where the graph of a unit's call begins, without watching its inputs."""
        self._of_thread.began[index] = nodes_made()

    def watch_inputs(self, index: int, args: Any, kwargs: Any) -> int | None:
        """Begins a call of a unit. Returns its number if some inputs require gradients.

        Such a call ends when the gradients of these inputs have been computed. An input that another unit took before (all
        blocks of a decoder take the encoder's output) has its whole gradient only when that unit's backward is over, and the
        gradients of this unit would be in `.grad` until then. It is not waited for if others are, and if the whole unit is
        trained: then every operation that reads its weights has computed a gradient of them before these are complete.
        """
        self._of_thread.began[index] = nodes_made()
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return None
        call = self.calls.called(index)
        self._nodes[call] = nodes_of(inputs)
        # Autograd cannot say whether autograd.grad reaches a leaf: if all inputs are leaves, the call ends with the
        # pass. Inputs of a reentrant checkpoint's recomputed call are leaves too, but are reached in a backward pass of
        # its own.
        watched = [tensor for tensor in inputs if in_backward() or not tensor.is_leaf]
        own = [tensor for tensor in watched if self._takes_first(index, tensor)]
        if own and self._trained(index) == len(self._parameters[index]):
            watched = own
        if watched:
            self._hooks += _once_all_came(watched, partial(self._done, index, call))
            first = _once_all_came(watched, partial(self._ready, index, call))
            for tensor, each in zip(watched, first, strict=True):
                run_before_output_hooks(tensor, each.id)
            self._hooks += first
        return call

    def _takes_first(self, index: int, tensor: Tensor) -> bool:
        """Records that a unit takes an input; returns whether no other unit took it before."""
        if tensor.grad_fn is None:
            return True
        return self._taken.setdefault((id(tensor.grad_fn), tensor.output_nr), index) == index

    def _takes_part(self, call: int) -> bool:
        """Whether the backward pass that runs in this thread may go through a call."""
        nodes = self._nodes[call]
        return not nodes or any(map(is_executed, nodes))

    def forget(self) -> None:
        """Forgets all calls: their backward is not waited for any more."""
        # A hook over several inputs holds the nodes of all inputs, and each node holds the hook. Python's collector
        # cannot see such a cycle if units share an input (a bias, an encoder's output), so every graph would stay
        # alive.
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._nodes = {}
        self._taken = {}

    def watch_graph_exits(self, index: int, call: int | None, outputs: Sequence[Tensor]) -> None:
        """Waits for the gradients of inputs that the arguments do not show, as for a call of their own.

        Such inputs come from closures, slots or attributes of modules. If there are no outputs, the graph is unknown,
        and the call ends with the pass.
        """
        known = self._nodes[call] if call is not None else ()
        if call is not None and outputs:
            # In addition to the nodes of the inputs, which calls of several micro-batches may share: so no call is
            # waited for in vain, and none is missed. An operation that changes an output in place may leave no edge to
            # the output's own node.
            self._nodes[call] += nodes_of(outputs)
        nodes = exit_nodes(outputs, self._of_thread.began[index], known, self._inside[index])
        if not nodes and outputs:
            return
        another = self.calls.called(index)
        self._nodes[another] = nodes
        remaining: dict[int, int] = {}

        def executed(*_: Any) -> None:
            task = graph_task()
            if task not in remaining:
                remaining[task] = sum(map(is_executed, nodes))
            remaining[task] -= 1
            if not remaining[task]:
                self._done(index, another, None)

        self._hooks += [node.register_hook(executed) for node in nodes]


class OneThread:
    """Refusal of calls of units, and of backward passes, in two threads at the same time.

    Args:
        units: calls of units that contain others are not watched: a thread that their forward has started, and waits for,
            may call those.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        outer = {0} | {unit.index for unit in units for each in units if each.name.startswith(f"{unit.name}.")}
        self._watched = {unit.index: unit.name for unit in units if unit.index not in outer}
        # state
        self._inside: dict[int, list[str]] = {}
        """By thread, the calls and passes in progress in it, the innermost last."""
        self._turns = 0
        """Number of threads that compute in turns with another one."""

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """Context of a thread that computes only while another one waits, which may be in a call of a unit."""
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward pass.

        Raises:
            UsageError: a call or a pass is in progress in another thread.
        """
        what = "a backward pass"
        try:
            self._begins(what)
            yield
        finally:
            self._ends(what)

    @not_compiled
    def call_begins(self, index: int) -> None:
        """Begins a call. `call_ends` must follow, also after an error.

        Raises:
            UsageError: as `backward`.
        """
        if index in self._watched and not in_backward():  # a recomputed call is a part of its pass
            self._begins(self._watched[index])

    @not_compiled
    def call_ends(self, index: int) -> None:
        """Ends a call."""
        if index in self._watched and not in_backward():
            self._ends(self._watched[index])

    def _begins(self, what: str) -> None:
        me = threading.get_ident()
        self._inside.setdefault(me, []).append(what)
        for thread, others in [] if self._turns else list(self._inside.items()):
            if thread != me and (other := others[:1]):
                raise UsageError(
                    f"{what} began in a thread while {other[0]} was computed in another one, and weights are fetched and "
                    f"released in the order of one thread, so values could be wrong; compute one after another"
                )

    def _ends(self, what: str) -> None:
        inside = self._inside[threading.get_ident()]
        last = inside.pop()
        assert last == what
        if not inside:
            del self._inside[threading.get_ident()]


class SubmoduleHooks:
    """Calls of parameter-owning submodules, for all units.

    Args:
        names: names of the units.
        begins: begins a call of a unit with these arguments; returns its number if some inputs require gradients.
        ends: ends the call of that number, with this output.
        root_begins, root_ends: begin and end a call of a part of the root between two steps.
    """

    def __init__(
        self,
        names: list[str],
        executor: Executor,
        begins: Callable[[int, Any, Any], int | None],
        ends: Callable[[int, int | None, Any], None],
        root_begins: Callable[[], None],
        root_ends: Callable[[], None],
        stream: ComputeStream,
    ) -> None:
        self.stream = stream
        self._names = names
        self._executor = executor
        self._begins = begins
        self._ends = ends
        self._root_begins = root_begins
        self._root_ends = root_ends
        self._units_of: dict[int, list[int]] = {}
        # state
        self._of_thread = _OfThread()

    @property
    def open(self) -> list[tuple[int, nn.Module, int | None]]:
        """Calls in progress in this thread, the innermost last. Others read it."""
        return self._of_thread.open

    def add_owner(self, owner: nn.Module, index: int) -> bool:
        """Records that `owner` has parameters of a unit; returns whether this is the first unit recorded for it."""
        known = self._units_of.setdefault(id(owner), [])
        known.append(index)
        return len(known) == 1

    def call_begins(self, module: nn.Module, args: Any) -> None:
        """Begins a call of an owner of parameters."""
        for index in self._units_of[id(module)]:
            if transform_level() and in_derivative():
                refuse_derivative(self._names[index])
            if not self._executor.refcounts.used(index):
                self._unit_begins(index, module, args)

    @on_compute_stream
    def _unit_begins(self, index: int, module: nn.Module, args: Any) -> None:
        """Begins a call of an owner of parameters of a unit that no call is using."""
        if self._executor.refcounts.held(index):
            self._executor.read_held(index)
        elif index == 0:
            self._executor.hold(0)  # outside an iteration: it stays until the next one ends
        else:
            call = self._begins(index, args, {})
            if not in_backward():
                self.open.append((index, module, call))
        if index == 0 and not self._executor.guard_policy.computing:
            self._root_begins()
            self.open.append((0, module, None))

    def call_ends(self, module: nn.Module, output: Any) -> None:
        """Ends a call of an owner of parameters."""
        while self.open and self.open[-1][1] is module and not in_backward():
            index, _, call = self.open.pop()
            if index == 0:
                self._root_ends()
            else:
                self._ends(index, call, output)

    def give_up(self) -> None:
        """Ends calls that ended in an error which the user caught."""
        for index, *_ in self.open:
            self._executor.leave(index)
        self.open.clear()

    def forget(self) -> None:
        """Forgets the open calls, after the executor has forgotten them."""
        self.open.clear()


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
        slices: by unit among these, the number of slices of the batch that it is computed on.
        token_slices: by name of a module, how its tokens are cut.
        stream: the run's compute stream.
        views: finds which storages are views of pages.
        offload: moves activations to RAM or disk; None: activations stay on the device.
        policy: chooses what becomes of each call's activations; None: all calls are alike.
        stage_cut: the cut of the module into pipeline stages; None: each rank computes all blocks.
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
        policy: ActivationPolicy | None = None,
        stage_cut: StageCut | None = None,
        slices: Mapping[int, int] | None = None,
        token_slices: Mapping[str, TokenCut] | None = None,
    ) -> None:
        self.stream = stream
        self._stage_cut = stage_cut
        self._units = units
        self._stores = stores
        self._executor = executor
        self._listener = listener
        self._handles: list[Any] = []
        self._restore: list[Callable[[], None]] = []
        self._recomputes = bool(recompute)
        self._recomputed_on_demand: dict[int, bool] = {}
        """By unit whose forward the policy may have recomputed, whether the call that begins is."""
        self._collectives: dict[int, int] = {}
        """By unit that is recomputed by choice, the collectives of all ranks before its newest call."""
        self._compiled_units: frozenset[int] | None = None
        """The units in compiled code; None before the first that would be recomputed by choice."""
        self._policy = policy
        self._tier = offload.tier if offload is not None and policy is None else None
        """The tier that activations of all units are offloaded to."""
        self._slices = slices or {}
        self._is_quiet = False
        """Whether a unit is computed for a check."""
        self._one_thread = OneThread(units)
        self._recompute = Recompute(
            units[0].module, self._recompute_starts, self._changes_of, self._quiet, self._progress_in_call
        )
        self._saved = SavedTensors(stores, executor, stream, views, offload)
        names = [unit.name for unit in units]
        self._completion = CallCompletion(units, self._inputs_ready, self._inputs_done)
        self._calls = self._completion.calls
        self._pass = BackwardPass(names, executor, listener, self._calls, stream, in_stages=stage_cut is not None)
        self._submodule_hooks = SubmoduleHooks(
            names, executor, self._before_forward, self._after_forward, self._root_begins, self._root_ends, stream
        )
        try:
            for name, cut in (token_slices or {}).items():  # first: units are recomputed around them
                self._cut_tokens(name, units[0].module.get_submodule(name), cut)
            for unit in units:
                self._attach(unit, unit.index in recompute)
        except BaseException:
            self.close()
            raise

    def exchanges_with(self, exchanges: Exchanges) -> None:
        """Gives the run's exchanges of activations to the slices of modules; see `Recompute.exchanges_with`."""
        self._recompute.exchanges_with(exchanges)

    def close(self) -> None:
        """Removes every hook; the modules are as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._restore:
            self._restore.pop()()
        self._recompute.close()
        self.abandon()
        self._saved.close()

    def begin_iteration(self) -> None:
        """Forgets calls whose backward never came, and passes and calls that ended in an error which the user caught."""
        self._calls.forget()
        if self._pass.begun:
            self._pass.give_up()
        self._submodule_hooks.give_up()
        self._saved.abandon()
        self._completion.forget()
        if self._policy is not None:
            self._policy.begin_iteration()

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
        checked = self._recompute.checked() if self._recomputes else nullcontext()
        of_the_loss = self._pass.of_the_loss(checked, by_user=by_user)
        with self._one_thread.backward(), self._saved.watching(), of_the_loss, parametrizing_is_no_write():
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

    @contextmanager
    def half_step(self) -> Iterator[None]:
        """Runs a part of the user's step in the block, in another thread than `step`, while that thread waits."""
        if torch.is_grad_enabled() and self._saved.releases_parameters:
            self._saved.begin(0)
        try:
            with self.stream.entered(), self._one_thread.taking_turns():
                yield
        finally:
            self._saved.end(0)
            self._submodule_hooks.give_up()

    # -- forward -------------------------------------------------------------------------------------------------------

    def _attach(self, unit: Unit, recompute: bool) -> None:
        if self._stores[unit.index].remote:
            if self._stage_cut is None:
                self._wrap_calls(unit.module, partial(_refuse_remote, unit.name, unit.module))
            else:
                self._wrap_calls(unit.module, self._stage_cut.wrapper(unit.index, absent=True))
            return
        if unit.index != 0:
            if recompute:
                self._recompute_calls(unit)
            self._wrap_calls(unit.module, partial(self._call_of_unit, unit.index, unit.module))
            if self._stage_cut is not None:
                self._wrap_calls(unit.module, self._stage_cut.wrapper(unit.index, absent=False))
        # Calls of parts of the unit matter only if its parameters cannot be read at any time.
        if not self._stores[unit.index].readable:
            for owner in self._separately_called(unit):
                self._guard(owner, unit.index)
        with torch.DisableTorchFunctionSubclass():  # a question to a closed parameter would go through Python
            for parameter in (item.parameter for item in unit.parameters if item.parameter.requires_grad):
                after, before = self._after_accumulation, self._before_accumulation
                self._handles += [
                    parameter.register_post_accumulate_grad_hook(partial(after, unit.index)),
                    parameter.register_hook(partial(before, unit.index, parameter)),
                ]

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

    def _recompute_calls(self, unit: Unit, wanted: Callable[[], bool] = lambda: True) -> None:
        name = "forward" if compiled_call_of(unit.module) is None else COMPILED_CALL
        original = vars(unit.module).get(name)
        slices = self._slices.get(unit.index, 1)
        if isinstance(original, RecomputedForwardWrapper):
            inside = self._recompute.of(unit, original.inside, wanted, slices)
            recomputed: Callable[..., Any] = original.with_inside(inside)
        else:
            recomputed = self._recompute.of(unit, original, wanted, slices)
        self._restore.append(replace(unit.module, **{name: recomputed}))

    def _cut_tokens(self, name: str, module: nn.Module, cut: TokenCut) -> None:
        forward = self._recompute.in_token_slices(Unit(-1, name, module, (), ()), cut, lambda: self._is_quiet)
        self._restore.append(replace(module, forward=forward))

    @not_compiled
    @on_compute_stream
    def _progress_in_call(self) -> None:
        """Advances updates and the fetches that wait for them, in the middle of a unit's call."""
        self._listener.progress()
        self._executor.start_waiting_fetches()

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        before, self._is_quiet = self._is_quiet, True
        try:
            with kept_in_place():
                yield
        finally:
            self._is_quiet = before

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
        try:
            self._one_thread.call_begins(index)
            call = self._before_forward(index, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self._after_forward(index, call, output)
        finally:
            self._one_thread.call_ends(index)
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
        if self._submodule_hooks.open:
            self._submodule_hooks.call_ends(module, output)
        return output

    @not_compiled
    @on_compute_stream
    def _before_forward(self, index: int, args: Any, kwargs: Any) -> int | None:
        """Begins a call of a unit. Returns the number of the call if some inputs require gradients."""
        if transform_level() and in_derivative():
            if not self._stores[index].readable:
                refuse_derivative(self._units[index].name)
            return None
        if in_backward():
            self._listener.call_begins(index)
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
        self._listener.progress()  # first: the fetches of the tick ask which units may be read
        self._executor.enter(index, Phase.FORWARD)
        if not torch.is_grad_enabled():
            self._completion.call_begins(index)
            if in_function():
                self._calls.called_blind(index)
            return None
        if not inside_checkpoint():
            self._begin_saving(index, args, kwargs)
        return self._completion.watch_inputs(index, args, kwargs)

    def _begin_saving(self, index: int, args: Any, kwargs: Any) -> None:
        """Begins to save tensors of a unit's call, in the way that the policy chooses."""
        if self._policy is None or index == 0:
            self._saved.begin(index, self._tier if index else None)
            return
        handling = self._policy.call_begins(index, lambda: _bytes_of_inputs(args, kwargs))
        if handling.recomputes and index not in self._recomputed_on_demand:
            if self._in_compiled_code(index) or self._reads_a_cache(index):
                handling = handling_of(False, handling.tier)  # other code might run, and round differently
                self._policy.not_recomputed(index, handling)
            else:
                self._recompute_calls(self._units[index], lambda: self._recomputed_on_demand[index])
                self._recomputes = True
                self._recomputed_on_demand[index] = True
                if checkpoints_itself(self._units[index].module):
                    # This forward of the model around has made a cache, which a recomputed layer would fill twice.
                    self._recomputed_on_demand[index] = False
                    handling = handling_of(False, handling.tier)
                    self._policy.not_recomputed(index, handling)
        elif index in self._recomputed_on_demand:
            self._recomputed_on_demand[index] = handling.recomputes
        if self._recomputed_on_demand.get(index):
            self._collectives[index] = collectives_so_far()
        self._saved.begin(index, handling.tier, counts=self._policy.counts)

    def _check_collectives(self, index: int) -> None:
        """Refuses a call that is recomputed by choice if it has called a collective: other ranks may not recompute it."""
        before = self._collectives.pop(index, None)
        if before not in (None, collectives_so_far()):
            unit = self._units[index]
            raise UsageError(
                f"{unit.name} ({type(unit.module).__name__}) calls a collective of torch.distributed in its forward, and "
                "this rank has chosen to recompute it (recompute='auto', where memory is short), which other ranks need not "
                "do, so that its second forward could wait for them without an end; set recompute='all', with which all "
                "ranks recompute it, or recompute='none'"
            )

    def _reads_a_cache(self, index: int) -> bool:
        """Whether a unit is a layer of an encoder-decoder model of transformers, whose attention reads keys in another layout
        where recomputed layers switch the cache off."""
        within = any(
            getattr(getattr(each, "config", None), "is_encoder_decoder", False)
            for each in self._units[0].module.modules()
        )
        return within and checkpoints_itself(self._units[index].module)

    def _in_compiled_code(self, index: int) -> bool:
        """Whether torch.compile has compiled a unit, a module in it, or one that contains it."""
        if self._compiled_units is None:
            compiled = [each for each in self._units[0].module.modules() if is_compiled(each)]
            inside = {id(each) for module in compiled for each in module.modules()}
            self._compiled_units = frozenset(
                unit.index for unit in self._units if any(id(each) in inside for each in unit.module.modules())
            )
        return index in self._compiled_units

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
        if transform_level() and in_derivative():
            return
        if in_backward():
            if torch.is_grad_enabled() and not inside_checkpoint():
                self._completion.watch_graph_exits(
                    index, None, [each for each in tensors_in(output) if each.requires_grad]
                )
            return
        saved_bytes = self._saved.end(index)
        if self._collectives and output is not None:
            self._check_collectives(index)
        if self._policy is not None and index and saved_bytes:
            self._policy.call_ended(index, saved_bytes)
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
        if torch.is_grad_enabled():
            raise double_backward()
        if not self._pass.begun:
            self._pass.start()
        actions = self._calls.output(index)
        if actions:
            self._listener.progress()
            self._pass.act(index, actions)
        else:
            self._executor.resume_backward(index)

    @on_compute_stream
    def _recompute_starts(self, index: int) -> None:
        self._pass.start()
        self._executor.resume_backward(index)
        self._pass.act(index, self._calls.recompute(index))

    @not_compiled
    @on_compute_stream
    def _inputs_ready(self, index: int, call: int, gradients: Any) -> None:
        # The gradient that ends one unit starts the backward of another, and there need not be room for the parameters
        # of both. So the references are given up here; the first unit's gradients are collected after the second has begun.
        if self._calls.ends_with(index, call):
            self._executor.end_backward(index)
        elif self._calls.pauses_with(index, call):
            self._executor.suspend_backward(index)

    @not_compiled
    @on_compute_stream
    def _inputs_done(self, index: int, call: int, gradients: Any) -> None:
        self._pass.act(index, self._calls.inputs(index, call))

    @_light
    def _before_accumulation(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.grad is not None and (not self._pass.begun or self._listener.adds_up(index)):
            self._before_further_gradient(index, parameter)

    @not_compiled
    @on_compute_stream
    def _before_further_gradient(self, index: int, parameter: Tensor) -> None:
        if self._is_quiet:
            return
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
        if torch.is_grad_enabled():
            raise double_backward()
        if not self._pass.begun:
            self._pass.start()
        actions = self._calls.gradient(index)
        if actions:
            self._pass.act(index, actions)


def _bytes_of_inputs(args: Any, kwargs: Any) -> int:
    """Returns the bytes of the strided tensors among a call's inputs."""
    return sum(each.numel() * each.itemsize for each in tensors_in((args, kwargs)) if each.layout is torch.strided)
