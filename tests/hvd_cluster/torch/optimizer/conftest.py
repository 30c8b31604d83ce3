"""Ranks for the distributed optimizers: threads of this process."""

import pytest

from tests.ranks import player


@pytest.fixture
def on_ranks(monkeypatch):
    return player(monkeypatch)
