"""Parameters that are parts of larger ones: what is declared of them, whole values cut to parts, and parts put together.

A strategy declares a box by a parameter's name (`AngelPTMStrategy.boxes`); the module holds the part, computes with it and
gives it its first values. Ranks r of equal r % parts have the same parts and share their pages; ranks of equal r // parts are
a group, which has one of each. Pages, updates and norms know elements only, each of which has one owner; files and
checkpoints have whole tensors.

I1: a value that comes from outside is the whole or the part, which its shape tells. I2: nothing here copies more of a mapped
tensor than was asked for, but for two rows of runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_ptm.comm import Communicator
from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.expert_split import ExpertSplit
from lightning_ptm.planning.tensor_slices import TensorSlice

Boxes = Mapping[int, TensorSlice]
"""Of parameters that are parts, by id."""


def declared(module: nn.Module, boxes: Mapping[str, TensorSlice]) -> dict[int, TensorSlice]:
    """What was declared by name, checked against the module.

    Raises:
        ConfigError: there is no such parameter, it has another shape than its part, or others are one of more parts.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    found: dict[int, TensorSlice] = {}
    first = next(((name, box) for name, box in boxes.items() if box.parts > 1), None)
    for name, box in boxes.items():
        if name not in named:
            raise ConfigError(
                f"{name} is declared to be a part of a larger parameter, and the {type(module).__name__} has none of that "
                f"name; use a name of module.named_parameters()"
            )
        parameter = named[name]
        if tuple(parameter.shape) != box.part_shape:
            raise ConfigError(
                f"{name} has shape {tuple(parameter.shape)} and is declared to be {box.cut}, whose parts are "
                f"{box.part_shape}; build the module with its part alone, or declare the whole's shape: "
                f"Box.around(shape of the part, dimension, parts, index)"
            )
        if found.setdefault(id(parameter), box) != box:
            raise ConfigError(
                f"{name} is one parameter with another that is declared to be {found[id(parameter)].cut}, and itself to be "
                f"{box.cut}; declare tied parameters alike, or once"
            )
        if first is not None and box.parts not in (1, first[1].parts):
            raise ConfigError(
                f"{name} is one of {box.parts} parts and {first[0]} one of {first[1].parts}, and the ranks of a group have "
                f"one part of each; cut all into as many parts, or leave some whole"
            )
    return {key: box for key, box in found.items() if box.parts > 1}


def split_of(boxes: Boxes, world_size: int, expert_ranks: int, rank: int) -> ExpertSplit:
    """The ranks by what they have of experts, which groups of `expert_ranks` divide, and of parameters in parts.

    Raises:
        ConfigError: they cannot be divided so, or this one should have other parts.
    """
    for box in boxes.values():
        if world_size % box.parts:
            raise ConfigError(
                f"a parameter is {box.cut}, and {world_size} ranks make no groups of {box.parts}; use a multiple of "
                f"{box.parts} ranks, or fewer parts"
            )
        if box.index != rank % box.parts:
            raise ConfigError(
                f"a parameter of rank {rank} is {box.cut}, the part {box.index}, and that rank has part {rank % box.parts} "
                f"of everything; declare index=rank % parts"
            )
    return ExpertSplit(world_size, expert_ranks, next((box.parts for box in boxes.values()), 1))


# -- values ---------------------------------------------------------------------------------------------------------------


def elements(value: Tensor, box: TensorSlice | None, start: int, numel: int) -> Tensor:
    """Elements [start, start + numel) of this rank's part, (numel,), of the whole or the part (I1): views where they follow
    each other there."""
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
    """This rank's part of the whole, or the part itself (I1); a view but where sections have to be put together."""
    if box is None or tuple(value.shape) == box.part_shape:
        return value
    size = box.shape[box.dimension] // (box.parts * box.sections)
    starts = ((section * box.parts + box.index) * size for section in range(box.sections))
    found = [value.narrow(box.dimension, start, size) for start in starts]
    return found[0] if len(found) == 1 else torch.cat(found, box.dimension)


def put_together(part: Tensor, box: TensorSlice | None, communicator: Communicator) -> Tensor:
    """The whole of a parameter, on the CPU, as the first group has its parts. Collective, of all ranks.

    Args:
        part: this rank's; of a whole parameter, its value.
    """
    if box is None:
        return part
    whole = torch.empty(box.shape, dtype=part.dtype)
    table = whole.view(box.rows, box.parts, box.run_numel)
    for rank in range(box.parts):
        told = part.contiguous() if rank == communicator.rank else torch.empty(box.part_shape, dtype=part.dtype)
        communicator.broadcast(told, rank)
        table[:, rank].copy_(told.view(box.rows, box.run_numel))
    return whole
