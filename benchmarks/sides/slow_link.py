"""Two tensor ranks whose sums pass a slow link, and whose layers take as long as a device would take for them.

Options: `settings` of AngelPTMStrategy; `parts`, `batch`; `part_s`, the seconds of a part's forward for the whole batch (a
backward takes twice as long); `sum_s`, the seconds of a sum of the whole batch, or `places`, the network namespaces of the
ranks, whose link takes as long as its rate says. Compute and the link of `sum_s` sleep, by rows and by bytes, so busy cores
count less than in other cases; what the strategy does between them is real, and so are the sums, over gloo, of a small model.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.namespaces import enter
from benchmarks.race import Baton, current_rss_bytes
from benchmarks.sides.sleeping import Sleep, train
from benchmarks.sides.trainer import Pacer

WIDTH, LENGTH = 32, 64


class Part(nn.Module):
    """A norm and two layers that ranks divide."""

    def __init__(self, batch_s: float, batch: int) -> None:
        super().__init__()
        self.sample_s = batch_s / batch
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        entering = Sleep.apply(self.norm(value), self.sample_s * len(value))
        return value + self.down(nn.functional.gelu(self.up(entering)))


class Handle:
    """A sum that is on its way."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.done = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the sum takes longer")

    def is_completed(self) -> bool:
        return self.done.is_set()


class SlowLink:
    """Runs all-reduces one after the other; each takes the time of its bytes on the link, or its own if that is longer.

    Args:
        whole_s: seconds of a sum of the whole batch.
        whole_numel: its elements.
    """

    def __init__(self, whole_s: float, whole_numel: int) -> None:
        self._rate_s = whole_s / whole_numel
        self._left: queue.Queue[Handle] = queue.Queue()
        self._group = dist.new_group(backend="gloo")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            handle = self._left.get()
            ends_s = time.perf_counter() + self._rate_s * handle.value.numel()
            dist.all_reduce(handle.value, group=self._group)
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            handle.done.set()

    def sum_of(self, value: Tensor) -> tuple[Any, None]:
        """Replacement for `RankGroup._sum_of`."""

        def collective(group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Handle | None]:
            handle = Handle(value.detach().clone(memory_format=torch.contiguous_format))
            self._left.put(handle)
            if not later:
                handle.wait()
            return handle.value, handle

        return collective, None


class Links(Pacer):
    """Puts the link in the place of the ranks' own connections."""

    def __init__(self, baton: Baton, whole_s: float, batch: int) -> None:
        super().__init__(baton, count_disk=False, empty_rss_bytes=current_rss_bytes())
        self._whole = whole_s, batch * LENGTH * WIDTH

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        from lightning_ptm.parallel.exchange import RankGroup

        link = SlowLink(*self._whole)
        RankGroup._sum_of = lambda group, value: link.sum_of(value)  # type: ignore[assignment, method-assign]
        super().on_train_start(trainer, module)


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm.comm import intra_node
    from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel

    # By process groups alone, as ranks of several machines.
    intra_node.connected = intra_node.shm_collectives = lambda *args, **named: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    plan = {"blocks.*.*.up": ColwiseParallel(), "blocks.*.*.down": RowwiseParallel()}
    given, batch, part_s = options["settings"], options["batch"], options["part_s"]
    pacer, machines = Pacer(baton, count_disk=False, empty_rss_bytes=current_rss_bytes()), 1
    if places := options.get("places"):
        enter(places[int(os.environ["RANK"])], places[0], os.environ)
        machines = len(places)
    else:
        pacer = Links(baton, options["sum_s"], batch)
    settings = {**given, "tensor_parallel": {**given.get("tensor_parallel", {}), "plan": plan}}
    # Of two parts each, as a transformer's blocks.
    blocks = [nn.Sequential(Part(part_s, batch), Part(part_s, batch)) for _ in range(options["parts"] // 2)]
    train(blocks, (batch, LENGTH, WIDTH), 2 // machines, settings, pacer, machines)
