"""Elements that a rank of a grid sends in a step: counted on threads, derived by formulas, and as docs/grid.md has them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.grid_models import example
from kit.ranks.threads import on_grid, thread_groups

from lightning_ptm.forecasting.estimate import estimate
from lightning_ptm.models import GPT
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.grid import Grid
from lightning_ptm.parallel.rules import plan_of
from lightning_ptm.planning.mesh import GridShape
from lightning_ptm.runtime.units.discovery import discover

PAGE = Path(__file__).parents[2] / "docs" / "grid.md"
BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 8, 16, 64, 32, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "width": WIDTH,
    "layers": LAYERS,
    "heads": 4,
    "sequence_length": LENGTH,
}


@dataclasses.dataclass(frozen=True)
class Derived:
    """Formulas of docs/grid.md: elements that a rank sends, forward and backward.

    Args:
        side: ranks along each axis of the grid.
        cube: whether there are three axes.
        tokens: of the batch of one grid.
    """

    side: int
    cube: bool
    tokens: int

    @property
    def ranks(self) -> int:
        return self.side ** (3 if self.cube else 2)

    @property
    def samples(self) -> int:
        """Number of parts of the batch."""
        return self.side ** (2 if self.cube else 1)

    def linear(self, inputs: int, outputs: int) -> float:
        of_output = 2 * self.tokens * outputs if self.cube else 0
        return (3 * self.tokens * inputs + of_output + 3 * inputs * outputs) * (self.side - 1) / self.ranks

    def gathered(self, numel: int) -> float:
        """Returns the elements that a rank sends for a vector or an embedding of `numel` elements."""
        return 2 * numel * (self.samples - 1) / self.ranks

    def norm(self, width: int) -> float:
        own = self.tokens / self.samples
        return (2 * own + 4 * own / self.side) * (self.side - 1) + 2 * self.gathered(width)

    def matrices(self, width: int) -> float:
        """Returns the elements that a rank sends for the four linear layers of a block."""
        layers = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        return sum(self.linear(inputs, outputs) for inputs, outputs in layers)

    def block(self, width: int) -> float:
        return self.matrices(width) + self.gathered(9 * width) + 2 * self.norm(width)

    def gpt(self) -> float:
        loss = 6 * self.tokens / self.samples * (self.side - 1)
        scalars = (2 * (self.side - 1) // self.side) * (2 if self.cube else 1)
        tables = self.gathered((VOCABULARY + LENGTH) * WIDTH)
        head = self.linear(WIDTH, VOCABULARY)
        return LAYERS * self.block(WIDTH) + self.norm(WIDTH) + tables + head + loss + scalars


def one_dimensional(tokens: int, width: int, tensor: int, data: int) -> float:
    """Returns the elements that a rank sends for a block with sequence parallelism and pages sharded over `data` ranks.

    Activations are exchanged eleven times; weights are gathered twice, and their gradients are reduced once.
    """
    return 11 * tokens / data * width * (tensor - 1) / tensor + 3 * 12 * width * width / tensor * (data - 1) / data


@pytest.mark.parametrize("cube", [False, True], ids=["2d", "3d"])
def test_a_rank_sends_what_is_derived(cube: bool) -> None:
    batch = (torch.zeros(BATCH, LENGTH, dtype=torch.long),) * 2

    def work(grid: Grid) -> int:
        model = type("OnThreads", (example().GridGPT,), {"grid": grid})(**SIZES)
        model.configure_model()
        model.loss(batch).backward()
        return sum(elements for group in thread_groups(grid).values() for _, elements in group.sent)

    expected = Derived(2, cube, BATCH * LENGTH).gpt()
    assert on_grid(GridShape(2, cube=cube), work) == [expected] * 2 ** (3 if cube else 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_sends_eleven_exchanges_of_a_block(ranks: int) -> None:
    """That of the embeddings and the head, which do not depend on the number of blocks, is taken off."""

    def sent(layers: int) -> int:
        group = CountedTensorGroup(ranks)
        model = GPT(**{**SIZES, "layers": layers}, meta=True)
        model.configure_model()
        plan = plan_of(model, "auto")
        CutModule(model, plan, group, strict=False, sequence_parallel=True, proven=False)
        tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
        works = estimate(model.train(), discover(model, "auto"), (tokens, tokens), torch.float32, group=group)
        return sum(work.sent.bytes + work.sent_back.bytes for work in works)

    assert sent(3) - sent(2) == 4 * one_dimensional(BATCH * LENGTH, WIDTH, ranks, 1)


def test_the_page_has_these_numbers() -> None:
    text = PAGE.read_text()
    counted = dict(re.findall(r"^\| `(2d|3d)` \| ([\d,]+) \| \2 \|$", text, re.MULTILINE))
    for mode in ("2d", "3d"):
        assert counted[mode] == f"{Derived(2, mode == '3d', BATCH * LENGTH).gpt():,.0f}"
    rows = re.findall(
        r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| (\S+) \(t=(\d+), d=(\d+)\) \| (\S+) \| (\S+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 18
    for row in rows:
        ranks, width, tokens, _, tensor, data = (int(each.replace(",", "")) for each in (*row[:3], "0", *row[4:6]))
        best = min((one_dimensional(tokens, width, ranks // each, each), each) for each in powers_of_two(ranks))
        assert (ranks // best[1], best[1]) == (tensor, data)
        assert (row[3], row[6], row[7]) == (
            mib(best[0]),
            mib(square(ranks, tokens, width)),
            cubed(ranks, tokens, width),
        )
        if ranks < 64:
            assert best[0] < square(ranks, tokens, width)


def powers_of_two(most: int) -> list[int]:
    return [1 << each for each in range(most.bit_length())]


def mib(elements: float) -> str:
    return f"{elements * 2 / (1 << 20):,.0f}"


def square(ranks: int, tokens: int, width: int) -> float:
    """Returns the MiB of the largest square; with depth, weights are gathered twice and gradients reduced once along it."""
    side = {4: 2, 8: 2, 64: 8}[ranks]
    depth = ranks // side**2
    pages = 3 * 12 * width * width / side**2 * (depth - 1) / depth
    return Derived(side, cube=False, tokens=tokens // depth).matrices(width) + pages


def cubed(ranks: int, tokens: int, width: int) -> str:
    sides = {8: 2, 64: 4}
    return mib(Derived(sides[ranks], cube=True, tokens=tokens).matrices(width)) if ranks in sides else "-"
