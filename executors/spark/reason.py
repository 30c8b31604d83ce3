"""Pure: the readable part of an error of Spark."""

from __future__ import annotations

import re

__all__ = ["reason"]

# After these words Spark repeats the error, with its own stack trace.
REPETITION = re.compile(r"\n\s*(Driver stacktrace:|JVM stacktrace:)")
JAVA_FRAME = re.compile(r"\s+at [\w.$/@<>\-]+\(.*\)|\s+\.\.\. \d+ more|\s*")
CALL = re.compile(r"\AAn error occurred while calling [\w.]+\n: ")
IMPORT = re.compile(r"^(ModuleNotFoundError|ImportError): ", re.MULTILINE)
ADVICE = (
    "the Python of the executors lacks a module: install hvd-cluster[spark] there, or set PYSPARK_PYTHON to a Python "
    "that has it"
)


def reason(text: str) -> str:
    """The ``text`` of an error of Spark without the stack traces of Java, with advice for known causes."""
    head = CALL.sub("", REPETITION.split(text, maxsplit=1)[0])
    kept = "\n".join(line for line in head.splitlines() if not JAVA_FRAME.fullmatch(line))
    return f"{kept}\n{ADVICE}" if IMPORT.search(kept) else kept
