"""Calls of a module on slices of its tokens, such as an MLP on a long text.

Owns where a call has its tokens, and the recomputation of a slice. Tokens are along dimension 1 if the call's first
floating-point tensor has three dimensions or more (samples, tokens, width), else along dimension 0. The call is transposed,
so that slices.py cuts it as it cuts samples, and slices_check.py checks that no token depends on another. A slice's forward
keeps its inputs only; its backward computes it again. torch's checkpoint is not used, since a unit around the module may be
recomputed itself. Source: Arctic Long Sequence Training (arXiv 2506.13996), section 3.1.

I1: parameters are inputs of the slices' nodes in autograd's graph, so that a parameter's gradients of all slices are added by
    autograd, and arrive once in a backward pass.
I2: parameters are read in the backward as the forward has read them: the unit around the module is in use until its backward
    ends, and its weights must not have changed.
I3: a slice draws the same random numbers when it is computed again, and its module has the state that it had in the forward.
I4: a tensor with a gradient that is neither an argument nor a parameter of the module would get none, and is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_ptm.config import Slices
from lightning_ptm.errors import ConfigError, some
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.runtime.autograd.slices import (
    Call,
    CutArguments,
    CutTrial,
    ModuleQuestions,
    SlicedCalls,
    modes_of,
    refuse_experts,
)
from lightning_ptm.runtime.autograd.slices_check import READS_OTHERS, CallBytes, SlicesCheck
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward, in_transform, reads_others, without_hooks
from lightning_ptm.runtime.units.binding import refuse_older
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.torch_internals import compiled_call_of, tree_flatten, tree_unflatten

AUTO = "auto"
"""In place of a name: all modules for which a trial shows that slices have the numbers of all tokens; in place of a number:
see `chosen_count`."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCut:
    """How the tokens of a module are cut.

    Attributes:
        count: number of slices; None: it is chosen for each call.
        by_trial: whether the module is cut only if that changes no numbers and saves memory.
    """

    count: int | None
    by_trial: bool = False


def token_slices_of(
    units: Sequence[Unit], wanted: Slices, experts: DividedExperts | None = None
) -> dict[str, TokenCut]:
    """Returns the modules whose tokens are cut, by name.

    Args:
        wanted: the setting `slices`.
        experts: experts that ranks divide.

    Raises:
        ConfigError: no module has a name of the setting, or such a module contains a unit or another such module, or has
            divided experts.
    """
    found: dict[str, TokenCut] = {}
    names = [name for name, _ in units[0].module.named_modules() if name]
    for pattern, count in wanted.items() if isinstance(wanted, Mapping) else ():
        if isinstance(count, int) or pattern == AUTO:
            continue
        named = [name for name in names if fnmatchcase(name, pattern)]
        if not named:
            raise ConfigError(
                f"slices asks for {count[1]} slices of the tokens of each module named {pattern!r}, and there is none, so "
                f"nothing would be computed in slices; modules are {some(names, 3)}; name some of these, with * for any text"
            )
        found.update((name, TokenCut(_number(count[1]))) for name in named)
    found = {name: cut for name, cut in found.items() if cut.count != 1}
    for name in found:
        inside = next((each for each in (*found, *(unit.name for unit in units)) if each.startswith(f"{name}.")), None)
        if inside is not None:
            raise ConfigError(
                f"slices would compute {name} in slices of its tokens, and it contains {inside}, which is fetched or cut by "
                f"itself; name modules inside of units, as in slices={{'*.mlp': ('tokens', 16)}}"
            )
    refuse_experts({name: units[0].module.get_submodule(name) for name in found}, experts)
    automatic = wanted.get(AUTO) if isinstance(wanted, Mapping) else None
    if automatic is not None and not isinstance(automatic, int) and automatic[1] != 1:
        tried = TokenCut(_number(automatic[1]), by_trial=True)
        divided = frozenset[int]() if experts is None else experts.modules
        found = dict.fromkeys(_inside_of_units(units, found, divided), tried) | found
    return found


def _number(count: int | str) -> int | None:
    return count if isinstance(count, int) else None


def _inside_of_units(units: Sequence[Unit], named: Collection[str], divided: frozenset[int]) -> list[str]:
    """Returns the names of the modules inside of units that contain none, and neither contain `named` modules nor are inside
    of them.

    Args:
        divided: ids of modules that are left out, as are those that contain them.

    Raises:
        ConfigError: all units are compiled.
    """
    inner = {id(unit.module) for unit in units[1:]}
    around = {id(units[0].module.get_submodule(name)) for name in named}
    compiled = {
        id(each)
        for module in units[0].module.modules()
        if compiled_call_of(module) is not None
        for each in module.modules()
    }
    if len(units) > 1 and inner <= compiled:
        raise ConfigError(
            f"slices would find modules that compute each token alone, and torch.compile compiles {units[1].name} and all "
            f"other units as a whole, which a module in slices would divide; leave torch.compile out, or name modules "
            f"outside of compiled ones, as in slices={{'*.mlp': ('tokens', 16)}}"
        )
    found, left = [], inner | around | compiled | divided
    for unit in units[1:]:
        for name, module in unit.module.named_modules():
            inside = {id(each) for each in module.modules()}
            whole = f"{unit.name}.{name}"
            if name and inside.isdisjoint(left) and not any(whole.startswith(f"{each}.") for each in named):
                found.append(whole)
    return found


_LEAST_TOKENS = 1024
"""Products of fewer rows are slower for each row."""


def most_slices(cut: CutArguments) -> int:
    """Returns the largest number of slices that is chosen for a call with tokens first: each has 1,024 tokens or more."""
    first = cut.leaves[cut.first] if cut.first >= 0 else None
    if first is None:
        return 1
    tokens = first.numel() // max(1, first.shape[-1] if first.dim() > 1 else 1)
    return max(1, min(cut.samples, tokens // _LEAST_TOKENS))


def chosen_count(most: int, call: CallBytes, weights_bytes: int) -> int:
    """Returns the fewest slices of a call with which the module no longer holds the peak of a step's memory.

    What autograd saves for a slice is then at most as large as the call's arguments and results, or the gradients of the
    module's weights, of which slices hold two copies. More slices would save nothing where other parts of the same unit need
    as much (attention on the same tokens), and smaller products are slower. A power of 2: slices of a text with such a
    length are equal, and the number does not follow small differences of what is saved.

    Args:
        most: largest number: `most_slices`.
        call: bytes of the whole call.
        weights_bytes: of the parameters with gradients.
    """
    least = call.saved / max(1.0, call.given + call.results, weights_bytes)
    wanted = 1 << (math.ceil(least) - 1).bit_length() if least > 1 else 1
    return min(wanted, 1 << most.bit_length() - 1)


class TokenSlices:
    """Calls of one module on slices of its tokens.

    Args:
        forward: the module's own forward.
        count: number of slices; None: `chosen_count`.
        changes: returns how often each parameter of the module has changed, by name.
        quiet: context for computations that are no calls of the run: hooks on parameters do nothing.
        repeated: see `SlicedCalls`.
        state: returns the state of the module and of a call's arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Call,
        count: int | None,
        changes: Callable[[], dict[str, int]],
        quiet: Callable[[], AbstractContextManager[None]],
        repeated: Callable[[Callable[[], Any]], Any],
        state: Callable[[Sequence[Any], dict[str, Any]], StateBefore],
    ) -> None:
        self._module = module
        self._forward = forward
        self._count = count
        self._changes = changes
        self._quiet = quiet
        self._repeated = repeated
        self._state = state
        self._sliced: SlicedCalls | None = None
        self._check: SlicesCheck | None = None
        self._questions: ModuleQuestions | None = None
        # state
        self._bytes_of_token: dict[Any, CallBytes | None] = {}
        """By all that they depend on, so that they do not depend on which call came first; None: it could not be computed."""
        self._moved: frozenset[int] = frozenset()
        """Indices of the arguments of the call in progress that are transposed."""

    def check_with(self, check: SlicesCheck, questions: ModuleQuestions, trial: CutTrial | None = None) -> None:
        """Sets the check of calls, and questions about the module; for `trial` see `SlicedCalls`."""
        self._check = check
        self._questions = questions
        given = self._count
        count = self._chosen if given is None else lambda _: given
        self._sliced = SlicedCalls(
            self._module, count, check.shared_results, check.refusal, trial=trial, repeated=self._repeated
        )

    def _chosen(self, cut: CutArguments) -> int:
        """Returns a number of slices that is equal in each run of the same module on the same tokens, since gradients of
        weights are sums over slices."""
        most = most_slices(cut)
        kinds = {each.device.type for each in cut.leaves if isinstance(each, Tensor)}
        casts = [
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        known = cut.structure, cut.shapes, modes_of(self._module), *casts
        if most == 1 or (known not in self._bytes_of_token and in_backward()):
            return 1
        if known not in self._bytes_of_token:
            self._bytes_of_token[known] = self._measured(cut)
        of_token = self._bytes_of_token[known]
        if of_token is None:
            return 2  # so that the check gives the reason
        weights_bytes = sum(each.nbytes for each in self._module.parameters() if each.requires_grad)
        return chosen_count(most, of_token.of(cut.samples), weights_bytes)

    @torch.compiler.disable
    def _choose_with_ranks(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Takes part in the choice of a number, which other ranks may need for a module that this one calls as a whole."""
        if self._count is None and self._questions is not None and self._questions.of_ranks:
            self._chosen(CutArguments.of(args, kwargs))

    def _measured(self, cut: CutArguments) -> CallBytes | None:
        assert self._questions is not None
        assert self._check is not None
        for way in cut.ways():
            found = self._questions.largest(partial(self._check.bytes_of_token, way), len(CallBytes._fields))
            if found is not None:
                return CallBytes(*found)
        return None

    def transposed(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the call in progress from arguments with tokens first; results have tokens first, too."""
        return self._transposed(self._moved, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Computes a call on slices; as a whole where no graph is recorded, or inside a transform of torch.func."""
        if not torch.is_grad_enabled() or in_transform():
            return self._forward(*args, **kwargs)
        assert self._sliced is not None
        given_args, given = args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        first = next((each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()), None)
        moved = frozenset[int]()
        if first is not None and first.dim() > 2:
            tokens = first.shape[1]
            moved = frozenset(
                at
                for at, each in enumerate(leaves)
                if isinstance(each, Tensor) and each.dim() > 1 and each.shape[1] == tokens
            )
        leaves = [each.transpose(0, 1) if at in moved else each for at, each in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves, spec)
        self._moved = moved
        self._choose_with_ranks(args, kwargs)

        def whole() -> Any:
            nonlocal moved
            moved = frozenset()
            return self._forward(*given_args, **given)

        result = self._sliced.call(self._recomputed, args, kwargs, again=in_backward(), whole=whole)
        return _transposed_results(result) if moved else result

    def _transposed(self, moved: frozenset[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not moved:
            return self._forward(*args, **kwargs)
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        leaves = [each.transpose(0, 1) if at in moved else each for at, each in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves, spec)
        return _transposed_results(self._forward(*args, **kwargs))

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        places = [at for at, each in enumerate(leaves) if isinstance(each, Tensor)]
        trained = [each for each in self._module.parameters() if each.requires_grad]
        moved = self._moved

        def forward(given: Sequence[Tensor]) -> Any:
            again = list(leaves_without)
            for at, each in zip(places, given, strict=True):
                again[at] = each
            args, kwargs = tree_unflatten(again, spec)
            return self._transposed(moved, args, kwargs)

        tensors = [leaves[at] for at in places]
        # The graph must not keep the tensors in another way than autograd saves them: these may be offloaded.
        leaves_without = [None if at in places else each for at, each in enumerate(leaves)]
        if not any(each.requires_grad for each in (*tensors, *trained)):
            return forward(tensors)
        state = self._state(args, kwargs)
        slice_ = _Slice(forward, len(tensors), trained, self._changes, self._quiet, self._refuse_others, state)
        results = _Recomputed.apply(slice_, *tensors, *trained)
        return slice_.with_tensors(results)

    def _refuse_others(self, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Refuses what the check could not find: a weight of others that was frozen then, or a hook that came later.

        Raises:
            ConfigError: the results have gradients with respect to others than the inputs and the module's parameters.
        """
        assert self._check is not None
        if reads_others(results, (), (*inputs, *self._module.parameters())):
            raise self._check.refusal(READS_OTHERS)


def _transposed_results(results: Any) -> Any:
    leaves, spec = tree_flatten(results)
    return tree_unflatten(
        [each.transpose(0, 1) if isinstance(each, Tensor) and each.dim() > 1 else each for each in leaves], spec
    )


@dataclasses.dataclass(slots=True)
class _RandomState:
    """States of the random number generators before a call, and the autocast settings in it."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    kinds: dict[str, tuple[bool, torch.dtype]]

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> _RandomState:
        devices, states = get_device_states(*tensors)
        names = {"cpu", *(each.device.type for each in tensors)}
        kinds = {
            name: (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in names
            if torch.amp.is_autocast_available(name)
        }
        return cls(torch.get_rng_state(), devices, states, kinds)

    @contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Context in which random numbers and autocast are as they were.

        Args:
            kind: type of the devices.
        """
        before, (devices, states) = torch.get_rng_state(), (self.devices, [])
        if devices:
            states = [torch.get_device_module(kind).get_rng_state(each) for each in devices]
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=kind)
        try:
            with self.autocast():
                yield
        finally:
            torch.set_rng_state(before)
            set_device_states(devices, states, device_type=kind)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context with the settings of autocast, without its cache: copies made without a graph must not be found
        by code with a graph."""
        stack = ExitStack()
        for name, (enabled, dtype) in self.kinds.items():
            if enabled:
                stack.enter_context(torch.autocast(name, dtype=dtype, cache_enabled=False))
        return stack


class StateBefore(Protocol):
    """State of a module before a call."""

    def drop_unchanged(self) -> None:
        """Drops what the call, which has ended, has not changed."""

    def as_before(self) -> AbstractContextManager[None]:
        """Returns a context in which the module has this state."""


_TENSOR = object()
"""Stands for a tensor of a result."""


class _Slice:
    """A call on one slice, for its forward and for the backward.

    Args:
        compute: computes the call from its tensors.
        inputs: number of tensors.
        trained: the module's parameters with gradients.
        refuse_others: refuses results of these inputs that are computed with other tensors, too.
        state: of the module, before the call.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Tensor]], Any],
        inputs: int,
        trained: Sequence[nn.Parameter],
        changes: Callable[[], dict[str, int]],
        quiet: Callable[[], AbstractContextManager[None]],
        refuse_others: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
        state: StateBefore,
    ) -> None:
        self.inputs = inputs
        self.trained = trained
        self._compute = compute
        self._changes = changes
        self._quiet = quiet
        self._refuse_others = refuse_others
        self._state = state
        # state
        self._random: _RandomState | None = None
        self._changed: dict[str, int] = {}
        self._rest: list[Any] = []
        """Leaves of the result, without its tensors."""
        self._spec: Any = None

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes the call, and returns the tensors of its result."""
        self._random = _RandomState.now(tensors)
        with self._random.autocast():
            leaves, self._spec = tree_flatten(self._compute(tensors))
        self._state.drop_unchanged()
        self._changed = self._changes()
        self._rest = [_TENSOR if isinstance(each, Tensor) else each for each in leaves]
        return [each for each in leaves if isinstance(each, Tensor)]

    def gradients(
        self, tensors: Sequence[Tensor], needed: Sequence[bool], of_results: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Computes the call again, and returns the gradients of its tensors and parameters that are needed."""
        assert self._random is not None
        for name, times in self._changes().items():
            if self._changed.get(name, times) != times:
                refuse_older(name, times - self._changed[name])
        given = [each.detach().requires_grad_(need) for each, need in zip(tensors, needed[: self.inputs], strict=True)]
        kind = next((each.device.type for each in given if not in_ram(each)), "cpu")
        trained = [each for each, need in zip(self.trained, needed[self.inputs :], strict=True) if need]
        wanted = [*(each for each in given if each.requires_grad), *trained]
        with self._quiet():
            with torch.enable_grad(), self._random.inside(kind), self._state.as_before():
                results, _ = tree_flatten(self._compute(given))
            results = [each for each in results if isinstance(each, Tensor)]
            self._refuse_others(results, given)
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, of_results, strict=True)
                if gradient is not None and result.requires_grad
            ]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if pairs:
                with without_hooks(trained):
                    found = torch.autograd.grad(
                        [result for result, _ in pairs], wanted, [each for _, each in pairs], allow_unused=True
                    )
        each_found = iter(found)
        return [next(each_found) if need else None for need in needed]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the result with these tensors."""
        each = iter(tensors)
        return tree_unflatten([next(each) if value is _TENSOR else value for value in self._rest], self._spec)


class _Recomputed(torch.autograd.Function):
    """A call on one slice, of which autograd saves the inputs only."""

    @staticmethod
    def forward(ctx: Any, call: _Slice, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        inputs = tensors[: call.inputs]
        ctx.save_for_backward(*inputs)
        results = call.first(inputs)
        ctx.mark_non_differentiable(*(each for each in results if not (each.is_floating_point() or each.is_complex())))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.call.gradients(ctx.saved_tensors, ctx.needs_input_grad[1:], gradients)
