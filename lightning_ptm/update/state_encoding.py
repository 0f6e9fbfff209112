"""Encodings of optimizer states in bf16 or 8 bits, and the noise of their stochastic rounding.

Owns the format of encoded slots: dtype, number and order of elements in pages. The optimizer itself never sees it: an update
decodes a chunk, runs the user's class on fp32 elements, and encodes the result.
I1: decoded values encode to the same bytes, with any noise. So a state that no step changes keeps its bytes, and a checkpoint
    has the values that the optimizer has.
I2: noise is a function of the parameter, the slot, the element in the parameter and the step. So threads, tiers, chunks
    and ranks do not change it, a run resumed from a checkpoint draws the same noise, and no random generator's state moves.
I3: the codes of a block belong to one parameter (block_codec.py): blocks begin where parameters and pieces do.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.block_codec import BLOCK_NUMEL, NOISE, SCALE_DTYPE, BlockCodec
from lightning_ptm.planning.layout import round_up
from lightning_ptm.terms import BLOCK_BYTES, Tier

if TYPE_CHECKING:
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.planning.layout import FlatLayout

VALUES_DTYPE = torch.float32
"""Dtype of decoded values."""
_STRIP_NUMEL = 1 << 18
"""Elements that are encoded together: their noise and intermediate results stay in a core's cache."""
_TILE_NUMEL = 1 << 18
"""Elements of a parameter whose noise is one stretch of the noise table; the stretch's offset is drawn for each tile."""
_SHORT_NOISE = 1 << 16
_BF16_NAN = 0x7FC0


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding(abc.ABC):
    """Encoding of one slot of one shard.

    Args:
        values_numel: elements of the shard.
        chunk_numel: elements that an update, or a save, moves together (`terms.chunk_numel`).
    """

    values_numel: int
    chunk_numel: int

    dtype: ClassVar[torch.dtype]
    """Dtype of the stored elements."""
    noise: ClassVar[int]
    """Upper bound of the noise, which is uniform in [0, noise)."""

    @property
    @abc.abstractmethod
    def numel(self) -> int:
        """Stored elements of the shard."""

    @abc.abstractmethod
    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, number) of the stored elements of a chunk, elements [start, start + numel) of the shard."""

    @abc.abstractmethod
    def encode(
        self, values: Tensor, stored: Tensor, noise: Tensor | None, start: int, stop: int, codec: BlockCodec
    ) -> None:
        """Encodes elements [start, stop) of a chunk into `stored`.

        Args:
            values: (n,), fp32, the chunk's elements.
            stored: the chunk's stored elements.
            noise: (stop - start,), int32; None: round to nearest.
        """

    @abc.abstractmethod
    def decode(self, stored: Tensor, values: Tensor, codec: BlockCodec) -> None:
        """Decodes all elements of a chunk into `values`. Args: as in `encode`."""


class Bf16(Encoding):
    """Encoding as bf16, the upper half of an fp32 number."""

    __slots__ = ()
    dtype = torch.bfloat16
    noise = _SHORT_NOISE

    @property
    def numel(self) -> int:
        return self.values_numel

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        return start, numel

    def encode(
        self, values: Tensor, stored: Tensor, noise: Tensor | None, start: int, stop: int, codec: BlockCodec
    ) -> None:
        if noise is None:
            stored[start:stop].copy_(values[start:stop])
            return
        # The carry from lower half plus noise into the upper half is the rounding.
        rounded = torch.add(values[start:stop].view(torch.int32), noise, out=codec.scratch(values.device, stop - start))
        rounded >>= 16
        if not in_ram(values) or values[start:stop].sum().isnan():
            rounded.masked_fill_(values[start:stop].isnan(), _BF16_NAN)  # else the carry may turn a NaN into 0
        stored[start:stop].view(torch.int16).copy_(rounded)

    def decode(self, stored: Tensor, values: Tensor, codec: BlockCodec) -> None:
        values.copy_(stored)


class Int8(Encoding):
    """Encoding as 8-bit codes: the codes of all elements of a chunk, then the scales of all its blocks."""

    __slots__ = ()
    dtype = torch.uint8
    noise = NOISE

    @property
    def numel(self) -> int:
        last = self.values_numel % self.chunk_numel
        return sum(self.stretch(self.values_numel - last, last))

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        if start % self.chunk_numel or numel > self.chunk_numel or numel % BLOCK_NUMEL:
            raise InternalError(f"{numel} elements from element {start} on are not a chunk of {self.chunk_numel}")
        whole = round_up(_packed_bytes(self.chunk_numel), BLOCK_BYTES)
        return start // self.chunk_numel * whole, whole if numel == self.chunk_numel else _packed_bytes(numel)

    def encode(
        self, values: Tensor, stored: Tensor, noise: Tensor | None, start: int, stop: int, codec: BlockCodec
    ) -> None:
        codes, scales = _packed(stored, values.numel())
        blocks = slice(start // BLOCK_NUMEL, stop // BLOCK_NUMEL)
        codec.encode(values[start:stop], codes[start:stop], scales[blocks], noise)

    def decode(self, stored: Tensor, values: Tensor, codec: BlockCodec) -> None:
        codec.decode(*_packed(stored, values.numel()), values)


def _packed_bytes(numel: int) -> int:
    return numel + numel // BLOCK_NUMEL * SCALE_DTYPE.itemsize


def _packed(stored: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Views of the codes and scales of a chunk."""
    return stored[:numel], stored[numel : _packed_bytes(numel)].view(SCALE_DTYPE)


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A paged tensor of encoded states, with the interface of a paged tensor of the decoded elements."""

    paged: PagedTensor
    encoding: Encoding

    @property
    def id(self) -> int:
        return self.paged.id

    @property
    def dtype(self) -> torch.dtype:
        return VALUES_DTYPE

    @property
    def numel(self) -> int:
        return self.encoding.values_numel

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded elements."""
        return self.numel * VALUES_DTYPE.itemsize

    @property
    def tier(self) -> Tier:
        return self.paged.tier

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, number) of the stored elements of a chunk."""
        return self.encoding.stretch(start, numel)

    def decoded(self, stored: Tensor, numel: int) -> Tensor:
        """Returns the `numel` elements of a chunk, decoded into a new tensor."""
        values = torch.empty(numel, dtype=VALUES_DTYPE, device=stored.device)
        Encoder().decode(self.encoding, stored, values)
        return values

    def encode(self, values: Tensor, stored: Tensor) -> None:
        """Encodes a chunk into `stored`, rounded to nearest."""
        Encoder().encode(self.encoding, values, stored)


ENCODINGS: dict[str, type[Encoding]] = {"bf16": Bf16, "int8": Int8}
"""Encodings by the names that users give in `Settings.optimizer_state_dtype`."""


class SegmentOfShard(Protocol):
    """Properties of a segment that the noise depends on (flat_states.Segment)."""

    @property
    def parameter(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def parameter_start(self) -> int: ...
    @property
    def numel(self) -> int: ...


class StatesOfShard(Protocol):
    """Properties of a shard's states that the noise depends on (flat_states.FlatStates)."""

    @property
    def flat(self) -> FlatLayout: ...

    def segments_within(self, start: int, stop: int) -> Iterable[SegmentOfShard]:
        """Returns the segments of elements [start, stop) of the shard."""


class Encoder:
    """Encodes and decodes chunks of states. Owns scratch tensors, so one thread at a time may use it."""

    def __init__(self) -> None:
        self._codec = BlockCodec()
        self._tables: dict[tuple[torch.device, int], Tensor] = {}
        self._noise: dict[torch.device, Tensor] = {}

    def decode(self, encoding: Encoding, stored: Tensor, values: Tensor) -> None:
        """Decodes a chunk's stored elements into `values`, (n,)."""
        encoding.decode(stored, values, self._codec)

    def encode(self, encoding: Encoding, values: Tensor, stored: Tensor) -> None:
        """Encodes a chunk's elements, (n,), into `stored`, rounded to nearest."""
        encoding.encode(values, stored, None, 0, values.numel(), self._codec)

    def encode_step(
        self,
        encoding: Encoding,
        values: Tensor,
        stored: Tensor,
        states: StatesOfShard,
        slot: str,
        start: int,
        step: int,
    ) -> None:
        """Encodes a chunk's elements with stochastic rounding, by the noise of a step (I2).

        Args:
            states: the states of the flat that the chunk belongs to.
            slot: name of the slot.
            start: first element of the chunk in the shard.
            step: number of the optimizer step.
        """
        for first in range(0, values.numel(), _STRIP_NUMEL):
            stop = min(first + _STRIP_NUMEL, values.numel())
            noise = self._noise_of(encoding.noise, values.device, states, slot, start + first, start + stop, step)
            encoding.encode(values, stored, noise, first, stop, self._codec)

    def _noise_of(
        self, below: int, device: torch.device, states: StatesOfShard, slot: str, start: int, stop: int, step: int
    ) -> Tensor:
        """Noise of elements [start, stop) of the shard, (stop - start,), int32; valid until the next call."""
        if (device, below) not in self._tables:
            self._tables[device, below] = _table(below).to(device)
        table, found, known = self._tables[device, below], None, 0
        for segment in states.segments_within(start, stop):
            spec = states.flat.slots[segment.parameter].spec
            at, end = segment.parameter_start, segment.parameter_start + segment.numel
            place = segment.start - start
            while at < end:
                tile, begin = divmod(at, _TILE_NUMEL)
                numel = min(_TILE_NUMEL - begin, end - at)
                named = f"{spec.name} {0 if spec.box is None else spec.box.index} {slot} {step} {tile}"
                drawn = table.narrow(0, _random(named) % _TILE_NUMEL + begin, numel)
                if numel == stop - start:
                    return drawn
                found = self._room(device).narrow(0, 0, stop - start) if found is None else found
                found[known:place].zero_()  # no noise on padding, which stays 0
                found.narrow(0, place, numel).copy_(drawn)
                at, place = at + numel, place + numel
                known = place
        found = self._room(device).narrow(0, 0, stop - start) if found is None else found
        found[known:].zero_()
        return found

    def _room(self, device: torch.device) -> Tensor:
        if device not in self._noise:
            self._noise[device] = torch.empty(_STRIP_NUMEL, dtype=torch.int32, device=device)
        return self._noise[device]


def _random(named: str) -> int:
    """A 32-bit hash of a name. It must never change: noise after a resume depends on it."""
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=4).digest(), "little")


def _table(below: int) -> Tensor:
    """The noise table, (2 * _TILE_NUMEL,), int32: evenly spaced numbers below `below`, shuffled, then the same once more. An
    element at a randomly drawn offset therefore has no bias. The table must never change."""
    keys = bytearray(hashlib.shake_128(b"lightning_ptm rounding").digest(8 * _TILE_NUMEL))
    order = torch.frombuffer(keys, dtype=torch.int64).argsort(stable=True)
    numbers = (order * (below // 64) // (_TILE_NUMEL // 64)).to(torch.int32)
    return torch.cat([numbers, numbers])
