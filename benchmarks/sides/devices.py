"""The device of a side: the CPU, or the GPU of its rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def own_device(kind: str) -> torch.device:
    """`kind` ("cpu" or "cuda"), of a device that each rank has for itself."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def start_processes(kind: str) -> None:
    """Starts the process group of the side's ranks, also for a single rank."""
    backend = "gloo" if kind == "cpu" else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def peaks(kind: str) -> dict[str, float]:
    """The most bytes of the device that tensors took so far, as one of a turn's extra numbers."""
    return {} if kind == "cpu" else {"device_peak_bytes": float(torch.cuda.max_memory_allocated())}
