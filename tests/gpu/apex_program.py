"""A model with kernels of NVIDIA Apex, by the stand-in of tests/kit, on the fake device, in a process that has no other:
`python apex_program.py FOLDER`. Prints a line for each case: its name, and what became of the run."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from typing import Any

import fake_device  # noqa: F401 before torch
import lightning as L
import torch
from kit import fake_apex
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT

warnings.simplefilter("ignore")
TINY: dict[str, Any] = {"width": 64, "layers": 3, "heads": 2, "sequence_length": 16, "warmup_steps": 1}
PAGES = {"page_size": "64KiB", "device_memory": "2MiB", "host_memory": "64MiB", "debug": {"poison": True}}
CASES: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "plain": ("apex", None, "32-true"),
    "device": ("apex", {"offload_optimizer": "device", **PAGES, "device_memory": "16MiB"}, "32-true"),
    "device, masters": ("apex", {"offload_optimizer": "device", **PAGES, "device_memory": "16MiB"}, "bf16-mixed"),
    "host": ("apex", {"offload_optimizer": "host", **PAGES}, "32-true"),
    "disk": ("apex", {"offload_optimizer": "disk", **PAGES}, "32-true"),
    "host, auto": ("auto", {"offload_optimizer": "host", **PAGES}, "32-true"),
    "device, torch": ("torch", {"offload_optimizer": "device", **PAGES, "device_memory": "16MiB"}, "32-true"),
}


def trained(kernels: str, settings: dict[str, Any] | None, precision: str, folder: str) -> tuple[str, dict[str, Any]]:
    """What became of a run and what it said, and its weights."""
    torch.manual_seed(0)
    module = GPT(**TINY, kernels=kernels)  # type: ignore[arg-type]
    tokens = torch.randint(0, 256, (6, 17), generator=torch.Generator().manual_seed(1))
    strategy: Any = "auto" if settings is None else AngelPTMStrategy(disk_path=folder, **settings)
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        precision=precision,  # type: ignore[arg-type]
    )
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        trainer.fit(module, DataLoader(data, batch_size=2))
    except ConfigError as error:
        return f"refused: {' '.join(str(error).split())}", {}
    finally:
        logger.removeHandler(handler)
    (line,) = [line for line in said.getvalue().splitlines() if "kernels=" in line]
    return f"trained {trainer.global_step} steps; {line}", {k: v.cpu() for k, v in module.state_dict().items()}


if __name__ == "__main__":
    fake_apex.install()
    weights: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                found, weights[name] = trained(*case, sys.argv[1])
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
        print(f"{name}: {found}", flush=True)
    same = all(torch.equal(value, weights["device"][name]) for name, value in weights["plain"].items())
    print(f"bits: {'those of the plain Trainer' if same and weights['plain'] else 'others'}")
