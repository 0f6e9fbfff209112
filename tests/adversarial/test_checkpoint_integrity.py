"""Sharded checkpoints that are damaged, mixed from two saves, or not what they say: each is a CheckpointError with the path,
never another exception and never a load of something else."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.cli import main
from lightning_ptm.errors import CheckpointError
from lightning_ptm.sharded import load
from lightning_ptm.storage import index as folders
from lightning_ptm.storage.folder import Draft, link, remove_stale
from lightning_ptm.storage.index import INDEX, LIGHTNING, PARTIAL, read_index
from lightning_ptm.storage.tensors import lay_out, read_layout

WIDTH = 66


class Net(Linears):
    """Two units of the same shapes, so that their files can be exchanged; and a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, head=0, activation=torch.relu)
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=True)


def batches() -> DataLoader[Any]:
    items = list(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1)))
    return DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type]


def trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return quiet_trainer(
        AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, checkpoints={"state_dict_type": "sharded"}),
        default_root_dir=folder,
        callbacks=list(callbacks) or None,
        enable_checkpointing=bool(callbacks),
        **options,
    )


def run(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(folder, keep, max_steps=2).fit(Net(), batches())


@dataclass(frozen=True)
class Saved:
    """Checkpoints of steps 1 and 2 of a run, and of step 2 of another run."""

    one: Path
    two: Path
    other: Path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Not to be written to."""
    environment = dict(os.environ)
    base = tmp_path_factory.mktemp("saves")
    run(base / "run", 0)
    run(base / "else", 1)
    os.environ.clear()
    os.environ.update(environment)
    return Saved(base / "run" / "step=1.ckpt", base / "run" / "step=2.ckpt", base / "else" / "step=2.ckpt")


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(copytree(saved.two, tmp_path / "x.ckpt"))


def refused(path: Path, *names: str) -> str:
    """Loading fails, and names one of these files."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert any(str(path / name) in message for name in names), message
    return message


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def write_index(path: Path, form: int = folders.VERSION, /, **values: Any) -> None:
    """An index with these values and a checksum of its own, or of an older version without one."""
    content = {**json.loads((path / INDEX).read_bytes()), "version": form, **values}
    content.pop("checksum", None)
    if form < folders.SEALED_SINCE:
        content.pop("seals", None)
        (path / INDEX).write_text(json.dumps(content))
        return
    body = json.dumps(content, indent=1).encode()[2:]
    (path / INDEX).write_bytes(folders._sealing_line(body) + body)


# -- bytes ----------------------------------------------------------------------------------------------------------------


def flipped(path: Path, name: str, bits: Iterator[int]) -> Iterator[int]:
    """Yields after flipping each bit in turn; the file is restored in the end."""
    content = (path / name).read_bytes()
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(damaged)
        yield bit
    (path / name).write_bytes(content)


def test_any_bit_of_any_file(copy: Path) -> None:
    draw = random.Random(0)
    for name in files(copy):
        size = 8 * (copy / name).stat().st_size
        for _ in flipped(copy, name, iter([0, size - 1, *(draw.randrange(size) for _ in range(6))])):
            refused(copy, name)
    load(copy)


@pytest.mark.slow
def test_every_byte_of_the_small_files(copy: Path) -> None:
    draw = random.Random(1)
    for name in files(copy):
        size = min((copy / name).stat().st_size, 12_000)
        for _ in flipped(copy, name, (8 * byte + draw.randrange(8) for byte in range(size))):
            refused(copy, name)


@pytest.mark.parametrize("keep", [0, 1, 7, 0.5, -1], ids=str)
def test_any_file_cut_short(copy: Path, keep: float) -> None:
    for name in files(copy):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: int(len(content) * keep) if keep == 0.5 else int(keep)])
        refused(copy, name)
        (copy / name).write_bytes(content)


def test_any_file_too_long_or_gone_or_no_file(copy: Path, tmp_path: Path) -> None:
    for name in files(copy):
        content = (copy / name).read_bytes()
        for more in (b"\0", b"\n", content):
            (copy / name).write_bytes(content + more)
            refused(copy, name)
        (copy / name).unlink()
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)
        (copy / name).mkdir()
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)
        (copy / name).rmdir()
        os.mkfifo(copy / name)  # opening it would wait for ever
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)
        (copy / name).unlink()
        (copy / name).symlink_to(name)
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)
        (copy / name).unlink()
        (copy / name).write_bytes(content)
    load(copy)


# -- two saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["one", "other"])
def test_any_file_of_another_save(saved: Saved, copy: Path, source: str) -> None:
    theirs = getattr(saved, source)
    for name in files(copy):
        content = (copy / name).read_bytes()
        if content == (theirs / name).read_bytes():
            continue  # nothing is wrong then
        (copy / name).write_bytes((theirs / name).read_bytes())
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)
        (copy / name).write_bytes(content)
    load(copy)


def test_all_files_but_one_of_another_save(saved: Saved, copy: Path) -> None:
    for name in files(copy):
        mixed = Path(copytree(saved.one, copy.parent / "mixed"))
        (mixed / name).write_bytes((copy / name).read_bytes())
        if (saved.one / name).read_bytes() != (copy / name).read_bytes():
            with pytest.raises(CheckpointError, match=str(mixed)):
                load(mixed)
        for each in mixed.iterdir():
            each.unlink()
        mixed.rmdir()


def test_files_exchanged(copy: Path) -> None:
    names = files(copy)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            contents = (copy / first).read_bytes(), (copy / second).read_bytes()
            if contents[0] == contents[1]:
                continue
            (copy / first).write_bytes(contents[1])
            (copy / second).write_bytes(contents[0])
            with pytest.raises(CheckpointError, match=str(copy)):
                load(copy)
            (copy / first).write_bytes(contents[0])
            (copy / second).write_bytes(contents[1])


def test_fit_and_validate_refuse_it_before_anything_is_loaded(saved: Saved, copy: Path, tmp_path: Path) -> None:
    (copy / LIGHTNING).write_bytes((saved.one / LIGHTNING).read_bytes())
    torch.manual_seed(0)
    module = Net()
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(CheckpointError, match=r"lightning\.pt is damaged, or of another save than index\.json"):
        trainer(tmp_path, max_steps=3).fit(module, batches(), ckpt_path=str(copy))
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def test_weights_to_start_from(saved: Saved, copy: Path, tmp_path: Path) -> None:
    (copy / LIGHTNING).write_bytes((saved.one / LIGHTNING).read_bytes())
    strategy = AngelPTMStrategy(page_size="64KiB", weights=str(copy))
    fitter = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(CheckpointError, match=r"lightning\.pt is damaged, or of another save"):
        fitter.fit(Net(), batches())


# -- older formats ----------------------------------------------------------------------------------------------------------


def test_the_second_format_loads(copy: Path, saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    write_index(copy, 2)
    old, new = load(copy), load(saved.two)
    assert old["state_dict"].keys() == new["state_dict"].keys()
    assert all(torch.equal(old["state_dict"][name], value) for name, value in new["state_dict"].items())
    main(["inspect", str(copy)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "elements as written; format version 2 has no checksum of names" in last
    main(["inspect", str(saved.two)])
    assert capsys.readouterr().out.splitlines()[-1].endswith("all as written by one save")


def in_the_second_format(change: Callable[[Path, Saved], None]) -> Any:
    return pytest.param(change, id=change.__name__)


def another_steps_dictionary(path: Path, saved: Saved) -> None:
    (path / LIGHTNING).write_bytes((saved.one / LIGHTNING).read_bytes())


def a_slot_renamed(path: Path, saved: Saved) -> None:
    values = json.loads((path / INDEX).read_bytes())
    for file in values["files"]:
        file["kind"] = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(file["kind"], file["kind"])
    write_index(path, 2, files=values["files"])


def units_exchanged(path: Path, saved: Saved) -> None:
    values = json.loads((path / INDEX).read_bytes())
    units = {"blocks.0": "blocks.1", "blocks.1": "blocks.0"}
    for file in values["files"]:
        file["unit"] = units.get(file["unit"], file["unit"])
    write_index(path, 2, files=values["files"])


def a_bit_in_a_buffer(path: Path, saved: Saved) -> None:
    content = bytearray((path / LIGHTNING).read_bytes())
    place = content.index(torch.full((3,), 2.0).numpy().tobytes())
    content[place] ^= 1
    (path / LIGHTNING).write_bytes(content)


def a_name_of_nobody_in_a_slot(path: Path, saved: Saved) -> None:
    name = next(file.name for file in read_index(path).files if file.kind == "exp_avg")
    content = (path / name).read_bytes()
    assert b".weight" in content
    (path / name).write_bytes(content.replace(b".weight", b".weighd", 1))


def a_slot_that_is_half_as_wide(path: Path, saved: Saved) -> None:
    name = next(file.name for file in read_index(path).files if file.kind == "exp_avg")
    content = (path / name).read_bytes()
    shape = f"[{WIDTH},{WIDTH}]".encode()
    assert shape in content
    (path / name).write_bytes(
        content.replace(shape, f"[{WIDTH * 2},{WIDTH // 2}]".encode().ljust(len(shape)), 1)[: len(content)]
    )


def no_optimizers_state(path: Path, saved: Saved) -> None:
    dictionary = torch.load(path / LIGHTNING, weights_only=True)
    torch.save({**dictionary, "optimizer_states": []}, path / LIGHTNING)


def an_optimizers_state_of_another_form(path: Path, saved: Saved) -> None:
    dictionary = torch.load(path / LIGHTNING, weights_only=True)
    torch.save({**dictionary, "optimizer_states": [{"state": [1, 2]}]}, path / LIGHTNING)


def no_dictionary_at_all(path: Path, saved: Saved) -> None:
    torch.save([1, 2, 3], path / LIGHTNING)


def a_state_dict_of_another_form(path: Path, saved: Saved) -> None:
    dictionary = torch.load(path / LIGHTNING, weights_only=True)
    torch.save({**dictionary, "state_dict": 3}, path / LIGHTNING)


@pytest.mark.parametrize(
    "change",
    list(
        map(
            in_the_second_format,
            [
                another_steps_dictionary,
                a_slot_renamed,
                units_exchanged,
                a_bit_in_a_buffer,
                a_name_of_nobody_in_a_slot,
                a_slot_that_is_half_as_wide,
                no_optimizers_state,
                an_optimizers_state_of_another_form,
                no_dictionary_at_all,
                a_state_dict_of_another_form,
            ],
        )
    ),
)
def test_what_can_be_known_of_the_second_format(
    copy: Path, saved: Saved, change: Callable[[Path, Saved], None]
) -> None:
    write_index(copy, 2)
    change(copy, saved)
    with pytest.raises(CheckpointError, match=str(copy)):
        load(copy)


# -- absurd JSON ------------------------------------------------------------------------------------------------------------


HUGE = 10**30
ABSURD: list[Any] = [
    None,
    True,
    -1,
    HUGE,
    1.5,
    "3",
    "\ud800",
    [],
    [[]],
    [None],
    ["x"],
    {},
    {"x": 1},
    {"name": [], "size_bytes": {}},
    [{"name": "x.safetensors"}],
]


@pytest.mark.parametrize("version", [2, 3])
def test_an_index_of_absurd_values(copy: Path, version: int) -> None:
    original = (copy / INDEX).read_bytes()
    for key, value in json.loads(original).items():
        if key == "checksum" or (key == "seals" and version == 2):
            continue
        for absurd in ABSURD:
            if (key == "writer" and absurd == "3") or (not absurd and type(absurd) is type(value) and key != "files"):
                continue  # it could be so
            (copy / INDEX).write_bytes(original)
            write_index(copy, version, **{key: absurd})
            with pytest.raises(CheckpointError, match=str(copy)):
                load(copy)
        (copy / INDEX).write_bytes(original)
        content = json.loads(original)
        del content[key]
        (copy / INDEX).write_text(json.dumps(content))
        refused(copy, INDEX)


TEXTS = {
    "nested": b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000,
    "a number of a million digits": b'{"format": ' + b"9" * 1_000_000 + b"}",
    "twice": b'{"format": "a", "format": "lightning_ptm sharded checkpoint"}',
    "nan": b'{"version": NaN}',
    "infinite": b'{"version": 1e999}',
    "utf-16": '{"version": 2}'.encode("utf-16"),
    "no utf-8": b'{"version": "\xff"}',
    "half a character": b'{"format": "lightning_ptm sharded checkpoint", "version": "\\ud800"}',
    "a list": b"[1]",
    "nothing": b"",
    "null": b"null",
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_texts_that_are_no_index_no_ranges_and_no_header(copy: Path, text: bytes) -> None:
    original = (copy / INDEX).read_bytes()
    (copy / INDEX).write_bytes(text)
    refused(copy, INDEX)
    (copy / INDEX).write_bytes(original)
    write_index(copy, 2)  # whose lists and headers nothing seals
    ranges = (copy / "ranges-00000.json").read_bytes()
    (copy / "ranges-00000.json").write_bytes(text)
    refused(copy, "ranges-00000.json")
    (copy / "ranges-00000.json").write_bytes(ranges)
    name = read_index(copy).files[0].name
    size = (copy / name).stat().st_size
    content = len(text).to_bytes(8, "little") + text
    (copy / name).write_bytes(content.ljust(size, b"\0"))
    refused(copy, name)


@pytest.mark.parametrize("change", [1, -1, None, "0", -(10**6), HUGE, 0.5, [], True], ids=str)
def test_ranges_of_absurd_values(copy: Path, change: Any) -> None:
    write_index(copy, 2)
    path = copy / "ranges-00000.json"
    rows = json.loads(path.read_bytes())
    for column in range(4):
        value = rows[0][column] + change if type(change) is int and column else change
        path.write_text(json.dumps([[*rows[0][:column], value, *rows[0][column + 1 :]], *rows[1:]]))
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)
    for absurd in (
        rows[1:],
        [*rows, rows[0]],
        [rows[0][:3], *rows[1:]],
        [[*rows[0], 1], *rows[1:]],
        [5],
        {"a": rows},
        rows[0],
    ):
        path.write_text(json.dumps(absurd))
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [HUGE, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, HUGE]},
        {"dtype": "F32", "shape": [2]},
        ["F32", [2], [0, 8]],
        "w",
    ],
    ids=lambda entry: str(entry)[:60],
)
def test_headers_of_absurd_values(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_layout(path)


def test_a_header_that_names_a_tensor_twice(tmp_path: Path) -> None:
    layout = lay_out([("a", torch.float32, (2,)), ("b", torch.float32, (2,))])
    path = tmp_path / "x.safetensors"
    path.write_bytes(layout.header.replace(b'"b"', b'"a"') + bytes(16))
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        read_layout(path)


@pytest.mark.parametrize(
    "name",
    [
        "../two.safetensors",
        "/etc/two.safetensors",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "index.json",
        "a\0.safetensors",
        "x" * 300 + ".safetensors",
    ],
)
def test_names_outside_of_the_folder(copy: Path, name: str) -> None:
    values = json.loads((copy / INDEX).read_bytes())
    old = values["files"][0]["name"]
    values["files"][0]["name"] = name
    values["seals"][name] = values["seals"].pop(old)
    ranges = (copy / "ranges-00000.json").read_text().replace(old, name.replace("\0", "\\u0000"))
    (copy / "ranges-00000.json").write_text(ranges)
    values["seals"]["ranges-00000.json"] = vars_of(folders.Seal.of(ranges.encode()))
    (copy.parent / "two.safetensors").write_bytes((copy / old).read_bytes())
    for version in (2, 3):
        write_index(copy, version, files=values["files"], seals=values["seals"])
        with pytest.raises(CheckpointError, match=str(copy)):
            load(copy)


def vars_of(seal: folders.Seal) -> dict[str, int]:
    return {"size_bytes": seal.size_bytes, "checksum": seal.checksum}


# -- what is removed, moved and replaced ----------------------------------------------------------------------------------


def made_old(path: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago), follow_symlinks=False)


def test_nothing_of_others_is_removed_or_moved(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    names = [
        f"{PARTIAL}of-mine",
        f"{PARTIAL}0123456789abc",
        f"{PARTIAL}0123456789AB",
        ".partial-results",
        ".partial-0123456789ab",
        ".replaced-a",
        ".lightning_ptm-replaced-a",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    for name in (".partial-file", ".replaced-file", f"{PARTIAL}file", ".lightning_ptm-replaced-file"):
        (tmp_path / name).write_text("a file")
    for name in (".partial-link", ".replaced-link", f"{PARTIAL}link", ".lightning_ptm-replaced-link"):
        (tmp_path / name).symlink_to(mine)
    (tmp_path / f"{PARTIAL}aaaaaaaaaaaa").symlink_to(mine)  # a link that was never given its name: ours
    os.mkfifo(tmp_path / f"{PARTIAL}cccccccccccc")
    for entry in tmp_path.iterdir():
        made_old(entry)
    before = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    remove_stale(tmp_path)
    after = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert set(before) - set(after) == {f"{PARTIAL}aaaaaaaaaaaa"} and set(after) <= set(before)
    assert (mine / "thesis.tex").read_text() == "years"


def test_a_link_that_is_just_being_made_stays(tmp_path: Path) -> None:
    (tmp_path / f"{PARTIAL}bbbbbbbbbbbb").symlink_to("nothing")
    remove_stale(tmp_path)
    assert (tmp_path / f"{PARTIAL}bbbbbbbbbbbb").is_symlink()


def test_a_folder_of_other_things_is_not_replaced_by_a_checkpoint(saved: Saved, tmp_path: Path) -> None:
    mine = tmp_path / "project"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match="a folder with other files than a checkpoint's"):
        Draft(mine)
    with pytest.raises(CheckpointError, match="a folder with other files than a checkpoint's"):
        link(saved.two, mine)
    fitter = trainer(tmp_path, max_steps=1)
    fitter.fit(Net(), batches())
    with pytest.raises(CheckpointError, match="a folder with other files than a checkpoint's"):
        fitter.save_checkpoint(mine)
    assert (mine / "thesis.tex").read_text() == "years" and len(files(mine)) == 1
    fitter.save_checkpoint(tmp_path / "empty.ckpt")
    assert load(tmp_path / "empty.ckpt")["global_step"] == 1


@pytest.mark.parametrize("damage", ["none", "index", "no magic", "a file of the user's"])
def test_a_damaged_checkpoint_is_replaced(copy: Path, tmp_path: Path, damage: str) -> None:
    if damage == "index":
        (copy / INDEX).write_bytes((copy / INDEX).read_bytes()[:200])
    elif damage == "no magic":
        (copy / INDEX).write_bytes(b"")
    elif damage == "a file of the user's":
        (copy / "README").write_text("the best one")
    fitter = trainer(tmp_path, max_steps=1)
    fitter.fit(Net(), batches())
    fitter.save_checkpoint(copy)
    assert load(copy)["global_step"] == 1


def test_a_slot_with_a_name_of_any_kind(tmp_path: Path) -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        if not state:
                            state["a/../b"] = torch.zeros_like(parameter)
                        state["a/../b"].add_(parameter.grad)
                        parameter.data.add_(state["a/../b"], alpha=-group["lr"])
            return loss

    class Module(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Strange(self.parameters(), lr=1e-2)

    fitter = trainer(tmp_path, max_steps=1)
    fitter.fit(Module(), batches())
    fitter.save_checkpoint(tmp_path / "x.ckpt")
    state = load(tmp_path / "x.ckpt")["optimizer_states"][0]["state"]
    assert set(state[0]) == {"a/../b"} and state[0]["a/../b"].shape == (WIDTH, WIDTH)
    again = trainer(tmp_path, max_steps=2)
    again.fit(Module(), batches(), ckpt_path=str(tmp_path / "x.ckpt"))
    assert again.global_step == 2
