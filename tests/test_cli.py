"""The command line: which file a config name means, what a wrong one says, and what `fit` prints."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_ptm.cli import main
from lightning_ptm.command_line import command_line
from lightning_ptm.commands.config_names import CONFIG_FOLDERS, resolve_config_names
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT
from lightning_ptm.models.base import Batch

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """One folder of configs with `known.yaml`, and an empty working directory."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "known.yaml").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return [tmp_path / "configs"]


@pytest.mark.parametrize("name", ["known.yaml", "known"])
def test_a_bare_name_is_found_among_the_configs(folders: list[Path], name: str) -> None:
    found = str(folders[0] / "known.yaml")
    assert resolve_config_names(["fit", "--config", name, "--x=1"], folders) == ["fit", "--config", found, "--x=1"]
    assert resolve_config_names(["fit", "-c", name], folders) == ["fit", "-c", found]
    assert resolve_config_names([f"--config={name}"], folders) == [f"--config={found}"]


def test_a_file_in_the_working_directory_comes_first(folders: list[Path]) -> None:
    Path("known.yaml").touch()
    assert resolve_config_names(["--config", "known.yaml"], folders) == ["--config", "known.yaml"]


def test_paths_and_other_options_are_left_alone(folders: list[Path]) -> None:
    arguments = ["fit", "--config", "./known.yaml", "--config=/a/known.yaml", "--data.path=known.yaml", "known.yaml"]
    assert resolve_config_names(arguments, folders) == arguments


def test_several_configs_are_each_resolved(folders: list[Path]) -> None:
    found = str(folders[0] / "known.yaml")
    assert resolve_config_names(["-c", "known", "-c", "known"], folders) == ["-c", found, "-c", found]


def test_an_unknown_name_lists_the_known_ones(folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"'unknown\.yaml'.*known\.yaml"):
        resolve_config_names(["--config", "unknown.yaml"], folders)


def test_an_unknown_name_on_the_command_line_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "no-such-config.yaml"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "no-such-config.yaml" in message
    assert "gpt.yaml" in message


def test_a_config_that_is_no_text_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "saved.ckpt").write_bytes(b"PK\x80")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(tmp_path / "saved.ckpt")])
    assert stop.value.code == 2
    assert "saved.ckpt is not a text file" in capsys.readouterr().err


def test_the_main_config_is_found_from_here() -> None:
    assert any((folder / "gpt.yaml").samefile(CONFIGS / "gpt.yaml") for folder in CONFIG_FOLDERS if folder.is_dir())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "trainer.strategy=angel_ptm_lockfree",
            "there is no strategy 'angel_ptm_lockfree'; did you mean 'angel_ptm_lock_free'?",
        ),
        ("trainer.max_stepz=3", "unrecognized arguments: --trainer.max_stepz=3; did you mean '--trainer.max_steps'?"),
        ("trainer.max_stepz 3", "unrecognized arguments: --trainer.max_stepz 3; did you mean '--trainer.max_steps'?"),
        (
            "trainer.strategy.init_args.max_stalness=2",
            "no setting 'max_stalness'; did you mean 'max_staleness'? give --trainer.strategy.lock_free.max_staleness=...",
        ),
        ("model.init_args.widht=3", "GPT': Option 'widht' is not accepted; did you mean 'width'?"),
        ("trainer.strategy.init_args.timeout=60", 'Expected a string with form "h:m:s"'),
    ],
)
def test_a_mistake_is_answered_in_a_line(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "gpt.yaml", "--seed_everything=false", *f"--{option}".split(" ")])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    words = re.escape(message).replace(r"Option\ ", r".*").replace(r"\ is\ not\ accepted", ".*")  # versions differ
    assert re.fullmatch(rf"\S+( \S+)?: .*{words}.* \(see .* --help\)", lines[-1], re.IGNORECASE)
    assert not any(line.startswith("usage") for line in lines)


def test_commands_are_listed_ours_too(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([], "give a command: fit, validate, test, predict, export, .*, probe "),
        (["plna"], "there is no command 'plna'; did you mean 'plan'?"),
        (["xyz"], "there is no command 'xyz'; the commands are fit, .*, probe "),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert re.search(message.replace("?", r"\?"), capsys.readouterr().err)


def quiet(text: Path, *options: str) -> list[str]:
    """A run of the main config on another text, of three steps."""
    return [
        *("--config=gpt.yaml", f"--data.init_args.path={text}", "--trainer.accelerator=cpu", "--trainer.max_steps=3"),
        *(f"--trainer.default_root_dir={text.parent}", f"--trainer.logger.init_args.save_dir={text.parent}"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        *("--model.init_args.width=24", "--model.init_args.layers=1"),
        *options,
    ]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is not UTF-8."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 200)
    return tmp_path / "text.txt"


REFUSED = {
    "--model.init_args.width=25": r"width=25 and heads=6: .* multiple of 6",
    "--model.init_args.layers=0": "layers=0",
    "--model.init_args.dropout=1.5": r"dropout=1\.5.* give a probability",
    "--model.init_args.warmup_steps=-1": "warmup_steps=-1",
    "--model=T5MoE --model.init_args.experts=1": r"experts=1 and choices=1: .* use T5",
    "--model=T5MoE --model.init_args.capacity_factor=0": r"capacity_factor=0\.0",
    "--model=T5MoE --model.init_args.balance_weight=-1": r"balance_weight=-1\.0",
    "--data.init_args.batch_size=0": "batch_size=0",
    "--model.init_args.vocab_size=100": "TextBytes uses 256 tokens and GPT knows 100",
    "--data=SpanCorruption": "SpanCorruption uses 272 tokens and GPT knows 256",
    "--data.init_args.sequence_length=300": "TextBytes gives sequences of 300 tokens and GPT reads 256 at most",
    "--data.init_args.path=/no/such/text": "/no/such/text is neither a folder nor a file",
    "--data.init_args.sequence_length=100000 --model.init_args.sequence_length=100000": "one window takes 100001",
    "--trainer.strategy.init_args.host_memory=64KiB": r"pages may take 64 KiB of RAM; .* --trainer\.strategy\.host_memory=",
}


@pytest.mark.slow_unless(
    "--model.init_args.layers=0",
    "--model.init_args.dropout=1.5",
    "--model.init_args.warmup_steps=-1",
    "--model=T5MoE --model.init_args.capacity_factor=0",
    "--data=SpanCorruption",
    "--data.init_args.sequence_length=300",
    "--trainer.strategy.init_args.host_memory=64KiB",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_work_is_said_in_a_sentence(text: Path, options: str) -> None:
    """The message does not have the fifty lines of jsonargparse and Lightning around it."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *quiet(text), *options.split()])
    assert re.match(f"lightning-ptm fit: .*{REFUSED[options]}", str(stop.value.code))
    assert "\n" not in str(stop.value.code)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_disk_without_room_is_said_in_a_sentence(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    options = (
        f"--trainer.strategy.init_args.{name}" for name in (f"disk_path={text.parent}", "offload_optimizer=disk")
    )
    with pytest.raises(SystemExit) as stop:
        main(["fit", *quiet(text, *options)])
    assert re.match(r"lightning-ptm fit: disk_path .* needs .* for pages .*free some space", str(stop.value.code))
    assert "\n" not in str(stop.value.code)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_could_not_be_written_is_not_named_as_one(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saves = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=3")
    go_on = "--trainer.strategy.init_args.checkpoints.on_failure=warn"
    main(["fit", *quiet(text, "--trainer.limit_val_batches=0", *saves, go_on)])
    assert not list(text.parent.glob("**/*.ckpt"))
    assert re.search(r"^no checkpoint: .*step=3\.ckpt could not be written$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_another_model_is_said_in_a_sentence(text: Path) -> None:
    saves = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=3")
    main(["fit", *quiet(text, "--trainer.limit_val_batches=0", *saves)])
    (checkpoint,) = text.parent.glob("**/*.ckpt")
    with pytest.raises(SystemExit) as stop:
        main(["fit", *quiet(text, "--model.init_args.width=48", f"--ckpt_path={checkpoint}")])
    assert re.fullmatch(
        r"lightning-ptm fit: the checkpoint is of another model than this GPT \(size mismatch for token_embedding\.weight: .*"
        r" and \d+ more\); give the model the settings that it was saved with .*, or another --ckpt_path",
        str(stop.value.code),
    )


def test_errors_of_ones_own_code_keep_their_traceback(text: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["fit", *quiet(text, f"--model={__name__}.Faulty")])


class Faulty(GPT):
    """Fails in mid-training."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise ZeroDivisionError


class Failing(torch.optim.SGD):
    """An optimizer with a bug."""

    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("a bug of the user's")


class FaultyOptimizer(GPT):
    def configure_optimizers(self) -> Any:
        return Failing(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_refusal_made_of_an_error_in_ones_own_code_keeps_its_traceback(text: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Failing cannot be tested on small parameters .* a bug of the user's"
    ) as refused:
        main(["fit", *quiet(text, f"--model={__name__}.FaultyOptimizer")])
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert refused.value.__cause__.__traceback__ is not None


class Preset(GPT):
    """Says what its users know of it."""

    def __init__(self, preset: str = "x", warmup_steps: int = 1) -> None:
        try:
            super().__init__(width=24, heads=7)
        except ConfigError as error:
            raise ValueError("use preset small") from error


def test_what_ones_own_code_makes_of_a_refusal_is_what_is_said(text: Path) -> None:
    options = [option for option in quiet(text) if "--model" not in option]
    (text.parent / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"class_path": f"{__name__}.Preset"},
                "data": {"class_path": "TextBytes"},
                "trainer": {"max_steps": 1},
            }
        )
    )
    options[0] = f"--config={text.parent / 'run.yaml'}"
    options = [option for option in options if "logger" not in option]
    with pytest.raises(ValueError, match="use preset small") as refused:
        main(["fit", *options])
    assert not isinstance(refused.value, ConfigError)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_may_read_more_than_the_data_gives_and_predict_reads_the_same_data(text: Path) -> None:
    options = quiet(text, "--data.init_args.sequence_length=32")
    run = command_line(["fit", *options])
    assert run.trainer.global_step == 3
    assert (run.model.hparams["sequence_length"], run.datamodule.hparams["sequence_length"]) == (256, 32)
    loader = run.datamodule.predict_dataloader()
    predictions = command_line(["predict", *options, "--return_predictions=true"])
    assert sum(map(len, predictions.trainer.predict_loop.predictions)) == len(loader.dataset)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_config_runs_with_lightnings_own_strategy(text: Path) -> None:
    """`meta: true` asks for building late, which a strategy that puts whole models on a device cannot use."""
    run = command_line(["fit", *quiet(text, "--trainer.strategy=auto")])
    assert isinstance(run.trainer.strategy, SingleDeviceStrategy)
    assert run.trainer.global_step == 3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fit_prints_the_losses_and_saves_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be, that is the question. " * 200)
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 4,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        },
        "model": {
            "class_path": "lightning_ptm.models.GPT",
            "init_args": {"width": 16, "layers": 1, "heads": 2, "sequence_length": 32},
        },
        "data": {
            "class_path": "lightning_ptm.data.TextBytes",
            "init_args": {"path": str(tmp_path / "text.txt"), "sequence_length": 32, "batch_size": 4},
        },
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    for _ in range(2):  # the second run writes its config over that of the first
        run = command_line(["fit", "--config", str(tmp_path / "tiny.yaml"), "--trainer.val_check_interval=4"])
        printed = capsys.readouterr().out
    metrics = run.trainer.callback_metrics
    assert f"training loss of the last batch: {metrics['train_loss'].item():.9g} nats/byte" in printed
    assert f"validation loss: {metrics['val_loss'].item():.9g} nats/byte" in printed
    saves = run.trainer.checkpoint_callback
    assert isinstance(saves, ModelCheckpoint) and Path(saves.best_model_path).is_file()
    assert f"checkpoint: {saves.best_model_path}\n" in printed
    assert f"unigram model of the same text: {run.datamodule.unigram_loss:.4f} nats/byte" in printed
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["model"]["init_args"]["width"] == 16
    command_line(
        ["fit", "--config", str(tmp_path / "tiny.yaml"), "--trainer.max_steps=2", "--trainer.val_check_interval=4"]
    )
    assert "no validation in 2 steps; see trainer.val_check_interval" in capsys.readouterr().out


def test_a_reader_that_ends_early_is_no_error() -> None:
    """`lightning-ptm plan ... | head`"""
    read, write = os.pipe()
    os.close(read)
    program = "from lightning_ptm.cli import main; main(['params', 'gpt.yaml'])"
    # Older packages warn while they are imported.
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, "")
