"""The version of this library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("hvd-cluster")
except PackageNotFoundError:  # a source tree that was never installed
    VERSION = "0.1.0"
