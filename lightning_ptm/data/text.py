"""Text as bytes, without a download: the Python standard library's own sources, or any folder of text files.

Which file belongs to which split depends on the names of the files and on nothing else: not on the machine, the seed or
the rank. I1: a file's bytes are in one split only, unless the text is one file. I2: no byte is a target in two windows.
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
"""Caches and installed packages: what they hold differs from machine to machine."""


TEXT_END = 0
"""The byte that ends each file of a text: it is in no text, so the model can learn that what follows is another one."""


def encode(text: str | bytes) -> Tensor:
    """A text as tokens, one a byte (UTF-8): int64 of shape (bytes,). Bytes that Python has read from a command line as
    surrogates, for they are no UTF-8, are these bytes again."""
    given = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return _as_tensor(bytearray(given)).long()


def decode(tokens: Tensor) -> bytes:
    """The inverse: the bytes of tokens of any shape, which need not be valid UTF-8."""
    return bytes(tokens.flatten().tolist())


class Samples(Dataset[tuple[Tensor, Tensor]], ABC):
    """So many samples: pairs of what a model reads and what it is to predict, for a shuffling sampler to pick from."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""


class Windows(Samples):
    """Successive windows of a text.

    Item i is (tokens, targets), both int64 of shape (sequence_length,): the bytes from `i * sequence_length`, and the
    same moved on by one. What is left at the end, shorter than a window, is not used.

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
    """Trains on the bytes of text files, split by file into training and validation text.

    All text is read into memory once per rank, one byte a token. Test and predict use the validation text.

    A subclass with tokens of its own says so: `vocab_size = 27` in the class, or `self.vocab_size`, `self.tokens_used` and
    `self.input_length` set in its `__init__`. A model that knows fewer tokens than `tokens_used`, or reads fewer than
    `input_length`, refuses it.

    Args:
        path: A folder, searched with its subfolders, or one file, whose end is then the validation text. By default the
            sources of the running Python's standard library (about 30 MB; another text in another Python version).
        suffixes: Endings of the files to read in a folder.
        sequence_length: Bytes of a window; at most the model's own.
        batch_size: Windows of a batch, per rank.
        validation_fraction: Part of the files kept for validation, at least one.
        num_workers: Worker processes of each loader; reading from memory needs none.

    Raises:
        ConfigError: in `setup`, when there is no text, or not enough for one batch; here, for sizes below 1.
    """

    vocab_size: int = 256
    """Number of tokens to build a model with."""

    loss_unit = "nats/byte"
    """What a model's loss on these samples is measured in."""

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
                f"TextBytes got sequence_length={sequence_length}, batch_size={batch_size}; both start at 1"
            )
        if not 0.0 < validation_fraction < 1.0:
            raise ConfigError(f"TextBytes got validation_fraction={validation_fraction}; it lies between 0 and 1")
        self.save_hyperparameters()
        self.path = Path(path).expanduser() if path is not None else None
        self.suffixes = (".py",) if path is None else tuple([suffixes] if isinstance(suffixes, str) else suffixes)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.num_workers = num_workers
        # Written by setup.
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
        """What loggers are told beside the model's: `data/sequence_length` where the model has another `sequence_length`, as
        Lightning refuses two values of one name. `hparams` has the names of `__init__`."""
        model = getattr(self.trainer, "lightning_module", None)
        theirs = {} if model is None else model.hparams_initial
        return AttributeDict(
            {
                f"data/{name}" if name in theirs and _differ(theirs[name], value) else name: value
                for name, value in super().hparams_initial.items()
            }
        )

    @functools.cached_property  # and no property, so that a subclass may set it
    def tokens_used(self) -> int:
        """The highest token of a sample, plus one; a model has to know as many, or more."""
        return self.vocab_size

    @functools.cached_property
    def input_length(self) -> int:
        """Tokens of a sample that the model reads."""
        return self.sequence_length

    @property
    def unigram_loss(self) -> float:
        """Validation loss, in nats per byte, of a model that knows how often each byte occurs and nothing else.

        Its frequencies are those of the training text, each count plus one. A model that has learnt anything is below.
        """
        train_counts = torch.bincount(self.train_text, minlength=256).double() + 1.0
        validation_counts = torch.bincount(self.validation_text, minlength=256).double()
        nats = -(train_counts / train_counts.sum()).log()
        return float((validation_counts * nats).sum() / validation_counts.sum())

    def windows(self, text: Tensor, *, training: bool) -> Samples:
        """The samples of a text."""
        return Windows(text, self.sequence_length)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled windows of the training text; a last, smaller batch is dropped so that steps are alike."""
        windows = self.windows(self.train_text, training=True)
        if len(windows) < self.batch_size:
            raise ConfigError(
                f"{self._root()} has {len(windows)} windows of {self.sequence_length} bytes to train on, a batch takes "
                f"{self.batch_size}; give more text, or lower batch_size or sequence_length"
            )
        return DataLoader(
            windows, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Windows of the validation text, in order."""
        windows = self.windows(self.validation_text, training=False)
        # By name: Lightning makes predict's loader anew and would give the size twice.
        return DataLoader(windows, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The validation text."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The validation text."""
        return self.val_dataloader()

    # ---- reading ----

    def _root(self) -> Path:
        return self.path if self.path is not None else Path(sysconfig.get_path("stdlib"))

    def _read(self) -> tuple[Tensor, Tensor]:
        """The training text and the validation text, uint8."""
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
    """As Lightning compares them."""
    return type(one) is not type(other) or bool(one != other)


def find_files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files under `root` that end in one of `suffixes`, outside caches and installed packages, in order of their names.

    Raises:
        ConfigError: no such folder, or no such file in it.
    """
    if not root.is_dir():
        raise ConfigError(
            f"{root} is no folder and no file, so there is no text to train on; check data.init_args.path"
        )
    files = sorted(
        (path for path in root.rglob("*") if path.suffix in suffixes and path.is_file()),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    files = [path for path in files if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1])]
    if not files:
        raise ConfigError(
            f"{root} holds no file that ends in {', '.join(suffixes)}, so there is no text to train on; "
            "set data.init_args.path or data.init_args.suffixes"
        )
    return files


def split_files(files: Sequence[Path], *, root: Path, validation_fraction: float) -> tuple[list[Path], list[Path]]:
    """Divides files into training and validation files by a hash of their names relative to `root`.

    Both lists are in the order of that hash: neighbours in a text are not neighbours in the folder, and the first part
    of the validation text is a fair sample of it.

    Raises:
        ConfigError: fewer than two files.
    """
    if len(files) < 2:
        raise ConfigError(
            f"{root} holds one file to train on and validation takes another; give that file itself as the path "
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
    # Not bytes: torch warns about tensors over memory that must not be written. frombuffer refuses an empty buffer.
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
