"""First values of a unit's parameters: those of somebody's files, those the user built, or freshly initialised ones for
the meta device.

Owns nothing but stand-ins; one unit at a time, so that a model on the meta device never exists whole. What files provide is
read later, straight into pages (`ParameterValues.take_over`); here it is only not initialised.

How a module on the meta device gets its values, first that exists: `init_weights(module)` or `_init_weights(module)` of
its nearest ancestor that has one (the LightningModule included), else the module's own `reset_parameters()`, or
`_reset_parameters()` as in torch's attention. Inner modules come first, as when they are constructed. `_init_weights` is
made for `apply`, so it also sees the modules around those with parameters, and may set what is inside of them.

I1: only the unit's own meta parameters get values. What else a module holds (a weight that is tied to another unit's) has
its values elsewhere already, or gets them later, and is replaced by a stand-in while the module initialises itself.
I2: what nobody has initialised is refused: fresh memory is NaN (the least integer) until it gets values.
I3: a module that files provide whole is not initialised: it takes no time and draws no random numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.tensors.parts import Boxes, cut
from lightning_ptm.runtime.units.discovery import Unit, UnitParameter
from lightning_ptm.torch_internals import (
    INIT_WEIGHTS,
    RESET_PARAMETERS,
    buffers_in,
    fill_flat_weights,
    flat_weight_names,
    parameters_in,
)

Read = Callable[[], Tensor]
"""Yields a tensor of a mapped file; what is read of it is read from the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """First values that files provide, of the right shapes; of which files, and for which names, is decided elsewhere.

    Attributes:
        parameters: by id of the parameter.
        buffers: by id of the module and attribute.
    """

    parameters: Mapping[int, Read] = dataclasses.field(default_factory=dict)
    buffers: Mapping[tuple[int, str], Read] = dataclasses.field(default_factory=dict)

    def without(self, known: Container[int | tuple[int, str]]) -> Given:
        """The same but for what has its values already: a checkpoint's, which come after those of files."""
        return Given(
            {key: read for key, read in self.parameters.items() if key not in known},
            {key: read for key, read in self.buffers.items() if key not in known},
        )


def _lineages(root: nn.Module) -> dict[int, tuple[nn.Module, ...]]:
    """By id of a module: itself and its ancestors, nearest first."""
    found: dict[int, tuple[nn.Module, ...]] = {}

    def walk(module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        if id(module) not in found:
            found[id(module)] = (module, *above)
            for child in module.children():
                walk(child, found[id(module)])

    walk(root, ())
    return found


def _method(module: nn.Module, name: str) -> Callable[..., object] | None:
    method = getattr(module, name, None)
    return method if callable(method) and _takes_a_module(method) else None


def _takes_a_module(method: Callable[..., object]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1


def _resets(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", RESET_PARAMETERS):
        reset = getattr(module, name, None)
        if callable(reset):
            return partial(reset)
    return None


class FirstValues:
    """Gives the modules of one model their first values.

    Args:
        root: the LightningModule, with parameters on the meta device or elsewhere.
        given: what files provide.
        boxes: of parameters that are parts of larger ones: these are initialised whole, so that their values do not depend on
            how many parts there are, and cut.
    """

    def __init__(self, root: nn.Module, given: Given, boxes: Boxes = MappingProxyType({})) -> None:
        self._root = root
        self._given = given
        self._boxes = boxes
        self._lineages = _lineages(root)
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._made: list[tuple[nn.Module, str]] = []  # buffers

    @torch.no_grad()
    def buffers(self) -> None:
        """Gives buffers on the meta device, of modules without parameters there, their values, or memory alone if files
        provide them: see `fill_buffers`.

        Raises:
            ConfigError: nothing says how to initialise a module.
        """
        for module in self._root.modules():
            for name, buffer in buffers_in(module).items():
                if buffer is not None and buffer.is_meta and (id(module), name) in self._given.buffers:
                    buffers_in(module)[name] = torch.empty_like(buffer, device="cpu")
        for module in self._root.modules():
            on_meta = [name for name, buffer in buffers_in(module).items() if buffer is not None and buffer.is_meta]
            if on_meta and not any(item.is_meta for item in parameters_in(module).values() if item is not None):
                initialise = self._initialiser(module)
                self._real_buffers(module)
                initialise()

    @torch.no_grad()
    def parameters(self, unit: Unit) -> None:
        """Gives the meta parameters of the unit's modules real storage on the CPU and values; the others stay as they are.

        The parameters keep their identity, so optimizers go on naming them. Of those that files provide the storage is not
        written to, so it takes addresses and no memory.

        Raises:
            ConfigError: nothing says how to initialise a module, or a parameter has no value when all is said.
        """
        fresh = [item for item in unit.own if item.parameter.is_meta]
        if not fresh:
            return
        holders = {id(module): module for item in fresh for module, _ in item.places}
        for module in holders.values():
            if isinstance(module, nn.RNNBase):
                setattr(module, flat_weight_names()[1], [])  # weak references to the meta tensors; made again below
        wanting = [item for item in fresh if id(item.parameter) not in self._given.parameters]
        for item in fresh:
            given = id(item.parameter) in self._given.parameters
            _real_storage(item, None if given else self._boxes.get(id(item.parameter)), given=given)
        unset = {id(module) for item in wanting for module, _ in item.places}
        unset |= {
            key for key, module in holders.items() if any(b is not None and b.is_meta for b in module.buffers(False))
        }
        for module in holders.values():
            self._real_buffers(module)
        if unset:  # I3
            self._initialise_all(wanting, [module for key, module in holders.items() if key in unset])
        for item in wanting:
            box = self._boxes.get(id(item.parameter))
            if box is not None:
                item.parameter.data = cut(item.parameter.data, box).clone()
        for module in holders.values():
            if isinstance(module, nn.RNNBase):
                fill_flat_weights(module)

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Gives buffers the values that files have for them; after all initialisation, which may write to them."""
        for module in self._root.modules():
            for name, buffer in buffers_in(module).items():
                read = self._given.buffers.get((id(module), name))
                if read is not None and buffer is not None:
                    buffer.copy_(read())

    def _initialise_all(self, fresh: list[UnitParameter], holders: list[nn.Module]) -> None:
        self._initialise(fresh, holders)
        missed = _without_values(fresh)
        if missed:
            # As in a constructor: every module has its own values before somebody else has a say.
            for module in {id(place): place for item in missed for place, _ in item.places}.values():
                reset = _resets(module)
                if reset is not None:
                    with self._others_stand_in([module], fresh, "cpu"):
                        reset()
            self._initialise(fresh, holders)
            self._refuse(_without_values(fresh))

    def check(self) -> None:
        """To be called when all units have their values.

        Raises:
            ConfigError: a buffer was built on the meta device and nothing has set it (I2).
        """
        names = {id(module): f"{name}." if name else "" for name, module in self._root.named_modules()}
        for module, name in self._made:
            buffer = buffers_in(module)[name]
            if buffer is None or not buffer.numel() or _unset(buffer.dtype) == 0:
                continue  # that is a value as any other
            numbers = buffer.is_floating_point() or buffer.is_complex()
            unset = buffer != buffer if numbers else buffer == _unset(buffer.dtype)
            if bool(unset.all()):
                raise ConfigError(
                    f"buffer {names[id(module)]}{name} of a {type(module).__name__} was built on the meta device and has no "
                    f"value after its initialisation; let init_weights(module) or its reset_parameters() set it, or build "
                    f"it on the CPU"
                )
        self._made = []

    def _real_buffers(self, module: nn.Module) -> None:
        for name, buffer in buffers_in(module).items():
            if buffer is not None and buffer.is_meta:
                buffers_in(module)[name] = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
                self._made.append((module, name))

    def _initialise(self, fresh: list[UnitParameter], holders: Iterable[nn.Module]) -> None:
        inside = {id(module) for module in holders}
        around = {id(module): module for holder in holders for module in self._lineages[id(holder)]}
        calls = []
        for module in sorted(around.values(), key=lambda module: -len(self._lineages[id(module)])):
            if id(module) in inside:
                calls.append((module, self._initialiser(module)))
            else:
                applied = self._applied(module)
                if applied is not None:
                    calls.append((module, applied))
        for module, initialise in calls:
            if id(module) in inside:
                with self._others_stand_in([module], fresh, "cpu"):
                    initialise()
                continue
            with self._others_stand_in(module.modules(), fresh, "meta"):
                try:
                    initialise()
                except (
                    RuntimeError
                ) as error:  # NotImplementedError among them: what torch raises for a read of the meta device
                    if not isinstance(error, NotImplementedError) and "meta" not in str(error):
                        raise
                    raise ConfigError(
                        f"the initialisation of a {type(module).__name__} on the meta device reads weights of several "
                        f"units, of which one exists at a time ({error}); build the model on the CPU"
                    ) from error

    def _initialiser(self, module: nn.Module) -> Callable[[], object]:
        for ancestor in self._lineages[id(module)]:
            if hasattr(ancestor, "reset_lora_parameters"):
                # The base model's own rule, which is the next to be asked, would give random numbers to what must be zero.
                raise ConfigError(
                    f"an adapter of peft's ({type(ancestor).__name__}) was built on the meta device, and only peft knows its "
                    f"first values; when the model is built, give each such layer its own memory, layer.lora_A.to_empty("
                    f"device='cpu') and the same for lora_B, and call layer.reset_lora_parameters('default', True)"
                )
            for name in ("init_weights", INIT_WEIGHTS):
                method = _method(ancestor, name)
                if method is not None:
                    return partial(method, module)
        reset = _resets(module)
        if reset is None:
            raise ConfigError(
                f"a {type(module).__name__} was built on the meta device and nothing says how to initialise it; give it a "
                f"reset_parameters() method, or give the LightningModule an init_weights(module) method, or build it on "
                f"the CPU"
            )
        return reset

    def _applied(self, module: nn.Module) -> Callable[[], object] | None:
        """`_init_weights` for a module that has no parameter of the unit itself."""
        for ancestor in self._lineages[id(module)]:
            if _method(ancestor, "init_weights") is not None:
                return None
            method = _method(ancestor, INIT_WEIGHTS)
            if method is not None:
                return partial(method, module)
        return None

    @contextmanager
    def _others_stand_in(self, modules: Iterable[nn.Module], fresh: list[UnitParameter], device: str) -> Iterator[None]:
        """Inside, `modules` hold stand-ins for all parameters but `fresh` ones (I1)."""
        ours = {id(item.parameter) for item in fresh}
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in modules:
            for name, parameter in parameters_in(module).items():
                if parameter is not None and id(parameter) not in ours and not (device == "meta" and parameter.is_meta):
                    replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            parameters_in(module)[name] = self._stand_in(parameter, device)
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                parameters_in(module)[name] = parameter

    def _stand_in(self, parameter: nn.Parameter, device: str) -> nn.Parameter:
        if device != "meta":
            return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        known = self._stand_ins.get(id(parameter))
        if known is None:
            known = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            self._stand_ins[id(parameter)] = known
        return known

    def _refuse(self, missed: list[UnitParameter]) -> None:
        if missed:
            holder = missed[0].places[0][0]
            raise ConfigError(
                f"parameter {missed[0].name} of a {type(holder).__name__} was built on the meta device and has no value "
                f"after its initialisation ({len(missed)} such in its unit); let init_weights(module) or its "
                f"reset_parameters() set it, or build it on the CPU"
            )


def _unset(dtype: torch.dtype) -> float | int:
    """What fresh memory is filled with: what nobody sets on purpose, or 0 where a dtype has nothing of the kind."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _real_storage(item: UnitParameter, box: TensorSlice | None, *, given: bool) -> None:
    """
    Args:
        box: it is to have the shape of the whole.
    """
    old = item.parameter
    values = torch.empty_like(old, device="cpu", requires_grad=False)
    if box is not None:
        values = values.new_empty(box.shape)
    if not given:
        values.fill_(float("nan"))  # I2
    try:
        torch.utils.swap_tensors(old, nn.Parameter(values, requires_grad=old.requires_grad))
    except RuntimeError as error:
        raise ConfigError(
            f"parameter {item.name} is on the meta device and something holds a weak reference to it, so it cannot "
            f"be given storage in place ({error}); build it on the CPU"
        ) from error


def _without_values(fresh: list[UnitParameter]) -> list[UnitParameter]:
    def unset(values: Tensor) -> bool:
        # The sum is the cheap question; infinities of both signs have a NaN for a sum, too.
        return bool(values.sum().isnan()) and bool(values.isnan().any())

    return [item for item in fresh if unset(item.parameter)]
