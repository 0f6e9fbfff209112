"""What a process of tests does once, or not at all: logs are caught where a test asks for them, and nowhere else."""

from __future__ import annotations

import logging

import pytest
from _pytest.logging import LogCaptureHandler


def handlers() -> list[logging.Handler]:
    return [each for each in logging.getLogger().handlers if isinstance(each, LogCaptureHandler)]


def test_logs_are_caught_where_a_test_asks_for_them(caplog: pytest.LogCaptureFixture) -> None:
    alone = logging.getLogger("alone")
    alone.propagate = False
    logging.getLogger("of the tests").warning("propagated")
    assert [record.message for record in caplog.records] == ["propagated"] and handlers()


def test_where_none_does_no_handler_is_hung_anywhere() -> None:
    assert not handlers()
