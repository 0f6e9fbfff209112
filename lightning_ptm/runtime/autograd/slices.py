"""Calls of a unit on slices of its batch, one after another.

Owns which arguments are cut and how results are joined. Tensors are cut along dimension 0 if it is as long as that of the
call's first floating-point tensor, which is taken for the number of samples; all other arguments are passed whole. Tensors
that have this length by chance (positions, a mask of tokens by tokens) are found by the check of slices_check.py, and passed
whole. Knows nothing of pages or of what a call on a slice does: recompute.py calls a unit on a slice as on a whole batch, so
that its forward keeps inputs only, and is computed again just before its backward.

I1: the slices are computed from the last to the first. Autograd takes the newest part of a graph first, so the backward goes
    through the slices in the order of the batch, and adds the gradients of a parameter in that order, in place.
I2: one slice's activations exist at a time: autograd ends the backward of a slice before it begins another one.
I3: before a unit is first called on slices, and before some later calls, slices_check.py checks that its samples do not
    depend on each other: a gate that is zero at first may hide that they do.
I4: results of slices that are the same tensor, or an argument, are the same tensor, or that argument, for the whole batch.
I5: no result of a check that has failed, and so no graph on weights, is alive when the check returns.
I6: ranks that exchange in a module agree whether it is cut, and in how many slices. Others need not: how one rank computes a
    module within a unit changes no collective.
I7: a call that a unit around recomputes is cut in the backward as it was in the forward, whatever has been decided since.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, combinations, islice
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_ptm.config import Slices
from lightning_ptm.errors import ConfigError, some
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts
from lightning_ptm.torch_internals import hooks_of_module, tree_flatten, tree_unflatten

T = TypeVar("T")

Call = Callable[..., Any]
Refuse = Callable[[str], ConfigError]
Check = Callable[["CutArguments", int, int], frozenset[int]]
"""See `SlicesCheck.shared_results`."""


def slices_of(units: Sequence[Unit], wanted: Slices, experts: DividedExperts | None = None) -> dict[int, int]:
    """Returns the number of slices of the batch of each sliced unit, by its index.

    Args:
        wanted: the setting `slices`.
        experts: experts that ranks divide.

    Raises:
        ConfigError: no unit has a name of the setting, or a sliced unit contains others, or divided experts.
    """
    if isinstance(wanted, int):
        wanted = {"*": wanted} if wanted > 1 else {}
    found: dict[int, int] = {}
    for pattern, count in wanted.items():
        if not isinstance(count, int):
            continue  # of tokens
        named = [unit for unit in units[1:] if fnmatchcase(unit.name, pattern)]
        if not named:
            names = some([unit.name for unit in units[1:]], 3) or "none but the module itself, which is never cut"
            raise ConfigError(
                f"slices asks for {count} slices of each unit named {pattern!r}, and there is none, so nothing would be "
                f"computed in slices; the units are {names}; name some of these, with * for any text, or choose others with "
                f"units=[...], the class names of blocks"
            )
        found.update((unit.index, count) for unit in named)
    found = {index: count for index, count in found.items() if count > 1}
    for unit in (units[index] for index in found):
        inside = next((each.name for each in units if each.name.startswith(f"{unit.name}.")), None)
        if inside is not None:
            raise ConfigError(
                f"slices would compute {unit.name} ({type(unit.module).__name__}) in slices, and it contains the unit "
                f"{inside}, which would be fetched for each of them; name units without others inside, as in "
                f"slices={{'layers.*': 8}}, or choose them with units=[...]"
            )
    refuse_experts({units[index].name: units[index].module for index in found}, experts)
    return found


def refuse_experts(cut: Mapping[str, nn.Module], experts: DividedExperts | None) -> None:
    """Refuses slices of modules in which ranks exchange tokens for divided experts.

    Args:
        cut: the modules that are cut, by name.

    Raises:
        ConfigError: one of them has divided experts, or is a part of a layer with these.
    """
    divided = frozenset[int]() if experts is None else experts.modules
    for name, module in cut.items() if divided else ():
        if not divided.isdisjoint(map(id, module.modules())):
            raise ConfigError(
                f"slices would compute {name} ({type(module).__name__}) in slices, and ranks exchange tokens for its experts "
                f"(expert_parallel_size above 1): batches of other ranks may have other numbers of slices, and these ranks "
                f"would wait for each other; name units and modules without experts, as in slices={{'layers.0': 8}}, or use "
                f"expert_parallel_size=1"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class CutArguments:
    """The arguments of a call, some of which are cut along dimension 0.

    Attributes:
        leaves: the arguments without their containers.
        spec: the containers.
        cut: indices of the leaves that are cut.
        samples: size of their dimension 0; 0: nothing is cut.
        first: index of the leaf that decides what is cut.
    """

    leaves: tuple[Any, ...]
    spec: Any
    cut: frozenset[int]
    samples: int
    first: int

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CutArguments:
        """Finds what is cut."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        first = next((at for at, each in enumerate(leaves) if _can_be_cut(each) and each.is_floating_point()), -1)
        samples = leaves[first].shape[0] if first >= 0 else 0
        cut = [at for at, each in enumerate(leaves) if samples and _can_be_cut(each) and each.shape[0] == samples]
        return cls(tuple(leaves), spec, frozenset(cut), samples, first)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Description of the call without numbers, sizes and cut arguments."""
        kinds = [(each.dim(), each.dtype) if isinstance(each, Tensor) else _kind(each) for each in self.leaves]
        numbers = [each for each in self.leaves if type(each) in (int, float)]
        # If there are as many numbers as samples, they may belong to samples (lengths), so each set of them is checked.
        return (str(self.spec), *kinds, *(numbers if len(numbers) >= self.samples else ()))

    @property
    def shapes(self) -> tuple[torch.Size | None, ...]:
        """Shapes of the tensors, of cut ones without their dimension 0."""
        return tuple(
            each.shape[at in self.cut :] if isinstance(each, Tensor) else None for at, each in enumerate(self.leaves)
        )

    @property
    def never_cut(self) -> frozenset[int]:
        """Indices of the tensors whose dimension 0 is not the number of samples; 1 may stand for all samples."""
        return frozenset(
            at
            for at, each in enumerate(self.leaves)
            if _can_be_cut(each) and at not in self.cut and each.shape[0] != 1 and self.samples > 1
        )

    def without(self, whole: frozenset[int]) -> CutArguments:
        """Returns the call with these leaves passed whole in addition."""
        return dataclasses.replace(self, cut=self.cut - whole)

    def ways(self) -> Iterator[CutArguments]:
        """Yields the call with each set of tensors that may be cut: first all, and always with the first tensor."""
        others = sorted(self.cut - {self.first})
        whole = chain.from_iterable(combinations(others, count) for count in range(len(others) + 1))
        for each in islice(whole, _MOST_WAYS):
            yield self.without(frozenset(each))

    @property
    def columns(self) -> int:
        """Size of dimension 1 of the tensor that decides what is cut; 1 if that has one or two dimensions."""
        first = self.leaves[self.first] if self.first >= 0 else None
        return first.shape[1] if first is not None and first.dim() > 2 else 1

    def of_few_columns(self, wanted: int) -> CutArguments | None:
        """Returns the call with some columns, the elements of dimension 1, of each tensor that is cut. None: there are not
        more, or other arguments may belong to columns.

        Args:
            wanted: number of columns.
        """
        columns = self.columns
        if columns <= wanted:
            return None
        leaves = list(self.leaves)
        for at, each in enumerate(leaves):
            if at in self.cut and each.dim() > 1 and each.shape[1] == columns:
                leaves[at] = each[:, :: columns // wanted][:, :wanted]
            elif isinstance(each, Tensor):
                if columns in each.shape or (at in self.cut and each.shape[1:2] not in ((), (1,))):
                    return None
            elif type(each) not in (bool, str, float, int, type(None)) or (type(each) is int and each == columns):
                return None
        return dataclasses.replace(self, leaves=tuple(leaves))

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with other leaves."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def slices(self, sizes: Sequence[int]) -> list[list[Any]]:
        """Returns the leaves of slices of these numbers of samples."""
        # One operation for all slices, whose backward joins their gradients once.
        parts = {at: self.leaves[at].split(list(sizes)) for at in self.cut}
        return [
            [parts[at][number] if at in parts else each for at, each in enumerate(self.leaves)]
            for number in range(len(sizes))
        ]


_MOST_WAYS = 64


def _can_be_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not value.is_nested and value.layout is torch.strided


def _kind(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, str, Enum)) else type(value)


def modes_of(module: nn.Module) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns which modules are in training mode, and which parameters are trained."""
    return tuple(each.training for each in module.modules()), trained_in(module)


def trained_in(module: nn.Module) -> tuple[bool, ...]:
    """Returns which parameters are trained."""
    return tuple(each.requires_grad for each in module.parameters())


def sizes_of(samples: int, count: int) -> list[int]:
    """Returns the numbers of samples of at most `count` slices; they differ by one at most."""
    count = max(1, min(count, samples))
    return [samples // count + (number < samples % count) for number in range(count)]


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts of the batch as one tensor, with their order of dimensions in memory."""
    order = sorted(range(parts[0].dim()), key=parts[0].stride, reverse=True)
    if parts[0].is_contiguous() or not all(_is_dense(each, order) for each in parts):
        return torch.cat(list(parts))
    found = torch.cat([each.permute(order) for each in parts], order.index(0))
    return found.permute([order.index(at) for at in range(len(order))])


def _is_dense(tensor: Tensor, order: Sequence[int]) -> bool:
    return tensor.permute(list(order)).is_contiguous()


_FEW_NUMEL = 1024
"""Most elements of a result shared by all slices that is compared, if it is in RAM: no wait for a device."""


def joined(
    results: Sequence[Any], given: Sequence[Sequence[Any]], cut: CutArguments, shared: frozenset[int], refuse: Refuse
) -> Any:
    """Returns the result for the whole batch.

    Args:
        results: of the slices, in the order of the batch.
        given: leaves of the slices' arguments.
        shared: indices of leaves that are equal for all slices.

    Raises:
        ConfigError: a result that was equal for all slices no longer is.
    """
    flat = [tree_flatten(result) for result in results]
    found: dict[tuple[int, ...], Any] = {}
    whole = {tuple(id(each[at]) for each in given): cut.leaves[at] for at in cut.cut}
    leaves = []
    for at, each in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        same = tuple(map(id, each))
        if not isinstance(each[0], Tensor) or at in shared:
            if not all(_is_same(each[0], other) for other in each[1:]):
                raise refuse(f"result {at}, which has no dimension of samples, differs between slices")
            leaves.append(each[0])
        elif same in whole:
            leaves.append(whole[same])
        else:
            if same not in found:
                found[same] = _concatenated(each)
            leaves.append(found[same])
    return tree_unflatten(leaves, flat[0][1])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if one.numel() > _FEW_NUMEL or not in_ram(one):
            return True
        return torch.equal(one.detach(), other.detach())
    return type(one) not in (int, float, bool, str) or one == other or one != one


@dataclasses.dataclass(slots=True)
class _Checked:
    """Result of the check of one kind of calls.

    Attributes:
        cut: indices of the arguments that are cut.
        shared: indices of the results that are equal for all slices.
        calls: number of calls since the first check.
    """

    cut: frozenset[int]
    shared: frozenset[int]
    calls: int = 0


_SEVERAL = {1: 5, 2: 7, 4: 4, 8: 11, 16: 13}
"""By number of a call before which the check is made, the samples that it computes together without a graph; a shift of the
samples leaves them in their places only if it is by a multiple of each of these numbers."""


def _several(call: int, size: int, samples: int) -> int:
    """Returns the number of samples that the check before a call computes together without a graph.

    Args:
        size: samples of the largest slice. Twice as many without a graph fit into about the memory of a slice with one; the
            check has a graph of two samples in any case.
    """
    return max(3, min(_SEVERAL[call], 2 * max(2, size), samples))


class Exchanges(Protocol):
    """Exchanges of activations with the ranks that compute the same batch."""

    @property
    def issued(self) -> int:
        """Number of exchanges so far."""

    def largest(self, module: str, numbers: Sequence[float]) -> list[float]:
        """Returns the largest of each number on all these ranks. Collective."""


class ModuleQuestions:
    """Questions about a module that are answered by computing it, alike on all ranks that exchange in it (I6).

    Args:
        name: name of the module.
        exchanges: returns the exchanges of the run; None: ranks exchange no activations.
    """

    def __init__(self, name: str, exchanges: Callable[[], Exchanges | None] = lambda: None) -> None:
        self._name = name
        self._exchanges = exchanges
        # state
        self.divided = False
        """Whether ranks exchange in the module."""

    @property
    def of_ranks(self) -> bool:
        """Whether several ranks compute the same batch."""
        return self._exchanges() is not None

    def holds(self, question: Callable[[], Any]) -> bool:
        """Whether a question has another answer than False or a ConfigError, on all these ranks."""
        yes = bool(self._answer(lambda: question() is not False))
        exchanges = self._exchanges()
        return yes if exchanges is None or not self.divided else not exchanges.largest(self._name, [not yes])[0]

    def largest(self, question: Callable[[], Sequence[float]], count: int) -> Sequence[float] | None:
        """Returns the largest of each number in the answers of the ranks that compute the same batch; None: one of them has
        a ConfigError. They are asked even if the answer needs no exchange: the module's backward may have some.

        Args:
            count: number of numbers in an answer.
        """
        answer = self._answer(question)
        exchanges = self._exchanges()
        if exchanges is None:
            return answer
        refused, *numbers = exchanges.largest(self._name, [answer is None, *(answer or [0.0] * count)])
        return None if refused else numbers

    def _answer(self, question: Callable[[], T]) -> T | None:
        exchanges = self._exchanges()
        before = 0 if exchanges is None else exchanges.issued
        try:
            return question()
        except ConfigError:
            return None
        finally:
            self.divided |= exchanges is not None and exchanges.issued != before


@dataclasses.dataclass(frozen=True, slots=True)
class CutTrial:
    """Trial that decides whether the calls of a module are cut.

    Attributes:
        questions: about the module.
        saves_memory: whether slices of a call need less memory than the whole. Raises ConfigError: the call cannot be cut.
    """

    questions: ModuleQuestions
    saves_memory: Callable[[CutArguments], bool]


_MOST_KINDS = 64
"""Kinds of calls of which a trial decides. A module that has new hooks at each call would be checked at each."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """How a call is cut.

    Attributes:
        cut: indices of the arguments that are cut.
        sizes: numbers of samples of the slices.
        shared: indices of the results that are equal for all slices.
    """

    cut: frozenset[int]
    sizes: tuple[int, ...]
    shared: frozenset[int]


class SlicedCalls:
    """Calls of one unit on slices.

    Args:
        module: the unit's module.
        count: returns the number of slices of a call.
        check: checks that a call can be cut, and returns the leaves of its result that are equal for all slices:
            `SlicesCheck.shared_results`.
        refuse: makes the error that the unit cannot be computed in slices, from the reason.
        progress: advances background work; called before each slice but the first.
        trial: if it is given, a call that it does not find worth while, or that a check refuses, is not cut, and neither are
            later ones while the same parameters are trained, unless another kind was cut before. A hook that is added to a
            module inside makes another kind of calls, except where ranks exchange in the module: a hook of one rank would
            make it check alone.
        repeated: returns the result of a function; in a call that a unit around recomputes, what it was in the forward.
    """

    def __init__(
        self,
        module: nn.Module,
        count: Callable[[CutArguments], int],
        check: Check,
        refuse: Refuse,
        progress: Callable[[], None] = lambda: None,
        trial: CutTrial | None = None,
        repeated: Callable[[Callable[[], _Way | None]], _Way | None] = lambda decide: decide(),
    ) -> None:
        self._count = count
        self._trial = trial
        self._repeated = repeated
        self._progress = progress
        self._module = module
        self._check = check
        self._refuse = refuse
        self._checked: dict[Any, _Checked | None] = {}
        """Results of checks, by what may be cut in a call, its structure, `modes_of` the module, and hooks of modules inside;
        None: such a call is not cut."""
        self._whole_while = set[tuple[bool, ...]]()
        """While one of these sets of parameters is trained, no call is cut."""
        self._never_cut: dict[Any, frozenset[int]] = {}
        """By structure of a call, the arguments whose size was not the number of samples in some call."""

    def call(
        self,
        compute: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        again: bool = False,
        whole: Callable[[], Any] | None = None,
    ) -> Any:
        """Calls `compute` on the slices, and returns the result for the whole batch.

        Args:
            again: whether the call repeats an earlier one, so that it is not checked; one that is not known is not cut.
            whole: computes the call if it is not cut; None: `compute` does.
        """
        way = self._repeated(lambda: self._way(args, kwargs, again))
        if way is None:
            return (whole or partial(compute, *args, **kwargs))()
        cut = CutArguments.of(args, kwargs)
        cut = cut.without(cut.cut - way.cut)
        given = cut.slices(way.sizes)
        results: list[Any] = []
        for leaves in reversed(given):  # I1
            if results:
                self._progress()
            args, kwargs = cut.with_leaves(leaves)
            results.append(compute(*args, **kwargs))
        return joined(results[::-1], given, cut, way.shared, self._refuse)

    @torch.compiler.disable
    def _way(self, args: Sequence[Any], kwargs: Mapping[str, Any], again: bool) -> _Way | None:
        """Returns how a call is cut; None: it is not."""
        if self._whole_while and trained_in(self._module) in self._whole_while:
            return None
        cut = CutArguments.of(args, kwargs)
        sizes = sizes_of(cut.samples, self._count(cut))
        structure = cut.structure
        never = self._never_cut[structure] = self._never_cut.get(structure, frozenset()) | cut.never_cut
        if len(sizes) == 1:
            return None
        cut = cut.without(never)
        kind = cut.cut, structure, modes_of(self._module)
        known = *kind, self._hooks()
        if known not in self._checked and not again:
            find = self._checked_ways if self._trial is None else self._tried_ways
            found = find(cut, sizes[0])
            known = *kind, self._hooks()  # without hooks, if ranks exchange in it
            self._decide(known, found)
        checked = self._checked.get(known)
        if checked is None:
            return None
        checked.calls += not again
        cut = cut.without(cut.cut - checked.cut)
        if 1 < checked.calls in _SEVERAL and not again:
            several = _several(checked.calls, sizes[0], cut.samples)
            if self._trial is None:
                checked.shared = self._check(cut, several, sizes[0])
            elif not self._trial.questions.holds(partial(self._check, cut, several, sizes[0])):
                self._decide(known, None)
                return None
        return _Way(cut.cut, tuple(sizes), checked.shared)

    def _decide(self, known: Any, found: _Checked | None) -> None:
        self._checked[known] = found
        trained = trained_in(self._module)
        of_these = [each for (*_, modes, _), each in self._checked.items() if modes[1] == trained]
        if not any(of_these) or (self._trial is not None and len(of_these) > _MOST_KINDS):
            self._whole_while.add(trained)

    def _hooks(self) -> tuple[Any, ...]:
        if self._trial is None or self._trial.questions.divided:
            return ()
        return tuple(number for each in islice(self._module.modules(), 1, None) for number in hooks_of_module(each))

    def _tried_ways(self, cut: CutArguments, size: int) -> _Checked | None:
        """Finds a way to cut the call that saves memory; None: it is not cut.

        Args:
            size: samples of the largest slice.
        """
        trial = self._trial
        assert trial is not None
        for way in cut.ways():
            shared: list[frozenset[int]] = []

            def check(way: CutArguments = way, shared: list[frozenset[int]] = shared) -> None:
                shared.append(self._check(way, _several(1, size, cut.samples), size))

            if trial.questions.holds(partial(trial.saves_memory, way)) and trial.questions.holds(check):
                return _Checked(way.cut, shared[0])
        return None

    def _checked_ways(self, cut: CutArguments, size: int) -> _Checked:
        """Finds a way to cut the call.

        Args:
            size: samples of the largest slice.

        Raises:
            ConfigError: there is none; the message has the reason for the first way.
        """
        refused: list[ConfigError] = []
        for way in cut.ways():
            try:
                return _Checked(way.cut, self._check(way, _several(1, size, cut.samples), size))
            except ConfigError as error:
                refused.append(error)
                end_variables(error)
        raise refused[0]


def end_variables(error: BaseException) -> None:
    """Ends the variables of the functions that an error has passed, which it would keep alive (I5)."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__
    error.with_traceback(None)  # the caller's variables, of which the error may be one
