"""Ranks for the core of distributed optimizers: threads of this process."""

import pytest

from tests.ranks import player


@pytest.fixture
def on_ranks(monkeypatch):
    return player(monkeypatch)
