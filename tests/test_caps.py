"""No fit is killed for the memory that it takes: under a cap of a control group it ends with the weights of any other, or
with a sentence. Caps of the quick table are on what a fit takes beside libraries; those of the slow one on whole processes.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from capped_fits import REFUSED

MIB = 1 << 20
ROOT = Path(__file__).parents[1]
Ask = Callable[..., dict[str, Any]]

ON_DISK = {"offload_optimizer": "disk"}
WIDE = {"width": 512}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    # The model, the strategy, samples of a batch, and the Trainer.
    "small": ({}, {}, 4, {}),
    "large batch": ({"blocks": 2}, {}, 32, {}),
    "large vocabulary": ({"vocabulary": 20000, "blocks": 2}, ON_DISK, 4, {}),
    "masters on disk": (WIDE, ON_DISK, 4, {"precision": "bf16-mixed"}),
    "all on disk": (WIDE, {"offload_optimizer": "disk", "offload_parameters": "disk"}, 4, {}),
    "no disk": ({"width": 384}, {"disk_path": None}, 8, {}),
    "lock-free": (WIDE, {"lock_free": {"max_staleness": 0}}, 4, {}),
    "accumulates": (WIDE, {}, 8, {"accumulate_grad_batches": 2}),
    "clips": (WIDE, ON_DISK, 4, {"gradient_clip_val": 0.1}),
    "by hand": ({**WIDE, "manual": True}, {}, 4, {}),
    "keeps freed memory": (WIDE, {**ON_DISK, "tuning": {"freed_memory": "keep"}}, 8, {}),
    "recomputes": (WIDE, {**ON_DISK, "recompute": "all"}, 32, {}),
    "SGD": ({**WIDE, "optimizer": "SGD"}, {}, 8, {}),
    "whole parameters": ({**WIDE, "optimizer": "Adafactor"}, ON_DISK, 4, {}),
    "small states": (WIDE, {**ON_DISK, "optimizer_state_dtype": "int8"}, 4, {}),
    "true 16 bits": (WIDE, ON_DISK, 4, {"precision": "bf16-true"}),
    "host set": (WIDE, {**ON_DISK, "host_memory": "100MiB"}, 4, {}),
}
KEPT = {"recompute": "none", "offload_activations": "none"}
LARGE_BATCHES = {
    "kept": ({}, KEPT, 64, {}),
    "no setting": ({}, {}, 64, {}),
    "no setting, no disk": ({}, {"disk_path": None}, 64, {}),
}
"""Cases whose activations take most of the memory: the model, the strategy, samples of a batch, and the Trainer."""
QUICK = ("small", "large batch", "large vocabulary", "masters on disk", "no disk")


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    """The folder of a memory group."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path(f"/sys/fs/cgroup/{'' if second else 'memory/'}lightning_ptm_test_{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (folder / ("memory.max" if second else "memory.limit_in_bytes")).exists():
            pytest.skip("control groups do not bound memory here")
        yield folder
    finally:
        folder.rmdir()


@pytest.fixture(scope="module")
def ask(group: Path) -> Iterator[Ask]:
    """Has a case run under a cap of so many MiB, and tells how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "capped_fits.py"), str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(name: str, cap: int | None, *, fresh: bool = False) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        model, strategy, batch, options = (CASES | LARGE_BATCHES)[name]
        case = {"model": model, "strategy": strategy, "batch": batch, "options": options, "fresh": fresh}
        process.stdin.write(json.dumps({**case, "cap": None if cap is None else cap * MIB}) + "\n")
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))

    yield ask
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def check(ask: Ask, name: str, caps: tuple[int, ...], *, fresh: bool = False) -> None:
    free = ask(name, None, fresh=fresh)
    assert free["rc"] == 0, free
    fits = []
    for cap in caps:
        capped = ask(name, cap, fresh=fresh)
        assert capped["rc"] in (0, REFUSED), f"{name} under {cap} MiB: {capped}"
        assert capped["peak"] <= cap * MIB
        if capped["rc"] == 0:
            assert capped["weights"] == free["weights"]
        else:
            assert capped["error"].startswith("CapacityError")
        fits.append(capped["rc"] == 0)
    assert fits == sorted(fits, reverse=True), f"{name} fits where there is less and not where there is more: {fits}"
    # Caps are from more than it takes to less than it can do with.
    assert fits[0] and not fits[-1], (name, fits, free["peak"] // MIB)


@pytest.mark.parametrize("name", QUICK)
def test_under_a_cap_a_fit_ends_as_without_or_with_a_sentence(ask: Ask, name: str) -> None:
    check(ask, name, (600, 200, {"small": 50, "large batch": 70}.get(name, 110)))


def test_a_batch_whose_activations_do_not_fit_trains_without_a_setting(ask: Ask) -> None:
    """Under the smaller cap, all units have to be recomputed, the first one of the first step included."""
    free = ask("kept", None)
    assert ask("kept", 350)["rc"] == REFUSED
    for name, cap in itertools.product(("no setting", "no setting, no disk"), (350, 225)):
        capped = ask(name, cap)
        assert (capped["rc"], capped.get("weights")) == (0, free["weights"]), (name, cap, capped)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_under_any_cap_a_fit_ends_as_without_or_with_a_sentence(ask: Ask, name: str) -> None:
    # Below, the wide models are killed in configure_model, before there are pages: their weights alone take 65 MiB.
    below = (65, 50) if name in ("small", "large batch", "large vocabulary", "no disk", "true 16 bits") else ()
    check(ask, name, (600, 400, 300, 250, 200, 175, 150, 125, 110, 95, 80, *below), fresh=True)


# -- whole processes ------------------------------------------------------------------------------------------------------

LLAMA = """
import os, sys, json
import lightning as L, torch
from torch.utils.data import DataLoader
from lightning_ptm import AngelPTMStrategy, AngelPTMError
from lightning_ptm.models import GPT

open(sys.argv[1], "w").write(str(os.getpid()))
width, layers, batch, length, settings = json.loads(sys.argv[2])

class Model(GPT):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

module = Model(vocab_size=32000, width=width, layers=layers, heads=16, sequence_length=length, meta=True)
tokens = torch.randint(0, 32000, (4 * batch, length))
trainer = L.Trainer(
    accelerator="cpu", devices=1, strategy=AngelPTMStrategy(**settings), precision="bf16-mixed", max_steps=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
)
try:
    trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=batch))
except AngelPTMError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(3)
"""

MODELS = {  # of about 25, 110 and 270 million parameters
    "25M": (256, 12, 8, 128),
    "110M": (640, 14, 4, 128),
    "270M": (1024, 16, 4, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("cap", [700, 1100, 1500, 2048, 3072, 4096])
@pytest.mark.parametrize("size", MODELS)
def test_no_whole_process_is_killed(group: Path, tmp_path: Path, size: str, cap: int) -> None:
    second = (group / "cgroup.controllers").exists()
    (group / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(cap * MIB))
    settings = {"offload_optimizer": "disk", "disk_path": str(tmp_path)}
    ended = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            LLAMA,
            str(group / "cgroup.procs"),
            json.dumps([*MODELS[size], settings]),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert ended.returncode in (0, REFUSED), (ended.returncode, ended.stderr[-2000:])
    if ended.returncode:
        assert "CapacityError" in ended.stdout
    # What is known to fit.
    assert not (ended.returncode and cap >= {"25M": 1100, "110M": 1500, "270M": 3072}[size]), ended.stdout


"""The rest is refused, or fits by a little."""
