"""Loops with `Fabric(strategy="angel_ptm")` compute what plain Fabric computes, bit for bit, in every home."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch
from kit.memory import LEAST, LeastMemoryStrategy
from kit.models import GAN, Block
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_ptm import AngelPTMFabricStrategy, CapacityError, ConfigError, Settings, UsageError
from lightning_ptm.trainer import fabric as ours
from lightning_ptm.trainer.registered import NAMES

HOMES: dict[str, dict[str, Any]] = {
    "ram": {},
    "disk": {"offload_optimizer": "disk", "offload_parameters": "disk"},
    "tight": {"offload_optimizer": "disk", "offload_parameters": "disk", "device_memory": LEAST, "recompute": "all"},
}
STEPS = 4


class Net(nn.Module):
    """Two blocks, a buffer that each training forward changes, and a weight of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(64, norm=True, dropout=0.1), Block(64, norm=True, dropout=0.1))
        self.head = nn.Linear(64, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.head(self.blocks(x)) * self.scale  # type: ignore[no-any-return]


class LeastMemoryLoop(LeastMemoryStrategy, ours.PagedLoop):
    """A loop with the least device memory that its plan accepts."""


def strategy(home: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> AngelPTMFabricStrategy:
    settings = {"page_size": "64KiB", "disk_path": disk, "debug": {"poison": True}, **HOMES[home]}
    if settings.get("device_memory") == LEAST:
        del settings["device_memory"]
        settings["debug"] = {"poison": False}
        monkeypatch.setattr(ours, "PagedLoop", LeastMemoryLoop)
    return AngelPTMFabricStrategy(**settings)


def made(strategy: Any = "auto", precision: Any = "32-true", front: Any = lightning.fabric) -> Any:
    fabric = front.Fabric(strategy=strategy, accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    return fabric


def batches(count: int = STEPS) -> list[Tensor]:
    return list(torch.randn(count, 4, 64, generator=torch.Generator().manual_seed(1)))


def optimizer_of(net: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)


def trained(
    fabric: Any, *, accumulate: int = 1, clip: Any = None, fused: bool = True, then: Any = None
) -> tuple[Net, list[Tensor]]:
    """The module after a loop, and its losses, norms and evaluations."""
    net = Net()
    optimizer = optimizer_of(net, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = fabric.setup(net, optimizer)
    torch.manual_seed(2)
    seen: list[Tensor] = []
    for index, batch in enumerate(batches()):
        last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(fabric.to_device(batch)).float().square().mean() / accumulate
            fabric.backward(loss)
        seen.append(loss.detach())
        if last:
            if clip is not None:
                norm = fabric.clip_gradients(model, optimizer, **clip)
                seen += [] if norm is None else [norm]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(batches()[0]).float().mean())
        model.train()
    if then is not None:
        then(fabric, model, optimizer)
    fabric.strategy.teardown()
    return net, seen


def assert_equal(first: tuple[nn.Module, list[Tensor]], second: tuple[nn.Module, list[Tensor]]) -> None:
    one, other = first[0].state_dict(), second[0].state_dict()
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert len(first[1]) == len(second[1]) and all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize(
    ("home", "precision", "options"),
    [
        ("ram", "32-true", {"clip": {"max_norm": 0.05}}),
        ("disk", "32-true", {"accumulate": 2, "clip": {"clip_val": 1e-3}}),
        ("tight", "32-true", {"accumulate": 2, "clip": {"max_norm": 0.05}}),
        ("tight", "64-true", {}),
        ("tight", "bf16-true", {"clip": {"max_norm": 0.05}}),
    ],
)
def test_a_loop_computes_what_it_computes_with_plain_fabric(
    home: str, precision: str, options: dict[str, Any], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pages = trained(made(strategy(home, disk, monkeypatch), precision), **options)
    assert_equal(with_pages, trained(made(precision=precision), **options))


def test_mixed_precision_changes_no_bit_between_homes_and_gives_fp32_weights_back(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_ram = trained(made(strategy("ram", disk, monkeypatch), "bf16-mixed"))
    with_pages, seen = trained(made(strategy("tight", disk, monkeypatch), "bf16-mixed"))
    assert_equal((with_pages, seen), in_ram)
    assert {each.dtype for each in with_pages.parameters()} == {torch.float32}
    assert not torch.equal(with_pages.head.weight, Net().head.weight)


@pytest.mark.parametrize("home", ["ram", "tight"])
def test_plain_fabric_goes_on_from_its_file_and_it_from_plain_fabric_s(
    home: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(fabric: Any, model: Any, optimizer: Any) -> None:
        for batch in batches(2):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def save(name: str) -> Any:
        def saved(fabric: Any, model: Any, optimizer: Any) -> None:
            fabric.save(tmp_path / name, {"model": model, "optimizer": optimizer, "steps": STEPS})
            more(fabric, model, optimizer)

        return saved

    def resumed(fabric: Any, name: str) -> tuple[Net, list[Tensor]]:
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        state = {"model": model, "optimizer": optimizer, "steps": 0}
        assert fabric.load(tmp_path / name, state) == {}
        assert state["steps"] == STEPS
        torch.manual_seed(3)
        model.eval()
        more(fabric, model, optimizer)
        fabric.strategy.teardown()
        return net, []

    trained(made(strategy(home, disk, monkeypatch)), then=save("ours"))
    trained(made(), then=save("plain"))
    ours_file, plain_file = (torch.load(tmp_path / name, weights_only=True) for name in ("ours", "plain"))
    assert list(ours_file["model"]) == list(plain_file["model"])
    expected = resumed(made(), "plain")
    assert_equal(resumed(made(), "ours"), expected)
    assert_equal(resumed(made(strategy(home, disk, monkeypatch)), "plain"), expected)


def test_two_forwards_before_a_backward_and_two_losses_of_one_forward(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        torch.manual_seed(2)
        first, *others = batches()
        for batch in others:
            one, two = model(first), model(batch)
            fabric.backward((one - two).square().mean(), retain_graph=True)
            fabric.backward(one.square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        fabric.strategy.teardown()
        return net, []

    assert_equal(loop(made(strategy("tight", disk, monkeypatch))), loop(made()))


def test_a_module_alone_only_computes(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, net = made(strategy("tight", disk, monkeypatch)), Net().eval()
    expected = copy.deepcopy(net)(batches()[0])
    model = fabric.setup_module(net)
    with torch.no_grad():
        assert torch.equal(model(batches()[0]), expected)
    with pytest.raises(UsageError, match=r"call `model, optimizer = fabric\.setup\(model, optimizer\)`"):
        fabric.setup_optimizers(optimizer_of(net))
    with pytest.raises(UsageError, match=r"the pages have a Net already; call fabric\.strategy\.teardown"):
        fabric.setup_module(Net())
    fabric.strategy.teardown()
    assert torch.equal(net(batches()[0]), expected)


@pytest.mark.parametrize("front", [lightning.fabric, lightning_fabric], ids=["lightning.fabric", "lightning_fabric"])
def test_each_name_is_the_strategy_of_the_package_of_fabric(front: Any) -> None:
    for name, named in NAMES.items():
        made_by_name = front.Fabric(strategy=name, accelerator="cpu", devices=1).strategy
        assert isinstance(made_by_name, front.strategies.ParallelStrategy)
        assert made_by_name.pages.settings == Settings(**named.settings)


def test_a_loop_of_lightning_fabric(disk: Path) -> None:
    theirs = made("angel_ptm_host", front=lightning_fabric)
    assert type(theirs.strategy).__module__ == "lightning_ptm.pytorch_lightning.trainer.fabric"
    assert_equal(trained(theirs), trained(made()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: these settings divide the batches .* the loop is yours"),
        ({"pipeline_parallel_size": 2, "micro_batches": 4}, "pipeline_parallel_size, micro_batches: these settings"),
        ({"checkpoints": {"state_dict_type": "sharded"}}, "fabric.save writes one full file"),
    ],
)
def test_settings_that_need_a_trainer_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AngelPTMFabricStrategy(**settings)


def test_what_else_is_refused(disk: Path) -> None:
    class Own(Net):
        def get_extra_state(self) -> Any:
            return {}

    fabric = made(AngelPTMFabricStrategy(disk_path=disk))
    with pytest.raises(ConfigError, match=r"Own overrides get_extra_state, which fabric\.save would not call"):
        fabric.setup_module(Own())
    net = Net()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    fabric.backward(model(batches()[0]).mean() * float("nan"))
    with pytest.raises(ConfigError, match=r"norm_type=inf\): pages clip gradients by their 2-norm"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf")
    with pytest.raises(RuntimeError, match="gradients is non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    fabric.strategy.teardown()

    class Named(Net):
        def __init__(self) -> None:
            super().__init__()
            self.logger = nn.Linear(64, 64)

    with pytest.raises(ConfigError, match=r"Named has parts named logger, as a LightningModule has attributes"):
        fabric.setup_module(Named())


def test_a_loop_goes_on_after_an_error_in_a_forward(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        torch.manual_seed(2)
        for batch in batches():
            with pytest.raises(RuntimeError, match="expected input with shape"):
                model(batch[:, :32])
            net.seen.zero_()
            torch.manual_seed(3)
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.teardown()
        return net, []

    assert_equal(loop(made(strategy("disk", disk, monkeypatch))), loop(made()))


def test_a_setup_that_does_not_fit_leaves_nothing(disk: Path) -> None:
    fabric = made(AngelPTMFabricStrategy(disk_path=disk, device_memory="64KiB", page_size="64KiB"))
    net = Net()
    expected = [each.detach().clone() for each in net.parameters()]
    with pytest.raises(CapacityError):
        fabric.setup(net, optimizer_of(net))
    assert all(map(torch.equal, net.parameters(), expected))


def test_checkpoints_after_the_run_have_the_module_s_names(disk: Path, tmp_path: Path) -> None:
    fabric, net = made(AngelPTMFabricStrategy(disk_path=disk)), Net()
    model = fabric.setup_module(net)
    fabric.strategy.teardown()
    fabric.save(tmp_path / "after", {"model": model})
    assert list(torch.load(tmp_path / "after", weights_only=True)["model"]) == list(net.state_dict())
    assert fabric.load(tmp_path / "after", {"model": model}) == {}


class Pair(nn.Module):
    """A generator and a critic, whose losses have backwards in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(Block(64, norm=True), Block(64, norm=True))
        self.critic = nn.Sequential(Block(64, norm=True), Block(64, norm=True))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        made = self.generator(noise)
        if real is None:
            return self.critic(made).float().square().mean()  # type: ignore[no-any-return]
        return (self.critic(made.detach()).float() - self.critic(real).float() + 1.0).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("home", ["ram", "disk", "tight"])
def test_each_of_two_optimizers_has_a_loss_with_backwards_in_turn(
    home: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator's loss leaves gradients in the critic too, which the critic's optimizer clears first."""

    def loop(fabric: Any) -> tuple[Pair, list[Tensor]]:
        net = Pair()
        of_critic = torch.optim.SGD(net.critic.parameters(), lr=1e-2, momentum=0.9, fused=True)
        model, generates, criticizes = fabric.setup(net, optimizer_of(net.generator), of_critic)
        seen = []
        for batch in batches():
            criticizes.zero_grad()
            loss = model(batch, batch.flip(0))
            fabric.backward(loss)
            seen += [loss.detach(), fabric.clip_gradients(model, criticizes, max_norm=0.05)]
            criticizes.step()
            loss = model(batch)
            fabric.backward(loss)
            seen += [loss.detach(), fabric.clip_gradients(model, generates, max_norm=0.05)]
            generates.step()
            generates.zero_grad()
        fabric.strategy.teardown()
        return net, seen

    assert_equal(loop(made(strategy(home, disk, monkeypatch))), loop(made()))


def test_two_optimizers_step_after_one_backward(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net()
        rest = torch.optim.SGD([*net.head.parameters(), net.scale], lr=1e-2, momentum=0.9, fused=True)
        model, *optimizers = fabric.setup(net, optimizer_of(net.blocks), rest)
        torch.manual_seed(2)
        for batch in batches():
            fabric.backward(model(batch).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        fabric.strategy.teardown()
        return net, []

    assert_equal(loop(made(strategy("tight", disk, monkeypatch))), loop(made()))


def test_lock_free_without_staleness_computes_the_same(disk: Path) -> None:
    lock_free = AngelPTMFabricStrategy(page_size="64KiB", disk_path=disk, lock_free={"max_staleness": 0})
    options: dict[str, Any] = {"accumulate": 2, "clip": {"max_norm": 0.05}}
    assert_equal(trained(made(lock_free), **options), trained(made(), **options))
    assert lock_free.pages.update_audit()


def scaled(home: Any, scale: float, **options: Any) -> tuple[tuple[Net, list[Tensor]], float]:
    """`trained` in 16-mixed, and the loss scale at its end. On a CPU, Fabric takes this precision from a plugin only."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
    fabric = lightning.fabric.Fabric(strategy=home, accelerator="cpu", devices=1, plugins=[plugin])
    fabric.launch()
    result = trained(fabric, **options)
    if home == "auto":
        assert plugin.scaler is not None
        return result, plugin.scaler.get_scale()
    ours = fabric.strategy.pages.precision_plugin.loss_scale  # type: ignore[attr-defined]
    return result, ours.value


def test_16_mixed_changes_no_bit_between_homes_and_is_close_to_plain_fabric_s(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"clip": {"max_norm": 0.05}, "fused": False}  # with fused ones, plain Fabric cannot clip
    in_ram, scale = scaled(strategy("ram", disk, monkeypatch), 2.0**8, **options)
    in_pages, scale_in_pages = scaled(strategy("tight", disk, monkeypatch), 2.0**8, **options)
    assert_equal(in_pages, in_ram)
    plain, scale_of_plain = scaled("auto", 2.0**8, **options)
    assert scale == scale_in_pages == scale_of_plain == 2.0**8
    torch.testing.assert_close(in_ram[1], plain[1], rtol=2e-2, atol=2e-3)


def test_16_mixed_skips_the_steps_that_overflow_as_plain_fabric_does(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (net, _), scale = scaled(strategy("tight", disk, monkeypatch), 2.0**40)
    (_, _), scale_of_plain = scaled("auto", 2.0**40)
    assert scale == scale_of_plain == 2.0 ** (40 - STEPS)
    assert all(map(torch.equal, net.parameters(), Net().parameters()))


def test_a_precision_that_pages_cannot_hold_is_refused(disk: Path) -> None:
    class Other(MixedPrecision):
        pass

    strategy: Any = AngelPTMFabricStrategy(disk_path=disk)
    fabric = lightning.fabric.Fabric(
        strategy=strategy, accelerator="cpu", devices=1, plugins=[Other("bf16-mixed", "cpu")]
    )
    fabric.launch()
    net = Net()
    with pytest.raises(ConfigError, match=r"the precision plugin Other keeps parameters in a form"):
        fabric.setup(net, optimizer_of(net))


def test_a_single_rank_is_rank_0_whatever_the_cluster_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    alone = made(AngelPTMFabricStrategy())
    assert (alone.global_rank, alone.local_rank, alone.world_size) == (0, 0, 1)
    assert alone.device == torch.device("cpu")
    with pytest.raises(UsageError, match="no Fabric has this strategy yet"):
        AngelPTMFabricStrategy().root_device  # noqa: B018


@pytest.mark.parametrize("home", ["disk", "tight"])
def test_forwards_with_gradients_whose_backward_never_comes(
    home: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        torch.manual_seed(2)
        seen = []
        for batch in batches():
            for other in batches():
                seen.append(model(other).detach())  # an evaluation that forgets torch.no_grad()
            fabric.backward(model(batch).square().mean())
            seen.append(model(batch).detach())
            optimizer.step()
            optimizer.zero_grad()
            kept = model(batch)
        with torch.no_grad():
            seen.append(model(kept.new_zeros(4, 64)))
        fabric.strategy.teardown()
        return net, seen

    assert_equal(loop(made(strategy(home, disk, monkeypatch))), loop(made()))


def test_forwards_without_end_are_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_MOST_FORWARDS", 6)

    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net().eval()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        for batch in batches():
            for _ in range(5):
                model(batch)
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if fabric.strategy is not plain.strategy:
            with pytest.raises(
                UsageError, match=r"Net was called 6 times with gradients, .*; call it under torch\.no_grad"
            ):
                for _ in range(7):
                    model(batches()[0])
        fabric.backward(model(batches()[0]).square().mean())
        optimizer.step()
        fabric.strategy.teardown()
        return net, []

    plain = made()
    assert_equal(loop(made(strategy("tight", disk, monkeypatch))), loop(plain))


def test_a_forward_between_the_backwards_of_two_losses(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        torch.manual_seed(2)
        for first, second in zip(batches(), batches()[::-1], strict=True):
            one, two = model(first).square().mean(), model(second).square().mean()
            fabric.backward(one)
            three = model(first + second).square().mean()
            fabric.backward(two)
            fabric.backward(three)
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.teardown()
        return net, []

    assert_equal(loop(made(strategy("tight", disk, monkeypatch))), loop(made()))


@pytest.mark.parametrize("home", HOMES)
def test_a_graph_that_is_kept_over_the_step_of_another_optimizer(
    home: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(fabric: Any) -> tuple[GAN, list[Tensor]]:
        net = GAN()
        model, generator, discriminator = fabric.setup(
            net, optimizer_of(net.generator), optimizer_of(net.discriminator)
        )
        torch.manual_seed(2)
        seen = []
        for noise, real in zip(batches(), batches()[::-1], strict=True):
            fake = model("generator", noise)
            loss = model("discriminator", fake.detach()).square().mean() - model("discriminator", real).mean()
            fabric.backward(loss)
            discriminator.step()
            discriminator.zero_grad()
            deceived = model("discriminator", fake).square().mean()
            fabric.backward(deceived)
            generator.step()
            generator.zero_grad()
            discriminator.zero_grad()
            seen += [loss.detach(), deceived.detach()]
        fabric.strategy.teardown()
        return net, seen

    assert_equal(loop(made(strategy(home, disk, monkeypatch))), loop(made()))


@pytest.mark.parametrize("home", ["disk", "tight"])
def test_graphs_of_several_calls_are_kept_over_steps_of_another_optimizer(
    home: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward through one leaves the others, and a backward that retains its graph leaves that."""

    def loop(fabric: Any) -> tuple[GAN, list[Tensor]]:
        net = GAN()
        model, generator, discriminator = fabric.setup(
            net, optimizer_of(net.generator), optimizer_of(net.discriminator)
        )
        torch.manual_seed(2)
        seen = []
        for _ in range(2):
            fakes = [model("generator", noise) for noise in batches(2)]
            for fake in [*fakes, *fakes]:
                loss = model("discriminator", fake.detach()).square().mean()
                fabric.backward(loss)
                discriminator.step()
                discriminator.zero_grad()
                deceived = model("discriminator", fake).square().mean()
                fabric.backward(deceived, retain_graph=True)
                discriminator.zero_grad()
                seen += [loss.detach(), deceived.detach()]
            generator.step()
            generator.zero_grad()
        fabric.strategy.teardown()
        return net, seen

    assert_equal(loop(made(strategy(home, disk, monkeypatch))), loop(made()))


@pytest.mark.parametrize("home", HOMES)
def test_parameters_are_unfrozen_after_an_evaluation_with_gradients(
    home: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(fabric: Any) -> tuple[Net, list[Tensor]]:
        net = Net()
        net.blocks[0].requires_grad_(False)
        model, optimizer = fabric.setup(net, optimizer_of(net))
        torch.manual_seed(2)
        seen = []
        for index, batch in enumerate(batches()):
            if index == 2:
                seen.append(model(batch).detach())  # an evaluation that forgets torch.no_grad()
                net.blocks[0].requires_grad_(True)
            loss = model(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        fabric.strategy.teardown()
        return net, seen

    assert_equal(loop(made(strategy(home, disk, monkeypatch))), loop(made()))


@pytest.mark.parametrize("home", HOMES)
def test_a_backward_of_a_forward_before_a_re_layout_is_refused(
    home: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, net = made(strategy(home, disk, monkeypatch)), Net()
    net.blocks[0].requires_grad_(False)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    before = model(batches()[0]).square().mean()
    net.blocks[0].requires_grad_(True)
    fabric.backward(model(batches()[1]).square().mean())
    with pytest.raises(UsageError, match=r"pages were laid out again .*; compute (that|the) forward again"):
        fabric.backward(before)
    optimizer.zero_grad()
    fabric.backward(model(batches()[1]).square().mean())
    optimizer.step()
    fabric.strategy.teardown()
