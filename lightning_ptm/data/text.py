"""Data module of text as bytes, without a download: the Python standard library's sources, or any folder of text files.

The split of a file depends only on the names of the files, not on the machine, the seed or the rank. I1: a file's bytes are
in one split only, unless the text is one file. I2: no byte is a target in two windows.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ptm.errors import ConfigError

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Folders of caches and installed packages, whose contents differ between machines."""


TEXT_END = 0
"""Byte that ends each file of a text: it occurs in no text, so the model can learn that another text follows."""


def encode(text: str | bytes) -> Tensor:
    """Returns a text as tokens, one per byte of UTF-8: int64 of shape (bytes,).

    Surrogates, as which Python reads bytes of a command line that are not UTF-8, become the original bytes.
    """
    given = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return _as_tensor(bytearray(given)).long()


def decode(tokens: Tensor) -> bytes:
    """Returns the bytes of tokens of any shape (the inverse of `encode`); they need not be valid UTF-8."""
    return bytes(tokens.flatten().tolist())


class Samples(Dataset[tuple[Tensor, Tensor]], ABC):
    """Map-style dataset of samples, pairs of input tokens and target tokens."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""


class Windows(Samples):
    """Successive windows of a text.

    Item i is (tokens, targets), both int64 of shape (sequence_length,): the bytes from `i * sequence_length` on, and those
    one byte later. A rest at the end that is shorter than a window is not used.

    Args:
        text: uint8, 1-D, longer than `sequence_length`. Not copied.
        sequence_length: bytes of a window.
    """

    def __init__(self, text: Tensor, sequence_length: int) -> None:
        self.text = text
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (self.text.numel() - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        window = self.text[start : start + self.sequence_length + 1].long()
        return window[:-1], window[1:]


class TextBytes(LightningDataModule):
    """Data module of the bytes of text files, split by file into training and validation text.

    All text is read into memory once per rank, one token per byte. Test and predict use the validation text.

    A subclass with other tokens defines them: `vocab_size = 27` in the class, or `self.vocab_size`, `self.tokens_used` and
    `self.input_length` in its `__init__`. A model that knows fewer than `tokens_used` tokens, or reads fewer than
    `input_length`, refuses the data module.

    Args:
        path: A folder, searched with its subfolders, or one file, whose end is then the validation text. By default the
            sources of the running Python's standard library (about 30 MB; another text in another Python version).
        suffixes: Suffixes of the files to read in a folder.
        sequence_length: Bytes of a window; at most the model's own.
        batch_size: Windows of a batch, per rank.
        validation_fraction: Fraction of the files for validation, at least one file.
        num_workers: Worker processes of each loader; reading from memory needs none.

    Raises:
        ConfigError: a size is below 1; in `setup`, there is no text, or not enough for one batch.
    """

    vocab_size: int = 256
    """Number of tokens with which to build a model."""

    loss_unit = "nats/byte"
    """Unit of a model's loss on these samples."""

    def __init__(
        self,
        path: str | None = None,
        suffixes: Sequence[str] = (".py", ".txt", ".md", ".rst"),
        sequence_length: int = 256,
        batch_size: int = 16,
        validation_fraction: float = 0.05,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if sequence_length < 1 or batch_size < 1:
            raise ConfigError(
                f"TextBytes got sequence_length={sequence_length}, batch_size={batch_size}, with which there is no batch; "
                f"give 1 or more for both"
            )
        if not 0.0 < validation_fraction < 1.0:
            raise ConfigError(
                f"TextBytes got validation_fraction={validation_fraction}, which leaves no training or no validation text; "
                f"give a fraction between 0 and 1"
            )
        self.save_hyperparameters()
        self.path = Path(path).expanduser() if path is not None else None
        self.suffixes = (".py",) if path is None else tuple([suffixes] if isinstance(suffixes, str) else suffixes)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.num_workers = num_workers
        # Set by `setup`.
        self.train_text = torch.empty(0, dtype=torch.uint8)
        self.validation_text = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str) -> None:
        """Reads the text, once."""
        if self.train_text.numel() > 0:
            return
        train_text, validation_text = self._read()
        for split, text in (("training", train_text), ("validation", validation_text)):
            if text.numel() <= self.sequence_length:
                raise ConfigError(
                    f"{self._root()} has {text.numel()} bytes of {split} text, one window takes "
                    f"{self.sequence_length + 1}; give more text, a shorter sequence_length or another "
                    "validation_fraction"
                )
        self.train_text, self.validation_text = train_text, validation_text

    @property
    def hparams_initial(self) -> AttributeDict:
        """Hyper-parameters for loggers. Names that the model has with another value get the prefix `data/`.

        Lightning refuses two values of one name. `hparams` has the names of `__init__`.
        """
        model = getattr(self.trainer, "lightning_module", None)
        theirs = {} if model is None else model.hparams_initial
        return AttributeDict(
            {
                f"data/{name}" if name in theirs and _differ(theirs[name], value) else name: value
                for name, value in super().hparams_initial.items()
            }
        )

    @functools.cached_property  # not a property, so that a subclass may set it
    def tokens_used(self) -> int:
        """The highest token of a sample, plus one; a model must know at least as many tokens."""
        return self.vocab_size

    @functools.cached_property
    def input_length(self) -> int:
        """Number of input tokens of a sample."""
        return self.sequence_length

    @property
    def unigram_loss(self) -> float:
        """Validation loss, in nats per byte, of a model that knows only the frequency of each byte.

        The frequencies are those of the training text, each count plus one. A model that has learnt anything has a lower
        loss.
        """
        train_counts = torch.bincount(self.train_text, minlength=256).double() + 1.0
        validation_counts = torch.bincount(self.validation_text, minlength=256).double()
        nats = -(train_counts / train_counts.sum()).log()
        return float((validation_counts * nats).sum() / validation_counts.sum())

    def windows(self, text: Tensor, *, training: bool) -> Samples:
        """Returns the samples of a text."""
        return Windows(text, self.sequence_length)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Returns shuffled windows of the training text; a last, smaller batch is dropped, so that all steps are alike."""
        windows = self.windows(self.train_text, training=True)
        if len(windows) < self.batch_size:
            raise ConfigError(
                f"{self._root()} has {len(windows)} windows of {self.sequence_length} bytes to train on, a batch needs "
                f"{self.batch_size}; give more text, or lower batch_size or sequence_length"
            )
        return DataLoader(
            windows, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Returns windows of the validation text, in order."""
        windows = self.windows(self.validation_text, training=False)
        # batch_size by name: Lightning makes predict's loader again and would pass a positional one twice.
        return DataLoader(windows, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Returns the loader of the validation text."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Returns the loader of the validation text."""
        return self.val_dataloader()

    # ---- reading ----

    def _root(self) -> Path:
        return self.path if self.path is not None else Path(sysconfig.get_path("stdlib"))

    def _read(self) -> tuple[Tensor, Tensor]:
        """Reads the training text and the validation text, uint8."""
        root = self._root()
        if root.is_file():
            text = _as_tensor(bytearray(root.read_bytes()))
            cut = text.numel() - math.ceil(text.numel() * self.validation_fraction)
            return text[:cut], text[cut:]
        train_files, validation_files = split_files(
            find_files(root, self.suffixes), root=root, validation_fraction=self.validation_fraction
        )
        return _join(train_files), _join(validation_files)


def _differ(one: Any, other: Any) -> bool:
    """Whether two hyper-parameters differ, by Lightning's comparison."""
    return type(one) is not type(other) or bool(one != other)


def find_files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """Returns the files under `root` with one of `suffixes`, without caches and installed packages, in order of names.

    Raises:
        ConfigError: there is no such folder, or no such file in it.
    """
    if not root.is_dir():
        raise ConfigError(
            f"{root} is neither a folder nor a file, so there is no text to train on; check data.init_args.path"
        )
    files = sorted(
        (path for path in root.rglob("*") if path.suffix in suffixes and path.is_file()),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    files = [path for path in files if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1])]
    if not files:
        raise ConfigError(
            f"{root} has no file that ends in {', '.join(suffixes)}, so there is no text to train on; "
            "set data.init_args.path or data.init_args.suffixes"
        )
    return files


def split_files(files: Sequence[Path], *, root: Path, validation_fraction: float) -> tuple[list[Path], list[Path]]:
    """Divides files into training and validation files by a hash of their names relative to `root`.

    Both lists are in the order of that hash: neighbours in the text are not neighbours in the folder, and the beginning of
    the validation text is a fair sample of it.

    Raises:
        ConfigError: there are fewer than two files.
    """
    if len(files) < 2:
        raise ConfigError(
            f"{root} has a single file, and training and validation need one each; give that file itself as the path "
            "(its end is then the validation text)"
        )

    def name_hash(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode(errors="surrogateescape")).digest()

    ordered = sorted(files, key=name_hash)
    validation_count = min(len(files) - 1, math.ceil(len(files) * validation_fraction))
    return ordered[validation_count:], ordered[:validation_count]


def _join(files: Sequence[Path]) -> Tensor:
    return _as_tensor(bytearray().join(path.read_bytes() + bytes([TEXT_END]) for path in files))


def _as_tensor(text: bytearray) -> Tensor:
    # A bytearray, as torch warns about tensors over read-only memory. frombuffer refuses an empty buffer.
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
