"""Weights and optimizer states as ordinary dictionaries: what Lightning saves and loads.

The same bytes as a single device would have saved: fp32 weights by name, optimizer state in the optimizer's own format
with full shapes, so a checkpoint moves freely between angel_ptm, DDP and one device. Built unit by unit; the dictionary
itself is whole, on rank 0 only: in RAM, or, where that is short and there is a disk tier, in a file beside that. Every
function is collective.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CheckpointError, ConfigError, UsageError
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.machine import free_host_bytes
from lightning_ptm.storage.archive import unreadable
from lightning_ptm.storage.folder import file_draft
from lightning_ptm.storage.reading import is_file
from lightning_ptm.storage.scratch import Scratch
from lightning_ptm.terms import Tier
from lightning_ptm.trainer.paged_states import guard, opened
from lightning_ptm.update import same_value

_RAM_SHARE = 0.5
"""Of the free RAM, what a full checkpoint may take while it is put together."""

_WRITTEN_AT_ONCE_BYTES = 64 << 20

_LIGHTNINGS_OWN = TorchCheckpointIO.save_checkpoint


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their place, synced, and renamed into it; read as they are needed.

    A file that is not local is Lightning's own business.
    """

    def __init__(self) -> None:
        self.progress = Progress(shown=False)
        """Of writing; the strategy sets it."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        wrapped = TorchCheckpointIO.save_checkpoint is not _LIGHTNINGS_OWN  # by a tracer, a mock: they see each save
        if storage_options is not None or "://" in str(path) or wrapped:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        bar = self.progress.bar(f"saving {Path(path).name}", _storage_bytes(checkpoint))
        with file_draft(Path(path)) as draft, draft.open("r+b") as file, bar as seen:
            try:
                # Not through a buffer in memory, as Lightning's own does, which would hold the checkpoint a second time.
                torch.save(checkpoint, cast(IO[bytes], _Watched(file, seen)))
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch hides what the system has said
                    raise error.__context__ from error
                raise

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not is_file(Path(path)):
            return super().load_checkpoint(path, map_location, weights_only)
        return read_file(Path(path), weights_only=weights_only, map_location=map_location)


class _Watched:
    """A file for torch.save, which writes each tensor in one call, that tells how many more bytes are written."""

    def __init__(self, file: IO[bytes], seen: Seen) -> None:
        self._file = file
        self._seen = seen

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _WRITTEN_AT_ONCE_BYTES):
            self._seen(self._file.write(data[start : start + _WRITTEN_AT_ONCE_BYTES]))
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _storage_bytes(checkpoint: Mapping[str, Any]) -> int:
    """Of weights and optimizer states, those that share storage counted once; sparse ones and users' own things are not."""
    parts = [checkpoint.get("state_dict"), checkpoint.get("optimizer_states")]
    tensors = [tensor for tensor in _tensors(parts) if tensor.layout is torch.strided]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors(value)


def read_file(path: Path, *, weights_only: bool | None, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's dictionary. Its tensors are mapped, where the format allows it: each rank reads what it owns.

    Raises:
        CheckpointError: it is damaged, no checkpoint, or holds what is not loaded from files that may not be trusted.
    """
    try:
        mapped = zipfile.is_zipfile(path)  # not what torch wrote before 1.6
        return dict(torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped or None))
    except Exception as error:  # torch has an error of its own for each way in which a file can be damaged
        remedy = "give weights_only=False to the Trainer's method"
        raise unreadable(path, error, weights_only=weights_only is not False, remedy=remedy) from error


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, out of Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """An optimizer's parameters, in its own order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def module_state(engine: Engine, module: LightningModule, *, keep: bool) -> dict[str, Any]:
    """The module's state dict with precise, full weights; empty where not `keep` (other ranks than 0)."""
    engine.drain("state dict")
    engine.executor.release_all()
    values: dict[int, Tensor] = {}
    copy_of = _copies(engine)
    for name, parameter, value in engine.values.parameters():
        if keep:
            values[id(parameter)] = copy_of(name, value)
    if not keep:
        return {}
    # The module's own state_dict names everything (tied weights, buffers, extra state, users' overrides), and its hooks may
    # change values. It also carries the modules' versions, which `load_state_dict` asks for.
    with engine.values.lent(values):
        return module.state_dict()


def takes_keywords(module: torch.nn.Module) -> bool:
    """Whether the module's `state_dict` can be asked for the parameters themselves; an override of the user's, as there are
    with `strict_loading=False`, may take no arguments."""
    try:
        inspect.signature(type(module).state_dict).bind(module, keep_vars=True)
    except TypeError:
        return False
    return True


def parameters_by_name(module: torch.nn.Module) -> dict[str, Any]:
    """The module's state dict with the parameters themselves.

    Raises:
        UsageError: it cannot be asked for them.
    """
    if not takes_keywords(module):
        raise UsageError(
            f"{type(module).__name__}.state_dict takes no keywords, and sharded checkpoints ask it for the parameters "
            f"themselves; write `def state_dict(self, *args, **kwargs)` and hand them on to super().state_dict, or save with "
            f"state_dict_type='full'"
        )
    return module.state_dict(keep_vars=True)


def load_module_state(engine: Engine, module: LightningModule, state: Mapping[str, Any], *, strict: bool) -> None:
    """Writes a state dict into pages and buffers.

    Raises:
        RuntimeError: names are missing or unexpected under `strict`, in torch's own words.
        ConfigError: a shape differs.
        UsageError: the module's own code changes values of parameters while they are loaded.
    """
    engine.drain("load a state dict")
    engine.executor.release_all()
    with engine.values.lent(None):
        named = _named(module)
    parameters = {id(parameter) for _, parameter in engine.values.names()}
    by_id = {id(item): state[name] for name, item in named.items() if name in state and id(item) in parameters}
    engine.values.load_parameters(by_id)
    _load_rest(module, state, named, parameters, strict=strict)


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What became of a state dict that was loaded before there are pages.

    Args:
        parameters: values for parameters without storage, which pages will have.
        buffers: the same of buffers: module, attribute, value.
        versions: of these parameters, when the state dict was loaded.
        precise: what the module had to round: parameter, or module and attribute of a buffer, value, and dtype there.
        here: what has been loaded, as `Given` files it: by id of the parameter, or of the module and attribute.
    """

    parameters: tuple[tuple[torch.nn.Parameter, Tensor], ...] = ()
    buffers: tuple[tuple[torch.nn.Module, str, Tensor], ...] = ()
    versions: tuple[tuple[torch.nn.Parameter, int], ...] = ()
    precise: tuple[tuple[torch.nn.Parameter | tuple[torch.nn.Module, str], Tensor, torch.dtype], ...] = ()
    here: frozenset[int | tuple[int, str]] = frozenset()

    def refuse_written(self, module: torch.nn.Module) -> None:
        """Raises:
        UsageError: parameters without storage were written to since.
        """
        written = {id(parameter) for parameter, version in self.versions if parameter._version != version}
        names = [name for name, parameter in module.named_parameters() if id(parameter) in written]
        if names:
            raise UsageError(
                f"{_some(names)}: written to between the loading of a checkpoint and the start of the run, while on the meta "
                f"device, so what was written would be lost; build the module with real weights, change "
                f"checkpoint['state_dict'] in the LightningModule's on_load_checkpoint, or edit weights in on_fit_start, "
                f"inside of `with self.trainer.strategy.gathered(self):`"
            )

    def untouched(self, module: torch.nn.Module) -> Restored:
        """Before pages take over: what the module had to round, and nobody has changed since, gets its whole value there."""
        parameters, buffers = list(self.parameters), list(self.buffers)
        known = {id(parameter) for parameter in module.parameters()}
        for place, value, dtype in self.precise:
            now = place[0]._buffers.get(place[1]) if isinstance(place, tuple) else place
            if now is None or now.is_meta or not torch.equal(now, value.to(now.device, dtype).to(now.dtype)):
                continue
            if isinstance(place, tuple):
                buffers.append((*place, value))
            elif id(place) in known:
                parameters.append((place, value))
        return dataclasses.replace(self, parameters=tuple(parameters), buffers=tuple(buffers), precise=())

    @torch.no_grad()
    def fill(self, engine: Engine) -> None:
        """Writes into pages what has waited for them.

        Raises:
            ConfigError: a shape differs.
        """
        if self.parameters:
            engine.drain("load a state dict")
            engine.executor.release_all()
            engine.values.load_parameters({id(parameter): value for parameter, value in self.parameters})
        for owner, name, value in self.buffers:
            buffer = owner._buffers.get(name)
            if buffer is not None:
                buffer.copy_(value)


def load_before_pages(module: LightningModule, state: Mapping[str, Any], *, strict: bool) -> Restored:
    """Loads a state dict as torch does, at once, into all that has storage; what is on the meta device or closed waits, and
    what is rounded there has its whole value kept: no run loses precision by going on.

    Raises: as `load_module_state`.
    """
    lacking = {id(each) for each in module.parameters() if each.is_meta or isinstance(each, ClosedParameter)}
    stand_ins = _StandIns(module, lacking)
    with stand_ins:
        named = {name: stand_ins.stands_for(item) for name, item in _named(module).items()}
    result = _load_rest(module, state, named, lacking, strict=strict)
    parameters = {
        id(item): (item, state[name]) for name, item in named.items() if name in state and id(item) in lacking
    }
    missing = result if result is not None else named.keys() - state.keys()
    places = [
        (owner, name, f"{path}.{name}" if path else name, buffer)
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    ]
    here: set[int | tuple[int, str]] = set()
    here |= {id(item) for name, item in named.items() if name not in missing} - lacking
    here |= {(id(owner), name) for owner, name, path, buffer in places if not buffer.is_meta and path not in missing}
    held = {id(item): (item, item, name) for name, item in named.items() if name not in missing}
    held |= {id(buffer): ((owner, name), buffer, path) for owner, name, path, buffer in places if path not in missing}
    precise = tuple(
        (place, state[name], item.dtype)
        for place, item, name in held.values()
        if name in state and _rounds(item, state[name])
    )
    return Restored(
        tuple(parameters.values()),
        tuple((owner, name, state[path]) for owner, name, path, buffer in places if buffer.is_meta and path in state),
        tuple((parameter, parameter._version) for parameter in module.parameters() if id(parameter) in lacking),
        precise,
        frozenset(here),
    )


def _rounds(item: Any, value: Any) -> bool:
    """Whether a value lost something when it was copied into a parameter or buffer with storage."""
    if (
        not isinstance(item, Tensor)
        or not isinstance(value, Tensor)
        or item.is_meta
        or isinstance(item, ClosedParameter)
    ):
        return False
    floats = item.is_floating_point() and value.is_floating_point() and item.shape == value.shape
    return floats and torch.promote_types(item.dtype, value.dtype) != item.dtype


def _named(module: LightningModule) -> dict[str, Any]:
    """Parameters, and what else there is, by name: as a part of the module names its parameters itself, and otherwise as it
    would say, but for hooks that change values."""
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    names_of = module.state_dict if takes_keywords(module) else partial(torch.nn.Module.state_dict, module)
    named |= {
        name: item
        for name, item in names_of(keep_vars=True).items()
        if name not in named or isinstance(item, torch.nn.Parameter)
    }
    return named


def _load_rest(
    module: LightningModule,
    state: Mapping[str, Any],
    named: Mapping[str, Any],
    elsewhere: Collection[int],
    *,
    strict: bool,
) -> Collection[str] | None:
    """Has the module load all but the parameters in `elsewhere`, by id, whose values get where they are on another way.

    Returns:
        Names that the state lacks; None where an override does not say.
    """
    # Buffers, extra state, hooks and the report of names are torch's: it is given the parameters that it expects,
    # as empty meta tensors of the right shape, so that it copies nothing into released storage.
    rest = cast(dict[str, Any], copy(state))
    given: list[tuple[Tensor, int]] = []
    for name, value in state.items():
        if name in named and id(named[name]) in elsewhere:
            rest[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            given.append((rest[name], id(named[name])))
    stand_ins = _StandIns(module, elsewhere)
    with stand_ins, stand_ins.watched(given), warnings.catch_warnings():
        if given:
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        result = module.load_state_dict(rest, strict=strict)
    if stand_ins.changed:
        names = [name for name, item in named.items() if id(item) in stand_ins.changed]
        raise UsageError(
            f"{_some(names)}: changed by a hook or an override of load_state_dict of the {type(module).__name__} while a "
            f"checkpoint is loaded; these parameters have no storage of their own then, since they are on the meta device or "
            f"in pages, so the change would be lost; change checkpoint['state_dict'] in the LightningModule's "
            f"on_load_checkpoint instead"
        )
    # An override of the user's may return anything, such as nothing.
    told = result.missing_keys if isinstance(result, _IncompatibleKeys) else None
    missing = {id(named[name]) for name in (named.keys() - state.keys() if told is None else told) if name in named}
    known = {of for _, of in given}
    for name, item in named.items():
        if id(item) in elsewhere and id(item) not in known and id(item) not in missing:
            raise ConfigError(
                f"{name} is not in the checkpoint under this name and a hook of the module provides it while loading; pages "
                f"cannot follow such hooks: rename the checkpoint's keys in on_load_checkpoint"
            )
    return told


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _copies(engine: Engine) -> Callable[[str, Tensor], Tensor]:
    """How a checkpoint's tensors are copied: into RAM, if a good part of it stays free then. Knows this rank alone.

    Raises (what it returns):
        CheckpointError: the disk beside RAM has no room for them.
    """
    needed = engine.precise_bytes() + engine.optimizer_state_bytes(*Tier)
    if not engine.disk_paths or needed <= free_host_bytes() * _RAM_SHARE:
        return lambda name, value: value.clone()
    folder = engine.disk_paths[0]
    scratch = Scratch(folder)

    in_ram = False

    def copy_of(name: str, value: Tensor) -> Tensor:
        nonlocal in_ram
        try:
            if not in_ram:
                return scratch.copy(value)
        except OSError as error:
            if needed <= free_host_bytes():
                in_ram = True
                rank_zero_warn(
                    f"a full checkpoint takes {format_bytes(needed)}, more than half of the free RAM, and is put together "
                    f"there all the same, since {folder} has no room for it ({error.strerror or error})"
                )
                return value.clone()
            raise CheckpointError(
                f"a full checkpoint takes {format_bytes(needed)}, which is more than RAM should hold, and there is no room "
                f"to put it together in {folder}, at {name}: {error.strerror or error}; use state_dict_type='sharded', "
                f"which needs no such room, or free some there"
            ) from error
        return value.clone()

    return copy_of


class _StandIns:
    """Inside, empty meta tensors stand in the module for the parameters in `elsewhere`, by id."""

    def __init__(self, module: torch.nn.Module, elsewhere: Collection[int]) -> None:
        self._module = module
        self._elsewhere = elsewhere
        self._taken: list[tuple[torch.nn.Module, str, torch.nn.Parameter, torch.nn.Parameter]] = []
        self._of: dict[int, torch.nn.Parameter] = {}
        self.changed: set[int] = set()
        """Parameters, by id, that were to get other values than those given, as far as they were watched."""

    def __enter__(self) -> None:
        for owner in self._module.modules():
            for name, parameter in owner._parameters.items():
                if id(parameter) in self._elsewhere:
                    assert parameter is not None
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    stand_in = torch.nn.Parameter(empty, requires_grad=False)
                    self._taken.append((owner, name, parameter, stand_in))
                    self._of[id(stand_in)] = parameter
                    owner._parameters[name] = stand_in

    def __exit__(self, *exception: object) -> None:
        for owner, name, parameter, _ in self._taken:
            owner._parameters[name] = parameter

    def stands_for(self, item: Any) -> Any:
        """What an item of the module's state dict stands for, itself if for nothing."""
        return self._of.get(id(item), item)

    @contextmanager
    def watched(self, given: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
        """Inside, `changed` learns of parameters that get something else than what was given for them, by id.

        Ends inside of the stand-ins.
        """
        if not self._taken:
            yield
            return
        owners = {_storage(stand_in): id(parameter) for _, _, parameter, stand_in in self._taken}
        owners |= {_storage(value): of for value, of in given}
        with _Writes(owners, self.changed):
            yield
        for owner, name, parameter, _ in self._taken:
            if owners.get(_storage(owner._parameters.get(name))) != id(parameter):  # another tensor was put there
                self.changed.add(id(parameter))


class _Writes(TorchDispatchMode):
    """Inside, finds out which stand-ins are written to, other than by copying what stands for the same parameter.

    Args:
        owners: which parameter a meta tensor stands for, by its storage.
        changed: where to tell it.
    """

    supports_higher_order_operators = True  # they write to nothing that they are given

    def __init__(self, owners: Mapping[int | None, int], changed: set[int]) -> None:
        super().__init__()
        self._owners = owners
        self._changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            written = [args[0]] if self._owner(args[0]) != self._owner(args[1]) else []
        elif not isinstance(func, OpOverload):
            written = []
        else:
            values = [*args, *(kwargs.get(each.name) for each in func._schema.arguments[len(args) :])]
            marks = [each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments]
            chosen = [value for value, is_written in zip(values, marks, strict=False) if is_written]
            written = [each for value in chosen for each in (value if isinstance(value, (list, tuple)) else (value,))]
        self._changed.update(of for of in map(self._owner, written) if of is not None)
        return func(*args, **kwargs)

    def _owner(self, value: Any) -> int | None:
        return self._owners.get(_storage(value))


def _storage(value: Any) -> int | None:
    """Equal for views of one meta tensor; None for all else."""
    is_meta = isinstance(value, Tensor) and value.is_meta and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_meta else None


def optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """The optimizer's state dict with full state tensors; empty where not `keep`."""
    engine.drain("optimizer state")
    engine.executor.release_all()
    optimizer = plain_optimizer(optimizer)
    index = engine.updates.index_of(optimizer)
    order = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states: dict[int, dict[str, Any]] = {}
    copy_of = _copies(engine)
    for parameter, state in engine.values.optimizer_states(index, copy_of if keep else lambda name, value: value):
        if keep:
            states[order[id(parameter)]] = state
    if not keep:
        return {}
    with opened(optimizer):
        result = optimizer.state_dict()
    if engine.steps_itself(optimizer) or not order:  # or Lightning's stand-in for none
        return result
    # What the optimizer itself keeps is of parameters that this run does not train.
    states = result["state"] | states
    result["state"] = {place: states[place] for place in sorted(states) if states[place]}
    return result


def load_optimizer_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    """Writes an optimizer's state dict into pages and its groups into the user's object.

    Returns:
        What takes the tensors that were given out of the optimizer's `state` again. They can be looked at there until the
        first step; those that updates write are in pages.

    Raises:
        ConfigError: it was saved by an optimizer with other parameter groups, or whose settings keep states for which this
            run has no pages.
    """
    optimizer = plain_optimizer(optimizer)
    if engine.steps_itself(optimizer) or not parameters_of(optimizer):  # or Lightning's stand-in for none
        optimizer.load_state_dict(dict(state))
        return lambda: None
    saved, ours = state["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in ours]:
        raise ConfigError(
            f"the checkpoint's optimizer has parameter groups of {[len(group['params']) for group in saved]} parameters, "
            f"this run's of {[len(group['params']) for group in ours]}; configure the optimizer as it was saved"
        )
    states = _states_in(state, optimizer)
    _check_kept(engine, optimizer, states, saved)
    forget = _take_states(engine, optimizer, states)
    for group, loaded in zip(ours, saved, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
    return forget


def _states_in(state: Mapping[str, Any], optimizer: Optimizer) -> dict[int, Mapping[str, Any]]:
    """A state dict's states by id of parameter."""
    parameters = parameters_of(optimizer)
    places = [place for group in state["param_groups"] for place in group["params"]]
    return {id(parameters[i]): state["state"][place] for i, place in enumerate(places) if place in state["state"]}


def follow_loaded_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    """Takes into pages what the optimizer's own `load_state_dict` was given; its groups are loaded already. Collective.

    Returns, raises: as `take_over_optimizer_state`.
    """
    return _take_states(engine, optimizer, _states_in(state, optimizer))


def take_over_optimizer_state(engine: Engine, optimizer: Optimizer) -> Callable[[], None] | None:
    """Takes the states that an optimizer has when a run begins into pages: an earlier run's, or loaded by hand.

    Where rank 0 alone has them, as a run leaves them, all ranks get them from there. Collective.

    Returns:
        As `load_optimizer_state`; None where there are no states.

    Raises:
        ConfigError: the run has no pages for one of them, or another shape.
        UsageError: ranks have them, and rank 0 has none.
    """
    optimizer = plain_optimizer(optimizer)
    parameters = parameters_of(optimizer)
    with opened(optimizer):
        here = {place: optimizer.state[p] for place, p in enumerate(parameters) if optimizer.state.get(p)}
    if engine.all_ranks(not here):
        return None
    if not engine.all_ranks(bool(here)):
        here = engine.told(here)
        if not here:
            raise UsageError(
                f"the {type(optimizer).__name__} has states on some ranks, and none on rank 0; load them on all ranks"
            )
    states = {id(parameters[place]): state for place, state in here.items()}
    return _take_states(engine, optimizer, states)


def _take_states(engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> Callable[[], None]:
    """Writes states by id of parameter into pages and shows them; see `load_optimizer_state`."""
    lacking = _lacking(engine, optimizer, states)
    if lacking:
        raise ConfigError(
            f"the {type(optimizer).__name__} was given {', '.join(lacking)} of earlier steps, for which this run has no "
            f"pages, since its settings were others when the run began or are now; return a new optimizer with the settings "
            f"of these states from configure_optimizers"
        )
    engine.drain("load optimizer state")
    index = engine.updates.index_of(optimizer)
    engine.values.load_optimizer_states(index, states)
    paged = engine.updates.parameters_of(index)
    guard(optimizer, paged)
    with opened(optimizer):
        for parameter in paged:
            optimizer.state.pop(parameter, None)
        for parameter in parameters_of(optimizer):
            if id(parameter) in states:
                optimizer.state[parameter] = dict(states[id(parameter)])

    def forget(*_: Any) -> None:
        hook.remove()
        with opened(optimizer):
            for parameter in paged:  # of others the optimizer itself keeps them, as ever
                optimizer.state.pop(parameter, None)

    hook = optimizer.register_step_post_hook(forget)
    return forget


def _lacking(engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Names of element-wise states of a parameter for which the run has no pages."""
    for _, flat in engine.updates.flats_of(engine.updates.index_of(optimizer)):
        binding = flat.store.binding
        for slot, parameter in enumerate(binding.parameters):
            lacking = [
                name
                for name, value in states.get(id(parameter), {}).items()
                if isinstance(value, Tensor) and value.numel() > 1 and tuple(value.shape) == binding.shape(slot)
                if name not in flat.states.slots
            ]
            if lacking:
                return lacking
    return []


def _check_kept(
    engine: Engine, optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]], saved: list[dict[str, Any]]
) -> None:
    """Training would go on with the checkpoint's settings, and fail at the first update for want of pages."""
    differing = {
        f"{key}={value!r}"
        for group, loaded in zip(optimizer.param_groups, saved, strict=True)
        for key, value in loaded.items()
        if key in group and key not in ("params", "lr", "initial_lr") and not same_value(group[key], value)
    }
    if not differing:
        return
    lacking = _lacking(engine, optimizer, states)
    if lacking:
        raise ConfigError(
            f"the checkpoint's {type(optimizer).__name__} keeps {', '.join(lacking)}, and this run has no pages for that: "
            f"its settings were {', '.join(sorted(differing))}, with which training would go on; give these to the optimizer "
            f"in configure_optimizers"
        )


def give_back_optimizer_state(engine: Engine, optimizer: Optimizer, *, keep: bool) -> None:
    """Puts full state tensors into the user's optimizer, whose parameters are ordinary again (nothing where not `keep`)."""
    optimizer = plain_optimizer(optimizer)
    found: dict[int, dict[str, Any]] = {}
    for parameter, state in engine.values.optimizer_states(engine.updates.index_of(optimizer)):
        if keep and state:
            found[id(parameter)] = state
    for parameter in parameters_of(optimizer):  # in this order, as a plain optimizer has them
        if id(parameter) in found:
            optimizer.state[parameter] = found[id(parameter)]
