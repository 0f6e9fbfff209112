"""Tensor parallelism applied to a module: cuts its parameters over the ranks of a tensor group, and undoes it after the run.

Owns the changes to the module: shapes of parameters, forwards, counts of heads. Parameters keep their identity and are plain
tensors: optimizers, norms and pages see a smaller parameter. `boxes` maps each cut parameter to its part of the whole.

I1: a module of the plan computes what it computed whole, except for rounding; `plan_check.py` checks it.
I2: `undo` restores whole parameters, or parameters of the whole shape without values.
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
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import is_executed, not_traced, parameters_in


class CutModule:
    """A module whose parameters are cut; the constructor cuts, `undo` restores.

    Args:
        root: the module, with whole parameters, on the meta device or in RAM.
        plan: rules by name (rules.py).
        group: the ranks over which parameters are cut.
        strict: whether every entry of the plan must match a module or parameter.
        sequence_parallel: whether ranks have parts of the sequence between cut layers inside of blocks.
        proven: whether each kind of block is checked when it is first called (I1).
        root_is_block: whether the root itself is a block.

    Raises:
        ConfigError: a module cannot be cut as the plan says, or the plan cuts nothing.
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
        root_is_block: bool = False,
    ) -> None:
        self.root = root
        self.group = group
        named = [place for place in places(root, plan, strict=strict) if divides(place, group.size, strict=strict)]
        self.places = tuple(inner for place in named for inner in with_adapters(place))
        self._undo: list[Callable[[], None]] = []
        self._sequence: SequenceParallel | None = None
        if sequence_parallel:
            blocks = (CheckedBlock("", root, plan),) if root_is_block else blocks_of(root, named)
            self._sequence = SequenceParallel(blocks, group, self.places)
            if not root_is_block:
                self._sequence.refuse_idle()
            self._sequence.refuse_shared_parameters(root)
            self.places += self._sequence.uncut
        layers = [layer(place, self._between(place)) for place in self.places]
        self._by_parameter = self._agreed(layers)
        """By id, each cut parameter and its box."""
        self._partial = self._partial_of(layers)
        if not self._by_parameter:
            raise ConfigError(
                f"tensor_parallel_size={group.size} and no parameter of the {type(root).__name__} can be cut: its plan names "
                f"no layer that it has; use tensor_parallel_size=1, or give a plan of tensor_parallel"
            )
        if proven:
            divide = partial(
                CutModule,
                group=group,
                strict=True,
                sequence_parallel=sequence_parallel,
                proven=False,
                root_is_block=True,
            )
            self._undo.append(PlanCheck(blocks_of(root, named), group, divide, of_parts=sequence_parallel).close)
        try:
            self._apply(layers, watched=not root_is_block)
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
                        f"{place.name} shares {name} with another module, and tensor_parallel's plan cuts it in two ways "
                        f"({box.cut}, and {known.cut}); cut both in the same way, or leave both out of the plan"
                    )
        names = [(place.module, (*each.boxes, *each.partial)) for place, each in self._with(layers)]
        inside = {id(parameters_in(module)[name]) for module, of_module in names for name in of_module}
        holders = {id(module) for module, of_module in names if of_module}
        for name, module in self.root.named_modules():
            for attribute, parameter in parameters_in(module).items():
                if parameter is not None and id(parameter) in inside and id(module) not in holders:
                    raise ConfigError(
                        f"{name}.{attribute} is tied to a parameter that tensor_parallel's plan has a rule for, and the plan "
                        f"has no rule for {name}; give both a rule (for a head that is tied to an embedding: "
                        f"ColwiseParallel(gather=True) and VocabParallel()), or leave both out of the plan"
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
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():  # some may be guarded
            for parameter, box in self._by_parameter.values():
                if isinstance(parameter, GuardedParameter):  # an earlier run left it without values
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
        """Makes code of the user's that would read this rank's part as if it were whole raise an error."""
        cut_here = [named for named in self.root.named_parameters() if id(named[1]) in self._by_parameter]
        for name, parameter in cut_here:
            if parameter.requires_grad:
                self._undo.append(parameter.register_hook(partial(_refuse_part_of_gradient, name, parameter)).remove)
        # A parameter that the plan names directly is used by a forward of the user's own.
        users_own = {
            id(parameters_in(place.module)[name])
            for place, each in self._with(layers)
            if each.forward is None
            for name in each.boxes
        }
        watch([named for named in cut_here if id(named[1]) not in users_own], self.group)

    # -- queries ------------------------------------------------------------------------------------------------------

    def boxes(self) -> dict[str, TensorSlice]:
        """The part of the whole parameter that each cut parameter is, by name."""
        return {
            name: self._by_parameter[id(parameter)][1]
            for name, parameter in self.root.named_parameters(remove_duplicate=False)
            if id(parameter) in self._by_parameter
        }

    @property
    def partial(self) -> frozenset[int]:
        """Ids of whole parameters whose gradient is the sum of the ranks' gradients."""
        return frozenset(self._partial)

    # -- the end ------------------------------------------------------------------------------------------------------

    def undo(self, whole: Callable[[Tensor, TensorSlice], Tensor] | None = None) -> None:
        """Restores the module.

        Args:
            whole: gathers the parts of a parameter; None: the parameters have no values.
        """
        while self._undo:
            self._undo.pop()()
        self.group.forget()
        if self._sequence is not None:
            self._sequence.parts.forget()
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():  # some may be guarded
            for parameter, box in self._by_parameter.values():
                forget(parameter)
                if tuple(parameter.shape) != box.part_shape:
                    continue
                parameter.grad = None
                _give(parameter, _nothing(parameter, box.shape) if whole is None else whole(parameter.data, box))
        self._by_parameter, self._partial = {}, {}


@not_traced
def _refuse_part_of_gradient(name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
    """Hook on a cut parameter's gradient: refuses torch.autograd.grad, which would return this rank's part to the user.

    A backward pass that accumulates into `.grad` belongs to a step and is allowed.
    """
    with torch.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        is_executed(node)
    except RuntimeError as error:  # torch raises it if the gradient of a leaf is to be returned
        raise UsageError(
            f"torch.autograd.grad asks for the gradient of {name}, of which this rank computes only a part "
            f"(tensor_parallel_size); leave its layer out of tensor_parallel's plan, or call backward() and take norms from "
            f"trainer.strategy.gradient_norm(optimizer)"
        ) from error


def _give(parameter: nn.Parameter, value: Tensor) -> None:
    """Gives a parameter a value of another shape.

    An earlier autograd graph that is still referenced (a loss in a list) keeps the parameter's AccumulateGrad node, which
    expects gradients of the old shape, and torch would use that node in later graphs, too. A change of dtype makes torch
    create a new node.
    """
    parameter.data = value.new_empty(0, dtype=torch.float16 if value.dtype is torch.float32 else torch.float32)
    parameter.data = value


def _nothing(parameter: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """NaN expanded to a shape, without memory for it."""
    return parameter.data.new_full((), float("nan")).expand(shape)
