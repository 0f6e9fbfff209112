"""Slices of parameters along one dimension (tensor parallelism), and their positions in the whole tensor.

Knows shapes and numbers only. A file stores whole tensors in row-major order; a rank stores a slice, also in row-major
order. Elements that are consecutive in the slice are consecutive in the whole tensor for a *run*: the slice's share of
a section of the cut dimension, times all later dimensions. In the whole tensor, the runs of the slices alternate, so
all arithmetic is on rows of `parts` runs.

I1: the slices of a tensor contain each of its elements once.
I2: `stretches` yields ranges in the order of the slice, which is also their order in the whole; no two of them touch in
    the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from lightning_ptm.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements that are consecutive in the slice (from `start`) and in the whole tensor (from `whole_start`)."""

    start: int
    whole_start: int
    numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice of a larger parameter.

    Args:
        shape: shape of the whole.
        dimension: the dimension that is cut.
        parts: number of slices, which have equal size.
        index: number of this slice.
        sections: number of tensors that are packed in that dimension, each of which is cut: 3 for queries, keys and
            values in one weight.

    Raises:
        ConfigError: such a tensor cannot be cut in this way.
    """

    shape: tuple[int, ...]
    dimension: int
    parts: int
    index: int
    sections: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dimension < len(self.shape):
            raise ConfigError(
                f"a parameter of shape {self.shape} has no dimension {self.dimension}, so it cannot be cut along it; name "
                f"one of its {len(self.shape)} dimensions, counted from 0"
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
        """Returns the slice whose shape is `part_shape`: the whole is `parts` times as large in the cut dimension.

        Raises as the class.
        """
        whole = tuple(size * parts if at == dimension else size for at, size in enumerate(part_shape))
        return cls(whole, dimension, parts, index, sections)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(size // self.parts if at == self.dimension else size for at, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        """Elements of the slice."""
        return math.prod(self.part_shape)

    @property
    def rows(self) -> int:
        """Number of runs of the slice in the whole.

        The whole, viewed as (rows, parts, run_numel), is a table of runs whose column `index` is the slice.
        """
        return math.prod(self.shape[: self.dimension]) * self.sections

    @property
    def run_numel(self) -> int:
        """Elements of a run."""
        return self.shape[self.dimension] // (self.parts * self.sections) * math.prod(self.shape[self.dimension + 1 :])

    @property
    def cut(self) -> str:
        """Description of everything but the index, which all ranks must agree on."""
        sections = f" of {self.sections} sections each" if self.sections > 1 else ""
        return f"1/{self.parts} of {self.shape} in dimension {self.dimension}{sections}"

    def full_rows(self, start: int, numel: int) -> range:
        """Returns the runs that are entirely in elements [start, start + numel) of the slice."""
        first, last = -(-start // self.run_numel), (start + numel) // self.run_numel
        return range(first, max(first, last))

    def stretches(self, start: int, numel: int) -> Iterator[ElementRange]:
        """Yields the ranges of the whole that hold elements [start, start + numel) of the slice."""
        run = self.numel if self.parts == 1 else self.run_numel  # a single slice is contiguous
        stop = start + numel
        while start < stop:
            row, offset = divmod(start, run)
            count = min(run - offset, stop - start)
            yield ElementRange(start, (row * self.parts + self.index) * run + offset, count)
            start += count
