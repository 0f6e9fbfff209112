"""Verified reads of a sharded checkpoint: its folder as a whole, and each of its files, compared with their checksums.

I1: every byte of every tensor is in the list of some rank; otherwise opening the folder raises.
I2: no byte is returned before the range in which it was written is compared with its checksum.
I3: what opening reads (index, headers, lists of ranges, Lightning's dictionary) is of one save and as it was written
    (index.py, I1). Formats 1 and 2 guarantee that for tensors' bytes only; there, known facts must agree: each file is
    what the index calls it, slots have the names and shapes of parameters, the dictionary has its own checksums
    (CRC-32) and the step of the index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.archive import PIECE_BYTES, Archive
from lightning_ptm.storage.index import (
    INDEX,
    LIGHTNING,
    PARAMETERS,
    SEALED_SINCE,
    Index,
    Seal,
    StateFile,
    all_ranges,
    check_seal,
    read_index,
)
from lightning_ptm.storage.ranges import Range, read_range, read_ranges
from lightning_ptm.storage.tensors import Stored, read_layout
from lightning_ptm.storage.user_errors import short


class CheckedFolder:
    """A sharded checkpoint that was checked when it was opened. Keeps no file open.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it is incomplete, damaged, of several saves, or of a newer format version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: Index = read_index(path)
        ranges = all_ranges(path, self.index)
        self.files = {file.name: CheckedFile(path, file, ranges[file.name], self.index) for file in self.index.files}
        self._check_names()
        if self.sealed:
            check_seal(path / LIGHTNING, Seal.of_file(path / LIGHTNING), self.index)
        else:
            Archive(path / LIGHTNING).check()

    @property
    def sealed(self) -> bool:
        """Whether checksums cover every byte of the checkpoint, the index included. Older format versions cover the
        tensors only."""
        return self.index.version >= SEALED_SINCE

    def check_dictionary(self, dictionary: Mapping[str, Any]) -> None:
        """Checks that Lightning's dictionary, read from the folder, agrees with the index.

        Raises:
            CheckpointError: it does not.
        """
        path, saved = self.path / LIGHTNING, dictionary.get("optimizer_states") or ()
        step = dictionary.get("global_step", 0)
        if step != self.index.step:
            raise CheckpointError(
                f"{path} is of step {short(step)} and {INDEX} in its folder of step {self.index.step}, so they are of "
                "two saves; use an earlier checkpoint"
            )
        if not isinstance(dictionary.get("state_dict", {}), Mapping):
            raise CheckpointError(
                f"{path} is damaged: its state_dict is a {type(dictionary.get('state_dict')).__name__}; use an "
                "earlier checkpoint"
            )
        well = isinstance(saved, (list, tuple)) and len(saved) == len(self.index.optimizers)
        # An optimizer without parameters needs no state: Lightning's mock optimizer has none.
        needed = (
            [state for state, known in zip(saved, self.index.optimizers, strict=True) if known.parameters]
            if well
            else ()
        )
        if self.index.optimizers and not (well and all(map(_is_state, needed))):
            raise CheckpointError(
                f"{path} does not have the states of the {len(self.index.optimizers)} optimizers that {INDEX} lists; "
                "it is damaged, or on_save_checkpoint has changed them: use an earlier checkpoint"
            )

    def _check_names(self) -> None:
        """Checks the names of tensors in each file against the index."""
        parameters: dict[str, Stored] = {}
        for file in self.index.files:
            layout = self.files[file.name].layout
            said = {key: layout.metadata.get(key, getattr(file, key)) for key in ("unit", "kind")}
            if said != {"unit": file.unit, "kind": file.kind}:
                raise self._contradiction(file, f"is {said['kind']} of {said['unit'] or 'the root'} by its header")
            for stored in layout.tensors if file.kind == PARAMETERS else ():
                if stored.name in parameters:
                    raise self._contradiction(file, f"has {stored.name}, which another file has, too")
                parameters[stored.name] = stored
        known = {name for optimizer in self.index.optimizers for name in optimizer.parameters}
        for file in self.index.files:
            for stored in self.files[file.name].layout.tensors if file.kind != PARAMETERS else ():
                if stored.name not in known or stored.name not in parameters:
                    raise self._contradiction(file, f"has {stored.name}, which is no parameter of an optimizer")
                # Optimizers that update whole parameters have states of other shapes; they exist in sealed folders
                # only.
                if not self.sealed and stored.shape != parameters[stored.name].shape:
                    raise self._contradiction(file, f"has {stored.name} in another shape than the parameter's")
        missing = sorted((set(self.index.parameters.values()) | known) - set(parameters))
        if missing:
            raise CheckpointError(
                f"{self.path} has no file with {', '.join(missing[:5])}; it is damaged, use an earlier checkpoint"
            )

    def _contradiction(self, file: StateFile, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / file.name} {what}, and {INDEX} calls it {file.kind} of {file.unit or 'the root'}; they are "
            f"damaged, or of two saves: use an earlier checkpoint"
        )


def _is_state(saved: Any) -> bool:
    """Returns whether a value is an optimizer's state in torch's form."""
    states = saved.get("state") if isinstance(saved, Mapping) else None
    return isinstance(states, Mapping) and all(isinstance(each, Mapping) for each in states.values())


class CheckedFile:
    """One safetensors file, whose bytes are compared with their checksums when they are read.

    Args:
        folder: the checkpoint's folder.
        file: the file's entry in the index.
        ranges: the ranges of the file that were written, in order.
        index: the checkpoint's index, which has the header's seal.

    Raises:
        CheckpointError: it is another file, was cut short, or has bytes that are in no rank's list.
    """

    def __init__(self, folder: Path, file: StateFile, ranges: Sequence[Range], index: Index) -> None:
        self.path = folder / file.name
        self.layout = read_layout(self.path)
        check_seal(self.path, Seal.of(self.layout.header), index)
        self._ranges = ranges
        self._starts = [each.start for each in ranges]
        position = len(self.layout.header)
        for each in ranges:
            if each.start != position:
                raise CheckpointError(
                    f"{self.path}: no rank's list has bytes {position} to {each.start}, so the checkpoint is damaged; "
                    "use an earlier checkpoint"
                )
            position = each.stop
        if position != self.layout.size_bytes or self.layout.size_bytes != file.size_bytes:
            raise CheckpointError(
                f"{self.path} has {self.layout.size_bytes} bytes, of {file.size_bytes} that were written; use an "
                "earlier checkpoint"
            )
        # The range that was read last: tensors are read in order, and neighbouring ones may be in one range.
        self._held: Range | None = None
        self._bytes = memoryview(bytearray())

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Compares the whole file with its checksums. `seen` is called with numbers of bytes read.

        Raises:
            CheckpointError: names the file, the tensor and the range that differ.
        """
        bad = read_ranges(self.path, self._ranges, seen)
        if bad is not None:
            raise self._damage(bad)

    def pieces(self, stored: Stored) -> Iterator[Tensor]:
        """Yields a tensor's elements in order, as 1-D tensors of at most PIECE_BYTES. Each is valid until the next is
        requested.

        Raises:
            CheckpointError: as `check`, for the ranges of this tensor.
        """
        buffer = memoryview(bytearray(min(PIECE_BYTES, stored.stop - stored.start)))
        with self.path.open("rb", buffering=0) as file:
            for start in range(stored.start, stored.stop, PIECE_BYTES):
                view = buffer[: min(PIECE_BYTES, stored.stop - start)]
                self._fill(file.fileno(), view, start)
                yield torch.frombuffer(view, dtype=stored.dtype)

    def free_buffer(self) -> None:
        """Frees the memory of the range that was read last."""
        self._held, self._bytes = None, memoryview(bytearray())

    def _fill(self, descriptor: int, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            each = self._ranges[bisect_right(self._starts, start + done) - 1]
            if each is not self._held:
                self._load_range(descriptor, each)
            count = min(each.stop - start - done, len(view) - done)
            begin = start + done - each.start
            view[done : done + count] = self._bytes[begin : begin + count]
            done += count

    def _load_range(self, descriptor: int, each: Range) -> None:
        size = each.stop - each.start
        if len(self._bytes) < size:
            self._bytes = memoryview(bytearray(size))
        self._held = None
        if not read_range(descriptor, self.path, each, self._bytes[:size]):
            raise self._damage(each)
        self._held = each

    def _damage(self, bad: Range) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: bytes {bad.start} to {bad.stop}, in {self.layout.tensor_at(bad.start)}, are not those that "
            "were written (their checksum differs); use an earlier checkpoint, and check that disk"
        )
