"""Messages and habits of users: a run's first line, help, other libraries' settings, mistakes on the command line."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import pydoc
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor, nn

from lightning_ptm import (
    AngelPTMStrategy,
    Checkpoints,
    ConfigError,
    Debug,
    LockFree,
    Settings,
    TensorParallel,
    Tuning,
    Weights,
)
from lightning_ptm.cli import main
from lightning_ptm.config import format_bytes
from lightning_ptm.setting_hints import SETTING_HINTS

HARDWARE = Path(inspect.getfile(main)).parents[1] / "configs" / "hardware" / "h200.yaml"


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    validation_step = training_step

    def on_train_start(self) -> None:
        self.states_bytes = sum(row.bytes for row in self.trainer.strategy.states_at_home())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    return quiet_trainer(strategy, max_steps=1, **options)


# -- the first line -------------------------------------------------------------------------------------------------------


DISK = r"on disk in /.* \(/.*, [\d.]+ [GT]iB free\)"
PAGES = r"; pages take [\d.]+ \wiB in RAM \(other than states: .*\)"
LINES = {
    "ram": rf"angel_ptm keeps ([\d.]+ \wi?B) of model states: \1 in RAM \(parameters, optimizer states\){PAGES}",
    "masters_on_disk": rf"angel_ptm keeps .*: .* in RAM \(parameters\), .* {DISK} \(optimizer states\){PAGES}",
    "all_on_disk": rf"angel_ptm keeps (.*) of model states: \1 {DISK} \(parameters, optimizer states\){PAGES}",
    "lock_free": rf"angel_ptm keeps .*: .* in RAM \(parameters\), .* {DISK} \(master parameters, optimizer states\){PAGES}",
}


@pytest.mark.parametrize("home", LINES)
def test_the_first_line_says_where_states_live(strategy_at: Any, home: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        run = trainer(strategy_at(home))
        caplog.clear()
        run.fit(module := Net(), torch.randn(4, 2, 32))
    assert re.fullmatch(LINES[home], caplog.messages[0])
    assert f"keeps {format_bytes(module.states_bytes)} of" in caplog.messages[0]


def test_the_first_line_of_an_evaluation_is_of_parameters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer("angel_ptm").validate(Net(), torch.randn(4, 2, 32), verbose=False)
    assert any(
        re.search(r"keeps (.*) of model states: \1 in RAM \(parameters\)(;|$)", line) for line in caplog.messages
    )


@pytest.mark.parametrize("home", LINES)
def test_the_first_line_has_all_that_pages_take(strategy_at: Any, home: str, caplog: pytest.LogCaptureFixture) -> None:
    class Sizes(L.Callback):
        in_ram = 0

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.in_ram = sum(room.bytes for room in trainer.strategy.tier_rooms() if room.tier != "disk")

    sizes = Sizes()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        run = trainer(strategy_at(home), callbacks=[sizes])
        caplog.clear()
        run.fit(Net(), torch.randn(4, 2, 32))
    assert f"; pages take {format_bytes(sizes.in_ram)} in RAM" in caplog.messages[0]


def test_the_first_line_names_the_file_system_of_each_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [tmp_path / "a", Path("/dev/shm") / f"lightning_ptm_{tmp_path.name}"]
    try:
        with caplog.at_level(logging.INFO, "lightning.pytorch"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a disk tier that is RAM
            run = trainer(AngelPTMStrategy(disk_path=folders, offload_optimizer="disk"))
            caplog.clear()
            run.fit(Net(), torch.randn(4, 2, 32))
    except ConfigError as error:  # where there is no O_DIRECT, before the line
        assert "O_DIRECT" in str(error)
        return
    finally:
        folders[1].rmdir()
    assert re.search(rf"{folders[0]} \(/.*, .* free\), {folders[1]} \(/dev/shm, .* free\) \(", caplog.messages[0])


# -- help and completion --------------------------------------------------------------------------------------------------


def test_help_and_completion_list_every_setting_with_its_default_and_description() -> None:
    parameters = inspect.signature(AngelPTMStrategy).parameters
    text = pydoc.plain(pydoc.render_doc(AngelPTMStrategy))
    for field in dataclasses.fields(Settings):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert re.search(rf"^ \|\s+{field.name}[:,]", text, re.MULTILINE) or f"weights_new, {field.name}" in text, (
            field.name
        )
    assert {"accelerator", "parallel_devices", "timeout"} < set(parameters)
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def test_a_class_of_ones_own_keeps_its_signature() -> None:
    class Mine(AngelPTMStrategy):
        def __init__(self, folder: str) -> None:
            super().__init__(disk_path=folder)

    assert list(inspect.signature(Mine).parameters) == ["folder"]
    assert Mine("/x").settings.disk_path == "/x"


# -- other libraries' settings --------------------------------------------------------------------------------------------


ASKED = {
    "offload_optimizer_device": "offload_optimizer='host'",
    "offload_param": "offload_parameters='host'",
    "cpu_offload": "offload_parameters='host' and offload_optimizer='host'",
    "nvme_path": "disk_path='/my/disk'",
    "stage": "divided over all ranks",
    "sharding_strategy": "divided over all ranks",
    "auto_wrap_policy": r"units=\['Block'\]",
    "activation_checkpointing": "recompute='all'",
    "cpu_checkpointing": "offload_activations='host'",
    "mixed_precision": "precision='bf16-mixed'",
    "max_memory": "device_memory='20GiB'",
    "pin_memory": "page-locked",
    "overlap_comm": "the plan decides",
    "find_unused_parameters": "leave it out",
    "gradient_clipping": "gradient_clip_val",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "load_in_4bit": "frozen_dtype='nf4' or 'int8'",
    "pp_size": "pipeline_parallel_size",
    "config": "help",
}


@pytest.mark.parametrize("name", ASKED)
def test_settings_of_other_libraries_are_answered_with_ours(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no setting '{name}'; that is .*: .*{ASKED[name]}"):
        AngelPTMStrategy(**{name: True})


def test_habits_are_no_settings_of_ours_and_are_answered_once() -> None:
    names = [name for habit in SETTING_HINTS for name in habit.names]
    assert len(names) == len(set(names)) > 80
    assert not set(names) & {field.name for field in dataclasses.fields(Settings)}
    given = re.findall(r"\b([a-z]+(?:_[a-z]+)+)=", " ".join(habit.instead for habit in SETTING_HINTS))
    nested = (Checkpoints, Debug, LockFree, TensorParallel, Tuning, Weights)
    known = {field.name for cls in (Settings, *nested) for field in dataclasses.fields(cls)}
    assert set(given) <= known, "what is answered exists"


# -- the command line -----------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of standard error, which is all but for what Lightning says before."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "gpt.yaml", "--seed_everything=false", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and "usage:" not in said
    return said.splitlines()[-1]


@pytest.mark.filterwarnings("ignore")
def test_mistakes_of_the_trainer_are_a_sentence_before_anything_is_set_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AngelPTMStrategy, "setup", lambda *_: pytest.fail("it was set up"))
    (tmp_path / "epoch=3.ckpt").touch()
    assert re.search(
        r"--ckpt_path: there is no checkpoint .*epoch=4\.ckpt; there are epoch=3\.ckpt \(see",
        refused(capsys, f"--ckpt_path={tmp_path / 'epoch=4.ckpt'}"),
    )
    if not torch.cuda.is_available():
        for name in ("gpu", "cuda"):
            said = refused(capsys, f"--trainer.accelerator={name}")
            assert re.search(rf"accelerator={name}: torch .* (without CUDA|no GPU).*; leave it out", said)
    assert "there is no accelerator 'gpuu'; did you mean 'gpu'?" in refused(capsys, "--trainer.accelerator=gpuu")
    assert "`Trainer(devices='0')` value is not a valid input" in refused(capsys, "--trainer.devices=0")
    assert "that is DeepSpeed's" in refused(capsys, "--trainer.strategy.init_args.offload_optimizer_device=cpu")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert re.fullmatch(r"\S+ \d\S* \(torch \S+, lightning \S+\)\n", capsys.readouterr().out)


def test_plan_without_hardware_is_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[Any] = []

    def measure(paths: Any) -> str:
        measured.append(tuple(paths))
        return HARDWARE.read_text()

    package = main.__module__.partition(".")[0]  # the command's own, also where imports of these tests are renamed
    monkeypatch.setattr(importlib.import_module(".plan", f"{package}.commands"), "quick_measure", measure)
    main(["plan", "gpt"])
    assert "gpt.yaml on 1 x this machine: 1 rank" in capsys.readouterr().out
    main(["plan", "gpt", "--strategy", f"{{disk_path: {tmp_path}, offload_optimizer: disk}}"])
    assert measured == [(), (tmp_path,)]
