"""The index of a sharded checkpoint, and the ranks' lists of the ranges that they wrote.

I1: every byte of every file is under a checksum, and all files are of one save. The index begins with the checksum of
    its rest. Its seals are the checksums of Lightning's dictionary, of each safetensors file's header, and of the
    ranks' lists, which have the checksums of all other bytes. (Formats 1 and 2 have the lists only: see verified.py.)
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.ranges import Range, checksum_of
from lightning_ptm.storage.user_errors import (
    contents,
    entries,
    is_file,
    is_folder,
    items,
    number,
    parsed,
    regular,
    short,
    text,
    unread,
)
from lightning_ptm.storage.writer import SaveOps, failure

FORMAT = "lightning_ptm sharded checkpoint"
VERSION = 3
SEALED_SINCE = 3
"""The first format version in which everything is under one checksum (I1)."""
_DIGESTS: Mapping[int, Callable[[memoryview], int]] = {1: zlib.crc32, 2: checksum_of, 3: checksum_of}
"""Checksum functions by format version."""
_MOST_RANGE_BYTES = 1 << 30
"""Limit for ranges of a list that is read: writers' buffers were always a hundred times smaller, and a reader allocates
a buffer of a range's length."""
INDEX = "index.json"
LIGHTNING = "lightning.pt"
DCP_METADATA = ".metadata"
"""The file that torch.distributed.checkpoint writes last into its folders."""

PARTIAL = ".lightning_ptm-partial-"
PARAMETERS = "parameters"
"""The kind of states that parameters are; other kinds are slots of an optimizer."""
_OF_OPTIMIZER = " of optimizer "
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Seal:
    """Length and checksum of a file or of a part of it."""

    size_bytes: int
    checksum: int

    @staticmethod
    def of(content: bytes) -> Seal:
        return Seal(len(content), checksum_of(memoryview(content)))

    @staticmethod
    def of_file(path: Path) -> Seal:
        """Computes the seal of a file, which is read in pieces. Raises CheckpointError."""
        size, checksum = 0, xxhash.xxh3_64()
        try:
            with regular(path).open("rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    size += len(piece)
                    checksum.update(piece)
        except OSError as error:
            raise unread(path, error) from error
        return Seal(size, checksum.intdigest())


def kind_of(slot: str, optimizer: int | None) -> str:
    """Returns the kind of states of an optimizer's slot.

    Args:
        optimizer: number of the optimizer, for parameters that an earlier optimizer also has; None for the first
            optimizer of a parameter.
    """
    return slot if optimizer is None else f"{slot}{_OF_OPTIMIZER}{optimizer}"


def slot_of(kind: str) -> tuple[str, int | None]:
    """Returns the arguments of `kind_of` for a kind."""
    slot, found, number = kind.rpartition(_OF_OPTIMIZER)
    return (slot, int(number)) if found and number.isdecimal() else (kind, None)


@dataclass(frozen=True, slots=True)
class StateFile:
    """One safetensors file: its unit, and its kind of states (`PARAMETERS`, or see `kind_of`)."""

    name: str
    unit: str
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerIndex:
    """One optimizer: the name of its class, and the names of its parameters in its own order."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a sharded checkpoint's folder.

    Args:
        step: number of optimizer steps done.
        world_size: number of ranks that wrote the checkpoint.
        page_size: the run's, in bytes.
        writer: package and version.
        files: all safetensors files.
        parameters: tensor of each parameter name of the state dict (several names where weights are tied).
        state: all names of the state dict, in its order.
        optimizers: the optimizers; empty if only weights were saved.
        seals: by file name, seals of Lightning's dictionary, of the header of each file in `files`, and, once written,
            of each rank's list of ranges (I1). Older formats have none.
        version: format version of the folder.
    """

    step: int
    world_size: int
    page_size: int
    writer: str
    files: tuple[StateFile, ...]
    parameters: Mapping[str, str]
    state: tuple[str, ...]
    optimizers: tuple[OptimizerIndex, ...] = field(default=())
    seals: Mapping[str, Seal] = field(default_factory=dict)
    version: int = VERSION

    def slots_of(self, optimizer: int) -> Callable[[str, str], str | None]:
        """Returns a function of (kind, parameter name) that returns the slot of this optimizer whose states the files
        of that kind have for the parameter; None if they are another optimizer's or no optimizer's."""
        own = frozenset(self.optimizers[optimizer].parameters)
        earlier = {name for each in self.optimizers[:optimizer] for name in each.parameters}

        def slot(kind: str, parameter: str) -> str | None:
            name, of = slot_of(kind)
            ours = parameter not in earlier if of is None else of == optimizer
            return name if ours and kind != PARAMETERS and parameter in own else None

        return slot

    def write(self, folder: Path, ops: SaveOps | None = None) -> None:
        """Writes and syncs the index, as the last file, when all ranks have written theirs.

        Raises:
            CheckpointError: it could not be written.
        """
        lists = {name: Seal.of(contents(folder / name)) for name in map(ranges_name, range(self.world_size))}
        whole = asdict(replace(self, seals={**self.seals, **lists}))
        body = json.dumps({"format": FORMAT, **whole}, indent=1).encode().removeprefix(_OPENING)
        write_synced(folder / INDEX, _sealing_line(body) + body, ops)


_OPENING = b"{\n"


def _sealing_line(body: bytes) -> bytes:
    """Returns the beginning of an index, with the checksum of its rest `body`; both together are one JSON object."""
    return _OPENING + b' "checksum": "%016x",\n' % checksum_of(memoryview(body))


def is_sharded(path: Path) -> bool:
    """Returns whether the path is a complete sharded checkpoint."""
    return is_folder(path) and is_file(path / INDEX) and not path.name.startswith(PARTIAL)


def read_index(path: Path) -> Index:
    """Reads and checks a folder's index.

    Raises:
        CheckpointError: the folder is no sharded checkpoint, is incomplete, or of a newer format version.
    """
    if path.name.startswith(PARTIAL):
        raise CheckpointError(
            f"{path} is incomplete: the process that wrote it ended before it was finished; use an earlier checkpoint"
        )
    if is_folder(path) and is_file(path / DCP_METADATA) and not is_file(path / INDEX):
        raise CheckpointError(
            f"{path} was saved by torch.distributed.checkpoint (FSDP and others), and only its weights can be loaded, so "
            f"a run cannot continue from it; start a new one with AngelPTMStrategy(weights={str(path)!r})"
        )
    if is_folder(path) and not is_file(path / INDEX):
        raise CheckpointError(
            f"{path} is a folder without {INDEX}, so it is not a sharded checkpoint of lightning_ptm, and nothing "
            "was loaded; give the path of a checkpoint folder or file"
        )
    content = contents(path / INDEX)
    try:
        values = entries(parsed(content))
        sealed = "checksum" in values and content.startswith(_sealing_line(b"")[:-19])
        if sealed:
            body = content[len(_sealing_line(b"")) :]
            if content != _sealing_line(body) + body:
                raise ValueError("its checksum differs")
            del values["checksum"]
        if values.get("format") != FORMAT:
            raise ValueError(f"its format is {short(values.get('format'))}")
        version = number(values.get("version"), 1)
        if version > VERSION:
            raise CheckpointError(
                f"{path} has format version {version} and this lightning_ptm reads up to {VERSION}; update "
                "lightning_ptm"
            )
        if sealed is not (version >= SEALED_SINCE):
            raise ValueError(f"its format version {version} {'begins with a' if sealed else 'has no'} checksum")
        return _index(values, version)
    except ValueError as error:
        raise CheckpointError(f"{path / INDEX} is damaged ({error}); use an earlier checkpoint") from error


_KEYS = ("step", "world_size", "page_size", "writer", "files", "parameters", "state", "optimizers")


def _index(values: dict[str, Any], version: int) -> Index:
    """Returns the index for parsed JSON. Raises ValueError."""
    entries(values, ["format", "version", *_KEYS, *(["seals"] if version >= SEALED_SINCE else [])])
    files = [entries(each, ["name", "unit", "kind", "size_bytes"]) for each in items(values["files"])]
    index = Index(
        step=number(values["step"]),
        world_size=number(values["world_size"], 1),
        page_size=number(values["page_size"]),
        writer=text(values["writer"]),
        files=tuple(
            StateFile(_plain_name(each["name"]), text(each["unit"]), text(each["kind"]), number(each["size_bytes"]))
            for each in files
        ),
        parameters={name: text(tensor) for name, tensor in entries(values["parameters"]).items()},
        state=tuple(map(text, items(values["state"]))),
        optimizers=tuple(
            OptimizerIndex(text(each["name"]), tuple(map(text, items(each["parameters"]))))
            for each in (entries(each, ["name", "parameters"]) for each in items(values["optimizers"]))
        ),
        seals={
            name: Seal(number(each["size_bytes"]), number(each["checksum"], most=(1 << 64) - 1))
            for name, each in (
                (name, entries(each, ["size_bytes", "checksum"]))
                for name, each in entries(values.get("seals", {})).items()
            )
        },
        version=version,
    )
    names = {file.name for file in index.files}
    if len(names) < len(files) or len({(file.unit, file.kind) for file in index.files}) < len(files):
        raise ValueError("it has a file twice")
    if strange := sorted(set(index.parameters) - set(index.state)):
        raise ValueError(f"{short(strange[0])} is a parameter and not in the state dict")
    if len(set(index.state)) < len(index.state):
        raise ValueError("it has a name of the state dict twice")
    if version >= SEALED_SINCE:
        if len(index.seals) != 1 + len(names) + index.world_size:
            raise ValueError(f"it has {len(index.seals)} checksums for {len(names)} files of {index.world_size} ranks")
        entries(dict(index.seals), [LIGHTNING, *names, *map(ranges_name, range(index.world_size))])
    return index


def _plain_name(value: Any) -> str:
    """Returns the name of a safetensors file of this folder. Raises ValueError for paths to other folders."""
    name = text(value)
    if not name.endswith(".safetensors") or "/" in name or "\0" in name:
        raise ValueError(f"{short(name)} is no name of a safetensors file in that folder")
    return name


def check_seal(path: Path, found: Seal, index: Index) -> None:
    """Compares a file, or a safetensors file's header, with its seal, if the format version has seals (I1).

    Raises:
        CheckpointError: it is damaged, or of another save.
    """
    if index.version >= SEALED_SINCE and index.seals[path.name] != found:
        raise CheckpointError(
            f"{path} is damaged, or of another save than {INDEX} in its folder (its checksum differs); use an earlier "
            "checkpoint"
        )


def ranges_name(rank: int) -> str:
    """Returns the name of the file with a rank's list of ranges."""
    return f"ranges-{rank:05d}.json"


def write_ranges(folder: Path, rank: int, ranges: Sequence[Range], ops: SaveOps | None = None) -> None:
    """Writes and syncs the list of a rank's ranges, as the rank's last file: others take it as the sign of
    completion."""
    rows = [[each.file, each.start, each.stop, each.checksum] for each in ranges]
    path = folder / ranges_name(rank)
    temporary = path.with_suffix(".new")
    write_synced(temporary, json.dumps(rows, separators=(",", ":")).encode(), ops)
    try:
        os.replace(temporary, path)
    except OSError as error:
        raise failure(path, error) from error


def all_have_written(folder: Path, world_size: int) -> bool:
    """Returns whether every rank has written its list."""
    return all((folder / ranges_name(rank)).exists() for rank in range(world_size))


def all_ranges(folder: Path, index: Index) -> dict[str, list[Range]]:
    """Returns all ranges that were written, by file and in order.

    Raises:
        CheckpointError: a list is missing or damaged.
    """
    found: dict[str, list[Range]] = {file.name: [] for file in index.files}
    for rank in range(index.world_size):
        path = folder / ranges_name(rank)
        content = contents(path)
        check_seal(path, Seal.of(content), index)
        try:
            for row in items(parsed(content)):
                each = _range(items(row, 4), _DIGESTS[index.version])
                if each.file not in found:
                    raise ValueError(f"{short(each.file)} is no file of this checkpoint")
                found[each.file].append(each)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}); use an earlier checkpoint") from error
    for ranges in found.values():
        ranges.sort(key=lambda each: each.start)
    return found


def _range(row: list[Any], digest: Callable[[memoryview], int]) -> Range:
    start, stop = number(row[1]), number(row[2])
    if not start < stop <= start + _MOST_RANGE_BYTES:
        raise ValueError(f"bytes {start} to {stop} are no range that a writer writes at once")
    return Range(text(row[0]), start, stop, number(row[3], most=(1 << 64) - 1), digest)


def write_synced(path: Path, content: bytes, ops: SaveOps | None = None) -> None:
    """Writes a small file and syncs it.

    Raises:
        CheckpointError: it could not be written.
    """
    ops = ops or SaveOps()
    try:
        descriptor = ops.open(os.fspath(path), os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            done = 0
            while done < len(content):
                done += ops.pwritev(descriptor, [memoryview(content)[done:]], done)
            ops.fsync(descriptor)
        finally:
            ops.close(descriptor)
    except OSError as error:
        raise failure(path, error) from error
