"""A plan of tensor parallelism is proven, not trusted: blocks that ranks divide are computed once whole and once cut.

A plan that cuts a packed projection in one piece, or leaves a count of heads as it was, runs, and trains something else: its
loss is off by a thousandth, its gradients by a tenth. So the first call of each kind of block brings its inputs here, where
two copies of the block with random weights compute them in fp32, forward and backward, one whole and one cut; a difference
beyond rounding is refused by name.

Owns copies of blocks without weights, made before anything was cut. I1: nothing of the run changes: no weight, no random
number, nothing that is saved for its backward pass. I2: a kind is proven by all ranks of a group in the same calls: the first
one, those with other flags or other kinds of arguments, those in which inputs have gradients that had none, and, of parts of
the sequence, the first one in training. I3: what is computed in training is compared, too, without dropout; not of a block
that draws other random numbers there, since ranks draw their own.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptm.errors import ConfigError, RankError, some
from lightning_ptm.parallel.checked_blocks import OF_EVERY_MODULE, CheckedBlock
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.nested_tensors import copied, results_in, tensors_in, told
from lightning_ptm.parallel.rules import Rule
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.autograd.recompute import none_kept
from lightning_ptm.runtime.tensors.parts import cut
from lightning_ptm.torch_internals import CALL, buffers_in, parameters_in, put_compiled_call

_TOLERANCE = 1e-3
"""Of the largest element: fp32 rounds to 1e-6 of it, wrong plans are off by 1e-2 and more."""
_SMALL_GRADIENT = 1e-2
"""Of the largest gradient of a block's parameters: what is smaller is compared with so much of it. Some are nothing but what
fp32 rounds (a bias of keys, which a softmax takes away again)."""

_IN_TRAINING = -1
"""Among the numbers of inputs of a call: the block is in training."""

Divided = Callable[[nn.Module, Mapping[str, Rule]], Any]
"""Cuts a module by a plan whose names are those inside of it; what comes back tells boxes and partial ones (`CutModule`)."""


class PlanCheck:
    """Proves blocks when they are first called.

    Args:
        blocks: with whole parameters, before anything is cut.
        divide: cuts a copy.
        of_parts: between layers that are cut, ranks have parts of the sequence.

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
        """Of blocks: any call may be the first of its kind."""
        self._inside: dict[str, list[Any]] = {}
        """By block, of layers in those that have not been called."""
        self._proven: dict[str, list[_Call]] = {}
        """By kind."""
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
        """What has not been called is not proven."""
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
            # A token alone does not tell what is made of several (I2: its length is the same).
            alone = self._of_parts and not any(each.dim() > 1 and each.shape[-2] > 1 for each in given[:1])
            if self._of_parts and module.training:
                tracked.add(_IN_TRAINING)
            call = _Call(told((args, kwargs)), tracked, alone)
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
                    f"layers inside of {block.name} ({type(block.module).__name__}) are called, and it is not, so that what "
                    f"tensor_parallel_plan makes of it cannot be proven; call the module itself, as in `block(x)` and not "
                    f"`block.forward(x)` or another of its methods, or leave its layers out of the plan"
                )

        return called

    def _prove(
        self, kind: str, block: CheckedBlock, skeleton: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # I1
        device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
        fp32 = torch.autocast(device.type, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), keep, fp32, _default_dtype(torch.float32), none_kept():
            whole = _with_weights(skeleton, device, int(kind[:12], 16))
            divided = copy.deepcopy(whole)
            try:
                of_whole = self._drawn_alike(whole, args, kwargs)
            except RankError:  # nothing about this plan: another rank has failed
                raise
            except Exception as error:
                raise self._not_alone(block, error) from error
            if not of_whole.outputs:
                raise ConfigError(
                    f"{block.name} ({type(block.module).__name__}) gives no tensor of floating-point numbers that its cut "
                    f"could be proven by; let its forward return tensors, or mappings, sequences or data classes of them, or "
                    f"leave its layers out of tensor_parallel's plan"
                )
            try:
                known = self._divide(divided, block.plan)
                of_divided = self._drawn_alike(divided, args, kwargs)
                differs = list(self._differences(block, of_whole, of_divided, known, divided))
                if self._of_parts and block.module.training:
                    differs += self._in_training(block, whole, args, kwargs)
            except RankError:
                raise
            except Exception as error:  # the user's forward may raise anything
                raise self._refusal(block, f"cannot be computed ({type(error).__name__}: {error})") from error
        # Of many that differ, those of layers that are cut tell most.
        beyond = [(off, name) for off, name in differs if off > _TOLERANCE]
        cut_ones = [(off, name) for off, name in beyond if any(f".{each}." in name for each in block.plan)]
        worst = max(cut_ones or beyond, default=(0.0, ""))
        of_all = self._group.gather(torch.tensor([worst[0]], dtype=torch.float64, device=device))
        if float(of_all.max()) > _TOLERANCE:
            where = f", most in {worst[1]}" if beyond else ""
            raise self._refusal(block, f"computes something else (off by {float(of_all.max()):.2g}{where})")

    def _drawn_alike(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 1
    ) -> _Computed:
        with self._group.drawing_apart(seed=seed):
            return _computed(module, args, kwargs)

    def _in_training(
        self, block: CheckedBlock, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[float, str]]:
        """What differs in training (I3)."""
        for name, module in block.module.named_modules():
            whole.get_submodule(name).training = module.training
        divided = copy.deepcopy(whole)
        with _NoDropout():
            # Each of a copy: buffers change in training.
            once, again = (self._drawn_alike(copy.deepcopy(whole), args, kwargs, seed) for seed in (1, 2))
            random = torch.tensor([0 if once.same_as(again) else 1], device=once.outputs[0].device)
            if bool(self._group.gather(random).any()):
                return []
            known = self._divide(divided, block.plan)
            of_divided = self._drawn_alike(divided, args, kwargs)
        return list(self._differences(block, once, of_divided, known, divided))

    def _not_alone(self, block: CheckedBlock, error: Exception) -> ConfigError:
        return ConfigError(
            f"{block.name} ({type(block.module).__name__}) cannot be proven: a copy of it, made when the run was set up, "
            f"does not compute ({type(error).__name__}: {error}); hand it what it needs as arguments of its forward, not in "
            f"attributes that are set before a call, or leave its layers out of tensor_parallel's plan"
        )

    def _refusal(self, block: CheckedBlock, what: str) -> ConfigError:
        rules = some([f"{name}: {rule}" for name, rule in block.plan.items()], 6)
        between = (
            "; what is between them must take tokens one by one, or sequence_parallel=False be given"
            if self._of_parts
            else ""
        )
        return ConfigError(
            f"with tensor_parallel_size={self._group.size}, {block.name} ({type(block.module).__name__}) {what} when it is "
            f"cut as tensor_parallel's plan says ({rules}): packed projections need ColwiseParallel(parts=how "
            f"many), attributes that "
            f"count heads ColwiseParallel(heads=their names), norms of a rank's own heads Partial(), and what "
            f"follows ColwiseParallel() "
            f"without gather=True must work on a part until a layer with RowwiseParallel(), what a forward sets "
            f"in attributes too; "
            f"heads have to divide{between}; mend the plan, or leave these layers out of it"
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
    """Of a block.

    Attributes:
        told: its arguments but for numbers.
        tracked: numbers of the inputs that had gradients.
        alone: of a sequence that is one token long.
    """

    told: str
    tracked: set[int]
    alone: bool

    def covers(self, other: _Call) -> bool:
        return self.told == other.told and other.tracked <= self.tracked and self.alone <= other.alone


@dataclasses.dataclass(frozen=True, slots=True)
class _Computed:
    """Outputs, and the gradients of inputs and parameters."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]

    def same_as(self, other: _Computed) -> bool:
        """To the bit."""
        pairs = (
            *zip(self.outputs, other.outputs, strict=True),
            *zip(self.inputs, other.inputs, strict=True),
            *zip(self.parameters.values(), other.parameters.values(), strict=True),
        )
        return all(
            theirs is None if ours is None else theirs is not None and torch.equal(ours, theirs)
            for ours, theirs in pairs
        )


class _NoDropout(TorchFunctionMode):
    """Within, functions of torch drop nothing."""

    _DROPOUTS = (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


def _difference(ours: Tensor | None, theirs: Tensor | None, least: float = 0.0) -> float:
    """The largest difference, as a part of the largest element.

    Args:
        least: what that counts as if it is smaller.
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
    args, kwargs = copied((args, kwargs), tracked)
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
    """What a forward has left in attributes for others to train with, such as a loss of its own."""
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
    """A copy whose parameters are on the meta device, without what others have hooked to it."""
    try:
        memo: dict[int, Any] = {
            id(each): nn.Parameter(torch.empty(each.shape, dtype=torch.float32, device="meta"))
            for each in block.module.parameters()
        }
        memo |= {id(each): each.detach() for each in _left_behind(block.module)}  # of an earlier run
        made = copy.deepcopy(block.module, memo)
    except Exception as error:
        raise ConfigError(
            f"{block.name} ({type(block.module).__name__}) cannot be copied ({type(error).__name__}: {error}), and a plan of "
            f"tensor parallelism is proven on a copy of each block; leave it out of tensor_parallel's plan, or "
            f"let it be copied"
        ) from error
    for module in made.modules():
        for name, value in list(vars(module).items()):
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                setattr(module, name, type(value)())
        put_compiled_call(module, None)
        module.__dict__.pop(CALL, None)
    return made.eval()


def _with_weights(skeleton: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """A copy with random weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    made = copy.deepcopy(skeleton)
    known: dict[int, nn.Parameter] = {}
    for path, module in made.named_modules():
        for name, parameter in parameters_in(module).items():
            if parameter is None:
                continue
            if id(parameter) not in known:
                generator.manual_seed(seed ^ zlib.crc32(f"{path}.{name}".encode()))
                values = torch.randn(parameter.shape, generator=generator)
                values = values / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + values / 4
                known[id(parameter)] = nn.Parameter(values.to(device))
            parameters_in(module)[name] = known[id(parameter)]
        for name, buffer in buffers_in(module).items():
            if buffer is not None and not buffer.is_meta:
                buffers_in(module)[name] = (
                    buffer.to(device, torch.float32) if buffer.is_floating_point() else buffer.to(device)
                )
    return made
