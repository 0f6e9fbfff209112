"""Check that a unit can be computed on slices of its batch: its samples must not depend on each other.

Computes two samples of a call that differ, forward and backward, once together and once each alone, with the weights of the
run; then three and more samples together, which finds what leaves two samples in their places, such as `x.roll(2, 0)`. How
many differs from check to check (slices.py). A difference is refused with the name of the unit.

I1: the run does not change: no buffer, no random number, no gradient of a parameter, no tensor saved for its backward.
    A unit that writes to its arguments is refused, since the values would be those of one slice. So is a unit that computes
    something else when it is called again, since each slice is a call.
I2: besides numbers, which rounding changes, what is exactly zero is compared: gradients of a sample's inputs where another
    sample's results alone have gradients, and all gradients where no result has one. So the gradient of a loss that a unit
    adds in its backward (a balance loss of experts) is found, however small it is.
I3: results reach the rest of the model through the caller alone. A tensor with a graph that is left in an attribute or that a
    hook has taken elsewhere (a router's logits, for a balance loss) is refused, and so are attributes with other values.
I4: dropout drops nothing in the check, and other random numbers are constants. A unit that draws them in a way that is not
    known is refused.
I5: hooks on parameters' gradients are not called: the user's may count, and those of divided layers refuse a gradient that
    one rank computes a part of.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.runtime.autograd.slices import Call, CutArguments, end_variables
from lightning_ptm.runtime.tensors.autograd_graphs import nodes_of, reads_others, tensors_in, without_hooks
from lightning_ptm.runtime.tensors.random_functions import NoRandomNumbers
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.torch_internals import buffers_in, storage_id, tree_flatten, version_of

READS_OTHERS = (
    "it computes with a tensor that has a gradient and is neither an argument nor a parameter of the module (a weight of "
    "another module, in a hook, a list or a closure), and slices would leave this gradient out"
)

_TOLERANCE_FP64, _TOLERANCE_FP32, _TOLERANCE_TF32, _TOLERANCE_16_BITS = 1e-10, 1e-4, 1e-3, 5e-2
"""Largest difference relative to the largest element: products with other numbers of rows round differently, in fp32 by up to
a thousand units in the last place. A smaller dependence on the number of samples is not found; one on their values is, by
gradients (I2)."""


class CallBytes(NamedTuple):
    """Memory of a call of a module.

    Attributes:
        saved: bytes that autograd saves for its backward, arguments included.
        given: bytes of the arguments that are cut.
        results: bytes of the results.
    """

    saved: float
    given: float
    results: float

    def of(self, tokens: int) -> CallBytes:
        """Returns the bytes for a number of tokens, if these are for one."""
        return CallBytes(*(each * tokens for each in self))


class SlicesCheck:
    """Check of the calls of one unit.

    Args:
        forward: the function that a call computes.
        unchanged: makes a context that restores what modules hold; its arguments are those of the call.
        quiet: context in which hooks on parameters do nothing, and saved tensors stay in place.
        tokens: whether tokens are cut, and not samples; dimension 0 is theirs.
        of_parameters: whether gradients of parameters are compared, too. They show that samples meet where a weight that is
            still zero hides it from results and from gradients of inputs. In 16 bits a gradient that nearly cancels may be
            refused wrongly, so this is for calls that may be left whole. For the same calls, Python's numbers that change
            in each call are refused: results may come to depend on them.
        alone: returns whether no other rank computes the same batch, and takes part in the check.
    """

    def __init__(
        self,
        unit: Unit,
        forward: Call,
        unchanged: Callable[[Sequence[Any], dict[str, Any]], AbstractContextManager[None]],
        quiet: Callable[[], AbstractContextManager[None]],
        *,
        tokens: bool = False,
        of_parameters: bool = False,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self._unit = unit
        self._tokens = tokens
        self._of_parameters = of_parameters
        self._alone = alone
        self._forward = forward
        self._unchanged = unchanged
        self._quiet = quiet

    def shared_results(self, cut: CutArguments, several: int = 3, size: int = 1) -> frozenset[int]:
        """Returns the indices of the results that do not depend on samples.

        Args:
            several: number of samples, 3 or more, that are computed together without a graph, besides three.
            size: samples of the largest slice. If tokens are cut, as many of two slices, or 1,024, are compared with both
                halves of them: few tokens do not show what reaches over many (dilated convolutions). They are those of as
                many texts as need no more memory than a slice, or 1,024 tokens. If these are refused, all texts decide,
                since the module may know their number.

        Raises:
            ConfigError: the unit cannot be computed on slices.
        """
        most = max(several, min(2 * size, cut.samples, _MOST_TOKENS))
        texts = max(
            1, max(_MOST_TOKENS, size * cut.columns // 2) // most
        )  # half: its gradients and copies take as much
        few = cut.of_few_columns(texts) if self._tokens and self._alone() else None
        if few is not None:
            try:
                return self._shared_results(few, several, size)
            except ConfigError as error:
                end_variables(error)
        return self._shared_results(cut, several, size)

    def _shared_results(self, cut: CutArguments, several: int, size: int) -> frozenset[int]:
        rows = _two_samples(cut)
        followed = _Followed()
        with self._quiet():
            with torch.no_grad():
                one = self._computed(cut, {at: each[:1] for at, each in rows.items()}, followed, again=True)
                together = []
                for count in sorted({3, several}):
                    # One sample among others that are equal: no shift of the samples leaves it in its place.
                    more = {at: torch.cat([each, *[each[:1]] * (count - 2)]) for at, each in rows.items()}
                    together.append(self._computed(cut, more, followed))
            whole = self._computed(cut, rows, followed)
            if whole.spec != one.spec:
                raise self.refusal(f"it returns {whole.spec} for two samples, and {one.spec} for one")
            drawn = {
                at: _numbers(both)
                for at, (both, each) in enumerate(zip(whole.results, one.results, strict=True))
                if _has_graph(both) and each.shape[:1] == (1,) and both.shape == (2, *each.shape[1:])
            }
            # A graph ends before the next call, so that there are never more activations than those of two samples.
            trained = [each for each in self._unit.module.parameters() if each.requires_grad]
            compared_parameters = trained if self._of_parameters else []
            with self._differentiating():
                whole.differentiate(drawn, trained, compared_parameters)
            alone = []
            for k in (0, 1):
                # again, since a module may write only where a graph is recorded
                each = self._computed(cut, {at: row[k : k + 1] for at, row in rows.items()}, followed, again=not k)
                with self._differentiating():
                    each.differentiate({at: seed[k : k + 1] for at, seed in drawn.items()}, None, compared_parameters)
                alone.append(each)
            far = self._computed_far(cut, size, compared_parameters, followed) if self._tokens else None
        compared = _Compared(self.refusal, whole, alone, frozenset(cut.cut), self._tolerance(cut, followed))
        shared = compared.results()
        for each in together:
            compared.places(each, shared)
        compared.others()
        compared.state()
        compared.gradients()
        if far is not None:
            far.joined_results(shared)
            far.gradients()
        for each in one, alone[0]:
            if each.changed is not None:
                raise self.refusal(each.changed)
        if followed.left():
            raise self.refusal(
                "a tensor that it computes is read by others than its caller, such as hooks (a router's logits, for a loss)"
            )
        return shared

    def _computed_far(
        self, cut: CutArguments, size: int, parameters: Sequence[nn.Parameter], followed: _Followed
    ) -> _Compared:
        """Computes tokens in the middle of the text together, and each half of them alone."""
        count = min(2 * size, cut.samples, _MOST_TOKENS)
        start, half = (cut.samples - count) // 2, count // 2
        drawn: dict[int, Tensor] = {}
        found: list[_Computed] = []
        for first, end in (0, count), (0, half), (half, count):
            rows = {at: cut.leaves[at][start + first : start + end] for at in cut.cut}
            each = self._computed(cut, rows, followed)
            if not found:
                drawn = {at: _numbers(result) for at, result in _with_rows(each.results, count) if _has_graph(result)}
            with self._differentiating():
                each.differentiate({at: seed[first:end] for at, seed in drawn.items()}, (), parameters)
            found.append(each)
        return _Compared(
            self.refusal, found[0], found[1:], frozenset(cut.cut), self._tolerance(cut, followed), many=True
        )

    def saves_more_than_inputs(self, cut: CutArguments) -> bool:
        """Whether autograd saves more for the call's backward than twice its inputs, which calls on slices save.

        Raises:
            ConfigError: the unit cannot be computed on slices.
        """
        found = self.bytes_of_token(cut)
        return found.saved >= 2 * found.given

    def bytes_of_token(self, cut: CutArguments) -> CallBytes:
        """Returns the bytes of a call for each sample, or token.

        Raises:
            ConfigError: the unit cannot be computed on slices.
        """
        rows = _two_samples(cut)
        saved, results = [], []
        for times in 1, 2:
            found: dict[int, Tensor] = {}

            def keep(tensor: Tensor, found: dict[int, Tensor] = found) -> Tensor:
                found[storage_id(tensor.untyped_storage())] = kept = tensor.detach()
                return kept  # not the tensor: see kept_in_place

            with self._quiet(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                more = {at: torch.cat([each] * times) for at, each in rows.items()}
                results.append(sum(each.nbytes for each in tensors_in(self._computed(cut, more, _Followed()).results)))
            saved.append(sum(each.untyped_storage().nbytes() for each in found.values()))
        # The difference, since weights that autocast has cast are saved, too, and do not belong to samples.
        given = sum(each.nbytes for each in rows.values())
        return CallBytes((saved[1] - saved[0]) / 2, given / 2, (results[1] - results[0]) / 2)

    def _computed(
        self, cut: CutArguments, rows: dict[int, Tensor], followed: _Followed, *, again: bool = False
    ) -> _Computed:
        """Computes a call.

        Args:
            rows: replacements of arguments, by index.
            again: whether the call is made twice, and the results are compared.
        """
        leaves, inputs = list(cut.leaves), {}
        for at, each in enumerate(leaves):
            if isinstance(each, Tensor):
                leaf = rows.get(at, each)
                follows = leaf.is_floating_point() and (at in rows or each.requires_grad)
                leaves[at] = leaf.detach().clone().requires_grad_(follows)
                if follows:
                    inputs[at] = leaves[at]
        args, kwargs = cut.with_leaves(leaves)
        with self._unrandom(rows.values()), self._unchanged(args, kwargs):
            # not the leaves themselves: a forward may write to its inputs
            given = [each * 1 if at in inputs else each for at, each in enumerate(leaves)]
            found = self._called(cut, given, inputs, followed)
            if again:
                second = self._called(cut, given, inputs, followed)
                found.changed = found.changes_until(second, self._tolerance(cut, followed))
        return found

    def _tolerance(self, cut: CutArguments, followed: _Followed) -> float:
        """Returns the tolerance for the coarsest dtype of a call."""
        tensors = [*self._unit.module.parameters(), *(each for each in cut.leaves if isinstance(each, Tensor))]
        kinds = {each.device.type for each in tensors if torch.amp.is_autocast_available(each.device.type)}
        itemsize = min([followed.itemsize, *(each.itemsize for each in tensors if each.is_floating_point())])
        if itemsize < 4 or any(map(torch.is_autocast_enabled, kinds)):
            return _TOLERANCE_16_BITS
        if itemsize > 4:
            return _TOLERANCE_FP64
        # Products of one row may be computed in fp32 where those of more are in TF32.
        coarse = torch.get_float32_matmul_precision() != "highest" or not all(map(in_ram, tensors))
        return _TOLERANCE_TF32 if coarse else _TOLERANCE_FP32

    def _called(
        self, cut: CutArguments, given: Sequence[Any], inputs: dict[int, Tensor], followed: _Followed
    ) -> _Computed:
        args, kwargs = cut.with_leaves(given)
        before, spec_before = tree_flatten((args, kwargs))
        versions = [version_of(each) if isinstance(each, Tensor) else None for each in before]
        known = nodes_of([each for each in before if isinstance(each, Tensor)])
        objects = [_attributes(each) for each in before]
        try:
            with followed:
                results, spec = tree_flatten(self._forward(*args, **kwargs))
        except Exception as error:  # the user's forward may raise anything
            what = f"two samples, or one, cannot be computed ({type(error).__name__}: {error})"
            raise self.refusal(what) from error
        after, spec_after = tree_flatten((args, kwargs))
        if spec_after != spec_before or not all(map(operator.is_, after, before)):
            raise self.refusal("it writes to a list or a dictionary among its arguments, where each slice has its own")
        if versions != [version_of(each) if isinstance(each, Tensor) else None for each in before]:
            raise self.refusal("it writes to a tensor among its arguments, of which a slice is a part")
        for each, attributes in zip(before, objects, strict=True):
            if attributes.keys() != (now := _attributes(each)).keys() or any(
                now[name] is not value for name, value in attributes.items()
            ):
                raise self.refusal(f"it writes to attributes of an argument, a {type(each).__name__}")
        for each in results:
            if not isinstance(each, Tensor) and not _among(each, before) and any(map(_has_graph, tensors_in(each))):
                raise self.refusal(
                    f"it returns a {type(each).__name__}, whose tensors slices cannot put together (return tensors, tuples, "
                    f"lists or dictionaries)"
                )
        found = [each for each in results if isinstance(each, Tensor)]
        if self._tokens and reads_others(found, known, (*inputs.values(), *self._unit.module.parameters())):
            raise self.refusal(READS_OTHERS)
        state = {name: _copy(each) for name, each in _state(self._unit.module)}
        counters = _counters(self._unit.module) if self._of_parameters else {}
        return _Computed(inputs, results, str(spec), state, counters)

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        try:
            with without_hooks(self._unit.module.parameters()):
                yield
        except RuntimeError as error:
            raise self.refusal(f"gradients of two samples, or of one, cannot be computed ({error})") from error

    @contextmanager
    def _unrandom(self, tensors: Any) -> Iterator[None]:
        tensors = tuple(tensors)
        before = torch.get_rng_state()
        devices, of_devices = get_device_states(*tensors)
        try:
            with NoRandomNumbers():
                yield
            same = torch.equal(torch.get_rng_state(), before)
            same = same and all(map(torch.equal, get_device_states(*tensors)[1], of_devices))
        finally:
            torch.set_rng_state(before)
            if devices:
                kind = next(each.device.type for each in tensors if each.get_device() == devices[0])
                set_device_states(devices, of_devices, device_type=kind)
        if not same:
            raise self.refusal("it draws random numbers other than dropout's, so that nothing can be compared")

    def refusal(self, what: str) -> ConfigError:
        """Returns the error that the unit cannot be computed in slices, for this reason."""
        unit = self._unit
        if self._tokens:
            what = what.replace("sample", "token")
            return ConfigError(
                f"{unit.name} ({type(unit.module).__name__}) cannot be computed in slices of its tokens: {what}; so the "
                f"numbers would be others than those of all tokens; name modules that compute each token alone (MLPs, norms, "
                f"projections), as in slices={{'*.mlp': ('tokens', 16)}}, or leave this one out of slices"
            )
        return ConfigError(
            f"{unit.name} ({type(unit.module).__name__}) cannot be computed in slices of the batch: {what}; so the numbers "
            f"would be others than those of the whole batch; name the units whose samples do not meet, as in "
            f"slices={{'layers.*': 8}}, or leave slices out (recompute='all' saves activations, too)"
        )


@dataclasses.dataclass(slots=True)
class _Computed:
    """A call of the check.

    Attributes:
        inputs: tensors with gradients, by index among the arguments.
        results: the results without their containers.
        spec: description of the containers.
        state: tensors that the unit's modules hold after the call, besides parameters, by name.
        counters: numbers and sizes of containers that they hold, by name, if they are compared.
        of_nothing: gradients of inputs and parameters where no result has one; of several samples.
        of_first: gradients of inputs where the first sample's results have some; of several samples.
        of_last: where the last sample's have some, which find what depends on earlier samples alone.
        together: gradients of inputs where all cut results have some.
        of_others: gradients of inputs where results without a dimension of samples have some, None where they do not depend
            on the input.
        of_parameters: some elements of the compared parameters' gradients where all cut results have some.
        changed: description of what differs when the call is made again; None: nothing.
    """

    inputs: dict[int, Tensor]
    results: list[Any]
    spec: str
    state: dict[str, Tensor]
    counters: dict[str, Any]
    of_nothing: list[Tensor | None] = dataclasses.field(default_factory=list)
    of_first: list[Tensor | None] = dataclasses.field(default_factory=list)
    of_last: list[Tensor | None] = dataclasses.field(default_factory=list)
    together: list[Tensor | None] = dataclasses.field(default_factory=list)
    of_others: list[Tensor | None] = dataclasses.field(default_factory=list)
    of_parameters: list[Tensor | None] = dataclasses.field(default_factory=list)
    changed: str | None = None

    def changes_until(self, second: _Computed, tolerance: float) -> str | None:
        """Returns a description of what differs in a second computation of the same call; None: nothing."""
        for name, each in self.state.items():
            other = second.state.get(name)
            if other is None or other.shape != each.shape or not torch.equal(other, each):
                return f"it changes {name} in each call, and each slice is a call"
        for name in self.counters.keys() | second.counters.keys():
            if not _equal(self.counters.get(name), second.counters.get(name)):
                return f"it changes {name} in each call, and each slice is a call"
        same = self.spec == second.spec and not any(
            isinstance(each, Tensor) and _off(each, other, tolerance)
            for each, other in zip(self.results, second.results, strict=True)
        )
        return None if same else "it returns something else when it is called again, and each slice is a call"

    def differentiate(
        self, drawn: dict[int, Tensor], trained: Sequence[nn.Parameter] | None, compared: Sequence[nn.Parameter]
    ) -> None:
        """Computes gradients, and ends the graph.

        Args:
            drawn: gradients of the results that are cut.
            trained: all parameters with gradients; None for a call with one sample.
            compared: the parameters whose gradients are compared.
        """
        nothing = {at: torch.zeros_like(each) for at, each in enumerate(self.results) if _has_graph(each)}
        if nothing and trained is not None:
            self.of_nothing = self._gradients(nothing, trained)
            of_first = {at: torch.cat([each[:1], torch.zeros_like(each[1:])]) for at, each in drawn.items()}
            self.of_first = self._gradients(nothing | of_first)
            of_last = {at: torch.cat([torch.zeros_like(each[:-1]), each[-1:]]) for at, each in drawn.items()}
            self.of_last = self._gradients(nothing | of_last)
            others = {at: each for at, each in nothing.items() if at not in drawn}
            self.of_others = self._gradients(others) if others else []
        if nothing:
            found = self._gradients(nothing | drawn, compared, last=True)
            self.together = found[: len(self.inputs)]
            self.of_parameters = [None if each is None else _some_of(each) for each in found[len(self.inputs) :]]
        self.results = [each.detach() if isinstance(each, Tensor) else each for each in self.results]
        self.inputs = {at: each.detach() for at, each in self.inputs.items()}

    def _gradients(
        self, seeds: dict[int, Tensor], parameters: Sequence[nn.Parameter] = (), *, last: bool = False
    ) -> list[Tensor | None]:
        return list(
            torch.autograd.grad(
                [self.results[at] for at in seeds],
                [*self.inputs.values(), *parameters],
                list(seeds.values()),
                retain_graph=not last,
                allow_unused=True,
            )
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Compared:
    """Comparison of a call with two samples and two calls with one each.

    Attributes:
        refusal: makes the error from what differs.
        cut: indices of the arguments that are cut.
        tolerance: largest difference that rounding explains, relative to the largest element.
        many: whether there are many samples, and a hundredth of them may differ: where rounding decides (two experts that
            a router rates alike), few do. Sums over samples may then differ by more.
    """

    refusal: Callable[[str], ConfigError]
    whole: _Computed
    alone: Sequence[_Computed]
    cut: frozenset[int]
    tolerance: float
    many: bool = False

    def results(self) -> frozenset[int]:
        """Returns the indices of the results that do not depend on samples."""
        whole, (first, last) = self.whole, self.alone
        if not whole.spec == first.spec == last.spec:
            raise self.refusal(f"it returns {whole.spec} for two samples, and {first.spec} for one")
        shared = set[int]()
        for at, (both, one, other) in enumerate(zip(whole.results, first.results, last.results, strict=True)):
            if not isinstance(both, Tensor):
                if type(both) is not type(one) or not _equal(both, one) or not _equal(one, other):
                    raise self.refusal(f"result {at} is a {type(both).__name__} that differs between slices")
                continue
            if both.shape == one.shape == other.shape:
                if self._off(one, both) or self._off(other, both):
                    raise self.refusal(
                        f"result {at} has shape {tuple(both.shape)}, without a dimension of samples, and depends on them"
                    )
                shared.add(at)
            elif not both.dim() or both.shape != (one.shape[0] + other.shape[0], *one.shape[1:]) or one.shape[0] != 1:
                raise self.refusal(
                    f"result {at} has shape {tuple(both.shape)} for two samples, and {tuple(one.shape)} for one"
                )
            elif off := max(self._off(one, both[:1]), self._off(other, both[1:])):
                raise self.refusal(f"its results for a sample depend on the other samples (off by {off:.2g})")
        return frozenset(shared)

    def places(self, more: _Computed, shared: frozenset[int]) -> None:
        """Compares a call with the first sample, the second, and the first once more or several times.

        Args:
            shared: indices of the results that do not depend on samples.
        """
        if more.spec != self.whole.spec:
            raise self.refusal(f"it returns {more.spec} for more samples than two, and {self.whole.spec} for two")
        for at, (found, both) in enumerate(zip(more.results, self.whole.results, strict=True)):
            if isinstance(both, Tensor):
                expected = both if at in shared else torch.cat([both, *[both[:1]] * (len(found) - 2)])
                if off := self._off(found, expected):
                    raise self.refusal(
                        f"its results for a sample depend on how many others there are (off by {off:.2g})"
                    )
            elif not _equal(found, both):
                raise self.refusal(f"result {at} is a {type(both).__name__} that differs between slices")

    def joined_results(self, shared: frozenset[int]) -> None:
        """Compares the results for several samples with those for their first part and their last.

        Args:
            shared: indices of the results that do not depend on samples.
        """
        samples = next(len(each) for at, each in self.whole.inputs.items() if at in self.cut)
        parts = [each.results for each in self.alone]
        for at, whole in _with_rows(self.whole.results, samples):
            if at not in shared and (off := self._off(torch.cat([each[at] for each in parts]), whole)):
                raise self.refusal(f"its results for a sample depend on the other samples (off by {off:.2g})")

    def others(self) -> None:
        """Refuses results without a dimension of samples that depend on samples by graph, though not by value."""
        for at, found in zip(self.whole.inputs, self.whole.of_others, strict=False):
            if found is not None and at in self.cut:
                raise self.refusal("a result without a dimension of samples is computed from them")

    def state(self) -> None:
        """Compares the buffers and other tensors that the calls have left in modules."""
        for name, after in self.whole.state.items():
            if after.requires_grad:
                raise self.refusal(f"it leaves a result in {name}, where only that of one slice would remain")
            for each in self.alone:
                found = each.state.get(name)
                if found is None or found.shape != after.shape or not torch.equal(found, after):
                    raise self.refusal(f"it writes to {name}, with other values for slices")

    def gradients(self) -> None:
        """Compares gradients of inputs, and looks for gradients that no result has."""
        whole, (first, last) = self.whole, self.alone
        if any(found is not None and bool(found.any()) for found in whole.of_nothing):
            raise self.refusal("its backward adds gradients of its own, such as those of a balance loss")
        if not whole.together:
            return
        for ends, others in (whole.of_first, slice(1, None)), (whole.of_last, slice(-1)):
            for at, found in zip(whole.inputs, ends, strict=True):
                if found is not None and at in self.cut and bool(found[others].any()):
                    raise self.refusal("a sample's results have a gradient with respect to another sample")
        for at, both, one, other in zip(whole.inputs, whole.together, first.together, last.together, strict=True):
            if both is None and one is None and other is None:
                continue
            if both is None or one is None or other is None:
                raise self.refusal("an input has a gradient in a part of the calls only")
            # Inputs that are passed whole get gradients from all slices.
            off = self._off(torch.cat([one, other]), both) if at in self.cut else self._off_sum(one + other, both)
            if off:
                raise self.refusal(f"gradients of a sample's inputs depend on the other samples (off by {off:.2g})")

        for both, *each in zip(whole.of_parameters, first.of_parameters, last.of_parameters, strict=True):
            parts = [part for part in each if part is not None]
            if (both is None) != (not parts) or (both is not None and self._off_sum(torch.stack(parts).sum(0), both)):
                raise self.refusal("the gradient of a parameter is not the sum of those of samples")

    def _off_sum(self, ours: Tensor, theirs: Tensor) -> float:
        return _off(ours, theirs, _TOLERANCE_16_BITS if self.many else self.tolerance)

    def _off(self, ours: Tensor, theirs: Tensor) -> float:
        if not self.many or ours.shape != theirs.shape or not ours.dim() or not ours.numel():
            return _off(ours, theirs, self.tolerance)
        ours, theirs = (each.detach().double().reshape(len(each), -1) for each in (ours, theirs))
        differences = (ours - theirs).nan_to_num().abs().amax(1)
        few = len(differences) // 100
        kept = differences.argsort()[: len(differences) - few]
        return _off(ours[kept], theirs[kept], self.tolerance)


def _two_samples(cut: CutArguments) -> dict[int, Tensor]:
    """Returns the first sample and the last one that differs from it, by index of the argument.

    If all are equal, so that no check could tell them apart, the second one of the first argument is scaled.
    """
    others = [
        other for at in (cut.first, *sorted(cut.cut)) if (other := _last_that_differs(cut.leaves[at])) is not None
    ]
    other = others[0] if others else -1
    rows = {at: torch.stack([cut.leaves[at][0], cut.leaves[at][other]]).detach() for at in cut.cut}
    if not others:
        rows[cut.first][1] *= _SCALE
    return rows


_SCALE = 0.875
"""Factor below 1, since an argument may be a probability; of few bits, so that it rounds little in 16 bits."""


def _last_that_differs(batch: Tensor) -> int | None:
    """Returns the index of the last sample that differs from the first."""
    differ = (batch != batch[:1]).flatten(1).any(1).nonzero() if batch.dim() > 1 else (batch != batch[:1]).nonzero()
    return int(differ[-1]) if len(differ) else None


def _off(ours: Tensor, theirs: Tensor, tolerance: float) -> float:
    """Returns the largest difference relative to the largest element; 0 if rounding explains it."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel() or torch.equal(ours, theirs):
        return 0.0
    if not theirs.is_floating_point():
        return 1.0
    ours, theirs = ours.detach().double(), theirs.detach().double()
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    size = float(theirs.abs().max())
    off = float((ours - theirs).abs().max()) / size if size else 1.0
    return off if off > tolerance else 0.0


class _Followed(TorchFunctionMode):
    """Context that finds out whether results with a graph are alive after it, and how coarse results are."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[weakref.ref[Tensor]] = []
        self.itemsize = 8
        """Least size of an element of floating-point results."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = tensors_in(result)
        self.itemsize = min([self.itemsize, *(each.itemsize for each in found if each.is_floating_point())])
        self._results += [weakref.ref(each) for each in found if each.requires_grad and not each.is_leaf]
        return result

    def left(self) -> bool:
        """Whether any of them is alive."""
        if any(each() is not None for each in self._results):
            gc.collect()  # a tensor that its own node saves
        return any(each() is not None for each in self._results)


_NO_STATE = frozenset((*vars(nn.Module()), "__getstate__", "forward"))
"""Names of attributes that hold no state of a module."""


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in buffers and other attributes of modules, with names."""
    for name, inner in module.named_modules():
        attributes = {key: each for key, each in vars(inner).items() if key not in _NO_STATE}
        for attribute, value in (*buffers_in(inner).items(), *attributes.items()):
            found = [each for each in tensors_in(value) if not isinstance(each, nn.Parameter)]
            for at, each in enumerate(found):
                yield ".".join(filter(None, (name, attribute, str(at) if len(found) > 1 else ""))), each


def _counters(module: nn.Module) -> dict[str, Any]:
    """Returns the numbers among attributes of modules, and the sizes of lists, dictionaries and sets, by name."""
    found = {}
    for name, inner in module.named_modules():
        for key, each in vars(inner).items():
            if key not in _NO_STATE and isinstance(each, (int, float, list, dict, set, deque)):
                found[f"{name}.{key}".lstrip(".")] = each if isinstance(each, (int, float)) else len(each)
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object that is an argument."""
    return {} if isinstance(value, (Tensor, nn.Module, type)) else dict(getattr(value, "__dict__", {}))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.grad_fn is not None)


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _numbers(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(like.shape, generator=generator).to(like)


_MOST_TOKENS = 1024
"""Most tokens that a check computes together. Chosen slices have as many or more."""


def _with_rows(results: Sequence[Any], count: int) -> list[tuple[int, Tensor]]:
    """Returns the tensors with this size of dimension 0, and their indices."""
    return [(at, each) for at, each in enumerate(results) if isinstance(each, Tensor) and each.shape[:1] == (count,)]


_MOST_ELEMENTS = 4096


def _some_of(gradient: Tensor) -> Tensor:
    """Returns a copy of elements at equal distances."""
    flat = (gradient if gradient.layout is torch.strided else gradient.to_dense()).flatten()
    return flat[:: max(1, len(flat) // _MOST_ELEMENTS)].clone()


def _among(value: Any, others: Sequence[Any]) -> bool:
    return any(value is each for each in others)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # objects that cannot be compared, or not as a whole
        return False
