"""An optimizer on trial: what it keeps, whether its update may be run page by page, and if not, which property it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.update.compared import agree, replayed, same_parts, same_values
from lightning_ptm.update.kept import Lacks, Raises, group_values, own_slots_of, slots_of, told
from lightning_ptm.update.private import PrivateOptimizer, held_by
from lightning_ptm.update.shadow import NOT_HYPER, own_values, undecorated_step
from lightning_ptm.update.specimens import (
    LONG,
    Gradient,
    Specimen,
    Trial,
    chosen_groups,
    kinds_of,
    part_of,
    trial_of,
    with_few,
)
from lightning_ptm.update.traits import GroupTraits, Initial, OptimizerTraits, same_value
from lightning_ptm.update.trial import Difference, Whole, holds_parameters, run_in_pieces, run_whole, strange_keys
from lightning_ptm.update.whole_trial import keeps_others, run_by_parameter, smallest, with_own_shapes

_WORKS = (
    "what works: optimizers that treat each element on its own, as Adam, AdamW, SGD, RAdam, NAdam, RMSprop, Adagrad, "
    "Adadelta, Adamax, ASGD, Rprop and third-party ones such as Lion do; unless ranks cut parameters, also those that treat "
    "each parameter on its own, as Muon, Adafactor and LAMB do; or any, with everything in RAM, on one rank and in a true "
    "precision"
)


def name_of(optimizer: Optimizer) -> str:
    """As users are told it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def may_fuse(values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the class offers a fused kernel and the user left the choice open."""
    if values.get("fused", False) is not None or values.get("foreach") or values.get("differentiable"):
        return False
    return dtype.is_floating_point and device.type in _get_fused_kernels_supported_devices()


class Candidate:
    """An optimizer on trial.

    Args:
        optimizer: the user's, only read.
        dtype, device: of the parameters of the trial.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype, device: torch.device) -> None:
        self._optimizer = optimizer
        self._dtype = dtype
        self._device = device
        self._name = name_of(optimizer)
        self._initial = Initial.LAZY
        self._whole = ""
        """Why it is not element-wise; then it is tried whether it updates each parameter on its own."""
        self._slots: list[str] = []

    def traits(self) -> OptimizerTraits:
        try:
            self._check_holdings()
            self._initial = self._find_initial()
            kinds = kinds_of(self._optimizer.param_groups)
            chosen = chosen_groups(kinds)
            trial = trial_of([self._optimizer.param_groups[index] for index in chosen], self._all_values(chosen))
            traits = self._by_element_or_parameter(trial)
            tried = {kinds[index]: traits.groups[place] for place, index in enumerate(chosen)}
            groups = [tried[kind] for kind in kinds]
            if traits.whole:
                groups = with_own_shapes(self._optimizer, traits, groups, self._dtype)
        except Raises as lack:
            raise ConfigError(
                f"{self._name} cannot be tried, and so not be run page by page: {lack}. Use {self._instead()} in its place; "
                f"{_WORKS}"
            ) from lack.__cause__
        except Lacks as lack:
            raise ConfigError(
                f"{self._name} updates neither each element nor each parameter on its own: {lack}; so its update cannot be "
                f"run page by page; training with it would change its meaning. Use {self._instead()} in its place; {_WORKS}"
            ) from lack.__cause__
        return dataclasses.replace(traits, groups=tuple(groups))

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
        if isinstance(self._optimizer, LBFGS):
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
            raise Lacks(f"it keeps {', '.join(others)} in its state, for no parameter")
        made = [state for state in self._optimizer.state.values() if state]
        if not made:
            return Initial.LAZY
        like = torch.nn.Parameter(torch.zeros(8, dtype=self._dtype, device=self._device))
        group = own_values(self._optimizer.param_groups[0])
        try:
            fresh = PrivateOptimizer(self._optimizer).construct([{"params": [like], **group}])
        except Exception as error:
            raise Lacks(
                f"its constructor makes states, and called again with its defaults it raises {told(error)}"
            ) from error
        return Initial.CONSTRUCTED if fresh.state.get(like) else Initial.LAZY

    def _where(self) -> str:
        return "" if self._device.type == CpuBackend.name else f" on {self._device}"

    def _instead(self) -> str:
        names = " ".join(self._slots) or type(self._optimizer).__name__.lower()
        adaptive = len(self._slots) > 1 or any(word in names for word in ("sq", "var", "ada", "sum"))
        return "torch.optim.AdamW" if adaptive or not self._slots else "torch.optim.SGD with momentum"

    # -- what is tried ------------------------------------------------------------------------------------------------

    def _all_values(self, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """The user's very values, to be copied together: groups may share a list."""
        groups = [self._optimizer.param_groups[index] for index in chosen]
        return [{key: value for key, value in group.items() if key not in NOT_HYPER} for group in groups]

    def _by_element_or_parameter(self, trial: Trial) -> OptimizerTraits:
        try:
            return self._fused_or_not(trial)
        except Raises:
            raise
        except Lacks as lack:
            self._whole = str(lack)
        return self._tried(trial, [False] * len(trial.groups))

    def _fused_or_not(self, trial: Trial) -> OptimizerTraits:
        fused = [may_fuse(values, self._dtype, self._device) for values in trial.groups]
        if any(fused):
            # A fused kernel that does not work for this dtype is no reason to refuse: the class works without it.
            with contextlib.suppress(Lacks):
                return self._tried(trial, fused)
        return self._tried(trial, [False] * len(fused))

    def _tried(self, trial: Trial, fused: Sequence[bool]) -> OptimizerTraits:
        def with_fused(value: bool) -> Trial:
            pairs = zip(trial.groups, fused, strict=True)
            groups = tuple({**group, "fused": value} if choose else group for group, choose in pairs)
            return dataclasses.replace(trial, groups=groups)

        chosen = with_fused(True)
        whole = self._run(chosen)
        if any(fused) and not agree(whole, self._run(with_fused(False))):
            # torch 2.13's fused SGD on the CPU stores wrong 16-bit momentum.
            raise Lacks("its fused kernel does not do what its other code does")
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
            raise Raises(f"on small {self._dtype} parameters{self._where()} it raises {told(error)}") from error

    # -- what it keeps ------------------------------------------------------------------------------------------------

    def _described(self, whole: Whole, fused: Sequence[bool]) -> OptimizerTraits:
        """Traits as the run with whole parameters shows them."""
        self._slots = sorted({key for slots in whole.slots[-1] for key in slots})
        self._check_behaviour(whole)
        groups = []
        for index, choose in enumerate(fused):
            members = [place for place, specimen in enumerate(whole.trial.specimens) if specimen.group == index]
            scalars = dict.fromkeys(key for place in members for key in whole.scalars[-1][place])
            if self._whole:
                slots, kept = own_slots_of(whole, members)
                groups.append(GroupTraits(slots, tuple(scalars), choose, kept=kept, small=smallest(kept)))
            else:
                groups.append(GroupTraits(slots_of(whole, members), tuple(scalars), choose))
        advanced, created, containers = group_values(whole)
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
            whole=self._whole,
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
            raise Lacks(f"it keeps {', '.join(whole.strange_keys)} in its state, for no parameter")
        if whole.draws_random_numbers:
            raise Lacks("it draws random numbers, and pages would draw others")
        if whole.records or whole.outside:
            forgetful = self._run(whole.trial, replay=whole, forgetful=True)
            if not same_values(whole, forgetful):
                places = [*(f"self.{name}" for name in whole.records), *whole.outside]
                raise Lacks(
                    f"its update depends on {', '.join(places)}, which each step changes, and which is neither in its state "
                    f"nor in a parameter group"
                )
        for step, groups in enumerate(whole.groups):
            for index, group in enumerate(groups):
                wanted = whole.trial.at_step(index, step).get("lr")
                if wanted is not None and not same_value(wanted, group["lr"]):
                    raise Lacks("it changes its own learning rate in its step")

    # -- what it does in pieces ---------------------------------------------------------------------------------------

    def _check_pieces(self, traits: OptimizerTraits, whole: Whole) -> None:
        found = self._in_pieces(traits, whole)
        if found is not None:
            raise self._explained(whole, found)

    def _in_pieces(self, traits: OptimizerTraits, whole: Whole) -> Difference | Exception | None:
        run = run_by_parameter if traits.whole else run_in_pieces
        try:
            return run(self._optimizer, traits, whole)
        except Exception as error:  # whatever a foreign class raises on a piece is the reason to refuse it
            return error

    def _check_apart(self, traits: OptimizerTraits, trial: Trial) -> str:
        """What happens now and then: every few steps, or when a gradient is missing or broken.

        Returns:
            Why every parameter needs a gradient in every step; empty: it does not.
        """
        few = with_few(trial)
        self._check_now_and_then(traits, dataclasses.replace(few, steps=LONG))
        last = len(few.specimens) - 1
        absent = {(1, 0), (3, last), *((2, place) for place in range(last + 1) if not few.specimens[place].group)}
        broken = (Gradient.MIXED, Gradient.BROKEN, Gradient.MIXED)
        try:
            self._check_now_and_then(traits, dataclasses.replace(few, steps=broken))
        except Lacks as lack:
            raise Lacks(
                f"an inf or NaN in one element of a gradient changes what becomes of the others ({lack})"
            ) from None
        try:
            steps = (Gradient.MIXED,) * 5
            self._check_now_and_then(traits, dataclasses.replace(few, steps=steps, absent=frozenset(absent)))
        except Lacks:
            return "it treats parameters otherwise when one of them has no gradient in a step"
        return ""

    def _check_now_and_then(self, traits: OptimizerTraits, trial: Trial) -> None:
        """Where the class itself raises, it does so with whole parameters, too."""
        with contextlib.suppress(Raises):
            self._check_pieces(traits, self._run(trial))

    def _fixed(self, traits: OptimizerTraits, trial: Trial, index: int) -> Mapping[str, str]:
        """Settings that are 0 and without which the update would not be element-wise."""
        found: dict[str, str] = {}
        for key, value in trial.groups[index].items():
            if type(value) not in (float, int) or value or key == "lr" or key in traits.group_slots:
                continue
            groups = tuple({**group, key: 0.1} if place == index else group for place, group in enumerate(trial.groups))
            try:
                whole = self._run(dataclasses.replace(with_few(trial), groups=groups))
                if any(keeps_others(traits, whole, place) for place in range(len(whole.trial.specimens))):
                    continue  # it keeps more then: the shadow refuses that by itself
                self._check_pieces(traits, whole)
            except Lacks as lack:
                found[key] = str(lack)
        return found

    # -- why ----------------------------------------------------------------------------------------------------------

    def _explained(self, whole: Whole, found: Difference | Exception) -> Lacks:
        """Which property is missing, by trials in which only that one matters."""
        if isinstance(found, Difference) and found.parameter is None:
            return Lacks(f"its step sets {found.what} by what is in its parameters, at step {found.step + 1}")
        with contextlib.suppress(Lacks):
            if not same_values(whole, self._run(whole.trial, replay=whole, loss=1.9)):
                return Lacks("its update depends on the loss that the closure returns")
        first = found.parameter if isinstance(found, Difference) and found.parameter is not None else 0
        specimens = whole.trial.specimens
        for place in (first, *(other for other in range(len(specimens)) if other != first)):
            lack = self._of_one(whole, place)
            if lack is not None:
                return lack
        if isinstance(found, Exception):
            if self._whole:
                return Lacks(f"on a parameter alone it raises {told(found)}")
            return Lacks(f"on a piece of a parameter, made 1-D, it raises {told(found)}")
        if self._whole:
            return Lacks(f"updating a parameter of shape {specimens[first].shape} alone changes its {found.what}")
        return Lacks(
            f"updating a parameter of shape {specimens[first].shape} in pieces changes its {found.what} at step "
            f"{found.step + 1}: its elements have more in common than the number of steps"
        )

    def _of_one(self, whole: Whole, place: int) -> Lacks | None:
        specimen = whole.trial.specimens[place]
        group = [index for index, each in enumerate(whole.trial.specimens) if each.group == specimen.group]
        try:
            alone = self._run(part_of(whole.trial, [place]), replay=replayed(whole, [place]))
            if not same_parts(whole, [place], alone):
                together = self._run(part_of(whole.trial, group), replay=replayed(whole, group))
                what = "its parameters" if same_parts(whole, group, together) else "its parameter groups"
                return Lacks(f"the update of one of {what} depends on the others (a norm over all of them, for one)")
        except Lacks:
            return None
        if specimen.attributes:
            bare = dataclasses.replace(alone.trial, specimens=(Specimen(0, specimen.shape),))
            try:
                same = same_values(alone, self._run(bare, replay=alone))
            except Lacks:
                same = False
            if not same:
                return Lacks(
                    f"it looks at attributes of a parameter ({', '.join(specimen.attributes)}), which pages do not have"
                )
        if self._whole:
            return None
        if len(specimen.shape) != 1:
            flat = dataclasses.replace(alone.trial, specimens=(Specimen(0, (specimen.numel,), specimen.attributes),))
            try:
                if not same_values(alone, self._run(flat, replay=alone)):
                    return Lacks(
                        f"it treats a {len(specimen.shape)}-D parameter (here {specimen.shape}) otherwise than the same "
                        f"numbers in a row: by its rows, filters or matrices, or by the number of its dimensions"
                    )
            except Lacks as lack:
                return Lacks(f"it takes whole {len(specimen.shape)}-D parameters only ({lack})")
        traits = OptimizerTraits(self._name, (), self._initial, self._device)
        with contextlib.suppress(Lacks):
            traits = self._described(alone, [False])
            if self._in_pieces(traits, alone) is not None:
                return Lacks(
                    "the update of one element depends on others of its parameter (a norm, a mean or a maximum over it, its "
                    "size)"
                )
        return None


def _insists_on_closure(optimizer: Optimizer) -> bool:
    parameters = inspect.signature(undecorated_step(type(optimizer))).parameters
    closure = parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
