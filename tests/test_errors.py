"""Words that messages share, and errors on their way to another process."""

import copy
import inspect
import pickle

import pytest

from lightning_ptm import errors
from lightning_ptm.errors import AngelPTMError, InternalError, PageIOError, format_bytes, one_line, some


@pytest.mark.parametrize(
    ("names", "most", "told"),
    [
        ([], 3, ""),
        (["a"], 3, "a"),
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d", "e"], 3, "a, b, c and 2 more"),
    ],
)
def test_the_first_few_of_many_names(names: list[str], most: int, told: str) -> None:
    assert some(names, most) == told


def test_an_internal_error_says_once_that_it_is_a_bug() -> None:
    error = InternalError("flat 3 is live")
    asks = "this is a bug of lightning_ptm: please report it with this message and the traceback"
    assert str(error) == f"flat 3 is live; {asks}"
    assert str(InternalError(str(error))) == str(error)


@pytest.mark.parametrize(
    ("count", "shown"), [(512, "512 B"), (4 << 20, "4 MiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB")]
)
def test_sizes_for_messages(count: int, shown: str) -> None:
    assert format_bytes(count) == shown


def test_every_error_comes_whole_out_of_another_process() -> None:
    """By pickle: else a pool of processes breaks at it, and nobody learns what has failed."""
    kinds = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, AngelPTMError)]
    assert len(kinds) > 5
    for kind in kinds:
        error = PageIOError("full", path="/disk", page=3, errno=28) if kind is PageIOError else kind("why")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error)
            if isinstance(again, PageIOError):
                assert (again.path, again.page, again.errno) == ("/disk", 3, 28)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no"), "ValueError: no"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (
            OSError("Caught OSError in worker 0.\nOriginal Traceback (most recent call last):\n  f()\nOSError: gone\n"),
            "OSError: Caught OSError in worker 0. OSError: gone",
        ),
    ],
)
def test_what_other_ranks_are_told_of_an_error_is_a_line(error: BaseException, words: str) -> None:
    assert one_line(error) == words
