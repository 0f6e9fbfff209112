"""Setup of a process of tests: logs are caught only where a test asks for them, and a folder's fixtures end with its
tests."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from _pytest.logging import LogCaptureHandler

HERE = Path(__file__).parent


def handlers() -> list[logging.Handler]:
    return [each for each in logging.getLogger().handlers if isinstance(each, LogCaptureHandler)]


def test_logs_are_caught_where_a_test_asks_for_them(caplog: pytest.LogCaptureFixture) -> None:
    alone = logging.getLogger("alone")
    alone.propagate = False
    logging.getLogger("of the tests").warning("propagated")
    assert [record.message for record in caplog.records] == ["propagated"] and handlers()


def test_where_none_does_no_handler_is_hung_anywhere() -> None:
    assert not handlers()


@pytest.mark.parametrize("conftest", sorted(HERE.rglob("conftest.py")), ids=lambda path: path.parent.name)
def test_what_a_folder_sets_for_its_tests_ends_with_them(conftest: Path) -> None:
    """pytest takes a folder that is no package for the whole session: its logs were silent for tests of other folders."""
    text = conftest.read_text()
    assert 'autouse=True, scope="session"' not in text
    assert 'autouse=True, scope="package"' not in text or (conftest.parent / "__init__.py").exists()
