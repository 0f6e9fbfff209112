"""Construction of an Allocator: checks its settings, and creates the regions of its tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import DiskRegion, FileOps
from lightning_ptm.memory.paged_tensor import setting_of
from lightning_ptm.memory.region import Region
from lightning_ptm.memory.reused_extents import ReusedExtents
from lightning_ptm.progress import Progress
from lightning_ptm.terms import BLOCK_BYTES, MIN_PAGE_BYTES, Tier, is_page_size


def regions(
    backend: Backend, sizes: Mapping[Tier, int], undo: contextlib.ExitStack, *, pin: bool
) -> dict[Tier, Region]:
    """Returns the regions of the addressable tiers, by tier; `undo` gets a callback that closes each."""
    made: dict[Tier, Region] = {}
    for tier, size in sizes.items():
        if tier.addressable:
            made[tier] = backend.device_region(size) if tier.computes else backend.host_region(size, pin=pin)
            undo.callback(made[tier].close)
    return made


def disk_region(
    paths: Sequence[Path],
    page_size: int,
    total_frames: int,
    reused_extents: ReusedExtents | None,
    file_ops: FileOps | None,
    progress: Progress | None,
) -> DiskRegion:
    """Returns the region of the disk tier. Args and errors: see Allocator."""
    return DiskRegion(
        paths,
        page_size=page_size,
        total_frames=total_frames,
        file_ops=file_ops,
        progress=progress,
        predecessor=None if reused_extents is None else reused_extents.disk,
        frames=None if reused_extents is None else reused_extents.frames(total_frames),
    )


def check_settings(page_size: int, sizes: Mapping[Tier, int], disk_paths: Sequence[Path]) -> None:
    """Raises ConfigError for settings that cannot work: see Allocator."""
    if not is_page_size(page_size):
        raise ConfigError(
            f"page_size is {page_size} bytes; it must be a multiple of {BLOCK_BYTES} and at least {MIN_PAGE_BYTES}"
        )
    for tier, size in sizes.items():
        if size < 0 or 0 < size < page_size:
            raise ConfigError(
                f"the {tier.name.lower()} tier has {size} bytes, less than a page of {page_size}; raise {setting_of(tier)}"
            )
    on_disk = [tier for tier, size in sizes.items() if size and not tier.addressable]
    for tier in on_disk:
        if not disk_paths:
            name = tier.name.lower()
            raise ConfigError(f"the {name} tier has {sizes[tier]} bytes but no disk_path; give one, or {name}_memory=0")
    if len(on_disk) > 1:
        names = " and ".join(tier.name.lower() for tier in on_disk)
        raise ConfigError(
            f"the {names} tiers are both on disk, but the files of disk_path can be one tier only; give the other "
            "no bytes"
        )
