"""Division of experts over ranks (expert parallelism): which units are experts, and which ranks hold them.

Decides only. experts.py describes a layer with experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_ptm.comm import RankTeams
from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.expert_split import divided, owners
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.runtime.units.discovery import Unit

ATTRIBUTE = "expert_group"
"""Attribute of layers whose experts can be divided over ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class DividedExperts:
    """Experts of a model, and the ranks that hold them (expert parallelism). Equal on all ranks.

    Attributes:
        mesh: the ranks; groups along its expert axis divide experts.
        layers: modules with experts, with their names.
        units: units of each expert, by layer and expert; the expert's own unit first.
        members: by unit of an expert, the index within its expert group of the rank that holds it. All ranks hold all units
            that are not listed.
        gradient_divisor: divisor of gradients while experts compute them, against overflow where tokens of several ranks add
            up in 16 bits (with a loss scale). All gradients of experts are multiplied by it before they are reduced; see
            `ExpertGroup.compute`.
        recomputed_with: by unit of an expert, a unit that stands for what is recomputed with it: the outermost unit below the
            root around the layer, or, if there is none, the first unit of its experts. Empty if nothing is recomputed.
        around: other units in whose ticks experts may compute: the innermost unit around their layer, and those inside it.
    """

    mesh: Mesh
    layers: tuple[tuple[str, nn.Module], ...]
    units: tuple[tuple[tuple[int, ...], ...], ...]
    members: Mapping[int, int]
    gradient_divisor: int = 1
    recomputed_with: Mapping[int, int] = dataclasses.field(default_factory=dict)
    around: frozenset[int] = frozenset()

    @property
    def at_once(self) -> tuple[tuple[int, ...], ...]:
        """The units of experts that are on a device at once: each alone, or a rank's experts in all layers of a recomputed
        unit, since what is recomputed stays until its backward."""
        groups: dict[tuple[int, int], list[int]] = {}
        for unit, member in self.members.items():
            groups.setdefault((self.recomputed_with.get(unit, unit), member), []).append(unit)
        return tuple(map(tuple, groups.values()))

    @property
    def layer_of(self) -> dict[int, int]:
        """Index in `layers` of each expert unit's layer, by unit."""
        return {unit: place for place, layer in enumerate(self.units) for expert in layer for unit in expert}

    @property
    def modules(self) -> frozenset[int]:
        """Ids of the layers and the modules inside."""
        return frozenset(id(each) for _, layer in self.layers for each in layer.modules())

    @property
    def holders(self) -> ModelSharding:
        """Ranks that hold each unit."""
        return divided(self.mesh, self.members, self.gradient_divisor)

    @property
    def teams(self) -> RankTeams:
        """Teams of ranks that take part in each unit's collectives."""
        return RankTeams(self.mesh.groups((Axis.EXPERT,)), self.holders.ranks_by_unit)


def expert_layers(root: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Returns the modules whose experts can be divided over ranks, with their names."""
    return tuple((name, module) for name, module in root.named_modules() if hasattr(type(module), ATTRIBUTE))


def experts_of(layer: nn.Module) -> nn.ModuleList:
    """Returns the experts of a layer. Raises ConfigError if they are not in a ModuleList."""
    experts = getattr(layer, "experts", None)
    if not isinstance(experts, nn.ModuleList):
        raise ConfigError(
            f"a {type(layer).__name__} has {ATTRIBUTE}, and its `experts` is a {type(experts).__name__}; ranks can divide "
            f"the elements of a ModuleList; make it one, or use expert_parallel_size=1"
        )
    return experts


def divide(
    root: nn.Module, units: Sequence[Unit], mesh: Mesh, *, scaled_to_overflow: bool = False, recomputed: bool = False
) -> DividedExperts:
    """Finds the experts among the units, and assigns them to ranks.

    Args:
        scaled_to_overflow: whether gradients are 16-bit numbers that a dynamic loss scale keeps just below overflow.
        recomputed: whether units may be recomputed in the backward.

    Raises:
        ConfigError: there are no experts, or some cannot be divided.
    """
    layers, size = expert_layers(root), mesh.sizes[Axis.EXPERT]
    if not layers:
        raise ConfigError(
            f"expert_parallel_size={size} and the {type(root).__name__} has no layer whose experts could be divided "
            f"(a module with experts in a ModuleList and the attribute {ATTRIBUTE}, as "
            f"lightning_ptm.models.moe.MixtureOfExperts); use expert_parallel_size=1"
        )
    owner, inside = _claimed(layers, size)
    members, consists_of = _units_of(root, units, owner, inside, size)
    by_layer = tuple(
        tuple(tuple(consists_of[_title(name, index)]) for index in range(len(experts_of(layer))))
        for name, layer in layers
    )
    # An expert's gradient is a sum over the tokens of its whole group and would overflow before other gradients, which are
    # sums over one rank's tokens. Without a loss scale, underflow is the greater risk. Division by a power of two is exact.
    divisor = 1 << (size - 1).bit_length() if scaled_to_overflow else 1
    recomputed_with = _recomputed_with(units, by_layer) if recomputed else {}
    return DividedExperts(mesh, layers, by_layer, members, divisor, recomputed_with, _around(units, layers, members))


def _around(units: Sequence[Unit], layers: Sequence[tuple[str, nn.Module]], members: Collection[int]) -> frozenset[int]:
    """Returns `DividedExperts.around`: a unit that is beside experts in a unit computes before or after them in its tick.

    Args:
        units: all units of a model, in their order: a unit comes before those inside it.
    """
    planned = [unit for unit in units if unit.index not in members]
    found: set[int] = set()
    for name, _ in layers:
        outer = [unit for unit in planned[1:] if f"{name}.".startswith(f"{unit.name}.")]
        inside = f"{outer[-1].name}." if outer else ""  # without a unit around them, experts compute in any tick
        found.update(unit.index for unit in planned if f"{unit.name}.".startswith(inside))
    return frozenset(found)


def _recomputed_with(units: Sequence[Unit], by_layer: Sequence[Sequence[Sequence[int]]]) -> dict[int, int]:
    """Returns `DividedExperts.recomputed_with` for units that may be recomputed.

    Args:
        units: all units of a model, in their order: a unit comes before those inside it.
        by_layer: units of each expert, by layer and expert.
    """
    outermost: dict[int, int] = {}
    outer: Unit | None = None
    for unit in units[1:]:
        if outer is None or not unit.name.startswith(f"{outer.name}."):
            outer = unit
        outermost[unit.index] = outer.index
    found: dict[int, int] = {}
    for layer in by_layer:
        inside = [index for expert in layer for index in expert]
        for index in inside:
            found[index] = inside[0] if outermost[index] in inside else outermost[index]
    return found


def _claimed(
    layers: Sequence[tuple[str, nn.Module]], size: int
) -> tuple[dict[int, tuple[str, int]], dict[str, set[int]]]:
    """Returns each expert parameter's expert and holder, by id, and the ids of each expert's modules, by expert."""
    owner: dict[int, tuple[str, int]] = {}
    inside: dict[str, set[int]] = {}
    for name, layer in layers:
        experts = experts_of(layer)
        if len(experts) < size:
            raise ConfigError(
                f"{name} ({type(layer).__name__}) has {len(experts)} experts and expert_parallel_size={size}, so that "
                f"some rank would hold none; use at most {len(experts)}"
            )
        for index, (expert, member) in enumerate(zip(experts, owners(len(experts), size), strict=True)):
            title = _title(name, index)
            inside[title] = {id(module) for module in expert.modules()}
            buffers = [each for each, _ in expert.named_buffers()]
            if buffers:
                raise ConfigError(
                    f"{title} ({type(expert).__name__}) has buffers ({', '.join(buffers[:3])}); ranks that do not hold the "
                    f"expert would not get their changes; use parameters, or expert_parallel_size=1"
                )
            for parameter in expert.parameters():
                if id(parameter) in owner:
                    raise _shared(title, expert, owner[id(parameter)][0], size)
                owner[id(parameter)] = (title, member)
    return owner, inside


def _units_of(
    root: nn.Module,
    units: Sequence[Unit],
    owner: Mapping[int, tuple[str, int]],
    inside: Mapping[str, set[int]],
    size: int,
) -> tuple[dict[int, int], dict[str, list[int]]]:
    """Returns the holder of each expert unit, by unit, and the units of each expert, by expert."""
    members: dict[int, int] = {}
    consists_of: dict[str, list[int]] = {title: [] for title in inside}
    for unit in units:
        for item in unit.parameters:
            if id(item.parameter) not in owner:
                continue
            title, member = owner[id(item.parameter)]
            outside = [module for module, _ in item.places if id(module) not in inside[title]]
            if outside:
                raise _shared(title, root.get_submodule(title), f"a {type(outside[0]).__name__} outside of it", size)
            if id(unit.module) not in inside[title]:
                kind = type(root.get_submodule(title)).__name__
                raise ConfigError(
                    f"{title} ({kind}) is a part of the unit {unit.name or 'of the whole model'}, which all ranks hold, and "
                    f"expert_parallel_size={size} needs experts that are units of their own; add {kind!r} to "
                    f"units=[...], or leave units at 'auto'"
                )
            if unit.index not in members:
                members[unit.index] = member
                consists_of[title].append(unit.index)
    return members, consists_of


def _title(layer: str, expert: int) -> str:
    return f"{layer}.experts.{expert}".lstrip(".")


def _shared(title: str, module: nn.Module, other: str, size: int) -> ConfigError:
    return ConfigError(
        f"{title} ({type(module).__name__}) shares parameters with {other}, and expert_parallel_size={size} would give "
        f"them to different ranks; give each expert parameters of its own, or use expert_parallel_size=1"
    )
