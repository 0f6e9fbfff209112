"""Buffers of modules (running statistics, codebooks, random features) with several ranks: they are rank 0's, as under DDP.

They are no model states: each rank has all of them, outside pages. What is saved is rank 0's.

I1: a step begins with the same buffers on all ranks, and so does the first batch of an evaluation in mid-run. What an
evaluation writes to them, or a micro-batch before the last one of a step, stays each rank's own until then.
I2: nothing is sent while no rank has changed any.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor, nn

from lightning_ptm.comm import Communicator
from lightning_ptm.errors import RankError

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of the module by which DDP is told which ones are each rank's own."""


class ModuleBuffers:
    """Those of one module, on one of several ranks.

    Args:
        communicator: of all ranks.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        self._module = module
        self._communicator = communicator
        self._due = True
        self._known: dict[nn.Module, list[tuple[Tensor, int]]] = {}

    def changed(self) -> bool:
        """Whether this rank's may have ceased to be rank 0's, and it matters now."""
        return self._due and any(self._has_changed(owner) for owner in self._owners())

    def iteration_begins(self, *, compare_next: bool) -> None:
        """One of this rank's; all of them have followed rank 0 if any has changed some and they are in it together.

        Args:
            compare_next: whether what this iteration changes is to be looked for when the next one begins.
        """
        self._due = compare_next

    def follow_rank_0(self) -> None:
        """Gives this rank's the values of rank 0's. Collective.

        Raises:
            RankError: ranks have different ones. It is raised on all ranks.
        """
        owners = list(self._owners())
        self._check_alike(owners)
        flags = torch.tensor([self._has_changed(owner) for owner in owners], dtype=torch.int64)
        flags = self._communicator.all_reduce(flags, maximum=True)
        chosen = [owner for owner, flag in zip(owners, flags.tolist(), strict=True) if flag]
        places = [(owner, name, buffer) for owner in chosen for name, buffer in self._of(owner) if buffer.numel()]
        for device in sorted({str(buffer.device) for *_, buffer in places}):
            self._follow([place for place in places if str(place[2].device) == device])
        self._known = {owner: [(buffer, _version(buffer)) for _, buffer in self._of(owner)] for owner in owners}

    def _follow(self, places: list[tuple[nn.Module, str, Tensor]]) -> None:
        packed = torch.cat([buffer.detach().contiguous().view(-1).view(torch.uint8) for *_, buffer in places])
        self._communicator.broadcast(packed)
        if self._communicator.rank == 0:
            return
        parts = packed.split([buffer.nbytes for *_, buffer in places])
        with torch.no_grad():
            for (owner, name, buffer), part in zip(places, parts, strict=True):
                value = part.clone().view(buffer.dtype).view(buffer.shape)
                if buffer.is_inference():  # which may not be written to any more
                    owner._buffers[name] = value
                else:
                    buffer.copy_(value)

    def _check_alike(self, owners: list[nn.Module]) -> None:
        kinds = [
            f"{type(owner).__name__}.{name}: {buffer.dtype} {list(buffer.shape)}"
            for owner in owners
            for name, buffer in self._of(owner)
        ]
        digest = int.from_bytes(blake2b("\n".join(kinds).encode(), digest_size=7).digest(), "big")
        most, least = self._communicator.all_reduce(torch.tensor([digest, -digest]), maximum=True).tolist()
        if most != -least:
            told = self._communicator.broadcast_object(kinds)
            other = next((kind for kind in kinds if kind not in told), "")
            raise RankError(
                f"ranks have different buffers of modules{other and f' (here {other}, which rank 0 has not)'}; register the "
                f"same ones on all ranks, since they are rank 0's when a step begins, or name those that are each rank's own "
                f"in `self.{_IGNORED} = [...]` of the LightningModule"
            )

    def _owners(self) -> Iterator[nn.Module]:
        return (owner for owner in self._module.modules() if owner._buffers)

    def _of(self, owner: nn.Module) -> list[tuple[str, Tensor]]:
        own = self._own_values()
        return [
            (name, buffer)
            for name, buffer in owner._buffers.items()
            if buffer is not None and buffer.layout is torch.strided and not buffer.is_meta and id(buffer) not in own
        ]

    def _own_values(self) -> set[int]:
        ignored = getattr(self._module, _IGNORED, ())
        return {id(buffer) for name, buffer in self._module.named_buffers() if name in ignored} if ignored else set()

    def _has_changed(self, owner: nn.Module) -> bool:
        # Asked of all that a module has: torch's batch_norm writes to running statistics without counting it as a change,
        # and counts its batches.
        known, now = self._known.get(owner), self._of(owner)
        return (
            known is None
            or len(known) != len(now)
            or any(
                before is not buffer or version != _version(buffer)
                for (before, version), (_, buffer) in zip(known, now, strict=True)
            )
        )


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
