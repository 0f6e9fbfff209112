"""Check of context parallelism: a short text is computed once whole and once divided over the ranks, and the results are
compared, before a module trains on its first batch and on some later ones.

A wrong division (positions that begin at 0 on each rank, attention that was not intercepted, a mean over unequally many
tokens) runs without an error and trains something else. So outputs of all modules are compared token by token, what is given
to attention, and losses: once those of the model, and once those of noise in the place of the outputs that the loss takes,
since losses of a model without training hardly differ between tokens, and terms with small factors hardly change them.
Without gradients and dropout; logs and what a step leaves in attributes are undone.

I1: all ranks of a group check the same batches: the first one, each that differs from all before in the kind of its tensors,
    in that ranks have unequally many of a value that masks or ignores tokens, or in how the step decides by the length of its
    texts (text_lengths.py), and one after 1, 2, 4... optimizer steps: what mixes tokens may have begun with a factor of zero.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_ptm.errors import AngelPTMError, ConfigError
from lightning_ptm.parallel.attention_calls import AttentionCalls
from lightning_ptm.parallel.context import ContextParallel
from lightning_ptm.parallel.nested_tensors import tensors_in
from lightning_ptm.runtime.autograd.recompute import ignoring_stored_exchanges
from lightning_ptm.runtime.tensors.random_functions import NoDropout
from lightning_ptm.torch_internals import TorchDispatchMode, base_of
from lightning_ptm.trainer.batch_steps import CheckSchedule
from lightning_ptm.trainer.micro_batches import samples_of
from lightning_ptm.trainer.module_state import undone
from lightning_ptm.trainer.text_lengths import Found, LengthComparison, TextLengths, pairs

_TOKENS = 4
"""Tokens of a chunk in a short text."""
_LONG = 1 << 20
"""Tokens of a text for which comparisons of numbers of tokens are described."""
_EXPERTS = ".experts."
"""Part of the names of modules that compute some of the tokens, in any order, or are not called: they are not compared."""
_SPECIAL = (-100, 0)
"""Values by which tokens are ignored (targets), masked or padded."""
_MOST_PADS = 2
"""Other such values of a tensor."""
_MOST_COMPARED = 8
"""Most comparisons of a module's own that are counted in each batch."""
_TOLERANCES = {torch.bfloat16: (0.1, 2e-2), torch.float16: (0.05, 4e-3), torch.float64: (1e-5, 1e-6)}
_PRECISE = (1e-3, 1e-4)
"""Largest differences of outputs, relative to the largest element, and of losses."""
_OF_NOISE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest differences of the losses of the same noise, where nothing is computed in 16 bits: a term with a small factor may
mix tokens, such as one that balances experts."""

Step = Callable[[Any], Any]
"""Computes a batch as the module's training step does; returns what the step returns."""


Comparison = tuple[Callable[[Tensor, int], Tensor], int]
"""torch.eq, torch.lt or torch.gt, and the integer that tokens are compared with."""


@dataclasses.dataclass(slots=True)
class _Call:
    """Output of a module's call, or queries, keys and values of attention."""

    name: str
    tensors: list[Tensor]
    alone: bool
    """Whether the output is a single tensor."""


@dataclasses.dataclass(slots=True)
class _Run:
    """A step that was computed: its loss, outputs of modules, and what was given to attention."""

    loss: Tensor | None
    calls: list[_Call]
    attention: list[_Call]
    slices: set[tuple[str, torch.Size]]
    drawn: int
    """Digest of the random states of Python and NumPy if the step drew from them, else 0."""
    taken: set[int]
    """Numbers of the calls whose outputs the step itself takes, outside of modules."""
    lengths: Found
    """Comparisons of numbers of tokens."""


class _Slices(TorchDispatchMode):
    """Dispatch mode that records names and shapes of slices of parameters."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: set[tuple[str, torch.Size]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.slice.Tensor:
            name = self._names.get(id(args[0]), self._names.get(id(base_of(args[0]))))
            if name is not None:
                self.found.add((name, result.shape))
        return result


class _Taken(TorchFunctionMode):
    """Context that records which outputs of modules a step takes outside of modules, such as its loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        """Number of modules whose forward is in progress."""
        self.found: set[int] = set()
        self._calls: dict[int, tuple[int, Tensor]] = {}
        """By id of an output, which is kept so that no other tensor gets its id: the number of the call."""

    def add(self, call: int, output: Any) -> None:
        """Adds the output of a call."""
        if isinstance(output, Tensor):
            self._calls[id(output)] = call, output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside:
            for each in tensors_in((args, kwargs or {})):
                if id(each) in self._calls:
                    self.found.add(self._calls[id(each)][0])
        return func(*args, **(kwargs or {}))


class LossCheck:
    """The checks of one module in one run.

    Args:
        module: the module that trains.
        context: this rank's part in its context group.
        attention: records calls of attention, which a module may make outside of all others.
        alone: context in which this rank computes without the ranks that have other texts: these may not check theirs.
    """

    def __init__(
        self,
        module: nn.Module,
        context: ContextParallel,
        attention: AttentionCalls,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module = module
        self._context = context
        self._attention = attention
        self._alone = alone
        # State.
        self._seen: set[Any] = set()
        self._compared: dict[Comparison, None] = {}
        """Comparisons by which the step tells tokens apart: an ordered set."""
        self._limits: dict[str, tuple[LengthComparison, LengthComparison]] = {}
        """Comparisons of numbers of tokens, of whole texts and of parts, by their description; the same on all ranks."""
        self._schedule = CheckSchedule()

    def wanted(self, batch: Any, steps: int) -> bool:
        """Whether a batch is of a kind that was not checked yet, or enough optimizer steps have passed (I1)."""
        return self._schedule.due(steps) or self._kind(batch) not in self._seen

    def check(self, batch: Any, steps: int, at: Callable[[Any, Tensor], Any], step: Step) -> None:
        """Checks a whole batch. Collective in the group.

        Args:
            steps: optimizer steps so far.
            at: returns the tokens of a batch at these positions.
            step: computes whole or divided batches, as the context has it.

        Raises:
            ConfigError: results differ.
        """
        self._schedule.checked(steps)
        _, *others = kind = self._kind(batch)
        self._seen.add(kind)
        as_real = [self._check(batch, chosen, at, step) for chosen in self._short_texts(batch, _TOKENS)]
        self._seen.add((self._decided(length_of(batch)), *others))  # with the comparisons that were found
        # As many tokens whole as a rank computes of the batch, so that they fit.
        longer = length_of(batch) // (2 * self._context.group.size**2)
        if not all(as_real) and longer > _TOKENS:
            for chosen in self._short_texts(batch, longer):
                self._check(batch, chosen, at, step)

    def _check(self, batch: Any, chosen: Tensor, at: Callable[[Any, Tensor], Any], step: Step) -> bool:
        """Returns whether the step compares numbers of tokens with the same results as in the batch."""
        short = at(batch, chosen)
        size, length = self._context.group.size, length_of(batch)
        lengths = length, length // size
        own = self._context.own_positions(len(chosen) // size, chosen.device)
        divided = at(short, own)

        def whole_run(noise: Mapping[int, Tensor]) -> _Run:
            with self._context.whole():
                return self._computed(step, short, noise, Extremes(high=False))

        def divided_run(noise: Mapping[int, Tensor]) -> _Run:
            with self._context.of_step():
                return self._computed(step, divided, noise, Extremes(high=True))

        one, other = whole_run({}), divided_run({})
        if one.loss is None or other.loss is None:
            return True  # a step that skips this batch
        self._compare_outputs(one.calls, other.calls, own, len(chosen))
        if len(one.attention) == len(other.attention):  # Transformers' own attention calls something else
            self._compare_outputs(one.attention, other.attention, own, len(chosen))
        # Equal values at each position, as zeros at the start, would hide it.
        if one.slices != other.slices:
            names = sorted({name for name, _ in one.slices ^ other.slices})
            raise self._refusal(
                f"it takes as many rows of {names[0]} as a part has tokens, where it needs those of the part"
            )
        # A loss in fp32 of outputs in 16 bits differs as these do; that of noise, below, does not.
        dtypes = {one.loss.dtype, *(each.dtype for call in one.calls for each in call.tensors)}
        compared = list(pairs(one.lengths, other.lengths))
        as_short = all(
            each.result == each.at(size) for pair in compared for each, size in zip(pair, lengths, strict=True)
        )
        described = {" and ".join(each.words(_LONG) for each in pair): pair for pair in compared}
        digest = _digest(repr(sorted(described)).encode())
        tolerance = max(_TOLERANCES.get(each, _PRECISE)[1] for each in dtypes)
        not_as_short, of_all = self._compare_losses(one.loss, other, tolerance, (not as_short, digest))
        self._compare_lengths(compared, lengths)
        if of_all == digest:  # on all ranks: they have to check the same batches (I1)
            self._limits |= dict(list(described.items())[: _MOST_COMPARED - len(self._limits)])
        as_real = not not_as_short
        of_tokens = _calls_of_tokens(one.calls, other.calls, size)
        if not of_tokens:
            return as_real
        replaced = {max(of_tokens), *(one.taken & other.taken & of_tokens.keys())}
        noise, of_part = {}, {}
        for at_call in sorted(replaced):
            theirs, ours = one.calls[at_call].tensors[0], other.calls[at_call].tensors[0]
            generator = torch.Generator().manual_seed(1 + at_call)
            noise[at_call] = torch.randn(theirs.shape, generator=generator, dtype=torch.float32).to(theirs)
            of_part[at_call] = _own_noise(noise[at_call], theirs, ours, of_tokens[at_call], own, len(chosen))
        narrow = any(each.itemsize < 4 for call in one.calls for each in call.tensors)
        one, other = whole_run(noise), divided_run(of_part)
        if one.loss is not None and other.loss is not None and bool(one.loss.isfinite().all()):
            most = _TOLERANCES.get(one.loss.dtype, _PRECISE)[1]
            # Transformers compute losses in fp32, which others in fp64 may be added to.
            precise = torch.float32 if torch.float32 in dtypes else one.loss.dtype
            self._compare_losses(one.loss, other, most if narrow else _OF_NOISE.get(precise, most))
        return as_real

    # -- short texts --------------------------------------------------------------------------------------------------

    def _kind(self, batch: Any) -> Any:
        found: list[Any] = []
        length = length_of(batch)
        for each in tensors_in(batch):
            cut = each.dim() > 1 and each.shape[1] == length
            uneven = [self._uneven(times) for times in self._times(each)] if cut else [bool(each.any())]
            always = len(_SPECIAL) + len(self._compared)
            found.append((each.dtype, each.dim(), cut, *uneven[:always], any(uneven[always:])))
        return (self._decided(length), *found)

    def _times(self, each: Tensor) -> Iterator[Tensor]:
        """Yields how often each position has a value that may mask or ignore tokens, for each such value; of weights, their
        sums."""
        if each.is_complex():
            return
        if each.is_floating_point() and not bool(((each == 0) | (each == 1)).all()):
            if each.dim() == 2:
                yield each.double().sum(0)
            return
        always: list[Comparison] = [*((torch.eq, value) for value in _SPECIAL), *self._compared]
        pads: list[Comparison] = [(torch.eq, value) for value in self._pads(each)]
        for compare, value in always + pads:
            yield compare(each, value).movedim(1, 0).flatten(1).sum(1)

    def _pads(self, each: Tensor) -> list[int]:
        """Returns values that a text begins or ends with twice, as padding does."""
        if each.is_floating_point() or each.dtype is torch.bool or each.dim() != 2 or each.shape[1] < 2:
            return []
        ends = {int(at[0]) for pair in (each[:, :2], each[:, -2:]) for at in pair.tolist() if at[0] == at[1]}
        known = {value for compare, value in self._compared if compare is torch.eq}
        return sorted(ends.difference(_SPECIAL, known))[:_MOST_PADS]

    def _uneven(self, times: Tensor) -> bool:
        """Whether the ranks' sums of what positions have differ by more than rounding."""
        size = self._context.group.size
        if len(times) % (2 * size):
            return False
        in_chunks = times.reshape(2 * size, -1).sum(1).tolist()
        of_ranks = [in_chunks[rank] + in_chunks[-1 - rank] for rank in range(size)]
        return bool(max(of_ranks) - min(of_ranks) > 1e-6 * max(map(abs, of_ranks)))

    def _short_texts(self, batch: Any, tokens: int) -> list[Tensor]:
        """Returns the positions of short texts: a few of each chunk. For each value that ranks have unequally many of, there
        is a text in which they have, too.

        Args:
            tokens: most of a chunk.
        """
        length = length_of(batch)
        self._context.check_length(length)
        cut = [each for each in tensors_in(batch) if each.dim() > 1 and each.shape[1] == length]
        device = cut[0].device if cut else None
        texts: list[Tensor] = []
        for each in cut:
            for times in self._times(each):
                if self._uneven(times) and not any(self._uneven(times[text]) for text in texts):
                    texts.append(torch.tensor(self._chosen(length, tokens, times.tolist()), device=device))
        return texts or [torch.tensor(self._chosen(length, tokens, [0] * length), device=device)]

    def _chosen(self, length: int, tokens: int, times: Sequence[float]) -> list[int]:
        """Returns some positions of each chunk: of one rank those with a value, and of the others those without.

        Args:
            times: how often each position has the value.
        """
        size = self._context.group.size
        of_chunk = length // (2 * size)
        count = min(tokens, of_chunk)
        chunks = [range(at, at + of_chunk) for at in range(0, length, of_chunk)]
        sums = [sum(times[at] for at in (*chunks[rank], *chunks[-1 - rank])) for rank in range(size)]
        richest = sums.index(max(sums))
        found = []
        for index, chunk in enumerate(chunks):
            sign = -1 if index in (richest, 2 * size - 1 - richest) else 1
            # Among equals those that are far apart.
            spread = sorted(chunk, key=lambda at: (at - chunk.start) * count % of_chunk)
            found += sorted(sorted(spread, key=lambda at: sign * times[at])[:count])
        return found

    # -- computing ----------------------------------------------------------------------------------------------------

    def _computed(self, step: Step, batch: Any, noise: Mapping[int, Tensor], extremes: Extremes) -> _Run:
        """Computes a step.

        Args:
            noise: by number of a call, what replaces its output.
            extremes: gives the step's random numbers.
        """
        names = {id(module): name for name, module in self._module.named_modules()}
        calls: list[_Call] = []
        taken = _Taken()

        def begun(module: nn.Module, _args: Any) -> None:
            taken.inside += module is not self._module

        def called(module: nn.Module, _args: Any, output: Any) -> Any:
            taken.inside -= module is not self._module
            if id(module) not in names or module is self._module or _EXPERTS in f".{names[id(module)]}.":
                return None
            tensors = [each.detach() for each in tensors_in(output) if each.is_floating_point()]
            calls.append(_Call(names[id(module)], tensors, isinstance(output, Tensor)))
            replacement = noise.get(len(calls) - 1)
            taken.add(len(calls) - 1, output if replacement is None else replacement)
            return replacement

        handles = [register_module_forward_pre_hook(begun), register_module_forward_hook(called)]
        lengths = TextLengths(samples_of(batch), length_of(batch))
        slices = _Slices({id(each): name for name, each in self._module.named_parameters()})
        try:
            with (
                self._alone(),
                self._attention.recording() as attention,
                undone(self._module),
                torch.no_grad(),
                NoDropout(),
                extremes,
                # What ranks count has to be the same, and they compute the same in whole texts only.
                Compared({} if self._context.divided else self._compared),
                isolate_rng(include_cuda=False),
                ignoring_stored_exchanges(),
                self._context.group.seeded(1),
                slices,
                taken,
                lengths,
            ):
                before = _state_of_others()
                result = step(batch)
                drawn = 0 if _state_of_others() == before else before
        except AngelPTMError:
            raise
        except Exception as error:
            raise ConfigError(
                f"context_parallel_size={self._context.group.size}: training_step was tried without gradients on short texts "
                f"({length_of(batch)} tokens) of the first batch, to compare the loss of whole texts with that "
                f"of parts, and raised {type(error).__name__}: {error}; let it take texts of any length, with "
                f"tokens and targets that the data set has cut, or train with context_parallel_size=1"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        loss = result.get("loss") if isinstance(result, dict) else result
        given = [_Call("", each, alone=False) for each in attention]
        return _Run(
            loss.detach() if isinstance(loss, Tensor) else None,
            calls,
            given,
            slices.found,
            drawn,
            taken.found,
            lengths.found,
        )

    # -- comparison ---------------------------------------------------------------------------------------------------

    def _compare_outputs(self, whole: Sequence[_Call], divided: Sequence[_Call], own: Tensor, length: int) -> None:
        named = [each.name for each in whole]
        if named != [each.name for each in divided]:
            raise self._refusal(
                f"its training step calls {len(whole)} modules for whole texts and {len(divided)} for parts"
            )
        tolerance = 0.0
        for theirs, ours in zip(whole, divided, strict=True):
            for one, other in zip(theirs.tensors, ours.tensors, strict=False):
                expected = _expected(one, other, own, length)
                if expected is None:
                    continue
                # What is computed from 16 bits differs as they do.
                tolerance = max(tolerance, _TOLERANCES.get(other.dtype, _PRECISE)[0])
                difference = min(_difference(other, each) for each in expected)
                if not difference <= tolerance:
                    what = f"the output of {theirs.name} differs" if theirs.name else "what attention is given differs"
                    raise self._refusal(f"{what} by {difference:.2g} of its size")

    def _compare_losses(
        self, whole: Tensor, divided: _Run, tolerance: float, numbers: Sequence[float] = ()
    ) -> list[float]:
        """Returns the means of the ranks' numbers."""
        assert divided.loss is not None
        loss = divided.loss.reshape(()).double()
        own = torch.stack([loss, *loss.new_tensor([divided.drawn, *numbers])])
        mean, drawn, *found = (self._context.group.sum(own) / self._context.group.size).tolist()
        if drawn != divided.drawn:
            raise self._refusal(
                "its training step draws random numbers of Python or NumPy, which differ between ranks (call "
                "lightning.seed_everything before the Trainer is made)"
            )
        expected = float(whole.double())
        if not abs(mean - expected) <= tolerance * max(1.0, abs(expected)):
            raise self._refusal(
                f"the loss of whole texts is {expected:.10g}, and the mean of the ranks' losses {mean:.10g}"
            )
        return found

    def _compare_lengths(
        self, compared: Sequence[tuple[LengthComparison, LengthComparison]], lengths: tuple[int, int]
    ) -> None:
        for whole, part in compared:
            if whole.result == part.result and whole.at(lengths[0]) != part.at(lengths[1]):
                raise self._refusal(
                    f"it compares numbers of tokens, and in this batch {whole.words(lengths[0])} of whole texts and "
                    f"{part.words(lengths[1])} of parts are not both true or false (tokens x "
                    f"trainer.strategy.ranks_of_sequence are those of whole texts)"
                )

    def _decided(self, length: int) -> tuple[bool, ...]:
        """Returns the results of the known comparisons for texts of this length."""
        size = self._context.group.size
        return tuple(
            each for whole, part in self._limits.values() for each in (whole.at(length), part.at(length // size))
        )

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"context_parallel_size={self._context.group.size} would train something else than {type(self._module).__name__} "
            f"does with whole texts: {what}. A module has to take its tokens' positions from "
            f"trainer.strategy.positions(length), to mix tokens in scaled_dot_product_attention only, and to draw no random "
            f"numbers but dropout, and its loss has to be a mean over as many tokens on each rank, of targets that come with "
            f"the batch (a causal model of Transformers counts its own labels, whatever is ignored); or train with "
            f"context_parallel_size=1"
        )


def length_of(batch: Any) -> int:
    """Returns the number of tokens of a batch's sequences: dimension 1 of its first tensor that has one; 0 if none has."""
    return next((each.shape[1] for each in tensors_in(batch) if each.dim() > 1), 0)


def _dim_of_tokens(whole: Tensor, divided: Tensor, size: int) -> int | None:
    """Returns the only dimension that differs, by the factor `size`; None if there is no such one."""
    if whole.dim() != divided.dim():
        return None
    differ = [dim for dim in range(whole.dim()) if whole.shape[dim] != divided.shape[dim]]
    return differ[0] if len(differ) == 1 and whole.shape[differ[0]] == size * divided.shape[differ[0]] else None


def _tokens_of(whole: Tensor, dim: int, own: Tensor, length: int, *, tokens_first: bool = False) -> Tensor:
    """Returns a rank's tokens of a tensor with all tokens along a dimension, alone or together with the batch."""
    own = own.to(whole.device)
    if whole.shape[dim] == length:
        return whole.index_select(dim, own)
    many = whole.shape[dim] // length
    sizes = (length, many) if tokens_first else (many, length)
    return whole.unflatten(dim, sizes).index_select(dim + (not tokens_first), own).flatten(dim, dim + 1)


def _expected(whole: Tensor, divided: Tensor, own: Tensor, length: int) -> list[Tensor] | None:
    """Returns what a rank's output may be, given that of whole texts; None if shapes do not tell, or it is a loss."""
    if whole.shape == divided.shape:
        return [whole] if whole.dim() > 1 else None
    dim = _dim_of_tokens(whole, divided, length // len(own))
    if dim is None or whole.shape[dim] % length:
        return None
    return [_tokens_of(whole, dim, own, length, tokens_first=each) for each in (False, True)]


def _calls_of_tokens(whole: Sequence[_Call], divided: Sequence[_Call], size: int) -> dict[int, int]:
    """Returns the calls whose output is one tensor with a dimension of tokens: by number, that dimension."""
    found = {}
    for at, (theirs, ours) in enumerate(zip(whole, divided, strict=True)):
        if theirs.alone and theirs.tensors and ours.tensors:
            dim = _dim_of_tokens(theirs.tensors[0], ours.tensors[0], size)
            if dim is not None:
                found[at] = dim
    return found


def _own_noise(noise: Tensor, theirs: Tensor, ours: Tensor, dim: int, own: Tensor, length: int) -> Tensor:
    """Returns a rank's tokens of noise, in the order of those of an output that it replaces: of whole texts `theirs`."""
    tokens_first = min(
        (False, True),
        key=lambda each: _difference(ours, _tokens_of(theirs, dim, own, length, tokens_first=each)),
    )
    return _tokens_of(noise, dim, own, length, tokens_first=tokens_first)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if not ours.numel():
        return 0.0
    size = float(theirs.abs().max())
    off = float((ours.double() - theirs.double()).abs().max())
    return off / size if size else off


# -- what a step draws and compares -----------------------------------------------------------------------------------


def _state_of_others() -> int:
    """Returns a digest of the random states of Python and NumPy that a float can hold."""
    numpy: Any = sys.modules.get("numpy")
    states = repr(random.getstate())
    if numpy is not None:
        _, keys, at, *_ = numpy.random.get_state()
        states += f"{keys.tobytes()!r}{at}"
    return _digest(states.encode())


def _digest(data: bytes) -> int:
    """Returns a digest that a float can hold."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=5).digest(), "big")


class Extremes(TorchFunctionMode):
    """Context in which random numbers between two bounds are the lowest or the highest: whatever depends on them differs
    between whole texts and parts, also what seldom does, such as a layer that is skipped once in a hundred steps.

    Args:
        high: whether they are the highest.
    """

    _OF_ONE = (torch.rand, torch.rand_like)
    _CHANCES = (torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_)

    def __init__(self, *, high: bool) -> None:
        super().__init__()
        self._high = high

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("generator") is not None:
            return out  # ranks draw the same from a generator of the module's own
        if func in self._OF_ONE:
            out.fill_(1 - 1e-6 if self._high else 1e-6)
        elif func is Tensor.uniform_:
            named = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), args[1:3], strict=False)), **(kwargs or {})}
            out.fill_(named["to" if self._high else "from"])
        elif func in self._CHANCES:
            given = args[1:] or [each for name, each in (kwargs or {}).items() if name == "p"]
            chance = given[0] if given else (0.5 if func is Tensor.bernoulli_ else args[0])
            out.copy_(torch.as_tensor(chance) >= 1 if not self._high else torch.as_tensor(chance) > 0)
        return out


_COMPARISONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    **dict.fromkeys(("eq", "ne", "__eq__", "__ne__"), torch.eq),
    **dict.fromkeys(("lt", "ge", "less", "greater_equal", "__lt__", "__ge__"), torch.lt),
    **dict.fromkeys(("gt", "le", "greater", "less_equal", "__gt__", "__le__"), torch.gt),
}
"""By the names of torch's functions: what tells the same integers apart."""


class Compared(TorchFunctionMode):
    """Context that records by which integers a step tells tokens apart: what it compares integers with, and what entropies
    and tables of weights ignore or weigh otherwise than most.

    Args:
        found: gets the comparisons as keys.
    """

    _ENTROPIES = (F.cross_entropy, F.nll_loss)

    def __init__(self, found: dict[Comparison, None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in self._ENTROPIES:
            self._add_weights(kwargs.get("weight", args[2] if len(args) > 2 else None))
            self._add(kwargs.get("ignore_index", args[4] if len(args) > 4 else -100))
        elif len(args) == 2 and _is_of_integers(args[0]):
            if name in _COMPARISONS:
                self._add(args[1], _COMPARISONS[name])
            elif func is torch.isin and isinstance(args[1], Tensor):
                for each in args[1].flatten()[:_MOST_COMPARED].tolist():
                    self._add(each)
        elif func is Tensor.__getitem__ and _is_of_integers(args[1]) and args[0].dim() == 1:
            self._add_weights(args[0])
        return func(*args, **kwargs)

    def _add_weights(self, weights: Any) -> None:
        if isinstance(weights, Tensor) and weights.is_floating_point():
            for each in (weights != weights.median()).nonzero().flatten()[:_MOST_COMPARED].tolist():
                self._add(each)

    def _add(self, value: Any, compare: Callable[[Tensor, int], Tensor] = torch.eq) -> None:
        if type(value) is not int or (compare is torch.eq and value in _SPECIAL):
            return
        if len(self._found) < _MOST_COMPARED:
            self._found[compare, value] = None


def _is_of_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.dtype is torch.bool)
