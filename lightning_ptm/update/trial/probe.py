"""Finds out what an optimizer keeps, and whether its update can be run page by page or parameter by parameter.

torch's own classes are known (known.py). Every other class is tried on small parameters, so third-party ones pass or fail by
what they do; one that fails is refused with the property that it lacks, found by trials in which only that property matters.
The user's optimizer is only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import CpuBackend, backend_of
from lightning_ptm.torch_internals import devices_of_fused_steps
from lightning_ptm.update.clone import constructed_clone
from lightning_ptm.update.shadow import NOT_HYPERPARAMETERS, hyperparameters_of, undecorated_step
from lightning_ptm.update.trial.known import has_wrong_kernel, is_known, known_group, known_initial
from lightning_ptm.update.trial.parameters import (
    MANY_STEPS,
    Gradient,
    Trial,
    TrialParameter,
    groups_to_try,
    kinds_of_groups,
    trial_of_some,
    trial_with,
    with_few_parameters,
)
from lightning_ptm.update.trial.runs import (
    Difference,
    ReferenceRun,
    agree_within_rounding,
    holds_parameters,
    non_parameter_keys,
    replay_of,
    run_by_parameter,
    run_in_pieces,
    run_reference,
    same_values,
    same_values_at,
)
from lightning_ptm.update.trial.side_effects import SharedData, reached_parameters
from lightning_ptm.update.trial.state_tensors import (
    MissingProperty,
    RaisesInTrial,
    elementwise_slots,
    error_text,
    group_changes,
    has_other_states,
    smallest_shape,
    whole_parameter_slots,
    with_state_shapes,
)
from lightning_ptm.update.trial.traits import GroupTraits, Initial, OptimizerTraits, same_value


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
    if is_known(optimizer, dtype, device):
        groups = tuple(
            known_group(optimizer, group, dtype, may_fuse=may_fuse(group, dtype, device))
            for group in optimizer.param_groups
        )
        return OptimizerTraits(name_of(optimizer), groups, known_initial(optimizer), device)
    if has_wrong_kernel(optimizer, dtype):
        raise ConfigError(
            f"{name_of(optimizer)} with fused=True and momentum keeps wrong momentum of {str(dtype).removeprefix('torch.')}: "
            f"torch's kernel does; use fused=False, or a mixed precision, whose master weights are fp32"
        )
    return try_out(optimizer, dtype=dtype, device=device)


def try_out(optimizer: Optimizer, *, dtype: torch.dtype, device: torch.device) -> OptimizerTraits:
    """Learn an optimizer's traits as `probe`, by a trial whatever the class is."""
    with _nothing_changed(optimizer, device):
        return OptimizerUnderTest(optimizer, dtype, device).traits()


@contextlib.contextmanager
def _nothing_changed(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Puts back what a class may change outside of its object: random generators, and data on the class or in its module."""
    shared = SharedData(optimizer)
    python, here = random.getstate(), torch.get_rng_state()
    backend = backend_of(device)
    there = backend.random_state()
    try:
        yield
    finally:
        shared.restore()
        random.setstate(python)
        torch.set_rng_state(here)
        if there is not None:
            backend.set_random_state(there)


_WORKS = (
    "what works: element-wise optimizers (Adam, AdamW, SGD, RAdam, NAdam, RMSprop, Adagrad, Adadelta, "
    "Adamax, ASGD, Rprop, and others such as Lion); without tensor and expert parallelism also those "
    "that update whole parameters one by one (Muon, Adafactor, LAMB); any optimizer with everything in "
    "RAM, on one rank and in a true precision ('32-true', 'bf16-true')"
)


def name_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class in messages."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def may_fuse(values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the class offers a fused kernel and the user left the choice open."""
    if values.get("fused", False) is not None or values.get("foreach") is not None or values.get("differentiable"):
        return False
    return dtype.is_floating_point and device.type in devices_of_fused_steps()


class OptimizerUnderTest:
    """A user's optimizer, on which trials are run to find its traits.

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
        self._whole_reason = ""
        """The reason why the optimizer is not element-wise; empty while that is tried. Then it is tried parameter by
        parameter."""
        self._state_names: list[str] = []

    def traits(self) -> OptimizerTraits:
        try:
            self._check_structure()
            self._initial = self._find_initial()
            kinds = kinds_of_groups(self._optimizer.param_groups)
            chosen = groups_to_try(kinds)
            trial = trial_with([self._optimizer.param_groups[index] for index in chosen], self._settings_of(chosen))
            self._check_shared_data(with_few_parameters(trial))
            traits = self._by_element_or_parameter(trial)
            tried = {kinds[index]: traits.groups[place] for place, index in enumerate(chosen)}
            groups = [tried[kind] for kind in kinds]
            if traits.whole:
                groups = with_state_shapes(self._optimizer, traits, groups, self._dtype)
        except RaisesInTrial as missing:
            raise ConfigError(
                f"{self._name} cannot be tested on small parameters before the run, so it is not known whether pages "
                f"can be updated one by one: {missing}. Use {self._replacement()} in its place; {_WORKS}"
            ) from missing.__cause__
        except MissingProperty as missing:
            raise ConfigError(
                f"{self._name} is refused: {missing}. So its update cannot be run on pages, which hold numbers and "
                f"tensors of single parameters and are updated one parameter at a time, with the numbers of the "
                f"class itself. Use {self._replacement()} in its place; {_WORKS}"
            ) from missing.__cause__
        return dataclasses.replace(traits, groups=tuple(groups))

    # -- how the class is built ---------------------------------------------------------------------------------------

    def _check_structure(self) -> None:
        if all(callable(getattr(type(self._optimizer), name, None)) for name in ("train", "eval")):
            raise ConfigError(
                f"{self._name} changes parameters in its train() and eval(), between steps, when they are stored in "
                f"pages. Use {self._replacement()} with a learning rate scheduler in its place; {_WORKS}"
            )
        reached = reached_parameters(self._optimizer)
        if reached is None:
            return
        place, value = reached
        what = type(value).__name__
        if isinstance(self._optimizer, LBFGS):
            raise ConfigError(
                f"{self._name}.step needs a closure that evaluates the model again, several times a step; pages are updated "
                f"long after the forward pass; {_WORKS}"
            )
        if isinstance(value, Optimizer):
            raise ConfigError(
                f"{self._name} wraps another optimizer, {what} (its {place}), and changes the parameters of that one "
                f"itself, which are stored in pages; return the {what} from configure_optimizers without it; {_WORKS}"
            )
        if isinstance(value, types.FunctionType):
            raise ConfigError(
                f"{self._name} keeps in its {place} a function that refers to the optimizer, a module or a parameter. "
                "Pages are updated by copies of the optimizer, for which the function would still use the original. "
                f"Make it a method; {_WORKS}"
            )
        raise ConfigError(
            f"{self._name} reaches parameters by its {place} ({what}) and not only by its param_groups; they lie in pages, "
            f"and its update cannot be run page by page. Use {self._replacement()} in its place; {_WORKS}"
        )

    def _check_shared_data(self, trial: Trial) -> None:
        """Refuses a class whose steps change data on the class, in its module or in a closure."""
        self._run(trial)  # what a class makes once is a cache
        shared = SharedData(self._optimizer)
        self._run(trial)
        if changed := shared.changed():
            raise ConfigError(
                f"{self._name}.step changes {', '.join(sorted(changed))}, outside of the optimizer object; pages are updated "
                f"by many calls of step, all of which would change it. Keep what the update depends on in its param_groups "
                f"or state, and other data (counters, logs) in attributes of the object; {_WORKS}"
            )

    def _find_initial(self) -> Initial:
        """Whether the class fills state in its constructor; then it has to do so for each page, too."""
        others = non_parameter_keys(self._optimizer)
        if others:
            raise MissingProperty(f"it keeps {', '.join(others)} in its state, which belongs to no parameter")
        made = [state for state in self._optimizer.state.values() if state]
        if not made:
            return Initial.LAZY
        like = torch.nn.Parameter(torch.zeros(8, dtype=self._dtype, device=self._device))
        group = hyperparameters_of(self._optimizer.param_groups[0])
        try:
            fresh = constructed_clone(self._optimizer, [{"params": [like], **group}])
        except Exception as error:
            raise MissingProperty(
                f"its constructor makes states, and called again with its defaults it raises {error_text(error)}"
            ) from error
        return Initial.CONSTRUCTED if fresh.state.get(like) else Initial.LAZY

    def _on_device(self) -> str:
        return "" if self._device.type == CpuBackend.name else f" on {self._device}"

    def _replacement(self) -> str:
        names = " ".join(self._state_names) or type(self._optimizer).__name__.lower()
        adaptive = len(self._state_names) > 1 or any(word in names for word in ("sq", "var", "ada", "sum"))
        return "torch.optim.AdamW" if adaptive or not self._state_names else "torch.optim.SGD with momentum"

    # -- what is tried ------------------------------------------------------------------------------------------------

    def _settings_of(self, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Hyper-parameters of groups, not copied: groups may share a list, and copies of all of them then do."""
        groups = [self._optimizer.param_groups[index] for index in chosen]
        return [{key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS} for group in groups]

    def _by_element_or_parameter(self, trial: Trial) -> OptimizerTraits:
        try:
            return self._fused_or_not(trial)
        except RaisesInTrial:
            raise
        except MissingProperty as missing:
            self._whole_reason = str(missing)
        return self._traits_with(trial, [False] * len(trial.groups))

    def _fused_or_not(self, trial: Trial) -> OptimizerTraits:
        fused = [may_fuse(values, self._dtype, self._device) for values in trial.groups]
        if any(fused):
            # A fused kernel that does not work for this dtype is no reason to refuse: the class works without it.
            with contextlib.suppress(MissingProperty):
                return self._traits_with(trial, fused)
        return self._traits_with(trial, [False] * len(fused))

    def _traits_with(self, trial: Trial, fused: Sequence[bool]) -> OptimizerTraits:
        def with_fused(value: bool) -> Trial:
            pairs = zip(trial.groups, fused, strict=True)
            groups = tuple({**group, "fused": value} if choose else group for group, choose in pairs)
            return dataclasses.replace(trial, groups=groups)

        chosen = with_fused(True)
        reference = self._run(chosen)
        if any(fused) and not agree_within_rounding(reference, self._run(with_fused(False))):
            # torch 2.13's fused SGD on the CPU stores wrong 16-bit momentum.
            raise MissingProperty("its fused and unfused kernels give different results")
        traits = self._traits_shown_by(reference, fused)
        self._check_pieces(traits, reference)
        every_gradient = self._check_rare_steps(traits, chosen)
        groups = [
            dataclasses.replace(group, must_stay_zero=self._zero_settings(traits, chosen, index))
            for index, group in enumerate(traits.groups)
        ]
        return dataclasses.replace(traits, groups=tuple(groups), every_gradient=every_gradient)

    def _run(self, trial: Trial, **options: Any) -> ReferenceRun:
        try:
            return run_reference(self._optimizer, trial, self._initial, self._dtype, self._device, **options)
        except Exception as error:
            raise RaisesInTrial(
                f"on small {self._dtype} parameters{self._on_device()} it raises {error_text(error)}"
            ) from error

    # -- what a reference run shows -----------------------------------------------------------------------------------

    def _traits_shown_by(self, reference: ReferenceRun, fused: Sequence[bool]) -> OptimizerTraits:
        """Traits as a reference run shows them."""
        self._state_names = sorted({key for slots in reference.slots[-1] for key in slots})
        self._check_behaviour(reference)
        groups = []
        for index, choose in enumerate(fused):
            members = [place for place, spec in enumerate(reference.trial.parameters) if spec.group == index]
            scalars = dict.fromkeys(key for place in members for key in reference.scalars[-1][place])
            if self._whole_reason:
                slots, state_shapes = whole_parameter_slots(reference, members)
                example = smallest_shape(state_shapes)
                found = GroupTraits(slots, tuple(scalars), choose, state_shapes=state_shapes, example_shape=example)
            else:
                found = GroupTraits(elementwise_slots(reference, members), tuple(scalars), choose)
            beside = {
                key
                for place in members
                for key, value in reference.scalars[-1][place].items()
                if isinstance(value, torch.Tensor) and value.device.type == self._device.type
            }
            groups.append(dataclasses.replace(found, scalars_beside=frozenset(beside)))
        changes = group_changes(reference)
        return OptimizerTraits(
            self._name,
            tuple(groups),
            self._initial,
            self._device,
            group_slots=changes.advanced,
            created=changes.created,
            group_containers=changes.containers,
            changed_attributes=reference.changed_attributes,
            closure=_insists_on_closure(self._optimizer),
            ignores_closure=max(reference.closure_calls) == 0,
            holds_parameters=holds_parameters(self._optimizer, reference, self._initial),
            writes_gradient=reference.writes_gradient,
            whole=self._whole_reason,
        )

    def _check_behaviour(self, reference: ReferenceRun) -> None:
        if max(reference.closure_calls) > 1 or reference.moved_before_closure:
            how = "at other weights" if reference.moved_before_closure else f"{max(reference.closure_calls)} times"
            raise ConfigError(
                f"{self._name}.step needs a closure that evaluates the model again, {how} a step; pages are updated long "
                f"after the forward pass; {_WORKS}"
            )
        if min(reference.closure_calls) < max(reference.closure_calls):
            raise ConfigError(
                f"{self._name}.step calls its closure in some steps only, and pages are updated when it is called; "
                f"call it once in every step; {_WORKS}"
            )
        if reference.non_parameter_keys:
            raise MissingProperty(
                f"it keeps {', '.join(reference.non_parameter_keys)} in its state, which belongs to no parameter"
            )
        if reference.draws_random_numbers:
            raise MissingProperty("it draws random numbers, and pages would draw others")
        if reference.changed_attributes:
            reset = self._run(reference.trial, replay=reference, reset_attributes=True)
            if not same_values(reference, reset):
                places = ", ".join(f"self.{name}" for name in reference.changed_attributes)
                raise MissingProperty(
                    f"its update depends on {places}, which each step changes, and which is neither in its state nor in a "
                    f"parameter group"
                )
        for step, groups in enumerate(reference.groups):
            for index, group in enumerate(groups):
                wanted = reference.trial.at_step(index, step).get("lr")
                if wanted is not None and not same_value(wanted, group["lr"]):
                    raise MissingProperty("it changes its own learning rate in its step")

    # -- comparison with updates of pages -----------------------------------------------------------------------------

    def _check_pieces(self, traits: OptimizerTraits, reference: ReferenceRun) -> None:
        found = self._difference_in_pages(traits, reference)
        if found is not None:
            raise self._reason_for(reference, found)

    def _difference_in_pages(self, traits: OptimizerTraits, reference: ReferenceRun) -> Difference | Exception | None:
        run = run_by_parameter if traits.whole else run_in_pieces
        try:
            return run(self._optimizer, traits, reference)
        except Exception as error:  # whatever the class raises on a piece is the reason to refuse it
            return error

    def _check_rare_steps(self, traits: OptimizerTraits, trial: Trial) -> str:
        """Check what an optimizer may do in some steps only: every few, or when a gradient is missing or not finite.

        Returns:
            Why every parameter needs a gradient in every step; empty: it does not.
        """
        few = with_few_parameters(trial)
        self._check_steps(traits, dataclasses.replace(few, steps=MANY_STEPS))
        last = len(few.parameters) - 1
        without_gradient = {
            (1, 0),
            (3, last),
            *((2, place) for place in range(last + 1) if not few.parameters[place].group),
        }
        broken = (Gradient.MIXED, Gradient.BROKEN, Gradient.MIXED)
        try:
            self._check_steps(traits, dataclasses.replace(few, steps=broken))
        except MissingProperty as missing:
            raise MissingProperty(
                f"an inf or NaN in one element of a gradient changes what becomes of the others ({missing})"
            ) from None
        try:
            steps = (Gradient.MIXED,) * 5
            self._check_steps(
                traits, dataclasses.replace(few, steps=steps, without_gradient=frozenset(without_gradient))
            )
        except MissingProperty:
            return "it treats parameters otherwise when one of them has no gradient in a step"
        return ""

    def _check_steps(self, traits: OptimizerTraits, trial: Trial) -> None:
        """Check a trial; a class that raises in the reference run, too, is not refused for that."""
        with contextlib.suppress(RaisesInTrial):
            self._check_pieces(traits, self._run(trial))

    def _zero_settings(self, traits: OptimizerTraits, trial: Trial, index: int) -> Mapping[str, str]:
        """Settings that are 0, each with what is wrong with the update in pages where it is 0.1."""
        found: dict[str, str] = {}
        for key, value in trial.groups[index].items():
            if type(value) not in (float, int) or value or key == "lr" or key in traits.group_slots:
                continue
            groups = tuple({**group, key: 0.1} if place == index else group for place, group in enumerate(trial.groups))
            try:
                reference = self._run(dataclasses.replace(with_few_parameters(trial), groups=groups))
                if any(has_other_states(traits, reference, place) for place in range(len(reference.trial.parameters))):
                    continue  # it has more states then, which the shadow refuses by itself
                self._check_pieces(traits, reference)
            except MissingProperty as missing:
                found[key] = str(missing)
        return found

    # -- the reason for a difference ----------------------------------------------------------------------------------

    def _reason_for(self, reference: ReferenceRun, found: Difference | Exception) -> MissingProperty:
        """Find the property that is missing, by trials in which only that one matters."""
        if isinstance(found, Difference) and found.parameter is None:
            return MissingProperty(
                f"its step sets {found.what} by the values of its parameters, at step {found.step + 1}"
            )
        with contextlib.suppress(MissingProperty):
            if not same_values(reference, self._run(reference.trial, replay=reference, loss=1.9)):
                return MissingProperty("its update depends on the loss that the closure returns")
        first = found.parameter if isinstance(found, Difference) and found.parameter is not None else 0
        specs = reference.trial.parameters
        for place in (first, *(other for other in range(len(specs)) if other != first)):
            missing = self._reason_at(reference, place)
            if missing is not None:
                return missing
        if isinstance(found, Exception):
            if self._whole_reason:
                return MissingProperty(f"on a parameter alone it raises {error_text(found)}")
            return MissingProperty(f"on a piece of a parameter, made 1-D, it raises {error_text(found)}")
        if self._whole_reason:
            return MissingProperty(f"updating a parameter of shape {specs[first].shape} alone changes its {found.what}")
        return MissingProperty(
            f"updating a parameter of shape {specs[first].shape} in pieces changes its {found.what} at step "
            f"{found.step + 1}: elements influence each other beyond the number of steps"
        )

    def _reason_at(self, reference: ReferenceRun, place: int) -> MissingProperty | None:
        spec = reference.trial.parameters[place]
        group = [index for index, each in enumerate(reference.trial.parameters) if each.group == spec.group]
        try:
            alone = self._run(trial_of_some(reference.trial, [place]), replay=replay_of(reference, [place]))
            if not same_values_at(reference, [place], alone):
                together = self._run(trial_of_some(reference.trial, group), replay=replay_of(reference, group))
                what = "its parameters" if same_values_at(reference, group, together) else "its parameter groups"
                return MissingProperty(
                    f"the update of one of {what} depends on the others (a norm over all of them, for one)"
                )
        except MissingProperty:
            return None
        if spec.attributes:
            bare = dataclasses.replace(alone.trial, parameters=(TrialParameter(0, spec.shape),))
            try:
                same = same_values(alone, self._run(bare, replay=alone))
            except MissingProperty:
                same = False
            if not same:
                return MissingProperty(
                    f"it looks at attributes of a parameter ({', '.join(spec.attributes)}), which pages do not have"
                )
        if self._whole_reason:
            return None
        if len(spec.shape) != 1:
            flat = dataclasses.replace(alone.trial, parameters=(TrialParameter(0, (spec.numel,), spec.attributes),))
            try:
                if not same_values(alone, self._run(flat, replay=alone)):
                    return MissingProperty(
                        f"it treats a {len(spec.shape)}-D parameter (here {spec.shape}) otherwise than the same "
                        f"numbers in a row: by its rows, filters or matrices, or by the number of its dimensions"
                    )
            except MissingProperty as missing:
                return MissingProperty(f"it takes whole {len(spec.shape)}-D parameters only ({missing})")
        traits = OptimizerTraits(self._name, (), self._initial, self._device)
        with contextlib.suppress(MissingProperty):
            traits = self._traits_shown_by(alone, [False])
            if self._difference_in_pages(traits, alone) is not None:
                return MissingProperty(
                    "the update of one element depends on others of its parameter (a norm, a mean or a maximum over it, its "
                    "size)"
                )
        return None


def _insists_on_closure(optimizer: Optimizer) -> bool:
    parameters = inspect.signature(undecorated_step(type(optimizer))).parameters
    closure = parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
