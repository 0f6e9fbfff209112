"""What a step takes on a fake CUDA device with a clock (tests/fake_cuda/source/clock.h): overlap, measured without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "fake_cuda"))
from fake_build import library, why_not  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REASON = "there is a real one" if torch.cuda.is_available() else why_not()


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if REASON is not None:
        assert "LIGHTNING_PTM_TESTS_NEED_FAKE_CUDA" not in os.environ, REASON
        pytest.skip(REASON)
    library()


def on_clock(program: str, speeds: str) -> str:
    """What a program prints in a process with the fake device and its clock."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS / "fake_cuda"),
        "FAKE_CUDA_NO_RACE": "1",
        "FAKE_CUDA_CLOCK": speeds,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_kernels_and_copies_take_their_time_beside_each_other_and_waits_are_told() -> None:
    program = """
        import fake_device, torch
        clock = fake_device.lib
        side = torch.cuda.Stream()
        pages = torch.zeros(250_000).pin_memory()  # 1 MB: 1 ms
        there = torch.empty(250_000, device="cuda")
        left = torch.empty(100, 100, device="cuda")  # 2e6 operations: 2 ms
        torch.cuda.synchronize()
        begun = clock.fc_clock_host()
        def ms(s): return round(1e3 * (s - begun), 3)

        with torch.cuda.stream(side):
            for _ in range(2):
                there.copy_(pages, non_blocking=True)
            arrived = side.record_event()
        left @ left
        assert ms(clock.fc_clock_host()) == 0  # it has launched, and waited for nothing
        assert not arrived.query() and not clock.fc_clock_waits()
        arrived.synchronize()
        assert abs(ms(clock.fc_clock_host()) - 2.0) < 0.01  # beside the product, one copy behind the other
        (wait,) = clock.fc_clock_waits().decode().splitlines()
        assert wait.startswith("0.00") and " 1 " in wait, wait
        assert abs(ms(clock.fc_clock_device(0)) - 2.0) < 0.01

        torch.cuda.current_stream().wait_event(arrived)  # the host goes on
        left @ left
        back = torch.empty(250_000).pin_memory()
        with torch.cuda.stream(side):
            there.copy_(pages, non_blocking=True)  # the other direction is free
            back.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert abs(ms(clock.fc_clock_host()) - 4.0) < 0.01, ms(clock.fc_clock_host())
        assert len(clock.fc_clock_waits().splitlines()) == 1
        left.sum().item()
        print("done", clock.fc_clock_waits().decode().count(chr(10)))
    """
    assert on_clock(program, "flops=1e9,memory=1e15,link=1e9,launch=0").split() == ["done", "1"]


def test_a_clock_of_unknown_speeds_is_refused() -> None:
    for speeds, told in (("flops", "give it as"), ("speed=1", "has no speed")):
        with pytest.raises(AssertionError, match=told):
            on_clock("import fake_device, torch; torch.ones(1, device='cuda')", speeds)
