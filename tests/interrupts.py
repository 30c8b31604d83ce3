"""An interrupt at a chosen line, as Ctrl-C may come there."""

import itertools
import sys

__all__ = ["interrupted"]


def interrupted(number, functions, call):
    """Whether ``call`` was ended by an interrupt at the n-th line that it runs of ``functions``, on this thread."""
    codes = [function.__code__ for function in functions]
    lines = itertools.count()

    def trace(frame, event, _):
        if frame.f_code not in codes:
            return None
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
