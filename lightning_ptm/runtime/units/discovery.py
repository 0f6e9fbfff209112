"""Discovery of the units of a module: modules whose parameters are fetched and released together (the paper's layer).

Decides only: returns data and touches no parameter. Unit 0 is the root: everything that no other unit owns, and every
parameter that several units share (tied weights), since the root is live through the whole iteration. `overlap` finds
tensors of a module that share memory, which pages do not support.

I1: each parameter belongs to exactly one unit.
I2: the order of units is the order of `named_modules`.

Under tensor parallelism a unit's large parameters are slices, which are not gathered; only its vectors (norms and biases)
would be. An all-gather and a reduction of a few kilobytes cost as much as megabytes, and each takes a page. Therefore these
vectors are fetched with the root (`with_vectors_at_root`): one all-gather and one reduction for all units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import parameters_in

Parts = Mapping[int, int]
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
MIN_UNIT_NUMEL = 4096
"""Elements of containers with fewer parameter elements than this stay with their parent: a separate fetch would cost more."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitParameter:
    """A parameter, and all places (module, attribute) that refer to it; `name` is the qualified name of the first."""

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Modules whose parameters are fetched and released together.

    Attributes:
        parameters: parameters that are fetched and released with the unit.
        own: parameters that only this unit's modules refer to. They are initialised together, and files store them under the
            unit's name. Differs from `parameters` where vectors are fetched with the root.
    """

    index: int
    name: str
    module: nn.Module
    parameters: tuple[UnitParameter, ...]
    own: tuple[UnitParameter, ...]

    @property
    def owners(self) -> tuple[nn.Module, ...]:
        """Modules that have one of `parameters` as an attribute."""
        return tuple({id(place): place for item in self.parameters for place, _ in item.places}.values())


def whole_numel(module: nn.Module, parts: Parts) -> int:
    """Returns the elements of a module's parameters, of which this rank may have slices."""
    return sum(parameter.numel() * parts.get(id(parameter), 1) for parameter in module.parameters())


def _named_by_user(root: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    found = [module for module in root.modules() if module is not root and type(module).__name__ in names]
    missing = sorted(set(names) - {type(module).__name__ for module in found})
    if missing:
        present = sorted({type(module).__name__ for module in root.modules() if module is not root})
        raise ConfigError(
            f"units={list(names)!r}: no module of the model has the class {', '.join(missing)}, which would be no "
            f"unit; use some of its classes: {', '.join(present)}"
        )
    return found


def _automatic(root: nn.Module, parts: Parts) -> list[nn.Module]:
    total = whole_numel(root, parts)
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            candidate = isinstance(module, _CONTAINERS) and whole_numel(child, parts) >= MIN_UNIT_NUMEL
            # An element that is most of the model (an encoder in a Sequential) is not a block: look inside it.
            if candidate and (2 * whole_numel(child, parts) <= total or not _has_blocks(child, parts)):
                found.append(child)
            else:
                walk(child)

    walk(root)
    return found if len(found) > 1 else []


def _has_blocks(module: nn.Module, parts: Parts) -> bool:
    return any(
        isinstance(inner, _CONTAINERS)
        and sum(whole_numel(child, parts) >= MIN_UNIT_NUMEL for child in inner.children()) > 1
        for inner in module.modules()
    )


def _refuse_lazy(root: nn.Module) -> None:
    for name, parameter in root.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"{name} gets its shape in the first forward (a Lazy module), and pages are laid out before; run a forward "
                f"in configure_model: `with torch.no_grad(): self(example)`, or use a module with given sizes"
            )


def discover(
    root: nn.Module, wanted: str | Sequence[str], also: Sequence[nn.Module] = (), parts: Parts = MappingProxyType({})
) -> tuple[Unit, ...]:
    """Returns the units of `root`, the root itself first.

    Args:
        root: the LightningModule.
        wanted: `auto`, or class names of the modules that become units; of nested ones the inner one owns its parameters.
        also: further modules that become units if `wanted` is `auto`.
        parts: number of slices of each sliced parameter, by id, so that units are those of the whole model.

    Raises:
        ConfigError: the model has no module of a given class, or a parameter has no shape yet.
    """
    _refuse_lazy(root)
    chosen = [*_automatic(root, parts), *also] if wanted == "auto" else _named_by_user(root, list(wanted))
    chosen_ids = {id(module) for module in chosen}
    modules = [root] + [module for module in root.modules() if id(module) in chosen_ids]
    position = {id(module): index for index, module in enumerate(modules)}
    names: dict[int, str] = {0: ""}
    owner_units: dict[int, set[int]] = {}
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    parameters: dict[int, nn.Parameter] = {}
    seen: set[tuple[int, int]] = set()

    def walk(module: nn.Module, prefix: str, unit: int) -> None:
        unit = position.get(id(module), unit)
        names.setdefault(unit, prefix.rstrip("."))
        if (id(module), unit) in seen:
            return
        seen.add((id(module), unit))
        for attribute, parameter in parameters_in(module).items():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                owner_units.setdefault(id(parameter), set()).add(unit)
                places.setdefault(id(parameter), []).append((prefix + attribute, module, attribute))
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", unit)

    walk(root, "", 0)
    grouped: list[list[UnitParameter]] = [[] for _ in modules]
    for key, parameter in parameters.items():
        units = owner_units[key]
        unit = next(iter(units)) if len(units) == 1 else 0
        where = places[key]
        grouped[unit].append(
            UnitParameter(where[0][0], parameter, tuple([(module, name) for _, module, name in where]))
        )
    return tuple(
        Unit(
            index=index,
            name=names.get(index, ""),
            module=module,
            parameters=tuple(grouped[index]),
            own=tuple(grouped[index]),
        )
        for index, module in enumerate(modules)
    )


def with_vectors_at_root(units: Sequence[Unit], parts: Parts, apart: Container[int] = ()) -> tuple[Unit, ...]:
    """Returns the units with the unsliced vectors of units that have sliced parameters moved to the root.

    Args:
        parts: see `discover`.
        apart: units that not all ranks hold; they keep their vectors.
    """
    root, *others = units
    moved: list[UnitParameter] = []
    kept = []
    for unit in others:
        divided = unit.index not in apart and any(id(item.parameter) in parts for item in unit.parameters)
        here: list[UnitParameter] = []
        for item in unit.parameters:
            at_root = divided and item.parameter.dim() < 2 and id(item.parameter) not in parts
            (moved if at_root else here).append(item)
        kept.append(dataclasses.replace(unit, parameters=tuple(here)))
    return (dataclasses.replace(root, parameters=(*root.parameters, *moved)), *kept)


def overlap(module: nn.Module, changing: Iterable[Tensor]) -> tuple[str, str] | None:
    """Returns the names of two of a module's tensors that share memory and at least one of which is in `changing`; None if
    there are none."""
    known = {id(each) for each in changing}
    ends: dict[object, tuple[int, str, bool]] = {}
    for device, start, end, name, changes in sorted(_stretches(module, known), key=lambda each: each[1]):
        before = ends.get(device)
        if before is not None and start < before[0] and (changes or before[2]):
            return before[1], name
        if before is None or end > before[0]:
            ends[device] = end, name, changes
    return None


def _stretches(module: nn.Module, changing: set[int]) -> Iterator[tuple[object, int, int, str, bool]]:
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(each, GuardedParameter) or each.is_meta or not each.numel() or each.layout is not torch.strided:
            continue
        last = sum((size - 1) * step for size, step in zip(each.shape, each.stride(), strict=True))
        start = each.data_ptr()
        yield each.device, start, start + (last + 1) * each.element_size(), name, id(each) in changing
