"""Starting from somebody else's weights: from files straight into pages, with the names that the files happen to have."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from kit.plain_loop import PlainLoop, TrainModule, fit, make_trainer, outcome_of, tokens
from kit.stacks import VOCABULARY, WIDTH, Block
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.checkpoints.weights import first_values
from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.config import Settings
from lightning_ptm.errors import AngelPTMError, CheckpointError, ConfigError
from lightning_ptm.storage.tensors import Mapped

BATCHES = tokens(4)
DEPTH = 3


class Positions(nn.Module):
    """Parameters that nobody can initialise, a buffer that files have, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, WIDTH))
        self.register_buffer("scale", torch.empty(WIDTH))
        self.register_buffer("order", torch.empty(64), persistent=False)
        self.init_weights(self)

    def init_weights(self, module: nn.Module) -> None:
        self.order.copy_(torch.arange(64))

    def forward(self, x: Tensor) -> Tensor:
        picked = self.weight[self.order[: x.shape[1]].long()]
        return x + picked * self.scale.to(picked.dtype)


class Body(nn.Module):
    """A small network with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer.wpe = Positions()
        self.transformer.h = nn.ModuleList(Block() for _ in range(DEPTH))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, batch: Tensor) -> Tensor:
        x = self.transformer.wpe(self.transformer.wte(batch))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x)


class Tuned(TrainModule):
    """Module as users write it: the network as `self.model`."""

    where = "meta"

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device(self.where):
                self.model = Body()

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        return functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.loss(batch, index)


class TunedEagerly(Tuned):
    where = "cpu"


def values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the values of `Body`, as writers of safetensors files save it: tied weights once, no computed buffers."""
    generator = torch.Generator().manual_seed(7)
    state = Body().state_dict()
    del state["lm_head.weight"]
    return {name: (torch.randn(value.shape, generator=generator) * 0.1).to(dtype) for name, value in state.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(values(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


class Loaded(TunedEagerly):
    """The plain side: built in memory, with the values put in by torch."""

    dtype = torch.float32

    def configure_model(self) -> None:
        super().configure_model()
        result = self.model.load_state_dict({name: value.float() for name, value in values(self.dtype).items()}, False)
        assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys


# -- the same training ----------------------------------------------------------------------------------------------------


@pytest.mark.slow_unless(
    "masters_on_disk-Tuned", "all_on_disk-TunedEagerly", "lock_free-TunedEagerly", "tight_recomputed-Tuned"
)
@pytest.mark.parametrize("build", [Tuned, TunedEagerly])
def test_training_from_a_file(strategy_at, tier: str, build: type[Tuned], file: Path) -> None:
    fit(build, BATCHES, strategy_at(tier, weights=file)).assert_equal(PlainLoop(Loaded).run(BATCHES))


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_files_of_other_dtypes(strategy_at, precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_file(values(dtype), tmp_path / "x.safetensors")
    plain = type("Plain", (Loaded,), {"dtype": dtype})
    ours = fit(Tuned, BATCHES, strategy_at("masters_on_disk", weights=tmp_path / "x.safetensors"), precision)
    # Fused AdamW and an fp32 master: bits of the file, or what rounding makes of them.
    theirs = PlainLoop(plain, precision).run(BATCHES)
    theirs.weights["model.transformer.wpe.scale"] = theirs.weights["model.transformer.wpe.scale"].float()
    ours.weights["model.transformer.wpe.scale"] = ours.weights["model.transformer.wpe.scale"].float()
    del theirs.weights["model.transformer.wpe.order"], ours.weights["model.transformer.wpe.order"]
    ours.assert_equal(theirs)


class Looking(Tuned):
    """Keeps the weights and the random numbers that training starts with."""

    def on_train_start(self) -> None:
        self.random = torch.get_rng_state()
        with self.trainer.strategy.gathered(write=False):  # type: ignore[attr-defined]
            self.first = {name: value.detach().clone() for name, value in self.state_dict().items()}


def test_no_random_number_is_drawn_for_what_the_file_has(strategy_at, file: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    module = Looking()
    make_trainer(strategy_at("ram", weights=file)).fit(module, BATCHES.loader())
    assert torch.equal(module.random, before)
    for name, value in values().items():
        assert torch.equal(module.first[f"model.{name}"], value), name
    assert torch.equal(module.first["model.lm_head.weight"], module.first["model.transformer.wte.weight"])
    assert torch.equal(module.model.transformer.wpe.order, torch.arange(64.0))


# -- shapes of files ------------------------------------------------------------------------------------------------------


def shards(folder: Path, count: int = 3) -> Path:
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for place, (name, value) in enumerate(values().items()):
        parts[place % count][name] = value
    files = [f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(count)]
    for name, part in zip(files, parts, strict=True):
        save_file(part, folder / name)
    index = {"metadata": {}, "weight_map": {name: files[place % count] for place, name in enumerate(values())}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def given(module: L.LightningModule, path: Path | str, weights: Any = MappingProxyType({})) -> dict[str, Tensor]:
    """By name in the module: what the files at `path` provide."""
    found = first_values(module, Settings(weights={"path": path, **weights}), SoloCommunicator())
    named = {
        name: found.parameters[id(parameter)]()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in found.parameters
    }
    for prefix, owner in module.named_modules():
        for attribute in owner._buffers:
            if (id(owner), attribute) in found.buffers:
                named[f"{prefix}.{attribute}"] = found.buffers[id(owner), attribute]()
    return named


def built(build: type[Tuned] = Tuned) -> Tuned:
    module = build()
    module.configure_model()
    return module


def assert_right(found: Mapping[str, Tensor]) -> None:
    wanted = {f"model.{name}": value for name, value in values().items()}
    wanted["model.lm_head.weight"] = wanted["model.transformer.wte.weight"]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_file_a_folder_and_shards(file: Path, tmp_path: Path) -> None:
    assert_right(given(built(), file))
    assert_right(given(built(), str(tmp_path)))
    folder = tmp_path / "shards"
    folder.mkdir()
    index = shards(folder)
    assert_right(given(built(), folder))
    assert_right(given(built(), index))
    other = tmp_path / "other"
    other.mkdir()
    file.rename(other / "mine.safetensors")
    assert_right(given(built(), other))


def test_a_sharded_checkpoint(strategy_at, file: Path, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="x", save_weights_only=True)
    first = strategy_at("masters_on_disk", weights=file, checkpoints={"state_dict_type": "sharded"})
    trained = Tuned()
    make_trainer(first, enable_checkpointing=True, callbacks=[keep]).fit(trained, BATCHES.loader())
    again = Looking()
    make_trainer(strategy_at("ram", weights=tmp_path / "x.ckpt")).fit(again, BATCHES.loader())
    for name, value in outcome_of(trained).weights.items():
        assert name.endswith("order") or torch.equal(again.first[name], value), name


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """1 TiB with holes: only what is read takes memory."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    with (tmp_path / "x").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.ljust(len(header)))
        file.truncate(8 + len(header) + (1 << 40))
    if (8 + len(header)) % 4:
        pytest.fail("the header must leave the tensor aligned, or it is copied")
    assert Mapped(tmp_path / "x").tensor("x")[-1] == 0


# -- names ----------------------------------------------------------------------------------------------------------------


def renamed(folder: Path, rename: Callable[[str], str], **more: Tensor) -> Path:
    save_file({**{rename(name): value for name, value in values().items()}, **more}, folder / "renamed.safetensors")
    return folder / "renamed.safetensors"


@pytest.mark.parametrize("prefix", ["", "model.", "a.", "a.model.", "a.b."])
def test_prefixes_are_found(prefix: str, tmp_path: Path) -> None:
    """Files of the network, of the LightningModule, and of some other wrapper."""
    if prefix == "a.b.":
        with pytest.raises(ConfigError, match=r"the files lack model\.transformer\.wte\.weight"):
            given(built(), renamed(tmp_path, lambda name: prefix + name))
        assert_right(
            given(built(), renamed(tmp_path, lambda name: prefix + name), weights={"key_mapping": {"a.b": "model"}})
        )
    else:
        assert_right(given(built(), renamed(tmp_path, lambda name: prefix + name)))


def test_a_file_without_the_base_models_prefix(tmp_path: Path) -> None:
    assert_right(given(built(), renamed(tmp_path, lambda name: name.removeprefix("transformer."))))


def test_a_file_with_the_base_models_prefix_for_a_base_model(tmp_path: Path) -> None:
    class Base(Tuned):
        def configure_model(self) -> None:
            super().configure_model()
            self.model = self.model.transformer

    module = built(Base)
    found = given(module, renamed(tmp_path, lambda name: name))
    assert all(torch.equal(found[f"model.{name.removeprefix('transformer.')}"], v) for name, v in values().items())
    with pytest.raises(ConfigError, match=r"the module has no place for lm_head\.bias \(1 in all\)"):
        given(module, renamed(tmp_path, str, **{"lm_head.bias": torch.zeros(3)}))
    found = given(
        module,
        renamed(tmp_path, str, **{"lm_head.bias": torch.zeros(3)}),
        weights={"key_mapping": {"transformer": "model", "lm_head": None}},
    )
    assert len(found) == len(values())


@pytest.mark.parametrize(
    "weights_map",
    [
        {"": "model", "old.": "model.transformer", "old.extra": None},
        lambda name: None if "extra" in name else name.replace("old.", "model.transformer."),
    ],
)
def test_maps(weights_map: Any, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("transformer.", "old.")

    path = renamed(tmp_path, rename, **{"old.extra.x": torch.zeros(1), "old.extra.y": torch.zeros(2)})
    assert_right(given(built(), path, weights={"key_mapping": weights_map}))


class Two(Tuned):
    """A network and another one like it."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.teacher = Body()


def test_two_places_that_suit_equally_well(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"matches (model|teacher)\..* and (model|teacher)\..*; say which"):
        given(built(Two), file)
    with pytest.raises(ConfigError, match=r"the files lack teacher\.(?!.*adapters of peft)"):
        given(built(Two), file, weights={"key_mapping": {"": "model"}})
    assert_right(given(built(Two), file, weights={"key_mapping": {"": "model"}, "allow_missing": ["teacher.*"]}))


class Adapter(nn.Module):
    """Wraps a layer as peft does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_A(x).sum()


class Copied(nn.Module):
    """Wrapper of a layer that is trained whole, as peft's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": nn.LayerNorm(WIDTH, device="meta")})


class Wrapped(Tuned):
    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.model.transformer.h[1].up = Adapter(self.model.transformer.h[1].up)
            self.model.transformer.h[2].norm = Copied(self.model.transformer.h[2].norm)
        compiled = nn.Module()  # the names that torch.compile gives
        compiled._orig_mod = self.model
        self.model = compiled  # type: ignore[assignment]


@pytest.mark.parametrize("rename", [str, lambda name: name.removeprefix("transformer.")])
def test_layers_that_wrap_others(rename: Callable[[str], str], tmp_path: Path) -> None:
    path = renamed(tmp_path, rename)
    with pytest.raises(ConfigError, match=r"the files lack .*h\.1\.up\.lora_A\.weight \(1 in all\)") as refused:
        given(built(Wrapped), path)
    assert "no adapters of peft: to train new ones, give weights=Weights(path=..., allow_missing=['*.lora_*'])" in str(
        refused.value
    )
    with pytest.raises(
        ConfigError, match=r"; Weights\(allow_missing=\['lora_\*'\]\) matches no whole name of the module; the files of"
    ):
        given(built(Wrapped), path, weights={"allow_missing": ["lora_*"]})
    found = given(built(Wrapped), path, weights={"allow_missing": ["*.lora_?.*"]})
    wanted = values()
    inner = "model._orig_mod.transformer.h"
    assert torch.equal(found[f"{inner}.1.up.base_layer.weight"], wanted["transformer.h.1.up.weight"])
    for part in ("original_module", "modules_to_save.default"):
        assert torch.equal(found[f"{inner}.2.norm.{part}.bias"], wanted["transformer.h.2.norm.bias"])
    assert torch.equal(found["model._orig_mod.lm_head.weight"], wanted["transformer.wte.weight"])
    assert len(found) == len(wanted) + 1 + 2


class Quiet(Tuned):
    """Says, as transformers' models do, which names need no mention."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model._keys_to_ignore_on_load_unexpected = ["attn.bias"]
        self.model._keys_to_ignore_on_load_missing = [r"wpe\.scale"]


def test_names_that_need_no_mention(tmp_path: Path) -> None:
    # Saved by an older version: masks, and buffers that are computed today.
    more = {"transformer.h.0.attn.bias": torch.ones(4), "transformer.wpe.order": torch.zeros(64)}
    assert_right(given(built(Quiet), renamed(tmp_path, str, **more)))
    lacking = {name: value for name, value in values().items() if "scale" not in name}
    save_file(lacking, tmp_path / "lacking.safetensors")
    assert "model.transformer.wpe.scale" not in given(built(Quiet), tmp_path / "lacking.safetensors")


def test_tied_weights_that_a_file_has_twice(tmp_path: Path) -> None:
    value = values()["transformer.wte.weight"]
    assert_right(given(built(), renamed(tmp_path, str, **{"lm_head.weight": value.clone()})))
    with pytest.raises(ConfigError, match=r"have different values, and .*shares its parameter"):
        given(built(), renamed(tmp_path, str, **{"lm_head.weight": value + 1}))


# -- what does not fit ----------------------------------------------------------------------------------------------------


def refused(strategy: AngelPTMStrategy, error: type[AngelPTMError], build: type[Tuned] = Tuned) -> str:
    module = build()
    with pytest.raises(error) as caught:
        make_trainer(strategy).fit(module, BATCHES.loader())
    assert module.losses == [] and all(parameter.is_meta for parameter in module.parameters())
    return str(caught.value)


def test_all_that_does_not_fit_is_listed(strategy_at, tmp_path: Path) -> None:
    wrong = values()
    del wrong["transformer.h.1.up.weight"], wrong["transformer.wpe.scale"]
    wrong["transformer.h.3.up.weight"] = torch.zeros(2)
    wrong["transformer.h.0.norm.bias"] = torch.zeros(3)
    wrong["transformer.h.0.up.bias"] = torch.zeros(4 * WIDTH, dtype=torch.int8)
    save_file(wrong, tmp_path / "wrong.safetensors")
    text = refused(strategy_at("ram", weights=tmp_path / "wrong.safetensors"), ConfigError)
    assert "the files lack model.transformer.wpe.scale, model.transformer.h.1.up.weight (2 in all)" in text
    assert "the module has no place for transformer.h.3.up.weight (1 in all)" in text
    assert "model.transformer.h.0.norm.bias is (64,) and transformer.h.0.norm.bias in the files (3,)" in text
    assert "model.transformer.h.0.up.bias is torch.float32 and transformer.h.0.up.bias in the files torch.int8" in text
    assert "allow_missing=['model.transformer.wpe*']" in text and "key_mapping" in text
    assert "sizes of the files" in text and "strict=False" not in text  # which would not help
    text = refused(strategy_at("ram", weights={"path": tmp_path / "wrong.safetensors", "strict": False}), ConfigError)
    assert "and transformer.h.0.norm.bias in the files (3,)" in text


class Initialised(Looking):
    def init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.5)
        if isinstance(module, Positions):
            module.scale.fill_(3.0)
            module.order.copy_(torch.arange(64))


@pytest.mark.slow_unless("ram-meta", "three_tiers-cpu", "lock_free_three_tiers-cpu", "tight-meta")
@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_what_is_missing_is_initialised(strategy_at, tier: str, where: str, tmp_path: Path) -> None:
    lacking = values()
    del lacking["transformer.h.1.up.weight"]  # its bias is there
    lacking["extra"] = torch.zeros(1)
    save_file(lacking, tmp_path / "x.safetensors")
    module = Initialised()
    module.where = where
    module.configure_model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = strategy_at(tier, weights={"path": tmp_path / "x.safetensors", "strict": False})
    with pytest.warns(
        UserWarning, match=r"initialised as usual: model\.transformer\.h\.1\.up\.weight .*left out: extra"
    ):
        make_trainer(strategy).fit(module, BATCHES.loader())
    first = module.first["model.transformer.h.1.up.weight"]
    if where == "meta":
        assert 0.4 < first.std() < 0.6
    else:
        assert torch.equal(first, before["model.transformer.h.1.up.weight"])
    for name, value in values().items():
        assert name == "transformer.h.1.up.weight" or torch.equal(module.first[f"model.{name}"], value), name


class Nobody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)

    def reset_parameters(self) -> None:
        pass


class WithNobody(Tuned):
    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.nobody = Nobody()


def test_a_buffer_that_nobody_gives_values_is_refused(strategy_at, file: Path) -> None:
    module = WithNobody()
    with pytest.raises(ConfigError, match=r"buffer nobody\.table of a Nobody was built on the meta device"):
        make_trainer(strategy_at("ram", weights=file)).fit(module, BATCHES.loader())
    assert module.losses == []


# -- runs -----------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_over_the_weights(strategy_at, file: Path, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)

    def train(epochs: int, resume: Path | None, **settings: Any) -> Tuned:
        torch.manual_seed(0)
        module = Tuned()
        strategy = strategy_at("masters_on_disk", **settings)
        trainer = make_trainer(strategy, max_epochs=epochs, enable_checkpointing=True, callbacks=[keep])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, BATCHES.loader(), ckpt_path=None if resume is None else str(resume))
        return module

    never = train(2, None, weights=file)
    other = {name: value + 1 for name, value in values().items()}
    save_file(other, tmp_path / "other.safetensors")
    again = train(2, tmp_path / "epoch=0.ckpt", weights=tmp_path / "other.safetensors")
    assert all(torch.equal(one, two) for one, two in zip(never.losses[len(BATCHES) :], again.losses, strict=True))
    assert len(again.losses) == len(BATCHES)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_weights_are_read_for_the_first_run_only(strategy_at, file: Path, precision: str) -> None:
    """A run that trains nothing does not round the weights."""
    module = Looking()
    trainer = make_trainer(strategy_at("all_on_disk", weights=file), precision)
    trainer.validate(module, BATCHES.loader(), verbose=False)
    for name, value in values().items():
        assert torch.equal(module.state_dict()[f"model.{name}"], value), name
    with torch.no_grad():
        module.model.transformer.wpe.weight.add_(1.0)
    trainer.fit(module, BATCHES.loader())
    assert torch.equal(module.first["model.transformer.wpe.weight"], values()["transformer.wpe.weight"] + 1)
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.validate(module, BATCHES.loader(), verbose=False)
    assert all(torch.equal(value, trained[name]) for name, value in module.state_dict().items())
    fresh = Looking()
    trainer.validate(fresh, BATCHES.loader(), verbose=False)
    assert torch.equal(fresh.model.transformer.wpe.weight, values()["transformer.wpe.weight"])


class PartlyFrozen(Tuned):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.transformer.h.requires_grad_(False)


class PartlyFrozenEagerly(PartlyFrozen):
    where = "cpu"


def test_frozen_weights_that_were_built_in_memory_are_not_rounded(strategy_at, file: Path) -> None:
    frozen = [name for name in values() if ".h." in name]
    eager = fit(PartlyFrozenEagerly, BATCHES, strategy_at("ram", weights=file)).weights
    assert all(torch.equal(eager[f"model.{name}"], values()[name]) for name in frozen)
    # On the meta device they are what computes: nothing remembers more.
    meta = fit(PartlyFrozen, BATCHES, strategy_at("ram", weights=file)).weights
    assert all(torch.equal(meta[f"model.{name}"].bfloat16(), values()[name].bfloat16()) for name in frozen)


# -- bad input ------------------------------------------------------------------------------------------------------------


def test_paths_that_hold_no_weights(strategy_at, file: Path, tmp_path: Path) -> None:
    def text(path: Path, error: type[AngelPTMError] = ConfigError) -> str:
        return refused(strategy_at("ram", weights=path), error)

    assert "does not exist" in text(tmp_path / "nothing") and "nothing is downloaded" in text(Path("org/model"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no safetensors file" in text(empty)
    torch.save(values(), empty / "pytorch_model.bin")
    assert "pytorch_model.bin and no safetensors file" in text(empty)
    assert "only safetensors files are read" in text(empty) and "save_file(torch.load" in text(empty)
    assert "no safetensors file by its name" in text(empty / "pytorch_model.bin")
    (empty / "pytorch_model.bin").rename(empty / "a.safetensors")
    assert "is no safetensors file" in text(empty / "a.safetensors", CheckpointError)
    (empty / "b.safetensors").write_bytes(file.read_bytes())
    assert "2 other safetensors files (a.safetensors, b.safetensors)" in text(empty)
    file.write_bytes(file.read_bytes()[:-100])
    assert "cut short or damaged" in text(file, CheckpointError)
    file.write_bytes(b"abc")
    assert "cut short at 3 bytes" in text(file, CheckpointError)


def test_indexes_that_are_wrong(strategy_at, tmp_path: Path) -> None:
    index = shards(tmp_path)

    def text() -> str:
        return refused(strategy_at("ram", weights=tmp_path), CheckpointError)

    content = json.loads(index.read_text())
    changed = {**content, "weight_map": {**content["weight_map"], "more": "model-00000-of-00003.safetensors"}}
    index.write_text(json.dumps(changed))
    assert "more (model-00000-of-00003.safetensors)" in text()
    changed = {**content, "weight_map": {**content["weight_map"], "more": "model-00003-of-00003.safetensors"}}
    index.write_text(json.dumps(changed))
    assert "lists 1 file(s) that are not in its folder: model-00003-of-00003.safetensors" in text()
    for broken in ("{", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        assert "is no index of safetensors files, or is damaged" in text()


def test_maps_that_are_wrong(strategy_at, file: Path) -> None:
    text = refused(
        strategy_at("ram", weights={"path": file, "key_mapping": lambda name: "model.lm_head.weight"}), ConfigError
    )
    assert "are both mapped to model.lm_head.weight" in text
    text = refused(strategy_at("ram", weights={"path": file, "key_mapping": lambda name: 3}), ConfigError)
    assert "returned 3 for '" in text and "it must return the name in the module, or None" in text
    for wrong in ("transformer", {"a": 1}, [("a", "b")]):
        with pytest.raises(ConfigError, match=r"key_mapping=.* give a dictionary"):
            AngelPTMStrategy(weights={"path": file, "key_mapping": wrong})
    with pytest.raises(ConfigError, match=r"allow_missing='lora'\): give a list"):
        AngelPTMStrategy(weights={"path": file, "allow_missing": "lora"})
    with pytest.raises(ConfigError, match="weights=3: give the path"):
        AngelPTMStrategy(weights=3)


def drop(name: str) -> None:
    """A map that a configuration can name."""


@pytest.mark.parametrize("given", [{"x": "y.z", "a": None}, f"{__name__}.drop"])
def test_configurations_can_hold_maps(given: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AngelPTMStrategy, "strategy")
    config = parser.parse_object(
        {
            "strategy": {
                "weights": {"path": "w", "key_mapping": given, "allow_missing": ["a.*"]},
            }
        }
    )
    settings = parser.instantiate(config).strategy.settings
    assert settings.pretrained.key_mapping == (drop if isinstance(given, str) else given)
    assert settings.pretrained.allow_missing == ["a.*"] and str(settings.pretrained.path) == "w"
