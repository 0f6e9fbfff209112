"""`Format`: interface of the checkpoint formats, one class per format. formats.py has the table of formats, and
chooses.

A checkpoint has the states of the module, of the optimizers, and of Lightning's loops. Lightning collects them in one
dictionary: it asks for the module's state and each optimizer's, and then has the dictionary written to a path. A format
decides what of them is in the dictionary, and what is written from pages.

Imports no Lightning, like the classes that implement it: `lightning-ptm inspect` and `export` answer without it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch.optim import Optimizer

    from lightning_ptm.checkpoints.after_run import EndedRun
    from lightning_ptm.checkpoints.opened import Opened
    from lightning_ptm.checkpoints.saving import Saving
    from lightning_ptm.progress import Progress
    from lightning_ptm.runtime.engine.engine import Engine
    from lightning_ptm.storage.writer import SaveOps


class Files(Protocol):
    """Single files, written and read by the Trainer's CheckpointIO, which may be a user's plugin."""

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Writes a file on rank 0; other ranks return at once."""

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Reads a file."""

    def remove(self, path: Path) -> None:
        """Removes a file, or a link."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """A checkpoint to be written.

    Args:
        checkpoint: Lightning's dictionary, with the states that the format returned for it.
        path: where to write it.
        module, optimizers: what the states are of.
        files: for formats with single files.
        storage_options: the argument of `Trainer.save_checkpoint`, for `files`.
        in_background: write in a background thread; training may go on.
        ranks_here: number of ranks that share this machine's RAM.
        ops: file calls of formats that write by themselves, for tests.
    """

    checkpoint: dict[str, Any]
    path: str | Path
    module: LightningModule
    optimizers: Sequence[Optimizer]
    files: Files
    storage_options: Any = None
    in_background: bool = False
    ranks_here: int = 1
    ops: SaveOps | None = None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of reading a checkpoint.

    Args:
        files: for formats with single files.
        weights_only: load no object that could run code; None: as torch decides.
        optimizers: include the optimizers' states.
        share: which of its files this rank verifies, in formats with several.
        together: returns a context that raises an exception of one rank on all, for formats of which each rank verifies
            a share.
        progress: returns the progress bars of the verification; None shows none.
    """

    files: Files
    weights_only: bool | None
    optimizers: bool = True
    share: slice = field(default_factory=lambda: slice(None))
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    progress: Callable[[], Progress | None] = lambda: None


class Format(abc.ABC):
    """A format of checkpoints. Has no state. Methods with an engine argument are collective."""

    from_pages: ClassVar[bool]
    """Whether ranks write their own pages; otherwise rank 0 writes a state dict that is gathered from all pages. The same
    as `Checkpoints.from_pages` for its name there."""

    # -- paths --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether a path has this format, by its name and kind; reads nothing."""

    @abc.abstractmethod
    def completed_file(self, path: Path) -> Path:
        """The file that is written last: if it exists the checkpoint is complete, and its time is the checkpoint's."""

    @abc.abstractmethod
    def remove(self, path: Path, files: Files) -> None:
        """Removes a checkpoint, so that a partly removed one is never taken for a whole one."""

    # -- reading ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def open(self, path: Path, *, weights_only: bool) -> Opened:
        """Opens a checkpoint, to be described without reading its tensors, or read piece by piece.

        Raises:
            CheckpointError: it is damaged, incomplete, or of another program.
        """

    @abc.abstractmethod
    def load(self, path: str | Path, how: LoadOptions) -> dict[str, Any]:
        """Reads a checkpoint as Lightning's dictionary, with whole tensors that are read from disk when they are needed.

        Raises:
            CheckpointError: it is damaged, incomplete, or of another program.
        """

    # -- writing, in a run --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def module_state(self, engine: Engine, module: LightningModule, *, keep: bool) -> dict[str, Any]:
        """Returns the module's state for Lightning's dictionary.

        Args:
            keep: whether this rank writes the dictionary; others may return an empty state.
        """

    @abc.abstractmethod
    def optimizer_state(self, engine: Engine, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
        """Returns an optimizer's state for Lightning's dictionary. Args: as for `module_state`."""

    @abc.abstractmethod
    def check(self, save: SaveOptions) -> None:
        """Checks the arguments of a save before it begins. Raises ConfigError."""

    @abc.abstractmethod
    def write(self, engine: Engine, save: SaveOptions) -> Saving | None:
        """Writes a checkpoint; what was at its path before is unchanged until the new one is complete.

        Returns:
            The save in progress, if it goes on in the background.

        Raises:
            CheckpointError: on all ranks, if any could not begin, or write.
        """

    # -- writing after a run, when the states are in the module and the optimizers again; only on rank 0 --------------

    @abc.abstractmethod
    def module_state_after_run(self, module: LightningModule) -> dict[str, Any]:
        """Returns the module's state for Lightning's dictionary."""

    @abc.abstractmethod
    def optimizer_state_after_run(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state for Lightning's dictionary."""

    @abc.abstractmethod
    def write_after_run(self, ended: EndedRun, save: SaveOptions) -> None:
        """Writes a checkpoint. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file.

    Args:
        read: returns it as a view of the mapped file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class WeightFormat(abc.ABC):
    """A format from which a run can take its first weights (`weights=`). Has no state."""

    @abc.abstractmethod
    def tensors(self, path: Path, share: slice, progress: Progress | None) -> Mapping[str, FileTensor]:
        """Lists the weights of a path by name; they are read when they are needed.

        Args:
            share: which of its files this rank verifies, in formats with several that have checksums.
            progress: progress bars of the verification; None shows none.

        Raises:
            ConfigError, CheckpointError: there are none, or they are damaged.
        """
