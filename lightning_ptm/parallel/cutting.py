"""A module whose parameters are cut over the ranks of a tensor group, for as long as a run lasts.

Owns what was changed of the module: shapes of parameters, forwards, counts of heads. Parameters keep their identity and are
plain tensors: an optimizer, a norm, a page sees a smaller parameter. Which part of which whole each is, `boxes` tells.

I1: what a module of the plan computes is what it computed whole, but for rounding; `plan_check.py` sees to it.
I2: `undo` gives back whole parameters, or parameters of the whole shape without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.parallel.adapters import with_adapters
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.checked_blocks import CheckedBlock, blocks_of
from lightning_ptm.parallel.direct_reads import forget, watch
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.layers import Layer, divides, layer
from lightning_ptm.parallel.plan_check import PlanCheck
from lightning_ptm.parallel.rules import Place, Rule, places
from lightning_ptm.parallel.sequence_parallel import SequenceParallel
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.autograd.recompute import replace
from lightning_ptm.runtime.tensors.parts import cut
from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter
from lightning_ptm.torch_internals import is_executed, not_traced, parameters_in


class CutModule:
    """Cuts a module.

    Args:
        root: with whole parameters, on the meta device or in RAM.
        plan: see rules.py.
        strict: every entry of the plan has to name something.
        sequence_parallel: inside of blocks, ranks have parts of the sequence between layers that are cut.
        proven: each kind of block is proven when it is first called (I1).
        of_block: the root is a block.

    Raises:
        ConfigError: a module cannot be cut as the plan says, or nothing would be.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Mapping[str, Rule],
        group: TensorGroup,
        *,
        strict: bool,
        sequence_parallel: bool = False,
        proven: bool = True,
        of_block: bool = False,
    ) -> None:
        self.root = root
        self.group = group
        named = [place for place in places(root, plan, strict=strict) if divides(place, group.size, strict=strict)]
        self.places = tuple(inner for place in named for inner in with_adapters(place))
        self._undo: list[Callable[[], None]] = []
        self._sequence: SequenceParallel | None = None
        if sequence_parallel:
            blocks = (CheckedBlock("", root, plan),) if of_block else blocks_of(root, named)
            self._sequence = SequenceParallel(blocks, group, self.places)
            if not of_block:
                self._sequence.refuse_idle()
            self._sequence.refuse_elsewhere(root)
            self.places += self._sequence.uncut
        layers = [layer(place, self._between(place)) for place in self.places]
        self._by_parameter = self._agreed(layers)
        """Of each parameter that is cut, by id: it, and its box."""
        self._partial = self._partial_of(layers)
        if not self._by_parameter:
            raise ConfigError(
                f"tensor_parallel_size={group.size} and nothing of the {type(root).__name__} can be cut: its plan names no "
                f"layer that it has; use tensor_parallel_size=1, or give a plan of tensor_parallel"
            )
        if proven:
            divide = partial(
                CutModule, group=group, strict=True, sequence_parallel=sequence_parallel, proven=False, of_block=True
            )
            self._undo.append(PlanCheck(blocks_of(root, named), group, divide, of_parts=sequence_parallel).close)
        try:
            self._apply(layers, watched=not of_block)
        except BaseException:
            self.undo()
            raise

    def _between(self, place: Place) -> BetweenLayers:
        return BetweenLayers(self.group) if self._sequence is None else self._sequence.between(place.name)

    def _agreed(self, layers: list[Layer]) -> dict[int, tuple[nn.Parameter, TensorSlice]]:
        found: dict[int, tuple[nn.Parameter, TensorSlice]] = {}
        for place, each in zip(self.places, layers, strict=True):
            for name, box in each.boxes.items():
                parameter = parameters_in(place.module)[name]
                assert parameter is not None
                _, known = found.setdefault(id(parameter), (parameter, box))
                if known != box:
                    raise ConfigError(
                        f"{place.name} shares {name} with another module, and tensor_parallel_plan cuts it in two ways "
                        f"({box.cut}, and {known.cut}); cut both in the same way, or leave both out"
                    )
        names = [(place.module, (*each.boxes, *each.partial)) for place, each in self._with(layers)]
        inside = {id(parameters_in(module)[name]) for module, of_module in names for name in of_module}
        holders = {id(module) for module, of_module in names if of_module}
        for name, module in self.root.named_modules():
            for attribute, parameter in parameters_in(module).items():
                if parameter is not None and id(parameter) in inside and id(module) not in holders:
                    raise ConfigError(
                        f"{name}.{attribute} is one parameter with another that tensor_parallel's plan has a rule for, and "
                        f"this module is not in the plan; put both into it (for a head that is tied to an embedding: "
                        f"ColwiseParallel(gather=True) and VocabParallel()), or leave both out"
                    )
        return found

    def _with(self, layers: list[Layer]) -> Iterator[tuple[Place, Layer]]:
        return zip(self.places, layers, strict=True)

    def _partial_of(self, layers: list[Layer]) -> dict[int, nn.Parameter]:
        found = {}
        for place, each in self._with(layers):
            for name in each.partial:
                parameter = parameters_in(place.module)[name]
                if parameter is not None and id(parameter) not in self._by_parameter:
                    found[id(parameter)] = parameter
        return found

    def _apply(self, layers: list[Layer], *, watched: bool) -> None:
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():  # some may be closed
            for parameter, box in self._by_parameter.values():
                if isinstance(parameter, GuardedParameter):  # its values ended with an earlier run
                    _give(parameter, _nothing(parameter, box.part_shape))
                else:
                    _give(parameter, cut(parameter.data, box).clone(memory_format=torch.contiguous_format))
            if watched:
                self._watch(layers)
        for place, each in self._with(layers):
            if each.forward is not None:
                self._undo.append(replace(place.module, forward=each.forward))
            self._undo.append(replace(place.around, **each.counts))
        for module, forward in self._sequence.forwards() if self._sequence is not None else ():
            self._undo.append(replace(module, forward=forward))

    def _watch(self, layers: list[Layer]) -> None:
        """What would find this rank's part where the user means the whole is refused."""
        cut_here = [named for named in self.root.named_parameters() if id(named[1]) in self._by_parameter]
        for name, parameter in cut_here:
            if parameter.requires_grad:
                self._undo.append(parameter.register_hook(partial(_refuse_part_of_gradient, name, parameter)).remove)
        # Where a plan cuts a parameter by itself, a forward of the user's own computes with it.
        users_own = {
            id(parameters_in(place.module)[name])
            for place, each in self._with(layers)
            if each.forward is None
            for name in each.boxes
        }
        watch([named for named in cut_here if id(named[1]) not in users_own], self.group)

    # -- what others need ---------------------------------------------------------------------------------------------

    def boxes(self) -> dict[str, TensorSlice]:
        """By name, which part of which whole each parameter that is cut is."""
        return {
            name: self._by_parameter[id(parameter)][1]
            for name, parameter in self.root.named_parameters(remove_duplicate=False)
            if id(parameter) in self._by_parameter
        }

    @property
    def partial(self) -> frozenset[int]:
        """Ids of whole parameters of which every rank's gradient is a part of the sum."""
        return frozenset(self._partial)

    # -- the end ------------------------------------------------------------------------------------------------------

    def undo(self, whole: Callable[[Tensor, TensorSlice], Tensor] | None = None) -> None:
        """The module is as it was.

        Args:
            whole: puts the parts of a parameter together; None: they have no values to be put together.
        """
        while self._undo:
            self._undo.pop()()
        self.group.forget()
        if self._sequence is not None:
            self._sequence.parts.forget()
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():  # some may be closed
            for parameter, box in self._by_parameter.values():
                forget(parameter)
                if tuple(parameter.shape) != box.part_shape:
                    continue
                parameter.grad = None
                _give(parameter, _nothing(parameter, box.shape) if whole is None else whole(parameter.data, box))
        self._by_parameter, self._partial = {}, {}


@not_traced
def _refuse_part_of_gradient(name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
    """A backward pass comes to a parameter that is cut: one that leaves the gradient in `.grad` is a step's, and
    `torch.autograd.grad` would return it."""
    with torch.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        is_executed(node)
    except RuntimeError as error:  # torch's answer where the gradient of a leaf is returned
        raise UsageError(
            f"torch.autograd.grad asks for the gradient of {name}, of which tensor_parallel_size has this rank compute a "
            f"part alone; leave its layer out of tensor_parallel's plan, compute with it on one rank, or call backward() and "
            f"take norms from trainer.strategy.gradient_norm(optimizer)"
        ) from error


def _give(parameter: nn.Parameter, value: Tensor) -> None:
    """Gives a parameter a value of another shape.

    A graph of before, which somebody keeps (a loss in a list), keeps the parameter's node, which expects gradients of the
    shape that it had, and torch would use it in graphs to come: it makes a new one where the dtype changes.
    """
    parameter.data = value.new_empty(0, dtype=torch.float16 if value.dtype is torch.float32 else torch.float32)
    parameter.data = value


def _nothing(parameter: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """NaN in a shape, without memory for it."""
    return parameter.data.new_full((), float("nan")).expand(shape)
