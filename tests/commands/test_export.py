"""`lightning-ptm export`: what it writes, what loads it, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lightning_ptm.checkpoints import pretrained
from lightning_ptm.checkpoints.formats import open_checkpoint
from lightning_ptm.cli import main
from lightning_ptm.errors import CheckpointError, ConfigError
from lightning_ptm.storage import archive, verified
from lightning_ptm.storage.index import PARTIAL, read_index
from lightning_ptm.storage.tensors import read_layout
from lightning_ptm.storage.writer import SaveOps


def export(checkpoint: Path, out: Path, *options: str) -> None:
    main(["export", str(checkpoint), str(out), *options])


def refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, out: Path, *options: str) -> str:
    """Returns the text with which the command ends with status 1, having written nothing."""
    folder = out.parents[1] if out.parent.is_file() else out.parent
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as stop:
        export(checkpoint, out, *options)
    assert sorted(folder.iterdir()) == before
    # Python prints a text that sys.exit is given, and ends with status 1.
    assert isinstance(stop.value.code, str)
    return stop.value.code


TIED = "model.head.weight"


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_what_is_written_is_what_was_trained(trained: Any, tmp_path: Path, capsys: Any, kind: str) -> None:
    export(getattr(trained, kind), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == trained.weights.keys() - {TIED}
    for name, value in loaded.items():
        assert value.dtype is trained.weights[name].dtype and torch.equal(value, trained.weights[name]), name
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", TIED: "model.embedding.weight"}
    lines = capsys.readouterr().out.splitlines()
    size = sum(value.numel() * value.itemsize for value in loaded.values())
    assert lines[0] == f"tied: {TIED} is model.embedding.weight, and written under that name only"
    assert lines[1:] == [f"{tmp_path / 'out'}: 9 tensors, {size / 1024:.4g} KiB in 1 file, float32, int64"]


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("torch.float16", torch.float16)])
def test_other_dtypes_and_a_name_that_is_stripped(
    trained: Any, tmp_path: Path, capsys: Any, kind: str, name: str, dtype: torch.dtype
) -> None:
    export(getattr(trained, kind), tmp_path / "out", f"--dtype={name}", "--strip=model")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    below = {name.removeprefix("model."): value for name, value in trained.weights.items() if name.startswith("model.")}
    assert loaded.keys() == below.keys() - {"head.weight"}
    for name, value in loaded.items():
        wanted = below[name].to(dtype) if below[name].is_floating_point() else below[name]
        assert value.dtype is wanted.dtype and torch.equal(value, wanted), name
    assert "left out, not below model: extra.weight, extra.bias\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_shards_and_their_index(trained: Any, tmp_path: Path, kind: str) -> None:
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    (tmp_path / "link").symlink_to(tmp_path / "out")
    export(getattr(trained, kind), tmp_path / "link", "--shard-size", "13KB", "--dtype", "bf16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    names = sorted(entry.name for entry in (tmp_path / "out").glob("*.safetensors"))
    count = len(names)
    assert count > 2 and names == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    loaded = {name: load_file(tmp_path / "out" / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, tensors in loaded.items() for tensor in tensors}
    sizes = [sum(value.numel() * value.itemsize for value in tensors.values()) for tensors in loaded.values()]
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert all(size <= 13_000 for size in sizes)
    assert index["weight_map"].keys() == trained.weights.keys() - {TIED}
    for name, file in index["weight_map"].items():
        assert torch.equal(loaded[file][name], trained.weights[name].to(loaded[file][name].dtype)), name
    # A tensor that is larger than a file may be gets one of its own.
    export(getattr(trained, kind), tmp_path / "each", "--shard_size=1")
    assert len(list((tmp_path / "each").glob("*.safetensors"))) == 9


def test_a_transformers_model_loads_what_was_exported(tmp_path: Path, train_module: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )

    class Wrapper(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Wrapper()
    before = module.model.transformer.wte.weight.detach().clone()
    export(train_module(module, tmp_path / "run", "sharded"), tmp_path / "out", "--strip=model.", "--shard-size=100KB")
    config.save_pretrained(tmp_path / "out")
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert not torch.equal(loaded.transformer.wte.weight, before)
    assert loaded.state_dict().keys() == module.model.state_dict().keys()
    for name, value in module.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def full_file(path: Path, state: dict[str, Any]) -> Path:
    torch.save({"state_dict": state, "global_step": 1, "epoch": 0, "pytorch-lightning_version": "2.6.6"}, path)
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "PIECE_BYTES", 64)
    monkeypatch.setattr(verified, "PIECE_BYTES", 64)


def test_views_strides_and_shared_storage(tmp_path: Path, small_pieces: None) -> None:
    base = torch.randn(40, 6)
    state = {
        "whole": base,
        "same": base.view_as(base),
        "turned": base.t(),
        "rows": base[3:17],
        "column": base[:, 2],
        "expanded": torch.arange(3.0).expand(50, 3),
        "deep": torch.randn(2, 3, 5, 7).permute(3, 1, 0, 2),
        "none": torch.empty(0, 3),
        "also none": torch.empty(3, 0),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
    }
    export(full_file(tmp_path / "x.ckpt", state), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == state.keys() - {"same"}
    for name, value in loaded.items():
        assert value.shape == state[name].shape and torch.equal(value, state[name]), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranges_of_several_ranks_and_odd_dtypes(
    tmp_path: Path, small_pieces: None, make_sharded: Any, ranks: int
) -> None:
    # After an odd number of 16-bit elements, those of 32 bits do not start at a multiple of their size.
    first = {
        "half": torch.randn(501).bfloat16(),
        "single": torch.randn(33, 41),
        "flag": torch.ones(1, dtype=torch.bool),
    }
    second = {"double": torch.randn(300, dtype=torch.float64), "none": torch.empty(0, 2)}
    saved = make_sharded(tmp_path / "x.ckpt", [first, second], ranks, cut=37)
    export(saved, tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == {**first, **second}.keys()
    assert all(torch.equal(loaded[name], value) for name, value in {**first, **second}.items())
    layout = read_layout(tmp_path / "out" / "model.safetensors")
    assert all(stored.start % stored.dtype.itemsize == 0 for stored in layout.tensors)


def test_values_beyond_a_dtype_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"big": torch.tensor([1.0, -1e30, 1e30, float("inf")]), "small": torch.ones(2)}
    saved = full_file(tmp_path / "x.ckpt", state)
    export(saved, tmp_path / "out", "--dtype=fp16")
    assert "warning: 2 values of big are beyond fp16 and became infinite" in capsys.readouterr().out
    export(saved, tmp_path / "out2", "--dtype=bf16")
    assert "warning" not in capsys.readouterr().out


def test_state_that_is_no_tensor_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = full_file(tmp_path / "x.ckpt", {"w": torch.ones(2), "_extra_state": {"a": 1}})
    export(saved, tmp_path / "out")
    assert "left out, no tensors: _extra_state\n" in capsys.readouterr().out


def test_the_names_of_dtypes() -> None:
    for dtype, names in {
        torch.float32: ("fp32", "float32", "torch.float32"),
        torch.bfloat16: ("bf16", "BF16", "bfloat16", "torch.bfloat16"),
        torch.float16: ("fp16", "half", "float16"),
    }.items():
        assert all(pretrained.parse_dtype(name) is dtype for name in names)
    with pytest.raises(ConfigError, match=r"dtype='int8' .* use fp32, bf16 or fp16"):
        pretrained.parse_dtype("int8")


# -- memory -----------------------------------------------------------------------------------------------------------------

MODEL_BYTES = 320 << 20
ALLOWED_BYTES = 80 << 20
"""Above the interpreter and its libraries: the writer's buffers (24 MiB), a few pieces, and what is imported late."""


def test_memory_does_not_grow_with_the_model(tmp_path: Path, make_sharded: Any) -> None:
    tensors = {f"w{number}": torch.zeros(MODEL_BYTES // 16, dtype=torch.float32) for number in range(4)}
    make_sharded(tmp_path / "sharded", [{name: value} for name, value in tensors.items()], cut=1 << 24)
    full_file(tmp_path / "full", tensors)
    script = f"""
        from pathlib import Path
        from lightning_ptm.cli import export
        from lightning_ptm.checkpoints import full, pretrained, sharded  # what the command imports when it is called

        def memory():
            # Not VmHWM: a mapped file's pages count there too, which the system takes back.
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

        def watch(kind, pieces):
            def seen(opened, weight):
                for piece in pieces(opened, weight):
                    found.append(memory())
                    yield piece

            kind.pieces = seen

        before, found = memory(), []
        for kind in (full.OpenedFile, sharded.OpenedFolder):
            watch(kind, kind.pieces)
        for kind in ("sharded", "full"):
            export(Path({str(tmp_path)!r}) / kind, Path({str(tmp_path)!r}) / (kind + "_out"), dtype="bf16")
        print(max(found) - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < ALLOWED_BYTES, done.stdout
    for kind in ("sharded", "full"):
        assert (tmp_path / f"{kind}_out" / "model.safetensors").stat().st_size > MODEL_BYTES // 2


# -- what cannot be exported ------------------------------------------------------------------------------------------------


def test_things_that_are_no_checkpoint(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert "there is no checkpoint" in refused(capsys, tmp_path / "missing", out)
    (tmp_path / "text").write_text("hello")
    assert "is no file of torch.save, or was cut short" in refused(capsys, tmp_path / "text", out)
    (tmp_path / "folder").mkdir()
    assert "folder without index.json" in refused(capsys, tmp_path / "folder", out)
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("a", "b")
    assert "is a zip archive, and no file of torch.save" in refused(capsys, tmp_path / "zip", out)
    with zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", "b")
    assert "compressed records" in refused(capsys, tmp_path / "packed", out)
    torch.save({"w": torch.ones(2)}, tmp_path / "weights")
    assert "a dictionary with w..., and a checkpoint of Lightning" in refused(capsys, tmp_path / "weights", out)
    torch.save([1, 2], tmp_path / "list")
    assert "an object of list" in refused(capsys, tmp_path / "list", out)
    assert "has no weights" in refused(capsys, full_file(tmp_path / "empty", {}), out)
    (tmp_path / f"{PARTIAL}x").mkdir()
    assert "is incomplete: the process that wrote it ended" in refused(capsys, tmp_path / f"{PARTIAL}x", out)
    sparse = full_file(tmp_path / "sparse", {"w": torch.eye(3).to_sparse()})
    assert "w has layout torch.sparse_coo" in refused(capsys, sparse, out)
    complex_ = full_file(tmp_path / "complex", {"w": torch.ones(3, dtype=torch.complex128)})
    assert "complex128, which safetensors files cannot hold" in refused(capsys, complex_, out)


class Unknown:
    pass


def test_objects_need_trust(tmp_path: Path, capsys: Any) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": Unknown()}, tmp_path / "x.ckpt")
    assert "--weights_only=false" in refused(capsys, tmp_path / "x.ckpt", tmp_path / "out")
    export(tmp_path / "x.ckpt", tmp_path / "out", "--weights-only=false")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1, 1]


def test_places_and_options_that_cannot_work(trained: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "out"
    assert "is not empty" in refused(capsys, trained.sharded, tmp_path / "used")
    assert "is a file" in refused(capsys, trained.sharded, tmp_path / "file")
    assert "a file is where a folder has to be" in refused(capsys, trained.sharded, tmp_path / "file" / "out")
    assert "File name too long" in refused(capsys, trained.sharded, tmp_path / ("n" * 300))
    assert "is the working directory" in refused(capsys, trained.sharded, Path(".").absolute())
    assert (tmp_path / "file").read_text() == (tmp_path / "used" / "config.json").read_text() == "mine"
    assert "dtype='int8'" in refused(capsys, trained.sharded, out, "--dtype=int8")
    assert "shard_size='many' is not a size" in refused(capsys, trained.sharded, out, "--shard-size=many")
    assert "shard_size='0' has no room" in refused(capsys, trained.sharded, out, "--shard-size=0")
    message = refused(capsys, trained.sharded, out, "--strip=modle")
    assert "no name in" in message and "begins with 'modle.'" in message and "extra, model" in message


def test_damage_to_a_sharded_checkpoint_is_named(trained: Any, tmp_path: Path, capsys: Any, flip_bit: Any) -> None:
    saved = copytree(trained.sharded, tmp_path / "x.ckpt")
    file = next(file for file in read_index(saved).files if file.kind == "parameters" and file.unit)
    last = read_layout(saved / file.name).tensors[-1]
    flip_bit(saved / file.name, last.stop - 1)
    message = refused(capsys, saved, tmp_path / "out")
    assert file.name in message and f"to {last.stop}" in message and "their checksum differs" in message
    assert any(stored.name in message for stored in read_layout(saved / file.name).tensors)
    flip_bit(saved / file.name, last.stop - 1)
    # A buffer, which is in Lightning's own dictionary.
    scale = record_of(saved / "lightning.pt", trained.weights["model.scale"])
    flip_bit(saved / "lightning.pt", scale)
    message = refused(capsys, saved, tmp_path / "out")
    assert "lightning.pt is damaged, or of another save" in message
    flip_bit(saved / "lightning.pt", scale)
    (saved / file.name).unlink()
    assert f"{file.name} cannot be read: No such file" in refused(capsys, saved, tmp_path / "out")


def record_of(file: Path, tensor: Tensor) -> int:
    """Where in the file a tensor's elements begin."""
    return file.read_bytes().index(tensor.numpy().tobytes())


def test_damage_to_a_full_checkpoint_is_named(tmp_path: Path, capsys: Any, flip_bit: Any) -> None:
    whole = torch.randn(100, 7)
    for name, state in {"whole": {"w": whole}, "view": {"w": whole[:50]}, "turned": {"w": whole.t()}}.items():
        saved = full_file(tmp_path / name, state)
        flip_bit(saved, record_of(saved, whole) + 3)
        message = refused(capsys, saved, tmp_path / "out")
        assert f"{saved}: the 2800 bytes of {name}/data/0 are not those" in message and "checksum differs" in message
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "whole").write_bytes(content[: len(content) // 2])
    assert "was cut short" in refused(capsys, tmp_path / "whole", tmp_path / "out")


@pytest.mark.filterwarnings("ignore")  # zipfile and torch warn of some
def test_damage_anywhere_is_found_or_harmless(tmp_path: Path) -> None:
    weights = {"a": torch.randn(30, 4), "b": torch.randn(3).bfloat16()}
    good = full_file(tmp_path / "good", weights).read_bytes()
    chance = random.Random(0)
    path = tmp_path / "bad"
    found = 0
    for trial in range(600):
        raw = bytearray(good)
        place = chance.randrange(len(raw))
        if trial % 3 == 0:
            raw[place] ^= 1 << chance.randrange(8)
        elif trial % 3 == 1:
            raw[place : place + 8] = chance.randbytes(8)
        else:
            del raw[place:]
        path.write_bytes(raw)
        try:
            opened = open_checkpoint(path)
            opened.check()
            read = {weight.names[0]: list(opened.pieces(weight)) for weight in opened.weights}
        except CheckpointError:
            found += 1
            continue
        # It hit padding, or what says the same twice.
        assert read.keys() == weights.keys()
        assert all(torch.equal(torch.cat(read[name]), value.reshape(-1)) for name, value in weights.items())
    assert found > 300


def test_a_file_without_checksums_is_exported_with_a_word(tmp_path: Path, capsys: Any) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        saved = full_file(tmp_path / "x.ckpt", {"w": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(before)
    export(saved, tmp_path / "out")
    assert "was saved without checksums" in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1, 1, 1]


def test_a_file_of_another_byte_order(tmp_path: Path) -> None:
    full_file(tmp_path / "x", {"w": torch.arange(3.0)})
    with zipfile.ZipFile(tmp_path / "x") as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(tmp_path / "other", "w") as file:
        for name, content in records.items():
            file.writestr(name, b"big" if name.endswith("byteorder") else content)
    export(tmp_path / "other", tmp_path / "out")
    swapped = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert torch.equal(swapped, torch.from_numpy(torch.arange(3.0).numpy().byteswap()))


class FailingDisk(SaveOps):
    """A disk on which one call fails, after some that did not."""

    def __init__(self, call: str, number: int, after: int) -> None:
        self._call, self._number, self._left = call, number, after

    def _count(self, call: str) -> None:
        if call == self._call:
            self._left -= 1
            if self._left < 0:
                raise OSError(self._number, os.strerror(self._number))

    def fallocate(self, fd: int, size_bytes: int, start: int = 0) -> None:
        self._count("fallocate")
        super().fallocate(fd, size_bytes, start)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._count("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)


@pytest.mark.parametrize(
    ("call", "number", "after"),
    [
        ("fallocate", errno.ENOSPC, 0),
        ("fallocate", errno.ENOSPC, 2),
        ("pwritev", errno.ENOSPC, 6),
        ("fsync", errno.EIO, 1),
    ],
)
def test_a_disk_that_fails_leaves_nothing(trained: Any, tmp_path: Path, call: str, number: int, after: int) -> None:
    opened = open_checkpoint(trained.sharded)
    plan = pretrained.plan(opened, shard_size="20KB")
    disk = FailingDisk(call, number, after)
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        pretrained.write(opened, plan, tmp_path / "out", ops=disk)
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]
    # The same once more, on a disk that works: nothing of the first try is in the way.
    seen: list[int] = []
    assert pretrained.write(opened, plan, tmp_path / "out", seen=seen.append) == {}
    assert sum(seen) == plan.size_bytes
