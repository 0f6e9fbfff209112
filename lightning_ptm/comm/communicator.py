"""The collectives of pages: one stripe of a flat at a time (section 3 of the design; the paper's Communicator).

Owns the process groups and the stream that collectives run on. Knows flats and tensors, never units' meaning.
World size 1 takes the same path with `SoloCommunicator`.

I1: an all-gather of stripe i writes piece r of rank r straight into its place in the full flat; nothing is merged.
I2: `Work` keeps every buffer of a collective alive and is waited on once.
I3: a reduction adds the ranks' pieces in rank order, in fp32 on CPU, and rounds once.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptm.comm.agreement import Row
from lightning_ptm.errors import RankError
from lightning_ptm.planning.layout import FlatLayout


class Work:
    """A started collective. `wait` returns when its result may be read on the current stream."""

    def __init__(
        self, handles: Sequence[Any], buffers: Sequence[Tensor], finish: Callable[[], None] | None = None
    ) -> None:
        self._handles = list(handles)
        self._buffers = list(buffers)
        self._finish = finish

    def wait(self) -> None:
        """Waits once; later calls return at once.

        Raises:
            RankError: another rank is gone or the collective timed out.
        """
        handles, self._handles = self._handles, []
        for handle in handles:
            _guarded(handle.wait)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._buffers = []

    def done(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def _guarded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise RankError(
            f"a collective failed ({str(error).strip().splitlines()[0]}); another rank has probably died or hangs, so "
            f"this one stops; look for the first error among the ranks' logs"
        ) from error


class Communicator(Protocol):
    """What the runtime needs of the other ranks. Every method but the queries is collective."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        """`shard` (shard_numel,) of every rank -> `full` (padded_numel,), stripe by stripe."""

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout) -> Work:
        """Mean over ranks of `full` (padded_numel,) -> this rank's pieces in `shard` (shard_numel,)."""

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """Sum (or maximum) over ranks of a small tensor, in place; returns it."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...
    def broadcast_object(self, value: Any, source: int = 0) -> Any: ...
    def exchange(self, row: Row) -> Sequence[Row]: ...
    def send(self, page: Tensor, rank: int) -> Work:
        """The paper's Page.send: the bytes of a page to another rank."""

    def receive(self, page: Tensor, rank: int) -> Work:
        """The paper's Page.receive."""

    def close(self) -> None: ...


class SoloCommunicator:
    """One rank: its shard is the whole flat."""

    rank = 0
    world_size = 1

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        if shard.data_ptr() != full.data_ptr():
            full.copy_(shard)
        return Work([], [])

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout) -> Work:
        if shard.data_ptr() != full.data_ptr():
            shard.copy_(full)
        return Work([], [])

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return None

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def exchange(self, row: Row) -> Sequence[Row]:
        return [row]

    def send(self, page: Tensor, rank: int) -> Work:
        raise RankError(f"there is one rank only; rank {rank} does not exist")

    def receive(self, page: Tensor, rank: int) -> Work:
        raise RankError(f"there is one rank only; rank {rank} does not exist")

    def close(self) -> None:
        return None


def _stripes(flat: FlatLayout, full: Tensor, shard: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs (stripe of `full`: world_size pieces; this rank's piece in `shard`)."""
    pairs = []
    for piece in flat.pieces(0):  # stripes lie at the same places for every rank
        start = piece.full_start
        pairs.append(
            (
                full[start : start + flat.world_size * piece.numel],
                shard[piece.shard_start : piece.shard_start + piece.numel],
            )
        )
    return pairs


class ProcessGroupCommunicator:
    """Collectives over torch.distributed: NCCL on CUDA, gloo on CPU, and a gloo group for agreements.

    Args:
        device: the compute device of this rank; decides the backend of the data group.
        timeout: after this long without an answer of the others a collective fails (`RankError`).
    """

    def __init__(self, device: torch.device, timeout: datetime.timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._data = _guarded(dist.new_group, backend=backend, timeout=timeout)
        self._control = _guarded(dist.new_group, backend="gloo", timeout=timeout)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rows_in = torch.zeros(3, dtype=torch.int64)
        self._rows_out = torch.zeros(3 * self.world_size, dtype=torch.int64)
        # torch 2.13 renamed the flat collectives and warns for the old names.
        self._all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        with self._on_stream():
            handles = [
                _guarded(self._all_gather_flat, stripe, piece, group=self._data, async_op=True)
                for stripe, piece in _stripes(flat, full, shard)
            ]
        return Work(handles, [shard, full], self._join)

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout) -> Work:
        if self._device.type == "cuda":
            with self._on_stream():
                handles = [
                    _guarded(
                        self._reduce_scatter_flat, piece, stripe, op=dist.ReduceOp.AVG, group=self._data, async_op=True
                    )
                    for stripe, piece in _stripes(flat, full, shard)
                ]
            return Work(handles, [full, shard], self._join)
        # gloo's reduce-scatter moves all ranks' data to all ranks and adds in 16 bit; an all-to-all moves each piece
        # once, and we add in fp32, in rank order (I3).
        received = torch.empty_like(full)
        pairs = _stripes(flat, received, shard)
        handles = [
            _guarded(dist.all_to_all_single, into, stripe, group=self._data, async_op=True)
            for (stripe, _), (into, _) in zip(_stripes(flat, full, shard), pairs, strict=True)
        ]

        def add() -> None:
            for into, piece in pairs:
                parts = into.view(self.world_size, piece.numel())
                total = parts[0].to(torch.promote_types(piece.dtype, torch.float32), copy=True)
                for rank in range(1, self.world_size):
                    total.add_(parts[rank])
                piece.copy_(total.div_(self.world_size))

        return Work(handles, [full, received, shard], add)

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        # On the control group: values are small and the host needs them.
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        on_host = values.cpu()
        _guarded(dist.all_reduce, on_host, op=operation, group=self._control)
        values.copy_(on_host)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        _guarded(dist.broadcast, tensor, src=source, group=self._data if tensor.is_cuda else self._control)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        box = [value]
        _guarded(dist.broadcast_object_list, box, src=source, group=self._control)
        return box[0]

    def exchange(self, row: Row) -> Sequence[Row]:
        self._rows_in.copy_(torch.tensor(row, dtype=torch.int64))
        _guarded(self._all_gather_flat, self._rows_out, self._rows_in, group=self._control)
        values = self._rows_out.tolist()
        return [(values[3 * rank], values[3 * rank + 1], values[3 * rank + 2]) for rank in range(self.world_size)]

    def send(self, page: Tensor, rank: int) -> Work:
        return Work([_guarded(dist.isend, page, rank, group=self._data)], [page])

    def receive(self, page: Tensor, rank: int) -> Work:
        return Work([_guarded(dist.irecv, page, rank, group=self._data)], [page])

    def close(self) -> None:
        """Destroys the two groups. Not collective: a rank that failed closes alone."""
        for group in (self._data, self._control):
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _on_stream(self) -> Any:
        if self._stream is None:
            return torch.no_grad()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
