"""Which part of a larger parameter a parameter is, cut along one dimension (tensor parallelism), and where it lies there.

Knows shapes and numbers only. A file holds whole tensors, row by row; a rank holds a part, row by row, too. Elements that
follow each other in the part do so in the whole for a *run*: the part's share of a section of the cut dimension, times all
later dimensions. Runs of the parts follow each other in turn, so all arithmetic is of rows of `parts` runs.

I1: the parts of a tensor hold each of its elements once. I2: stretches come in the order of the part, which is theirs in the
whole, too, and no two of them touch in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from lightning_ptm.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements that follow each other in the part and in the whole; `start` and `whole_start` are the first one's places."""

    start: int
    whole_start: int
    numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a larger parameter.

    Args:
        shape: of the whole.
        dimension: that is cut.
        parts: into how many, of equal size.
        index: which of them this is.
        sections: how many tensors are packed in that dimension, each of which is cut: 3 for queries, keys and values in
            one weight.

    Raises:
        ConfigError: such a tensor cannot be cut so.
    """

    shape: tuple[int, ...]
    dimension: int
    parts: int
    index: int
    sections: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dimension < len(self.shape):
            raise ConfigError(
                f"a parameter of shape {self.shape} has no dimension {self.dimension} to be cut along; name one of its "
                f"{len(self.shape)}, counted from 0"
            )
        if self.parts < 1 or self.sections < 1 or not 0 <= self.index < self.parts:
            raise ConfigError(
                f"part {self.index} of {self.parts}, with {self.sections} sections, is no part of a parameter; use at least "
                f"one part and one section, and count parts from 0"
            )
        if self.shape[self.dimension] % (self.parts * self.sections):
            raise ConfigError(
                f"dimension {self.dimension} of a parameter of shape {self.shape} has no {self.parts} equal parts in each of "
                f"{self.sections} sections; use a size that {self.parts * self.sections} divides, or fewer parts"
            )

    @classmethod
    def around(
        cls, part_shape: tuple[int, ...], dimension: int, parts: int, index: int, sections: int = 1
    ) -> TensorSlice:
        """The box of a part of this shape: the whole is `parts` times as large in the cut dimension. Raises as the class."""
        whole = tuple(size * parts if at == dimension else size for at, size in enumerate(part_shape))
        return cls(whole, dimension, parts, index, sections)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(size // self.parts if at == self.dimension else size for at, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.part_shape)

    @property
    def rows(self) -> int:
        """In how many runs the part lies in the whole. With `parts` and `run_numel`, the shape in which the whole is a table
        of runs, of which the part is column `index`."""
        return math.prod(self.shape[: self.dimension]) * self.sections

    @property
    def run_numel(self) -> int:
        """Elements of a run."""
        return self.shape[self.dimension] // (self.parts * self.sections) * math.prod(self.shape[self.dimension + 1 :])

    @property
    def cut(self) -> str:
        """All but the index, in words: what all ranks have to know alike."""
        sections = f" of {self.sections} sections each" if self.sections > 1 else ""
        return f"1/{self.parts} of {self.shape} in dimension {self.dimension}{sections}"

    def full_rows(self, start: int, numel: int) -> range:
        """The runs that lie whole in elements [start, start + numel) of the part."""
        first, last = -(-start // self.run_numel), (start + numel) // self.run_numel
        return range(first, max(first, last))

    def stretches(self, start: int, numel: int) -> Iterator[ElementRange]:
        """Where elements [start, start + numel) of the part lie in the whole."""
        run = self.numel if self.parts == 1 else self.run_numel  # the only part has no other's elements in between
        stop = start + numel
        while start < stop:
            row, offset = divmod(start, run)
            count = min(run - offset, stop - start)
            yield ElementRange(start, (row * self.parts + self.index) * run + offset, count)
            start += count
