"""Runs that leave little of a fake device's memory free (tests/fake_cuda)."""

from __future__ import annotations

import ast
import os

import pytest
from fake_process import TESTS, on_fake
from test_on_fake_device import built  # noqa: F401  the fixture skips where there can be no fake device

pytestmark = pytest.mark.timeout(600)

UNFREEZES = """
import sys, tempfile, warnings
import fake_device, torch
import lightning as L
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.trainer import relayout
warnings.filterwarnings("ignore")
WIDTH = 1300

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.block = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        self.head = torch.nn.Linear(WIDTH, 1)
        self.head.bias.requires_grad_(False)

    def training_step(self, batch, _):
        return self.head(self.block(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, fused=True)

    def train_dataloader(self):
        torch.manual_seed(0)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, WIDTH)), batch_size=2)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.head.bias.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [self.head.bias]})

def trained(strategy):
    module = Model()
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(max_epochs=2, accelerator="gpu", devices=1, strategy=strategy, logger=False, default_root_dir=folder,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(module)
    return [parameter.detach().cpu() for parameter in module.parameters()]

plain = trained("auto")
carry, free = relayout.carried_by, relayout.free_host_bytes
for memory, way in (case.split(":") for case in sys.argv[1:]):
    ways = []
    relayout.carried_by = lambda run, optimizers: ways.append(carry(run, optimizers)) or ways[0]
    relayout.free_host_bytes = (lambda: 0) if way == "StatesInFiles" else free
    found = trained(AngelPTMStrategy(device_memory=memory, units=["Sequential"], page_size="64KiB", host_memory="64MiB"))
    assert [type(each).__name__ for each in ways] == [way], (memory, ways)
    ways.clear()
    assert all(map(torch.equal, found, plain)), (memory, [float((a - b).abs().max()) for a, b in zip(found, plain)])
    print(memory, way)
"""


CASES = ("80MiB:StatesInPages", "50MiB:StatesInPages", "80MiB:StatesInFiles")


def test_a_bias_is_unfrozen() -> None:
    """Unfreezes a bias with little device memory, whose states wait in RAM, or in files where RAM has no room.

    With 128 MiB, pages of the re-layout fit when the old ones are freed; with 50 MiB, some states are updated on the
    device and others in RAM, by a fused optimizer, which keeps its number of steps on the device. One process for all cases:
    its start takes seconds.
    """
    done = on_fake("-c", UNFREEZES, *CASES, FAKE_CUDA_BYTES=str(128 << 20), FAKE_CUDA_DEFER="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [word for case in CASES for word in case.split(":")]


ACTIVATIONS = """
import gc, sys, tempfile, warnings
import fake_device, torch
import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy
from test_cuda import Model
from kit.memory import LEAST, strategy_with
from torch.utils.data import DataLoader
from lightning_ptm.memory import activation_buffers
from lightning_ptm.memory.activation_buffers import HostBuffers
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.engine import set_up
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
offload.LEAST_BYTES = 4096
STEPS, SEQUENCES = 3, 4
data = torch.randint(0, 256, (SEQUENCES * STEPS, 65), generator=torch.Generator().manual_seed(1))

class Fused(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

class Watches(L.Callback):
    chosen, sent = [], {}

    def on_train_batch_end(self, trainer, *_):
        engine = trainer.strategy.engine
        if engine.activation_policy is not None:
            self.chosen = sorted({each.value for each in engine.activation_policy.handlings.values()})
        if engine.offload is not None:
            self.sent = {tier.name.lower(): mover.sent_bytes > 0 for tier, mover in engine.offload._movers.items()}

def trained(strategy, *callbacks):
    gc.collect()
    torch.manual_seed(0)
    module = Fused(width=64, layers=20)
    L.Trainer(accelerator="gpu", devices=1, strategy=strategy, max_steps=STEPS, callbacks=list(callbacks), logger=False,
              enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
              ).fit(module, DataLoader(data, batch_size=SEQUENCES))
    return [each.cpu() for each in (*module.losses, *module.parameters())]

def check(room_bytes, settings, more_bytes=0):
    gc.collect()
    taken = torch.empty(fake_device.lib.fc_capacity() - (10 << 20) - more_bytes, dtype=torch.uint8, device="cuda")

    class Buffers(HostBuffers):
        def __init__(self, backend, *, free_bytes):
            super().__init__(backend, free_bytes=lambda: activation_buffers._RESERVE_BYTES + room_bytes - self.total_bytes)

    set_up.HostBuffers = Buffers
    watches = Watches()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = trained(strategy_with(page_size="64KiB", host_memory="64MiB", device_memory=LEAST,
                                         **{"disk_path": folder, **settings}), watches)
        except torch.OutOfMemoryError:
            return "short"
    same = all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    if settings == {"recompute": "none"} and not room_bytes:  # elsewhere the choice depends on measured speeds
        assert watches.chosen == ["kept", "on disk"], watches.chosen
    return same, watches.sent

plain = trained(SingleDeviceStrategy(torch.device("cuda", 0)))
OFFLOADED = {"recompute": "none"}
CASES = {
    "neither": (1 << 40, {"recompute": "none", "offload_activations": "none"}),
    "recomputed": (1 << 40, {"offload_activations": "none"}),
    "no setting": (1 << 40, {}),
    "no setting, 4 MiB less": (1 << 40, {"disk_path": None}, -4 << 20),
    "much RAM": (1 << 40, OFFLOADED),
    "little RAM": (2_000_000, OFFLOADED),
    "no RAM": (0, OFFLOADED),
    "no RAM, 192 KiB more": (0, OFFLOADED, 3 << 16),
    "no setting, no RAM": (0, {}),
}
print({name: check(*CASES[name]) for name in sys.argv[1:]})
"""
RAM_ALONE, BOTH, DISK_ALONE = (
    {"host": True, "disk": False},
    {"host": True, "disk": True},
    {"host": False, "disk": True},
)
FOUND = {
    "neither": "short",
    "recomputed": (True, {}),
    "no setting": (True, RAM_ALONE),
    "no setting, 4 MiB less": (True, {"host": True}),
    "much RAM": (True, RAM_ALONE),
    "little RAM": (True, BOTH),
    "no RAM": (True, DISK_ALONE),
    "no RAM, 192 KiB more": (True, DISK_ALONE),
    "no setting, no RAM": (True, DISK_ALONE),
}
"""Whether numbers are a plain Trainer's, and where activations went."""


@pytest.mark.parametrize(
    "names",
    [
        ("neither", "recomputed", "no setting", "no setting, 4 MiB less", "no RAM", "no RAM, 192 KiB more"),
        pytest.param(("much RAM", "little RAM", "no setting, no RAM"), marks=pytest.mark.slow),
    ],
)
def test_auto_sees_that_activations_have_no_room_within_a_forward(names: tuple[str, ...]) -> None:
    """A model that does not fit with its activations kept trains without a setting.

    The host queues a whole forward before the device has computed its first units. In little more memory, one unit more is
    kept on the device, beside which the backward has no room for two units that come back at once. In 4 MiB less, there is no
    room for the first unit of the first step.
    """
    paths = os.pathsep.join(map(str, (TESTS / "fake_cuda", TESTS / "gpu", TESTS, TESTS.parent)))
    memory = {"FAKE_CUDA_BYTES": str(64 << 20), "FAKE_CUDA_DEFER": "1"}
    done = on_fake("-c", ACTIVATIONS, *names, PYTHONPATH=paths, **memory)
    assert done.returncode == 0, done.stderr[-4000:]
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {name: FOUND[name] for name in names}
