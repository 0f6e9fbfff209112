"""Synchronization of module buffers (running statistics, codebooks, random features): they follow rank 0, as under DDP.

Buffers are not model states: each rank has all of them, outside pages. Checkpoints contain those of rank 0.

I1: a step begins with the same buffers on all ranks, and so does the first batch of an evaluation during training. As
    with DDP, this does not hold for the step after an evaluation: changes made by the evaluation, or by a micro-batch
    before the last one of a step, stay local until the next synchronization. Under manual optimization, as with
    Lightning's DDP, buffers are the same when the first iteration begins (it may be the sanity check's), and local from
    then on, except in an iteration after a backward pass outside of steps. Outside of training they are local from
    set-up on.
I2: nothing is sent while no rank has changed a buffer. Changes are detected by bytes, since torch's versions miss some
    writes (`.data`, numpy, batch_norm's running statistics). Buffers on a GPU, whose bytes are not in RAM, are always
    sent.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_ptm.comm import Communicator
from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.torch_internals import buffers_in, children_in, ignored_by_ddp


class ModuleBuffers:
    """The buffers of one module, on one of several ranks.

    Args:
        communicator: of all ranks.
        trains: whether the run trains.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, *, trains: bool) -> None:
        self._module = module
        self._communicator = communicator
        self._due = trains
        self._known: dict[nn.Module, list[Any]] = {}
        """Contents of the buffers when all ranks had the same."""

    def changed(self) -> bool:
        """Whether this rank's buffers may differ from those of rank 0, and a synchronization is due."""
        return self._due and any(self._has_changed(owner, buffers) for owner, buffers in self._owners())

    def check_unchanged(self) -> None:
        """Checks that no step has changed buffers, as far as their bytes are in RAM.

        Raises:
            UsageError: one has, and only the ranks of one pipeline stage have run the code that did it.
        """
        for owner, buffers in self._owners() if self._due else ():
            known = self._known.get(owner)
            if known is not None and None not in known and self._has_changed(owner, buffers):
                names = ", ".join(name for name, _ in buffers)
                raise UsageError(
                    f"buffers of {type(owner).__name__} ({names}) have changed in a training step; with "
                    f"pipeline_parallel_size other stages do not run the code that changes them, and checkpoints have rank "
                    f"0's; leave out what changes buffers, or use pipeline_parallel_size=1"
                )

    def iteration_begins(self, *, compare_next: bool) -> None:
        """Begins an iteration of this rank, after a synchronization if any rank needed one and all take part.

        Args:
            compare_next: whether the next iteration checks for changes made by this one.
        """
        self._due = compare_next

    def backward_outside(self, *, reduced: bool) -> None:
        """Begins a backward pass of manual optimization outside of a step.

        Args:
            reduced: whether its gradients are reduced.
        """
        self._due = reduced

    def follow_rank_0(self) -> None:
        """Copies the values of rank 0's buffers to this rank. Collective.

        Raises:
            RankError: ranks have different buffers. It is raised on all ranks.
        """
        owners = self._owners()
        self._check_alike(owners)
        flags = torch.tensor([self._has_changed(*each) for each in owners], dtype=torch.int64)
        flags = self._communicator.all_reduce(flags, maximum=True)
        chosen = [each for each, flag in zip(owners, flags.tolist(), strict=True) if flag]
        places = [(owner, name, buffer) for owner, buffers in chosen for name, buffer in buffers if buffer.numel()]
        for device in sorted({str(buffer.device) for *_, buffer in places}):
            self._follow([place for place in places if str(place[2].device) == device])
        known = self._known
        self._known = {owner: known[owner] for owner, _ in owners if owner in known}
        for owner, buffers in self._owners():
            if owner not in known or any(owner is each for each, _ in chosen):
                self._known[owner] = [_seen(buffer) for _, buffer in buffers]

    def _follow(self, places: list[tuple[nn.Module, str, Tensor]]) -> None:
        packed = torch.cat([_bytes(buffer) for *_, buffer in places])
        self._communicator.broadcast(packed)
        if self._communicator.rank == 0:
            return
        parts = packed.split([buffer.nbytes for *_, buffer in places])
        with torch.no_grad():
            for (owner, name, buffer), part in zip(places, parts, strict=True):
                value = part.clone().view(buffer.dtype).view(buffer.shape)
                if buffer.is_inference():  # inference tensors must not be written to
                    buffers_in(owner)[name] = value
                else:
                    buffer.copy_(value)

    def _check_alike(self, owners: _Owners) -> None:
        kinds = [
            f"{type(owner).__name__}.{name}: {buffer.dtype} {list(buffer.shape)}"
            for owner, buffers in owners
            for name, buffer in buffers
        ]
        digest = int.from_bytes(blake2b("\n".join(kinds).encode(), digest_size=7).digest(), "big")
        most, least = self._communicator.all_reduce(torch.tensor([digest, -digest]), maximum=True).tolist()
        if most != -least:
            kinds_0 = self._communicator.broadcast_object(kinds)
            other = next((kind for kind in kinds if kind not in kinds_0), "")
            raise RankError(
                f"ranks have different buffers of modules{other and f' (here {other}, which rank 0 has not)'}, so "
                "rank 0's cannot be copied when a step begins; register the same buffers on all ranks, or name those "
                f"that are local to each rank in `self.{ignored_by_ddp()} = [...]` of the LightningModule"
            )

    def _owners(self) -> _Owners:
        """Modules with buffers that are not local, and these buffers by name."""
        ignored = getattr(self._module, ignored_by_ddp(), ())
        own = {id(buffer) for name, buffer in self._module.named_buffers() if name in ignored} if ignored else set()
        found = (
            (owner, [(name, buffer) for name, buffer in buffers_in(owner).items() if _is_shared(buffer, own)])
            for owner in _modules_in(self._module)
            if buffers_in(owner)
        )
        return [(owner, buffers) for owner, buffers in found if buffers]

    def _has_changed(self, owner: nn.Module, buffers: list[tuple[str, Tensor]]) -> bool:
        known = self._known.get(owner)
        return known is None or None in known or known != [_seen(buffer) for _, buffer in buffers]


def _modules_in(root: nn.Module) -> list[nn.Module]:
    """Lists the modules of `root.modules()`, in its order, but without nested generators, since it runs at each
    step."""
    found: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [root]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            ahead.extend(reversed(children_in(module).values()))
    return list(found)


_Owners = list[tuple[nn.Module, list[tuple[str, Tensor]]]]


def _is_shared(buffer: Tensor | None, own: set[int]) -> TypeGuard[Tensor]:
    return buffer is not None and buffer.layout is torch.strided and not buffer.is_meta and id(buffer) not in own


def _bytes(buffer: Tensor) -> Tensor:
    """The values of a buffer as contiguous bytes; a view if the buffer is contiguous."""
    return buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _seen(buffer: Tensor) -> Any:
    """A fingerprint that is equal if the buffer is unchanged; None if the bytes are not in RAM."""
    if not in_ram(buffer):
        return None
    return buffer.dtype, tuple(buffer.shape), zlib.crc32(_bytes(buffer).numpy().data) if buffer.numel() else 0
