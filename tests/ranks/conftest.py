"""Fixtures of the tests with several ranks."""

from __future__ import annotations

from kit.ranks.fixtures import one_compute_thread  # noqa: F401
