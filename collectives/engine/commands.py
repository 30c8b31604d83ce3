"""Requests of other threads to the thread that drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Commands"]

Commands: TypeAlias = deque[Callable[[], object]]
"""Carried out with the next step, in order. Any thread may append."""
