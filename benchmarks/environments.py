"""Python environments beside this one: with DeepSpeed, and with other commits of this project.

They find this environment's packages, torch among them, through a path file: both sides of a ratio compute with the same
torch, and little is downloaded. Each is made once and kept in a folder that git ignores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.race import SkipCase

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DEEPSPEED = HERE / ".deepspeed"
VERSIONS = HERE / ".versions"
COMPLETE = "complete"
"""A file in the folder of an environment that has all that it needs."""
USES_LIBAIO = "#include <libaio.h>\nint main() { return io_setup(0, nullptr); }\n"


def installed_deepspeed(*, on_disk: bool) -> str:
    """Returns the interpreter of DeepSpeed's environment.

    Args:
        on_disk: its operators for disks are needed, too.

    Raises:
        SkipCase: there is none yet, or a compiler or libaio's headers are missing.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise SkipCase("DeepSpeed compiles its operators when it is first used, and there is no g++ here")
    attempt = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    if on_disk and subprocess.run(attempt, input=USES_LIBAIO, text=True, capture_output=True, check=False).returncode:
        raise SkipCase("DeepSpeed's NVMe offload needs libaio's headers: apt-get install libaio-dev")
    if not (DEEPSPEED / COMPLETE).exists():
        raise SkipCase("DeepSpeed is not installed for the benchmarks: python -m benchmarks install-deepspeed")
    return str(DEEPSPEED / "bin" / "python")


def deepspeed_environment(accelerator: str) -> dict[str, str]:
    """Returns the environment variables that DeepSpeed's side needs before it imports DeepSpeed."""
    return {
        "DS_ACCELERATOR": accelerator,
        "TORCH_EXTENSIONS_DIR": str(DEEPSPEED / "extensions"),  # compiled once
        "PATH": f"{DEEPSPEED / 'bin'}{os.pathsep}{os.environ['PATH']}",  # ninja
    }


def install_deepspeed(requirement: str = "deepspeed") -> None:
    """Makes DeepSpeed's environment. Its operators are compiled there when its side first runs."""
    python = _environment(DEEPSPEED)
    # DeepSpeed's set-up imports torch, which build isolation would hide and download again.
    for options in (["wheel", "ninja"], ["--no-build-isolation", requirement]):
        _run(python, "-m", "pip", "install", "--quiet", *options)
    (DEEPSPEED / COMPLETE).touch()
    print(f"{requirement} is in {DEEPSPEED}")


def of_commit(commit: str) -> str:
    """Returns the interpreter of an environment that has another commit of this project, made from git if it is not there."""
    folder = VERSIONS / commit
    source, python = folder / "source", str(folder / "venv" / "bin" / "python")
    if not (folder / COMPLETE).exists():
        print(f"checking out and installing {commit} in {folder}", flush=True)
        source.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
        _environment(folder / "venv")
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--editable"]
        _run(python, "-m", "pip", "install", *options, str(source))
        (folder / COMPLETE).touch()
    return python


def _environment(folder: Path) -> str:
    """Makes an environment that also finds this one's packages, pip among them; returns its interpreter."""
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    python = str(folder / "bin" / "python")
    own = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Path files in the folder that a path file names are not read: this project's editable install is not found there.
    (Path(own) / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def _run(*command: str) -> str:
    """Runs a command; returns what it printed."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {answer.returncode}:\n{answer.stderr[-2000:]}")
    return answer.stdout
