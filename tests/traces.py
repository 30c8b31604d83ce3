"""The files of ours that a call passes, and their functions, in the order in which they are reached."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("collectives", "executors", "hvd_cluster")
PREFIXES = tuple(f"{ROOT / layer}/" for layer in LAYERS)


class Trace:
    """What this thread calls while the block runs."""

    def __init__(self):
        self.functions = {}

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PREFIXES):
            file = code.co_filename[len(str(ROOT)) + 1 :]
            self.functions.setdefault(file, set()).add(
                code.co_qualname if sys.version_info >= (3, 11) else code.co_name
            )


def common(traces):
    """The files that all ``traces`` pass, each with its functions: what happens only now and then is left out."""
    files = set.intersection(*(set(trace.functions) for trace in traces))
    return {file: set.union(*(trace.functions[file] for trace in traces)) for file in files}
