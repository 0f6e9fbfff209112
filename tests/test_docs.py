"""The README and the pages of docs/: their code runs, their commands have options that exist, their links lead somewhere.

Blocks of a page run in order in one empty folder, Python in one namespace (`MyModule` and `my_data` are in it, and `/nvme` is
a folder). A comment above a block says otherwise: `<!-- file: NAME -->` writes it to a file, `<!-- parsed: why -->` has the
options of its commands checked and no more, and so has `<!-- not run: why -->`, which NOT_RUN lists; `<!-- ci:NAME -->` is
what .ci/run runs. Whatever else a comment says is a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm import AngelPTMStrategy, callbacks
from lightning_ptm.cli import COMMANDS, main
from lightning_ptm.config import Checkpoints, Debug, LockFree, Settings, TensorParallel, Tuning, Weights
from lightning_ptm.setting_hints import SETTING_HINTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
README_WORDS = 1200
CODE_WIDTH = 104
"""Characters of a line of code that the site shows in a window of 1280 pixels, without scrolling (docs/_static/site.css)."""
NESTED_SETTINGS = (LockFree, Weights, Checkpoints, TensorParallel, Tuning, Debug)

NOT_RUN = {
    "launching.md": ["needs two machines", "needs a SLURM cluster", "needs a Kubernetes cluster"],
    "measured.md": ["measures for minutes, and needs a machine on which nothing else runs"],
}
"""Why blocks are neither run nor, but for our own commands, looked at."""

IMPORTS = {"lora.md": ("peft", "transformers")}
"""Packages of other people that a page's code imports. Where one is missing, the page's code does not run."""

LANGUAGES = {"python", "bash", "yaml", "text"}
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
OURS = re.compile(r"(?:^|[\s(])(?:lightning-ptm|python main\.py) ([^\n>|]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, the line of its first, and what the comment above it says."""

    language: str
    code: str
    line: int
    mark: str = ""
    said: str = ""


def blocks_of(page: Path) -> list[Block]:
    """All of them but MyST's own directives, which are the site's."""
    text = page.read_text()
    found = []
    for each in BLOCK.finditer(text):
        mark, _, said = (each["mark"] or "").partition(":")
        line = text.count("\n", 0, each.start("code")) + 1
        found.append(Block(each["language"], each["code"], line, mark, said.strip()))
    fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(found), f"{page.name}: a fence is left open, or not at the beginning of its line"
    return [block for block in found if not block.language.startswith("{")]


def file_of(page: Path, name: str) -> Block:
    """The block that a page writes to the file of this name."""
    (found,) = (block for block in blocks_of(page) if (block.mark, block.said) == ("file", name))
    return found


INCLUDED = ["ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "benchmarks/gpu.md"]
ON_SITE = [*PAGES, *DOCS.glob("design/*.md"), *(ROOT / name for name in INCLUDED)]


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


WITH_CODE = [page for page in PAGES if any(block.language != "text" for block in blocks_of(page))]


# -- what a page is made of -----------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_is_looked_at_or_says_why_not(page: Path) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, where
        assert block.mark in ("", "ci", "file", "parsed", "not run"), where
        assert bool(block.mark) == bool(block.said), where
    assert [block.said for block in blocks if block.mark == "not run"] == NOT_RUN.get(page.name, [])


@pytest.mark.parametrize("page", ON_SITE, ids=names(ON_SITE))
def test_no_line_of_code_is_cut_off(page: Path) -> None:
    long = [
        f"{page.name}:{block.line}: {line}"
        for block in blocks_of(page)
        for line in block.code.splitlines()
        if len(line) > CODE_WIDTH
    ]
    assert not long


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as sites that show Markdown make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.is_file(), f"{page.name}: {path}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def test_every_page_is_in_the_site() -> None:
    listed = set(
        re.findall(r"^(\w+)$", (DOCS / "index.md").read_text() + (DOCS / "measured.md").read_text(), re.MULTILINE)
    )
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} == listed


# -- tables of settings -----------------------------------------------------------------------------------------------------


def settings_in(page: Path) -> dict[str, str]:
    """Rows of a table of settings: the names, and the default as it is written."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\S+) \|", page.read_text(), re.MULTILINE)
    return {name.strip("`"): default for each, default in rows for name in each.split(", ")}


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "settings.md"], ids=["README", "settings"])
def test_tables_of_settings_have_the_defaults(page: Path) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    written = settings_in(page)
    if page.stem == "settings":
        assert written.keys() == fields.keys()
    else:
        assert len(written) == 6
    for name, default in written.items():
        default_is = fields[name]
        nested = dataclasses.is_dataclass(default_is)
        shown = "none" if default_is is None else f"`{type(default_is).__name__}()`" if nested else f"`{default_is}`"
        assert default == shown, name


def test_the_table_of_nested_settings_has_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (\S+) \|", (DOCS / "settings.md").read_text(), re.MULTILINE)
    fields = {
        f"{cls.__name__}.{field.name}": field.default for cls in NESTED_SETTINGS for field in dataclasses.fields(cls)
    }
    words = {dataclasses.MISSING: "required", None: "none"}
    assert dict(rows) == {name: words.get(default, f"`{default}`") for name, default in fields.items()}


def test_every_setting_hint_has_a_row() -> None:
    text = (DOCS / "moving.md").read_text()
    for habit in SETTING_HINTS:
        assert any(f"`{name}`" in text for name in habit.names), habit.names


# -- what is generated from the code --------------------------------------------------------------------------------------


def script_of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


def test_the_page_of_errors_has_the_texts_of_the_code() -> None:
    script = script_of_docs("troubleshooting_page")
    text = script.page()
    no_cure = [line for line in text.splitlines() if line.endswith("|  |")]
    assert not no_cure, "say in the text, or in CURES, what to do"
    assert text == script.PAGE.read_text(), "the page is out of date: run python docs/troubleshooting_page.py"


def test_the_reference_has_all_public_classes_and_commands() -> None:
    script = script_of_docs("reference_page")
    text = script.page()
    described = {AngelPTMStrategy, *NESTED_SETTINGS, *(getattr(callbacks, name) for name in callbacks.__all__)}
    headings = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert {cls.__name__ for cls in described} | set(COMMANDS) | {
        "ConfigError",
        "gathered",
        "gradient_norm",
    } <= headings
    assert "- `max_staleness`: How many optimizer steps" in text


# -- what runs ------------------------------------------------------------------------------------------------------------


class MyModule(LightningModule):
    """Module that a page takes for the reader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss: torch.Tensor = self.layers(x).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's code runs: on a CPU, also where there are GPUs, of which a Trainer would take all."""
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that are started
    (tmp_path / "nvme").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")  # as in a notebook or a script there
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    yield tmp_path / "work"
    assert not list((tmp_path / "nvme").iterdir()), "the disk tier left files behind"


def commands_of(code: str) -> list[list[str]]:
    """The arguments of the commands of ours, in a shell's text or in a list of YAML's."""
    joined = code.replace("\\\n", " ").replace("$(which lightning-ptm)", "lightning-ptm")
    joined = re.sub(r"\[(lightning-ptm.*?)\]", lambda found: found[1].replace(",", ""), joined)
    return [shlex.split(found) for found in OURS.findall(joined)]


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Commands are parsed, their settings checked, and no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightningCLI, "instantiate_classes", lambda *given: None)
        patch.setattr(LightningCLI, "_run_subcommand", lambda *given: None)
        for name, command in COMMANDS.items():
            patch.setitem(COMMANDS, name, functools.wraps(command)(lambda *given, **named: None))
        yield


def check(arguments: list[str]) -> None:
    """SystemExit is what a mistake ends in."""
    with nothing_runs():
        main(arguments)


def run_bash(code: str, folder: Path) -> None:
    """In this process where a block consists of commands of ours, which then need not be loaded again; else in a shell."""
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    if all(line.startswith("lightning-ptm ") for line in lines):
        for line in lines:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                main(shlex.split(line)[1:])
            assert printed.getvalue(), line
        return
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LOCAL_", "MASTER_"))
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_block(block: Block, folder: Path, namespace: dict[str, Any], page: Path) -> None:
    code = block.code.replace("/nvme", str(folder.parent / "nvme"))
    if block.mark == "file":
        (folder / block.said).write_text(code)
    elif block.mark in ("parsed", "not run", "ci"):
        if block.language == "yaml":
            list(yaml.safe_load_all(code))
    elif block.language == "python":
        filled = "\n" * (block.line - 1) + code  # so that a traceback has the page's lines
        exec(compile(filled, str(page), "exec"), namespace)
    elif block.language == "yaml":
        (folder / "page.yaml").write_text(code)
        check(["fit", "--config", "gpt.yaml", "--config", "page.yaml"])
    elif block.language == "bash":
        run_bash(code, folder)
    if block.language in ("bash", "yaml"):
        for arguments in commands_of(code):
            check(arguments)


@pytest.mark.parametrize("page", WITH_CODE, ids=names(WITH_CODE))
def test_the_code_of_a_page_runs(page: Path, folder: Path) -> None:
    for package in IMPORTS.get(page.name, ()):
        pytest.importorskip(package, reason="it is an extra, which .ci/versions does not install")
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(16, 32)), batch_size=4)
    namespace: dict[str, Any] = {"__name__": page.stem, "MyModule": MyModule, "my_data": data}
    for block in blocks_of(page):
        try:
            run_block(block, folder, namespace, page)
        except SystemExit as stop:
            raise AssertionError(f"{page.name}:{block.line} ended with {stop.code}") from stop


@pytest.mark.parametrize(
    "command",
    [
        "lightning-ptm plan gpt --hardwear x",
        "lightning-ptm fit --config gpt.yaml --trainer.devises=2",
        "lightning-ptm export a",
    ],
)
def test_a_wrong_option_is_found(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check(commands_of(command)[0])


def test_a_setting_that_does_not_exist_is_found_in_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "trainer:\n  strategy:\n    class_path: lightning_ptm.AngelPTMStrategy\n    init_args: {page_sise: 4MiB}\n"
    with pytest.raises(SystemExit):
        run_block(Block("yaml", wrong, 1), folder, {}, DOCS / "settings.md")


@pytest.mark.slow
def test_torchrun_restarts_the_script_of_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of two dies, once; the run goes on from the newest checkpoint."""
    script = file_of(DOCS / "launching.md", "train.py")
    dies = "        if self.global_step == 5 and self.global_rank == 1 and first:\n            os._exit(9)\n"
    first = 'import os\n\nfirst = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"\n'
    text = script.code.replace("        (x,) = batch\n", f"        (x,) = batch\n{dies}")
    assert dies in text
    (folder / "train.py").write_text(first + text)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "train.py"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LOCAL_", "MASTER_"))
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("resume='auto') starts from scratch") == 1
    assert f"Restoring states from the checkpoint path at {folder / 'checkpoints'}" in done.stderr
    assert len(list((folder / "checkpoints").iterdir())) == 1  # what was gone on from is gone, too
    assert "rank 0 has done 8 steps" in done.stdout and "rank 1 has done 8 steps" in done.stdout


@pytest.mark.slow
def test_ray_trains_with_two_workers_and_starts_them_again(folder: Path) -> None:
    """One worker of two dies, once; the run goes on from the newest checkpoint."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is no dependency; pip install 'ray[train]'")
    script = file_of(DOCS / "launching.md", "train_with_ray.py")
    dies = (
        "        died = Path(self.trainer.checkpoint_callback.dirpath, 'died')\n"
        "        if self.global_step == 5 and self.global_rank == 1 and not died.exists():\n"
        "            died.touch()\n"
        "            os._exit(9)\n"
    )
    text = script.code.replace("        (x,) = batch\n", f"        (x,) = batch\n{dies}")
    text = text.replace("/shared/checkpoints", str(folder / "checkpoints"))
    assert dies in text
    (folder / "train_with_ray.py").write_text(f"import os\nfrom pathlib import Path\n\n{text}")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LOCAL_", "MASTER_"))
    }
    environment |= {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, "train_with_ray.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert (folder / "checkpoints" / "died").exists()
    began = set(re.findall(r"pid=(\d+).*resume='auto'\) starts from scratch", printed))
    went_on = set(re.findall(r"pid=(\d+).*Restoring states from the checkpoint path at", printed))
    assert len(began) == len(went_on) == 1 and began != went_on, printed
    for rank in (0, 1):
        assert f"rank {rank} of 2 has done 8 steps" in printed


@pytest.mark.slow
def test_the_job_of_the_page_trains_in_two_pods(folder: Path) -> None:
    """The command of the Kubernetes Job, once for each pod, on this machine."""
    script = file_of(DOCS / "launching.md", "train.py")
    (manifest,) = (block for block in blocks_of(DOCS / "launching.md") if "kind: Job" in block.code)
    (folder / "train.py").write_text(script.code)
    _, job = yaml.safe_load_all(manifest.code)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LOCAL_", "MASTER_"))
    }
    pods = []
    for index in range(job["spec"]["completions"]):
        here = {"$(JOB_COMPLETION_INDEX)": str(index), "train-0.train": "127.0.0.1", "29500": port}
        command = [*container["command"], *container["args"]]
        for name, value in here.items():
            command = [word.replace(name, value) for word in command]
        pods.append(
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for index, pod in enumerate(pods):
        printed, _ = pod.communicate(timeout=240)
        assert pod.returncode == 0, printed
        assert f"rank {index} has done 8 steps" in printed
