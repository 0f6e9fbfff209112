"""Fits in memory groups of their own.

    python capped_fits.py FOLDER            # a group; reads one JSON object a line, answers with one
    python capped_fits.py FOLDER CASE PIPE  # one fit in this process

The cap of a case is on what its fit takes in addition to libraries: a process joins the group after it has imported them.
The process of a case is a fork of the one that reads the lines, or, with `"fresh": true`, one of its own: that takes
seconds to start, but it does not share with its parent pages of the heap, which are charged to the group as they are
written and which no limit on mappings counts.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from kit.fits import quiet_trainer

os.environ["OMP_NUM_THREADS"] = "1"  # no threads before children are made

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMError, AngelPTMStrategy, sharded
from lightning_ptm.runtime.engine import engine  # noqa: F401  (before children are made)

REFUSED, OTHER = 3, 4


class Net(L.LightningModule):
    """Blocks between an embedding and a head.

    Args:
        vocabulary, width, blocks: how large it is.
        optimizer: of torch.optim.
        manual: steps are taken by hand.
    """

    def __init__(
        self, vocabulary: int = 256, width: int = 256, blocks: int = 8, optimizer: str = "AdamW", manual: bool = False
    ) -> None:
        super().__init__()
        self.sizes = vocabulary, width, blocks
        self.optimizer_name = optimizer
        self.automatic_optimization = not manual

    def configure_model(self) -> None:
        vocabulary, width, blocks = self.sizes
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer_name)(self.parameters(), lr=0.01)


def fit(model: dict[str, Any], strategy: dict[str, Any], batch: int, options: dict[str, Any], disk: str) -> str:
    """A fit of three steps; a digest of the weights after it, wherever they are."""
    settings = {"disk_path": disk, "page_size": "256KiB"} | strategy
    trainer = quiet_trainer(
        AngelPTMStrategy(**{name: value for name, value in settings.items() if value is not None}),
        max_steps=3,
        default_root_dir=disk,
        **options,
    )
    tokens = torch.randint(
        0, model.get("vocabulary", 256), (16 * batch, 64), generator=torch.Generator().manual_seed(1)
    )
    module = Net(**model)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=batch))
    found = hashlib.sha256()
    written = next(Path(disk).glob("end-of-run*"), None)
    weights = module.state_dict() if written is None else sharded.load(written)["state_dict"]
    for value in weights.values():
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def child(case: dict[str, Any], answer: int) -> None:
    """Runs one case, and leaves."""
    said, code = {}, OTHER
    try:
        with contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as disk:
            said = {"weights": fit(case["model"], case["strategy"], case["batch"], case["options"], disk)}
            code = 0
    except AngelPTMError as error:
        said, code = {"error": f"{type(error).__name__}: {error}"}, REFUSED
    except BaseException:
        said = {"error": traceback.format_exc()}
    os.write(answer, json.dumps(said).encode())
    os._exit(code)


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One case in a group of its own: how it ended, and the most that it took in bytes."""
    second = (folder / "cgroup.controllers").exists()
    limit, procs = folder / ("memory.max" if second else "memory.limit_in_bytes"), folder / "cgroup.procs"
    with contextlib.suppress(OSError):
        (folder / "memory.force_empty").write_text("1")
    if not second:
        (folder / "memory.max_usage_in_bytes").write_text("0")
    limit.write_text("max" if second and case["cap"] is None else str(case["cap"] or -1))
    read, write = os.pipe()
    if case.get("fresh"):
        os.set_inheritable(write, True)
        program = [sys.executable, "-W", "ignore", __file__, str(folder), json.dumps(case), str(write)]
        pid = os.posix_spawn(sys.executable, program, os.environ)
    else:
        gc.freeze()  # a collection in the child would write to all of the parent's objects, and be charged for them
        pid = os.fork()
        if not pid:
            procs.write_text(str(os.getpid()))
            child(case, write)
    os.close(write)
    peak, ended = 0, 0
    while not ended:
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        peak = max(peak, int(stats["anon"]) + int(stats["shmem"]) if second else int(stats["rss"]))
        time.sleep(0.005)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return {"rc": os.waitstatus_to_exitcode(status), "peak": peak, **(json.loads(text) if text else {})}


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        child(json.loads(sys.argv[2]), int(sys.argv[3]))
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    main()
