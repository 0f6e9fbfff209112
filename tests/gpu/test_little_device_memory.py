"""Runs that leave little of a fake device's memory free (tests/fake_cuda)."""

from __future__ import annotations

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
import warnings
import fake_device, torch
import lightning as L
from test_cuda import Model
from torch.utils.data import DataLoader
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.runtime.autograd import offload
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
offload.LEAST_BYTES = 4096
STEPS, SEQUENCES = 3, 8
data = torch.randint(0, 256, (SEQUENCES * STEPS, 65), generator=torch.Generator().manual_seed(1))

def losses(**settings):
    torch.manual_seed(0)
    strategy = AngelPTMStrategy(page_size="64KiB", host_memory="64MiB", device_memory="1MiB", **settings)
    trainer = L.Trainer(accelerator="gpu", devices=1, strategy=strategy, precision="bf16-mixed", max_steps=STEPS,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = Model(width=64, layers=30)
    trainer.fit(module, DataLoader(data, batch_size=SEQUENCES))
    return torch.stack(module.losses).tolist()

recomputed = losses(recompute="all")
for settings in ({"recompute": "auto"}, {"recompute": "auto", "offload_activations": "auto"}, {}):
    try:
        print(losses(**settings) == recomputed)
    except torch.OutOfMemoryError:
        print("short")
"""


def test_auto_sees_that_activations_have_no_room_within_a_forward() -> None:
    """The host queues a whole forward before the device has computed its first units."""
    paths = os.pathsep.join(map(str, (TESTS / "fake_cuda", TESTS / "gpu", TESTS, TESTS.parent)))
    done = on_fake("-c", ACTIVATIONS, PYTHONPATH=paths, FAKE_CUDA_BYTES=str(16 << 20), FAKE_CUDA_DEFER="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["True", "True", "short"]
