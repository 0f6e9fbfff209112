"""Whether the module is still what its pages were laid out for: between two batches, and at a step.

Owns what the module was like then: its parameters, and which of them were frozen. Laying out anew is the trainer's
(trainer/rearranging.py).

I1: what `outgrown` finds between two batches, a step refuses: it would miss it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.full_params.lent_parameters import LentParameters
from lightning_ptm.runtime.units.discovery import UnitParameter
from lightning_ptm.runtime.units.known_parameters import KnownParameters
from lightning_ptm.runtime.units.shared_storage import overlap
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.updates import FlatUpdate, UpdateScheduler


class ModuleChanges:
    """See the file's contract.

    Args:
        known, frozen: the module's parameters when its pages were laid out, and those that had no gradient then.
        optimizers: the user's, in order.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        known: KnownParameters,
        frozen: Sequence[UnitParameter],
        optimizers: Sequence[Optimizer],
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        lent_parameters: LentParameters,
        updates: UpdateScheduler,
        module: nn.Module,
    ) -> None:
        self._module = module
        self._blueprint = blueprint
        self._known = known
        self._optimizers = optimizers
        self._stores = stores
        self._flats = flats
        self._lent_parameters = lent_parameters
        self._updates = updates
        self._frozen = frozen

    # -- between two batches ------------------------------------------------------------------------------------------

    def outgrown(self) -> bool:
        """Whether the module's parameters are others (`other_parameters`), were unfrozen, or were put into groups that they
        had not been in, so that pages fit it no longer; of a run that could do without, also whether they were given other
        data."""
        paged = (index for index in range(len(self._optimizers)) if index not in self._blueprint.unpaged_optimizers)
        return (
            self.other_parameters()
            or any(item.parameter.requires_grad for item in self._frozen)
            or any(map(self._updates.groups.outgrown, paged))
            or (
                self._blueprint.may_be_outside
                and self.gradients_in_place
                and any(flat.binding.replaced() for store in self._stores for flat in store.flats)
            )
        )

    def differences(self) -> str:
        """What `outgrown` has found, in words: `has unfrozen stem.weight, and has new parameters: extra`."""
        unfrozen = [item.name for item in self._frozen if item.parameter.requires_grad]
        new, gone = self._known.new(), self._known.gone()
        regrouped = [
            type(each).__name__ for index, each in enumerate(self._optimizers) if self._updates.groups.outgrown(index)
        ]
        found = {
            "has unfrozen": unfrozen,
            "has new parameters:": new,
            "has no longer the parameters": gone,
            "has resized": list(self._lent_parameters.resized),
            "has changed groups of": regrouped,
        }
        said = [f"{what} {some(names, 3)}" for what, names in found.items() if names]
        return ", and ".join(said) or "has parameters in other places"

    def other_parameters(self) -> bool:
        """Whether the module has parameters that it had not when its pages were laid out, or of other shapes, or lacks some.

        Raises:
            UsageError: a shape differs where what has the parameter in pages does not let it.
        """
        return self._lent_parameters.find_resized() or self._known.changed()

    @property
    def gradients_in_place(self) -> bool:
        """Whether every gradient stays in `.grad` until the optimizer's step."""
        return all(flat.gradient.in_place for flats in self._flats for flat in flats)

    def waiting_gradients(self, *, used_are_forgotten: bool = False) -> tuple[str, ...]:
        """Names of units of which pages hold gradients that no step has used.

        Args:
            used_are_forgotten: see `FlatGradient.waits_for_step`.
        """
        return tuple(
            store.unit.name or "the root"
            for store, flats in zip(self._stores, self._flats, strict=True)
            if any(flat.gradient.waits_for_step(used_are_forgotten=used_are_forgotten) for flat in flats)
        )

    @contextmanager
    def at_rest_as_trained(self) -> Iterator[None]:
        """Inside, parameters that were trained in pages, are frozen now, and are in a group of an optimizer all the same take
        gradients: the next pages have their masters and states, too, with which they go on when they are unfrozen."""
        in_groups = {id(each) for known in self._optimizers for group in known.param_groups for each in group["params"]}
        bindings = [binding for store in self._stores for binding in store.bindings if binding.layout.trainable]
        resting = [
            parameter
            for binding in bindings
            for parameter in binding.parameters
            if not parameter.requires_grad and id(parameter) in in_groups
        ]
        for parameter in resting:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in resting:
                parameter.requires_grad_(False)

    def leave(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Other pages are about to take over: nothing is given back, and what steps have left in `.grad` goes.

        Args:
            dtypes: of the parameters' precise values, by id.
        """
        for flat in (each for flats in self._flats for each in flats):
            if not flat.gradient.in_place:
                flat.gradient.clear()
        self._lent_parameters.detach_for_relayout(dtypes)

    # -- at a step ----------------------------------------------------------------------------------------------------

    def check_rearranged(self, optimizer: Optimizer, index: int) -> None:
        """Nothing of what `outgrown` finds between two batches has happened since: this step would miss it."""
        if any(item.parameter.requires_grad for item in self._frozen):
            self.check_frozen({id(parameter) for group in optimizer.param_groups for parameter in group["params"]})

    @contextmanager
    def data_replaced(self, index: int) -> Iterator[None]:
        """Around an update of an optimizer: parameters to which the user has given other data (`parameter.data = ...`) in
        this step are updated from what is in it, and have the new values there. From the next batch on the run is without
        pages.

        Raises:
            UsageError: the values would be lost, or two parameters have the same data.
        """
        bindings = [flat.store.binding for _, flat in self._updates.groups.flats_of(index)]
        replaced = [binding for binding in bindings if binding.replaced()] if self._blueprint.may_be_outside else []
        if replaced and not self.gradients_in_place:
            replaced[0].check()
        shared = overlap(self._module, self._module.parameters()) if replaced else None
        if shared is not None:
            raise UsageError(
                f"{shared[0]} and {shared[1]} were given the same data in mid-step, so that a step of one changes the other, "
                f"and pages are each one's own; give them the same data between two batches, or copies (tensor.clone())"
            )
        for binding in replaced:
            binding.take_replaced()
        yield
        if replaced:
            self._updates.finish_all()
            for binding in replaced:
                binding.give_replaced()

    def strangers(self, optimizer: Optimizer) -> list[Tensor]:
        """Parameters in the groups of an optimizer that the module has not, so that no pages have them."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self._known.strangers if id(parameter) in known]

    def check_of_the_module(self, optimizer: Optimizer) -> None:
        """What is in no pages needs no update as long as nothing computes with it."""
        for parameter in self.strangers(optimizer) if self._known.strangers else ():
            if parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in a group of {type(optimizer).__name__} and has a "
                    f"gradient, and no module has it, so no pages have it and this step would leave it as it is; make it an "
                    f"attribute of a module (self.name = parameter), or take it out of the group"
                )

    def check_frozen(self, among: Collection[int] | None = None) -> None:
        for item in self._frozen:
            if item.parameter.requires_grad and (among is None or id(item.parameter) in among):
                raise UsageError(
                    f"parameter {item.name} was frozen when its pages were laid out and requires a gradient now; it has no "
                    f"master states in this step; unfreeze it between two batches (on_train_epoch_start, "
                    f"on_train_batch_start)"
                )
