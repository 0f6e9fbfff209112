"""Counts what a model computes and keeps, unit by unit, in one forward on the meta device: no memory, no device.

Counts, of a batch of the config's own shape: operations (torch's formulas for matrix multiplications and convolutions;
attention as its formula without advantage of a causal mask) and bytes that autograd keeps, in the compute dtype, with
attention as fused kernels do it (inputs and output, no matrix of scores). And what is no matrix multiplication: elements
that go through a function such as GELU or a softmax, and bytes that all operations read and write. Backward is taken as two
forwards.
Mixtures of experts route evenly: each expert computes its share of the tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_ptm.forecasting.meta_calls import Call, MetaCalls
from lightning_ptm.forecasting.send_order import NOTHING_SENT, SendOrder
from lightning_ptm.models.moe import MixtureOfExperts, Routing
from lightning_ptm.parallel.counted_group import CountedTensorGroup, Sent
from lightning_ptm.runtime.autograd.forward_wrappers import RecomputedForwardWrapper, stand_in
from lightning_ptm.runtime.autograd.recompute import replace
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.torch_internals import storage_id, tree_leaves


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit's forward, units inside it left out.

    Attributes:
        flops: of the forward; attention_flops: those of them that attention takes.
        curved_numel: elements that exponential functions are taken of.
        moved_bytes: that operations but attention read and write.
        saved_bytes: what autograd keeps of it until its backward.
        input_bytes: what is kept instead where it is recomputed, results of exchanges among it; inputs that several units
            share count for the first.
        row_bytes: of an expert that ranks divide, of all rows that come to it.
        sent: to the other ranks of a tensor group, in the forward; sent_back: in the backward.
        ends_with: the unit with whose backward its own ends: the first to take an input that both take, whose gradient is
            there when that one's is (what all blocks of a decoder take of the encoder). None: its own.
    """

    flops: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    attention_flops: int = 0
    curved_numel: int = 0
    moved_bytes: int = 0
    row_bytes: int = 0
    sent: SendOrder = NOTHING_SENT
    sent_back: SendOrder = NOTHING_SENT
    ends_with: int | None = None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What is looked up in a model of many modules once, for batches of any size.

    Attributes:
        position: of units, by the id of their module.
        storages: of parameters.
        mixtures: modules whose routing depends on values.
    """

    position: dict[int, int]
    storages: frozenset[int]
    mixtures: tuple[MixtureOfExperts, ...]


def anatomy(model: nn.Module, units: Sequence[Unit]) -> Anatomy:
    """Looks it up, and puts the model into training mode."""
    model.train()
    return Anatomy(
        {id(unit.module): unit.index for unit in units},
        frozenset(storage_id(parameter.untyped_storage()) for parameter in model.parameters()),
        tuple(module for module in model.modules() if isinstance(module, MixtureOfExperts)),
    )


class Counter:
    """One forward: whose turn it is, and what was seen."""

    def __init__(
        self,
        known: Anatomy,
        units: Sequence[Unit],
        experts: DividedExperts | None = None,
        group: CountedTensorGroup | None = None,
    ) -> None:
        # Configuration.
        self._known = known
        self._group = group
        self._units = units
        self._experts = experts
        self._absent = experts.holders.elsewhere(0) if experts is not None else frozenset[int]()
        self._position = known.position
        self._parameters = known.storages
        # State.
        self._inside = [0]
        self._flops = [0] * len(units)
        self._attention = [0] * len(units)
        self._curved = [0] * len(units)
        self._moved = [0] * len(units)
        self._saved = [0] * len(units)
        self._inputs = [0] * len(units)
        self._rows = [0] * len(units)
        self._sent = [NOTHING_SENT] * len(units)
        self._sent_back = [NOTHING_SENT] * len(units)
        self._kept = [0] * len(units)
        """Bytes of results of exchanges."""
        self._counted = self._sent_so_far()
        self._seen: dict[int, Tensor] = {}
        self._seen_inputs: dict[int, Tensor] = {}
        self._entered: list[int] = []
        """Units, as they were called."""
        self._takers: dict[tuple[Any, int], int] = {}
        """By an input's place in the graph, the place among these of the first that took it."""
        self._ends: dict[int, int] = {}
        self._like: dict[int, int] = {}
        """Unit -> the unit whose forward stands for its own."""

    def works(self) -> tuple[UnitWork, ...]:
        sources = [self._like.get(index, index) for index in range(len(self._units))]
        return tuple(
            UnitWork()
            if index in self._absent
            else UnitWork(
                flops=self._flops[at],
                saved_bytes=self._saved[at],
                input_bytes=self._inputs[at] + self._kept[at],
                attention_flops=self._attention[at],
                curved_numel=self._curved[at],
                moved_bytes=self._moved[at],
                row_bytes=self._rows[index],
                sent=self._sent[at],
                sent_back=self._sent_back[at],
                ends_with=self._ends_with(index),
            )
            for index, at in enumerate(sources)
        )

    def _ends_with(self, unit: int) -> int | None:
        first = self._entered[self._ends[unit]] if unit in self._ends else unit
        return None if first == unit else first

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        restore: list[Callable[[], None]] = []
        computed: list[nn.Module] = []
        try:
            for module in self._known.mixtures:
                restore.append(stand_in(module, self._even(module)))
                stands, rest = self._experts_of(module)
                computed += stands
                restore += [replace(expert, forward=_given) for expert in rest]
            for unit in self._units[1:]:
                if unit.index in self._like or unit.index in self._absent:
                    continue
                handles.append(unit.module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                around = vars(unit.module).get("forward")
                if isinstance(around, RecomputedForwardWrapper):
                    inside = around.with_inside(partial(self._takes_and_computes, unit.index, around.inside))
                    restore.append(replace(unit.module, forward=inside))
                handles.append(unit.module.register_forward_hook(self._leave, always_call=True))
            # Before the hooks of units, to which an expert's rows are its own, and no part of all that came.
            handles += [expert.register_forward_pre_hook(_apart, prepend=True) for expert in computed]
            with (
                torch.autograd.graph.saved_tensors_hooks(self._keep, _given),
                _Attention(self.attends),
                MetaCalls(self._called),
            ):
                yield
                self.tell_sent()
        finally:
            for handle in handles:
                handle.remove()
            while restore:
                restore.pop()()

    def attends(self, flops: int) -> None:
        """Operations of attention."""
        self._flops[self._inside[-1]] += flops
        self._attention[self._inside[-1]] += flops

    def _called(self, call: Call) -> None:
        """By the unit that computes."""
        unit = self._inside[-1]
        self._flops[unit] += call.flops
        self._moved[unit] += call.moved_bytes
        self._curved[unit] += call.curved_numel

    def _sent_so_far(self) -> Sent:
        return Sent() if self._group is None else self._group.sent

    def tell_sent(self) -> None:
        """What was sent since it was last asked, the unit that computes has sent, having met its group for it."""
        before, self._counted = self._counted, self._sent_so_far()
        new, unit = self._counted.since(before), self._inside[-1]
        self._sent[unit] += SendOrder(new.forward_bytes, new.forwards, rounds=min(1, new.forwards))
        self._sent_back[unit] += SendOrder(new.backward_bytes, new.backwards, rounds=min(1, new.backwards))
        self._kept[unit] += new.kept_bytes

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.tell_sent()
        unit = self._position[id(module)]
        self._inside.append(unit)
        self._entered.append(unit)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                first = self._takers.setdefault((leaf.grad_fn, leaf.output_nr), len(self._entered) - 1)
                self._ends[unit] = min(self._ends.get(unit, first), first)
        if not isinstance(vars(module).get("forward"), RecomputedForwardWrapper):
            self._takes(unit, (args, kwargs))

    def _takes_and_computes(self, unit: int, inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._takes(unit, (args, kwargs))
        return inside(*args, **kwargs)

    def _takes(self, unit: int, given: Any) -> None:
        """What is kept of a unit that is recomputed."""
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and self._first_time(leaf, self._seen_inputs):
                self._inputs[unit] += leaf.untyped_storage().nbytes()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self.tell_sent()
        self._inside.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        if self._first_time(tensor, self._seen):
            self._saved[self._inside[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    def _first_time(self, tensor: Tensor, seen: dict[int, Tensor]) -> bool:
        key = storage_id(tensor.untyped_storage())
        if key in self._parameters or key in seen:
            return False
        seen[key] = tensor.detach()  # kept alive, or another storage could come to have the same number
        return True

    def _held(self, module: MixtureOfExperts) -> tuple[list[int], list[int]]:
        """Experts of a layer that this rank has, and the first unit of each that ranks divide."""
        if self._experts is None:
            return list(range(len(module.experts))), []
        place = next(place for place, (_, layer) in enumerate(self._experts.layers) if layer is module)
        units = self._experts.units[place]
        held = [index for index, of_expert in enumerate(units) if of_expert and of_expert[0] not in self._absent]
        return held, [units[index][0] for index in held]

    def _experts_of(self, module: MixtureOfExperts) -> tuple[list[nn.Module], list[nn.Module]]:
        """Of the experts that this rank has: those that compute, and those for which the first one's work stands."""
        held, _ = self._held(module)
        experts = [module.experts[index] for index in held]
        own = [self._position.get(id(expert)) for expert in experts]
        if own[0] is None:
            return experts, []
        self._like.update({index: own[0] for index in own[1:] if index is not None})
        return experts[:1], experts[1:]

    def _even(self, module: MixtureOfExperts) -> Callable[[Tensor], tuple[Tensor, Routing]]:
        """Stands in for a mixture whose routing depends on values."""
        held, first_units = self._held(module)
        of_group = 1 if self._experts is None else self._experts.split.size

        def forward(x: Tensor) -> tuple[Tensor, Routing]:
            tokens = x.flatten(0, -2)
            capacity = module.capacity(len(tokens))  # of an expert, for each rank of the group
            even = math.ceil(len(tokens) * module.choices * of_group / len(module.experts))
            rows = max(1, min(even, of_group * capacity))
            scores = module.router.probabilities(tokens)
            weights = scores.topk(module.choices, dim=-1).values
            if module.choices > 1:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            # Results of all its choices that an expert computes, which are kept to be weighted.
            kept = min(len(tokens) * module.choices, capacity * len(module.experts))
            weighted = tokens.new_empty(kept, tokens.shape[1]) * weights.flatten()[:1].to(tokens.dtype)
            # All at once, as a run calls them: what the ranks of a tensor group add up is all that the experts compute.
            counts = [rows if index in held else 0 for index in range(len(module.experts))]
            came = tokens[:1].expand(sum(counts), -1).clone()
            out = tokens + module.experts(came, counts, 1 if self._experts is None else 0).sum(0)
            for unit in first_units:
                self._rows[unit] += rows * tokens.shape[1] * tokens.itemsize
            zero = scores.sum() * 0 + weighted.sum() * 0
            return out.view(x.shape), Routing(zero, scores.detach().sum(0), zero)

        return forward


def _apart(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].clone(),)


def _given(tensor: Tensor) -> Tensor:
    return tensor


class _Attention(TorchFunctionMode):
    """Puts a fused kernel's saved tensors and operations in the place of attention, which the meta device would do in
    parts."""

    def __init__(self, add: Callable[[int], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Any:
        scores = query.shape[:-1].numel() * key.shape[-2]
        self._add(2 * scores * (query.shape[-1] + value.shape[-1]))
        return _Fused.apply(query, key, value, attn_mask)


class _Fused(torch.autograd.Function):
    """Keeps what fused attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Laid out as fused kernels do, so that bringing heads together again copies nothing.
        *batch, heads, length, _ = query.shape
        out = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-3, -2)
        ctx.save_for_backward(query, key, value, out, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError("counting runs no backward")
