"""The process of one rank: does what it is told, one function after the other, and says after each whether it may go on.

I1: a function finds what it would find in a process of its own: environment, folder, output, random numbers, warnings and the
path of modules are set anew for each. I2: a process goes on only when its last function has returned and left nothing behind
that the next could see: no thread, no child, no handler of a signal, no other function or class in modules of
torch.distributed or of the package, and nothing else in modules of the tests, than before.
"""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

_WATCHED = ("torch.distributed", "lightning_ptm", "callbacks")
"""Modules whose functions and classes, and those of these classes, are compared: by how their names begin."""
_KINDS = (type, types.FunctionType, types.BuiltinFunctionType, property, classmethod, staticmethod)
_TESTS = str(Path(__file__).parents[2])
"""These, too, are modules from this folder."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM)
_ABOUT_TO_END_S = 1.0
_THREADS_OF_OTHERS = ("tqdm_monitor", "child-process-observer", "QueueFeederThread")


class End(enum.Enum):
    """How a rank ended."""

    RETURNED = "returned"
    RAISED = "raised"
    EXITED = "exited"
    HUNG = "hung"


@dataclasses.dataclass(frozen=True)
class Job:
    """Work of a process, and where it runs. Pickled, by value, so that it needs no process but its own."""

    call: bytes
    """The function and its args: unpickled once the path of modules is set."""
    environment: dict[str, str]
    home: Path
    log: Path
    path: Sequence[str]
    last: bool


@dataclasses.dataclass(frozen=True)
class Answer:
    """Outcome of a job.

    Attributes:
        value: what the function returned, pickled in its process: torch's own way needs that to be alive later.
        goes_on: the process waits for another job; else it ends by itself.
    """

    end: End
    value: bytes
    error: str
    report: str
    goes_on: bool


def serve(jobs: Connection) -> None:
    """The process's own loop, until the other side is gone or a job was the last."""
    faulthandler.enable(file=2)
    # Told to end, a rank writes where it is, and then the signal does what it does by default.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)
    surroundings = Surroundings()
    while True:
        try:
            job: Job = pickle.loads(jobs.recv_bytes())
        except EOFError:
            return  # nobody has anything more to do
        answer = _done(job, surroundings)
        jobs.send_bytes(pickle.dumps(answer))
        if not answer.goes_on:
            break
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _done(job: Job, surroundings: Surroundings) -> Answer:
    surroundings.set_up(job)
    try:
        body, args = pickle.loads(job.call)
        if not job.last:
            surroundings.remember()
        with warnings.catch_warnings():
            value = body(*args)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Answer(End.RAISED, pickle.dumps(None), text, traceback.format_exc(), goes_on=False)
    pickled = pickle.dumps(value)
    del body, args, value
    return Answer(End.RETURNED, pickled, "", "", goes_on=not job.last and surroundings.are_as_they_were())


class Surroundings:
    """Global state that a function may have changed, in the process that runs it."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._random = numpy.random.get_state(), torch.get_rng_state()
        self._handlers = [signal.getsignal(each) for each in _SIGNALS]
        self._looked_at: set[str] = set()
        """Names of the modules seen so far, the others' too."""
        self._others: list[tuple[str, types.ModuleType]] = []
        self._held_by_others: list[tuple[Mapping[str, Any], str, Any]] = []
        """Values of torch.distributed's modules and the package's: (dictionary, name, value)."""
        self._of_tests: dict[str, dict[Any, Any]] = {}
        """Values of the tests' modules, by name."""

    def set_up(self, job: Job) -> None:
        """I1."""
        with job.log.open("wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.clear()
        os.environ.update(self._environment | job.environment)
        os.chdir(job.home)
        sys.path[:] = job.path
        random.seed()  # as Python does in a process that is forked
        numpy.random.set_state(self._random[0])
        torch.set_rng_state(self._random[1])
        torch.set_num_threads(1)
        rank_zero_only.rank = 0

    def remember(self) -> None:
        """Records the values of modules that were imported since the last call."""
        for name in sys.modules.keys() - self._looked_at:
            self._looked_at.add(name)
            module = sys.modules[name]
            if _is_of_tests(module):
                self._of_tests[name] = dict(_held(module))
            elif name.startswith(_WATCHED):
                self._others.append((name, module))
                self._held_by_others += _code_of(module)

    def are_as_they_were(self) -> bool:
        """I2; gives the process groups up."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()
        threads = {each for each in threading.enumerate() if not each.name.startswith(_THREADS_OF_OTHERS)}
        for thread in threads - {threading.main_thread()}:
            thread.join(_ABOUT_TO_END_S)
        return (
            not any(each.is_alive() for each in threads - {threading.main_thread()})
            and not multiprocessing.active_children()
            and [signal.getsignal(each) for each in _SIGNALS] == self._handlers
            and (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
            and not torch.are_deterministic_algorithms_enabled()
            and all(sys.modules.get(name) is module for name, module in self._others)
            # Each by itself: others import what they lack later.
            and all(names.get(name) is value for names, name, value in self._held_by_others)
            and all(self._holds(name, before) for name, before in self._of_tests.items())
        )

    def _holds(self, name: str, before: dict[Any, Any]) -> bool:
        if name not in sys.modules:
            return False
        now = dict(_held(sys.modules[name]))
        return len(now) == len(before) and all(now.get(key) is value for key, value in before.items())


def _is_of_tests(module: types.ModuleType) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(_TESTS)


def _held(module: types.ModuleType) -> Iterator[tuple[Any, Any]]:
    """Yields (name, value) of a test module's variables, of the elements of its containers, and of its classes'
    attributes."""
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        yield name, value
        if type(value) in (list, dict, set):
            elements = value.values() if isinstance(value, dict) else value
            yield from (((name, place), each) for place, each in enumerate(elements))
        if _is_own_class(value, module):
            yield from (((name, each), held) for each, held in _inside(value, (object,)))


def _code_of(module: types.ModuleType) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Yields the functions and classes of a module, and those of its classes."""
    for name, value in list(vars(module).items()):
        if issubclass(type(value), _KINDS) and not name.startswith("__"):
            yield vars(module), name, value
        if _is_own_class(value, module):
            yield from ((vars(value), each, held) for each, held in _inside(value, _KINDS))


def _is_own_class(value: object, module: types.ModuleType) -> bool:
    return issubclass(type(value), type) and value.__module__ == module.__name__


def _inside(of: type, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(of).items()):
        if not name.startswith(("__", "_abc_")) and issubclass(type(value), kinds):
            yield name, value
