"""Wrong command lines and configs, read as a newcomer would: each is answered in a line that names what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_ptm.cli import main
from lightning_ptm.commands.mistakes import as_options
from lightning_ptm.config import NESTED, Weights
from lightning_ptm.errors import ConfigError

MINE = """
import torch
from lightning.pytorch import LightningModule

class Net(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class NetWithData(Net):
    def train_dataloader(self):
        width = self.layer.in_features
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, width)))
"""


@pytest.fixture
def my_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules of a user's. It is not among those that Python looks in, as with a console script."""
    (tmp_path / "my_module.py").write_text(MINE)
    (tmp_path / "my_missing.py").write_text("import no_such_library\n")
    (tmp_path / "my_syntax.py").write_text("class Net(:\n")
    (tmp_path / "my_raising.py").write_text("raise ValueError('a mistake of mine')\n")
    (tmp_path / "other_kind.yaml").write_text("model: {class_path: torch.nn.Linear}\ndata: {class_path: TextBytes}\n")
    (tmp_path / "my_other.py").write_text(MINE.replace("lightning.pytorch", "pytorch_lightning"))
    (tmp_path / "unknown_class.yaml").write_text("trainer: {callbacks: [Throughput, {class_path: Thruput}]}\n")
    (tmp_path / "misspelt.yaml").write_text("modle: {class_path: GPT}\n")
    for name in ("my_module", "my_other"):  # another test may have imported one of the same name
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_") and name not in before]:
        del sys.modules[name]


QUIET = [
    *("--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.logger=false", "--trainer.default_root_dir=."),
    *(
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.enable_checkpointing=false",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--model=my_module.NetWithData"],
        ["--model=my_module.NetWithData", "--trainer.strategy=lightning_ptm.AngelPTMStrategy"],
        ["--model=my_module.NetWithData", "--trainer.strategy=AngelPTMStrategy"],
        ["--model=my_module.NetWithData", "--trainer.strategy=angel_ptm"],
        [
            *("--model=my_module.NetWithData", "--trainer.strategy=lightning_ptm.AngelPTMStrategy"),
            "--trainer.strategy.init_args.host_memory=1GiB",
        ],
        ["--model=my_module.NetWithData", "--trainer.strategy=lightning.pytorch.strategies.SingleDeviceStrategy"],
        ["--model=my_module.NetWithData", "--trainer.accelerator=lightning.pytorch.accelerators.CPUAccelerator"],
        ["--config=strategy.yaml"],
        ["--config=strategy.yaml", "--trainer.strategy.init_args.host_memory=1GiB"],
    ],
)
def test_a_class_is_given_by_its_path_and_looked_for_in_the_current_folder(
    my_modules: Path, arguments: list[str]
) -> None:
    named = {"model": {"class_path": "my_module.NetWithData"}}
    named["trainer"] = {"strategy": "lightning_ptm.AngelPTMStrategy"}  # type: ignore[dict-item]
    (my_modules / "strategy.yaml").write_text(yaml.safe_dump(named))
    main(["fit", *QUIET, *arguments])


CLASSES = {
    "--model=no_module.Net": r"'no_module\.Net': No module named 'no_module'",
    "--data=no_module.Data": r"'no_module\.Data': No module named 'no_module'",
    "--model=my_module.Nett": r"--model: my_module has no LightningModule 'Nett'; did you mean 'Net'\?",
    "--model my_module.Nett": r"--model: my_module has no LightningModule 'Nett'; did you mean 'Net'\?",
    "--model.class_path=my_module.Xyz": r"my_module has no LightningModule 'Xyz'; there are Net, NetWithData",
    "--model=my_missing.Net": r"'my_missing\.Net': No module named 'no_such_library'",
    "--model=my_syntax.Net": r"invalid syntax \(my_syntax\.py, line 1\)",
    "--model=my_raising.Net": "a mistake of mine",
    "--model=my_module.py": r"my_module\.py",
    "--model=GPT2": r"--model: there is no LightningModule 'GPT2' \(.* my_module\.GPT2\); did you mean 'GPT'\?",
    "--data=TextBites": r"there is no LightningDataModule 'TextBites' .*; did you mean 'TextBytes'\?",
    "--trainer.callbacks+=MemoryTimelin": r"there is no Callback 'MemoryTimelin' .*; did you mean 'MemoryTimeline'\?",
    "--optimizer=AdamV": r"there is no Optimizer 'AdamV' .*; did you mean 'Adam'\?",
    "--config=unknown_class.yaml": r"trainer\.callbacks of unknown_class\.yaml: there is no Callback 'Thruput' .*; did you",
    "--model=torch.nn.Linear": "does not correspond to a subclass of LightningModule",
    "--config=other_kind.yaml": r"torch\.nn\.Linear does not correspond to a subclass of LightningModule",
    "--model=my_other.Net": r"Net is a class of pytorch_lightning, and .*: change its imports, or use .*LightningCLI with",
    "--model=my_module.Net": r"--data is missing, and Net has no train_dataloader\(\) of its own; give --data=",
    "--model=my_module.Net --model.init_args.height=3": r"'my_module\.Net': .*'height' is not .*; its settings are width",
    "--data=TextBytes": r"fit\.model",
    "--config=misspelt.yaml": "'modle.class_path'; did you mean '--model'",
    "--config=/no/such.yaml": r"--config: File does not exist: '/no/such\.yaml'",
}


@pytest.mark.parametrize("arguments", CLASSES)
def test_a_class_that_is_not_there(my_modules: Path, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says what is missing."""
    assert re.search(CLASSES[arguments], answer([*QUIET, *arguments.split()], capsys))


OPTIONS = {
    "trainer.strategy=lightning_ptm.AngelPTMStrateg": "lightning_ptm has no Strategy 'AngelPTMStrateg'; did you mean 'Angel",
    "trainer.strategy=torch.nn.Linear": r"torch\.nn\.Linear does not correspond to a subclass of Strategy",
    "trainer.strategy=no_module.Strategy": "No module named 'no_module'",
    "trainer.strategy=xyz": "there is no strategy 'xyz'; there are angel_ptm, angel_ptm_",
    "trainer.accelerator=cpuu": r"there is no accelerator 'cpuu'; did you mean 'cpu'\?",
    "trainer.callbacks=lightning_ptm.callbacks.Thruput": r"has no Callback 'Thruput'; did you mean 'Throughput'\?",
    "trainer.precision=bf17-mixed": "--trainer.precision: use one of .*'bf16-mixed'.*, got bf17-mixed",
    "trainer.max_steps=ten": "--trainer.max_steps: expected int, got ten",
    "trainer.limit_val_batches=x": "--trainer.limit_val_batches: expected int or float, got x",
    "trainer.strategy=AngelPTMStrategie": r"there is no strategy 'AngelPTMStrategie'; did you mean 'AngelPTMStrategy'\?",
    "trainer.devices=two": "`devices` selected with `CPUAccelerator` should be an int > 0",
    "trainer.strategy.init_args.checkpoints.resume=yss": r"strategy\.checkpoints\.resume=yss: use 'never' or 'auto'",
    "trainer.strategy.init_args.debug.poison=yess": r"--trainer\.strategy\.debug\.poison=yess is neither on nor off",
    "trainer.strategy.init_args.host_memry=1": r"has no setting 'host_memry'; did you mean 'host_memory'\?",
    "trainer.strategy.init_args.cpu_offload=true": "no setting 'cpu_offload'; that is FSDP's and Accelerate's: give --train",
    "trainer.strategy.checkpoints=sharded": r"names no setting; give --trainer\.strategy\.checkpoints\.state_dict_type=shard",
    "trainer.strategy.checkpoints.state_dict_typ=full": r"checkpoints has no setting 'state_dict_typ'; did you mean 'state_",
    "trainer.strategy.lock_free.max_stalenes=2": "lock_free has no setting 'max_stalenes'; did you mean 'max_staleness'",
    "trainer.strategy.max_staleness=2": r"no setting 'max_staleness'; give --trainer\.strategy\.lock_free\.max_staleness=\.",
    "trainer.strategy.host_memory=64": r"--trainer\.strategy\.host_memory=64 is 64 bytes, .* \(did you mean '64GiB'\?\)",
    "trainer.strategy.offload_optimizer=cpu": r"--trainer\.strategy\.offload_optimizer=cpu is no tier; use 'auto', ",
    "model.init_args.lr=3": r"lightning_ptm\.models\.GPT': .*'lr' is not .*; its settings are .*learning_rate",
}


FORM = r"\{class_path: AngelPTMStrategy, init_args: \{"
STRATEGIES = {
    "{class_path: AngelPTMStrategy, host_memory: 2GiB}": rf"has host_memory outside of init_args; write {FORM}host_memory: ",
    "{AngelPTMStrategy: {host_memory: 2GiB}}": f"names no class; write {FORM}",
    "{host_memory: 2GiB}": f"names no class; write {FORM}host_memory: ",
    "{class_path: angel_ptm, init_args: {host_memory: 2GiB}}": f"angel_ptm, a strategy's name and no class; .*{FORM}",
    "{class_path: AngelPTMStrategie}": r"there is no Strategy 'AngelPTMStrategie' .*; did you mean 'AngelPTMStrategy'\?",
    "{class_path: AngelPTMStrategy, init_arg: {host_memory: 2GiB}}": f"has 'init_arg' beside class_path; .*{FORM}",
    "{class_path: AngelPTMStrategy, init_args: [host_memory]}": rf"has init_args: \['host_memory'\]; .*{FORM}",
    "{class_path: AngelPTMStrategy, init_args: {checkpoints: sharded}}": r"give --.*checkpoints\.state_dict_type=sharded ",
    "{class_path: AngelPTMStrategy, init_args: {tuning: {staging_memry: 1MiB}}}": "tuning has no .*; did you mean 'staging_m",
    "{class_path: AngelPTMStrategy, init_args: {lock_free: {max_staleness: two}}}": r"lock_free\.max_staleness=two: give a n",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_of_a_config_that_cannot_be(
    my_modules: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each was answered with a list of types that do not fit."""
    (my_modules / "mine.yaml").write_text(f"trainer: {{strategy: {strategy}}}")
    told = answer(["--config=mine.yaml", *QUIET, "--model=my_module.NetWithData"], capsys)
    assert re.search(STRATEGIES[strategy], told) and "Parser key" not in told, told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "given",
    [
        ["--trainer.strategy.weights={path: /no/such, key_mapping: {a: b, c: null}}"],
        ["--trainer.strategy.weights.path=/no/such", "--trainer.strategy.weights.key_mapping={a: b, c: null}"],
        ["--trainer.strategy.weights=Weights", "--trainer.strategy.weights.path=/no/such"],
        [
            "--trainer.strategy.lock_free={class_path: LockFree, init_args: {max_staleness: 2}}",
            "--trainer.strategy.units=no",
        ],
    ],
)
def test_forms_that_jsonargparse_knows_are_accepted(
    my_modules: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A null of a dotted option was the text 'None', a prefix that no module has."""
    seen: list[object] = []
    made = Weights.__post_init__
    monkeypatch.setattr(Weights, "__post_init__", lambda self: (made(self), seen.append(self.key_mapping)))
    with pytest.raises(SystemExit) as stop:
        main(["fit", *QUIET, "--model=my_module.NetWithData", "--trainer.strategy=AngelPTMStrategy", *given])
    assert "/no/such does not exist" in str(stop.value.code) or stop.value.code == 2
    assert all(each in (None, {"a": "b", "c": None}) for each in seen)


@pytest.mark.parametrize("cls", NESTED.values())
def test_an_unknown_nested_setting_is_an_error_of_ours(cls: type) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no setting 'no_such'; it has "):
        cls(no_such=1)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("fits with host_memory='4MiB', or disk_path='/a'", "fits with --x.host_memory=4MiB, or --x.disk_path=/a"),
        ("use lock_free=False, or recompute='all'", "use --x.lock_free=false, or --x.recompute=all"),
        ("give tuning=Tuning(staging_memory='1MiB')", "give --x.tuning.staging_memory=1MiB"),
        (
            "lock_free=LockFree(max_staleness=2, warmup_steps=0)",
            "--x.lock_free.max_staleness=2 --x.lock_free.warmup_steps=0",
        ),
        ("raise host_memory; --x.host_memory=3 or {'a': 'b'}", "raise host_memory; --x.host_memory=3 or {'a': 'b'}"),
        ("weights=Weights(path='/a', key_mapping={'a': 'b'})", "weights=Weights(path='/a', key_mapping={'a': 'b'})"),
    ],
)
def test_settings_of_an_error_are_written_as_options(text: str, options: str) -> None:
    assert as_options(text, "--x.") == options


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_cannot_be(my_modules: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is answered in one line that names the option and what it was given."""
    told = answer(["--config=gpt.yaml", *QUIET, "--seed_everything=false", f"--{option}"], capsys)
    assert re.search(OPTIONS[option], told) and not re.search(r"Union|NestedArg", told), told


def test_the_current_folder_is_left_out_where_python_was_told_so(my_modules: Path) -> None:
    """`python -P` is for folders in which others may write."""
    code = "from lightning_ptm.cli import main\nmain(['--version'])\nimport my_module"
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    refused = subprocess.run([sys.executable, "-P", "-c", code], env=there, capture_output=True, text=True, timeout=60)
    assert "No module named 'my_module'" in refused.stderr


@pytest.mark.parametrize("command", ["params", "plan"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{class_path: no_module.Net}", "'no_module.Net': No module named 'no_module'"),
        ("{class_path: torch.nn.Linear}", "torch.nn.Linear does not correspond to a subclass of LightningModule"),
        (
            "{class_path: my_other.Net, init_args: {width: 3}}",
            "Net is a class of pytorch_lightning, and lightning-ptm takes",
        ),
        ("{class_path: GPT2}", "there is no LightningModule 'GPT2'"),
        ("{class_path: GPT, init_args: {widht: 3}}", "; did you mean 'width'?"),
    ],
)
def test_models_of_other_commands(my_modules: Path, command: str, config: str, message: str) -> None:
    (my_modules / "c.yaml").write_text(f"model: {config}\ndata: {{class_path: TextBytes}}\n")
    hardware = ["--hardware=v100_32gb_x8"] if command == "plan" else []
    with pytest.raises(SystemExit) as stop:
        main([command, "./c.yaml", *hardware])
    assert message in str(stop.value.code) and "\n" not in str(stop.value.code)


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line that `fit` says; a usage error, without usage or traceback."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *arguments])
    assert stop.value.code == 2, stop.value.code
    said = capsys.readouterr().err
    assert "usage:" not in said and "Traceback" not in said
    return said.splitlines()[-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "content", [b"hello world", b"model: {class_path: GPT}", b"\x89PNG\r\n", b"<!DOCTYPE html>", b"e"]
)
def test_a_file_that_is_no_checkpoint_is_not_called_damaged(my_modules: Path, content: bytes) -> None:
    """Nor is it offered to be trusted, which would run what is in it."""
    (my_modules / "other.ckpt").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *QUIET, "--model=my_module.NetWithData", "--trainer.strategy=angel_ptm", "--ckpt_path=other.ckpt"])
    told = str(stop.value.code)
    assert re.search(
        r"other\.ckpt was not written by torch\.save: it begins with b.*; give the path of a checkpoint", told
    )
    assert "trust" not in told and "damaged" not in told
