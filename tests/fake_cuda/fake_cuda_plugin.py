"""`pytest -p fake_cuda_plugin -m gpu`, with this folder on PYTHONPATH: tests run on the fake device; races fail."""

from __future__ import annotations

from collections.abc import Iterator

import fake_device
import pytest


def pytest_configure(config: pytest.Config) -> None:
    fake_device.watch_files()


@pytest.fixture(autouse=True)
def no_race() -> Iterator[None]:
    """Checks that a test has no race; the report of each race is on standard error."""
    before = fake_device.lib.fc_races()
    yield
    found = fake_device.lib.fc_races() - before
    assert not found, f"{found} accesses that no wait has ordered behind an earlier one"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lib = fake_device.lib
    terminalreporter.write_line(
        f"fake device: {lib.fc_accesses()} accesses, {lib.fc_deferred()} copies put off, {lib.fc_races()} races"
    )
