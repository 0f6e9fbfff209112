"""Norms of gradients for clipping, and the test for inf and NaN for loss scaling. Reads resident gradients only.

With world size 1 the norm is bitwise torch.nn.utils.clip_grad_norm_'s (the norm of the parameters' norms, of gradients cast
to the master dtype). Sharded gradients are summed as powers in float64, so that the result depends on where the shards were
cut only in the last bits of float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from lightning_ptm.torch_internals import foreach_norm, group_by_device_and_dtype
from lightning_ptm.update.flat_states import FlatStates, Segment, StateRun
from lightning_ptm.update.gradient_source import NO_TRANSFORM, GradientReader, Transform

_PIECE_NUMEL = 1 << 20


@torch.no_grad()
def parameter_norms(
    states: FlatStates,
    reader: GradientReader,
    present: Sequence[bool],
    *,
    norm_type: float = 2.0,
    dtype: torch.dtype = torch.float32,
    transform: Transform = NO_TRANSFORM,
) -> list[torch.Tensor]:
    """Returns a 0-dim norm for each parameter with a gradient, in flat order; world size 1 only.

    Args:
        states: the flat's states, which have the positions of its parameters.
        reader: the whole flat's gradient.
        present: for each parameter, whether it has a gradient.
        norm_type: p of the p-norm, `inf` included.
        dtype: dtype in which the optimizer gets gradients; the norm is taken of the gradient cast to it.
        transform: applied first: the loss scale is undone and earlier clips of this step are applied.

    Temporary memory: one parameter's gradient in `dtype`, when a cast or a factor is needed.
    """
    caster = _Caster(dtype, transform)
    norms: list[torch.Tensor] = []
    for segment in states.segments:
        if present[segment.parameter] and states.groups[segment.parameter] is not None:
            run = StateRun(0, None, segment.start, segment.numel, (segment,))
            norms.extend(foreach_norm([caster.values(reader, run)], norm_type))
    return norms


@torch.no_grad()
def total_norm(norms: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Returns the global norm (0-dim) of parameters' norms, combined as in torch.nn.utils.get_total_norm."""
    if not norms:
        return torch.tensor(0.0)
    if len({norm.dtype for norm in norms}) > 1:  # torch stacks them grouped by dtype, an order that affects rounding
        groups = group_by_device_and_dtype([list(norms)])
        norms = [norm for (of_one_dtype,), _ in groups.values() for norm in of_one_dtype if norm is not None]
    first = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), norm_type)


@torch.no_grad()
def shard_power(
    states: FlatStates,
    reader: GradientReader,
    present: Sequence[bool],
    *,
    norm_type: float = 2.0,
    dtype: torch.dtype = torch.float32,
    transform: Transform = NO_TRANSFORM,
) -> torch.Tensor:
    """Returns this shard's part of the global norm: sum of |g|^p (for `inf` the greatest |g|), 0-dim float64.

    The sum over ranks (`inf`: the maximum) goes to `norm_of_power`. Arguments as in `parameter_norms`.
    """
    caster = _Caster(dtype, transform)
    total: torch.Tensor | None = None
    for segment in states.segments:
        if not present[segment.parameter] or states.groups[segment.parameter] is None:
            continue
        for run in _pieces(segment):
            norm = torch.linalg.vector_norm(caster.values(reader, run), norm_type, dtype=torch.float64)
            part = norm if math.isinf(norm_type) else norm**norm_type
            if total is None:
                total = part
            else:
                total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    return total if total is not None else torch.zeros((), dtype=torch.float64)


def norm_of_power(power: torch.Tensor, norm_type: float = 2.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the global norm from the sum of all shards' `shard_power`, 0-dim in `dtype`."""
    return (power if math.isinf(norm_type) else power ** (1.0 / norm_type)).to(dtype)


def clip_coefficient(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor of clipping by norm, 0-dim: min(1, max_norm / (total + 1e-6)), as clip_grad_norm_ computes it."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


@torch.no_grad()
def greatest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the greatest absolute value of all elements, 0-dim float64: inf or NaN if any element is.

    The result is on the tensors' device, without a wait for it; it is 0 in RAM if there are no elements. One pass, without a
    temporary of the tensors' size.
    """
    total: torch.Tensor | None = None
    for tensor in tensors:
        if tensor.numel():
            part = torch.linalg.vector_norm(tensor.detach(), math.inf).double()
            total = part if total is None else torch.maximum(total, part.to(total.device))
    return total if total is not None else torch.zeros((), dtype=torch.float64)


class _Caster:
    """Gradients as the optimizer would get them: views where possible, else copies in one buffer that grows."""

    def __init__(self, dtype: torch.dtype, transform: Transform) -> None:
        self._dtype = dtype
        self._transform = transform

        self._buffer = torch.empty(0, dtype=dtype)

    def values(self, reader: GradientReader, run: StateRun) -> torch.Tensor:
        """Returns the run's elements, valid until the next call."""
        view = reader.view(run)
        if view is not None and view.dtype == self._dtype and self._transform.is_identity:
            return view
        device = view.device if view is not None else self._buffer.device
        if self._buffer.numel() < run.numel or self._buffer.device != device:
            self._buffer = torch.empty(run.numel, dtype=self._dtype, device=device)
        copy = self._buffer.narrow(0, 0, run.numel)
        reader.read_into(copy, run)
        self._transform.apply_(copy)
        return copy


def _pieces(segment: Segment) -> Iterator[StateRun]:
    for offset in range(0, segment.numel, _PIECE_NUMEL):
        count = min(_PIECE_NUMEL, segment.numel - offset)
        part = Segment(segment.parameter, segment.start + offset, segment.parameter_start + offset, count, False)
        yield StateRun(0, None, part.start, count, (part,))
