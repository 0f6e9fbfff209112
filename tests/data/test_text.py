"""TextBytes: the same text everywhere, in two splits that share no file, in windows that cover it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ptm.data import SpanCorruption, TextBytes
from lightning_ptm.data.text import Windows, decode, encode, find_files, split_files
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT
from lightning_ptm.models.base import LanguageModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 files of 100 bytes, each of one letter, in two folders; and some that must not be read."""
    for index in range(40):
        file = tmp_path / "text" / f"part{index % 2}" / f"{index:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([33 + index]) * 100)
    for skipped in ("part0/__pycache__/a.txt", "site-packages/b.txt", "part0/c.bin"):
        file = tmp_path / "text" / skipped
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"~" * 1000)
    return tmp_path / "text"


def ready(path: Path, **settings: object) -> TextBytes:
    data = TextBytes(str(path), **({"sequence_length": 16, "batch_size": 4} | settings))  # type: ignore[arg-type]
    data.setup("fit")
    return data


def test_splits_share_no_file_and_lose_none(folder: Path) -> None:
    files = find_files(folder, (".txt",))
    train, validation = split_files(files, root=folder, validation_fraction=0.1)
    assert len(validation) == 4
    assert set(train).isdisjoint(validation)
    assert sorted([*train, *validation]) == sorted(files)


def test_text_is_each_file_of_its_split_once(folder: Path) -> None:
    data = ready(folder)
    counts = torch.bincount(data.train_text, minlength=256) + torch.bincount(data.validation_text, minlength=256)
    assert counts[33 : 33 + 40].tolist() == [100] * 40
    assert counts.sum() == 40 * 101  # and a zero byte after each
    assert counts[ord("~")] == 0  # neither caches, nor installed packages, nor other suffixes
    assert not set(data.train_text.tolist()) & set(data.validation_text.tolist()) - {0}


def test_one_suffix_is_not_taken_for_three_letters(folder: Path) -> None:
    assert torch.equal(ready(folder, suffixes=".txt").train_text, ready(folder, suffixes=[".txt"]).train_text)


def test_texts_are_their_bytes_whether_they_are_utf8_or_not() -> None:
    given = "é\n".encode() + bytes(range(256))
    as_arguments_are_read = given.decode(errors="surrogateescape")
    for text in (given, as_arguments_are_read):
        assert encode(text).tolist() == list(given)
    assert decode(encode(given)) == given


def test_the_split_depends_on_names_inside_the_folder_only(folder: Path, tmp_path: Path) -> None:
    first = ready(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    torch.manual_seed(99)
    second = ready(moved)
    assert torch.equal(first.train_text, second.train_text)
    assert torch.equal(first.validation_text, second.validation_text)


def test_windows_cover_each_target_once_and_are_shifted_by_one() -> None:
    text = torch.arange(1, 102, dtype=torch.uint8)
    windows = Windows(text, 10)
    assert len(windows) == 10
    tokens, targets = zip(*(windows[index] for index in range(len(windows))), strict=True)
    assert torch.equal(torch.cat(tokens), text[:100].long())
    assert torch.equal(torch.cat(targets), text[1:].long())
    with pytest.raises(IndexError):
        windows[10]


@pytest.mark.parametrize(("numel", "count"), [(10, 0), (11, 1), (20, 1), (21, 2)])
def test_a_rest_shorter_than_a_window_is_left_out(numel: int, count: int) -> None:
    assert len(Windows(torch.zeros(numel, dtype=torch.uint8), 10)) == count


def test_training_order_follows_the_seed(folder: Path) -> None:
    data = ready(folder)

    def first_batch(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next(iter(data.train_dataloader()))[0]

    assert torch.equal(first_batch(1), first_batch(1))
    assert not torch.equal(first_batch(1), first_batch(2))
    assert first_batch(1).shape == (4, 16)
    assert first_batch(1).dtype == torch.int64


def test_validation_is_in_order(folder: Path) -> None:
    data = ready(folder)
    assert torch.equal(next(iter(data.val_dataloader()))[0].flatten(), data.validation_text[: 4 * 16].long())
    assert len(data.test_dataloader()) == len(data.predict_dataloader()) == len(data.val_dataloader())


def test_unigram_loss_of_a_uniform_text_is_log_of_its_alphabet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 400)
    assert ready(tmp_path / "a.txt").unigram_loss == pytest.approx(math.log(256), abs=1e-3)


def test_unigram_loss_is_finite_for_bytes_that_training_text_lacks(folder: Path) -> None:
    assert math.isfinite(ready(folder).unigram_loss)


def test_one_file_is_cut_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 900 + b"b" * 100)
    data = ready(tmp_path / "a.txt", validation_fraction=0.1)
    assert bytes(data.train_text.tolist()) == b"a" * 900
    assert bytes(data.validation_text.tolist()) == b"b" * 100


def test_the_standard_library_is_the_default() -> None:
    files = find_files(TextBytes()._root(), (".py",))
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert sum(path.stat().st_size for path in files) > 5_000_000


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*data\.init_args\.path"):
        ready(tmp_path / "nowhere")


def test_a_folder_without_text_names_the_suffixes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a" * 1000)
    with pytest.raises(ConfigError, match=r"\.md.*suffixes"):
        ready(tmp_path)


def test_a_folder_of_one_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    with pytest.raises(ConfigError, match="give that file itself"):
        ready(tmp_path)


@pytest.mark.parametrize("text", [b"", b"a" * 30])
def test_too_short_a_text_says_how_short(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(ConfigError, match="one window takes 17"):
        ready(tmp_path / "a.txt")


def test_fewer_windows_than_a_batch_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 400)
    data = ready(tmp_path / "a.txt", batch_size=100)
    with pytest.raises(ConfigError, match="a batch needs 100"):
        data.train_dataloader()


def test_impossible_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        TextBytes(batch_size=0)
    with pytest.raises(ConfigError, match=r"validation_fraction=1\.0"):
        TextBytes(validation_fraction=1.0)


# ---- what a model asks ----


def trainer(path: Path) -> L.Trainer:
    return L.Trainer(accelerator="cpu", fast_dev_run=1, default_root_dir=path, enable_progress_bar=False)


def small(**settings: Any) -> GPT:
    return GPT(**{"width": 8, "layers": 1, "heads": 1, "sequence_length": 16, "warmup_steps": 0} | settings)


class Letters(TextBytes):
    """26 tokens, in windows that are given two at a time."""

    vocab_size = 26

    def __init__(self, path: str) -> None:
        super().__init__(path, sequence_length=16)
        self.input_length = 32


class Wordless(LanguageModel):
    """Never says how many tokens it knows."""

    def __init__(self) -> None:
        rates: dict[str, Any] = {"learning_rate": 0.1, "warmup_steps": 0, "final_learning_rate_fraction": 0.0}
        super().__init__(**rates, betas=(0.9, 0.9), weight_decay=0.0, meta=False)


def asked(model: LanguageModel, data: TextBytes) -> None:
    """The comparison alone."""
    runs = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    runs._data_connector.attach_data(model, datamodule=data)
    model.setup("fit")


@pytest.mark.filterwarnings("ignore")
def test_tokens_that_do_not_occur_need_no_vector(folder: Path) -> None:
    asked(small(vocab_size=262, sequence_length=64), SpanCorruption(str(folder), sequence_length=64))
    with pytest.raises(ConfigError, match="uses 262 tokens and GPT knows 261"):
        asked(small(vocab_size=261, sequence_length=64), SpanCorruption(str(folder), sequence_length=64))


@pytest.mark.filterwarnings("ignore")
def test_a_data_module_and_a_model_of_ones_own_say_what_they_are(folder: Path) -> None:
    asked(small(vocab_size=26, sequence_length=32), Letters(str(folder)))
    with pytest.raises(ConfigError, match="sequences of 32 tokens and GPT reads 16"):
        asked(small(vocab_size=26), Letters(str(folder)))
    asked(Wordless(), TextBytes(str(folder), sequence_length=16))


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_compared_with_the_data_of_its_own_call(folder: Path) -> None:
    """A model is not compared with the data of an earlier call."""
    runs = trainer(folder.parent)
    runs.fit(small(), datamodule=TextBytes(str(folder), sequence_length=16, batch_size=4))
    pairs = DataLoader([(torch.zeros(8, dtype=torch.long),) * 2], batch_size=1)  # type: ignore[arg-type,var-annotated]
    runs.test(small(vocab_size=2), dataloaders=pairs, verbose=False)
    with pytest.raises(ConfigError, match="uses 256 tokens and GPT knows 2"):
        runs.test(small(vocab_size=2), datamodule=TextBytes(str(folder), sequence_length=16, batch_size=4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("longest", [16, 24])
def test_loggers_are_told_what_the_data_is_beside_the_model(folder: Path, tmp_path: Path, longest: int) -> None:
    """Also where both have something of one name, of which Lightning would refuse two values."""
    logger = CSVLogger(tmp_path, name="", version="run")
    runs = L.Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, logger=logger, enable_checkpointing=False)
    data = SpanCorruption(str(folder), sequence_length=16, batch_size=4, noise_density=0.25)
    model = small(vocab_size=300, sequence_length=longest)
    model.loss = lambda batch: model(batch[0]).mean()  # type: ignore[method-assign]
    runs.fit(model, datamodule=data)
    told = yaml.full_load((tmp_path / "run" / "hparams.yaml").read_text())
    assert (told["width"], told["batch_size"], told["noise_density"]) == (8, 4, 0.25)
    assert (told["sequence_length"], told.get("data/sequence_length")) == (longest, 16 if longest != 16 else None)
    assert data.hparams["sequence_length"] == 16
