"""Detection of changes to the module that need a new page layout, such as added or unfrozen parameters, between batches
and at a step.

Owns a record of the module at set-up: its parameters, and which of them were frozen. The trainer does the re-layout
(trainer/relayout.py).

I1: changes that `outgrown` finds between two batches are refused at a step, which could not apply them.
I2: `KnownParameters` is used before each batch, and therefore reads no tensor. Names do not matter to it: pruning renames a
    parameter, which keeps its place in pages. A parameter that several modules refer to (tied weights) is one parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.full_params.gathered_parameters import GatheredParameters
from lightning_ptm.runtime.units.discovery import UnitParameter, overlap
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.updates import UpdateScheduler
from lightning_ptm.torch_internals import parameters_in

_is_trained = attrgetter("parameter.requires_grad")


@contextmanager
def _trained(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which frozen parameters require gradients. It does not refer to the engine, which ends in it."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


class KnownParameters:
    """Parameters of `module` and its submodules at the time of construction.

    Args:
        optimizers: optimizers whose parameters that are not in the module become `outside_module`.

    Attributes:
        outside_module: parameters in the optimizers' groups that no module has.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._held = _places(module)  # keeps the objects alive, so that their ids are not reused
        known = {id(parameter) for _, parameter in self._held.values()}
        in_groups = chain.from_iterable(group["params"] for each in optimizers for group in each.param_groups)
        self.outside_module: list[Tensor] = [parameter for parameter in in_groups if id(parameter) not in known]

    def new(self) -> list[str]:
        """Returns the names of parameters that no module had at set-up."""
        return [name for name, parameter in self._module.named_parameters() if id(parameter) not in self._names]

    def gone(self) -> list[str]:
        """Returns the former names of parameters that no module has any more."""
        left = {id(parameter) for parameter in self._module.parameters()}
        return [name for known, name in self._names.items() if known not in left]

    def changed(self) -> bool:
        """Whether a parameter, or a module with parameters, was added, removed or exchanged since set-up."""
        return _places(self._module).keys() != self._held.keys()


def _places(module: nn.Module) -> dict[tuple[int, int], tuple[nn.Module, nn.Parameter]]:
    """Returns (module, parameter), by their ids, for each parameter of each module; tied parameters once per module."""
    found = {}
    for each in module.modules():
        for parameter in parameters_in(each).values():
            if parameter is not None:
                found[id(each), id(parameter)] = each, parameter
    return found


class ModuleChanges:
    """Comparison of the module with its state at set-up.

    Args:
        known: parameters of the module at set-up.
        frozen: parameters that did not require a gradient at set-up.
        optimizers: the user's optimizers, in order.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        known: KnownParameters,
        frozen: Sequence[UnitParameter],
        optimizers: Sequence[Optimizer],
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        gathered_parameters: GatheredParameters,
        updates: UpdateScheduler,
        module: nn.Module,
    ) -> None:
        self._module = module
        self._blueprint = blueprint
        self._known = known
        self._optimizers = optimizers
        self._stores = stores
        self._flats = flats
        self._gathered_parameters = gathered_parameters
        self._updates = updates
        self._frozen = frozen
        self._bindings = tuple(binding for store in stores for binding in store.bindings)
        self._paged = [each for each in range(len(optimizers)) if each not in blueprint.unpaged_optimizers]

    # -- between two batches ------------------------------------------------------------------------------------------

    def outgrown(self) -> bool:
        """Whether a re-layout is needed: parameters were added, removed or resized (`other_parameters`), unfrozen, or moved
        to other groups; in a run that could work without pages, also whether parameters were given other data."""
        return (
            self.other_parameters()
            or bool(self._unfrozen())
            or any(map(self._updates.groups.outgrown, self._paged))
            or (
                self._blueprint.may_be_outside
                and self.gradients_in_place
                and any(flat.binding.replaced() for store in self._stores for flat in store.flats)
            )
        )

    def differences(self) -> str:
        """Returns the changes that `outgrown` has found, as in `has unfrozen stem.weight, and has new parameters: extra`."""
        unfrozen = [item.name for item in self._unfrozen()]
        new, gone = self._known.new(), self._known.gone()
        regrouped = [
            type(each).__name__ for index, each in enumerate(self._optimizers) if self._updates.groups.outgrown(index)
        ]
        found = {
            "has unfrozen": unfrozen,
            "has new parameters:": new,
            "has no longer the parameters": gone,
            "has resized": list(self._gathered_parameters.resized),
            "has changed groups of": regrouped,
        }
        said = [f"{what} {some(names, 3)}" for what, names in found.items() if names]
        return ", and ".join(said) or "has parameters in other places"

    def other_parameters(self) -> bool:
        """Whether parameters of the module were added, removed or resized since set-up.

        Raises:
            UsageError: a parameter was resized whose layout in pages does not allow it.
        """
        gathered = self._gathered_parameters
        for binding in self._bindings:
            if binding.resized:
                gathered.find_resized()
                break
        return bool(gathered.resized) or self._known.changed()

    def _unfrozen(self) -> list[UnitParameter]:
        """Returns the parameters that were frozen at set-up and require a gradient now."""
        with torch.DisableTorchFunctionSubclass():  # parameters may be closed
            return list(filter(_is_trained, self._frozen))

    @property
    def gradients_in_place(self) -> bool:
        """Whether every gradient stays in `.grad` until the optimizer's step."""
        return all(flat.gradient.in_place for flats in self._flats for flat in flats)

    def waiting_gradients(self, *, used_are_forgotten: bool = False) -> tuple[str, ...]:
        """Returns the names of units with gradients in pages that no step has used.

        Args:
            used_are_forgotten: see `FlatGradient.waits_for_step`.
        """
        return tuple(
            store.unit.name or "the root"
            for store, flats in zip(self._stores, self._flats, strict=True)
            if any(flat.gradient.waits_for_step(used_are_forgotten=used_are_forgotten) for flat in flats)
        )

    def frozen_as_trained(self) -> AbstractContextManager[None]:
        """Returns a context in which parameters that were trained in pages and are frozen now, but are still in an
        optimizer's group, require gradients: the next layout then keeps their master weights and states for when they
        are unfrozen."""
        in_groups = {id(each) for known in self._optimizers for group in known.param_groups for each in group["params"]}
        bindings = [binding for store in self._stores for binding in store.bindings if binding.layout.trainable]
        with torch.DisableTorchFunctionSubclass():  # parameters may be closed
            resting = [
                parameter
                for binding in bindings
                for parameter in binding.parameters
                if not parameter.requires_grad and id(parameter) in in_groups
            ]
        return _trained(resting)

    def leave(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Detaches the parameters from their pages before a re-layout: copies no values back, and clears `.grad` of gradients
        that are in pages.

        Args:
            dtypes: most precise dtype of each parameter, by id.
        """
        for flat in (each for flats in self._flats for each in flats):
            if not flat.gradient.in_place:
                flat.gradient.clear()
        self._gathered_parameters.detach_for_relayout(dtypes)

    # -- at a step ----------------------------------------------------------------------------------------------------

    def check_not_unfrozen(self, optimizer: Optimizer, index: int) -> None:
        """Checks that no parameter of an optimizer was unfrozen since the last check between two batches.

        Raises:
            UsageError: one was; this step could not update it.
        """
        if self._unfrozen():
            self.check_frozen({id(parameter) for group in optimizer.param_groups for parameter in group["params"]})

    @contextmanager
    def data_replaced(self, index: int) -> Iterator[None]:
        """Context of an optimizer's update, in a run that could be without pages, that supports `parameter.data = ...` within
        the step: such a parameter is updated from its new data, and the result is written there. From the next batch on the
        run is without pages.

        Raises:
            UsageError: the values would be lost, or two parameters have the same data.
        """
        bindings = [flat.store.binding for _, flat in self._updates.groups.flats_of(index)]
        replaced = [binding for binding in bindings if binding.replaced()]
        if replaced and not self.gradients_in_place:
            replaced[0].check()
        shared = overlap(self._module, self._module.parameters()) if replaced else None
        if shared is not None:
            raise UsageError(
                f"{shared[0]} and {shared[1]} were given the same data in mid-step, so that an update of one would change "
                f"the other, and pages give each its own memory; assign the data between two batches, or assign copies "
                f"(tensor.clone())"
            )
        # All values are copied before any is written: parameters may have been given each other's memory in pages.
        given = [(binding, binding.replaced()) for binding in replaced]
        copies = [{slot: data.clone() for slot, data in by_slot.items()} for _, by_slot in given]
        for (binding, _), values in zip(given, copies, strict=True):
            binding.put_values(values)
        yield
        if replaced:
            self._updates.finish_all()
            updated = [binding.values_of(by_slot) for binding, by_slot in given]
            for (_, by_slot), values in zip(given, updated, strict=True):
                for slot, data in by_slot.items():
                    data.copy_(values[slot])

    def outside_module(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the parameters in an optimizer's groups that are not the module's, and therefore not in pages."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self._known.outside_module if id(parameter) in known]

    def check_strangers(self, optimizer: Optimizer) -> None:
        """Checks that parameters of an optimizer that are not the module's have no gradient.

        Raises:
            UsageError: one has; it is not in pages, so that this step could not update it.
        """
        for parameter in self.outside_module(optimizer) if self._known.outside_module else ():
            if parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in a group of {type(optimizer).__name__} and has a "
                    f"gradient, and no module has it, so that it is not in pages and this step would not update it; make it "
                    f"an attribute of a module (self.name = parameter), or remove it from the group"
                )

    def check_frozen(self, among: Collection[int] | None = None) -> None:
        """Checks that parameters that were frozen at set-up still are.

        Args:
            among: ids of the parameters to check; None for all.

        Raises:
            UsageError: one requires a gradient.
        """
        for item in self._unfrozen():
            if among is None or id(item.parameter) in among:
                raise UsageError(
                    f"parameter {item.name} was frozen when its pages were laid out and requires a gradient now; it has no "
                    f"optimizer states, so that this step could not update it; unfreeze it between two batches "
                    f"(on_train_epoch_start, on_train_batch_start, in a loop of your own before the forward)"
                )
