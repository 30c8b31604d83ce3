"""An interrupt at a chosen line, as Ctrl-C may come there; and calls as of a signal handler."""

import itertools
import sys
import threading

__all__ = ["aborted_under", "interrupted"]

SECONDS = 10.0


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


def aborted_under(lock, abort):
    """Whether ``abort()`` returns on a thread that has ``lock``, as when a signal handler has interrupted it there."""

    def handle():
        with lock:
            abort()

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return not thread.is_alive()
