"""Modules that are built on the meta device in configure_model: every way to get first values, a unit at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.plain_loop import PlainLoop, TrainModule, fit, make_trainer, tokens
from kit.stacks import VOCABULARY, WIDTH, Block, Stack
from torch import Tensor, nn

from lightning_ptm import ConfigError
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter

BATCHES = tokens(5)


@torch.no_grad()
def deterministic(module: nn.Module) -> None:
    """Values that depend on shapes alone, so that no order matters."""
    for parameter in module.parameters(recurse=False):
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


class Late(TrainModule):
    """Builds `Stack`'s layers in configure_model, on `where`."""

    where = "meta"
    depth = 4

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        with torch.device(self.where):
            self.build()

    def build(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    middle = Stack.middle
    score = Stack.score
    loss = Stack.loss


class WithInitWeights(Late):
    def init_weights(self, module: nn.Module) -> None:
        deterministic(module)


class WithUnderscore(Late):
    def _init_weights(self, module: nn.Module) -> None:
        deterministic(module)


class TiedHead(WithInitWeights):
    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


class TiedAcrossBlocks(WithInitWeights):
    """One weight of a layer belongs to the root, its bias to the block's unit."""

    def build(self) -> None:
        super().build()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class TiedHeadWithBias(WithInitWeights):
    def build(self) -> None:
        super().build()
        self.head.weight = self.embedding.weight


class ABlockThatKnowsHow(Block):
    """The nearest module with init_weights decides."""

    def init_weights(self, module: nn.Module) -> None:
        deterministic(module)


class BlocksThatKnowHow(Late):
    def build(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ABlockThatKnowsHow() for _ in range(self.depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def init_weights(self, module: nn.Module) -> None:
        deterministic(module)


class OwnParameter(WithInitWeights):
    """The LightningModule itself owns a parameter, and a buffer."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.zeros(WIDTH))

    def init_weights(self, module: nn.Module) -> None:
        super().init_weights(module)
        if module is self:
            self.offset.fill_(0.25)

    def middle(self, x: Tensor, index: int) -> Tensor:  # type: ignore[override]
        return Stack.middle(self, x * self.scale + self.offset.to(x.dtype), index)  # type: ignore[arg-type]


class Attention(WithInitWeights):
    """torch's own transformer layers."""

    def build(self) -> None:
        super().build()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers


def eager(build: type[Late]) -> type[Late]:
    """Returns the class built on the CPU, with the same first values."""

    class Eager(build):  # type: ignore[valid-type, misc]
        where = "cpu"

        def build(self) -> None:
            super().build()
            for module in self.modules():
                initialise = getattr(self, "init_weights", None) or self._init_weights
                initialise(module)

    return Eager


@pytest.mark.slow_unless(
    "all_on_disk-WithInitWeights",
    "all_on_disk-TiedHead",
    "all_on_disk-BlocksThatKnowHow",
    "lock_free_three_tiers-TiedAcrossBlocks",
)
@pytest.mark.parametrize(
    "build",
    [
        WithInitWeights,
        WithUnderscore,
        TiedHead,
        TiedHeadWithBias,
        TiedAcrossBlocks,
        BlocksThatKnowHow,
        OwnParameter,
        Attention,
    ],
)
def test_first_values_and_training(strategy_at, tier, build) -> None:
    fit(build, BATCHES, strategy_at(tier)).assert_equal(PlainLoop(eager(build)).run(BATCHES))


class TiedWithReset(Late):
    def build(self) -> None:
        super().build()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class AttentionWithReset(Attention):
    init_weights = None  # type: ignore[assignment]

    def build(self) -> None:
        super().build()
        self.blocks.extend(Block() for _ in range(4))


@pytest.mark.slow_unless("all_on_disk-TiedWithReset", "lock_free_three_tiers-Late")
@pytest.mark.parametrize("build", [Late, TiedWithReset])
def test_reset_parameters(strategy_at, tier, build) -> None:
    """Every layer's own reset_parameters gives its usual values, if there is no init_weights."""
    torch.manual_seed(0)
    module = build()
    seen: dict[str, Tensor] = {}

    class Looking(build):  # type: ignore[valid-type, misc]
        def on_train_start(self) -> None:
            with self.trainer.strategy.gathered(write=False):  # type: ignore[attr-defined]
                seen.update({name: parameter.detach().clone() for name, parameter in self.named_parameters()})

    module = Looking()
    make_trainer(strategy_at(tier)).fit(module, BATCHES.loader())
    assert not any(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(seen["blocks.1.norm.weight"], torch.ones(WIDTH))
    for name in ("blocks.0.up.weight", "blocks.3.up.bias", "blocks.2.up.bias"):
        bound = WIDTH**-0.5
        assert seen[name].abs().max() <= bound and seen[name].std() > bound / 3, name
    assert 0.9 < seen["embedding.weight"].std() < 1.1
    assert torch.isfinite(torch.stack(module.losses)).all()


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_attention_resets_itself(strategy_at, tier) -> None:
    """Inner layers first: torch zeroes the bias of the output layer from outside."""
    seen: dict[str, Tensor] = {}

    class Looking(AttentionWithReset):
        def on_train_start(self) -> None:
            with self.trainer.strategy.gathered(write=False):  # type: ignore[attr-defined]
                seen.update({name: parameter.detach().clone() for name, parameter in self.named_parameters()})

    torch.manual_seed(0)
    make_trainer(strategy_at(tier)).fit(Looking(), BATCHES.loader())
    for index in range(3):
        assert torch.equal(seen[f"blocks.{index}.self_attn.out_proj.bias"], torch.zeros(WIDTH))
        assert seen[f"blocks.{index}.self_attn.in_proj_weight"].std() > 0.05
        assert seen[f"blocks.{index}.linear1.bias"].std() > 0.01


class NormsAndRecurrence(TrainModule):
    """BatchNorm's buffers, and an LSTM, which keeps weak references to its weights."""

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        with torch.device("meta"):
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        x = self.norm(self.embedding(batch[:, :-1]).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x, _ = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_batch_norm_and_lstm(strategy_at, tier) -> None:
    ours = fit(NormsAndRecurrence, BATCHES, strategy_at(tier), "32-true")
    assert all(torch.isfinite(value).all() for value in ours.weights.values())
    assert int(ours.weights["norm.num_batches_tracked"]) == len(BATCHES)
    assert ours.weights["layers.0.weight_ih_l0"].std() > 0.01


class Mute(nn.Module):
    """Nobody says how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))


class WithAMuteLayer(Late):
    def build(self) -> None:
        super().build()
        self.mute = Mute()


def test_a_layer_that_nobody_initialises_is_refused(strategy_at) -> None:
    with pytest.raises(ConfigError, match=r"Mute was built on the meta device .*reset_parameters"):
        fit(WithAMuteLayer, BATCHES, strategy_at("ram"))


class ForgetsBiases(Late):
    """Module whose initialisation sets matrices alone."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)


def seen_at_the_start(build: type[Late], strategy: Any) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    class Looking(build):  # type: ignore[valid-type, misc]
        def on_train_start(self) -> None:
            with strategy.gathered(write=False):
                seen.update({name: parameter.detach().clone() for name, parameter in self.named_parameters()})

    torch.manual_seed(0)
    make_trainer(strategy).fit(Looking(), BATCHES.loader())
    return seen


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_what_an_initialisation_leaves_out_has_the_usual_values(strategy_at, tier) -> None:
    seen = seen_at_the_start(ForgetsBiases, strategy_at(tier))
    assert all(torch.isfinite(value).all() for value in seen.values())
    assert torch.equal(seen["blocks.1.up.weight"], torch.full_like(seen["blocks.1.up.weight"], 0.25))
    assert 0 < seen["blocks.1.up.bias"].abs().max() <= WIDTH**-0.5
    assert torch.equal(seen["blocks.1.norm.weight"], torch.ones(WIDTH))


class SetsWhatIsInside(Late):
    """`_init_weights` as for `apply`: a layer by itself, then the block and the whole model around it."""

    def _init_weights(self, module: nn.Module) -> None:
        deterministic(module)
        if isinstance(module, Block):
            nn.init.constant_(module.down.weight, 0.5)
        if module is self:
            nn.init.constant_(self.blocks[2].up.bias, 0.125)
            nn.init.constant_(self.head.bias, 0.25)


class AppliesItself(SetsWhatIsInside):
    where = "cpu"

    def build(self) -> None:
        super().build()
        self.apply(self._init_weights)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_an_initialisation_sees_the_modules_around_layers_after_them(strategy_at, tier) -> None:
    fit(SetsWhatIsInside, BATCHES, strategy_at(tier)).assert_equal(PlainLoop(AppliesItself).run(BATCHES))
    seen = seen_at_the_start(SetsWhatIsInside, strategy_at(tier))
    for index in range(4):
        assert (seen[f"blocks.{index}.down.weight"] == 0.5).all()
        assert bool((seen[f"blocks.{index}.up.bias"] == 0.125).all()) is (index == 2)
    assert (seen["head.bias"] == 0.25).all()


class ReadsAcrossUnits(Late):
    def _init_weights(self, module: nn.Module) -> None:
        deterministic(module)
        if module is self:
            with torch.no_grad():
                self.blocks[1].up.weight.copy_(self.blocks[0].up.weight)


def test_an_initialisation_that_needs_several_units_at_once_is_refused(strategy_at) -> None:
    with pytest.raises(ConfigError, match=r"ReadsAcrossUnits on the meta device reads weights of several units"):
        fit(ReadsAcrossUnits, BATCHES, strategy_at("ram"))


class _Forgetful(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.what = what
        if what != "weight":
            dtype = torch.long if what == "places" else torch.float32
            self.register_buffer(what, torch.zeros(3, dtype=dtype))

    def reset_parameters(self) -> None:
        if self.what != "weight":
            nn.init.ones_(self.weight)


@pytest.mark.parametrize("what", ["weight", "scales", "places"])
def test_what_nobody_initialises_is_refused(strategy_at, what) -> None:
    class Forgets(Late):
        def build(self) -> None:
            super().build()
            self.forgetful = _Forgetful(what)

    kind = "parameter" if what == "weight" else "buffer"
    with pytest.raises(ConfigError, match=rf"{kind} forgetful\.{what} of a _Forgetful .*has no value"):
        fit(Forgets, BATCHES, strategy_at("ram"))


class Weighing(WithInitWeights):
    """Adds up, whenever a layer gets its values, the parameters that exist in memory of their own."""

    depth = 8

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.calls = 0

    def init_weights(self, module: nn.Module) -> None:
        own = 0
        for parameter in self.parameters():
            size = parameter.numel() * parameter.itemsize
            # A closed one is in pages, and so is one whose storage is the whole pool.
            if parameter.is_meta or isinstance(parameter, GuardedParameter):
                continue
            if parameter.untyped_storage().nbytes() == size:
                own += size
        self.most = max(self.most, own)
        self.calls += 1
        super().init_weights(module)


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_no_more_than_a_unit_exists_outside_pages(strategy_at, tier) -> None:
    made: list[Any] = []

    def build() -> Weighing:
        made.append(Weighing())
        return made[-1]

    fit(build, BATCHES, strategy_at(tier))
    largest = 4 * sum(parameter.numel() for parameter in made[0].blocks[0].parameters())
    assert made[0].calls == 3 + 3 * Weighing.depth  # every layer with parameters, once
    assert 0 < made[0].most <= largest
