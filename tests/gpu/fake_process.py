"""Processes with the fake CUDA device (tests/fake_cuda) in place of `torch.cuda`, started by tests that run without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "fake_cuda"))
from fake_build import library, why_not  # noqa: E402

ORDERS = {"late": {"FAKE_CUDA_DEFER": "1"}, "random": {"FAKE_CUDA_DEFER": "rand", "FAKE_CUDA_SEED": "1"}}
"""In which copies that do not block are done, as variables of the process."""


def need_fake_device() -> None:
    """Builds the library, or skips where there can be none; LIGHTNING_PTM_TESTS_NEED_FAKE_CUDA makes that a failure."""
    reason = "there is a real one" if torch.cuda.is_available() else why_not()
    if reason is not None:
        assert "LIGHTNING_PTM_TESTS_NEED_FAKE_CUDA" not in os.environ, reason
        pytest.skip(reason)
    library()


def environment_of_fake(**variables: str) -> dict[str, str]:
    """In which Python finds the fake device's modules and the package beside the tests, and nothing tells it of the tests
    around it."""
    paths = os.pathsep.join(map(str, (TESTS / "fake_cuda", TESTS, TESTS.parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
    for name in [name for name in environment if name.startswith(("PYTEST_", "COV_"))]:
        del environment[name]
    return environment


def on_fake(*command: str, limit_s: float = 280, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process on the fake device, which `command` has to import (`import fake_device`, or the plugin)."""
    return ranks_on_fake(*command, limit_s=limit_s, **variables)[0]


def ranks_on_fake(
    *command: str, limit_s: float, world_size: int = 1, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """So many of these, each a rank with a device of its own; several find each other as those of torchrun do.

    Raises:
        TimeoutExpired: one still ran after `limit_s`; none does any more.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "GROUP_RANK": "0"}
    meeting |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "tests"}
    variables = {"FAKE_CUDA_DEVICES": str(world_size), **variables}
    environments = [environment_of_fake(**variables) for _ in range(world_size)]
    for rank, environment in enumerate(environments if world_size > 1 else ()):
        environment.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank))
    with ThreadPoolExecutor(world_size) as pool:

        def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
            whole = [sys.executable, *command]
            return subprocess.run(
                whole, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=limit_s
            )

        return list(pool.map(run, environments))
