"""Settings that cannot work are refused before the first step, with an error that has names, numbers and a remedy."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Block
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import (
    AngelPTMPrecision,
    AngelPTMStrategy,
    CapacityError,
    Checkpoints,
    ConfigError,
    LockFree,
    PageIOError,
)
from lightning_ptm.command_line import command_line
from lightning_ptm.config import Settings
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.trainer import builder


class Stack(L.LightningModule):
    """Four blocks of 131 KiB in fp32, that is, of three pages; counts its steps."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64, 256, torch.relu) for _ in range(4))
        self.make_optimizer = optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3))
        self.steps = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.steps += 1
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def batches() -> DataLoader[Any]:
    return DataLoader(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def trainer_with(strategy: AngelPTMStrategy, precision: str = "32-true", **options: Any) -> L.Trainer:
    return quiet_trainer(strategy, precision=precision, max_epochs=1, **options)


def refused(strategy: AngelPTMStrategy, module: Stack, error: type[Exception], precision: str = "32-true") -> str:
    """The text of the error that a fit ends with; it must come before the first step."""
    with pytest.raises(error) as caught:
        trainer_with(strategy, precision).fit(module, batches())
    assert module.steps == 0
    return str(caught.value)


def small(**settings: Any) -> AngelPTMStrategy:
    return AngelPTMStrategy(**{"page_size": "64KiB", "debug": {"poison": True}, **settings})


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_sise": "1MiB"}, r"AngelPTMStrategy has no setting 'page_sise'; did you mean 'page_size'\?"),
        ({"hostmemory": "1GiB"}, r"no setting 'hostmemory'; did you mean 'host_memory'\?"),
        ({"xyz": 1}, r"no setting 'xyz'; the settings are page_size, device_memory, .*debug"),
        ({"page_size": 100_000}, r"page_size=100000 is 100000 bytes; a page is a multiple of 4096 .*page_size='4MiB'"),
        ({"page_size": "32KiB"}, r"page_size='32KiB' is 32768 bytes; .*at least 64 KiB"),
        ({"page_size": 0}, r"page_size=0 is 0 bytes; .*at least 64 KiB"),
        ({"page_size": "lots"}, r"page_size='lots' is not a size; .*'4MiB' or '1.5GB'"),
        ({"page_size": "4 parsecs"}, r"page_size='4 parsecs' is not a size"),
        ({"page_size": True}, r"page_size=True is not a size"),
        ({"page_size": 1.5}, r"page_size=1.5 is not a size"),
        ({"host_memory": "-1GiB"}, r"host_memory='-1GiB' is not a size"),
        ({"host_memory": -4096}, r"host_memory=-4096 is not a size"),
        ({"device_memory": None}, r"device_memory=None is not a size"),
        ({"disk_memory": "1.GiB"}, r"disk_memory='1.GiB' is not a size"),
        ({"disk_tbw": "much"}, r"disk_tbw='much' is not a size"),
        ({"disk_tbw": 600}, r"disk_tbw=600 is 600 B, less than any disk's rating; write its unit, as in '600TB'"),
        ({"tuning": {"staging_memory": []}}, r"staging_memory=\[\] is not a size"),
        (
            {"offload_parameters": "gpu"},
            r"offload_parameters='gpu' is no tier; use 'auto', 'device' \(GPU\), 'host' \(RAM\) or 'disk'",
        ),
        (
            {"offload_optimizer": "ssd"},
            r"offload_optimizer='ssd' is no tier; use 'auto', 'device' \(GPU\), 'host' \(RAM\) or 'disk'",
        ),
        (
            {"tuning": {"reduce_gradients": "never"}},
            r"tuning=Tuning\(reduce_gradients='never'\): use 'each_backward' or 'each_step'",
        ),
        ({"tuning": {"freed_memory": "free"}}, r"tuning=Tuning\(freed_memory='free'\): use 'auto', 'keep' or 'return'"),
        ({"lock_free": "yes"}, r"lock_free='yes' is neither on nor off; give True, False or LockFree"),
        (
            {"lock_free": {"predict_weights": "false"}},
            r"lock_free=LockFree\(predict_weights='false'\) is neither on nor off",
        ),
        ({"weights": ""}, r"weights='': give the path"),
        ({"weights": {"path": "w", "allow_missing": None}}, r"allow_missing=None\): give a list of names"),
        ({"weights": {"path": "w", "allow_missing": 3}}, r"allow_missing=3\): give a list of names"),
        ({"disk_path": ""}, r"disk_path='' names no folder; give the path of one, or a list of some"),
        ({"disk_path": []}, r"disk_path=\[\] names no folder"),
        ({"disk_path": ["/a", ""]}, r"disk_path=\['/a', ''\] names no folder"),
        ({"disk_path": 3}, r"disk_path=3 names no folder"),
        ({"recompute": "some"}, r"recompute='some' is no known choice; use 'auto', 'none', 'all', or 'every 2nd'"),
        ({"recompute": "every 0th"}, r"recompute='every 0th' is no known choice; use 'auto', 'none', 'all'"),
        ({"recompute": True}, r"recompute=True is no known choice; use 'auto', 'none', 'all'"),
        ({"accumulate": "breadth_first"}, r"accumulate.*that is GreedySnake's.*give slices=8.*separate batches"),
        ({"slices": 0}, r"slices=0: give a number of slices, 1 \(which cuts nothing\) or more, or a dictionary"),
        ({"slices": "auto"}, r"slices='auto': give a number of slices"),
        ({"slices": True}, r"slices=True: give a number of slices"),
        ({"slices": {}}, r"slices=\{\}: give a number of slices"),
        ({"slices": {"layers.*": 0}}, r"slices=\{'layers.\*': 0\}: give a number of slices"),
        ({"slices": ("tokens", 4)}, r"slices=\('tokens', 4\): give a number of slices"),
        ({"slices": {"*.mlp": ("heads", 4)}}, r"slices=.*'heads', 4.*as in slices=\{'\*.mlp': \('tokens', 16\)\}"),
        (
            {"slices": 2, "recompute": "every 2nd"},
            r"slices=2 with recompute='every 2nd': .*always recomputed.*recompute='all'",
        ),
        (
            {"slices": 2, "pipeline_parallel_size": 2, "micro_batches": 4},
            r"slices=2 with pipeline_parallel_size=2: .*leave one of the two out",
        ),
        (
            {
                "slices": {"*.mlp": ("tokens", 2)},
                "tensor_parallel_size": 2,
                "tensor_parallel": {"sequence_parallel": True},
            },
            r"with TensorParallel\(sequence_parallel=True\): .*leave one of the two out",
        ),
        ({"slices": {"auto": ("tokens", "most")}}, r"slices=.*'most'.*as in \{'auto': \('tokens', 'auto'\)\}"),
        (
            {"slices": 2, "tensor_parallel_size": 2, "tensor_parallel": {"overlap": "two_batches"}},
            r"slices=2 with overlap='two_batches' of tensor_parallel: .*leave one of the two out",
        ),
        ({"units": "Block"}, r"units='Block' is neither 'auto' nor a list of class names, .* such as \['Block'\]"),
        ({"units": []}, r"units=\[\] is neither 'auto' nor a list of class names"),
        (
            {"units": [Block]},
            r"units=\[.*Block.*\] is neither 'auto' nor a list of class names, .* such as \['Block'\]",
        ),
        (
            {"timeout": 60},
            r"timeout=60 is not a duration that ranks could wait; write datetime\.timedelta\(minutes=30\)",
        ),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 with micro_batches=1: .* give micro_batches=4 or more",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0: give a number of ranks"),
        ({"pipeline_parallel_size": 2, "micro_batches": 0}, "micro_batches=0: give the number of equal parts"),
        (
            {"pipeline_parallel_size": 2, "micro_batches": 2, "pipeline_schedule": "zb"},
            "pipeline_schedule='zb': use '1f1b', 'gpipe', 'interleaved' or 'breadth_first'",
        ),
        *(
            (
                {"pipeline_parallel_size": 2, "micro_batches": 2, "pipeline_blocks": blocks},
                "pipeline_blocks=.*: give the number of blocks of each stage, each 1 or more",
            )
            for blocks in ("equal", [], [2, 0], [True, 2], 3)
        ),
        (
            {"pipeline_parallel_size": 2, "micro_batches": 2, "pipeline_blocks": [1, 2, 3]},
            r"pipeline_blocks=\[1, 2, 3\] has 3 numbers for pipeline_parallel_size=2 and .*: give 2 numbers of blocks",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "micro_batches": 2,
                "pipeline_schedule": "interleaved",
                "pipeline_blocks": [1, 2, 3],
            },
            "pipeline_schedule='interleaved': give a multiple of 2 numbers of blocks, or 'auto'",
        ),
        *(
            (
                {"pipeline_parallel_size": 2, "micro_batches": 2, **more},
                f"pipeline_parallel_size=2 with {words}",
            )
            for more, words in (
                ({"expert_parallel_size": 2}, "expert_parallel_size=2: .* use expert_parallel_size=1"),
                ({"lock_free": True}, "lock_free: what all stages share"),
                (
                    {"tensor_parallel_size": 2, "tensor_parallel": {"sequence_parallel": True}},
                    r"TensorParallel\(.*\): stages send",
                ),
            )
        ),
        ({"timeout": timedelta(0)}, r"timeout=.* above zero"),
        ({"timeout": timedelta.max}, r"timeout=.* at most 3650 days"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AngelPTMStrategy(**settings)


WITHOUT_EFFECT = [
    ({"max_staleness": 4}, r"no setting 'max_staleness'; give lock_free=LockFree\(max_staleness=\.\.\.\)"),
    ({"warmup_steps": 4}, r"no setting 'warmup_steps'; give lock_free=LockFree\(warmup_steps=\.\.\.\)"),
    ({"key_mapping": {}}, r"no setting 'key_mapping'; give weights=Weights\(key_mapping=\.\.\.\)"),
    ({"sequence_parallel": True}, r"no setting 'sequence_parallel'; give tensor_parallel=TensorParallel\("),
    ({"weights_new": ["*.lora_*"]}, r"no setting 'weights_new'; give weights=Weights\(path=\.\.\., allow_missing"),
    (
        {"failed_save": "go_on"},
        r"no setting 'failed_save'; give checkpoints=Checkpoints\(on_failure='stop'\) \(or 'warn'",
    ),
    (
        {"tensor_parallel": {"sequence_parallel": True}},
        r"tensor_parallel=.*sequence_parallel=True.*\) with tensor_parallel_size=1: .* tensor_parallel_size of 2 or more",
    ),
    (
        {"micro_batches": 4},
        "micro_batches=4 and pipeline_schedule='1f1b' with pipeline_parallel_size=1: .* give a pipeline_p",
    ),
    ({"pipeline_schedule": "gpipe"}, "pipeline_schedule='gpipe' with pipeline_parallel_size=1"),
    (
        {"pipeline_blocks": [2, 2]},
        r"pipeline_blocks=\[2, 2\] with pipeline_parallel_size=1: .* leave pipeline_blocks out",
    ),
    ({"tensor_parallel": {"plan": {"a": 1}}}, "tensor_parallel=.* with tensor_parallel_size=1"),
    ({"weights": {"strict": False}}, r"weights=.* names no files; give Weights\(path='/a/folder'\)"),
    (
        {"disk_memory": "1GiB"},
        "disk_memory='1GiB' with disk_path=None and nothing offloaded to disk: .* give disk_path='/a/folder'",
    ),
    ({"disk_memory": 1 << 30, "offload_optimizer": "host"}, "disk_memory=1073741824 with disk_path=None"),
    (
        {"checkpoints": {"async_save": True}},
        r"Checkpoints\(async_save=True\) writes checkpoints from pages, .* use Checkpoints\(state_dict_type='sharded'",
    ),
    ({"lock_free": {"max_stale": 1}}, "lock_free has no setting 'max_stale'; did you mean 'max_staleness'"),
    ({"tuning": {"poison": True}}, "tuning has no setting 'poison'; it has staging_memory, "),
    ({"checkpoints": "sharded"}, r"give checkpoints=Checkpoints\(state_dict_type='sharded'\)"),
]


@pytest.mark.parametrize(("settings", "message"), WITHOUT_EFFECT)
def test_settings_that_would_have_no_effect(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AngelPTMStrategy(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"lock_free": LockFree(max_staleness=4, warmup_steps=10)},
        {"lock_free": {"predict_weights": False}},
        {"lock_free": True, "disk_memory": "1GiB"},
        {"offload_parameters": "disk", "disk_memory": "1GiB"},
        {"disk_path": "/disk", "disk_memory": "1GiB"},
        {"pipeline_parallel_size": 2, "micro_batches": 4, "pipeline_schedule": "gpipe", "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "micro_batches": 4, "pipeline_blocks": [3, 1]},
        {"tensor_parallel_size": 2, "tensor_parallel": {"sequence_parallel": True, "plan": {}}},
        {"weights": {"path": "w", "key_mapping": {"a": "b"}, "allow_missing": ["a"], "strict": False}},
        {"checkpoints": Checkpoints(state_dict_type="sharded", async_save=True)},
        {field.name: field.default for field in dataclasses.fields(Settings)},  # as a saved config says it
    ],
)
def test_settings_that_have_one(settings: dict[str, Any]) -> None:
    """The refusals above are no empty caution, and whoever writes a default has asked for nothing."""
    AngelPTMStrategy(**settings)


def test_sizes_in_words_and_numbers() -> None:
    for size in ("128KiB", "128 KiB", "128k", "0.125MiB", 131072, "131072", "131.072kB"):
        assert AngelPTMStrategy(page_size=size).settings.page_bytes == 131072


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("page_sise=1MiB", "page_sise"),
        ("page_size=1000", "--trainer.strategy.page_size=1000 is 1000 bytes; a page is a multiple of 4096"),
        ("host_memory=plenty", "--trainer.strategy.host_memory=plenty is not a size"),
        ("recompute=sometimes", "--trainer.strategy.recompute=sometimes is no known choice; use 'auto', 'none', 'all'"),
    ],
)
def test_settings_on_the_command_line(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", "--config", "gpt.yaml", "--seed_everything=false", f"--trainer.strategy.init_args.{option}"]
    with pytest.raises(SystemExit) as stop:
        command_line([*arguments, f"--trainer.default_root_dir={tmp_path}"])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_unit_class_that_the_model_does_not_have() -> None:
    message = refused(small(units=["Block", "Layer"]), Stack(), ConfigError)
    assert "units=['Block', 'Layer']: no module of the model has the class Layer" in message
    assert "its classes: Block, Linear, ModuleList" in message


def test_precisions_that_pages_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"precision='8-true' is not supported.*bf16-mixed, 16-mixed, bf16-true"):
        AngelPTMPrecision("8-true")  # type: ignore[arg-type]

    class Quantised(Precision):
        pass

    with pytest.raises(ConfigError, match=r"precision plugin Quantised .*pass precision=\.\.\. with one of bf16-mixed"):
        AngelPTMStrategy(precision_plugin=Quantised())


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_ram_too_small_for_one_tick() -> None:
    message = refused(small(host_memory="512KiB"), Stack(), CapacityError)
    # (up and down) x 64 x 256 weights in fp32, gathered, and their gradients: more than eight pages.
    assert re.search(r"tick \d+ \(blocks\.\d+ backward\) needs \d+ pages at once \(.* [KM]iB\)", message), message
    assert "pages may take 512 KiB of RAM; raise host_memory" in message
    assert "raise host_memory" in message and "device" not in message


def test_device_too_small_for_one_tick() -> None:
    message = refused(small(device_memory="256KiB", host_memory="1GiB"), Stack(), CapacityError)
    assert re.search(r"tick \d+ \(blocks\.\d+ (forward|backward)\) needs \d+ pages at once \(.* KiB\)", message), (
        message
    )
    assert "pages may take 256 KiB of the device tier" in message
    assert "raise device_memory or use smaller units" in message


def test_host_too_small_for_the_master_states() -> None:
    message = refused(
        small(device_memory="4MiB", offload_optimizer="host", host_memory="512KiB"), Stack(), CapacityError
    )
    assert "master states" in message
    assert re.search(r"blocks\.\d", message), message
    assert re.search(r"\d [KM]iB", message), message
    assert "host_memory" in message


def test_disk_memory_too_small(disk: Path) -> None:
    settings = {"offload_optimizer": "disk", "disk_path": disk, "disk_memory": "256KiB"}
    message = refused(small(**settings), Stack(), CapacityError)
    assert re.match(
        r"the master states of .*need .* left of 256 KiB; raise disk_memory, or give a disk_path with", message
    )


def test_the_smallest_module_is_one_unit_with_a_name(disk: Path) -> None:
    module = Stack()
    module.blocks = nn.ModuleList([nn.Linear(64, 256)])
    settings = {"offload_optimizer": "disk", "disk_path": disk, "disk_memory": "64KiB"}
    assert "the master states of root need 136 KiB" in refused(small(**settings), module, CapacityError)


def test_staging_too_small(disk: Path) -> None:
    settings = {"offload_optimizer": "disk", "disk_path": disk, "tuning": {"staging_memory": "64KiB"}}
    message = refused(small(**settings), Stack(), ConfigError, "bf16-mixed")
    # fp32 parameter and two moments, a 16-bit copy and a gradient.
    assert (
        "tuning=Tuning(staging_memory=...) is 64 KiB and one chunk of this optimizer's states takes 320 KiB" in message
    )
    assert "raise staging_memory or lower page_size" in message


def test_a_budget_that_is_just_enough_trains() -> None:
    """The refusals above are no empty caution: the bytes that they ask for do."""
    strategy = small(device_memory="1MiB", host_memory="64MiB", offload_parameters="host", offload_optimizer="host")
    module = Stack()
    trainer_with(strategy).fit(module, batches())
    assert module.steps == 2


# -- the disk at start-up ---------------------------------------------------------------------------------------------


class Files(FileOps):
    """A disk that says what it is told to say."""

    def __init__(self, *, open_errno: int = 0, free_bytes: int | None = None, fallocate_errno: int = 0) -> None:
        self._open_errno = open_errno
        self._free_bytes = free_bytes
        self._fallocate_errno = fallocate_errno

    def open(self, path: str, flags: int, mode: int) -> int:
        if self._open_errno:
            raise OSError(self._open_errno, os.strerror(self._open_errno))
        return super().open(path, flags, mode)

    def free_bytes(self, path: str) -> int:
        return super().free_bytes(path) if self._free_bytes is None else self._free_bytes

    def fallocate(self, fd: int, size_bytes: int, start: int = 0) -> None:
        if self._fallocate_errno:
            raise OSError(self._fallocate_errno, os.strerror(self._fallocate_errno))
        super().fallocate(fd, size_bytes, start)


def on(path: Path, files: FileOps | None = None) -> AngelPTMStrategy:
    strategy = small(offload_optimizer="disk", disk_path=path)
    strategy.file_ops = files
    return strategy


def test_a_disk_path_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused(on(tmp_path / "file" / "below"), Stack(), ConfigError)
    assert message == (
        f"disk_path {tmp_path / 'file' / 'below'} does not exist and cannot be made (Not a directory), so there "
        f"is no disk tier; create the folder, or give another disk_path"
    )


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ("nosuch/dir", "nosuch"),
        ("nosuch/one/two/three", "nosuch"),
        ("there/nosuch/dir/", "there/nosuch"),
        ("there/../nosuch/dir", "there/../nosuch"),
        ("dangling/dir", "dangling"),
        ("dangling/one/two", "dangling"),
        (("there", "nosuch/dir"), "nosuch"),
        (("nosuch/dir", "there"), "nosuch"),
        ("~/nosuch/dir", "there/nosuch"),
        ("There/dir", "There"),  # a file system that knows upper case
    ],
)
@pytest.mark.parametrize("settings", [{"offload_optimizer": "disk"}, {"page_size": "auto"}], ids=str)
def test_a_disk_path_in_a_folder_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | tuple[str, ...], first: str, settings: dict[str, Any]
) -> None:
    """A misspelt mount point would have pages fill the root file system."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    message = refused(AngelPTMStrategy(disk_path=given, **settings), Stack(), ConfigError)
    assert f"{tmp_path / first} is the first that is missing" in message and "give another disk_path" in message
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["dangling", "there"]


@pytest.mark.parametrize("given", ["spill", "there/spill", "./spill/", "there/../spill", "~/spill", "link/spill"])
@pytest.mark.parametrize(
    "settings", [{"offload_optimizer": "disk"}, {"page_size": "auto", "offload_optimizer": "disk"}], ids=str
)
def test_the_last_folder_of_a_disk_path_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.setattr(builder, "measured_rates", lambda *_: {})
    monkeypatch.setattr(builder, "smallest_saturating", lambda _: 64 << 10)
    trainer_with(AngelPTMStrategy(disk_path=given, **settings)).fit(Stack(), batches())
    (made,) = tmp_path.rglob("spill")
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_disk_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused(on(tmp_path / "file"), Stack(), ConfigError)
    assert message == f"disk_path {tmp_path / 'file'} is not a folder; give a folder on the disk to use"


def test_a_disk_path_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a config file no shell has replaced the tilde."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert AngelPTMStrategy(disk_path=["~/disk", "/other"]).settings.disk_paths == (tmp_path / "disk", Path("/other"))
    with pytest.raises(ConfigError, match=r"disk_path='~nobody-of-this-name/disk': .*; give the whole path"):
        AngelPTMStrategy(disk_path="~nobody-of-this-name/disk")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_disk_path_that_cannot_be_written(disk: Path, number: int) -> None:
    message = refused(on(disk, Files(open_errno=number)), Stack(), ConfigError)
    assert message == (
        f"disk_path {disk} cannot be written ({os.strerror(number)}), so there is no disk tier; give a folder that this user "
        f"may write to"
    )


def test_a_disk_that_is_too_small(disk: Path) -> None:
    with pytest.raises(PageIOError) as caught:
        trainer_with(on(disk, Files(free_bytes=100_000))).fit(Stack(), batches())
    error = caught.value
    assert (error.path, error.page, error.errno) == (str(disk), None, errno.ENOSPC)
    found = re.search(r"needs (\S+) MiB for pages and has 97.66 KiB free \(No space left on device\)", str(error))
    assert found is not None, error
    # Two fp32 moments of 4 x 33088 parameters, in whole pages.
    assert 4 * 33088 * 8 <= float(found.group(1)) * 2**20 <= 2 * 4 * 33088 * 8
    assert "free some space, lower disk_memory, or give more or other paths" in str(error)


def test_a_disk_that_is_full_after_all(disk: Path) -> None:
    """Another process took the space between the question and the reservation; a quota looks like this too."""
    strategy = on(disk, Files(fallocate_errno=errno.EDQUOT))
    message = refused(strategy, Stack(), PageIOError)
    assert "needs" in message
    assert os.strerror(errno.EDQUOT) in message


def test_a_disk_path_in_memory_is_allowed_with_a_warning(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()] if folder.is_dir() else []
    if not any(fields[1] == str(folder) and fields[2] == "tmpfs" for fields in mounts):
        pytest.skip("/dev/shm is no tmpfs here")
    before = set(folder.iterdir())
    module = Stack()
    with pytest.warns(UserWarning, match=r"disk_path /dev/shm is on tmpfs, which is memory: .*give a folder on an SSD"):
        trainer_with(on(folder)).fit(module, batches())
    assert module.steps == 2
    assert {path for path in set(folder.iterdir()) - before if "lightning_ptm" in path.name} == set()


def test_a_home_on_disk_without_a_path_goes_to_the_trainers_folder(tmp_path: Path) -> None:
    module = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_with(small(offload_optimizer="disk"), default_root_dir=tmp_path / "new").fit(module, batches())
    assert module.steps == 2
    assert list((tmp_path / "new").iterdir()) == []


# -- models and optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            r"torch\.optim\.lbfgs\.LBFGS\.step needs a closure .*Adam, AdamW",
        ),
    ],
)
def test_optimizers_that_are_not_element_wise(optimizer: Callable[[Any], Any], message: str) -> None:
    assert re.search(message, refused(small(offload_optimizer="disk"), Stack(optimizer), ConfigError), re.DOTALL)


def test_a_parameter_in_two_optimizers() -> None:
    def two(module: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(module.parameters(), lr=0.1),
            torch.optim.Adafactor(list(module.parameters())[:1], lr=0.1),
        ]

    module = Stack(two)
    module.automatic_optimization = False
    message = refused(small(offload_optimizer="disk"), module, ConfigError)
    assert "a parameter of shape (256, 64) is in two optimizers, of which torch.optim" in message
    assert "leave it in one" in message


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    module = Stack(lambda m: torch.optim.AdamW(m.blocks.parameters()))
    module.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    message = refused(small(), module, ConfigError)
    assert f"parameter odd is {dtype}; pages hold float32, bfloat16, float16 and float64" in message
    assert "buffer" in message
