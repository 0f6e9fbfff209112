"""Counter of operations and saved bytes of a model's units, in one forward on the meta device: no memory, no device.

For a batch of the config's own shape it counts operations (torch's formulas for matrix multiplications and convolutions;
attention as if without a causal mask) and bytes of tensors saved by autograd, in the compute dtype, with attention as fused
kernels do it (inputs and output, no matrix of scores). For work other than matrix multiplication it counts elements of
exponential functions (GELU, softmax), and bytes that all operations read and write. A backward counts as two forwards.
Mixtures of experts route evenly: each expert computes its share of the tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from lightning_ptm.parallel.context_attention import chosen_way
from lightning_ptm.parallel.counted_group import CountedTensorGroup, Sent
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.runtime.autograd.recompute import RecomputedForwardWrapper, replace, stand_in
from lightning_ptm.runtime.autograd.slices import CutArguments
from lightning_ptm.runtime.autograd.slices_check import CallBytes
from lightning_ptm.runtime.autograd.token_slices import TokenCut, chosen_count, most_slices
from lightning_ptm.runtime.tensors.autograd_graphs import tensors_in
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.torch_internals import attention_by, storage_id, tree_leaves


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Counts of one unit's forward, without the units inside it.

    Attributes:
        flops: operations of the forward.
        attention_flops: the part of them in attention.
        curved_numel: elements of exponential functions.
        moved_bytes: bytes that operations other than attention read and write.
        kernels: number of operations that read or write, each a kernel that a GPU launches.
        saved_bytes: bytes of tensors that autograd saves until the unit's backward.
        input_bytes: bytes that are saved instead if the unit is recomputed, including results of exchanges; inputs that
            several units share count for the first.
        taken_bytes: bytes of inputs, without results of exchanges.
        row_bytes: for an expert in expert parallelism, bytes of all rows that are sent to it.
        sent, sent_back: exchanges of activations with other ranks in the forward, and in the backward: those of a tensor
            group, and in attention those of a context group.
        ends_with: the unit whose backward also ends this unit's: the first unit that took a shared input, whose gradient is
            complete only then. None: its own, as for units that are trained as a whole and have other inputs (blocks of a
            decoder, which take the encoder's output).
        end: of the root, the part of its work behind the last call of another unit (head and loss); None: not the root.
        slice_bytes: bytes that autograd saves in addition while the module in slices of its tokens whose slice saves most is
            computed again.
    """

    flops: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    taken_bytes: int = 0
    attention_flops: int = 0
    curved_numel: int = 0
    moved_bytes: int = 0
    kernels: int = 0
    row_bytes: int = 0
    sent: SendOrder = NOTHING_SENT
    sent_back: SendOrder = NOTHING_SENT
    ends_with: int | None = None
    end: UnitWork | None = None
    slice_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Divided:
    """A rank's part of sequences (`context_parallel_size`).

    Attributes:
        size: number of ranks that have the tokens of a sequence.
        way: the setting `context_parallel`.
    """

    size: int = 1
    way: str = "auto"

    def exchanges(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[SendOrder, SendOrder, int]:
        """Returns what a rank sends for attention over the tokens of all ranks, forward and backward, and the bytes of
        results that are kept for a recomputation."""
        n, keys, queries = self.size, key.nbytes + value.nbytes, query.nbytes
        out = query.nbytes // query.shape[-1] * value.shape[-1]
        way = chosen_way(n, query, key, value) if self.way == "auto" else self.way
        if way == "ulysses":
            once = SendOrder((queries + keys + out) * (n - 1) // n, 2, rounds=1)
            return once, once, queries + keys + out
        if way == "ring":
            wide = keys * max(1, 4 // key.itemsize)  # gradients go round in fp32 or wider
            forward, back = SendOrder(keys * (n - 1), n - 1, rounds=1), keys * (n - 1) + wide * n
            return forward, SendOrder(back, 2 * n - 1, rounds=1), out
        return SendOrder(keys * (n - 1), 1, rounds=1), SendOrder(2 * keys * (n - 1), 2, rounds=1), out


WHOLE = Divided()


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Facts about a model that are looked up once, for batches of any size.

    Attributes:
        position: index of the unit, by id of its module.
        storages: storages of parameters, by their address.
        mixtures: modules whose routing depends on values.
    """

    position: dict[int, int]
    storages: frozenset[int]
    mixtures: tuple[MixtureOfExperts, ...]


def anatomy(model: nn.Module, units: Sequence[Unit]) -> Anatomy:
    """Returns a model's `Anatomy`, and puts the model into training mode."""
    model.train()
    return Anatomy(
        {id(unit.module): unit.index for unit in units},
        frozenset(storage_id(parameter.untyped_storage()) for parameter in model.parameters()),
        tuple(module for module in model.modules() if isinstance(module, MixtureOfExperts)),
    )


class Counter:
    """Counter of one forward, by hooks on units and torch modes (`counting`).

    Args:
        known: the model's anatomy.
        units: the model's units.
        experts: the experts that ranks divide.
        group: the tensor group that the model is cut for.
        divided: which part of the sequences the batch has.
        token_slices: by name, how modules are cut. Those that a run finds by a trial are counted as if they were whole.
    """

    def __init__(
        self,
        known: Anatomy,
        units: Sequence[Unit],
        experts: DividedExperts | None = None,
        group: CountedTensorGroup | None = None,
        divided: Divided = WHOLE,
        token_slices: Mapping[str, TokenCut] | None = None,
    ) -> None:
        # Configuration.
        self._known = known
        self._divided = divided
        self._group = group
        self._units = units
        self._token_slices = {name: cut for name, cut in (token_slices or {}).items() if not cut.by_trial}
        self._experts = experts
        self._absent = experts.holders.remote_units(0) if experts is not None else frozenset[int]()
        self._position = known.position
        self._parameters = known.storages
        self._end = len(units)
        """Index of counts of the root since the last call of another unit, to which they are added at the next one."""
        # State.
        self._inside = [self._end]
        self._flops = [0] * (len(units) + 1)
        self._attention = [0] * (len(units) + 1)
        self._curved = [0] * (len(units) + 1)
        self._moved = [0] * (len(units) + 1)
        self._kernels = [0] * (len(units) + 1)
        self._saved = [0] * (len(units) + 1)
        self._of_slices = [0] * (len(units) + 1)
        self._inputs = [0] * (len(units) + 1)
        self._rows = [0] * (len(units) + 1)
        self._sent = [NOTHING_SENT] * (len(units) + 1)
        self._sent_back = [NOTHING_SENT] * (len(units) + 1)
        self._kept = [0] * (len(units) + 1)
        """By unit, bytes of results of exchanges that are stored for a recomputation."""
        self._counted = self._sent_so_far()
        self._seen: dict[int, Tensor] = {}
        self._seen_inputs: dict[int, Tensor] = {}
        self._entered: list[int] = []
        """Units in the order of their calls."""
        self._takers: dict[tuple[Any, int], int] = {}
        """By autograd node and output of an input, the index in `_entered` of the first unit that took it."""
        self._ends: dict[int, int] = {}
        """By unit, the index in `_entered` of the unit with which its backward ends."""
        self._like: dict[int, int] = {}
        """By unit, the unit whose counts stand for its own."""

    def works(self) -> tuple[UnitWork, ...]:
        """Returns the counts of each unit."""
        end = self._work(self._end, self._end)
        self._add_end_to_root()
        sources = [self._like.get(index, index) for index in range(len(self._units))]
        root, *others = (
            UnitWork() if index in self._absent else self._work(index, at) for index, at in enumerate(sources)
        )
        return (dataclasses.replace(root, end=end), *others)

    def _work(self, index: int, at: int) -> UnitWork:
        """The counts `at` which those of a unit are."""
        return UnitWork(
            flops=self._flops[at],
            saved_bytes=self._saved[at],
            slice_bytes=self._of_slices[at],
            input_bytes=self._inputs[at] + self._kept[at],
            taken_bytes=self._inputs[at],
            attention_flops=self._attention[at],
            curved_numel=self._curved[at],
            moved_bytes=self._moved[at],
            kernels=self._kernels[at],
            row_bytes=self._rows[index],
            sent=self._sent[at],
            sent_back=self._sent_back[at],
            ends_with=self._ends_with(index),
        )

    def _add_end_to_root(self) -> None:
        """Adds what the root has computed since the last call of another unit to its other work."""
        numbers = (
            self._flops,
            self._attention,
            self._curved,
            self._moved,
            self._kernels,
            self._saved,
            self._inputs,
            self._rows,
            self._kept,
        )
        for counts in numbers:
            counts[0] += counts[self._end]
            counts[self._end] = 0
        for sent in (self._sent, self._sent_back):
            sent[0] += sent[self._end]
            sent[self._end] = NOTHING_SENT

    def _ends_with(self, unit: int) -> int | None:
        first = self._entered[self._ends[unit]] if unit in self._ends else unit
        return None if first == unit else first

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which a forward of the model is counted."""
        handles: list[RemovableHandle] = []
        restore: list[Callable[[], None]] = []
        computed: list[nn.Module] = []
        try:
            for module in self._known.mixtures:
                restore.append(stand_in(module, self._even(module)))
                stands, rest = self._experts_of(module)
                computed += stands
                restore += [replace(expert, forward=_given) for expert in rest]
            for name, cut in self._token_slices.items():
                whole = self._units[0].module.get_submodule(name)
                restore.append(replace(whole, forward=partial(self._in_token_slices, whole, cut, whole.forward)))
            for unit in self._units[1:]:
                if unit.index in self._like or unit.index in self._absent:
                    continue
                handles.append(unit.module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                around = vars(unit.module).get("forward")
                if isinstance(around, RecomputedForwardWrapper):
                    inside = around.with_inside(partial(self._takes_and_computes, unit.index, around.inside))
                    restore.append(replace(unit.module, forward=inside))
                handles.append(unit.module.register_forward_hook(self._leave, always_call=True))
            # Before the hooks of units: an expert's rows must be a tensor of its own, not a view of all rows.
            handles += [expert.register_forward_pre_hook(_apart, prepend=True) for expert in computed]
            with (
                torch.autograd.graph.saved_tensors_hooks(self._keep, _given),
                _Attention(self._attends),
                MetaCalls(self._called),
            ):
                yield
                self.tell_sent()
        finally:
            for handle in handles:
                handle.remove()
            while restore:
                restore.pop()()

    def _attends(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Counts operations of attention, over the keys of all ranks, and the exchanges for it."""
        scores = query.shape[:-1].numel() * key.shape[-2] * self._divided.size
        flops = 2 * scores * (query.shape[-1] + value.shape[-1])
        if self._divided.size > 1:
            forward, backward, kept = self._divided.exchanges(query, key, value)
            self._sent[self._inside[-1]] += forward
            self._sent_back[self._inside[-1]] += backward
            self._kept[self._inside[-1]] += kept
        self._flops[self._inside[-1]] += flops
        self._attention[self._inside[-1]] += flops
        self._kernels[self._inside[-1]] += 1

    def _called(self, call: Call) -> None:
        """Counts a call, for the unit that computes."""
        unit = self._inside[-1]
        self._flops[unit] += call.flops
        self._moved[unit] += call.moved_bytes
        self._curved[unit] += call.curved_numel
        self._kernels[unit] += call.moved_bytes > 0

    def _sent_so_far(self) -> Sent:
        return Sent() if self._group is None else self._group.sent

    def tell_sent(self) -> None:
        """Counts bytes sent since the last call for the unit that computes, with one round of agreement for them."""
        before, self._counted = self._counted, self._sent_so_far()
        new, unit = self._counted.since(before), self._inside[-1]
        self._sent[unit] += SendOrder(new.forward_bytes, new.forwards, rounds=min(1, new.forwards))
        self._sent_back[unit] += SendOrder(new.backward_bytes, new.backwards, rounds=min(1, new.backwards))
        self._kept[unit] += new.kept_bytes

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.tell_sent()
        self._add_end_to_root()
        unit = self._position[id(module)]
        self._inside.append(unit)
        self._entered.append(unit)
        here, firsts = len(self._entered) - 1, list[int]()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                firsts.append(self._takers.setdefault((leaf.grad_fn, leaf.output_nr), here))
        if here in firsts and all(each.parameter.requires_grad for each in self._units[unit].parameters):
            firsts = [here]  # as a run does: it does not wait for inputs that another unit took before
        if firsts:
            self._ends[unit] = min(self._ends.get(unit, here), *firsts)
        if not isinstance(vars(module).get("forward"), RecomputedForwardWrapper):
            self._takes(unit, (args, kwargs))

    def _takes_and_computes(self, unit: int, inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._takes(unit, (args, kwargs))
        return inside(*args, **kwargs)

    def _takes(self, unit: int, given: Any) -> None:
        """Counts the inputs that are saved if the unit is recomputed."""
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

    def _in_token_slices(
        self, module: nn.Module, cut: TokenCut, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Counts a module in slices of its tokens.

        It is computed three times: the third counts a half for the forward, since a backward counts as two of these.
        """
        unit, leaves = self._inside[-1], tree_leaves((args, kwargs))
        moved = [each.transpose(0, 1) if isinstance(each, Tensor) and each.dim() > 2 else each for each in leaves]
        call = CutArguments.of(moved, {})
        numbers = self._flops, self._attention, self._curved, self._moved
        before = [counts[unit] for counts in numbers]
        kernels, seen = self._kernels[unit], dict(self._seen)
        saved, self._saved[unit] = self._saved[unit], 0
        given = sum(call.leaves[at].nbytes for at in call.cut)
        try:
            found = forward(*args, **kwargs)
            of_call, results = self._saved[unit], sum(each.nbytes for each in tensors_in(found))
        finally:
            self._saved[unit], self._seen = saved, seen
        wanted = cut.count
        if wanted is None:
            already = sum(
                each.nbytes
                for each in leaves
                if isinstance(each, Tensor) and storage_id(each.untyped_storage()) in self._seen
            )
            weights = sum(each.nbytes for each in module.parameters() if each.requires_grad)
            wanted = chosen_count(most_slices(call), CallBytes(of_call + already, given, results), weights)
        slices = min(wanted, max(1, call.samples))
        self._of_slices[unit] = max(self._of_slices[unit], of_call // slices)
        for counts, already in zip(numbers, before, strict=True):
            counts[unit] += (counts[unit] - already) // 3
        self._kernels[unit] += (self._kernels[unit] - kernels) * (4 * slices - 3) // 3
        for each in leaves:
            if isinstance(each, Tensor):
                self._keep(each)
        return found

    def _first_time(self, tensor: Tensor, seen: dict[int, Tensor]) -> bool:
        key = storage_id(tensor.untyped_storage())
        if key in self._parameters or key in seen:
            return False
        seen[key] = tensor.detach()  # kept alive, or another storage could get the same address
        return True

    def _held(self, module: MixtureOfExperts) -> tuple[list[int], list[int]]:
        """Indices of a layer's experts that this rank has, and the first unit of each divided one."""
        if self._experts is None:
            return list(range(len(module.experts))), []
        place = next(place for place, (_, layer) in enumerate(self._experts.layers) if layer is module)
        units = self._experts.units[place]
        held = [index for index, of_expert in enumerate(units) if of_expert and of_expert[0] not in self._absent]
        return held, [units[index][0] for index in held]

    def _experts_of(self, module: MixtureOfExperts) -> tuple[list[nn.Module], list[nn.Module]]:
        """The experts of this rank that are computed, and those for which the first one's counts stand."""
        held, _ = self._held(module)
        experts = [module.experts[index] for index in held]
        own = [self._position.get(id(expert)) for expert in experts]
        if own[0] is None:
            return experts, []
        self._like.update({index: own[0] for index in own[1:] if index is not None})
        return experts[:1], experts[1:]

    def _even(self, module: MixtureOfExperts) -> Callable[[Tensor], tuple[Tensor, Routing]]:
        """Returns a forward with even routing, for a mixture whose routing depends on values."""
        held, first_units = self._held(module)
        of_group = 1 if self._experts is None else self._experts.mesh.sizes[Axis.EXPERT]

        def forward(x: Tensor) -> tuple[Tensor, Routing]:
            tokens = x.flatten(0, -2)
            capacity = module.capacity(len(tokens))  # of an expert, for each rank of the group
            even = math.ceil(len(tokens) * module.choices * of_group / len(module.experts))
            rows = max(1, min(even, of_group * capacity))
            scores = module.router.probabilities(tokens)
            weights = scores.topk(module.choices, dim=-1).values
            if module.choices > 1:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            # The experts' results for all choices, which are saved for the multiplication with their weights.
            kept = min(len(tokens) * module.choices, capacity * len(module.experts))
            weighted = tokens.new_empty(kept, tokens.shape[1]) * weights.flatten()[:1].to(tokens.dtype)
            # In one call, as in a run: the ranks of a tensor group sum the results of all experts at once.
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
    """Counts attention as a fused kernel: its operations and saved tensors (the meta device would decompose it)."""

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        with attention_by(self._attend):  # of nn.MultiheadAttention; this mode is off inside of it
            return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Any:
        self._add(query, key, value)
        return _Fused.apply(query, key, value, attn_mask)


class _Fused(torch.autograd.Function):
    """Saves the tensors that fused attention saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # In the memory layout of fused kernels, so that merging heads copies nothing.
        *batch, heads, length, _ = query.shape
        out = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-3, -2)
        ctx.save_for_backward(query, key, value, out, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError("counting runs no backward")
