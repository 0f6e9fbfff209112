"""This project's updater alone: AdamW over master states on disk, with nothing else computing.

Options: `folders`, one for each disk; `numel`, of the model; `page_bytes`; `flats`, over which the parameters are spread
evenly; `bytes_per_s`, the speed that each disk is slowed down to, if it is.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from race import Baton
from slow_disk import SlowDisks

from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.terms import Tier
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.gradient_source import ParameterGradients
from lightning_ptm.update.shadow import ShadowOptimizer, snapshot
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.update_job import JobHandle, UpdateJob
from lightning_ptm.update.updater import Updater

STAGING_CHUNKS = 12


def run(options: dict[str, Any], baton: Baton) -> None:
    """Take part in the race until it is over; a step is one update of every parameter, until its last write has landed."""
    page_bytes, flats = options["page_bytes"], options["flats"]
    numel = options["numel"] // flats
    units = [
        UnitSpec(f"unit {index}", (ParameterSpec(f"weight {index}", (numel,), "bfloat16", 2, True, 0),))
        for index in range(flats)
    ]
    layout = build_layout(units, page_size=page_bytes, world_size=1)
    room = flats * (3 * (4 * numel // page_bytes + 1)) * page_bytes
    with Allocator(
        page_size=page_bytes,
        backend=CpuBackend(),
        sizes={
            Tier.DEVICE: flats * (2 * numel // page_bytes + 1) * page_bytes + 6 * STAGING_CHUNKS * page_bytes,
            Tier.DISK: room,
        },
        disk_paths=[Path(folder) for folder in options["folders"]],
        file_ops=SlowDisks(options["bytes_per_s"]) if "bytes_per_s" in options else None,
    ) as allocator:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=1e-3)
        traits = probe(optimizer, dtype=torch.float32)
        updater = Updater(allocator, staging=STAGING_CHUNKS)
        shadow = ShadowOptimizer(optimizer, traits)
        jobs = []
        for flat in layout.flats:
            states = FlatStates.allocate(allocator, flat, 0, traits, Tier.DISK, master_dtype=torch.float32)
            target = allocator.allocate("parameters", flat.shard_numel, torch.bfloat16, Tier.DEVICE)
            jobs.append((states, torch.randn(numel).bfloat16(), target))
        moved_bytes = 0

        def run_steps(count: int) -> None:
            """One pass after the other, as beside compute: a flat's next job begins when its last has ended."""
            hyper = snapshot(optimizer, traits)
            handles: deque[JobHandle] = deque()
            for _ in range(count):
                for states, gradient, target in jobs:
                    if len(handles) == flats:
                        updater.finish(handles.popleft())
                    job = UpdateJob(states, shadow, ParameterGradients([gradient]), target, hyper)
                    handles.append(updater.submit(job))
            for handle in handles:
                updater.finish(handle)
            updater.drain()

        run_steps(1)  # the first reads nothing: there are no moments yet
        baton.ready()
        while steps := baton.wait():
            moved_bytes = updater.stats.bytes_read + updater.stats.bytes_written
            run_steps(steps)
            moved_bytes = updater.stats.bytes_read + updater.stats.bytes_written - moved_bytes
            baton.report(0.0, {"page_bytes": float(moved_bytes)})
        updater.close()
