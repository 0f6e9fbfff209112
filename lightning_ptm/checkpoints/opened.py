"""An open checkpoint of any format, to be described or read piece by piece, and the text that describes it.

I1: opening a checkpoint reads names, shapes and offsets, and of tensors only those in Lightning's dictionary of a
    folder (buffers). The description reads no more.
I2: the elements that `pieces` yields are those that were written, as far as the file has checksums; damage is an error
    with its place.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.archive import Archive, blocks
from lightning_ptm.storage.tensors import Stored

_LIGHTNING_OWN = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "optimizer_states"}


@dataclass(frozen=True, slots=True)
class InFile:
    """Place of a tensor in a safetensors file of a folder."""

    file: str
    stored: Stored


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model's state dict.

    Args:
        names: names in the state dict, in its order; several for tied weights.
        dtype, shape: as it was saved.
        unit: name of the unit; None if the checkpoint does not say.
        place: its elements: in a file of a folder, or a mapped tensor.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: str | None
    place: InFile | Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Properties of an optimizer that a format has besides the state in Lightning's dictionary.

    Args:
        name: of its class.
        parameters: how many it has.
        slot_bytes: bytes of its states outside of the dictionary, by slot.
    """

    name: str
    parameters: int
    slot_bytes: Mapping[str, int]


class Opened(abc.ABC):
    """An open checkpoint. Maps torch.save's file, and takes memory for one piece at most.

    Args:
        path: of the checkpoint.
        file: the file of torch.save with Lightning's dictionary.
        weights_only: load no object that could run code.

    Raises:
        CheckpointError: the file is damaged, or no checkpoint.
    """

    row_title: ClassVar[str]
    """Title of the table's rows: `unit`, or `names` that begin in the same way."""
    weights: tuple[Weight, ...]
    """The tensors of the model's state dict, in its order; a subclass sets them."""

    def __init__(self, path: Path, file: Path, *, weights_only: bool) -> None:
        self.path = path
        self.archive = Archive(file)
        self.dictionary: Mapping[str, Any] = _checked_dictionary(path, self.archive.load(weights_only=weights_only))
        self._archive_checked = False

    @property
    def state(self) -> Mapping[str, Any]:
        """The module's state in the dictionary."""
        state: Mapping[str, Any] = self.dictionary["state_dict"]
        return state

    @property
    def others(self) -> tuple[str, ...]:
        """Names of extra states of modules that are no tensors."""
        return tuple(name for name, value in self.state.items() if not isinstance(value, Tensor))

    @property
    def file_count(self) -> int:
        return 1

    @property
    def size_bytes(self) -> int:
        """Bytes of everything that has checksums."""
        return self.archive.size_bytes

    @property
    def has_checksums(self) -> bool:
        return self.archive.has_checksums

    def pieces(self, weight: Weight) -> Iterator[Tensor]:
        """Yields a weight's elements in order, as 1-D tensors of a few MiB. Each is valid until the next is requested.

        Raises:
            CheckpointError: it cannot be read, or is damaged (raised at the latest after the last piece).
        """
        assert isinstance(weight.place, Tensor)
        if not self._archive_checked:  # all of it: only torch knows which record has this tensor
            self.archive.check()
            self._archive_checked = True
        return (block.view(-1) for block in blocks(weight.place) if block.numel())

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Compares everything with its checksums. `seen` is called with numbers of bytes read.

        Raises:
            CheckpointError: names the file, the tensor and the range that differ.
        """
        self.archive.check(seen)
        self._archive_checked = True

    # -- in words -----------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The format, with sizes."""

    @property
    @abc.abstractmethod
    def writer(self) -> str:
        """The library and the run that wrote the checkpoint."""

    @property
    @abc.abstractmethod
    def verified(self) -> str:
        """Text that says what is verified if `check` has found no error."""

    @property
    def lightning(self) -> str:
        """The version of Lightning."""
        return f"Lightning {self.dictionary.get('pytorch-lightning_version', 'of an unknown version')}"

    @abc.abstractmethod
    def groups(self) -> Mapping[str, Sequence[Weight]]:
        """Returns all weights, by what they are."""

    @abc.abstractmethod
    def rows(self) -> Iterator[tuple[str, Weight]]:
        """Yields each weight with the row of the table that it belongs to, row by row."""

    def slots(self) -> Iterator[tuple[str, str, int]]:
        """Yields (row, slot, bytes) of optimizer states outside of the dictionary."""
        return iter(())

    def optimizer(self, number: int) -> OptimizerFacts | None:
        """Returns what is known of an optimizer besides its state in the dictionary."""
        return None


def weights_in(path: Path, state: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Returns the tensors of a state dict.

    Raises:
        CheckpointError: one is sparse or quantized.
    """
    names: dict[Any, list[str]] = {}
    found: dict[Any, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            _check_plain(path, name, value)
            # Names are tied if they have the same elements in the same order; other tensors may share their storage.
            key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else name
            names.setdefault(key, []).append(name)
            found.setdefault(key, value)
    return tuple(Weight(tuple(names[key]), each.dtype, tuple(each.shape), None, each) for key, each in found.items())


def _checked_dictionary(path: Path, loaded: Any) -> Mapping[str, Any]:
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        return loaded
    keys = ", ".join(map(str, list(loaded)[:5])) if isinstance(loaded, Mapping) else ""
    holds = f"a dictionary with {keys}..." if keys else f"an object of {type(loaded).__name__}"
    raise CheckpointError(
        f"{path} has {holds}, and a checkpoint of Lightning has a 'state_dict'; give one that a Trainer has saved"
    )


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{path}: {name} has layout {tensor.layout} and dtype {tensor.dtype}, and only plain tensors can be "
            "exported; convert it before it is saved"
        )


# -- in words ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """A row of the table."""

    tensors: int = 0
    numel: int = 0
    size_bytes: int = 0
    dtypes: dict[torch.dtype, None] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)

    def add(self, weight: Weight) -> None:
        self.tensors += 1
        self.numel += weight.numel
        self.size_bytes += weight.size_bytes
        self.dtypes[weight.dtype] = None


def describe(opened: Opened) -> str:
    """Returns a text without a final newline: facts, a table of the checkpoint's units, its optimizers."""
    parts = _parts(opened)
    slots = list(dict.fromkeys(slot for part in parts.values() for slot in part.slots))
    rows = [[opened.row_title, "tensors", "elements", "dtype", "weights", *slots]]
    for name, part in parts.items():
        rows.append([name, *_cells(part), *(format_bytes(part.slots[s]) if s in part.slots else "" for s in slots)])
    return "\n".join([*_aligned(_facts(opened), "<<"), "", *_aligned(rows, "<>><" + ">" * (1 + len(slots)))])


def _cells(part: _Part) -> list[str]:
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in part.dtypes)
    return [str(part.tensors), f"{part.numel:,}", dtypes, format_bytes(part.size_bytes)]


def _facts(opened: Opened) -> list[list[str]]:
    dictionary = opened.dictionary
    facts = [
        ["checkpoint", str(opened.path)],
        ["kind", opened.kind],
        ["written by", opened.writer],
        ["step", f"{dictionary.get('global_step', 'unknown')}, in epoch {dictionary.get('epoch', 'unknown')}"],
        *_weights(opened),
    ]
    for weight in opened.weights:
        facts += [["tied", f"{name} is {weight.names[0]}"] for name in weight.names[1:]]
    for place, text in enumerate(_optimizers(opened)):
        facts.append([f"optimizer {place}" if place else "optimizer", text])
    if not dictionary.get("optimizer_states"):
        facts.append(["optimizer", "none: only weights were saved"])
    if opened.others:
        facts.append(["extra state", ", ".join(opened.others)])
    rest = [str(key) for key in dictionary if key not in _LIGHTNING_OWN]
    return [*facts, ["also", ", ".join(rest)]] if rest else facts


def _weights(opened: Opened) -> list[list[str]]:
    return [
        [
            name,
            f"{sum(weight.numel for weight in group):,} in {len(group)} tensor{'s' * (len(group) != 1)}, "
            f"{format_bytes(sum(weight.size_bytes for weight in group))}",
        ]
        for name, group in opened.groups().items()
        if group or name == "parameters"
    ]


def _optimizers(opened: Opened) -> list[str]:
    """Returns a text for each optimizer: its class if known, and the bytes of each slot."""
    texts = []
    for place, saved in enumerate(opened.dictionary.get("optimizer_states") or ()):
        try:
            sizes = _tensor_bytes(saved["state"].values())
            count = sum(len(group["params"]) for group in saved["param_groups"])
        except (AttributeError, KeyError, TypeError):
            texts.append("its state is not in the form of torch's optimizers")
            continue
        name, known = "of an unknown class", opened.optimizer(place)
        if known is not None:
            name, count = known.name, known.parameters
            for slot, size in known.slot_bytes.items():
                sizes[slot] = sizes.get(slot, 0) + size
        slots = ", ".join(f"{slot} {format_bytes(size)}" for slot, size in sizes.items())
        texts.append(f"{name}, for {count} parameters: {slots or 'no state'}")
    return texts


def _tensor_bytes(states: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for values in states:
        for slot, value in values.items():
            if isinstance(value, Tensor):
                sizes[slot] = sizes.get(slot, 0) + value.numel() * value.itemsize
    return sizes


def _parts(opened: Opened) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for name, weight in opened.rows():
        parts.setdefault(name, _Part()).add(weight)
    for name, slot, size in opened.slots():
        slots = parts.setdefault(name, _Part()).slots
        slots[slot] = slots.get(slot, 0) + size
    return parts


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
