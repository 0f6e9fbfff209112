"""`lightning_ptm.plan` and `lightning-ptm plan my_module:MyModel`: a module of the user's, an instance or by its name."""

from __future__ import annotations

import copy
import json
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_ptm
from lightning_ptm.cli import main
from lightning_ptm.commands.own_module import NO_LOSS, NO_OPTIMIZER, named, trained, with_adapters
from lightning_ptm.commands.plan import Where, forecast_module
from lightning_ptm.errors import ConfigError

WIDTH, BATCH = 256, (8, 256)


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)))


class Net(L.LightningModule):
    """Draws random numbers, and remembers what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()
        self.calls: list[int] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.calls.append(int(torch.randint(10, (1,))) + random.randrange(3) + int(np.random.randint(3)))
        return self.blocks(nn.functional.dropout(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_an_instance_is_planned_and_stays_as_it_is() -> None:
    module = Net().eval()
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    found = lightning_ptm.plan(module, torch.ones(BATCH), hardware="rtx4090")
    assert found.fits and found.numel == 3 * (WIDTH * WIDTH + WIDTH) and found.assumed == ()
    assert found.config == "Net" and found.hardware == "rtx4090" and found.batch_size == 8
    assert found.optimizers[0].optimizer.endswith("SGD")
    assert str(found).startswith("fits: ") and repr(found) == str(found)
    assert module.calls == [] and not module.training and all(p.device.type == "cpu" for p in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[union-attr, index]
    with torch.device("meta"):
        meta = Net()
    assert lightning_ptm.plan(meta, BATCH, hardware="rtx4090").to_dict() == found.to_dict()


class Output(dict[str, Tensor]):
    pass


class Plain(nn.Module):
    """Takes what `Net` takes, by name, and may compute its loss."""

    def __init__(self, *, has_loss: bool) -> None:
        super().__init__()
        self.blocks = layers()
        self.has_loss = has_loss

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.blocks(x)
        return Output(loss=out.square().mean(), out=out) if self.has_loss else (out, None)


@pytest.mark.parametrize("has_loss", [True, False])
@pytest.mark.parametrize("batch", [BATCH, {"x": BATCH, "y": (8,)}, ["8x256", "8"]])
def test_a_plain_module_has_adam_and_the_sum_of_its_output(has_loss: bool, batch: Any) -> None:
    found = lightning_ptm.plan(Plain(has_loss=has_loss), batch, hardware="rtx4090", precision="bf16-mixed")
    assert found.assumed == (NO_LOSS, NO_OPTIMIZER) and all(line in str(found) for line in found.assumed)
    assert found.fits and found.batch_size == 8 and found.flops == 3 * 3 * 2 * 8 * WIDTH * WIDTH
    assert found.optimizers[0].bytes == 2 * 4 * found.numel and found.precision == "bf16-mixed"


def test_what_a_lightning_module_lacks_is_assumed() -> None:
    class Half(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = layers()

        def forward(self, batch: Tensor) -> Tensor:
            return self.blocks(batch)

    class WithStep(Half):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).mean()

    class WithOptimizer(Half):
        configure_optimizers = Net.configure_optimizers

    for kind, assumed in ((Half, [NO_LOSS, NO_OPTIMIZER]), (WithStep, [NO_OPTIMIZER]), (WithOptimizer, [NO_LOSS])):
        model, said = trained(kind())
        assert said == assumed and type(model).__name__ == kind.__name__
        assert isinstance(model.configure_optimizers(), torch.optim.SGD if kind is WithOptimizer else torch.optim.Adam)


def test_settings_and_devices_are_those_of_the_run() -> None:
    module = nn.Sequential(*layers())
    one = lightning_ptm.plan(module, BATCH, "h100")
    eight = lightning_ptm.plan(module, BATCH, "h100", 8, recompute="all", offload_optimizer="host", page_size="64KiB")
    assert (one.ranks, eight.ranks, eight.hardware) == (1, 8, "h100_x8")
    assert eight.homes["master"]["host"] > 0 == one.homes["master"]["host"]
    kept = lightning_ptm.plan(module, BATCH, "h100", 8, offload_optimizer="host", page_size="64KiB")
    assert eight.seconds > kept.seconds
    on_disk = lightning_ptm.plan(module, BATCH, "rtx4090", disk="3GB/s", offload_optimizer="disk")
    assert on_disk.homes["master"]["disk"] > 0 and on_disk.seconds > 2 * one.seconds
    assert re.search(r", of which compute waits \S+ s for the disk[;\n]", str(on_disk))
    for wrong, words in (
        ({"sice": 1}, "AngelPTMStrategy has no setting 'sice'"),
        ({"presicion": "bf16-mixed"}, "plan has no argument 'presicion', .* use 'precision' if"),
        ({"disk_pth": "."}, "AngelPTMStrategy has no setting 'disk_pth'; did you mean 'disk_path'"),
        ({"hardwar": "l4"}, "plan has no argument 'hardwar', .* use 'hardware' if"),
        ({"devices": 0}, "devices is 0"),
        ({"precision": "half"}, "half"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises((ConfigError, ValueError), match=words):
            lightning_ptm.plan(module, BATCH, "rtx4090", **wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"Sequential cannot compute on the meta device .*operations cannot be counted"
    ):
        lightning_ptm.plan(module, (8, 3), "rtx4090")
    with pytest.raises(ConfigError, match=r"was given the class Linear, .*give an instance"):
        lightning_ptm.plan(nn.Linear, BATCH, "rtx4090")  # type: ignore[arg-type]


def big(count: int = 24) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(count)))


@pytest.mark.usefixtures("proposes")
def test_a_refusal_proposes_what_fits_and_that_is_so() -> None:
    """A plan with the changes of a proposal fits, and takes the seconds that the proposal names."""
    module = nn.Sequential(*big(40))
    refused, blueprint = forecast_module(module, torch.empty(8, 8192, device="meta"), Where("rtx4090", ram="8GiB"))
    assert not refused.fits and blueprint is None and refused.tiers == {} and refused.proposals
    assert str(refused).startswith(f"does not fit: {refused.reason}\n")
    tried = [each.changes for each in refused.proposals]
    assert [len(each) for each in tried if "lora_rank" not in each] == sorted(
        len(each) for each in tried if "lora_rank" not in each
    )
    assert {"disk_path": "/nvme"} in tried and {"lora_rank": 16} in tried
    for each in refused.proposals:
        assert f": {each.seconds:.4g} s a step, {each.samples_per_s:.4g} samples/s" in str(refused)
        changes = dict(each.changes)
        model = module
        if changes.pop("lora_rank", None):
            model = copy.deepcopy(module)
            with_adapters(model, 16)
        again = lightning_ptm.plan(model, (8, 8192), "rtx4090", ram="8GiB", **changes)
        assert again.fits and again.seconds == pytest.approx(each.seconds)
    numbers = refused.to_dict()
    assert numbers["seconds_per_step"] is None and numbers["proposals"][0]["changes"] == tried[0]


@pytest.mark.usefixtures("proposes")
def test_a_batch_that_does_not_fit_has_a_smaller_one_or_recomputation() -> None:
    kept = {"recompute": "none", "offload_activations": "none"}
    module = nn.Sequential(*layers(40))
    refused = lightning_ptm.plan(module, (700_000, WIDTH), "rtx4090", precision="bf16-mixed", **kept)
    assert not refused.fits and "activations of 700000 samples" in refused.reason and refused.tiers
    changes = [each.changes for each in refused.proposals]
    assert changes[:2] == [{"recompute": "all"}, {"batch_size": refused.largest_batch}]
    assert not any("optimizer_state_dtype" in each for each in changes)  # it leaves as much to a batch


@pytest.mark.usefixtures("proposes")
def test_activations_that_do_not_fit_have_the_best_device_memory() -> None:
    """That one was advised to lower device_memory said neither to what, nor whether it suffices."""
    refused = lightning_ptm.plan(big(), (10_000, 8192), "rtx4090", device_memory="22GiB")
    best, _ = forecast_module(big(), torch.empty(10_000, 8192, device="meta"), Where("rtx4090"), device_memory="best")
    (first, *_) = refused.proposals
    assert first.changes == {"device_memory": f"{best.chosen['device_memory'] >> 20}MiB"}
    assert first.seconds == pytest.approx(best.seconds)
    assert refused.seconds is None and refused.to_dict()["seconds_per_step"] is None


@pytest.mark.usefixtures("proposes")
def test_a_refusal_is_a_sentence_and_a_disk_has_a_size_and_rates() -> None:
    text = str(lightning_ptm.plan(big(40), (8, 8192), "rtx4090", ram="8GiB")).splitlines()
    assert len(text[0].split()) < 45 and "raise" not in text[0] and "would fit" not in text[0]
    (disk,) = (line for line in text if line.startswith("would fit with disk_path='/nvme': "))
    assert re.search(r" samples/s, [\d.]+ GiB a rank on a disk that reads 5 and writes 2 GB/s$", disk)
    nothing = lightning_ptm.plan(big(40), (8, 8192), "laptop", disk="none", ram="2GiB", batch_size=1 << 22)
    assert not nothing.proposals and "\nnothing that was tried would fit: " in str(nothing)


def test_attention_of_torchs_own_layer_is_counted_as_fused_whether_it_drops_or_not() -> None:
    class Layer(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, dropout, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    found = [lightning_ptm.plan(Layer(each), (2, 512, 64), hardware="rtx4090") for each in (0.0, 0.1)]
    whole, dropped = (each.tiers["device"].activation_bytes for each in found)
    assert 0 < whole == dropped < 2 * 4 * 512 * 512 * 4, "less than the scores"


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((8, 3), r"its batch is float32 of 8x3; if the module takes another one, give that"),
        ({"x": (8, 256), "y": (8,)}, r"its batch is x: float32 of 8x256, y: float32 of 8; if"),
    ],
)
def test_a_wrong_batch_is_named(batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot compute on the meta device .*: {words}"):
        lightning_ptm.plan(nn.Sequential(*layers()), batch, "rtx4090")


# -- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package of the user's, which is the current one."""
    package = tmp_path / "mine"
    package.mkdir()
    (tmp_path / "alone.py").touch()
    (package / "nets.py").write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            class MyModel(nn.Module):
                def __init__(self, width: int = 256, layers: int = 2):
                    super().__init__()
                    self.words = nn.Embedding(99, width)
                    self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
                def forward(self, words):
                    x = self.words(words)
                    for block in self.blocks:
                        x = block(x).relu()
                    return x
            class Needs(MyModel):
                def __init__(self, width):
                    super().__init__(width)
            def make():
                return MyModel(64)
            model = MyModel(128)
            number = 5
            def nothing():
                return None
            """
        )
    )
    (package / "broken.py").write_text("1 / 0")
    (package / "absent.py").write_text("import nosuchlibrary")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path


def test_a_model_is_named_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--hardware", "rtx4090", "--batch", "8x32", "--dtype", "int64"]
    for name, words, numel in (
        ("mine.nets:MyModel", [], 99 * 256 + 2 * (256 * 256 + 256)),
        ("mine/nets.py:MyModel", ["--init.width=128", "--init.layers=3"], 99 * 128 + 3 * (128 * 128 + 128)),
        ("mine.nets:make", ["--precision", "bf16-mixed"], 99 * 64 + 2 * (64 * 64 + 64)),
        ("mine.nets:model", ["--strategy", "{recompute: all}"], 99 * 128 + 2 * (128 * 128 + 128)),
    ):
        main(["plan", name, *machine, *words, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["fits"] and found["parameters"] == numel and found["config"] == "MyModel"
        assert found["precision"] == ("bf16-mixed" if "--precision" in words else "32-true")
    main(["plan", "mine.nets:MyModel", *machine, "--ram", "8GiB", "--disk", "3GB/s", "--devices", "2"])
    text = capsys.readouterr().out
    assert text.startswith("fits: ") and "MyModel on 1 x rtx4090_x2: 2 ranks" in text and NO_OPTIMIZER in text
    python = lightning_ptm.plan(named("mine.nets:make", {}), "8x32:int64", "rtx4090")
    main(["plan", "mine.nets:make", *machine, "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(python.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine.nett:MyModel"], r"there is no module 'mine\.nett'; looked in .*go to the folder that has it"),
        (["mine.nets:MyModul"], r"nets\.py has no 'MyModul'; did you mean 'MyModel'\?"),
        (["mine.nets:number"], "mine.nets:number is int; name a class, a function that returns a module, or a module"),
        (["mine.nets:nothing"], "mine.nets:nothing returns NoneType; a torch.nn.Module is needed"),
        (["mine.nets:Needs"], r"mine\.nets:Needs\(width\) cannot be built .*no arguments .*--init\.NAME=VALUE"),
        (["mine.nets:Needs", "--init.wide=3"], r"cannot be built .*with wide=3 \(TypeError"),
        (["mine.nets:model", "--init.width=3"], r"is an object that exists already, so it takes no init \(width\)"),
        (["mine.broken:MyModel"], r"importing mine\.broken failed \(ZeroDivisionError"),
        (["mine.absent:MyModel"], "needs the module 'nosuchlibrary', which is not installed"),
        (["mine.nets:MyModel", "--largest", "layers"], "--largest is for configs"),
        (["gpt"], "--batch, --dtype and --init are for a model of yours"),
        (["alone"], "alone is a module, and no config file; name a class or function of it, such as alone:MyModel"),
    ],
)
def test_what_cannot_be_planned_says_why(folder: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["plan", *arguments, "--hardware", "rtx4090", "--batch", "8x32:int64"])


def test_a_model_needs_a_batch(folder: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"mine\.nets:MyModel needs the shapes of a batch; give them, as in --batch 8x2048"
    ):
        main(["plan", "mine.nets:MyModel", "--hardware", "rtx4090"])
