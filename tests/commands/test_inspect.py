"""`lightning-ptm inspect`: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from lightning_ptm.cli import main
from lightning_ptm.storage.index import INDEX, read_index


def inspect(capsys: pytest.CaptureFixture[str], checkpoint: Path, *options: str) -> str:
    main(["inspect", str(checkpoint), *options])
    return capsys.readouterr().out


def facts(text: str) -> dict[str, str]:
    """The lines before the table, by their first word."""
    head = text.split("\n\n")[0]
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in head.splitlines()}


def table(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.split("\n\n")[1].splitlines()]


EMBEDDING = 97 * 64
BLOCK = 64 * 64 + 64
PARAMETERS = EMBEDDING + 2 * BLOCK + 65


def kib(size: int) -> str:
    return f"{size / 1024:.4g} KiB"


def test_a_sharded_checkpoint(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect(capsys, trained.sharded)
    said = facts(text)
    assert said["checkpoint"] == str(trained.sharded)
    files = len(read_index(trained.sharded).files)
    assert re.fullmatch(rf"sharded: {files} safetensors files, .* KiB, format version 3", said["kind"])
    assert re.fullmatch(r"lightning_ptm .* with Lightning 2\..*, by 1 rank with pages of 64 KiB", said["written by"])
    assert said["step"] == "2, in epoch 0"
    assert said["parameters"] == f"{PARAMETERS:,} in 7 tensors, {kib(4 * PARAMETERS)}"
    assert said["buffers"] == "3 in 2 tensors, 16 B"
    assert said["tied"] == "model.head.weight is model.embedding.weight"
    moment_size = kib(4 * PARAMETERS)
    assert said["optimizer"] == f"AdamW, for 7 parameters: step 28 B, exp_avg {moment_size}, exp_avg_sq {moment_size}"
    header, *rows = table(text)
    assert header == ["unit", "tensors", "elements", "dtype", "weights", "exp_avg", "exp_avg_sq"]
    block = ["2", f"{BLOCK:,}", "float32", *[kib(4 * BLOCK)] * 3]
    root = ["3", f"{EMBEDDING + 65:,}", "float32", *[kib(4 * (EMBEDDING + 65))] * 3]
    assert ["model.blocks.0", *block] in rows and ["model.blocks.1", *block] in rows
    assert ["(root)", *root] in rows and rows[-1] == ["(buffers)", "2", "3", "int64, float32", "16 B"]
    assert text.endswith(f"in {files + 1} files, all as written by one save\n")
    assert text.splitlines()[-1].startswith("verified: ")
    # Columns of a table begin, or end, in the same place.
    lines = text.split("\n\n")[1].splitlines()
    assert len({line.index(" float32") + 1 for line in lines[1:4]} | {lines[0].index("dtype")}) == 1


def test_a_full_checkpoint(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect(capsys, trained.full)
    said = facts(text)
    assert said["kind"].startswith("full: one file of Lightning, ")
    assert "by rank 0" in said["written by"]
    assert said["weights"] == f"{PARAMETERS + 3:,} in 9 tensors, {kib(4 * PARAMETERS + 16)}"
    name, slots = said["optimizer"].split(": ")
    assert name == "of an unknown class, for 7 parameters"
    moment_size = kib(4 * PARAMETERS)
    assert sorted(slots.split(", ")) == [f"exp_avg {moment_size}", f"exp_avg_sq {moment_size}", "step 28 B"]
    header, *rows = table(text)
    assert header == ["names", "tensors", "elements", "dtype", "weights"]
    assert ["model.blocks.1", "2", f"{BLOCK:,}", "float32", kib(4 * BLOCK)] in rows
    assert ["extra", "2", "65", "float32", "260 B"] in rows
    assert text.endswith("in 1 file, elements and Lightning's dictionary as written\n")


def test_without_reading_it_all(trained: Any, tmp_path: Path, capsys: Any, flip_bit: Any) -> None:
    saved = copytree(trained.sharded, tmp_path / "x.ckpt")
    file = read_index(saved).files[0]
    flip_bit(saved / file.name, file.size_bytes - 1)
    assert inspect(capsys, saved, "--verify=false").endswith("\nnot verified\n")


def test_a_damaged_one_is_described_and_ends_with_status_1(
    trained: Any, tmp_path: Path, capsys: Any, flip_bit: Any
) -> None:
    saved = copytree(trained.sharded, tmp_path / "x.ckpt")
    file = next(file for file in read_index(saved).files if file.kind == "exp_avg")
    flip_bit(saved / file.name, file.size_bytes - 1)
    with pytest.raises(SystemExit) as stop:
        inspect(capsys, saved)
    told = str(stop.value.code)  # a text: it goes to standard error, and the status is 1
    assert file.name in told and "their checksum differs" in told and "\n" not in told
    printed = capsys.readouterr().out
    assert "AdamW" in printed and "verified" not in printed
    full = tmp_path / "full.ckpt"
    full.write_bytes(trained.full.read_bytes())
    flip_bit(full, full.stat().st_size // 2)
    with pytest.raises(SystemExit, match="checksum differs"):
        inspect(capsys, full)


def test_weights_only_and_no_checksums(tmp_path: Path, capsys: Any) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"w": torch.ones(3), "_extra_state": 1}}, tmp_path / "x.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    text = inspect(capsys, tmp_path / "x.ckpt")
    said = facts(text)
    assert said["step"] == "unknown, in epoch unknown"
    assert said["optimizer"] == "none: only weights were saved"
    assert said["extra state"] == "_extra_state"
    assert text.endswith("it opens, and cannot be verified further: it was saved without checksums\n")


def test_another_kind_of_optimizer_state(tmp_path: Path, capsys: Any) -> None:
    torch.save({"state_dict": {"w": torch.ones(3)}, "optimizer_states": [{"x": 1}, None]}, tmp_path / "x.ckpt")
    said = facts(inspect(capsys, tmp_path / "x.ckpt"))
    assert said["optimizer"] == said["optimizer 1"] == "its state is not in the form of torch's optimizers"


def test_several_ranks(tmp_path: Path, capsys: Any, make_sharded: Any) -> None:
    saved = make_sharded(tmp_path / "x.ckpt", [{"w": torch.ones(10)}], ranks=2, cut=5)
    assert "by 2 ranks with pages of 64 KiB" in facts(inspect(capsys, saved))["written by"]


def test_what_is_none(trained: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        inspect(capsys, tmp_path / "missing")
    saved = copytree(trained.sharded, tmp_path / "x.ckpt")
    original = (saved / INDEX).read_bytes()
    content = json.loads(original)
    del content["checksum"]
    (saved / INDEX).write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(SystemExit, match=r"format version 99 .* update lightning_ptm"):
        inspect(capsys, saved)
    (saved / INDEX).write_bytes(original)
    (saved / "lightning.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"lightning\.pt is damaged, or of another save"):
        inspect(capsys, saved)
