"""Fixtures that all tests share: where model states live, and a check that a test cleans up after itself.

I1: every strategy made here poisons released pages (a stale read shows as NaN) and has the smallest pages there are, so
that tiny models take several. I2: a test that leaves a thread, a file, an open deleted file or an environment variable
behind fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from kit.settings import merged

# Before torch is imported: tests that run side by side share the cores, and threads that wait for each other on too few
# cores take many times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The tests that do ask for two threads would otherwise spin on the core that their neighbours compute on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from kit.memory import LEAST, strategy_with
from kit.quick_start import catch_logs_where_asked, leave_out_of_collections, look_for_callbacks_once
from kit.slow import mark_slow

from lightning_ptm import AngelPTMStrategy

# The same examples in every run: a commit is judged by what it changes. tests/fuzz tries others.
hypothesis_settings.register_profile("same", derandomize=True, deadline=None)
hypothesis_settings.load_profile("same")

look_for_callbacks_once()

TIERS: dict[str, dict[str, Any]] = {
    "ram": {},
    "masters_on_disk": {"offload_optimizer": "disk"},
    "all_on_disk": {"offload_optimizer": "disk", "offload_parameters": "disk"},
    "three_tiers": {
        "device_memory": "2MiB",
        "host_memory": "64MiB",
        "offload_parameters": "host",
        "offload_optimizer": "disk",
    },
    "lock_free": {"lock_free": {"max_staleness": 0}},
    "lock_free_three_tiers": {
        "device_memory": "2MiB",
        "host_memory": "64MiB",
        "lock_free": {"max_staleness": 0},
    },
    "tight": {"device_memory": LEAST, "offload_parameters": "disk", "offload_optimizer": "disk"},
    "tight_recomputed": {
        "device_memory": LEAST,
        "offload_parameters": "disk",
        "offload_optimizer": "disk",
        "recompute": "all",
        "debug": {"poison": False},
    },
}
"""Settings by name. A tier apart from RAM for the device, too small for a whole model, is what `three_tiers` has; in the
`tight` ones it is as small as the plan takes, so that pages are used again between a forward and its backward."""

# Lightning's launcher watches over the processes that it started, and looks every five seconds whether there are any.
_OTHERS_THREADS = (
    "pytest_timeout",
    "tqdm_monitor",
    "ThreadPoolExecutor",
    "QueueFeederThread",
    "child-process-observer",
)
_OTHERS_FILES = ("/memfd:", "/dev/shm/open_mpi")  # Lightning imports mpi4py, if it is there, to look for MPI
_OTHERS_VARIABLES = {"PYTEST_CURRENT_TEST", "COLUMNS", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}
# What Lightning's launcher sets for every parallel strategy and never takes back; its own tests allow the same.
_OTHERS_VARIABLES |= {
    "LOCAL_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
}
_OTHERS_VARIABLES |= {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}  # how code that torch.compile generated finds torch


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith(_OTHERS_THREADS)
        and type(thread).__name__ != "TMonitor"  # an old tqdm names it not
    }


def _lasting(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _OTHERS_VARIABLES}


def _deleted_open_files() -> set[str]:
    found: set[str] = set()
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # the descriptor of the listing itself
        if target.endswith("(deleted)") and target.startswith("/") and not target.startswith(_OTHERS_FILES):
            found.add(target)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a thread, an unlinked open file or a variable behind."""
    threads, variables, deleted = _threads(), dict(os.environ), _deleted_open_files()
    yield
    for thread in _threads() - threads:
        thread.join(5)  # one that is about to end may do so
    changed = dict(os.environ)
    if changed != variables:
        for name in changed.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
    assert {thread.name for thread in _threads() - threads} == set(), "threads were left behind"
    assert _deleted_open_files() - deleted == set(), "unlinked files were left open"
    assert _lasting(changed) == _lasting(variables), "environment variables were changed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, help="how many seeds tests/fuzz tries")


def pytest_configure(config: pytest.Config) -> None:
    # A worker of xdist that has been given many tests of several ranks would be the last for a minute.
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 16


def pytest_sessionstart(session: pytest.Session) -> None:
    catch_logs_where_asked(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Marks as slow what others of the same test make slow: here all cases of a test are known, whatever is selected."""
    made = yield
    if isinstance(made, list) and all(isinstance(each, pytest.Function) for each in made):
        mark_slow(made)
    return made


def pytest_collection_finish() -> None:
    leave_out_of_collections()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for the disk tier, which must be empty again in the end."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


MakeStrategy = Callable[..., AngelPTMStrategy]


@pytest.fixture
def strategy_at(disk: Path) -> MakeStrategy:
    """`strategy_at("three_tiers", recompute="all")`: a strategy with model states where the name of TIERS says."""

    def make(tier: str, **settings: Any) -> AngelPTMStrategy:
        base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": disk}
        chosen = merged(base, TIERS[tier], settings)
        return strategy_with(**chosen)

    return make


@pytest.fixture(params=list(TIERS))
def tier(request: pytest.FixtureRequest) -> str:
    """Each of TIERS in turn."""
    return str(request.param)
