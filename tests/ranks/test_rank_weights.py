"""Weights from files on several ranks: each reads what it owns, straight into its pages, and memory holds no more."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.models import Tower
from kit.ranks.training import TIERS, Training, fit, fit_in_all_tiers, loader, make_trainer, plain, tokens
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptm import AngelPTMStrategy


class Filled(Tower):
    """Model with fixed first values, whatever the seed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


class Late(Tower):
    """Model on the meta device without any initialisation."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def save(folder: Path, name: str = "model.safetensors", **changes: torch.Tensor) -> Path:
    save_file({**Filled().state_dict(), **changes}, folder / name)
    return folder / name


@pytest.mark.slow_unless("2-bf16-mixed-tiers0")
@pytest.mark.parametrize(
    ("world_size", "precision", "tiers"),
    [(2, "bf16-mixed", ["ram", "three_tiers", "lock_free"]), (3, "32-true", ["all_on_disk"])],
)
def test_training_from_a_file(world_size: int, precision: str, tiers: list[str], disk: Path, tmp_path: Path) -> None:
    path = save(tmp_path)
    theirs = plain(Training(Filled, precision), world_size)
    ours = run_ranks(
        fit_in_all_tiers, world_size, Training(Late, precision), world_size, disk, {"weights": path}, tiers
    )
    for rank, by_tier in enumerate(ours):
        for outcome in by_tier.values():
            outcome.assert_equal(theirs[rank])


def _fit_from_own(training: Training, folder: Path, paths: list[Path]) -> Any:
    return fit(training, 2, folder, weights=paths[int(os.environ["RANK"])])


def test_ranks_with_different_files(disk: Path, tmp_path: Path) -> None:
    """All raise, and name the rank that differs."""
    right = save(tmp_path)
    half = save(tmp_path, "half.safetensors", **{"head.weight": Filled().head.weight.detach().half()})
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(right.read_bytes()[:-8])
    for other, text in ((half, "has other tensors on this rank than on rank 0"), (broken, "cut short or damaged")):
        for outcome in watch_ranks(_fit_from_own, 2, Training(Late), disk, [right, other]):
            assert outcome.end is End.RAISED and text in outcome.error, outcome
            assert outcome.rank == 1 or "rank 1: " in outcome.error


# -- memory ---------------------------------------------------------------------------------------------------------------

BLOCKS = 12
WIDE = (256, 4096)
PAGE = 1 << 20
FIXED = 8 << 20
"""Bytes for pages in transit, and for what torch and Lightning take as a run begins."""


class Wide(Tower):
    """Twelve units of 8 MiB in fp32."""

    def __init__(self, device: str = "meta") -> None:
        with torch.device(device):
            super().__init__(WIDE[0], (WIDE[1],) * BLOCKS)


class Peak:
    """The most anonymous memory that the process has inside the block, in bytes; looks every half millisecond."""

    def __enter__(self) -> Peak:
        self._done = threading.Event()
        self.before = self.most = _anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.most = max(self.most, _anonymous_bytes())

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def more(self) -> int:
        return self.most - self.before


def _anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


class Reads(TorchDispatchMode):
    """Counts the bytes of a mapped file that torch has read inside the block."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and self._is_mapped(tensor):
                    self.bytes += tensor.numel() * tensor.itemsize
        return function(*args, **(kwargs or {}))

    def _is_mapped(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        sections = re.findall(rf"^(\w+)-(\w+) .* {self.path}$", Path("/proc/self/maps").read_text(), re.M)
        return any(int(start, 16) <= tensor.data_ptr() < int(stop, 16) for start, stop in sections)


class Watched(AngelPTMStrategy):
    """Weighs what its set-up does."""

    def setup(self, trainer: Any) -> None:
        with Peak() as peak, Reads(Path(str(self.settings.pretrained.path))) as reads:
            super().setup(trainer)
        self.seen = peak.more, reads.bytes


def _load(world_size: int, folder: Path, path: Path) -> tuple[int, int]:
    """(peak of anonymous memory while a run is set up, bytes read of the file)."""
    strategy = Watched(page_size=PAGE, disk_path=folder, weights=path, **TIERS["all_on_disk"])
    training = Training(Wide, batches=1)
    rows = loader(tokens(training, world_size), world_size)
    make_trainer(training, strategy, world_size, max_steps=0).fit(Wide(), rows)
    return strategy.seen


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loading_takes_less_memory_than_a_unit(world_size: int, disk: Path, tmp_path: Path) -> None:
    model = Wide("cpu")
    unit = 4 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    path = tmp_path / "wide.safetensors"
    save_file(model.state_dict(), path)
    del model
    assert size > 5 * (unit + FIXED)
    ranks = run_ranks(_load, world_size, world_size, disk, path)
    for peak, read in ranks:
        assert 0 < peak < unit + FIXED
        assert abs(read - size / world_size) < PAGE
    assert sum(read for _, read in ranks) == size
