"""Sharded checkpoints (`state_dict_type="sharded"`): a folder to which every rank writes its own ranges of the model's
states, straight from its pages.

Nothing is gathered, and any number of ranks can load them. storage/folder.py describes the files, saving.py writes them.
A loaded checkpoint is an ordinary Lightning checkpoint whose tensors are memory-mapped, so the rest of loading is the same
for all checkpoints (module_states.py): each rank reads what it owns.
I1: a failure on any rank is known to all, and all raise; the folder under the final name is then unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from lightning_ptm.checkpoints.full import read_file
from lightning_ptm.checkpoints.opened import InFile, Opened, OptimizerFacts, Weight, weights_in
from lightning_ptm.checkpoints.protocol import Files, FileTensor, Format, LoadOptions, SaveOptions, WeightFormat
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.progress import Progress
from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.index import INDEX, LIGHTNING, PARAMETERS, Index, StateFile, is_sharded
from lightning_ptm.storage.tensors import Mapped
from lightning_ptm.storage.verified import CheckedFile, CheckedFolder

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch.optim import Optimizer

    from lightning_ptm.checkpoints.after_run import EndedRun
    from lightning_ptm.checkpoints.saving import Saving
    from lightning_ptm.runtime.engine.engine import Engine


class ShardedFormat(Format, WeightFormat):
    """A folder of safetensors files."""

    from_pages = True

    @override
    def recognises(self, path: Path) -> bool:
        return is_sharded(path)

    @override
    def completed_file(self, path: Path) -> Path:
        return path / INDEX

    @override
    def remove(self, path: Path, files: Files) -> None:
        folders.remove(path)

    @override
    def open(self, path: Path, *, weights_only: bool) -> Opened:
        return OpenedFolder(path, weights_only=weights_only)

    @override
    def load(self, path: str | Path, how: LoadOptions) -> dict[str, Any]:
        only = how.weights_only is not False
        verify = partial(_share_of, how.share, how.optimizers)
        with how.together():
            return load(path, weights_only=only, optimizers=how.optimizers, verify=verify, progress=how.progress())

    @override
    def tensors(self, path: Path, share: slice, progress: Progress | None) -> Mapping[str, FileTensor]:
        state = load(path, optimizers=False, verify=partial(_share_of, share, False), progress=progress)["state_dict"]
        return {name: _as_file_tensor(value) for name, value in state.items() if isinstance(value, Tensor)}

    # What writes imports Lightning, which reading does not need.

    @override
    def module_state(self, engine: Engine, module: LightningModule, *, keep: bool) -> dict[str, Any]:
        from lightning_ptm.checkpoints.saving import module_remainder

        return module_remainder(engine, module)

    @override
    def optimizer_state(self, engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
        from lightning_ptm.checkpoints.saving import optimizer_remainder

        return optimizer_remainder(engine, optimizer)

    @override
    def check(self, save: SaveOptions) -> None:
        if save.storage_options is not None:
            raise ConfigError(
                "storage_options are arguments of a checkpoint_io, and Checkpoints(state_dict_type='sharded') writes "
                "folders without one, so they would have no effect; leave storage_options out, or save with "
                "checkpoints=Checkpoints(state_dict_type='full')"
            )

    @override
    def write(self, engine: Engine, save: SaveOptions) -> Saving | None:
        from lightning_ptm.checkpoints.saving import Saving

        saving = Saving(
            engine,
            save.module,
            save.optimizers,
            save.checkpoint,
            Path(save.path),
            in_background=save.in_background,
            ranks_here=save.ranks_here,
            ops=save.ops,
        )
        return saving if save.in_background else None

    @override
    def module_state_after_run(self, module: LightningModule) -> dict[str, Any]:
        from lightning_ptm.checkpoints.saving import without_parameters

        return without_parameters(module)

    @override
    def optimizer_state_after_run(self, optimizer: Optimizer) -> dict[str, Any]:
        from lightning_ptm.checkpoints.saving import optimizer_remainder_after_run

        return optimizer_remainder_after_run(optimizer)

    @override
    def write_after_run(self, ended: EndedRun, save: SaveOptions) -> None:
        from lightning_ptm.checkpoints.saving import save_after_run

        save_after_run(ended, save.module, save.optimizers, save.checkpoint, Path(save.path), save.ops)


def _share_of(share: slice, optimizers: bool, index: Index) -> Sequence[StateFile]:
    """Returns this rank's share of the files that a load needs: each rank verifies only its share."""
    return [file for file in index.files if optimizers or file.kind == PARAMETERS][share]


def _as_file_tensor(value: Tensor) -> FileTensor:
    return FileTensor(value.dtype, tuple(value.shape), lambda: value)


def load(
    path: str | Path,
    *,
    weights_only: bool = True,
    optimizers: bool = True,
    verify: Callable[[Index], Sequence[StateFile]] | None = lambda index: index.files,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads a sharded checkpoint as an ordinary Lightning one. Its tensors are memory-mapped, and read when accessed.

    Args:
        path: the folder.
        weights_only: as for `torch.load`, for Lightning's own dictionary; the tensors' files have no code in any case.
        optimizers: include the optimizers' states.
        verify: chooses the files whose checksums are verified here; None: no file.
        progress: progress bar of the verification, which reads those files; None shows none.

    Raises:
        CheckpointError: it is incomplete, damaged (with file, tensor and range), or of a newer format version.
    """
    folder = CheckedFolder(Path(path))
    index = folder.index
    if verify is not None:
        check(folder, verify(index), progress or Progress(shown=False))
    checkpoint = read_file(folder.path / LIGHTNING, weights_only=weights_only)
    folder.check_dictionary(checkpoint)
    tensors = list(mapped_tensors(folder))
    weights = {name: mapped for kind, name, mapped in tensors if kind == PARAMETERS}
    rest = checkpoint.get("state_dict", {})
    checkpoint["state_dict"] = {
        name: weights[index.parameters[name]].tensor(index.parameters[name]) if name in index.parameters else rest[name]
        for name in index.state
        if name in index.parameters or name in rest
    }
    if optimizers and index.optimizers:
        for number, state in enumerate(checkpoint["optimizer_states"]):
            _add_slots(state.get("state", {}), index, number, tensors)
    return checkpoint


def mapped_tensors(folder: CheckedFolder) -> Iterator[tuple[str, str, Mapped]]:
    """Yields (kind of states, name of a parameter, memory-mapped file that has them) of all tensors of parameters and of
    optimizer states in a folder."""
    for file in folder.index.files:
        known = folder.files[file.name]
        mapped = Mapped(known.path, known.layout)
        for name in mapped.names():
            yield file.kind, name, mapped


def _add_slots(
    state: dict[int, dict[str, Any]], index: Index, number: int, tensors: Sequence[tuple[str, str, Mapped]]
) -> None:
    places = {name: place for place, name in enumerate(index.optimizers[number].parameters)}
    slot_in = index.slots_of(number)
    for kind, name, mapped in tensors:
        if (slot := slot_in(kind, name)) is not None and places[name] in state:
            state[places[name]][slot] = mapped.tensor(name)


def check(folder: CheckedFolder, files: Sequence[StateFile], progress: Progress) -> None:
    """Compares the bytes of these files with the checksums of what was written.

    Raises:
        CheckpointError: names the file, the tensor and the range that differ.
    """
    with progress.bar(f"checking {folder.path.name}", sum(file.size_bytes for file in files)) as seen:
        for file in files:
            folder.files[file.name].check(seen)


class OpenedFolder(Opened):
    """An open folder, whose files were checked against its index."""

    row_title = "unit"

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        self._folder = CheckedFolder(path)
        super().__init__(path, path / LIGHTNING, weights_only=weights_only)
        self._folder.check_dictionary(self.dictionary)
        self._reading: CheckedFile | None = None
        self.weights = self._weights()

    @property
    def index(self) -> Index:
        return self._folder.index

    @property
    def files(self) -> Mapping[str, CheckedFile]:
        return self._folder.files

    @property
    @override
    def file_count(self) -> int:
        return 1 + len(self.files)

    @property
    @override
    def size_bytes(self) -> int:
        return super().size_bytes + sum(file.layout.size_bytes for file in self.files.values())

    @property
    @override
    def has_checksums(self) -> bool:
        return True

    @override
    def pieces(self, weight: Weight) -> Iterator[Tensor]:
        if isinstance(weight.place, Tensor):
            return super().pieces(weight)
        file = self.files[weight.place.file]
        if self._reading is not None and self._reading is not file:
            self._reading.free_buffer()
        self._reading = file
        return file.pieces(weight.place.stored)

    @override
    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        super().check(seen)
        for file in self.files.values():
            file.check(seen)

    def _weights(self) -> tuple[Weight, ...]:
        parameters = {
            stored.name: (file, stored)
            for file in self.index.files
            if file.kind == PARAMETERS
            for stored in self.files[file.name].layout.tensors
        }
        rest = {weight.names[0]: weight for weight in weights_in(self.path, self.state)}
        names: dict[str, list[str]] = {}
        for name, tensor in self.index.parameters.items():
            names.setdefault(tensor, []).append(name)
        weights: list[Weight] = []
        for name in self.index.state:
            if name not in self.index.parameters:
                weights += [rest[name]] if name in rest else []
                continue
            tensor = self.index.parameters[name]
            if names[tensor][0] == name:
                file, stored = parameters[tensor]
                place = InFile(file.name, stored)
                weights.append(Weight(tuple(names[tensor]), stored.dtype, stored.shape, file.unit, place))
        return tuple(weights)

    # -- in words -----------------------------------------------------------------------------------------------------

    @property
    @override
    def kind(self) -> str:
        return (
            f"sharded: {len(self.files)} safetensors files, {format_bytes(self.size_bytes)}, format version "
            f"{self.index.version}"
        )

    @property
    @override
    def writer(self) -> str:
        index = self.index
        ranks = "1 rank" if index.world_size == 1 else f"{index.world_size} ranks"
        return f"{index.writer} with {self.lightning}, by {ranks} with pages of {format_bytes(index.page_size)}"

    @property
    @override
    def verified(self) -> str:
        if self._folder.sealed:
            return "all as written by one save"
        return (
            f"elements as written; format version {self.index.version} has no checksum of names and of what belongs "
            "together: load the checkpoint and save it again to have one"
        )

    @override
    def groups(self) -> Mapping[str, Sequence[Weight]]:
        return {
            "parameters": [weight for weight in self.weights if weight.unit is not None],
            "buffers": [weight for weight in self.weights if weight.unit is None],
        }

    @override
    def rows(self) -> Iterator[tuple[str, Weight]]:
        groups = self.groups()
        yield from ((weight.unit or "(root)", weight) for weight in groups["parameters"])
        yield from (("(buffers)", weight) for weight in groups["buffers"])

    @override
    def slots(self) -> Iterator[tuple[str, str, int]]:
        for file in self.index.files:
            if file.kind != PARAMETERS:
                tensors = self.files[file.name].layout.tensors
                yield file.unit or "(root)", file.kind, sum(stored.stop - stored.start for stored in tensors)

    @override
    def optimizer(self, number: int) -> OptimizerFacts | None:
        if number >= len(self.index.optimizers):
            return None
        known, slot_in, sizes = self.index.optimizers[number], self.index.slots_of(number), dict[str, int]()
        for file in self.index.files:
            for stored in self.files[file.name].layout.tensors if file.kind != PARAMETERS else ():
                if (slot := slot_in(file.kind, stored.name)) is not None:
                    sizes[slot] = sizes.get(slot, 0) + stored.stop - stored.start
        return OptimizerFacts(known.name, len(known.parameters), sizes)
