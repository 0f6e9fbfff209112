"""What an optimizer keeps, and whether its update may be run page by page.

torch's own classes are known (known.py). Of every other class it is found out by trial (trial.py), so third-party optimizers
pass or fail by what they do; one that fails is refused with the property that it lacks. The user's optimizer is only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.update.known import is_known, known_group, known_initial
from lightning_ptm.update.private import PrivateOptimizer, held_by
from lightning_ptm.update.shadow import NOT_HYPER, own_values, undecorated_step
from lightning_ptm.update.traits import GroupTraits, Initial, OptimizerTraits, SlotTraits, same_value
from lightning_ptm.update.trial import (
    LONG,
    Difference,
    Gradient,
    Specimen,
    Trial,
    Whole,
    holds_parameters,
    run_in_pieces,
    run_whole,
    strange_keys,
)

_WORKS = (
    "what works: optimizers that treat each element on its own, as Adam, AdamW, SGD, RAdam, NAdam, RMSprop, Adagrad, "
    "Adadelta, Adamax, ASGD, Rprop and third-party ones such as Lion do; or any, with everything in RAM, on one rank and in "
    "a true precision"
)
_MOST_KINDS = 6
"""Of shapes that are tried for a group, the most frequent first."""
_MOST_GROUPS = 6
"""Of different settings that are tried together."""
_MOST_NUMEL = 160_000
_NUMBERS = (torch.Tensor, int, float, complex, bool, str, type(None))


class _Lacks(Exception):
    """The optimizer lacks a property that pages need; the text says which."""


class _Raises(_Lacks):
    """It raises on the parameters of the trial."""


def probe(
    optimizer: Optimizer, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> OptimizerTraits:
    """Learn an optimizer's traits.

    Args:
        optimizer: the user's object; neither it nor its class is changed, and no parameter of it is read.
        dtype: dtype that the master parameters will have.
        device: where updates will run.

    Returns:
        What it keeps for each parameter group.

    Raises:
        ConfigError: its update cannot be run page by page; says which property it lacks, and what to use instead.
    """
    device = torch.device(device)
    if is_known(optimizer, dtype):
        groups = tuple(
            known_group(optimizer, group, dtype, may_fuse=_may_fuse(group, dtype, device))
            for group in optimizer.param_groups
        )
        return OptimizerTraits(_name(optimizer), groups, known_initial(optimizer), device)
    with _generators_as_they_are(device):
        return try_out(optimizer, dtype=dtype, device=device)


def try_out(optimizer: Optimizer, *, dtype: torch.dtype, device: torch.device) -> OptimizerTraits:
    """As `probe`, by trial whatever the class is."""
    return _Candidate(optimizer, dtype, device).traits()


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _may_fuse(values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the class offers a fused kernel and the user left the choice open."""
    if values.get("fused", False) is not None or values.get("foreach") or values.get("differentiable"):
        return False
    return dtype.is_floating_point and device.type in _get_fused_kernels_supported_devices()


@contextlib.contextmanager
def _generators_as_they_are(device: torch.device) -> Iterator[None]:
    """A class that draws random numbers must not change those of the training."""
    python, here = random.getstate(), torch.get_rng_state()
    backend = backend_of(device)
    there = backend.random_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(here)
        if there is not None:
            backend.set_random_state(there)


class _Candidate:
    """An optimizer on trial.

    Args:
        optimizer: the user's, only read.
        dtype, device: of the parameters of the trial.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> None:
        self._optimizer = optimizer
        self._dtype = dtype
        self._device = device
        self._name = _name(optimizer)
        self._initial = Initial.LAZY
        self._slots: list[str] = []

    def traits(self) -> OptimizerTraits:
        try:
            self._check_holdings()
            self._initial = self._find_initial()
            kinds = [self._kind(index) for index in range(len(self._optimizer.param_groups))]
            chosen = _chosen(kinds)
            trial = _trial([self._optimizer.param_groups[index] for index in chosen], self._all_values(chosen))
            traits = self._fused_or_not(trial)
        except _Raises as lack:
            raise ConfigError(
                f"{self._name} cannot be tried, and so not be run page by page: {lack}. Use {self._instead()} in its place; "
                f"{_WORKS}"
            ) from lack.__cause__
        except _Lacks as lack:
            raise ConfigError(
                f"{self._name} is not element-wise: {lack}; so its update cannot be run page by page, and training with it "
                f"would change its meaning. Use {self._instead()} in its place; {_WORKS}"
            ) from lack.__cause__
        tried = {kinds[index]: traits.groups[place] for place, index in enumerate(chosen)}
        fallback = traits.groups[0]
        return dataclasses.replace(traits, groups=tuple(tried.get(kind, fallback) for kind in kinds))

    # -- what it is ---------------------------------------------------------------------------------------------------

    def _check_holdings(self) -> None:
        if all(callable(getattr(type(self._optimizer), name, None)) for name in ("train", "eval")):
            raise ConfigError(
                f"{self._name} moves parameters in its train() and eval(), between steps, when they lie in pages. Use "
                f"{self._instead()} with a learning rate scheduler in its place; {_WORKS}"
            )
        held = held_by(self._optimizer)
        if held is None:
            return
        if _insists_on_closure(self._optimizer):
            raise ConfigError(
                f"{self._name}.step needs a closure that evaluates the model again, several times a step; pages are updated "
                f"long after the forward pass; {_WORKS}"
            )
        if isinstance(held.value, Optimizer):
            raise ConfigError(
                f"{self._name} wraps another optimizer, {type(held.value).__name__} (its {held.place}), and moves that one's "
                f"parameters itself, which lie in pages; return the {type(held.value).__name__} from configure_optimizers "
                f"without it; {_WORKS}"
            )
        raise ConfigError(
            f"{self._name} reaches parameters by its {held.place} ({held.what}) and not only by its param_groups; they lie "
            f"in pages, and its update cannot be run page by page. Use {self._instead()} in its place; {_WORKS}"
        )

    def _find_initial(self) -> Initial:
        """Whether the class fills state in its constructor; then it has to do so for each page, too."""
        others = strange_keys(self._optimizer)
        if others:
            raise _Lacks(f"it keeps {', '.join(others)} in its state, for no parameter")
        made = [state for state in self._optimizer.state.values() if state]
        if not made:
            return Initial.LAZY
        like = torch.nn.Parameter(torch.zeros(8, dtype=self._dtype, device=self._device))
        group = own_values(self._optimizer.param_groups[0])
        try:
            fresh = PrivateOptimizer(self._optimizer).construct([{"params": [like], **group}])
        except Exception as error:
            raise _Lacks(
                f"its constructor makes states, and called again with its defaults it raises {_told(error)}"
            ) from error
        return Initial.CONSTRUCTED if fresh.state.get(like) else Initial.LAZY

    def _instead(self) -> str:
        names = " ".join(self._slots) or type(self._optimizer).__name__.lower()
        adaptive = len(self._slots) > 1 or any(word in names for word in ("sq", "var", "ada", "sum"))
        return "torch.optim.AdamW" if adaptive or not self._slots else "torch.optim.SGD with momentum"

    # -- what is tried ------------------------------------------------------------------------------------------------

    def _kind(self, index: int) -> tuple[Any, ...]:
        """Groups of one kind differ in learning rate and names alone."""
        group = self._optimizer.param_groups[index]
        settings = tuple(
            (key, repr(value))
            for key, value in sorted(group.items(), key=lambda item: item[0])
            if key not in ("params", "param_names", "lr", "initial_lr") and not isinstance(value, str)
        )
        return (*settings, *sorted({specimen.shape for specimen in _specimens(0, group["params"])}))

    def _all_values(self, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """The user's very values, to be copied together: groups may share a list."""
        groups = [self._optimizer.param_groups[index] for index in chosen]
        return [{key: value for key, value in group.items() if key not in NOT_HYPER} for group in groups]

    def _fused_or_not(self, trial: Trial) -> OptimizerTraits:
        may_fuse = [_may_fuse(values, self._dtype, self._device) for values in trial.groups]
        if any(may_fuse):
            # A fused kernel that does not work for this dtype is no reason to refuse: the class works without it.
            with contextlib.suppress(_Lacks):
                return self._tried(trial, may_fuse)
        return self._tried(trial, [False] * len(may_fuse))

    def _tried(self, trial: Trial, fused: Sequence[bool]) -> OptimizerTraits:
        def with_fused(value: bool) -> Trial:
            pairs = zip(trial.groups, fused, strict=True)
            groups = tuple({**group, "fused": value} if choose else group for group, choose in pairs)
            return dataclasses.replace(trial, groups=groups)

        chosen = with_fused(True)
        whole = self._run(chosen)
        if any(fused) and not _agree(whole, self._run(with_fused(False))):
            # torch 2.13's fused SGD on the CPU stores wrong 16-bit momentum.
            raise _Lacks("its fused kernel does not do what its other code does")
        traits = self._described(whole, fused)
        self._check_pieces(traits, whole)
        every_gradient = self._check_apart(traits, chosen)
        groups = [
            dataclasses.replace(group, fixed=self._fixed(traits, chosen, index))
            for index, group in enumerate(traits.groups)
        ]
        return dataclasses.replace(traits, groups=tuple(groups), every_gradient=every_gradient)

    def _run(self, trial: Trial, **options: Any) -> Whole:
        try:
            return run_whole(self._optimizer, trial, self._initial, self._dtype, self._device, **options)
        except Exception as error:
            raise _Raises(f"on small {self._dtype} parameters it raises {_told(error)}") from error

    # -- what it keeps ------------------------------------------------------------------------------------------------

    def _described(self, whole: Whole, fused: Sequence[bool]) -> OptimizerTraits:
        """Traits as the run with whole parameters shows them."""
        self._slots = sorted({key for slots in whole.slots[-1] for key in slots})
        self._check_behaviour(whole)
        groups = []
        for index, choose in enumerate(fused):
            members = [place for place, specimen in enumerate(whole.trial.specimens) if specimen.group == index]
            slots = self._slots_of(whole, members)
            scalars = dict.fromkeys(key for place in members for key in whole.scalars[-1][place])
            groups.append(GroupTraits(slots, tuple(scalars), choose))
        advanced, created, containers = self._group_values(whole)
        return OptimizerTraits(
            self._name,
            tuple(groups),
            self._initial,
            self._device,
            group_slots=advanced,
            created=created,
            group_containers=containers,
            records=whole.records,
            closure=_insists_on_closure(self._optimizer),
            ignores_closure=max(whole.calls) == 0,
            holds_parameters=holds_parameters(self._optimizer, whole, self._initial),
            writes_gradient=whole.writes_gradient,
        )

    def _check_behaviour(self, whole: Whole) -> None:
        if max(whole.calls) > 1 or whole.moved_before_closure:
            raise ConfigError(
                f"{self._name}.step needs a closure that evaluates the model again, "
                f"{'at other weights' if whole.moved_before_closure else f'{max(whole.calls)} times'} a step; pages are "
                f"updated long after the forward pass; {_WORKS}"
            )
        if min(whole.calls) < max(whole.calls):
            raise ConfigError(
                f"{self._name}.step calls its closure in some steps only, and pages are updated behind it; call it once in "
                f"every step; {_WORKS}"
            )
        if whole.strange_keys:
            raise _Lacks(f"it keeps {', '.join(whole.strange_keys)} in its state, for no parameter")
        if whole.draws_random_numbers:
            raise _Lacks("it draws random numbers, and pages would draw others")
        if whole.records or whole.outside:
            forgetful = self._run(whole.trial, replay=whole, forgetful=True)
            if not _same_values(whole, forgetful):
                places = [*(f"self.{name}" for name in whole.records), *whole.outside]
                raise _Lacks(
                    f"its update depends on {', '.join(places)}, which each step changes, and which is neither in its state "
                    f"nor in a parameter group"
                )
        for step, groups in enumerate(whole.groups):
            for index, group in enumerate(groups):
                wanted = whole.trial.at_step(index, step).get("lr")
                if wanted is not None and not same_value(wanted, group["lr"]):
                    raise _Lacks("it changes its own learning rate in its step")

    def _slots_of(self, whole: Whole, members: Sequence[int]) -> tuple[SlotTraits, ...]:
        found: dict[str, SlotTraits] = {}
        for step in range(len(whole.trial.steps)):
            for place in members:
                specimen = whole.trial.specimens[place]
                slots, scalars = whole.slots[step][place], whole.scalars[step][place]
                for key, value in slots.items():
                    if value.shape != specimen.shape:
                        raise _Lacks(
                            f"for a parameter of shape {specimen.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                        )
                    if type(value) is not torch.Tensor:
                        raise _Lacks(f"it keeps {key!r} as a {type(value).__name__}, whose elements share numbers")
                    if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                        raise _Lacks(
                            f"it keeps {key!r} in {value.dtype} for a parameter of shape {specimen.shape}, and in "
                            f"{found[key].dtype} for others"
                        )
                for key, value in scalars.items():
                    if not isinstance(value, _NUMBERS):
                        raise _Lacks(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                    if isinstance(value, torch.Tensor) and value.numel() != 1:
                        raise _Lacks(
                            f"for a parameter of shape {specimen.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                        )
                if slots.keys() != whole.slots[0][place].keys():
                    late = sorted(slots.keys() ^ whole.slots[0][place].keys())
                    raise _Lacks(
                        f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first"
                    )
        for place in members:
            if whole.slots[0][place].keys() != found.keys():
                other = next(each for each in members if whole.slots[0][each].keys() - whole.slots[0][place].keys())
                raise _Lacks(
                    f"for a parameter of shape {whole.trial.specimens[place].shape} it keeps other states than for one of "
                    f"shape {whole.trial.specimens[other].shape}"
                )
        return tuple(found.values())

    def _group_values(self, whole: Whole) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...]]:
        advanced, created, containers = dict[str, None](), set[str](), dict[str, None]()
        for after in whole.groups:
            for before, now in zip(whole.trial.groups, after, strict=True):
                for key, value in now.items():
                    if key == "lr":
                        continue
                    if isinstance(value, list | dict | set):
                        containers[key] = None
                        if key not in before:
                            raise _Lacks(f"its step makes group value {key!r}, a {type(value).__name__}")
                    elif key not in before or not same_value(value, before[key]):
                        advanced[key] = None
                        if not _is_number(value):
                            raise _Lacks(f"its step changes group value {key!r}, which is no number")
                    if key not in before:
                        created.add(key)
        return tuple(advanced), frozenset(created), tuple(containers)

    # -- what it does in pieces ---------------------------------------------------------------------------------------

    def _check_pieces(self, traits: OptimizerTraits, whole: Whole) -> None:
        found = self._in_pieces(traits, whole)
        if found is not None:
            raise self._explained(whole, found)

    def _in_pieces(self, traits: OptimizerTraits, whole: Whole) -> Difference | Exception | None:
        try:
            return run_in_pieces(self._optimizer, traits, whole)
        except Exception as error:  # whatever a foreign class raises on a piece is the reason to refuse it
            return error

    def _check_apart(self, traits: OptimizerTraits, trial: Trial) -> str:
        """What happens now and then: every few steps, or when a gradient is missing or broken.

        Returns:
            Why every parameter needs a gradient in every step; empty: it does not.
        """
        few = _few(trial)
        self._check_now_and_then(traits, dataclasses.replace(few, steps=LONG))
        last = len(few.specimens) - 1
        absent = {(1, 0), (3, last), *((2, place) for place in range(last + 1) if not few.specimens[place].group)}
        broken = (Gradient.MIXED, Gradient.BROKEN, Gradient.MIXED)
        try:
            self._check_now_and_then(traits, dataclasses.replace(few, steps=broken))
        except _Lacks as lack:
            raise _Lacks(
                f"an inf or NaN in one element of a gradient changes what becomes of the others ({lack})"
            ) from None
        try:
            steps = (Gradient.MIXED,) * 5
            self._check_now_and_then(traits, dataclasses.replace(few, steps=steps, absent=frozenset(absent)))
        except _Lacks:
            return "it treats parameters otherwise when one of them has no gradient in a step"
        return ""

    def _check_now_and_then(self, traits: OptimizerTraits, trial: Trial) -> None:
        """Where the class itself raises, it does so with whole parameters, too."""
        with contextlib.suppress(_Raises):
            self._check_pieces(traits, self._run(trial))

    def _fixed(self, traits: OptimizerTraits, trial: Trial, index: int) -> Mapping[str, str]:
        """Settings that are 0 and without which the update would not be element-wise."""
        found: dict[str, str] = {}
        for key, value in trial.groups[index].items():
            if type(value) not in (float, int) or value or key == "lr" or key in traits.group_slots:
                continue
            groups = tuple({**group, key: 0.1} if place == index else group for place, group in enumerate(trial.groups))
            try:
                whole = self._run(dataclasses.replace(_few(trial), groups=groups))
                if any(
                    {slot.name for slot in group.slots} != whole.slots[0][place].keys()
                    for place, specimen in enumerate(whole.trial.specimens)
                    for group in (traits.groups[specimen.group],)
                ):
                    continue  # it keeps more then: the shadow refuses that by itself
                self._check_pieces(traits, whole)
            except _Lacks as lack:
                found[key] = str(lack)
        return found

    # -- why ----------------------------------------------------------------------------------------------------------

    def _explained(self, whole: Whole, found: Difference | Exception) -> _Lacks:
        """Which property is missing, by trials in which only that one matters."""
        if isinstance(found, Difference) and found.parameter is None:
            return _Lacks(f"its step sets {found.what} by what is in its parameters, at step {found.step + 1}")
        with contextlib.suppress(_Lacks):
            if not _same_values(whole, self._run(whole.trial, replay=whole, loss=1.9)):
                return _Lacks("its update depends on the loss that the closure returns")
        first = found.parameter if isinstance(found, Difference) and found.parameter is not None else 0
        specimens = whole.trial.specimens
        for place in (first, *(other for other in range(len(specimens)) if other != first)):
            lack = self._of_one(whole, place)
            if lack is not None:
                return lack
        if isinstance(found, Exception):
            return _Lacks(f"on a piece of a parameter, made 1-D, it raises {_told(found)}")
        return _Lacks(
            f"updating a parameter of shape {specimens[first].shape} in pieces changes its {found.what} at step "
            f"{found.step + 1}: its elements have more in common than the number of steps"
        )

    def _of_one(self, whole: Whole, place: int) -> _Lacks | None:
        specimen = whole.trial.specimens[place]
        group = [index for index, each in enumerate(whole.trial.specimens) if each.group == specimen.group]
        try:
            alone = self._run(_part(whole.trial, [place]), replay=_replayed(whole, [place]))
            if not _same(whole, [place], alone):
                together = self._run(_part(whole.trial, group), replay=_replayed(whole, group))
                what = "its parameters" if _same(whole, group, together) else "its parameter groups"
                return _Lacks(f"the update of one of {what} depends on the others (a norm over all of them, for one)")
        except _Lacks:
            return None
        if specimen.attributes:
            bare = dataclasses.replace(alone.trial, specimens=(Specimen(0, specimen.shape),))
            try:
                same = _same_values(alone, self._run(bare, replay=alone))
            except _Lacks:
                same = False
            if not same:
                return _Lacks(
                    f"it looks at attributes of a parameter ({', '.join(specimen.attributes)}), which pages do not have"
                )
        if len(specimen.shape) != 1:
            flat = dataclasses.replace(alone.trial, specimens=(Specimen(0, (specimen.numel,), specimen.attributes),))
            try:
                if not _same_values(alone, self._run(flat, replay=alone)):
                    return _Lacks(
                        f"it treats a {len(specimen.shape)}-D parameter (here {specimen.shape}) otherwise than the same "
                        f"numbers in a row: by its rows, filters or matrices, or by the number of its dimensions"
                    )
            except _Lacks as lack:
                return _Lacks(f"it takes whole {len(specimen.shape)}-D parameters only ({lack})")
        traits = OptimizerTraits(self._name, (), self._initial, self._device)
        with contextlib.suppress(_Lacks):
            traits = self._described(alone, [False])
            if self._in_pieces(traits, alone) is not None:
                return _Lacks(
                    "the update of one element depends on others of its parameter (a norm, a mean or a maximum over it, its "
                    "size)"
                )
        return None


# -- helpers ----------------------------------------------------------------------------------------------------------


def _insists_on_closure(optimizer: Optimizer) -> bool:
    parameters = inspect.signature(undecorated_step(type(optimizer))).parameters
    closure = parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (*_NUMBERS, tuple))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _chosen(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    """A group of each kind; two where there are several groups at all, so that they could influence each other."""
    first = list({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    first = sorted(first)[:_MOST_GROUPS]
    if len(first) == 1 and len(kinds) > 1:
        first.append(next(index for index in range(len(kinds)) if index != first[0]))
    return first


def _trial(groups: Sequence[Mapping[str, Any]], values: Sequence[dict[str, Any]]) -> Trial:
    specimens = [specimen for index, group in enumerate(groups) for specimen in _specimens(index, group["params"])]
    return Trial(tuple(specimens), tuple(values))


def _few(trial: Trial) -> Trial:
    """The same groups with at most two small parameters each."""
    found: list[Specimen] = []
    for index in range(len(trial.groups)):
        members = sorted((each for each in trial.specimens if each.group == index), key=lambda each: each.numel)
        large = [each for each in members if each.numel >= 32]
        found.extend((large or members)[:2])
    return dataclasses.replace(trial, specimens=tuple(found))


def _specimens(group: int, parameters: Sequence[torch.Tensor]) -> list[Specimen]:
    """Small parameters of the kinds that a group has: as many dimensions, each of them 1, small, medium or large.

    Each kind twice: once of ragged length, where the last vector of a kernel is not full, and once of full vectors, after
    which the next parameter may be updated in the same stretch. A single parameter comes once.
    """
    kinds = Counter((_sizes(parameter.shape), _noted(parameter)) for parameter in parameters)
    found: list[Specimen] = []
    for (sizes, noted), count in kinds.most_common(_MOST_KINDS):
        attributes = MappingProxyType(dict(noted))
        found.append(Specimen(group, _shape(sizes, ragged=True), attributes))
        if count > 1 or len(kinds) == 1:
            found.append(Specimen(group, _shape(sizes, ragged=False), attributes))
    if all(specimen.numel == 1 for specimen in found):
        found.append(Specimen(group, (8,)))  # to tell states with one number an element from numbers such as `step`
    return found


def _noted(parameter: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """What somebody has set on a parameter, as far as it is plain."""
    found = getattr(parameter, "__dict__", {})
    return tuple(sorted((key, value) for key, value in found.items() if isinstance(value, bool | int | float | str)))


def _sizes(shape: torch.Size) -> tuple[int, ...]:
    return tuple(0 if size == 1 else 1 if size < 32 else 2 if size < 128 else 3 for size in shape)


@functools.cache
def _shape(sizes: tuple[int, ...], *, ragged: bool) -> tuple[int, ...]:
    if len(sizes) == 1:
        table = (1, 7, 45, 1001) if ragged else (1, 8, 64, 960)
    elif len(sizes) == 2:
        table = (1, 7, 45, 149) if ragged else (1, 8, 64, 192)
    else:
        table = (1, 3, 35, 131) if ragged else (1, 4, 32, 32)
    shape = [table[size] for size in sizes]
    while torch.Size(shape).numel() > _MOST_NUMEL:
        largest = shape.index(max(shape))
        shape[largest] = shape[largest] // 4 + 1
    return tuple(shape)


def _part(trial: Trial, places: Sequence[int]) -> Trial:
    """Some parameters of one group, as the only group."""
    group = trial.specimens[places[0]].group
    specimens = tuple(dataclasses.replace(trial.specimens[place], group=0) for place in places)
    return dataclasses.replace(trial, specimens=specimens, groups=(trial.groups[group],), absent=frozenset())


def _replayed(whole: Whole, places: Sequence[int]) -> Whole:
    starts = [whole.starts[place] for place in places]
    gradients = [[gradients[place] for place in places] for gradients in whole.gradients]
    return Whole(whole.trial, starts, gradients, slot_names=whole.slot_names)


def _same(whole: Whole, places: Sequence[int], part: Whole) -> bool:
    for values, ours in zip(whole.values, part.values, strict=True):
        if not all(same_value(values[place], mine) for place, mine in zip(places, ours, strict=True)):
            return False
    return True


def _same_values(first: Whole, second: Whole) -> bool:
    """Whether two runs over the same numbers, in whatever shapes, moved parameters and states alike."""
    for step in range(len(first.values)):
        for one, other in zip(first.values[step], second.values[step], strict=True):
            if not same_value(one.reshape(-1), other.reshape(-1)):
                return False
        for ours, theirs in zip(first.slots[step], second.slots[step], strict=True):
            if not same_value(_flat(ours), _flat(theirs)):
                return False
    return True


def _flat(slots: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.reshape(-1) for key, value in slots.items()}


def _agree(fused: Whole, other: Whole) -> bool:
    """Whether two runs are the same arithmetic, but for rounding; values that overflowed in `other` are not judged."""
    pairs = [
        pair for ours, theirs in zip(fused.values, other.values, strict=True) for pair in zip(ours, theirs, strict=True)
    ]
    for ours_, theirs_ in zip(fused.slots, other.slots, strict=True):
        for mine, yours in zip(ours_, theirs_, strict=True):
            pairs.extend((value, yours[key]) for key, value in mine.items() if key in yours)
    for ours__, theirs__ in pairs:
        known = theirs__.isfinite()
        a, b = ours__[known].double(), theirs__[known].double()
        if b.numel() and not torch.allclose(a, b, rtol=0.1, atol=0.02 * float(b.abs().max())):
            return False
    return True
