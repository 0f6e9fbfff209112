"""torch.compile of a unit, of what is inside of one, of a function of the step, and of all of it.

The other side is the same compiled module on Lightning's single device. Graphs are run by torch's own kernels
(`aot_eager`: everything of torch.compile but code generation), so that all can be compared bit for bit wherever graphs are
cut; one test generates code.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.plain_loop import make_trainer, outcome_of, tokens
from kit.stacks import VOCABULARY, WIDTH, Block, Stack
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from lightning_ptm import ConfigError
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.hooks import Hooks
from lightning_ptm.runtime.engine.engine import Engine

BATCHES = tokens(3)
Compile = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Dropping(Stack):
    """Blocks with dropout; `compile` is torch.compile with a backend."""

    depth = 3

    def __init__(self, compile: Compile) -> None:
        super().__init__(depth=self.depth, make_block=lambda: Block(dropout=0.2))
        self.compile_with = compile


class BlocksReplaced(Dropping):
    def configure_model(self) -> None:
        for index, block in enumerate(self.blocks):
            self.blocks[index] = self.compile_with(block)


class BlocksInPlace(Dropping):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(**self.compile_with.keywords)  # type: ignore[attr-defined]


class ForwardsOfBlocks(Dropping):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.forward = self.compile_with(block.forward)


class LayersOfBlocks(Dropping):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.up = self.compile_with(block.up)
            block.down.compile(**self.compile_with.keywords)  # type: ignore[attr-defined]


class AFunctionOfTheStep(Dropping):
    """The head and the loss: weights of the root."""

    def configure_model(self) -> None:
        self.score = self.compile_with(self.score)  # type: ignore[method-assign]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=0.2) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class AllOfIt(Dropping):
    """The whole model inside the LightningModule; its graph is cut at units."""

    def __init__(self, compile: Compile) -> None:
        super().__init__(compile)
        del self.embedding, self.blocks, self.norm, self.head
        self.body = Body()

    def configure_model(self) -> None:
        self.body = self.compile_with(self.body)

    def loss(self, batch: Any, index: int) -> Tensor | None:
        return functional.cross_entropy(self.body(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class AllOfItInPlace(AllOfIt):
    def configure_model(self) -> None:
        self.body.compile(**self.compile_with.keywords)  # type: ignore[attr-defined]


def with_backend(backend: Any, **options: Any) -> Compile:
    return partial(torch.compile, backend=backend, **options)


def fit(build: Callable[[Compile], Stack], strategy: Any, backend: Any = "aot_eager", **options: Any) -> Outcome:
    torch.manual_seed(0)
    module = build(with_backend(backend, **options))
    make_trainer(strategy, "32-true").fit(module, BATCHES.loader())
    return outcome_of(module)


BUILDS = [BlocksReplaced, BlocksInPlace, ForwardsOfBlocks, LayersOfBlocks, AFunctionOfTheStep, AllOfIt, AllOfItInPlace]
SMALL = {"device_memory": "768KiB"}


@pytest.mark.slow_unless(
    "three_tiers-settings3-LayersOfBlocks",
    "three_tiers-settings2-AllOfIt",
    "three_tiers-settings3-AllOfItInPlace",
    "lock_free-settings4-BlocksInPlace",
)
@pytest.mark.filterwarnings("ignore:.*compiled as a whole")
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("ram", {}),
        ("all_on_disk", {"recompute": "all"}),
        ("three_tiers", SMALL),
        ("three_tiers", {**SMALL, "recompute": "all"}),
        ("lock_free", {}),
    ],
)
def test_same_numbers_as_on_a_single_device(strategy_at, where, settings, build) -> None:
    expected = fit(build, "auto")
    torch._dynamo.reset()
    fit(build, strategy_at(where, **settings)).assert_equal(expected)


@pytest.mark.slow_unless("none-AllOfIt", "auto-BlocksInPlace", "auto-ForwardsOfBlocks")
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("offload", ["auto", "none"])
def test_compiled_units_are_not_recomputed_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, strategy_at, build, offload
) -> None:
    """A recomputed forward might run other code, and round differently."""
    recomputed: list[Any] = []
    starts = Hooks._recompute_starts
    monkeypatch.setattr(Hooks, "_recompute_starts", lambda *args: (recomputed.append(args), starts(*args)))
    monkeypatch.setattr(Engine, "_activation_room", lambda engine: lambda: 1 << 40)
    monkeypatch.setattr(ActivationPolicy, "_needed_bytes", lambda policy, unit: math.inf)
    expected = fit(build, "auto")
    torch._dynamo.reset()
    fit(build, strategy_at("three_tiers", offload_activations=offload)).assert_equal(expected)
    uncompiled = (ForwardsOfBlocks, AFunctionOfTheStep)  # torch.compile was given functions
    assert bool(recomputed) == (offload == "none" and build in uncompiled)


class Deep(BlocksReplaced):
    depth = 10  # torch.compile gives up on a function that it had to compile more than eight times


class DeepInPlace(BlocksInPlace):
    depth = 10


@pytest.mark.diagonal
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("where", ["ram", "three_tiers"])
@pytest.mark.parametrize("build", [Deep, DeepInPlace])
def test_all_blocks_share_one_graph_without_a_cut(strategy_at, build, where, recompute) -> None:
    """Where a block lies is nothing that compiled code depends on; `fullgraph` refuses a cut."""
    counter = CompileCounterWithBackend("aot_eager")
    settings = SMALL if where == "three_tiers" else {}
    fit(build, strategy_at(where, recompute=recompute, **settings), counter, fullgraph=True)
    assert counter.frame_count == 1


class Squash(nn.Module):
    """Little to generate code for: a kernel or two each way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))  # type: ignore[no-any-return]


class Squashing(BlocksInPlace):
    def __init__(self, compile: Compile) -> None:
        super().__init__(compile)
        self.blocks = nn.ModuleList(Squash() for _ in range(3))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile generates C++ and there is no g++")
def test_generated_code(strategy_at, tmp_path: Path) -> None:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    folder = tmp_path / "generated"
    folder.mkdir()
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.simdlen": 1}
    with fresh_cache(dir=str(folder), delete=False), config.patch(quick):
        expected = fit(Squashing, "auto", "inductor")
        assert list(folder.rglob("*.cpp"))
        for where, settings in (("ram", {}), ("three_tiers", {**SMALL, "recompute": "all"}), ("lock_free", {})):
            fit(Squashing, strategy_at(where, **settings), "inductor").assert_equal(expected)


def test_after_a_run_compiled_blocks_are_as_before(strategy_at) -> None:
    torch.manual_seed(0)
    module = BlocksInPlace(with_backend("eager"))
    for where in ("three_tiers", "all_on_disk"):
        make_trainer(strategy_at(where), "32-true").fit(module.train(), BATCHES.loader())
        module.eval()
        x = torch.randn(2, 5, WIDTH)
        for block in module.blocks:
            assert block._compiled_call_impl is not None
            assert torch.equal(block(x), block.forward(x))
            assert torch.isfinite(block(x)).all()


def test_recomputing_units_of_a_module_that_is_compiled_as_a_whole_warns(strategy_at) -> None:
    for build, warned in ((AllOfIt, True), (AllOfItInPlace, True), (BlocksReplaced, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(build, strategy_at("ram", recompute="all"))
        texts = [str(each.message) for each in caught if "compiled as a whole" in str(each.message)]
        assert len(texts) == warned
        assert not warned or texts[0].startswith("body: ")


def test_a_graph_of_the_whole_model_in_one_piece_is_refused(strategy_at) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile units .* one by one"):
        fit(AllOfIt, strategy_at("ram"), fullgraph=True)


def test_a_compiled_lightning_module_is_refused(strategy_at) -> None:
    module: Any = torch.compile(Stack(), backend="eager")
    for run in ("fit", "validate", "predict"):
        trainer: L.Trainer = make_trainer(strategy_at("ram"))
        with pytest.raises(ConfigError, match=r"Stack was compiled as a whole .*block\.compile\(\)"):
            getattr(trainer, run)(module, BATCHES.loader())


class BorrowsALayer(AFunctionOfTheStep):
    """A compiled function calls a layer of a block."""

    def score(self, batch: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().score(batch, self.blocks[0].norm(x))


def test_a_layer_of_a_unit_called_from_another_compiled_function_is_refused(strategy_at) -> None:
    fit(BorrowsALayer, strategy_at("ram")).assert_equal(fit(BorrowsALayer, "auto"))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.norm\.weight was read or written"):  # torch wraps ours
        fit(BorrowsALayer, strategy_at("three_tiers", **SMALL))
