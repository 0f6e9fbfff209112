"""Blocks of parameters that a square or a cube of ranks divides along several dimensions, and block-major tensors.

Knows shapes, values and coordinates, not groups of processes. A rank's parameter is one block. Files and checkpoints have
the *block-major* tensor: the blocks of all ranks, concatenated along dimension 0 in the order of the ranks, so that a
rank's block is a slice along one dimension (`planning.tensor_slices.TensorSlice`).

I1: the blocks of a tensor contain each of its elements once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.mesh import GridAxis, GridShape
from lightning_ptm.planning.tensor_slices import TensorSlice


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOf:
    """Division of a tensor over a grid of ranks.

    Args:
        shape: shape of the whole tensor.
        along: for each of its first dimensions, the axes of the grid that divide it, outermost first; each axis once.
        sections: number of tensors that are packed in dimension 0, each of which is divided: 3 for queries, keys and values.

    Raises:
        ConfigError: the grid does not divide the tensor.
    """

    shape: tuple[int, ...]
    along: tuple[tuple[GridAxis, ...], ...]
    grid: GridShape
    sections: int = 1

    def __post_init__(self) -> None:
        for dimension, axes in enumerate(self.along):
            parts = self.grid.side ** len(axes) * (self.sections if dimension == 0 else 1)
            if self.shape[dimension] % parts:
                raise ConfigError(
                    f"a parameter of shape {self.shape} is divided into {parts} parts along dimension {dimension} by a grid "
                    f"of {self.grid.size} ranks, and {parts} does not divide {self.shape[dimension]}; use sizes that it "
                    f"divides, or a smaller grid"
                )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a rank's block."""
        parts = [self.grid.side ** len(axes) for axes in self.along]
        return tuple(size // each for size, each in zip(self.shape, parts, strict=True))

    def block(self, whole: Tensor, index: int) -> Tensor:
        """Returns the block of the rank of this index, contiguous, of a whole tensor."""
        found = whole.reshape(self.sections, -1, *self.shape[1:])
        for dimension, axes in enumerate(self.along, 1):
            for axis in axes:
                found = found.chunk(self.grid.side, dimension)[self.grid.coordinate(index, axis)]
        return found.reshape(self.block_shape).contiguous()

    def blocks(self, whole: Tensor) -> Tensor:
        """Returns the block-major tensor of a whole one."""
        return torch.cat([self.block(whole, index) for index in range(self.grid.size)])

    def whole(self, blocks: Tensor) -> Tensor:
        """Returns the whole tensor of a block-major one."""
        # Which element of the block-major tensor is at each place of the whole one.
        place = torch.arange(blocks.numel()).view(self.shape)
        found = torch.empty(self.shape, dtype=blocks.dtype, device=blocks.device)
        found.view(-1)[self.blocks(place).view(-1).to(blocks.device)] = blocks.reshape(-1)
        return found

    def slice(self, index: int) -> TensorSlice:
        """Returns the slice of the block-major tensor that is the block of the rank of this index."""
        return TensorSlice.around(self.block_shape, 0, self.grid.size, index)


def rows_of(batch: Tensor, grid: GridShape, index: int, axes: Sequence[GridAxis]) -> Tensor:
    """Returns the samples, along dimension 0 of a batch, of the rank of this index.

    Args:
        axes: the axes that divide samples, outermost first.

    Raises:
        ConfigError: they do not divide the samples.
    """
    parts = grid.side ** len(axes)
    if batch.shape[0] % parts:
        raise ConfigError(
            f"a batch has {batch.shape[0]} samples, and a grid of {grid.size} ranks divides them into {parts} parts; let the "
            f"data loader give a multiple of {parts} samples (batch_size, drop_last=True)"
        )
    for axis in axes:
        batch = batch.chunk(grid.side)[grid.coordinate(index, axis)]
    return batch
