"""Classes whose first argument is the backend of Keras, which Horovod hands down and nothing here needs."""

from __future__ import annotations

from typing import Any

__all__ = ["WithBackend"]


class WithBackend:
    """Goes before a class, and drops the first argument of its constructor."""

    def __init__(self, backend: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
