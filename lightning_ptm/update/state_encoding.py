"""How optimizer states that are smaller than fp32 lie in pages: the encodings, and the noise by which they are rounded.

Owns how many elements of which dtype a slot takes in pages, and what stands where there. The optimizer itself never sees it:
an update decodes a chunk, runs the user's class on fp32 elements, and encodes what it has made of them.
I1: what was decoded encodes to itself, with any noise, so a state that no step changes never does, and a checkpoint holds
    what the optimizer holds.
I2: noise is a function of the parameter, the slot, the element in the parameter and the step. So threads, tiers, chunks
    and ranks change nothing, a run that goes on from a checkpoint draws what it would have drawn, and nobody's random
    numbers move.
I3: codes of a block are of one parameter (block_codec.py): blocks begin where parameters and pieces do.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.memory.block_codec import BLOCK_NUMEL, NOISE, SCALE_DTYPE, BlockCodec
from lightning_ptm.planning.layout import round_up
from lightning_ptm.terms import BLOCK_BYTES, Tier

if TYPE_CHECKING:
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.update.flat_states import FlatStates

VALUES_DTYPE = torch.float32
"""Of what is encoded."""
_STRIP_NUMEL = 1 << 18
"""Elements that are encoded together: their noise, and what is in between, stay in a core's cache."""
_TILE_NUMEL = 1 << 18
"""Elements whose noise is a stretch of one table, from a place on that is drawn anew for each tile."""
_SHORT_NOISE = 1 << 16
_BF16_NAN = 0x7FC0


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding(abc.ABC):
    """Of one slot of one shard.

    Args:
        values_numel: elements of the shard.
        chunk_numel: elements that an update, or a save, moves together (`terms.chunk_numel`).
    """

    values_numel: int
    chunk_numel: int

    dtype: ClassVar[torch.dtype]
    """Of what lies in pages."""
    noise: ClassVar[int]
    """Noise is uniform in [0, noise)."""

    @property
    @abc.abstractmethod
    def numel(self) -> int:
        """Elements in pages."""

    @abc.abstractmethod
    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, elements) in pages of elements [start, start + numel) of the shard: a chunk."""

    @abc.abstractmethod
    def encode(
        self, values: Tensor, stored: Tensor, noise: Tensor | None, start: int, stop: int, codec: BlockCodec
    ) -> None:
        """Write elements [start, stop) of a chunk.

        Args:
            values: (n,), fp32, the chunk's; stored: what lies in pages of it.
            noise: (stop - start,), int32; None: to the nearest.
        """

    @abc.abstractmethod
    def decode(self, stored: Tensor, values: Tensor, codec: BlockCodec) -> None:
        """Write all elements of a chunk. Args: as `encode`; `values` is written."""


class Bf16(Encoding):
    """The upper half of an fp32 number."""

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
        # What the noise carries over into the upper half is the rounding.
        rounded = torch.add(values[start:stop].view(torch.int32), noise, out=codec.scratch(values.device, stop - start))
        rounded >>= 16
        if not in_ram(values) or values[start:stop].sum().isnan():
            rounded.masked_fill_(values[start:stop].isnan(), _BF16_NAN)  # or the noise may carry one over to 0
        stored[start:stop].view(torch.int16).copy_(rounded)

    def decode(self, stored: Tensor, values: Tensor, codec: BlockCodec) -> None:
        values.copy_(stored)


class Int8(Encoding):
    """Codes of all elements of a chunk, then the scales of all its blocks."""

    __slots__ = ()
    dtype = torch.uint8
    noise = NOISE

    @property
    def numel(self) -> int:
        last = self.values_numel % self.chunk_numel
        return sum(self.stretch(self.values_numel - last, last))

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        if start % self.chunk_numel or numel > self.chunk_numel or numel % BLOCK_NUMEL:
            raise InternalError(f"{numel} elements from {start} on are no chunk of {self.chunk_numel}")
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
    """Codes and scales of a chunk."""
    return stored[:numel], stored[numel : _packed_bytes(numel)].view(SCALE_DTYPE)


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A paged tensor, and the elements that it stands for: what reads or writes states by hand takes it for these."""

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
        """Of what it stands for."""
        return self.numel * VALUES_DTYPE.itemsize

    @property
    def tier(self) -> Tier:
        return self.paged.tier

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, elements) in pages of a chunk."""
        return self.encoding.stretch(start, numel)

    def decoded(self, stored: Tensor, numel: int) -> Tensor:
        """The `numel` elements of a chunk, in memory of their own."""
        values = torch.empty(numel, dtype=VALUES_DTYPE, device=stored.device)
        Encoder().decode(self.encoding, stored, values)
        return values

    def encode(self, values: Tensor, stored: Tensor) -> None:
        """Writes what lies in pages of a chunk, each element to the nearest."""
        Encoder().encode(self.encoding, values, stored)


ENCODINGS: dict[str, type[Encoding]] = {"bf16": Bf16, "int8": Int8}
"""By what users call them (`Settings.optimizer_state_dtype`)."""


class Encoder:
    """Encodes and decodes chunks of states. Owns scratch: one thread at a time."""

    def __init__(self) -> None:
        self._codec = BlockCodec()
        self._tables: dict[tuple[torch.device, int], Tensor] = {}
        self._noise: dict[torch.device, Tensor] = {}

    def decode(self, encoding: Encoding, stored: Tensor, values: Tensor) -> None:
        """Write a chunk's elements, (n,), of what lies in pages of it."""
        encoding.decode(stored, values, self._codec)

    def encode(self, encoding: Encoding, values: Tensor, stored: Tensor) -> None:
        """Write what lies in pages of a chunk's elements, (n,), each to the nearest."""
        encoding.encode(values, stored, None, 0, values.numel(), self._codec)

    def encode_step(
        self, encoding: Encoding, values: Tensor, stored: Tensor, states: FlatStates, slot: str, start: int, step: int
    ) -> None:
        """The same by the noise of a step (I2).

        Args:
            states: whose chunk it is; slot: the name of these states.
            start: first element of the chunk in the shard.
            step: its number.
        """
        for first in range(0, values.numel(), _STRIP_NUMEL):
            stop = min(first + _STRIP_NUMEL, values.numel())
            noise = self._noise_of(encoding.noise, values.device, states, slot, start + first, start + stop, step)
            encoding.encode(values, stored, noise, first, stop, self._codec)

    def _noise_of(
        self, below: int, device: torch.device, states: FlatStates, slot: str, start: int, stop: int, step: int
    ) -> Tensor:
        """(stop - start,), int32, of elements [start, stop) of the shard; good until the next is asked for."""
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
                found[known:place].zero_()  # padding is 0, and stays so
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
    """32 bits that a name stands for, the same for ever."""
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=4).digest(), "little")


def _table(below: int) -> Tensor:
    """(2 * _TILE_NUMEL,), int32, the same for ever: numbers below `below`, evenly spaced and shuffled, twice; so an element
    whose place is drawn has no bias at all."""
    keys = bytearray(hashlib.shake_128(b"lightning_ptm rounding").digest(8 * _TILE_NUMEL))
    order = torch.frombuffer(keys, dtype=torch.int64).argsort(stable=True)
    numbers = (order * (below // 64) // (_TILE_NUMEL // 64)).to(torch.int32)
    return torch.cat([numbers, numbers])
