"""Settings that messages and documents name exist, and fields of nested settings are named with their class."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner.tuning import Tuner
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import lightning_ptm
import lightning_ptm.models
from lightning_ptm import parallel
from lightning_ptm.config import Checkpoints, Debug, LockFree, Settings, TensorParallel, Tuning, Weights
from lightning_ptm.setting_hints import EARLIER
from lightning_ptm.trainer.strategy import AngelPTMStrategy

ROOT = Path(__file__).parents[1]
NESTED = (LockFree, Weights, Checkpoints, TensorParallel, Tuning, Debug)
FLAT = {field.name for field in dataclasses.fields(Settings)}
FIELDS = {cls.__name__: {field.name for field in dataclasses.fields(cls)} for cls in NESTED}
ONLY_NESTED = {name for names in FIELDS.values() for name in names} - FLAT
PLAIN_WORDS = {"path", "strict", "plan", "resume", "poison", "warmup_steps", "overlap"}
"""Fields whose names are also words of messages or arguments of other functions."""
REMOVED = set(EARLIER) - FLAT - ONLY_NESTED
ORDINARY = {"activations", "forecast"}
"""Names of former settings that are also words."""

OTHERS: tuple[Callable[..., Any], ...] = (
    L.Trainer.__init__,
    L.Trainer.fit,
    L.Trainer.save_checkpoint,
    L.LightningModule.load_from_checkpoint,
    L.LightningModule.log,
    lightnings.ModelCheckpoint.__init__,
    lightnings.ModelPruning.__init__,
    Tuner.scale_batch_size,
    MixedPrecision.__init__,
    torch.nn.Module.load_state_dict,
    torch.nn.Embedding.__init__,
    torch.Tensor.backward,
    torch.autograd.grad,
    torch.utils.checkpoint.checkpoint,
    torch.optim.AdamW.__init__,
    torch.optim.SGD.__init__,
    torch.optim.Rprop.__init__,
    torch.load,
    torch.nn.functional.cross_entropy,
    torch.utils.data.DataLoader.__init__,
    torch.nn.Module.requires_grad_,
    torch.nn.Module.state_dict,
    torch.optim.RMSprop.__init__,
    L.LightningModule.optimizers,
    LightningOptimizer.__init__,
    TensorBoardLogger.__init__,
    SLURMEnvironment.__init__,
    fully_shard,
    clip_grad_norm_,
    L.seed_everything,
    lightning_ptm.models.GPT.__init__,
    lightning_ptm.plan,
    AngelPTMStrategy.gathered,
    *(
        getattr(parallel, name)
        for name in ("ColwiseParallel", "RowwiseParallel", "Entering", "Partial", "Summed", "Part")
    ),
)
"""Functions of others whose arguments messages and documents name."""
ATTRIBUTES = {
    "min_8bit_size",
    "selected_adapters",
    "dist_sync_on_step",
    "minutes",
    "strict_loading",
    "computes",
    "fresh",
}
"""Arguments of bitsandbytes, PEFT, torchmetrics and timedelta, which have no signatures; an attribute; arguments of ours."""
KNOWN = FLAT | ATTRIBUTES | {name for each in OTHERS for name in inspect.signature(each).parameters}
ASSIGNED = re.compile(r"(?<![\w./\-$])([a-z][a-z0-9_]*)=(?=['\"\[(]|\{[^}]|True|False|None|\d|[A-Z]\w+\(|\.\.\.)")
REPORTED = re.compile(r"(?<![\w./\-$])([a-z][a-z0-9_]*)=\{\}")
"""A value that a message reports: the name is one of its file."""


@functools.cache
def strings(path: Path) -> tuple[tuple[int, str], ...]:
    """The strings of a file that are no docstrings, with their lines; values in f-strings are `{}`."""
    return tuple(_strings(path))


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def identifiers(path: Path) -> set[str]:
    """Names of variables, arguments and attributes in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


FILES = sorted(
    path
    for folder in ("lightning_ptm", "callbacks")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "setting_hints.py"
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def classes_around(text: str, at: int) -> set[str]:
    """Names of the calls that are open at a position of a text."""
    opened: list[str] = []
    for found in re.finditer(r"(\w*)\(|\)", text[:at]):
        if found[0] == ")":
            if opened:
                opened.pop()
        else:
            opened.append(found[1])
    return set(opened)


def wrong_names(text: str) -> list[str]:
    """`name=` of a text that no setting and no known function has."""
    found = []
    for match in ASSIGNED.finditer(text):
        name = match[1]
        around = classes_around(text, match.start())
        nested = any(name in FIELDS[cls] for cls in around & FIELDS.keys())
        if not nested and name not in KNOWN:
            found.append(f"{name}=")
    return found


def unnamed_fields(text: str) -> list[str]:
    """Fields of nested settings that a text names without their class."""
    return [
        name
        for name in ONLY_NESTED - PLAIN_WORDS
        if re.search(rf"(?<![\w.(]){name}(?!\w)", text)
        and not any(f"{cls}(" in text or f"{cls}." in text for cls, names in FIELDS.items() if name in names)
    ]


def test_messages_name_settings_that_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} in {text[:100]!r}"
        for path in FILES
        for line, text in strings(path)
        if " " in text.strip()
        for name in wrong_names(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_values_that_messages_report_have_the_names_of_their_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}="
        for path in FILES
        for line, text in strings(path)
        if " " in text.strip()
        for name in REPORTED.findall(text)
        if name not in KNOWN | identifiers(path) | ONLY_NESTED
    ]
    assert not wrong, "\n".join(wrong)


def test_messages_name_fields_with_their_class() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} in {text[:100]!r}"
        for path in FILES
        for line, text in strings(path)
        if " " in text.strip()
        for name in unnamed_fields(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_message_names_a_setting_that_was_removed() -> None:
    words = re.compile(rf"\b({'|'.join(sorted(REMOVED - ORDINARY))})\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]}"
        for path in FILES
        for line, text in strings(path)
        if " " in text.strip() and (found := words.search(text))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_pages_name_settings_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = [name for span in re.findall(r"`([^`\n]+)`", text) for name in wrong_names(span)]
    assert not {name.rstrip("=") for name in wrong} - ONLY_NESTED


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("use activations='keep'", ["activations="]),
        ("use tuning=Tuning(staging_memory='1MiB') or page_size='64KiB'", []),
        ("use tuning=Tuning(page_sise='1MiB')", ["page_sise="]),
        ("use async_save=True", ["async_save="]),
        ("use Checkpoints(state_dict_type='full', async_save=False)", []),
    ],
)
def test_wrong_names_are_found(text: str, names: list[str]) -> None:
    assert wrong_names(text) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("raise staging_memory", ["staging_memory"]),
        ("raise tuning=Tuning(staging_memory=...)", []),
        ("raise host_memory", []),
    ],
)
def test_fields_without_their_class_are_found(text: str, names: list[str]) -> None:
    assert unnamed_fields(text) == names
