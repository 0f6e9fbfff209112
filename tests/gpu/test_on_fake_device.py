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
    "update": ("tests/update", 5),
    "runs": ("tests/gpu/test_cuda.py", 12),
}
"""Folders with tests of the marker, and how many there are at least."""
PARTS_OF_OTHERS = {"memory": ("tests/memory", 40), "update": ("tests/update", 5)}
"""Folders of tests that need no CUDA, with their least number of tests."""
CHOICES = [
    *(("cuda", part, order) for part in PARTS for order in ORDERS),
    *(("other", part, order) for part in PARTS_OF_OTHERS for order in ORDERS),
]
QUICK = [("cuda", "memory", "late"), ("other", "update", "late")]


@pytest.mark.parametrize(
    ("name", "part", "order"),
    [pytest.param(*choice, marks=() if choice in QUICK else pytest.mark.slow) for choice in CHOICES],
)
def test_no_test_has_a_race(name: str, part: str, order: str) -> None:
    """On the device that torch calls so."""
    folder, least = (PARTS if name == "cuda" else PARTS_OF_OTHERS)[part]
    flags = ["-q", "-m", "gpu" if name == "cuda" else "gpu and not cuda", "--show-capture=no"]
    for plugin in ("fake_cuda_plugin", "no:cacheprovider", "no:xdist"):
        flags += ["-p", plugin]
    done = on_fake("-m", "pytest", *flags, folder, limit_s=580, FAKE_CUDA_NAME=name, **ORDERS[order])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert ", 0 races" in done.stdout
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= least and " skipped" not in done.stdout, done.stdout[-2000:]


def found_in(programs: dict[str, str], **variables: str) -> tuple[dict[str, int], str]:
    """Runs programs in one process; returns the number of races of each, and the reports."""
    lines = ["import fake_device, torch", "before = 0"]
    for name, program in programs.items():
        lines += [textwrap.dedent(program), "now = fake_device.lib.fc_races()"]
        lines += [f"print('found:', now - before, {name!r})", "before = now"]
    # Threads of autograd may still free what a backward pass has kept: an interpreter that ends would end them in the middle
    # of C++, and the process with them, which nothing here asks about.
    lines += ["import os, sys", "sys.stdout.flush()", "sys.stderr.flush()", "os._exit(0)"]
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


KERNELS = """
    on = lambda key: set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    assert "aten::native_layer_norm" in on("CPU")
    composed = on("CPU") & (on("CompositeExplicitAutograd") | on("CompositeImplicitAutograd")) - on("CUDA")
    assert not composed, f"torch composes these of others instead of asking the fallback: {composed}"
"""
NUMBERS = """
    import contextlib
    from torch import nn
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from lightning_ptm.trainer.matmul_precision import wide_matmuls

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(97, 64), nn.Linear(64, 97)
            self.first, self.second, self.third = nn.LayerNorm(64), nn.LayerNorm(64), nn.GroupNorm(4, 64)
            self.qkv, self.out, self.up, self.down = (nn.Linear(64, 64 * n) for n in (3, 1, 1, 1))

        def forward(self, tokens):
            x = self.embedding(tokens)
            query, key, value = self.qkv(self.first(x)).unflatten(2, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            x = x + self.down(functional.gelu(self.up(self.second(x))))
            return self.head(functional.silu(self.third(x.flatten(0, 1)))).float()

    def train(device, dtype):
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        tokens = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(3):
            with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = functional.cross_entropy(net(tokens[:, :-1]), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach().cpu(), *(weight.detach().cpu() for weight in net.parameters())]

    torch.set_num_threads(1)
    with sdpa_kernel(SDPBackend.MATH):
        for dtype in (torch.float32, torch.bfloat16):
            with wide_matmuls() if dtype is torch.bfloat16 else contextlib.nullcontext():
                expected = train("cpu", dtype)
            assert all(map(torch.equal, train("cuda", dtype), expected)), dtype
"""


AS_THE_INTERPRETER_ENDS = """
    import ctypes
    unit = torch.jit.CompilationUnit('''
    def many(x: Tensor):
        for _ in range(100000):
            x = x + 1
        return x
    def start(x: Tensor):
        return torch.jit.fork(many, x)
    ''')
    future = unit.start(torch.ones(4, device="cuda"))
    fake_device.lib.fc_interpreter_ends()
    # Called with the GIL held, for which a thread that asks for it would wait.
    accesses = ctypes.PyDLL(fake_device.lib._name).fc_accesses
    before = accesses()
    for _ in range(100):
        ctypes.PyDLL(None).usleep(50_000)
        if accesses() > before:
            break
    else:
        raise AssertionError("it waits for the GIL")
    future.wait()
"""
"""A thread of torch that asks for the GIL of an interpreter that ends would be ended with it, and the process with that:
threads of autograd free memory behind the last backward pass."""


def test_what_nothing_has_ordered_is_found_and_numbers_are_those_of_a_cpu() -> None:
    """Waits, and memory that another stream still uses; where both take attention's math kernel; and last, in the one
    process of all of them, what a thread asks of an interpreter that ends."""
    programs = {wait: _copy(wait) + "assert right" for wait in WAITS}
    programs["a wait is missing"] = _copy("pass") + "assert not right"
    programs["kept"] = FREED.format(keep="device.record_stream(side)")
    programs["freed"] = FREED.format(keep="")
    programs["products of 16-bit numbers are rounded once"] = PRODUCTS
    programs["the CPU's kernels"] = KERNELS
    programs["numbers"] = NUMBERS
    programs["as the interpreter ends"] = AS_THE_INTERPRETER_ENDS
    found, told = found_in(programs, FAKE_CUDA_DEFER="1")
    assert list(found) == list(programs)
    found.pop("as the interpreter ends")  # its thread is ordered with nothing
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
    """The device has as many bytes as it reports, too. One process: its start takes seconds."""
    programs = {"bytes": BYTES, "read": READ, "missing": _copy("pass") + "assert right"}
    found, _ = found_in(programs, FAKE_CUDA_BYTES=str(1 << 20), FAKE_CUDA_DEFER="0")
    assert found.pop("missing") and set(found.values()) == {0}
