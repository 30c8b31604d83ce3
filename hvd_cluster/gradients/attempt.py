"""Whether the gradients count that a rank has sent ahead of its step.

Gradients travel during backward in the hope that nobody changes them before ``step()``. A script may do that: it clips
them, or ``zero_grad()`` throws them away. Then the rank gives up this attempt, and sends all gradients again, under
other names. The lead bucket travels in the step only, with a tag that says whether the rank has given up: where the
ranks differ they see a mismatch, exchange that, and all of them send again.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from hashlib import blake2b

LONGEST_PAUSE = 1000
"""Steps without gradients ahead, where earlier ones were in vain time and again."""
SETTLED = 1 << 16


class EarlyGradients:
    """The present attempt of one optimizer on this rank: the first one, or after :meth:`give_up` the second.

    ``sent``: the buckets that this rank sent in the first attempt, if it gave that up. ``must_repeat``: other ranks
    gave it up, so that this rank has to. ``must_complete``: some rank may wait for a bucket that this rank did not
    send. ``is_shared``: some rank may have sent gradients ahead in this step.
    """

    def __init__(self) -> None:
        self.sent: Set[str] | None = None
        self.must_repeat = self.must_complete = self.is_shared = False
        self._is_eager = self._is_settled = False
        self._pause = self._left = 0

    def allows_ahead(self) -> bool:
        """Whether this rank may send gradients before the step."""
        return self._is_eager and self.sent is None and not self._left

    def begin_step(self, is_eager: bool) -> None:
        """``is_eager``: gradients of the next step may travel during backward.

        The ranks switch at the same batch. So none sends ahead unless each of them was eager in this step or the last.
        """
        self.is_shared = is_eager or self._is_eager
        self._is_eager = is_eager

    def end_step(self) -> None:
        """The step has ended. After an attempt in vain the next steps send nothing ahead, for longer each time."""
        if self.sent is not None and not self.must_repeat:
            self._left = self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        elif self._left:
            self._left -= 1
        else:
            self._pause = max(0, self._pause - 1)
        self.sent = None
        self.must_repeat = self.must_complete = self._is_settled = False

    def give_up(self, sent: Collection[str]) -> None:
        """The gradients in ``sent`` buckets do not count."""
        self.sent = frozenset(sent)

    @property
    def suffix(self) -> str:
        """The end of names in the present attempt."""
        return "" if self.sent is None else ".again"

    @property
    def value(self) -> int:
        """The number by which the ranks compare their attempts: 0 for a first attempt."""
        if self._is_settled:
            return SETTLED
        if self.sent is None:
            return 0
        return int.from_bytes(blake2b(repr(sorted(self.sent)).encode(), digest_size=5).digest(), "big") + 1 << 17

    def settle(self, values: Collection[int]) -> bool:
        """Take in the ``value`` of each rank; whether they differ. Then all make a second attempt."""
        if len(set(values)) == 1:
            return False
        self.must_repeat = self.sent is None
        self.must_complete = not self.must_repeat
        self._is_settled = True
        return True
