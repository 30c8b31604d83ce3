"""Fixtures around Spark."""

from importlib.util import find_spec

if find_spec("pyspark") is None:
    collect_ignore_glob = ["test_*.py"]
