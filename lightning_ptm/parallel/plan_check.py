"""Check of a tensor-parallel plan: each kind of block is computed once whole and once cut, and the results are compared.

A wrong plan (one that cuts a packed projection as one, or forgets a count of heads) runs without an error and trains
something else: its loss is off by a thousandth, its gradients by a tenth. So a hook takes the inputs of the first call of
each kind of block. Two copies of the block with random weights, one whole and one cut, compute forward and backward from
them in fp32, in fp64 where the run computes in it; a difference beyond rounding raises an error that names the tensor.

Owns copies of blocks without weights, made before anything was cut.
I1: the run does not change: no weight, no random number, no tensor that is saved for its backward pass.
I2: all ranks of a group check a kind in the same calls: the first call, calls with other flags or other kinds of arguments,
    calls in which more inputs have gradients and, with sequence parallelism, the first call in training.
I3: with sequence parallelism, results in training are compared, too, without dropout. Blocks that draw other random numbers
    in training are left out, as ranks draw their own.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, RankError, some
from lightning_ptm.parallel.checked_blocks import CheckedBlock
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.nested_tensors import copied, results_in, structure_of, tensors_in
from lightning_ptm.parallel.rules import Rule
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.autograd.recompute import ignoring_stored_exchanges
from lightning_ptm.runtime.tensors.parts import cut
from lightning_ptm.runtime.tensors.random_functions import NoDropout
from lightning_ptm.runtime.tensors.user_objects import OF_EVERY_MODULE
from lightning_ptm.torch_internals import ATTENTION_OF_CONFIG, CALL, buffers_in, parameters_in, put_compiled_call

_TOLERANCE = 1e-3
"""Largest difference, relative to the largest element: fp32 rounds to 1e-6 (modules may compute in it in fp64 runs, too), and
wrong plans are off by 1e-2 and more."""
_SMALL_GRADIENT = 1e-2
"""Least scale for differences of gradients, relative to the largest gradient of a block's parameters. Some gradients are
nothing but fp32 rounding (a bias of keys, which the softmax cancels)."""

_IN_TRAINING = -1
"""Marker among the indices of a call's inputs: the block is in training."""

Divided = Callable[[nn.Module, Mapping[str, Rule]], Any]
"""Cuts a module by a plan with names relative to it; returns the `CutModule`."""


class PlanCheck:
    """Checks blocks when they are first called, by forward pre-hooks.

    Args:
        blocks: blocks with whole parameters, before anything is cut.
        group: the ranks over which parameters are cut.
        divide: cuts a copy of a block.
        of_parts: whether ranks have parts of the sequence between cut layers (sequence parallelism).

    Raises:
        ConfigError: a block cannot be copied.
    """

    def __init__(
        self, blocks: Sequence[CheckedBlock], group: TensorGroup, divide: Divided, *, of_parts: bool = False
    ) -> None:
        self._group = group
        self._of_parts = of_parts
        self._divide = divide
        self._handles: list[Any] = []
        """Hooks of blocks, which stay: any call may be the first of its kind."""
        self._inside: dict[str, list[Any]] = {}
        """By name of a block that has not been called, hooks of the layers inside."""
        self._proven: dict[str, list[_Call]] = {}
        """Checked calls by kind of block."""
        skeletons: dict[str, nn.Module] = {}
        for block in blocks:
            kind = block.kind
            if kind not in skeletons:
                skeletons[kind] = _without_weights(block)
            hook = self._hook(kind, block, skeletons[kind])
            self._handles.append(block.module.register_forward_pre_hook(hook, with_kwargs=True))
            handles = self._inside.setdefault(block.name, [])
            unproven = self._unproven(kind, block)
            for name, module in block.module.named_modules():
                if name in block.plan:
                    handles.append(module.register_forward_pre_hook(unproven))

    def close(self) -> None:
        """Removes all hooks; blocks that were not called stay unchecked."""
        for name in list(self._inside):
            self._forget(name)
        while self._handles:
            self._handles.pop().remove()

    def _forget(self, name: str) -> None:
        for handle in self._inside.pop(name, ()):
            handle.remove()

    def _hook(self, kind: str, block: CheckedBlock, skeleton: nn.Module) -> Callable[..., None]:
        @torch.compiler.disable
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
            tracked = {at for at, each in enumerate(given) if torch.is_grad_enabled() and each.requires_grad}
            # A call with a single token does not cover calls with several (the length is the same on all ranks: I2).
            alone = self._of_parts and not any(each.dim() > 1 and each.shape[-2] > 1 for each in given[:1])
            if self._of_parts and module.training:
                tracked.add(_IN_TRAINING)
            call = _Call(structure_of((args, kwargs)), tracked, alone)
            proven = self._proven.setdefault(kind, [])
            self._forget(block.name)
            if not any(each.covers(call) for each in proven):
                proven.append(call)
                self._prove(kind, block, skeleton, args, kwargs)

        return called

    def _unproven(self, kind: str, block: CheckedBlock) -> Callable[..., None]:
        @torch.compiler.disable
        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            if block.name in self._inside and kind not in self._proven:
                raise ConfigError(
                    f"layers inside of {block.name} ({type(block.module).__name__}) are called while the block itself is "
                    f"not, so tensor_parallel's plan cannot be checked on it; call the module itself, as in `block(x)`, not "
                    f"`block.forward(x)` or another of its methods, or leave its layers out of the plan"
                )

        return called

    def _prove(
        self, kind: str, block: CheckedBlock, skeleton: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # I1
        device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
        dtype = _dtype_of(args, kwargs)
        own_dtype = torch.autocast(device.type, enabled=False)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            keep,
            own_dtype,
            _default_dtype(dtype),
            ignoring_stored_exchanges(),
            self._group.taking_turns(None),
        ):
            whole = _with_weights(skeleton, device, int(kind[:12], 16), dtype)
            divided = copy.deepcopy(whole)
            try:
                of_whole = self._computed_seeded(whole, args, kwargs)
            except RankError:  # not about this plan: another rank has failed
                raise
            except Exception as error:
                raise self._not_alone(block, error) from error
            if not of_whole.outputs:
                raise ConfigError(
                    f"{block.name} ({type(block.module).__name__}) returns no floating-point tensor, so "
                    f"tensor_parallel's plan cannot be checked on it; let its forward return tensors, or mappings, sequences "
                    f"or data classes of them, or leave its layers out of the plan"
                )
            try:
                known = self._divide(divided, block.plan)
                of_divided = self._computed_seeded(divided, args, kwargs)
                differs = list(self._differences(block, of_whole, of_divided, known, divided))
                if self._of_parts and block.module.training:
                    differs += self._in_training(block, whole, args, kwargs)
            except RankError:
                raise
            except Exception as error:  # the user's forward may raise anything
                raise self._refusal(block, f"cannot be computed ({type(error).__name__}: {error})") from error
        # Among several differences, those in cut layers are the most informative.
        beyond = [(off, name) for off, name in differs if off > _TOLERANCE]
        cut_ones = [(off, name) for off, name in beyond if any(f".{each}." in name for each in block.plan)]
        worst = max(cut_ones or beyond, default=(0.0, ""))
        of_all = self._group.gather(torch.tensor([worst[0]], dtype=torch.float64, device=device))
        if float(of_all.max()) > _TOLERANCE:
            where = f", most in {worst[1]}" if beyond else ""
            raise self._refusal(block, f"computes something else (off by {float(of_all.max()):.2g}{where})")

    def _computed_seeded(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 1
    ) -> _Computed:
        with self._group.seeded(seed=seed):
            return _computed(module, args, kwargs)

    def _in_training(
        self, block: CheckedBlock, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[float, str]]:
        """Differences between the whole and the cut block in training mode without dropout, as
        `_differences` yields them: (relative size, what differs). Empty if the block
        still draws random numbers on any rank (I3)."""
        for name, module in block.module.named_modules():
            whole.get_submodule(name).training = module.training
        divided = copy.deepcopy(whole)
        with NoDropout():
            # On copies, as buffers change in training.
            once, again = (self._computed_seeded(copy.deepcopy(whole), args, kwargs, seed) for seed in (1, 2))
            random = torch.tensor([0 if once.same_as(again) else 1], device=once.outputs[0].device)
            if bool(self._group.gather(random).any()):
                return []
            known = self._divide(divided, block.plan)
            of_divided = self._computed_seeded(divided, args, kwargs)
        return list(self._differences(block, once, of_divided, known, divided))

    def _not_alone(self, block: CheckedBlock, error: Exception) -> ConfigError:
        return ConfigError(
            f"{block.name} ({type(block.module).__name__}) cannot be checked: a copy of it, made when the run was set up, "
            f"does not compute ({type(error).__name__}: {error}); pass its inputs as arguments of its forward, not in "
            f"attributes that are set before a call, or leave its layers out of tensor_parallel's plan"
        )

    def _refusal(self, block: CheckedBlock, what: str) -> ConfigError:
        rules = some([f"{name}: {rule}" for name, rule in block.plan.items()], 6)
        between = (
            "; modules between cut layers must treat tokens one by one, or set "
            "tensor_parallel=TensorParallel(sequence_parallel=False)"
            if self._of_parts
            else ""
        )
        return ConfigError(
            f"with tensor_parallel_size={self._group.size}, {block.name} ({type(block.module).__name__}) {what} when it is "
            f"cut as tensor_parallel's plan says ({rules}): packed projections need ColwiseParallel(parts=how many), "
            f"attributes that count heads ColwiseParallel(heads=their names), norms of a rank's own heads Partial(); modules "
            f"after ColwiseParallel() without gather=True must work on a part until a layer with RowwiseParallel(), "
            f"including tensors that a forward sets in attributes; the ranks must divide the heads{between}; correct the "
            f"plan, or leave these layers out of it"
        )

    def _differences(
        self, block: CheckedBlock, whole: _Computed, divided: _Computed, known: Any, module: nn.Module
    ) -> Iterator[tuple[float, str]]:
        if len(whole.outputs) != len(divided.outputs):
            raise ValueError(f"{len(divided.outputs)} outputs in place of {len(whole.outputs)}")
        for theirs, ours in zip(whole.outputs, divided.outputs, strict=True):
            yield _difference(ours, theirs), "its outputs, or attributes that its forward sets"
        of_inputs = zip(whole.inputs, divided.inputs, strict=True)
        yield from ((_difference(ours, theirs), "the gradients of its inputs") for theirs, ours in of_inputs)
        boxes: dict[str, TensorSlice] = known.boxes()
        sizes = (float(each.abs().max()) for each in whole.parameters.values() if each is not None and each.numel())
        least = _SMALL_GRADIENT * max(sizes, default=0.0)
        for name, parameter in module.named_parameters():
            found, expected = divided.parameters[name], whole.parameters[name]
            if id(parameter) in known.partial:
                found = self._group.sum(torch.zeros_like(parameter) if found is None else found)
            expected = None if expected is None else cut(expected, boxes.get(name))
            yield _difference(found, expected, least), f"the gradient of {block.name}.{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A call of a block, as far as a check depends on it.

    Attributes:
        structure: description of the arguments without their numbers.
        tracked: indices of the inputs that require a gradient.
        alone: whether the sequence has a single token.
    """

    structure: str
    tracked: set[int]
    alone: bool

    def covers(self, other: _Call) -> bool:
        return self.structure == other.structure and other.tracked <= self.tracked and self.alone <= other.alone


@dataclasses.dataclass(frozen=True, slots=True)
class _Computed:
    """Results of a block: outputs, and the gradients of inputs and parameters."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]

    def same_as(self, other: _Computed) -> bool:
        """Whether two results are bitwise equal."""
        pairs = (
            *zip(self.outputs, other.outputs, strict=True),
            *zip(self.inputs, other.inputs, strict=True),
            *zip(self.parameters.values(), other.parameters.values(), strict=True),
        )
        return all(
            theirs is None if ours is None else theirs is not None and torch.equal(ours, theirs)
            for ours, theirs in pairs
        )


def _difference(ours: Tensor | None, theirs: Tensor | None, least: float = 0.0) -> float:
    """Returns the largest difference relative to the largest element.

    Args:
        least: least scale, used if the largest element is smaller.
    """
    if ours is None or theirs is None:
        known = ours if theirs is None else theirs
        return 0.0 if known is None or not bool(known.any()) else 1.0
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    size = max(float(theirs.abs().max()), least)
    return float((ours - theirs).abs().max()) / size if size else float(ours.abs().max())


def _computed(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Computed:
    given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
    tracked = {id(each) for each in given if each.requires_grad} or {id(each) for each in given[:1]}
    args, kwargs = copied((args, kwargs), tracked, _dtype_of(args, kwargs))
    leaves = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
    out = [*results_in(module(*args, **kwargs)), *_left_behind(module)]
    generator = torch.Generator(device="cpu").manual_seed(1)
    directions = [torch.randn(each.shape, generator=generator).to(each) for each in out]
    named = dict(module.named_parameters())
    total = sum(((each * way).sum() for each, way in zip(out, directions, strict=True)), torch.zeros(()))
    wanted = [*leaves, *named.values()]
    found = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
    gradients = dict(zip(named, found[len(leaves) :], strict=True))
    return _Computed([each.detach() for each in out], list(found[: len(leaves)]), gradients)


def _left_behind(module: nn.Module) -> list[Tensor]:
    """Tensors with a graph that a forward has left in attributes, such as an auxiliary loss."""
    values = [value for each in module.modules() for name, value in vars(each).items() if name not in OF_EVERY_MODULE]
    return [each for each in tensors_in(values) if each.is_floating_point() and each.grad_fn is not None]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _without_weights(block: CheckedBlock) -> nn.Module:
    """Returns a copy of a block with parameters on the meta device and without hooks."""
    try:
        memo: dict[int, Any] = {
            id(each): nn.Parameter(torch.empty(each.shape, dtype=torch.float32, device="meta"))
            for each in block.module.parameters()
        }
        memo |= {id(each): each.detach() for each in _left_behind(block.module)}  # of an earlier run
        # A run names its attention in Transformers' configs after this copy is made.
        configs = [vars(each).get("config") for each in block.module.modules()]
        memo |= {id(each): each for each in configs if hasattr(each, ATTENTION_OF_CONFIG)}
        made = copy.deepcopy(block.module, memo)
    except Exception as error:
        raise ConfigError(
            f"{block.name} ({type(block.module).__name__}) cannot be copied ({type(error).__name__}: {error}), and "
            f"tensor_parallel's plan is checked on a copy of each block; leave the block out of the plan, or make it "
            f"copyable (copy.deepcopy)"
        ) from error
    for module in made.modules():
        for name, value in list(vars(module).items()):
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                setattr(module, name, type(value)())
        put_compiled_call(module, None)
        module.__dict__.pop(CALL, None)
    return made.eval()


def _dtype_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype in which a call is checked: fp64 if it has such an input, else fp32."""
    wide = any(each.dtype is torch.float64 for each in tensors_in((args, kwargs)))
    return torch.float64 if wide else torch.float32


def _with_weights(skeleton: nn.Module, device: torch.device, seed: int, dtype: torch.dtype) -> nn.Module:
    """Returns a copy with random weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    made = copy.deepcopy(skeleton)
    known: dict[int, nn.Parameter] = {}
    for path, module in made.named_modules():
        for name, parameter in parameters_in(module).items():
            if parameter is None:
                continue
            if id(parameter) not in known:
                generator.manual_seed(seed ^ zlib.crc32(f"{path}.{name}".encode()))
                values = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                values = values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + values / 4
                known[id(parameter)] = nn.Parameter(values.to(device))
            parameters_in(module)[name] = known[id(parameter)]
        for name, buffer in buffers_in(module).items():
            if buffer is not None and not buffer.is_meta:
                buffers_in(module)[name] = buffer.to(device, dtype) if buffer.is_floating_point() else buffer.to(device)
    return made
