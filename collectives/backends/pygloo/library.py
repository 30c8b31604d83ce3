"""Whether pygloo is there."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["not_imported", "require_pygloo"]


def require_pygloo() -> None:
    """Raise ImportError with the remedy where pygloo is missing. Does not import it: only helper processes do."""
    if find_spec("pygloo") is None:
        raise ImportError(
            "the pygloo backend needs pygloo, which is published for Python 3.10 and older; install it there with: "
            "pip install 'hvd-cluster[pygloo]', or use another backend"
        )


def not_imported(reason: str) -> ImportError:
    """The error for a pygloo that is installed, but cannot be imported for this ``reason``."""
    return ImportError(
        f"pygloo is installed, but its import fails: {reason}; install it again with: pip install --force-reinstall "
        "pygloo, or use another backend"
    )
