"""Sharded checkpoints (`state_dict_type="sharded"`): loading them, and the parts of state dicts that go to Lightning's
dictionary.

Every rank writes its own ranges of the model's states, straight from its pages, and nothing is gathered; any number of
ranks can load them. The format is that of storage/folder.py. A loaded checkpoint is an ordinary Lightning checkpoint
whose tensors are memory-mapped, so the rest of loading is the same for all checkpoints (module_states.py): each rank
reads what it owns.
I1: a failure on any rank is known to all, and all raise; the folder under the final name is then unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ptm.checkpoints.file_io import FileCheckpointIO, read_file
from lightning_ptm.checkpoints.module_states import parameters_by_name
from lightning_ptm.checkpoints.optimizer_states import parameters_of, plain_optimizer
from lightning_ptm.errors import UsageError
from lightning_ptm.progress import Progress
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.storage.index import LIGHTNING, PARAMETERS, Index, StateFile
from lightning_ptm.storage.tensors import Mapped
from lightning_ptm.storage.user_errors import is_folder
from lightning_ptm.storage.verified import CheckedFolder
from lightning_ptm.trainer.paged_optimizer_state import opened

# -- state dicts without tensors of pages
# ----------------------------------------------------------------------------------


def module_remainder(engine: Engine, module: LightningModule) -> dict[str, Any]:
    """Returns the module's state dict without parameters: buffers and extra state."""
    engine.drain("state dict")
    engine.executor.release_all()
    return without_parameters(module)


def without_parameters(module: LightningModule) -> dict[str, Any]:
    """Returns the same for a module that is in no run."""
    parameters = {id(parameter) for parameter in module.parameters()}
    state = parameters_by_name(module)
    for name in [name for name, item in state.items() if isinstance(item, Tensor) and id(item) in parameters]:
        del state[name]
    return {name: item.detach() if isinstance(item, Tensor) else item for name, item in state.items()}


def optimizer_remainder(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state dict without element-wise states: groups, and scalars such as `step`."""
    engine.drain("optimizer state")
    optimizer = plain_optimizer(optimizer)
    if strangers := engine.changes.strangers(optimizer):
        raise UsageError(
            f"a parameter of shape {tuple(strangers[0].shape)} is in a group of {type(optimizer).__name__} and in no "
            "module, so a sharded checkpoint has no name for it; take it out of the group, or use "
            "checkpoints=Checkpoints(state_dict_type='full')"
        )
    with opened(optimizer):
        result = optimizer.state_dict()
    scalars = engine.optimizer_values.scalars_in_order(
        engine.updates.groups.index_of(optimizer), parameters_of(optimizer)
    )
    if scalars:  # Lightning's mock optimizer, where configure_optimizers returns none, has no states
        result["state"] |= (
            scalars  # states that the optimizer itself holds are of parameters that this run does not train
        )
    return result


# -- loading
# --------------------------------------------------------------------------------------------------------------


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
    files = {name: Mapped(file.path, file.layout) for name, file in folder.files.items()}
    weights = {
        name: files[file.name] for file in index.files if file.kind == PARAMETERS for name in files[file.name].names()
    }
    rest = checkpoint.get("state_dict", {})
    checkpoint["state_dict"] = {
        name: weights[index.parameters[name]].tensor(index.parameters[name]) if name in index.parameters else rest[name]
        for name in index.state
        if name in index.parameters or name in rest
    }
    if optimizers and index.optimizers:
        slots = [(file.kind, files[file.name]) for file in index.files if file.kind != PARAMETERS]
        for number, state in enumerate(checkpoint["optimizer_states"]):
            _add_slots(state.get("state", {}), index, number, slots)
    return checkpoint


class ShardedCheckpointIO(FileCheckpointIO):
    """CheckpointIO for Trainers with another strategy: `Trainer(plugins=[ShardedCheckpointIO()])` also loads sharded
    checkpoints, and writes ordinary files."""

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if is_folder(Path(path)):
            return load(path, weights_only=weights_only is not False)
        return super().load_checkpoint(path, map_location, weights_only)


def to_file(folder: str | Path, file: str | Path, *, weights_only: bool = True) -> None:
    """Writes a sharded checkpoint as one ordinary file, which `load_from_checkpoint` and any Trainer can read.

    Tensors are copied from file to file: RAM holds one of them at a time.

    Args:
        weights_only: as for `load`.

    Raises:
        CheckpointError: the folder is damaged, or the file cannot be written.
    """
    FileCheckpointIO().save_checkpoint(load(folder, weights_only=weights_only), file)


def _add_slots(
    state: dict[int, dict[str, Any]], index: Index, number: int, slots: Sequence[tuple[str, Mapped]]
) -> None:
    places = {name: place for place, name in enumerate(index.optimizers[number].parameters)}
    slot_in = index.slots_of(number)
    for kind, mapped in slots:
        for name in mapped.names():
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
