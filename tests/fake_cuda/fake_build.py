"""The fake CUDA device's library, compiled once for each torch and each state of its source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).parent / "source"
# NDEBUG: the layout of RecordFunction depends on it, and wheels are built with it.
FLAGS = ["-O1", "-g1", "-fPIC", "-shared", "-std=c++20", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1"]


def why_not() -> str | None:
    """The reason why there can be no fake device here; None if there can."""
    if not importlib.metadata.version("torch").endswith("+cpu"):
        return "the fake CUDA device needs the CPU build of torch (torch==...+cpu)"
    if shutil.which("g++") is None:
        return "the fake CUDA device needs g++ (apt-get install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the fake CUDA device needs Python.h (apt-get install python3-dev)"
    return None


def library(*, private: bool = False) -> Path:
    """The library; compiles it, half a minute, if it is not there. Processes that come at once wait for the first.

    Args:
        private: of a device that is not CUDA's, but torch's for other libraries.
    """
    files = sorted(SOURCE.iterdir())
    flags = [*FLAGS, "-DFAKE_PRIVATE"] if private else FLAGS
    told = [
        importlib.metadata.version("torch"),
        sysconfig.get_python_version(),
        *flags,
        *(file.read_text() for file in files),
    ]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fake_cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    found = folder / f"{key}.so"
    with FileLock(str(found) + ".lock"):
        if not found.exists():
            _compile(found, flags)
    return found


def _compile(target: Path, flags: list[str]) -> None:
    import importlib.util  # torch itself must not be imported before the library is loaded

    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    part = target.with_suffix(".part")
    command = ["g++", *flags, *(f"-I{path}" for path in headers), str(SOURCE / "fake_cuda.cpp"), "-o", str(part)]
    command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib", "-Wl,--no-as-needed"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"g++ failed with the headers of torch {importlib.metadata.version('torch')}:\n{done.stderr[:4000]}"
        )
    part.rename(target)
