"""Linear layer, norm, embedding and loss of a square or a cube of ranks (Colossal-AI's 2D and 3D tensor parallelism).

Each rank has a block of every parameter and of every activation. An activation, (samples, ..., features), is divided along
samples and features: in the residual *stream* features along FEATURES, and *inside* of a pair of linear layers along INNER
in a cube, which swaps the two axes from layer to layer. Batches are whole on all ranks; embedding and loss take their
samples of tokens and targets.

Collectives stand for the broadcasts and reductions of the papers: the same bytes, and a layer's gathered values in memory
while it computes. The backward pass gathers again what the forward pass gathered, so that autograd saves blocks alone.

I1: all ranks of a grid call the same layers in the same order.
I2: the loss is the same number on all ranks; a gradient that a backward pass leaves in a block is that of the whole loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel import loss as vocabulary_loss
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.grid.blocks import BlockOf, rows_of
from lightning_ptm.planning.mesh import GridAxis, GridShape
from lightning_ptm.planning.tensor_slices import TensorSlice

SAMPLES, FEATURES, INNER = GridAxis


@dataclasses.dataclass(frozen=True, slots=True)
class GridSplit:
    """Division of an activation over a grid of ranks.

    Attributes:
        features: the axis that divides features.
        samples: the axes that divide samples, outermost first.
    """

    features: GridAxis
    samples: tuple[GridAxis, ...]


class Grid:
    """A rank's place in its square or cube, and its groups.

    Args:
        shape: side and number of axes.
        index: index of this rank in the grid.
        groups: the ranks that differ from this one along one axis alone.
    """

    def __init__(self, shape: GridShape, index: int, groups: Mapping[GridAxis, TensorGroup]) -> None:
        self.shape = shape
        self.index = index
        self.groups = groups
        self.stream = GridSplit(FEATURES, (SAMPLES, INNER) if shape.cube else (SAMPLES,))
        self.inside = GridSplit(INNER, (SAMPLES, FEATURES)) if shape.cube else self.stream

    @property
    def side(self) -> int:
        """Number of ranks along each axis: into how many parts features and heads are divided."""
        return self.shape.side

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "groups": {}}  # which no copy of a module can have

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Returns the mean cross-entropy of a batch, at least in fp32, the same on all ranks, without gathering logits.

        Args:
            logits: output of the head, a `GridLinear`: this rank's samples and part of the vocabulary, along the last
                dimension.
            targets: of the whole batch, (samples, ...).
        """
        own = rows_of(targets, self.shape, self.index, self.inside.samples)
        group = self.groups[self.inside.features]
        dtype = torch.promote_types(logits.dtype, torch.float32)  # a sum over a batch
        total = vocabulary_loss.cross_entropy(
            logits.flatten(0, -2), own.flatten(), group, dtype=dtype, ignore_index=ignore_index, reduction="sum"
        )
        for axis in self.inside.samples:
            total = self.groups[axis].add_up(total)
        return total / (targets != ignore_index).sum()


class GridLayer(nn.Module):
    """Base class of layers whose parameters are blocks of larger ones.

    Args:
        grid: this rank's place.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.join(grid)
        self.divided: dict[str, BlockOf] = {}
        """By name of a parameter, how the grid divides it."""

    def add_block(
        self, name: str, shape: tuple[int, ...], along: tuple[tuple[GridAxis, ...], ...], sections: int = 1
    ) -> None:
        """Registers this rank's block of a parameter, without values. For arguments see `BlockOf`."""
        self.divided[name] = made = BlockOf(shape, along, self.grid.shape, sections)
        self.register_parameter(name, nn.Parameter(torch.empty(made.block_shape)))

    def join(self, grid: Grid) -> None:
        """Sets this rank's place in the grid of a run, whose shape is that of the layer."""
        self.grid = grid

    def add_vector(self, name: str, size: int, split: GridSplit, sections: int = 1) -> None:
        """Registers this rank's block of a vector over the features of an activation."""
        self.add_block(name, (size,), ((split.features, *split.samples),), sections)

    @torch.no_grad()
    def draw(self, name: str, fill: Callable[[Tensor], object]) -> None:
        """Initialises a parameter: all ranks draw its whole value with the same random numbers, and keep their blocks.

        Args:
            fill: initialises a tensor in place.
        """
        value = self.get_parameter(name)
        drawn = torch.empty(self.divided[name].shape, dtype=value.dtype, device=value.device)
        fill(drawn)
        self.set_whole(name, drawn)

    @torch.no_grad()
    def set_whole(self, name: str, whole: Tensor) -> None:
        """Copies this rank's block of a whole value into a parameter; all blocks, where a parameter that had no storage is
        initialised block-major."""
        value, made = self.get_parameter(name), self.divided[name]
        own = tuple(value.shape) == made.block_shape
        value.copy_(made.block(whole, self.grid.index) if own else made.blocks(whole))

    def slices(self, prefix: str) -> Iterator[tuple[str, TensorSlice]]:
        """Yields this rank's slices of block-major parameters, by name."""
        for name, each in self.divided.items():
            yield f"{prefix}.{name}", each.slice(self.grid.index)

    def gathered(self, name: str, split: GridSplit) -> Tensor:
        """Returns a parameter gathered, along dimension 0, from the ranks with other samples and the same features."""
        value = self.get_parameter(name).unflatten(0, (self.divided[name].sections, -1))
        for axis in reversed(split.samples):  # the innermost first, so that the pieces are in order
            value = _Gathered.apply(value, self.grid.groups[axis])
        return value.flatten(0, 1)


class GridLinear(GridLayer):
    """Linear layer: SUMMA in a square, and the algorithm of Agarwal et al. in a cube.

    Takes a block of an activation of the stream and returns one of an inside activation, or the other way round (`back`).
    Its whole weight is that of `nn.Linear`.

    Args:
        in_features, out_features: of the whole layer.
        back: whether it leads back to the stream; matters in a cube only.
        bias: whether it has a bias.
        sections: number of layers of equal size that are packed in `out_features`, each of which is divided.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: Grid,
        *,
        back: bool = False,
        bias: bool = True,
        sections: int = 1,
    ) -> None:
        super().__init__(grid)
        self.in_features, self.out_features, self.back = in_features, out_features, back
        source, self._target = (grid.inside, grid.stream) if back else (grid.stream, grid.inside)
        self._across = _Across(source.features, self._target.features, cube=grid.shape.cube)
        rows, columns = (self._target.features,), (source.features, SAMPLES) if grid.shape.cube else (SAMPLES,)
        self.add_block("weight", (out_features, in_features), (rows, columns), sections)
        if bias:
            self.add_vector("bias", out_features, self._target, sections)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        for name in self.divided:
            self.draw(name, lambda whole: whole.uniform_(-bound, bound))

    @override
    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            out: Tensor = _Linear.apply(x.to(dtype), self.weight.to(dtype), self.grid, self._across)
        else:
            out = _Linear.apply(x, self.weight, self.grid, self._across)
        return out if self.bias is None else out + self.gathered("bias", self._target).to(out.dtype)


class GridNorm(GridLayer):
    """LayerNorm over the features of the stream, of which ranks have parts: they exchange two numbers a token.

    Args:
        width: features of the whole activation.
    """

    def __init__(self, width: int, grid: Grid, eps: float = 1e-5) -> None:
        super().__init__(grid)
        self.width, self.eps = width, eps
        self.add_vector("weight", width, grid.stream)
        self.add_vector("bias", width, grid.stream)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weights to 1 and biases to 0."""
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            nn.init.constant_(self.get_parameter(name), value)

    @override
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self.gathered(name, self.grid.stream) for name in ("weight", "bias"))
        out: Tensor = _Normed.apply(x, weight, bias, self.grid.groups[FEATURES], self.eps)
        return out if torch.is_autocast_enabled(x.device.type) else out.to(x.dtype)


class GridEmbedding(GridLayer):
    """Table of vectors: each rank gathers its features of it, and looks up its samples.

    Args:
        rows: number of vectors.
        width: features of the whole vectors.
    """

    def __init__(self, rows: int, width: int, grid: Grid) -> None:
        super().__init__(grid)
        self.add_block("weight", (rows, width), (grid.stream.samples, (FEATURES,)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as `nn.Embedding` does."""
        self.draw("weight", nn.init.normal_)

    @override
    def forward(self, indices: Tensor) -> Tensor:
        """Returns vectors, this rank's features.

        Args:
            indices: of the whole batch, (samples, tokens); or (tokens,), such as positions: the same for all samples.
        """
        if indices.dim() > 1:
            indices = rows_of(indices, self.grid.shape, self.grid.index, self.grid.stream.samples)
        return F.embedding(indices, self.gathered("weight", self.grid.stream))


# -- checkpoints ----------------------------------------------------------------------------------------------------------


def whole(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the `state_dict` of the module without a grid, given that of a checkpoint of a run on a grid.

    Args:
        module: a module with the layers of that grid, with or without values.
        state: its state as in a checkpoint, with block-major parameters.
    """
    divided = dict(_divided(module))
    return {name: divided[name].whole(each) if name in divided else each for name, each in state.items()}


def blocks(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the `state_dict` with block-major parameters, given one of the module without a grid; reverses `whole`."""
    divided = dict(_divided(module))
    return {name: divided[name].blocks(each) if name in divided else each for name, each in state.items()}


def load_whole(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies this rank's blocks of the whole weights of a module without a grid, in `configure_model` for example.

    Raises:
        KeyError: a parameter is not in `state`.
    """
    for prefix, each in module.named_modules():
        if isinstance(each, GridLayer):
            for name in each.divided:
                each.set_whole(name, state[f"{prefix}.{name}"])


def slices_of(module: nn.Module) -> dict[str, TensorSlice]:
    """Returns this rank's slices of all parameters, by name.

    Raises:
        ConfigError: a parameter is not in a grid layer.
    """
    found: dict[str, TensorSlice] = {}
    for name, each in module.named_modules():
        if isinstance(each, GridLayer):
            found.update(each.slices(name))
    strange = next((name for name, _ in module.named_parameters() if name not in found), None)
    if strange is not None:
        raise ConfigError(
            f"{strange} is no parameter of a grid layer, so each rank of the grid would compute another gradient of it; "
            f"build the model of lightning_ptm.parallel.grid's layers (models of Transformers cannot be), or use "
            f"AngelPTMStrategy(tensor_parallel_size=...)"
        )
    return found


def _divided(module: nn.Module) -> Iterator[tuple[str, BlockOf]]:
    for prefix, each in module.named_modules():
        if isinstance(each, GridLayer):
            yield from ((f"{prefix}.{name}", block) for name, block in each.divided.items())


# -- autograd -------------------------------------------------------------------------------------------------------------


def _gather(value: Tensor, group: TensorGroup, dimension: int) -> Tensor:
    return torch.cat(group.gather(value).unbind(0), dimension)


def _scatter(value: Tensor, group: TensorGroup, dimension: int) -> Tensor:
    """Returns the sum over the ranks of this rank's part along a dimension."""
    return group.sum_of_piece(torch.stack(value.chunk(group.size, dimension)))


class _Gathered(torch.autograd.Function):
    """All-gather along dimension 1; its backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return _gather(value, group, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter(gradient, ctx.group, 1), None


@dataclasses.dataclass(frozen=True, slots=True)
class _Across:
    """The exchanges of a linear layer: of its input, its weight and its output.

    Args:
        source, target: the axes that divide features of input and output.
        cube: whether they differ.
    """

    source: GridAxis
    target: GridAxis
    cube: bool

    def input(self, x: Tensor, grid: Grid) -> Tensor:
        """Gathers: in a square all features of the samples, in a cube the samples of all ranks with these features."""
        return _gather(x, grid.groups[self.target], 0) if self.cube else _gather(x, grid.groups[self.source], -1)

    def of_input(self, gradient: Tensor, grid: Grid) -> Tensor:
        """Reverses `input`: sums gradients."""
        if self.cube:
            return _scatter(gradient, grid.groups[self.target], 0)
        return _scatter(gradient, grid.groups[self.source], -1)

    def output(self, y: Tensor, grid: Grid) -> Tensor:
        """Sums, in a cube, what the ranks with other input features have of the output, and divides its samples."""
        return _scatter(y, grid.groups[self.source], 0) if self.cube else y

    def of_output(self, gradient: Tensor, grid: Grid) -> Tensor:
        """Reverses `output`."""
        return _gather(gradient, grid.groups[self.source], 0) if self.cube else gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid, across: _Across) -> Tensor:
        ctx.grid, ctx.across = grid, across
        ctx.save_for_backward(x, weight)
        return across.output(F.linear(across.input(x, grid), _gather(weight, grid.groups[SAMPLES], 1)), grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, weight), grid, across = ctx.saved_tensors, ctx.grid, ctx.across
        gradient = across.of_output(gradient, grid)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = across.of_input(gradient @ _gather(weight, grid.groups[SAMPLES], 1), grid)
        if ctx.needs_input_grad[1]:
            rows = across.input(x, grid).flatten(0, -2)
            of_weight = _scatter(gradient.flatten(0, -2).t() @ rows, grid.groups[SAMPLES], 1)
        return of_x, of_weight, None, None


class _Normed(torch.autograd.Function):
    """LayerNorm over features of which each rank has as many; statistics are at least in fp32. Saves the input's block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: TensorGroup, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own = wide.shape[-1]
        mean = wide.mean(-1)
        of_all = group.gather(torch.stack([mean, (wide - mean.unsqueeze(-1)).square().sum(-1)]))
        means, squares = of_all.unbind(1)
        mean = means.mean(0)
        variance = (squares.sum(0) + own * (means - mean).square().sum(0)) / (own * group.size)
        scale = (variance + eps).rsqrt()
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, scale)
        return (wide - mean.unsqueeze(-1)) * scale.unsqueeze(-1) * weight + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, mean, scale), group = ctx.saved_tensors, ctx.group
        normed = (x.to(mean.dtype) - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
        gradient = gradient.to(mean.dtype)
        of_normed = gradient * weight
        sums = group.sum(torch.stack([of_normed.sum(-1), (of_normed * normed).sum(-1)])) / (x.shape[-1] * group.size)
        of_x = (of_normed - sums[0].unsqueeze(-1) - normed * sums[1].unsqueeze(-1)) * scale.unsqueeze(-1)
        of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return of_x.to(x.dtype), of_weight, gradient.flatten(0, -2).sum(0).to(weight.dtype), None, None
