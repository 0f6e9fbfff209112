"""Sliced parameters (tensor parallelism): declaration of slices, slicing of whole values, and assembly of whole values.

A strategy declares a slice by a parameter's name (`AngelPTMStrategy.boxes`). The module has the slice as its parameter,
computes with it and initialises it. Ranks r of equal r % parts have the same slices and shard them among themselves; ranks
of equal r // parts are a tensor-parallel group, which together has all slices. Pages, updates and norms work on elements,
each of which has one owner; files and checkpoints contain whole tensors.

I1: a value from outside is that of the whole parameter or of the slice, according to its shape.
I2: nothing here copies more of a memory-mapped tensor than was requested, except for two rows of runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_ptm.comm import Communicator
from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.mesh import Axis, Mesh, mesh_of
from lightning_ptm.planning.tensor_slices import TensorSlice

Boxes = Mapping[int, TensorSlice]
"""Slices of the sliced parameters, by id of the parameter."""


def declared(module: nn.Module, boxes: Mapping[str, TensorSlice]) -> dict[int, TensorSlice]:
    """Returns the slices that were declared by name, by id of the parameter, after a check against the module.

    Raises:
        ConfigError: a name is unknown, a parameter has another shape than its slice, tied parameters have different slices,
            or parameters have different numbers of slices.
    """
    if not boxes:
        return {}
    named = dict(module.named_parameters(remove_duplicate=False))
    found: dict[int, TensorSlice] = {}
    first = next(((name, box) for name, box in boxes.items() if box.parts > 1), None)
    for name, box in boxes.items():
        if name not in named:
            raise ConfigError(
                f"{name} is declared to be a slice of a larger parameter, and the {type(module).__name__} has no parameter "
                f"of that name; use a name of module.named_parameters()"
            )
        parameter = named[name]
        if tuple(parameter.shape) != box.part_shape:
            raise ConfigError(
                f"{name} has shape {tuple(parameter.shape)} and is declared to be {box.cut}, whose slices are "
                f"{box.part_shape}; build the module with its slice only, or declare the shape of the whole: "
                f"TensorSlice.around(shape of the slice, dimension, parts, index)"
            )
        if found.setdefault(id(parameter), box) != box:
            raise ConfigError(
                f"{name} is declared to be {box.cut}, and another name of the same parameter to be "
                f"{found[id(parameter)].cut}; declare tied parameters alike, or once"
            )
        if first is not None and box.parts not in (1, first[1].parts):
            raise ConfigError(
                f"{name} is one of {box.parts} slices and {first[0]} one of {first[1].parts}, and each rank of a group has "
                f"one slice of each; slice all into the same number, or leave some whole"
            )
    return {key: box for key, box in found.items() if box.parts > 1}


def mesh_with(boxes: Boxes, settings: Settings, world_size: int, rank: int) -> Mesh:
    """Returns the mesh of a run whose parameters have these slices.

    Raises:
        ConfigError: the world size is not divisible, or a slice's index does not match this rank.
    """
    mesh = mesh_of(settings, world_size, next((box.parts for box in boxes.values()), 1))
    index = mesh.coordinate(rank, Axis.TENSOR)
    for box in boxes.values():
        if box.index != index:
            raise ConfigError(
                f"a parameter of rank {rank} is {box.cut}, slice {box.index}, and that rank has slice {index} of every "
                f"parameter; declare index=rank % parts"
            )
    return mesh


# -- values ---------------------------------------------------------------------------------------------------------------


def elements(value: Tensor, box: TensorSlice | None, start: int, numel: int) -> Tensor:
    """Returns elements [start, start + numel) of this rank's slice, (numel,), given the value of the slice or of the whole
    (I1): a view if they are contiguous there, else a copy."""
    flat = value.reshape(-1)
    if box is None or tuple(value.shape) == box.part_shape:
        return flat.narrow(0, start, numel)
    if numel <= box.run_numel:
        found = [flat.narrow(0, each.whole_start, each.numel) for each in box.stretches(start, numel)]
        return found[0] if len(found) == 1 else torch.cat([flat[:0], *found])
    first, last = start // box.run_numel, -(-(start + numel) // box.run_numel)
    column = flat.view(box.rows, box.parts, box.run_numel)[first:last, box.index]
    return column.reshape(-1).narrow(0, start - first * box.run_numel, numel)


def cut(value: Tensor, box: TensorSlice | None) -> Tensor:
    """Returns this rank's slice, given the value of the whole or of the slice (I1): a view, unless the slice has several
    sections."""
    if box is None or tuple(value.shape) == box.part_shape:
        return value
    size = box.shape[box.dimension] // (box.parts * box.sections)
    starts = ((section * box.parts + box.index) * size for section in range(box.sections))
    found = [value.narrow(box.dimension, start, size) for start in starts]
    return found[0] if len(found) == 1 else torch.cat(found, box.dimension)


def put_together(part: Tensor, box: TensorSlice | None, communicator: Communicator) -> Tensor:
    """Returns the whole value of a parameter, on the CPU, from the slices of the first group. Collective over all ranks.

    Args:
        part: value of this rank's slice, or of the whole parameter if `box` is None.
    """
    if box is None:
        return part
    whole = torch.empty(box.shape, dtype=part.dtype)
    table = whole.view(box.rows, box.parts, box.run_numel)
    for rank in range(box.parts):
        piece = part.contiguous() if rank == communicator.rank else torch.empty(box.part_shape, dtype=part.dtype)
        communicator.broadcast(piece, rank)
        table[:, rank].copy_(piece.view(box.rows, box.run_numel))
    return whole
