"""Full checkpoints (`state_dict_type="full"`): one ordinary file of Lightning, with all states gathered on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ptm.checkpoints.opened import Opened, Weight, weights_in
from lightning_ptm.checkpoints.protocol import Files, Format, LoadOptions, SaveOptions
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.archive import load_mapped
from lightning_ptm.storage.user_errors import is_folder

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch.optim import Optimizer

    from lightning_ptm.checkpoints.after_run import EndedRun
    from lightning_ptm.runtime.engine.engine import Engine

_VERSION = "pytorch-lightning_version"


class FullFormat(Format):
    """One file, which the Trainer's CheckpointIO writes and reads."""

    from_pages = False

    @override
    def recognises(self, path: Path) -> bool:
        return not is_folder(path)

    @override
    def completed_file(self, path: Path) -> Path:
        return path

    @override
    def remove(self, path: Path, files: Files) -> None:
        files.remove(path)

    @override
    def open(self, path: Path, *, weights_only: bool) -> Opened:
        return OpenedFile(path, weights_only=weights_only)

    @override
    def load(self, path: str | Path, how: LoadOptions) -> dict[str, Any]:
        return how.files.load(path, how.weights_only)

    # What writes imports Lightning, which reading does not need.

    @override
    def module_state(self, engine: Engine, module: LightningModule, *, keep: bool) -> dict[str, Any]:
        from lightning_ptm.checkpoints.gathering import module_state

        return module_state(engine, module, keep=keep)

    @override
    def optimizer_state(self, engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
        from lightning_ptm.checkpoints.gathering import optimizer_state

        return optimizer_state(engine, optimizer, keep=keep)

    @override
    def check(self, save: SaveOptions) -> None:
        pass  # everything is the CheckpointIO's

    @override
    def write(self, engine: Engine, save: SaveOptions) -> None:
        with engine.barriers.errors_on_all_ranks():
            save.files.save(save.checkpoint, save.path, save.storage_options)

    @override
    def module_state_after_run(self, module: LightningModule) -> dict[str, Any]:
        from lightning_ptm.runtime.units.parameter_guard import AbsentTensor

        state = module.state_dict()
        for name in [name for name, item in state.items() if isinstance(item, AbsentTensor)]:
            del state[name]
        return state

    @override
    def optimizer_state_after_run(self, optimizer: Optimizer) -> dict[str, Any]:
        from lightning_ptm.checkpoints.optimizer_states import plain_optimizer

        return plain_optimizer(optimizer).state_dict()

    @override
    def write_after_run(self, ended: EndedRun, save: SaveOptions) -> None:
        save.files.save(save.checkpoint, save.path, save.storage_options)


class OpenedFile(Opened):
    """An open file of Lightning."""

    row_title = "names"

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        super().__init__(path, path, weights_only=weights_only)
        self.weights = weights_in(path, self.state)

    @property
    @override
    def kind(self) -> str:
        return f"full: one file of Lightning, {format_bytes(self.size_bytes)}"

    @property
    @override
    def writer(self) -> str:
        return f"{self.lightning}, by rank 0"

    @property
    @override
    def verified(self) -> str:
        return "elements and Lightning's dictionary as written"

    @override
    def groups(self) -> Mapping[str, Sequence[Weight]]:
        return {"weights": self.weights}  # the file does not say which tensors are parameters

    @override
    def rows(self) -> Iterator[tuple[str, Weight]]:
        return ((_beginning(weight.names[0]), weight) for weight in self.weights)


def _beginning(name: str) -> str:
    """Returns a name up to its first number, or its module: `blocks.3` for `blocks.3.up.weight`, `head` for
    `head.weight`."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1]) or name


def read_file(path: Path, *, weights_only: bool | None, map_location: Any = "cpu") -> dict[str, Any]:
    """Returns a checkpoint's dictionary. Its tensors are memory-mapped if the format allows it: each rank reads what it
    owns.

    Raises:
        CheckpointError: it is damaged, no checkpoint, or has objects that `weights_only` does not load.
    """
    remedy = "give weights_only=False to the Trainer's method"
    loaded = load_mapped(path, weights_only=weights_only, map_location=map_location, remedy=remedy)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} is no checkpoint, or is damaged (it holds a {type(loaded).__name__}); give one that a Trainer "
            "has saved"
        )
    return dict(loaded)


def check_lightnings(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Checks that a Trainer has saved this dictionary. Raises CheckpointError."""
    if _VERSION not in checkpoint:
        keys = ", ".join(map(str, list(checkpoint)[:5]))
        raise CheckpointError(
            f"{path} is not a Lightning checkpoint: it has the keys {keys or 'of an empty dictionary'} and no "
            f"{_VERSION!r}, so nothing was loaded; give a file that a Trainer has saved"
        )
