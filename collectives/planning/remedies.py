"""Pure: the change that a script needs where a rank waits for one that has ended, or that waits in another call."""

from __future__ import annotations

import re
from collections.abc import Iterable

from collectives.api import Operation

__all__ = ["remedy", "remedy_of_calls"]

_GRADIENT = re.compile(r"(^|[./])(gradient|delta)s?\.")
"""In the names of the collectives of a step, of the optimizers of all frameworks."""
_STEP = re.compile(r"(^|[./])(gradient|delta)s?\.|\.optimizer\.models")
"""In those names, and in those of the comparison of the models of the ranks."""
_SET_CHANGES = (Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET)

FEWER = "it has had fewer batches; let each rank call hvd.join() after its last batch"
LEFT_FIT = (
    "it has left fit() of Keras, where hvd.join() has no place; give all ranks the same steps_per_epoch, of a dataset "
    "that repeats, and let callbacks such as EarlyStopping decide alike on all ranks"
)
NO_JOIN = "it has not called hvd.join(), which each rank must call after its last batch"
NO_SET = "it has not made this call, which all ranks must make, also those that are not in the process set"
NOTHING = "it has called no collective; let all ranks make the same calls, whatever their rank is"
OTHER_CALLBACKS = "it has not called {!r}; give fit() the same callbacks and the same number of epochs on all ranks"
OTHER_CALL = "it has not called {!r}; let all ranks make that call, whatever their rank is"
OTHER_EPOCHS = "it has had fewer batches, and last called {!r}; give all ranks the same number of batches and of epochs"

SAME_CALLS = "let all ranks make the same calls in the same order"
SAME_OPTIMIZERS = (
    "let all ranks have the same models, and make, change and step their optimizers, or use their tapes, in the same "
    "order"
)


def remedy_of_calls(names: Iterable[str]) -> str:
    """The change that the script needs where ranks wait for each other in the calls ``names``; without a period."""
    return SAME_OPTIMIZERS if all(map(_STEP.search, names)) else SAME_CALLS


def remedy(last: str, operation: Operation, waits: str, is_in_fit: bool) -> str:
    """The deed of the rank that has ended, "it", and the change that the script needs; without a period.

    ``last`` is the name of the collective that it submitted last, empty for none. The rank that gets the error waits
    for the ``operation`` with the name ``waits``, or comes too late with it, perhaps ``is_in_fit`` of Keras.
    """
    if operation is Operation.JOIN:
        return NO_JOIN
    if operation in _SET_CHANGES:
        return NO_SET
    if not last:
        return NOTHING
    if not _GRADIENT.search(waits):
        return (OTHER_CALLBACKS if is_in_fit else OTHER_CALL).format(waits)
    if is_in_fit:
        return LEFT_FIT
    return FEWER if _GRADIENT.search(last) else OTHER_EPOCHS.format(last)
