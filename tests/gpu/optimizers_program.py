"""Optimizers that work on a device alone, or in RAM alone, wherever master states live; on the fake device, in a process that
has no other: `python optimizers_program.py FOLDER`. Prints a line for each case: its name, and what became of the run."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_device  # noqa: F401 before torch
import lightning as L
import torch
from kit.models import Linears
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Base(torch.optim.Optimizer):
    """SGD with momentum by hand; subclasses refuse tensors of some devices."""

    places = ("cpu", "cuda")

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.device.type not in self.places:
                    raise RuntimeError(f"needs tensors of {self.places[0]}, not of {parameter.device.type}")
                self.update(parameter, self.state[parameter], group)
        return loss

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(parameter)
        state["buffer"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(state["buffer"], alpha=group["lr"])


class NeedsDevice(Base):
    """Optimizer with kernels of a device, as Apex's FusedAdam."""

    places = ("cuda",)


class NeedsRam(Base):
    """Optimizer that needs RAM, as DeepSpeed's CPUAdam."""

    places = ("cpu",)


class CountsInGroup(NeedsDevice):
    """Apex counts steps in the group, too."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


class Stateless(NeedsDevice):
    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"])


class WholeOnDevice(NeedsDevice):
    """Updates whole parameters."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad / (1 + parameter.grad.norm()), alpha=group["lr"])


class Asserts(Base):
    """Finds out by an assertion, with masters of a class of its own."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.is_cuda and parameter.grad.is_cuda, "CUDA tensors only"
        super().update(parameter, state, group)


def capturable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, capturable=True, fused=False, foreach=False)


class Net(Linears):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(160, 6, stem=6, head=3)
        self.make = make

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step(batch[0], index)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


SMALL = {"device_memory": "1MiB", "host_memory": "64MiB", "page_size": "64KiB"}
HOMES: dict[str, dict[str, Any]] = {
    "device": {"offload_optimizer": "device"},
    "host": {"offload_optimizer": "host", **SMALL},
    "disk": {"offload_optimizer": "disk", **SMALL},
    "auto, with room": {"page_size": "64KiB", "device_memory": "64MiB", "host_memory": "64MiB"},
    "auto, without": {"page_size": "64KiB", "device_memory": "1MiB", "host_memory": "64MiB"},
    "lock-free": {"lock_free": {"max_staleness": 0}, **SMALL},
}
CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "device": NeedsDevice,
    "counts": CountsInGroup,
    "stateless": Stateless,
    "whole": WholeOnDevice,
    "asserts": Asserts,
    "capturable": capturable,
    "ram": NeedsRam,
    "anywhere": Base,
}


def became(make: Callable[[Any], torch.optim.Optimizer], settings: dict[str, Any], folder: Path, precision: str) -> str:
    torch.manual_seed(0)
    module = Net(make)
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    data = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=AngelPTMStrategy(disk_path=folder, debug={"poison": True}, **settings),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        precision=precision,  # type: ignore[arg-type]
    )
    try:
        trainer.fit(module, DataLoader(TensorDataset(data), batch_size=2))
    except ConfigError as error:
        same = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        return f"refused, weights {'kept' if same else 'lost'}: {' '.join(str(error).split())}"
    moved = all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return "trained" if moved and trainer.global_step == 3 else "did not train"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for (name, make), (home, settings) in itertools.product(CLASSES.items(), HOMES.items()):
        try:
            found = became(make, settings, place, "32-true")
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
        print(f"{name}, {home}: {found}", flush=True)
