"""First values from weight files (`weights=`): matches the names of the files' tensors to parameters of the module.

Decides only, from names and shapes. Reads no tensor except tied ones that a file has twice. The values are copied from
the mapped files to pages when the engine gives each unit its first values (runtime/full_params/parameter_values.py).

I1: a tensor is loaded to the parameter of its name or to none. A tensor that matches no parameter, is missing or has
another shape is an error, raised before any memory for the model is allocated. I2: all ranks decide the same, or all
raise.

Names are matched in this order. `Weights.key_mapping` maps a name of the files to one of the module; without it, the one
prefix that matches most names is put before all of them. Then layers that wrap others (WRAPPERS) are looked into: the name
of a layer also matches the layer that is wrapped in its place.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_ptm.checkpoints import formats
from lightning_ptm.checkpoints.protocol import FileTensor
from lightning_ptm.comm import Communicator, raise_on_all_ranks
from lightning_ptm.config import Settings, Weights
from lightning_ptm.errors import ConfigError, some
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.full_params.first_values import Given
from lightning_ptm.runtime.tensors.parts import Boxes
from lightning_ptm.torch_internals import (
    MAY_BE_MISSING,
    MAY_BE_UNEXPECTED,
    buffers_in,
    parameters_in,
    unsaved_buffers_in,
)

WRAPPERS = re.compile(
    r"\.(base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module)(?=\.)"
)
"""Parts of names that come from wrapping a layer: peft's adapters and its trainable copies of layers, `torch.compile`,
and torch's checkpoint wrapper."""

_ADAPTERS = "*.lora_*"
_NEW_ADAPTERS = (
    "the files of a base model have no adapters of peft: to train new ones, give "
    f"weights=Weights(path=..., allow_missing=[{_ADAPTERS!r}])"
)

_MOST_NAMES = 6
"""Number of names of each kind that an error lists."""

_CANDIDATES = 8
"""Number of prefixes that are tried, those with most votes."""


@dataclass(frozen=True, slots=True)
class StateDictPlace:
    """A parameter or buffer of the module's state dict: its name, its owner and attribute, and its shape in files."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a module's parameters and buffers.

    Attributes:
        places: items of its state dict, by name.
        wrapped: names with WRAPPERS, by the name without them (two for a layer and peft's trainable copy of it).
        computed: buffers that are in no state dict.
    """

    places: Mapping[str, StateDictPlace]
    wrapped: Mapping[str, Sequence[str]]
    computed: frozenset[str]

    def find(self, name: str) -> Sequence[str]:
        """Returns the names of the module's items to which a tensor of this name is loaded; empty if there is none."""
        return (name,) if name in self.places else self.wrapped.get(name, ())


def first_values(
    module: nn.Module,
    settings: Settings,
    communicator: Communicator,
    progress: Progress | None = None,
    boxes: Boxes = MappingProxyType({}),
) -> Given:
    """Returns what the files of `settings.weights` provide for `module`. Collective.

    Args:
        boxes: slices of parameters that are parts of larger ones; the files have the larger ones.
        progress: progress bars, for verifying a sharded checkpoint's checksums.

    Raises:
        ConfigError, CheckpointError: on all ranks, if the files cannot be read or do not fit the module.
    """
    asked = settings.pretrained
    assert asked is not None
    path = Path(asked.path).expanduser()
    with raise_on_all_ranks(communicator):
        share = slice(communicator.rank, None, communicator.world_size)
        held = formats.of_weights(path).tensors(path, share, progress)
        names = names_of(module, boxes)
        chosen = _placed(path, held, names, asked.key_mapping)
        _check(path, module, held, names, chosen, asked, warn=communicator.rank == 0)
        if communicator.rank == 0:
            _check_tied(path, held, names, chosen)
    _check_ranks(path, held, chosen, communicator)
    parameters, buffers = {}, {}
    for name, target in reversed([(name, target) for name, targets in chosen.items() for target in targets]):
        place = names.places[target]
        if isinstance(place.tensor, nn.Parameter):
            parameters[id(place.tensor)] = held[name].read
        else:
            buffers[id(place.owner), place.attribute] = held[name].read
    return Given(parameters, buffers)


# -- the module's names
# ---------------------------------------------------------------------------------------------------


def names_of(module: nn.Module, boxes: Boxes = MappingProxyType({})) -> Names:
    """Returns the names of a module's parameters and buffers; a shared one has several."""
    places: dict[str, StateDictPlace] = {}
    computed: set[str] = set()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for attribute, tensor in (*parameters_in(owner).items(), *buffers_in(owner).items()):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if attribute in unsaved_buffers_in(owner):
                computed.add(WRAPPERS.sub("", name))
            elif tensor is not None:
                box = boxes.get(id(tensor))
                shape = tuple(tensor.shape) if box is None else box.shape
                places[name] = StateDictPlace(name, owner, attribute, tensor, shape)
    wrapped: dict[str, list[str]] = {}
    for name in places:
        plain = WRAPPERS.sub("", name)
        if plain not in places:
            wrapped.setdefault(plain, []).append(name)
    return Names(places, wrapped, frozenset(computed))


# -- matching the files' names
# ---------------------------------------------------------------------------------------------


def _placed(path: Path, held: Mapping[str, FileTensor], names: Names, given: Any) -> dict[str, tuple[str, ...]]:
    """Returns names in the module by name in the files; empty: unexpected. Names that are left out are not included."""
    if given is None:
        rename: Callable[[str], str | None] = _prefixed(path, list(held), names)
    elif callable(given):
        rename = given
    else:
        rename = partial(_by_prefix, given)
    chosen: dict[str, tuple[str, ...]] = {}
    taken: dict[str, str] = {}
    for name in held:
        renamed = rename(name)
        if renamed is None:
            continue
        if not isinstance(renamed, str):
            raise ConfigError(
                f"the key_mapping of weights=Weights(...) returned {renamed!r} for {name!r}; it must return the name "
                "in the module, or None to leave the tensor out"
            )
        targets = tuple(names.find(renamed))
        if not targets and renamed in names.computed:
            continue  # older programs saved buffers that modules compute themselves
        for target in targets or (renamed,):
            if target in taken:
                raise ConfigError(
                    f"{taken[target]} and {name} of {path} are both mapped to {target}, which can have only one value; "
                    "change weights=Weights(key_mapping=...), where None leaves a name out"
                )
            taken[target] = name
        chosen[name] = targets
    return chosen


def _by_prefix(prefixes: Mapping[str, str | None], name: str) -> str | None:
    """Replaces the longest matching prefix, in whole components; a name without one stays as it is."""
    fitting = [(key.strip("."), value) for key, value in prefixes.items() if _under(key.strip("."), name)]
    if not fitting:
        return name
    prefix, value = max(fitting, key=lambda pair: len(pair[0]))
    return None if value is None else _joined(value.strip("."), name[len(prefix) :].lstrip("."))


def _under(prefix: str, name: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _prefixed(path: Path, given: Sequence[str], names: Names) -> Callable[[str], str]:
    """Returns a function that puts one prefix before all names, with or without their first component: the prefix with
    which most names are found in the module.

    Raises:
        ConfigError: two prefixes find equally many names, and different ones.
    """
    known = {*names.places, *names.wrapped, *names.computed}
    by_ending: dict[str, list[str]] = {}
    for name in known:
        parts = name.split(".")
        for count in range(len(parts)):
            by_ending.setdefault(".".join(parts[count:]), []).append(".".join(parts[:count]))
    votes: Counter[tuple[str, str]] = Counter()
    for name in given:
        first, _, rest = name.partition(".")
        votes.update(("", prefix) for prefix in by_ending.get(name, ()))
        votes.update((first, prefix) for prefix in by_ending.get(rest, ()) if rest)
    best: list[tuple[int, Callable[[str], str], dict[str, str]]] = []
    for (first, prefix), _ in sorted(votes.most_common(_CANDIDATES), key=lambda vote: vote[0]):
        rename = partial(_exchanged, first, prefix)
        found = {name: rename(name) for name in given if rename(name) in known}
        if not best or len(found) > best[0][0]:
            best = [(len(found), rename, found)]
        elif len(found) == best[0][0] and all(found != other for _, _, other in best):
            best.append((len(found), rename, found))
    if not best:
        return lambda name: name
    if len(best) > 1 and 2 * best[0][0] < len(given):
        best = best[:1]  # nothing fits: the error with all names says more
    if len(best) > 1:
        name = given[0]
        raise ConfigError(
            f"{name} of {path} matches {' and '.join(rename(name) for _, rename, _ in best)} of the module equally "
            "well; say which is meant: weights=Weights(path=..., "
            "key_mapping={'prefix in the files': 'prefix in the module'})"
        )
    return best[0][1]


def _exchanged(first: str, prefix: str, name: str) -> str:
    return _joined(prefix, name[len(first) + 1 :] if first and name.startswith(f"{first}.") else name)


# -- checks
# ---------------------------------------------------------------------------------------------------------------


def _check(
    path: Path,
    module: nn.Module,
    held: Mapping[str, FileTensor],
    names: Names,
    chosen: Mapping[str, Sequence[str]],
    asked: Weights,
    *,
    warn: bool,
) -> None:
    covered = {id(names.places[target].tensor) for targets in chosen.values() for target in targets}
    may_lack = (*_patterns(module, MAY_BE_MISSING),)
    may_have = (*_patterns(module, MAY_BE_UNEXPECTED),)
    missing = [
        place.name
        for place in names.places.values()
        if id(place.tensor) not in covered
        and not any(fnmatchcase(place.name, pattern) for pattern in asked.allow_missing)
        and not any(re.search(pattern, place.name) for pattern in may_lack)
    ]
    unexpected = [
        name
        for name, targets in chosen.items()
        if not targets and not any(re.search(pattern, name) for pattern in may_have)
    ]
    differing = [
        f"{target} is {names.places[target].shape} and {name} in the files {held[name].shape}"
        for name, targets in chosen.items()
        for target in targets
        if names.places[target].shape != held[name].shape
    ]
    differing += [
        f"{target} is {names.places[target].tensor.dtype} and {name} in the files {held[name].dtype} (quantised?)"
        for name, targets in chosen.items()
        for target in targets
        if names.places[target].tensor.is_floating_point() and not held[name].dtype.is_floating_point
    ]
    if differing or (asked.strict and (missing or unexpected)):
        found = [
            _listed("the files lack", missing),
            _listed("the module has no place for", unexpected),
            _listed("shapes or dtypes differ:", differing),
        ]
        if missing and (unused := _matching_nothing(asked.allow_missing, names)):
            found.append(f"Weights(allow_missing={unused}) matches no whole name of the module")
        adapters = f"; {_NEW_ADAPTERS}" if any(fnmatchcase(name, _ADAPTERS) for name in missing) else ""
        ways = []
        if missing and not adapters:
            given = f"{missing[0].rpartition('.')[0] or missing[0]}*"
            ways.append(f"initialise what they lack with weights=Weights(path=..., allow_missing=[{given!r}])")
        if unexpected:
            ways.append(
                "map names with weights=Weights(path=..., key_mapping={'prefix in the files': 'prefix in the module'}) (None "
                "leaves them out)"
            )
        if differing:
            ways.append("build the module with the sizes of the files")
        elif missing or unexpected:
            ways.append("ignore differing names with weights=Weights(path=..., strict=False)")
        raise ConfigError(
            f"{path} does not fit the module: {'; '.join(filter(None, found))}{adapters}; give other files, or "
            f"{', or '.join(ways)}"
        )
    if warn and (missing or unexpected):
        found = [_listed("initialised as usual:", missing), _listed("left out:", unexpected)]
        rank_zero_warn(f"{path} does not fit the module in all names; {'; '.join(filter(None, found))}")


def _matching_nothing(patterns: Iterable[str], names: Names) -> list[str]:
    return [each for each in patterns if not any(fnmatchcase(place.name, each) for place in names.places.values())]


def _patterns(module: nn.Module, attribute: str) -> Iterator[str]:
    """Yields the patterns of names that a transformers model allows to be missing or unexpected."""
    for owner in module.modules():
        found = owner.__dict__.get(attribute, getattr(type(owner), attribute, None))
        yield from found if isinstance(found, Iterable) and not isinstance(found, str) else ()


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what} {some(names, _MOST_NAMES)} ({len(names)} in all)" if names else ""


def _check_tied(path: Path, held: Mapping[str, FileTensor], names: Names, chosen: Mapping[str, Sequence[str]]) -> None:
    """Checks that names of one tied parameter have one value in the files."""
    seen: dict[int, str] = {}
    for name, targets in chosen.items():
        for target in targets:
            other = seen.setdefault(id(names.places[target].tensor), name)
            if other != name and not torch.equal(held[other].read(), held[name].read().to(held[other].dtype)):
                raise ConfigError(
                    f"{other} and {name} of {path} have different values, and {target} shares its parameter with the "
                    "other here; leave one out with weights=Weights(key_mapping=...), or build the model with weights "
                    "that are not tied"
                )


def _check_ranks(
    path: Path, held: Mapping[str, FileTensor], chosen: Mapping[str, Sequence[str]], communicator: Communicator
) -> None:
    """Checks that all ranks have files with the same names and shapes (I2)."""
    facts = sorted((name, tuple(targets), str(held[name].dtype), held[name].shape) for name, targets in chosen.items())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    first = communicator.broadcast_object(digest if communicator.rank == 0 else None)
    with raise_on_all_ranks(communicator):
        if digest != first:
            raise ConfigError(
                f"{path} has other tensors on this rank than on rank 0, so the ranks would train different models; "
                "give all ranks the same files"
            )
