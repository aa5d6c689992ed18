"""Fixtures for the tests of the log."""

import os

import pytest

from loradock.controller.log import storage


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, in tests that don't depend on it."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    monkeypatch.setattr(storage, "operations", lambda: None)
