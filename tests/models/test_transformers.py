"""Models of Hugging Face Transformers inside a LightningModule, unchanged: the numbers of Lightning's single device.

Both sides are Trainers with the same module, fp32 and torch's fused AdamW; they are compared bit for bit, dropout
included. Models are a few layers of random weights; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.hooks import Hooks
from lightning_ptm.runtime.engine.engine import Engine

transformers = pytest.importorskip("transformers", reason="tests whole models of transformers")

VOCABULARY = 96
STEPS = 3
NEAR_FULL = {"device_memory": "384KiB"}
"""A device that holds the largest unit and a few small ones, so that units come and go."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads; Lightning sets their number unless it finds this."""
    threads, before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


# -- the models -------------------------------------------------------------------------------------------------------

Batch = dict[str, Tensor]


def _tokens(generator: torch.Generator, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=generator)


def causal(generator: torch.Generator) -> Batch:
    """Next-token prediction; the second text is shorter and padded on the right."""
    ids = _tokens(generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def masked(generator: torch.Generator) -> Batch:
    ids = _tokens(generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.4
    hidden[0, 0] = True
    return {"input_ids": ids.masked_fill(hidden, 2), "labels": ids.masked_fill(~hidden, -100)}


def translation(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 8)}


def images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 3, (2,), generator=generator),
    }


def speech(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": _tokens(generator, 8)}


_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = {**_IDS, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
_ENCODER_DECODER = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model class with its configuration class and sizes; `units` is how many of its blocks are units."""

    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    units: int = 3

    def build(self) -> Any:
        sizes = dict(self.sizes)  # configurations keep what they are given
        return getattr(transformers, self.model)(getattr(transformers, self.config)(**sizes))


MODELS = {
    "gpt2": Model(  # tied head, dropout, Conv1D
        "GPT2LMHeadModel", "GPT2Config", {**_IDS, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2}, causal
    ),
    "gpt2_of_odd_widths": Model(  # nothing is a multiple of a processor's vectors
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_IDS, "n_positions": 31, "n_embd": 42, "n_layer": 3, "n_head": 2, "n_inner": 51},
        causal,
    ),
    "llama": Model(  # rotary buffers, grouped heads
        "LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "attention_dropout": 0.1}, causal
    ),
    "qwen2": Model("Qwen2ForCausalLM", "Qwen2Config", {**_LLAMA, "tie_word_embeddings": True}, causal),
    "opt": Model(  # positions with an offset, tied head, dropout
        "OPTForCausalLM",
        "OPTConfig",
        {
            **_IDS,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
        causal,
    ),
    "bert": Model(  # a head with a tied bias, position_ids as a buffer, dropout
        "BertForMaskedLM", "BertConfig", {**_IDS, **_SIZES, "max_position_embeddings": 32}, masked
    ),
    "t5": Model(  # relative positions of the first block used by all, embedding shared three times, dropout
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_IDS,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        translation,
        units=4,
    ),
    "mixtral": Model(  # experts that get no token, a loss of the router's logits of all layers
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **_LLAMA,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
        },
        causal,
    ),
    "vit": Model(  # a convolution, a class token that belongs to no layer, dropout
        "ViTForImageClassification",
        "ViTConfig",
        {**_SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.1},
        images,
    ),
    "whisper": Model(  # frozen sinusoids, convolutions, an encoder's output that all decoder blocks read, dropout
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_IDS,
            **_ENCODER_DECODER,
            "num_mel_bins": 8,
            "d_model": 32,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "dropout": 0.1,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        speech,
        units=4,
    ),
}


# -- the training -----------------------------------------------------------------------------------------------------


class Wrapped(L.LightningModule):
    """The one LightningModule around all of them.

    Args:
        checkpointing: `use_reentrant` of the model's own activation checkpointing; None: off.
        meta: built in configure_model, on the meta device.
        first: first values of all parameters, by name.
    """

    def __init__(
        self,
        name: str,
        *,
        checkpointing: bool | None = None,
        meta: bool = False,
        first: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.checkpointing, self.meta = name, checkpointing, meta
        self.losses: list[Tensor] = []
        self.seen: dict[str, Tensor] = {}
        self.units = 0
        if not meta:
            self.build()
        if first is not None:
            with torch.no_grad():
                for key, value in self.named_parameters():
                    value.copy_(first[key])

    def build(self) -> None:
        self.model = MODELS[self.name].build()
        if self.checkpointing is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the newest version has another name for it
                self.model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing})

    def configure_model(self) -> None:
        if self.meta and not hasattr(self, "model"):
            with torch.device("meta"):
                self.build()

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "gathered"):
            self.units = len(strategy.engine.blueprint.units) - 1
            with strategy.gathered(write=False):
                self.seen = values_of(self)
        torch.manual_seed(7)  # from here on both sides draw the same dropout masks, wherever first values came from

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def values_of(module: torch.nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def _only(items: list[Any]) -> Any:
    return items[0]


def train(module: Wrapped, strategy: Any, precision: Any = "32-true") -> Wrapped:
    generator = torch.Generator().manual_seed(1)
    batches = [MODELS[module.name].batch(generator) for _ in range(STEPS)]
    if precision == "64-true":
        batches = [
            {name: each.double() if each.is_floating_point() else each for name, each in b.items()} for b in batches
        ]
    loader: Any = DataLoader(batches, batch_size=1, collate_fn=_only, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy, precision=precision, max_epochs=1)
    trainer.fit(module, loader)
    return module


@cache
def on_a_single_device(name: str, checkpointing: bool | None = None) -> Wrapped:
    torch.manual_seed(0)
    return train(Wrapped(name, checkpointing=checkpointing), "auto")


def assert_same(ours: Wrapped, theirs: Wrapped) -> None:
    assert len(ours.losses) == STEPS and all(torch.isfinite(loss) for loss in ours.losses), ours.losses
    assert all(torch.equal(*pair) for pair in zip(ours.losses, theirs.losses, strict=True)), (
        ours.losses,
        theirs.losses,
    )
    after, expected = values_of(ours), values_of(theirs)
    assert after.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(after[name], expected[name])]
    assert not differing, f"values differ: {differing}"


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("ram", {}),
        ("ram", {"recompute": "all"}),
        ("all_on_disk", {"recompute": "every 2nd"}),
        ("three_tiers", NEAR_FULL),
        ("three_tiers", {**NEAR_FULL, "recompute": "all"}),
        ("lock_free", {}),
        ("tight", {}),
        ("tight", {"recompute": "all"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("recompute", "none").replace(" ", "_"),
)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_trains_unchanged(strategy_at, name, where, settings) -> None:
    torch.manual_seed(0)
    ours = train(Wrapped(name), strategy_at(where, **settings))
    assert ours.units == MODELS[name].units
    # Recomputing layers switches the cache of keys and values off, as the model's own checkpointing does; T5's attention
    # then reads its keys in another layout, and rounds differently.
    assert_same(ours, on_a_single_device(name, False if "recompute" in settings else None))


@pytest.mark.parametrize(("name", "recomputes"), [("llama", True), ("gpt2", True), ("t5", False)])
def test_layers_that_are_recomputed_by_choice(
    monkeypatch: pytest.MonkeyPatch, strategy_at, name: str, recomputes: bool
) -> None:
    """The model has made a cache of keys and values when the first layer is to be recomputed, so layers are from the next
    step on. T5's would round differently without the cache, and are not."""
    recomputed: list[Any] = []
    starts = Hooks._recompute_starts
    monkeypatch.setattr(Hooks, "_recompute_starts", lambda *args: (recomputed.append(args), starts(*args)))
    monkeypatch.setattr(Engine, "_activation_room", lambda engine: lambda: 1 << 40)
    monkeypatch.setattr(ActivationPolicy, "_needed_bytes", lambda policy, unit: math.inf)
    torch.manual_seed(0)
    ours = train(Wrapped(name), strategy_at("ram", offload_activations="none"))
    assert_same(ours, on_a_single_device(name, None))
    assert bool(recomputed) == recomputes


@pytest.mark.diagonal
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("where", "settings"), [("all_on_disk", {}), ("three_tiers", {**NEAR_FULL, "recompute": "all"})]
)
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "vit", "whisper"])
def test_the_models_own_activation_checkpointing(strategy_at, name, where, settings, reentrant) -> None:
    """Compared with a single device that checkpoints the same way: a reentrant one rounds sums in another order."""
    torch.manual_seed(0)
    ours = train(Wrapped(name, checkpointing=reentrant), strategy_at(where, **settings))
    assert_same(ours, on_a_single_device(name, reentrant))


@pytest.mark.slow_unless(
    "gpt2-three_tiers", "gpt2_of_odd_widths-ram", "llama", "opt-three_tiers", "bert", "t5-three_tiers", "mixtral"
)
@pytest.mark.parametrize("where", ["ram", "three_tiers"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_built_on_the_meta_device(strategy_at, name, where) -> None:
    """First values come from the model's own initialisation, unit by unit; from then on the numbers are the same."""
    settings = NEAR_FULL if where == "three_tiers" else {}
    torch.manual_seed(3)
    ours = train(Wrapped(name, meta=True), strategy_at(where, **settings))
    assert ours.units == MODELS[name].units
    torch.manual_seed(3)
    usual = Wrapped(name)
    buffers = dict(usual.named_buffers())
    for key, value in values_of(usual).items():
        if key in buffers or value.numel() == 1 or value.std() == 0:
            assert torch.equal(ours.seen[key], value), key
        elif value.numel() > 500:
            assert (ours.seen[key].std() / value.std() - 1).abs() < 0.2, key
            assert (ours.seen[key].mean() - value.mean()).abs() < 0.2 * value.std(), key
    assert_same(ours, train(Wrapped(name, first=ours.seen), "auto"))


def without_dropout(module: torch.nn.Module) -> None:
    names = ("p", "dropout", "attention_dropout", "activation_dropout", "dropout_rate", "dropout_prob")
    for inner in module.modules():
        for name in names:
            if isinstance(getattr(inner, name, None), float):
                setattr(inner, name, 0.0)


@pytest.mark.slow_unless("llama", "bert", "t5", "vit")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixtral"])
def test_a_model_in_slices_of_the_batch(strategy_at, name) -> None:
    """Up to the order of sums, which 64 bits tell from a mistake."""
    trained = []
    for strategy in "auto", strategy_at("tight", slices=2):
        torch.manual_seed(0)
        module = Wrapped(name).double()
        without_dropout(module)
        trained.append(train(module, strategy, precision="64-true"))
    ours, theirs = map(values_of, trained)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-9, msg=key)


def test_a_model_whose_routers_logits_are_read_is_not_sliced(strategy_at) -> None:
    with pytest.raises(ConfigError, match=r"layers.0 \(MixtralDecoderLayer\) .* in slices.*a router's logits"):
        train(Wrapped("mixtral"), strategy_at("ram", slices=2))
