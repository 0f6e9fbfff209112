"""A run whose end finds too little RAM for all weights: what was trained comes back, or is on disk; nothing of it is lost."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, quietly, trainer, vectors
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_ptm import sharded
from lightning_ptm.checkpoints import restore
from lightning_ptm.errors import CheckpointError, UsageError
from lightning_ptm.runtime.full_params import gathered_parameters
from lightning_ptm.runtime.units.parameter_guard import AbsentTensor, GuardedParameter

peft = pytest.importorskip("peft")


class Some(Twin):
    """Trains what requires a gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


class Net(nn.Module):
    """Model that peft adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 66)
        self.blocks = nn.ModuleList(nn.Linear(66, 66) for _ in range(3))
        self.head = nn.Linear(66, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class Adapted(Some):
    """Adapters of peft's around a small model."""

    def __init__(self, **settings: Any) -> None:
        L.LightningModule.__init__(self)
        self.losses = []
        kind = settings.pop("kind", peft.LoraConfig)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.net = peft.get_peft_model(Net(), kind(target_modules=r"blocks\.\d+", **settings))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def lora() -> Some:
    return Adapted(r=4)


def lora_and_head() -> Some:
    return Adapted(r=4, modules_to_save=["head"])


def dora() -> Some:
    return Adapted(r=4, use_dora=True)


def ia3() -> Some:
    return Adapted(kind=peft.IA3Config, feedforward_modules=[])


def only(*endings: str) -> Callable[[], Some]:
    def build() -> Some:
        module = Some()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith(endings))
        return module

    return build


def frozen_embedding() -> Some:
    """A parameter that is frozen beside ones that train, in the root."""
    module = only("head.weight", "head.bias", "blocks.2.bias")()
    module.register_parameter("scale", nn.Parameter(torch.ones(3), requires_grad=False))
    return module


KINDS: dict[str, tuple[Callable[[], Some], dict[str, Any]]] = {
    "lora": (lora, {}),
    "lora and a head": (lora_and_head, {}),
    "lora over nf4": (lora, {"frozen_dtype": "nf4"}),
    "lora over int8": (lora_and_head, {"frozen_dtype": "int8"}),
    "dora": (dora, {}),
    "ia3": (ia3, {}),
    "head": (only("head.weight", "head.bias"), {}),
    "head over nf4": (only("head.weight", "head.bias"), {"frozen_dtype": "nf4"}),
    "biases": (only("bias"), {}),
    "one block": (only("blocks.1.weight", "blocks.1.bias"), {}),
    "parts of units": (frozen_embedding, {}),
}


def build_of(build: Callable[[], Some]) -> Some:
    torch.manual_seed(0)
    return build()


def numbers(module: nn.Module, *, trained: bool) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters() if each.requires_grad is trained}


def room_for_trained(module: nn.Module) -> int:
    """Bytes in which what trains has room, also while its largest flat is read from a file, and all weights have not."""
    units: Counter[str] = Counter()
    for name, each in module.named_parameters():
        if each.requires_grad:
            units[(re.findall(r"blocks\.\d+", name) or [""])[0]] += each.numel() * 4 + 4096
    return units.total() + max(units.values())


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`ram(1000)`: so many bytes are free when a run begins and ends; None: as many as there are."""
    own = restore.free_host_bytes

    def set_free(free: int | None) -> None:
        monkeypatch.setattr(restore, "free_host_bytes", own if free is None else lambda: free)

    return set_free


Ram = Callable[[int | None], None]
HOMES = ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free"]


@pytest.fixture(autouse=True)
def least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of tests are larger than their models: what is foretold counts the RAM that they will take."""
    monkeypatch.setattr(restore, "_untouched_bytes", lambda engine: 0)


def fit(module: Some, strategy: Any, folder: Path, **options: Any) -> tuple[L.Trainer, list[str]]:
    """Trains; the warnings come with it."""
    with quietly():
        chosen = trainer(strategy, default_root_dir=folder, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen.fit(module, vectors())
    return chosen, [str(each.message) for each in caught]


def plain(build: Callable[[], Some], **options: Any) -> Some:
    with quietly():
        module = build_of(build)
        trainer(None, **options).fit(module, vectors())
    return module


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.diagonal
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_comes_back_where_that_fits(
    strategy_at: MakeStrategy, ram: Ram, kind: str, home: str, tmp_path: Path
) -> None:
    build, settings = KINDS[kind]
    expected = build_of(build)
    with_room, _ = fit(expected, strategy_at(home, **settings), tmp_path)
    module = build_of(build)
    ram(room_for_trained(module))
    chosen, told = fit(module, strategy_at(home, **settings), tmp_path)
    assert any("gets only its trained weights back" in each for each in told), told
    assert_same(numbers(module, trained=True), numbers(expected, trained=True))
    if not settings:
        assert_same(numbers(module, trained=True), numbers(plain(build), trained=True))
    frozen = [each for each in module.parameters() if not each.requires_grad]
    assert all(isinstance(each, GuardedParameter) for each in frozen)
    with pytest.raises(UsageError, match=r"RAM had no room.*make more RAM available"):
        frozen[0].sum()
    for at, steps in ((chosen, tmp_path / "ours.ckpt"), (with_room, tmp_path / "theirs.ckpt")):
        at.save_checkpoint(steps, weights_only=True)
    ours, theirs = (torch.load(tmp_path / name)["state_dict"] for name in ("ours.ckpt", "theirs.ckpt"))
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    assert ours.keys() == trained
    assert_same(dict(ours), {name: theirs[name] for name in trained})


@pytest.mark.slow_unless("lora", "lora and a head")
@pytest.mark.parametrize("kind", [name for name in KINDS if "lora" in name or name in ("dora", "ia3")])
def test_adapters_are_exported(strategy_at: MakeStrategy, ram: Ram, kind: str, tmp_path: Path) -> None:
    build, settings = KINDS[kind]
    expected = build_of(build)
    fit(expected, strategy_at("all_on_disk", **settings), tmp_path)
    expected.net.save_pretrained(tmp_path / "theirs")
    module = build_of(build)
    ram(room_for_trained(module))
    fit(module, strategy_at("all_on_disk", **settings), tmp_path)
    module.net.save_pretrained(tmp_path / "ours")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert files[0]
    assert_same(*files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(Net(), tmp_path / "ours")
    names = {name for name, _ in again.named_parameters()}
    assert {f"net.{name}" for name in names} == {name for name, _ in module.named_parameters()}


class AtTheEnd(L.Callback):
    def __init__(self, act: Callable[[L.Trainer, Any], None]) -> None:
        self._act = act

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._act(trainer, pl_module)


def test_adapters_are_exported_in_a_run(
    strategy_at: MakeStrategy, ram: Ram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, expected = build_of(lora), build_of(lora)
    fit(expected, strategy_at("all_on_disk"), tmp_path)
    free = room_for_trained(module)

    def save(_: Any, pl_module: Any) -> None:
        monkeypatch.setattr(gathered_parameters, "free_host_bytes", lambda: free)
        pl_module.net.save_pretrained(tmp_path / "ours")
        with pytest.raises(UsageError, match="no room"):
            torch.save(pl_module.state_dict(), tmp_path / "all.pt")

    fit(module, strategy_at("all_on_disk"), tmp_path, callbacks=[AtTheEnd(save)])
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    theirs = {name.removeprefix("net."): value for name, value in numbers(expected, trained=True).items()}
    assert_same(ours, {name.replace(".default", ""): value for name, value in theirs.items()})


@pytest.mark.diagonal
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", ["all", "lora", "lora over nf4", "head", "biases"])
def test_what_has_no_room_at_all_is_on_disk(
    strategy_at: MakeStrategy, ram: Ram, kind: str, home: str, tmp_path: Path
) -> None:
    build, settings = KINDS.get(kind, (Some, {}))
    expected = build_of(build)
    fit(expected, strategy_at(home, **settings), tmp_path)
    module = build_of(build)
    ram(0)
    chosen, told = fit(module, strategy_at(home, **settings), tmp_path)
    assert any("they are written to disk" in each for each in told), told
    path = tmp_path / "end-of-run-step=3.ckpt"
    assert any(f"written to {path}" in each for each in told)
    with pytest.raises(UsageError, match=rf"were written to {path}.*load them from there"):
        next(module.parameters()).sum()
    with pytest.raises(UsageError, match=f"{path}.*load them from that checkpoint"):
        chosen.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    saved = sharded.load(path)["state_dict"]
    assert_same({name: saved[name] for name in saved}, dict(expected.state_dict()))
    again = build_of(build)
    ram(None)
    with quietly():
        trainer(strategy_at(home, weights=path, **settings)).validate(again, vectors(), verbose=False)
    assert_same(numbers(again, trained=True), numbers(expected, trained=True))


def test_a_second_run_out_of_room_keeps_the_first_one_s(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    ram(0)
    for _ in range(2):
        fit(build_of(Some), strategy_at("ram"), tmp_path)
    assert (tmp_path / "end-of-run-step=3.ckpt").is_dir() and (tmp_path / "end-of-run-step=3-v1.ckpt").is_dir()


def test_strided_weights_are_on_disk_as_they_are(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    class Strided(Some):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].weight.data = self.blocks[0].weight.data.t()

    expected, module = build_of(Strided), build_of(Strided)
    fit(expected, strategy_at("all_on_disk"), tmp_path)
    ram(0)
    fit(module, strategy_at("all_on_disk"), tmp_path)
    saved = torch.load(tmp_path / "end-of-run-step=3.ckpt")["state_dict"]
    assert_same(dict(saved), dict(expected.state_dict()))


def test_where_the_root_folder_has_no_room_it_is_beside_the_disk_tier(
    strategy_at: MakeStrategy, ram: Ram, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.write_text("a file, where no folder can be")
    disk = tmp_path / "another"
    disk.mkdir()
    ram(0)
    module = build_of(Some)
    strategy = strategy_at("all_on_disk", disk_path=disk)
    fit(module, strategy, root)
    assert sharded.load(disk / "end-of-run-step=3.ckpt")["state_dict"].keys() == module.state_dict().keys()


def test_where_no_folder_has_room_it_is_an_error(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_text("a file, where no folder can be")
    ram(0)
    with pytest.raises(CheckpointError, match=r"the trained weights are lost: RAM has no room .*root"):
        fit(build_of(Some), strategy_at("ram", disk_path=None), root)


class Breaks(L.Callback):
    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise self._error("broken off")


@pytest.mark.slow_unless(
    "ValueError-ram-for what trains",
    "KeyboardInterrupt-all_on_disk-for what trains",
    "KeyboardInterrupt-lock_free-for what trains",
    "OutOfMemoryError-all_on_disk-for what trains",
)
@pytest.mark.parametrize("free", ["for what trains", "none"])
@pytest.mark.parametrize("home", ["ram", "all_on_disk", "lock_free"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_run_that_is_cut_short(
    strategy_at: MakeStrategy, ram: Ram, error: type[BaseException], home: str, free: str, tmp_path: Path
) -> None:
    expected, module = plain(lora, max_steps=2), build_of(lora)
    ram(room_for_trained(module) if free != "none" else 0)
    # Lightning ends the process where somebody pressed Ctrl-C.
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(module, strategy_at(home), tmp_path, callbacks=[Breaks(error)])
    if free == "none":
        saved = sharded.load(tmp_path / "end-of-run-step=2.ckpt")["state_dict"]
        assert_same({name: saved[name] for name in saved}, dict(expected.state_dict()))
    else:
        assert_same(numbers(module, trained=True), numbers(expected, trained=True))


@pytest.mark.slow_unless("bf16-true-ram-validate")
@pytest.mark.parametrize("how", ["validate", "test", "predict"])
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_an_evaluation_after_the_fit_drops_nothing(
    strategy_at: MakeStrategy, ram: Ram, how: str, home: str, precision: str, tmp_path: Path
) -> None:
    class Evaluated(Some):
        def test_step(self, batch: list[Tensor], index: int) -> None:
            self(batch[0])

        def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self(batch[0])  # type: ignore[no-any-return]

    def build() -> Some:
        module = Evaluated()
        module.blocks.requires_grad_(False)
        return module

    module = build_of(build)
    fit(module, strategy_at(home), tmp_path, precision=precision)
    learnt = numbers(module, trained=True)
    ram(room_for_trained(module))
    with quietly():
        another = trainer(strategy_at(home), default_root_dir=tmp_path, precision=precision)
        getattr(another, how)(module, vectors())
    assert_same(numbers(module, trained=True), learnt)
    ram(0)
    module = build_of(build)
    fit(module, strategy_at(home), tmp_path / "other", precision=precision)
    assert_same(
        {
            n: v
            for n, v in sharded.load(tmp_path / "other" / "end-of-run-step=3.ckpt")["state_dict"].items()
            if n in learnt
        },
        learnt,
    )


class OfFiles(Some):
    """Built without memory: its values are those of files."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = Net()
            self.net.requires_grad_(False)
            self.net.head.requires_grad_(True)

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.losses = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def written(folder: Path) -> Path:
    torch.manual_seed(3)
    save_file(Net().state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.slow_unless("False-three_tiers", "True-ram")
@pytest.mark.parametrize("home", ["ram", "all_on_disk", "three_tiers"])
@pytest.mark.parametrize("edited", [False, True])
def test_frozen_values_of_files_are_read_again(
    strategy_at: MakeStrategy, ram: Ram, home: str, edited: bool, tmp_path: Path
) -> None:
    def edit(trainer: Any, pl_module: Any) -> None:
        with trainer.strategy.gathered(pl_module), torch.no_grad():
            if edited and trainer.current_epoch == 0:
                pl_module.net.stem.weight.add_(1.0)

    weights = written(tmp_path)

    def twice() -> OfFiles:
        module = OfFiles()
        chosen, _ = fit(module, strategy_at(home, weights=weights), tmp_path, callbacks=[AtTheEnd(edit)])
        chosen.fit_loop.max_epochs = 2
        with quietly():
            chosen.fit(module, vectors())
            chosen.validate(module, vectors(), verbose=False)
        return module

    expected = twice()
    ram(room_for_trained(expected))
    if edited:  # the files' values are not what the run had
        with pytest.raises(UsageError, match=r"net.stem.weight.*ended with an earlier run"):
            twice()
        return
    module = twice()
    assert_same(numbers(module, trained=True), numbers(expected, trained=True))
    assert len(module.losses) == len(expected.losses) == 9
    for loss, other in zip(module.losses, expected.losses, strict=True):
        assert torch.equal(loss, other)


def test_two_fits_without_the_frozen_values_are_refused(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    module = build_of(lora)
    ram(room_for_trained(module))
    fit(module, strategy_at("ram"), tmp_path)
    with pytest.raises(UsageError, match="ended with an earlier run"):
        fit(module, strategy_at("ram"), tmp_path)


def test_what_an_earlier_fit_has_trained_is_kept_when_it_is_frozen(
    strategy_at: MakeStrategy, ram: Ram, tmp_path: Path
) -> None:
    module = build_of(only("blocks.0.weight", "head.weight"))
    fit(module, strategy_at("ram"), tmp_path)
    learnt = module.blocks[0].weight.detach().clone()
    module.blocks[0].weight.requires_grad_(False)
    ram(2 * 66 * 66 * 4 + 66 * 3 * 4 + 3 * 4096)  # what is read of the file at once, too
    fit(module, strategy_at("all_on_disk"), tmp_path)
    assert torch.equal(module.blocks[0].weight, learnt)
    assert isinstance(module.blocks[1].weight, GuardedParameter)


def test_what_the_run_has_frozen_is_kept(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    """Laid out anew in mid-run, without a part that trained before."""

    class Freezes(Some):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.blocks[0].requires_grad_(False)
                optimizer = self.optimizers().optimizer
                group = optimizer.param_groups[0]
                group["params"] = [each for each in group["params"] if each.requires_grad]
                self.blocks[1].weight.requires_grad_(True)
                optimizer.add_param_group({"params": [self.blocks[1].weight]})

    def build() -> Some:
        module = Freezes()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(("blocks.0", "head")))
        return module

    expected, module = plain(build, max_epochs=2), build_of(build)
    ram(3 * (66 * 66 + 66) * 4 + 66 * 3 * 4 + 5 * 4096)  # what is read of the file at once, too
    fit(module, strategy_at("all_on_disk"), tmp_path, max_epochs=2)
    for name in ("blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "head.weight"):
        assert torch.equal(module.get_parameter(name), expected.get_parameter(name)), name
    assert isinstance(module.blocks[2].weight, GuardedParameter)


@pytest.mark.parametrize("kind", ["sharded", "async"])
def test_beside_checkpoints_of_the_run(strategy_at: MakeStrategy, ram: Ram, kind: str, tmp_path: Path) -> None:
    settings = {"checkpoints": {"state_dict_type": "sharded", "async_save": kind == "async"}}
    expected, module = plain(lora, max_epochs=2), build_of(lora)
    ram(room_for_trained(module))
    saves = ModelCheckpoint(tmp_path / "saves", every_n_epochs=1, save_top_k=1)
    chosen, _ = fit(
        module,
        strategy_at("all_on_disk", **settings),
        tmp_path,
        max_epochs=2,
        callbacks=[saves],
        enable_checkpointing=True,
    )
    assert_same(numbers(module, trained=True), numbers(expected, trained=True))
    saved = sharded.load(saves.best_model_path)["state_dict"]
    assert_same({name: saved[name] for name in saved}, dict(expected.state_dict()))
    chosen.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    after = sharded.load(tmp_path / "after.ckpt")["state_dict"]
    assert after.keys() == numbers(module, trained=True).keys()
    assert_same({name: after[name] for name in after}, numbers(expected, trained=True))


def test_averages_are_what_comes_back(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    def averaged() -> list[L.Callback]:
        return [EMAWeightAveraging(decay=0.5)]

    with quietly():
        expected = build_of(lora)
        trainer(None, callbacks=averaged(), max_epochs=2).fit(expected, vectors())
    module = build_of(lora)
    ram(room_for_trained(module))
    fit(module, strategy_at("all_on_disk"), tmp_path, callbacks=averaged(), max_epochs=2)
    assert_same(numbers(module, trained=True), numbers(expected, trained=True))


def test_what_is_in_ram_anyway_comes_back(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    """Pages have frozen weights in 16 bits, and the user's own tensors are kept for the end: that takes no RAM."""
    build = only("head.weight", "head.bias")
    module, before = build_of(build), numbers(build_of(build), trained=False)
    ram(room_for_trained(module))
    fit(module, strategy_at("all_on_disk"), tmp_path, precision="bf16-mixed")
    assert_same(numbers(module, trained=False), before)


def test_absent_values_say_so(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    module = build_of(only("head.weight", "head.bias"))
    ram(room_for_trained(module))
    fit(module, strategy_at("ram"), tmp_path)
    state = module.state_dict()
    absent = state["stem.weight"]
    assert isinstance(absent, AbsentTensor) and absent.shape == (66, 6) and absent.dtype is torch.float32
    for use in (
        lambda: absent.sum(),
        lambda: absent.clone(),
        lambda: absent.cpu() + 1,
        lambda: absent.numpy(),
        lambda: torch.save(state, tmp_path / "x.pt"),
        lambda: save_file(dict(state), tmp_path / "x.safetensors"),
        lambda: Some().load_state_dict(state),
        lambda: torch.save(module, tmp_path / "x.pt"),
        lambda: module(torch.zeros(2, 6)),
        lambda: module.stem.weight.data,
    ):
        with pytest.raises((UsageError, RuntimeError), match="RAM had no room"):
            use()
    assert "no values" in repr(absent)
    with quietly():
        plain_one = Some()
        plain_one.load_state_dict({name: each for name, each in state.items() if name.startswith("head")}, strict=False)
    assert torch.equal(plain_one.head.weight, module.head.weight)


def test_nothing_is_said_where_all_has_room(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    _, told = fit(build_of(lora), strategy_at("ram"), tmp_path)
    assert not [each for each in told if "RAM" in each]


def test_nothing_is_written_where_weights_are_not_wanted(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    ram(0)
    _, told = fit(build_of(Some), strategy_at("ram", tuning={"restore_weights": False}), tmp_path / "root")
    assert not [each for each in told if "RAM" in each]
    assert not (tmp_path / "root").exists()


def test_room_that_is_gone_at_the_end_is_told_then(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    """Steps, or another process, have taken what was free before the first one."""
    module = build_of(lora)
    free = room_for_trained(module)

    def take(trainer: L.Trainer, _: Any) -> None:
        ram(free)

    _, told = fit(module, strategy_at("all_on_disk"), tmp_path, callbacks=[AtTheEnd(take)])
    assert [each for each in told if "RAM has no room for all weights" in each and "load them from where" in each]
    assert not [each for each in told if "RAM may have" in each]


def test_room_that_steps_may_take_is_told_before_them(strategy_at: MakeStrategy, ram: Ram, tmp_path: Path) -> None:
    """Little more is free than what all weights take, and what is read at once."""
    module = build_of(lora)
    every = sum(-(-each.numel() // 64) * 64 * 4 for each in module.parameters())
    ram(every * 11 // 10)
    _, told = fit(module, strategy_at("all_on_disk"), tmp_path)
    assert [each for each in told if "RAM may have no room for all weights" in each]
