"""A stand-in for NCCL on the fake device, whatever its name: imported behind `fake_device`, before process groups are made.

As NCCL's, a group's collectives run on a stream of its own, behind what the current stream has queued when they are issued;
`Work.wait` makes the current stream wait, not the host, and keeps the tensors until then. gloo carries the bytes.

I1: the host learns nothing of the device by a collective: it reads what the stream has copied, and no clock is told.
    Otherwise each collective would order all that came before it, and hide what is not.
I2: sums are taken in float64, in rank order, and rounded once, so that all ranks have the same bits.

Limits: the host waits until all ranks have issued a collective (NCCL's does not), and no collective passes torch's operators
`c10d::*`, so `comm/user_collectives.py` hears of none. No messages from rank to rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from fake_library import NAME as DEVICE
from fake_library import lib
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

NAME = "fake_nccl"


def _read(tensor: Tensor) -> Tensor:
    """Copies what the current stream will find in a tensor of the device to RAM that is not page-locked (I1)."""
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    locked.copy_(tensor, non_blocking=True)
    lib.fc_run_current_stream()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    ctypes.memmove(host.data_ptr(), locked.data_ptr(), host.nbytes)  # the race detector does not see it
    return host


def _write(tensor: Tensor, value: Tensor) -> None:
    """Writes a tensor in the order of the current stream."""
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    locked.copy_(value.view(tensor.shape))
    tensor.copy_(locked, non_blocking=True)


class _Work(dist._Work):  # type: ignore[name-defined, misc]
    def __init__(self, event: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._event = event
        self._device = tensors[0].device  # whatever is current in the thread that waits
        self._tensors: Sequence[Tensor] = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()


def _done() -> Any:
    """The work of a collective that is over."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


class FakeNccl(dist.ProcessGroup):
    """A process group of the device's tensors; those of the host, which the real one refuses, go by gloo at once (Lightning's
    objects, for which torch asks a group of this kind for no device)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self._stream: Any = None

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    # -- what torch.distributed calls ---------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, options: Any = None) -> Any:
        return self._run([input], [output], lambda given: [self._gathered(given[0])])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> Any:
        return self._run(inputs, list(outputs[0]), lambda given: list(self._gathered(given[0])))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, options: Any) -> Any:
        def mine(given: Sequence[Tensor]) -> list[Tensor]:
            return [self._reduced(given[0], options.reduceOp).view(self._size, -1)[self._rank]]

        return self._run([input], [output], mine)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        return self._run(tensors, tensors, lambda given: [self._reduced(each, operation) for each in given])

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        def mine(given: Sequence[Tensor]) -> list[Tensor]:
            reduced = [self._reduced(each, options.reduceOp) for each in given]
            return reduced if options.rootRank == self._rank else list(given)

        return self._run(tensors, tensors, mine)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._run(tensors, tensors, lambda given: [self._gathered(each)[options.rootRank] for each in given])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], options: Any = None
    ) -> Any:
        def exchanged(given: Sequence[Tensor]) -> list[Tensor]:
            into = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(into, given[0].contiguous(), received, sent, dist.AllToAllOptions()).wait()
            return [into]

        return self._run([input], [output], exchanged)

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        torch.accelerator.synchronize()  # as NCCL's, which waits for a sum on the device
        return _done()

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    # -- how -----------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        collective: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> Any:
        with torch.no_grad():
            if inputs[0].device.type != DEVICE:
                for output, result in zip(outputs, collective(inputs), strict=True):
                    output.copy_(result.view(output.shape))
                return _done()
            if self._stream is None:
                self._stream = torch.Stream(inputs[0].device)
            self._stream.wait_stream(torch.accelerator.current_stream(inputs[0].device))
            with self._stream:
                for output, result in zip(outputs, collective([_read(each) for each in inputs]), strict=True):
                    _write(output, result)
                return _Work(self._stream.record_event(), (*inputs, *outputs))

    def _gathered(self, each: Tensor) -> Tensor:
        """(size, *shape)"""
        into = torch.empty((self._size, *each.shape), dtype=each.dtype)
        flat = each.contiguous().view(-1).view(torch.uint8)
        self._gloo._allgather_base(into.view(-1).view(torch.uint8), flat).wait()
        return into

    def _reduced(self, each: Tensor, operation: Any) -> Tensor:
        parts = self._gathered(each)
        if operation == dist.ReduceOp.MAX:
            return parts.amax(0)
        total = (parts.double() if each.is_floating_point() else parts).sum(0)  # I2
        if operation == dist.ReduceOp.AVG:
            total = total / self._size
        elif operation != dist.ReduceOp.SUM:
            raise NotImplementedError(f"the stand-in for NCCL has sums, means and maxima, no {operation}")
        return total.to(each.dtype)


def _in_place_of_nccl(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`function`, whose argument at `place` is the name of a library."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(NAME if index == place and each == "nccl" else each for index, each in enumerate(args))
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = NAME
        return function(*args, **kwargs)

    return call


dist.Backend.register_backend(NAME, FakeNccl, devices=[DEVICE])
for _name, _place in (("init_process_group", 0), ("new_group", 2)):
    _function = _in_place_of_nccl(getattr(c10d, _name), _place)
    setattr(dist, _name, _function)
    setattr(c10d, _name, _function)
