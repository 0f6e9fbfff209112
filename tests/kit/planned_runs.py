"""One run as `lightning-ptm plan` sees it, a config and a hardware file, and as it is: a quiet Trainer of few steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from kit.fits import quiet_trainer
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.commands.plan import forecast
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.runtime.deciding.blueprint import Blueprint

LIMITS = {"page_size": "64KiB", "host_memory": "64MiB", "disk_memory": "64MiB"}
"""Settings of all runs that are compared."""
NEAR = 0.03
"""Planned bytes against measured ones."""
NEAR_IF_LATE = 0.05
"""The same for pages of `lock_free` runs: late updates hold pages for as long as they take, on a loaded machine longer."""


class Rounds:
    """Counts the rounds of a rank, and what ranks tell each other without having agreed on it."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, those of all communicators."""
        communicator: Any = ProcessGroupCommunicator
        kept = communicator.exchange, communicator.all_reduce

        def counted(own: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.count += 1
                return own(*args, **options)

            return call

        communicator.exchange, communicator.all_reduce = map(counted, kept)
        try:
            yield
        finally:
            communicator.exchange, communicator.all_reduce = kept


def make_trainer(settings: Mapping[str, Any], steps: int, watch: L.Callback, ranks: int, **options: Any) -> L.Trainer:
    """Returns a Trainer of `steps` steps with the strategy of these settings, without anything to log or to save."""
    return quiet_trainer(
        AngelPTMStrategy(**settings),
        devices=ranks,
        max_steps=steps,
        callbacks=[watch],
        limit_val_batches=0,
        **{"precision": "bf16-mixed", **options},
    )


def planned(*run: Any, **options: Any) -> Prediction:
    """The forecast of the same run, which `forecast_of` is given."""
    return forecast_of(*run, **options)[0]


def forecast_of(
    folder: Path,
    settings: Mapping[str, Any],
    steps: int,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    ranks: int,
    **options: Any,
) -> tuple[Prediction, Blueprint]:
    """The forecast of the same run, and what it is about; its files are written to `folder`.

    Args:
        model: as in a config: class_path and init_args. It is built on the meta device.
        data: likewise.
    """
    strategy = {"class_path": "lightning_ptm.AngelPTMStrategy", "init_args": dict(settings)}
    document = {
        "trainer": {"precision": "bf16-mixed", "strategy": strategy, "max_steps": steps, **options},
        "model": {**model, "init_args": {**model["init_args"], "meta": True}},
        "data": dict(data),
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    return forecast(config, _hardware_file(folder, ranks))


def _hardware_file(folder: Path, ranks: int) -> str:
    """Writes a hardware file of a CPU with a disk and `ranks` ranks; only its sizes matter where bytes are compared."""
    rates = ("host_memory", "disk_read", "disk_write", *(["intra_node"] if ranks > 1 else []))
    links = ("device_memory", "host_memory", "host_to_device", "device_to_host", "disk_read", "disk_write")
    fields = {
        "device": "cpu",
        "ranks_per_node": ranks,
        "device_memory": 0,
        "host_memory": "64GiB",
        "disk_memory": "1TiB",
        "cpu_cores": os.cpu_count(),
        "compute_flops_per_s": {"bfloat16": 1e11, "float32": 1e11},
        "compute_efficiency": 1,
        **{f"{name}_bytes_per_s": 1e9 if name in rates else None for name in (*links, "intra_node", "inter_node")},
    }
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)
