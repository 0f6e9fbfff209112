"""Tests with the marker `gpu`, on a fake CUDA device (tests/fake_cuda), where there is no real one.

Copies come as late as the order of streams and events allows, or in an order of their own, and an access that no wait has
ordered fails the test it is in. The fake itself is tested on what it has to find.
"""

from __future__ import annotations

import textwrap

import pytest
from fake_process import ORDERS, need_fake_device, on_fake

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    need_fake_device()


PARTS = {
    "memory": ("tests/memory", 40),
    "update": ("tests/update", 3),
    "runs": ("tests/gpu/test_cuda.py", 7),
}
"""Folders with tests of the marker, and how many there are at least."""
QUICK = [("memory", "late")]


@pytest.mark.parametrize(
    ("part", "order"),
    [
        pytest.param(part, order, marks=() if (part, order) in QUICK else pytest.mark.slow)
        for part in PARTS
        for order in ORDERS
    ],
)
def test_no_test_has_a_race(part: str, order: str) -> None:
    folder, least = PARTS[part]
    flags = ["-q", "-m", "gpu", "--show-capture=no"]
    for plugin in ("fake_cuda_plugin", "no:cacheprovider", "no:xdist"):
        flags += ["-p", plugin]
    done = on_fake("-m", "pytest", *flags, folder, limit_s=580, **ORDERS[order])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert ", 0 races" in done.stdout
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= least and " skipped" not in done.stdout, done.stdout[-2000:]


def found_in(programs: dict[str, str], **variables: str) -> tuple[dict[str, int], str]:
    """Of programs in one process, how many races each has; and what is told of them."""
    lines = ["import fake_device, torch", "before = 0"]
    for name, program in programs.items():
        lines += [textwrap.dedent(program), "now = fake_device.lib.fc_races()"]
        lines += [f"print('found:', now - before, {name!r})", "before = now"]
    done = on_fake("-c", "\n".join(lines), **variables)
    assert done.returncode == 0, done.stderr
    told = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("found:")]
    return {name: int(count) for _, count, name in told}, done.stderr


COPY = """
    host = torch.arange(1 << 16, dtype=torch.float32).pin_memory()
    device = torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
    {wait}
    right = device.sum().item() == host.sum().item()
    side.synchronize()
"""


def _copy(wait: str) -> str:
    return textwrap.dedent(COPY.format(wait=wait))


WAITS = (
    "torch.cuda.current_stream().wait_stream(side)",
    "torch.cuda.current_stream().wait_event(side.record_event())",
    "side.synchronize()",
    "torch.cuda.synchronize()",
)
FREED = """
    side = torch.cuda.Stream()
    device = torch.ones(1 << 16, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = device.sum()
    {keep}
    del device
"""
PRODUCTS = """
    left, right = (torch.randn(64, 256).bfloat16() for _ in range(2))
    found = (left.cuda() @ right.cuda().t()).cpu()
    assert found.dtype is torch.bfloat16 and torch.equal(found, (left.float() @ right.float().t()).bfloat16())
"""


def test_what_nothing_has_ordered_is_found() -> None:
    """Waits, and memory that another stream still uses."""
    programs = {wait: _copy(wait) + "assert right" for wait in WAITS}
    programs["a wait is missing"] = _copy("pass") + "assert not right"
    programs["kept"] = FREED.format(keep="device.record_stream(side)")
    programs["freed"] = FREED.format(keep="")
    programs["products of 16-bit numbers are rounded once"] = PRODUCTS
    found, told = found_in(programs, FAKE_CUDA_DEFER="1")
    assert list(found) == list(programs)
    assert {name for name, count in found.items() if count} == {"a wait is missing", "freed"}
    assert "copy H2D" in told and "freed while another stream uses it" in told


READ = """
    import ctypes, os
    def how_a_read_of_it_ends(tensor):
        child = os.fork()
        if child == 0:
            ctypes.string_at(tensor.data_ptr(), 4)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert how_a_read_of_it_ends(torch.ones(4)) == 0
    assert how_a_read_of_it_ends(torch.ones(4, device="cuda")) == -11  # SIGSEGV
"""
BYTES = """
    assert torch.cuda.mem_get_info() == (1 << 20, 1 << 20)
    half = torch.empty(1 << 19, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("more than there is")
    del half
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
"""


def test_the_host_cannot_read_the_device_and_a_missing_wait_is_found_where_it_happens_to_go_well() -> None:
    """And the device has the bytes that it says. One process: its start takes seconds."""
    programs = {"bytes": BYTES, "read": READ, "missing": _copy("pass") + "assert right"}
    found, _ = found_in(programs, FAKE_CUDA_BYTES=str(1 << 20), FAKE_CUDA_DEFER="0")
    assert found.pop("missing") and set(found.values()) == {0}
