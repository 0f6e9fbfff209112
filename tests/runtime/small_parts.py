"""Small real parts of a run, put together by hand: pages of RAM and of a disk, the flats of a small module, their stores, and
the other one of two ranks. For tests of one module of the runtime at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptm.comm import SoloCommunicator, Work
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.fetch_policy import Among
from lightning_ptm.planning.layout import FlatLayout, ModelLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.sharding import shared_by_all
from lightning_ptm.runtime.deciding.gradient_route import GradientRoute
from lightning_ptm.runtime.gradients.store import PageSupply
from lightning_ptm.runtime.tensors.page_io import PageIO
from lightning_ptm.runtime.units.binding import FlatBinding, PageViews
from lightning_ptm.runtime.units.discovery import Unit, discover
from lightning_ptm.runtime.units.store import FlatStore, UnitStore
from lightning_ptm.terms import Tier

PAGE = 64 * 1024
NUMEL = PAGE // 4
"""Elements of fp32 in a page."""


class OnePage(nn.Module):
    """A unit whose parameters fill one page of fp32, to the last element; two pages for two ranks where it is `double`."""

    def __init__(self, double: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1 + double, NUMEL - 64))
        self.bias = nn.Parameter(torch.randn((1 + double) * 64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0, :8] + self.bias[:8]


class Model(nn.Module):
    """A root without parameters, and so many units of a page each behind it."""

    def __init__(self, count: int, double: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(OnePage(double) for _ in range(count))


class UnderWay:
    """A handle of torch's, of a collective that ends when it is waited for."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None: ...


class Twin:
    """The communicator of the first of two ranks. What the other one has is told in `theirs` and `their_values`; nothing is
    computed before somebody waits for it.

    Attributes:
        theirs: the other rank's full flat of the next reduction; None: zeros. Its shard of an all-gather is as ours.
        their_values: of small reductions; None: as ours.
    """

    rank, world_size, alone = 0, 2, False

    def __init__(self) -> None:
        self.theirs: Tensor | None = None
        self.their_values: Tensor | None = None
        self.issued: list[str] = []

    def all_gather(self, shard: Tensor, full: Tensor, flat: FlatLayout) -> Work:
        self.issued.append(f"gather {flat.index}")

        def finish() -> None:
            for piece in flat.pieces(0):
                part = shard[piece.shard_start : piece.shard_start + piece.numel]
                full[piece.full_start : piece.full_start + 2 * piece.numel].view(2, -1).copy_(part.expand(2, -1))

        return Work([UnderWay()], finish=finish)

    def reduce_scatter(self, full: Tensor, shard: Tensor, flat: FlatLayout, divisor: float) -> Work:
        self.issued.append(f"reduce {flat.index}")
        theirs, self.theirs = self.theirs, None

        def finish() -> None:
            total = (full if theirs is None else full + theirs) / divisor
            for piece in flat.pieces(0):
                shard[piece.shard_start : piece.shard_start + piece.numel] = total[piece.full_start :][: piece.numel]

        return Work([UnderWay()], finish=finish)

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        self.issued.append("maximum" if maximum else "sum")
        theirs = values if self.their_values is None else self.their_values
        return values.copy_(torch.maximum(values, theirs) if maximum else values + theirs)


@dataclasses.dataclass
class WatchedStore(UnitStore):
    """A unit's store that writes down what moved."""

    log: list[str] = dataclasses.field(default_factory=list)

    def start_fetch(
        self, agree: Callable[[], None] | None, frames: Sequence[int] = (), *, among: Among = Among.ANY
    ) -> None:
        super().start_fetch(agree, frames, among=among)
        self.log.append(f"fetch {self.unit.index}")

    def release(self) -> None:
        if self.movable:
            self.log.append(f"release {self.unit.index}")
        super().release()

    def evict(self) -> None:
        if self.has_spare_shards:
            self.log.append(f"evict {self.unit.index}")
        super().evict()


class Parts:
    """Units of a module whose parameters have homes in pages, filled with the parameters' values.

    Args:
        module: its modules of the classes `wanted` are units.
        home: tier of the compute parameters.
        device_pages: of the device tier, beside homes that are there.
        world_size: 2: this is the first of two ranks that are alike.
        gradient_itemsize: bytes of an element of a gradient at home; 0: as the parameters.
        dtype: of the parameters when they compute.
        settings: of all bindings.
    """

    def __init__(
        self,
        module: nn.Module,
        wanted: Sequence[str] = ("OnePage",),
        *,
        home: Tier = Tier.HOST,
        device_pages: int = 16,
        world_size: int = 1,
        disk: Path | None = None,
        gradient_itemsize: int = 0,
        dtype: torch.dtype = torch.float32,
        late: Collection[int] = (),
        **settings: Any,
    ) -> None:
        self.module = module
        self.units = discover(module, list(wanted) or "auto")
        self.layout = lay_out(self.units, world_size, gradient_itemsize, dtype)
        homes = sum(flat.shard_pages for flat in self.layout.flats) if home is Tier.DEVICE else 0
        self.allocator = Allocator(
            page_size=PAGE,
            backend=CpuBackend(),
            sizes={
                Tier.DEVICE: (device_pages + homes) * PAGE,
                Tier.HOST: 12 * PAGE,
                Tier.DISK: 12 * PAGE if disk else 0,
            },
            disk_paths=[disk] if disk else [],
            io_threads_per_path=1,
            poison=True,
        )
        self.views = PageViews(self.allocator.holds)
        self.communicator: Any = SoloCommunicator() if world_size == 1 else Twin()
        self.sharing = shared_by_all(Mesh({Axis.DATA: world_size})).common.whole
        self.log: list[str] = []
        self.values: dict[int, Tensor] = {}
        """By flat, this rank's shard."""
        self.stores = [self._store(unit, home, dtype, unit.index in late, settings) for unit in self.units]
        self.free_at_first = self.device_pages_free

    def _store(self, unit: Unit, home: Tier, dtype: torch.dtype, late: bool, settings: dict[str, Any]) -> WatchedStore:
        by_name = {item.name: item.parameter for item in unit.parameters}
        flats = []
        for layout in self.layout.flats_of(unit.index):
            parameters = [by_name[slot.spec.name] for slot in layout.slots]
            binding = FlatBinding(layout, parameters, dtype, torch.device("cpu"), views=self.views, **settings)
            whole = torch.zeros(layout.padded_numel, dtype=dtype)
            for slot, parameter in enumerate(parameters):
                binding.arrangement.view(whole, slot).copy_(parameter.detach())
            pieces = [whole[piece.full_start : piece.full_start + piece.numel] for piece in layout.pieces(0)]
            shard = self.values[layout.index] = torch.cat(pieces)
            flats.append(FlatStore(layout, binding, self.paged(shard, home), self.allocator, self.communicator))
            binding.unbind()
            if flats[-1].resident:
                flats[-1].bind_resident()
        return WatchedStore(unit, tuple(flats), (), late, self.log)

    def paged(self, values: Tensor, tier: Tier) -> PagedTensor:
        """New pages with these values."""
        tensor = self.allocator.allocate("values", values.numel(), values.dtype, tier)
        buffer = self.allocator.allocate("buffer", values.numel(), values.dtype, Tier.HOST)
        buffer.tensor().copy_(values)
        self.allocator.copy(buffer, tensor).wait(host=True)
        self.allocator.release(buffer)
        return tensor

    def supply(self, flat: FlatStore, way: GradientRoute) -> PageSupply:
        """Returns the supply of pages for a gradient with pages of its own."""
        numel, allocate = flat.layout.shard_numel, self.allocator.allocate
        return PageSupply(
            lambda: allocate("gradient", numel, way.dtype, way.tier, shared_tail=True), self.allocator.release
        )

    def read(self, paged: PagedTensor) -> Tensor:
        return PageIO(self.allocator).read(paged)

    @property
    def flats(self) -> list[FlatStore]:
        return [flat for store in self.stores for flat in store.flats]

    @property
    def device_pages_free(self) -> int:
        return self.allocator.free_bytes(Tier.DEVICE) // PAGE

    @property
    def live(self) -> list[int]:
        """Units whose flats are gathered."""
        return [store.unit.index for store in self.stores if store.flats and store.live]

    def logged(self) -> list[str]:
        """Returns the moves since the last call."""
        moved = list(self.log)
        self.log.clear()
        return moved


@contextmanager
def parts(module: nn.Module, wanted: Sequence[str] = ("OnePage",), **settings: Any) -> Iterator[Parts]:
    """Parts whose threads and files end with the block."""
    made = Parts(module, wanted, **settings)
    try:
        yield made
    finally:
        made.allocator.close()


def lay_out(
    units: Sequence[Unit], world_size: int = 1, gradient_itemsize: int = 0, dtype: torch.dtype = torch.float32
) -> ModelLayout:
    """Flats of units, as a blueprint lays them out: trainable parameters of one dtype, and frozen ones."""
    specs = [
        UnitSpec(
            unit.name or "root",
            tuple(
                ParameterSpec(
                    item.name,
                    tuple(item.parameter.shape),
                    str(dtype).removeprefix("torch."),
                    dtype.itemsize,
                    item.parameter.requires_grad,
                    0 if item.parameter.requires_grad else -1,
                    gradient_itemsize=gradient_itemsize,
                )
                for item in unit.parameters
            ),
        )
        for unit in units
    ]
    return build_layout(specs, page_size=PAGE, world_size=world_size)
