"""Bars of long work: on a terminal with bytes and rate, quiet in a pipe, on other ranks and where the Trainer is quiet."""

from __future__ import annotations

import codecs
import dataclasses
import io
import os
import pty
import re
import sys
import termios
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit.checkpoint_runs import BATCHES, Full, fit, sharded
from kit.plain_loop import make_trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from safetensors.torch import save_file

from lightning_ptm import cli, progress
from lightning_ptm.progress import Progress
from lightning_ptm.storage.writer import SaveOps

AT_ONCE = Progress(after_s=0.0, every_s=0.0)
BAR = re.compile(
    r"(?P<what>[\w=.][\w=. ]*): +(?P<percent>\d+)%\|[^|]*\| (?P<done>\S+B)/(?P<total>\S+B) "
    r"\[[\d:]+<[\d:?]+, +(?P<rate>\S+)B/s\]"
)


class Terminal:
    """The other end of a pseudo-terminal: what was written to it; `on_text` is called with all of it when there is more."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self.text = ""
        self._on_text = on_text
        self._reading_end, writing_end = pty.openpty()
        termios.tcsetwinsize(writing_end, (24, 120))
        self.file = os.fdopen(writing_end, "w")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            try:
                more = os.read(self._reading_end, 65536)
            except OSError:  # how Linux says that nobody has the other end open
                return
            self.text += decoder.decode(more)
            self._on_text(self.text)

    def close(self) -> None:
        self.file.close()
        self._reader.join()
        os.close(self._reading_end)

    def bars(self) -> dict[str, list[re.Match[str]]]:
        """Returns what was shown of each bar, in order."""
        found: dict[str, list[re.Match[str]]] = {}
        for match in BAR.finditer(self.text):
            found.setdefault(match["what"].strip(), []).append(match)
        return found


@contextmanager
def on_terminal(on_text: Callable[[str], None] = lambda text: None) -> Iterator[Terminal]:
    """Inside, stderr is a terminal, to which nobody warns; its text is complete afterwards."""
    terminal = Terminal(on_text)
    kept, sys.stderr = sys.stderr, terminal.file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield terminal
    finally:
        sys.stderr = kept
        terminal.close()


def shows_bytes_and_rate(looks: Sequence[re.Match[str]]) -> bool:
    """Also that the last look is that of all bytes, or all but the padding."""
    rated = [look for look in looks if look["rate"] != "?"]
    return bool(rated) and int(looks[-1]["percent"]) >= 95


SEEN = {
    "sharded": (
        {"reserving disk", "weights into pages", "saving epoch=0.ckpt", "saving last.ckpt", "gathering weights"},
        {"checking epoch=0.ckpt", "loading weights", "loading optimizer states"},
    ),
    "full": (
        {
            "reserving disk",
            "weights into pages",
            "saving epoch=0.ckpt",
            "gathering weights",
            "gathering optimizer states",
        },
        {"loading weights", "loading optimizer states"},
    ),
}


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_run_shows_what_takes_long_with_bytes_and_rate(strategy_at, kind: str, tmp_path: Path) -> None:
    first, then = SEEN[kind]
    for resume, wanted in ((None, first), (tmp_path / "run" / "epoch=0.ckpt", first | then)):
        strategy = strategy_at("masters_on_disk", checkpoints={"state_dict_type": kind})
        strategy.progress = AT_ONCE
        with on_terminal() as terminal:
            fit(strategy, tmp_path / ("again" if resume else "run"), resume, enable_progress_bar=True)
        bars = terminal.bars()
        for what in wanted - ({"saving epoch=0.ckpt"} if resume else set()):
            assert shows_bytes_and_rate(bars.get(what, [])), f"{what}: {bars.keys()}"
    # No more than a line is in use, and it is empty in the end.
    assert terminal.text.endswith("\r") and "\n" not in terminal.text


def test_pretrained_weights_show_their_bytes(strategy_at, tmp_path: Path) -> None:
    module = Full()
    save_file({name: value.clone() for name, value in module.state_dict().items()}, tmp_path / "model.safetensors")
    strategy = strategy_at("ram", weights=tmp_path / "model.safetensors")
    strategy.progress = AT_ONCE
    with on_terminal() as terminal:
        make_trainer(strategy, enable_progress_bar=True).fit(module, BATCHES.loader())
    looks = terminal.bars()["weights into pages"]
    pages = sum(parameter.numel() * (6 if parameter.requires_grad else 2) for parameter in module.parameters())
    assert shows_bytes_and_rate(looks) and len(looks) > 2
    assert float(looks[-1]["total"].removesuffix("kB")) == pytest.approx(pages / 1e3, rel=0.05)


@pytest.mark.parametrize("quiet", ["pipe", "trainer", "bar", "rank", "short"])
def test_quiet(strategy_at, quiet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = sharded(strategy_at, "masters_on_disk")
    strategy.progress = Progress() if quiet == "short" else AT_ONCE
    if quiet == "rank":
        trainer = make_trainer(strategy, enable_progress_bar=True)
        strategy.parallel_devices = [torch.device("cpu")] * 2
        for rank, shown in (("0", True), ("1", False)):
            monkeypatch.setenv("RANK", rank)
            strategy.cluster_environment = TorchElasticEnvironment()
            assert strategy._progress_for(trainer).shown is shown
        return
    bars = [TQDMProgressBar(refresh_rate=0)] if quiet == "bar" else []
    piped = io.StringIO()
    with on_terminal() as terminal:
        if quiet == "pipe":
            sys.stderr = piped
        fit(strategy, tmp_path, enable_progress_bar=quiet != "trainer", callbacks=bars)
    assert terminal.bars() == {}
    assert terminal.text == piped.getvalue() == ""


def test_what_is_written_behind_training_is_shown_when_it_is_waited_for(strategy_at, tmp_path: Path) -> None:
    shown = threading.Event()

    class Slow(SaveOps):
        """A disk that writes nothing until somebody is told that they wait for it."""

        def fsync(self, fd: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                shown.wait(60)
            super().fsync(fd)

    strategy = sharded(strategy_at, "masters_on_disk", checkpoints={"async_save": True})
    strategy.progress, strategy.save_ops = AT_ONCE, Slow()
    with on_terminal(lambda text: shown.set() if "saving epoch=0.ckpt" in text else None) as terminal:
        fit(strategy, tmp_path, enable_progress_bar=True)
    assert shown.is_set()
    lines = [line.strip() for line in re.split(r"[\r\n]+", terminal.text) if "is written" in line]
    names = ["epoch=0.ckpt", "last.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert [line.split(" is written: ")[0] for line in lines] == [str(tmp_path / name) for name in names]
    assert all(re.fullmatch(r".* is written: \S+ GB in \S+ s, \S+ MB/s", line) for line in lines), lines


def test_export_shows_its_bytes(strategy_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": {"a": torch.ones(3 << 20)}}, tmp_path / "full.ckpt")
    monkeypatch.setattr(progress, "Progress", lambda: AT_ONCE)
    with on_terminal() as terminal:
        cli.export(tmp_path / "full.ckpt", tmp_path / "out")
    looks = terminal.bars()["export"]
    assert shows_bytes_and_rate(looks) and looks[-1]["total"] == "12.6MB"


def test_a_live_display_of_rich_keeps_its_lines() -> None:
    from rich.console import Console
    from rich.live import Live

    with on_terminal() as terminal:
        with Live("metrics", console=Console(file=terminal.file, force_terminal=True), auto_refresh=False) as live:
            assert sys.stderr is not terminal.file  # what goes to stderr becomes lines above the display
            before = len(terminal.text)
            with AT_ONCE.bar("saving", 100) as seen:
                seen(50)
                seen(50)
            live.refresh()
        terminal.file.flush()
    drawn = terminal.text[before:]
    looks = list(BAR.finditer(drawn))
    assert looks and shows_bytes_and_rate(looks)
    # Each look is on the line below, and goes back up.
    below = drawn[: drawn.rindex("\x1b[A") + 3]
    assert below.count("\n") == below.count("\x1b[A") > len(looks)


def test_parts_are_named_on_a_terminal_and_nowhere_else() -> None:
    with on_terminal() as terminal, AT_ONCE.parts("probe", 3) as begins:
        for part in ("disk", "copies", "matrices", "one too many"):
            begins(part)
    looks = re.findall(r"probe: +(\d+)%\|[^|]*\| (\d)/3 \[[\d:]+, (\w*)[^]]*\]", terminal.text)
    assert looks[-4:] == [("0", "0", "disk"), ("33", "1", "copies"), ("67", "2", "matrices"), ("100", "3", "one")]
    assert "\n" not in terminal.text and terminal.text.endswith("\r")
    with on_terminal() as terminal:
        piped = sys.stderr = io.StringIO()
        with AT_ONCE.parts("probe", 1) as begins:
            begins("disk")
    assert terminal.text == piped.getvalue() == ""


def test_a_bar_never_passes_its_end() -> None:
    with on_terminal() as terminal, AT_ONCE.bar("padded", 1000) as seen:
        for _ in range(3):
            seen(400)
    assert [look["percent"] for look in terminal.bars()["padded"]] == ["0", "40", "80", "100"]
    assert dataclasses.replace(AT_ONCE, shown=False) == Progress(shown=False, after_s=0, every_s=0)
