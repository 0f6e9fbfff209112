"""Checks that ranks of one batch compute the same batches with the same random numbers.

Each rank has slices of the same layers, or tokens of the same sequences; with different batches the result would be wrong
without an error. The first batches
of each loader are compared before they are used, by a collective of their own. The digest of every batch is attached to the
message with which the group meets for its next exchange (`runtime/ranks/activation_exchange.py`), so it costs no message.

Before a module is sliced, its values are made the same on the group's ranks, too: if ranks initialized it with different
random numbers, or loaded it from a file on one rank only, their slices would not fit together. Pages take the values of the
first rank that has a slice (runtime/full_params/parameter_values.py, I1), so equal values within each tensor group suffice.

Owns how many batches of each loader were compared in a run. Knows batches as nested data, and of models their parameters.

I1: only the first batches are read from a device, since such a read waits for all the work queued there.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.memory.backend import Backend, in_ram
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter

FIRST = 3
"""Number of batches of each loader that are compared at once; after them, the first batch of each pass over it.

A sampler that splits data by rank shows in the first batch, unless the data happen to begin alike. Random draws in this
process (an augmentation, dropout) diverge after the first batch was drawn, or the first step was computed, so they show
in the second and third.
"""


class SameBatches:
    """Comparison of batches and random states among ranks that compute the same batch.

    Args:
        group: these ranks.
        settings: why they do, in words.
        backend: of the device that computes.
        tell: attaches a text to the group's next exchange, which raises if the texts of its ranks differ.
    """

    def __init__(self, group: ProcessGroup, settings: str, backend: Backend, tell: Callable[[str], None]) -> None:
        self._group = group
        self._settings = settings
        self._backend = backend
        self._tell = tell
        self._moved: tuple[Any, int] | None = None
        """The batch that was moved last, as it is on the device, and its digest from before the move."""
        self._compared: dict[tuple[str, int], int] = {}
        """Number of batches compared, by stage and loader."""

    def move(self, batch: Any, to_device: Callable[[], Any]) -> Any:
        """Moves a batch by `to_device`, after its digest was computed in RAM."""
        known = (
            digest(batch, here_alone=True) if self._backend.has_own_memory else None
        )  # on a CPU, `check` computes it
        moved = to_device()
        self._moved = None if known is None else (moved, known)
        return moved

    def check(self, batch: Any, stage: str, *, loader: int = 0, index: int = 0) -> None:
        """Compares a batch: at once if it is one of the first, else with the next exchange. Comparing at once is collective
        in the group, for ranks that have a batch; a rank without one is detected as in any collective.

        Args:
            stage: what the batch is for ("train", "validate"...).
            index: its number in this pass over its loader.

        Raises:
            UsageError: ranks have different batches or random states; on all ranks of the group.
        """
        known, numbers = self._compared.get((stage, loader), 0), self._random_digest()
        if known < FIRST or not index:
            self._compared[stage, loader] = known + 1
            self._compare(batch, numbers, f"({stage}, loader {loader}, batch {index})")
        self._tell(f"{index} ({stage}, loader {loader}; digest {self._digest(batch):x}, random numbers {numbers:x})")

    def _digest(self, batch: Any) -> int:
        """Digest of those parts of a batch that are, or were, in RAM (I1)."""
        moved, self._moved = self._moved, None
        return moved[1] if moved is not None and moved[0] is batch else digest(batch, here_alone=True)

    def _compare(self, batch: Any, random_digest: int, where: str) -> None:
        ours = torch.tensor([digest(batch), random_digest], device=self._backend.device)
        table = ours.new_empty(self._group.size(), 2)
        dist.all_gather(list(table.unbind(0)), ours, group=self._group)
        batches, numbers = table.t().tolist()
        self._refuse_different(batches, f"different batches {where}", _OTHER_BATCHES)
        self._refuse_different(numbers, f"different states of torch's random numbers {where}", _OTHER_NUMBERS)

    def _refuse_different(self, found: list[int], what: str, remedy: str) -> None:
        ranks = dist.get_process_group_ranks(self._group)
        others = [rank for rank, each in zip(ranks, found, strict=True) if each != found[0]]
        if others:
            raise UsageError(
                f"ranks {', '.join(map(str, ranks))} have to compute the same batch ({self._settings}) and have "
                f"{what}: {_named(others)} other ones than rank {ranks[0]}; the result would be wrong. {remedy}"
            )

    def _random_digest(self) -> int:
        own = self._backend.random_state()
        return digest([torch.get_rng_state(), own])


def _named(ranks: list[int]) -> str:
    one = len(ranks) == 1
    return f"rank{'' if one else 's'} {', '.join(map(str, ranks))} {'has' if one else 'have'}"


_OTHER_BATCHES = (
    "A sampler or data set that divides data by trainer.world_size and trainer.global_rank has to go by "
    "trainer.strategy.distributed_sampler_kwargs instead (num_replicas, rank), as in "
    "DistributedSampler(data, **trainer.strategy.distributed_sampler_kwargs); what a data set draws at random needs the same "
    "seed on these ranks: seed_everything(seed, workers=True)"
)
_OTHER_NUMBERS = (
    "Draw random numbers on all of these ranks alike, or from a generator of your own (torch.Generator, numpy's default_rng) "
    "where one rank alone draws"
)


def digest(batch: Any, *, here_alone: bool = False) -> int:
    """A number below 2**63 that identifies a batch by its tensors, arrays, numbers and texts, in mappings, sequences, data
    classes and objects that can be moved to a device (`to`). Other objects count by their class only. One pass over the
    bytes: 2 ms for 37 MiB, on one core.

    Args:
        here_alone: of tensors that are not in RAM, use only shape and dtype.
    """
    hasher = xxhash.xxh3_64()
    _add(hasher, batch, set(), here_alone)
    return int(hasher.intdigest()) >> 1


def _add(hasher: Any, value: Any, around: set[int], here_alone: bool) -> None:
    if id(value) in around:
        return
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        _add_tensor(hasher, value, here_alone)
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype != object:
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        hasher.update(f"{type(value).__name__}:{value!r};".encode())
    else:
        parts = _parts_of(value)
        hasher.update(f"{type(value).__qualname__}[{len(parts)}".encode())
        for part in parts:
            _add(hasher, part, around | {id(value)}, here_alone)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if callable(getattr(value, "to", None)):  # Lightning moves such objects to a device as a whole
        return list(vars(value).values()) if hasattr(value, "__dict__") else []
    return []


def _add_tensor(hasher: Any, value: Tensor, here_alone: bool) -> None:
    hasher.update(f"{value.dtype}{tuple(value.shape) if not value.is_nested else ''}".encode())
    if here_alone and not in_ram(value):
        return
    if value.is_nested or value.layout is torch.sparse_coo:
        whole = value.detach()
        for part in whole.unbind() if whole.is_nested else (whole.coalesce().indices(), whole.coalesce().values()):
            _add_tensor(hasher, part, here_alone)
    elif value.layout is torch.strided and not value.is_meta and not value.is_quantized:
        flat = value.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def take_first_rank_s_values(module: nn.Module, group: ProcessGroup, backend: Backend) -> None:
    """Copies the first rank's values into parameters whose values differ between ranks. Parameters without values are left
    as they are. Collective in the group; reads all values once, and exchanges those that differ.

    Raises:
        RankError: another rank did not arrive, such as one whose `configure_optimizers` has failed.
    """
    parameters = list(module.parameters())
    ours = [0 if each.is_meta or isinstance(each, GuardedParameter) else digest(each) for each in parameters]
    of_ranks: list[list[int]] = [[] for _ in range(group.size())]
    try:
        dist.all_gather_object(of_ranks, ours, group=group)
    except RuntimeError as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RankError(
            f"another rank of the tensor group of rank {dist.get_rank()} has failed, or hangs, while the run was set up "
            f"({first_line}); look for the first error among the ranks' logs"
        ) from error
    if any(len(each) != len(ours) for each in of_ranks):
        return  # different modules, which is reported when ranks compare their parameters
    for parameter, *digests in zip(parameters, *of_ranks, strict=True):
        if len(set(digests)) > 1 and all(digests):
            with torch.no_grad():
                value = parameter.detach().to(backend.device).contiguous()
                dist.broadcast(value, group=group, group_src=0)
                parameter.copy_(value)
