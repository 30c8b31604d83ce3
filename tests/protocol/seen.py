"""The states that were seen, in the order in which they were, in as few bytes as possible: about 60 for each.

They are in columns of numpy, which also look up many states at once. A state is recognised by its whole number, so that
none is ever taken for another one.
"""

import numpy as np

SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: the high bits of its multiples are spread evenly."""


class Growing:
    """A column of numbers that grows."""

    def __init__(self, kind):
        self._room = np.empty(1024, kind)
        self._size = 0

    def __len__(self):
        return self._size

    def __getitem__(self, key):
        return self._room[: self._size][key]

    def extend(self, numbers):
        size = self._size + len(numbers)
        if size > len(self._room):
            room = np.empty(max(size, 2 * len(self._room)), self._room.dtype)
            room[: self._size] = self._room[: self._size]
            self._room = room
        self._room[self._size : size] = numbers
        self._size = size

    @property
    def width(self):
        """The bytes of one number."""
        return self._room.itemsize

    def write(self, file, begin):
        """All from ``begin`` on."""
        self[begin:].tofile(file)

    def read(self, file, count):
        self.extend(np.fromfile(file, self._room.dtype, count))


class Seen:
    """Numbers the states; a hash table has one more than the number of a state, or 0.

    ``origins`` has a state from which each one was reached first.
    """

    def __init__(self):
        self.states = Growing(np.uint64)
        self.origins = Growing(np.uint32)
        self._table = np.zeros(1 << 12, np.uint32)

    def __len__(self):
        return len(self.states)

    def add(self, states, origins):
        """The numbers of ``states``, of which some may be new; ``origins`` has the number of the one before each."""
        unique, first, places = np.unique(states, return_index=True, return_inverse=True)
        numbers = self._find(unique)
        fresh = np.flatnonzero(numbers < 0)
        fresh = fresh[np.argsort(first[fresh])]
        numbers[fresh] = np.arange(len(self), len(self) + len(fresh))
        self.states.extend(unique[fresh])
        self.origins.extend(origins[first[fresh]])
        self._insert(len(self) - len(fresh))
        return numbers[places]

    def _slots(self, states):
        """Where the search for each of them begins."""
        bits = len(self._table).bit_length() - 1
        return (states * SPREAD >> np.uint64(64 - bits)).astype(np.int64)

    def _find(self, states):
        """The number of each, or -1."""
        slots, numbers = self._slots(states), np.full(len(states), -1, np.int64)
        rest = np.arange(len(states))
        while len(rest):
            held = self._table[slots[rest]].astype(np.int64) - 1
            rest, held = rest[held >= 0], held[held >= 0]
            is_it = self.states[held] == states[rest]
            numbers[rest[is_it]] = held[is_it]
            rest = rest[~is_it]
            slots[rest] = slots[rest] + 1 & len(self._table) - 1
        return numbers

    def _insert(self, begin):
        """Those from the number ``begin`` on, into a table that stays half empty."""
        if 2 * len(self) > len(self._table):
            self._table = np.zeros(1 << (4 * len(self)).bit_length(), np.uint32)
            begin = 0
        step = 1 << 20
        for first in range(begin, len(self), step):
            self._place(first, min(first + step, len(self)))

    def _place(self, begin, end):
        slots, marks = self._slots(self.states[begin:end]), np.arange(begin + 1, end + 1, dtype=np.uint32)
        while len(marks):
            free = self._table[slots] == 0
            self._table[slots[free]] = marks[free]  # of those with one slot the last one gets it
            rest = self._table[slots] != marks
            slots, marks = slots[rest] + 1 & len(self._table) - 1, marks[rest]

    def restore(self):
        """The table, once the columns have been read."""
        self._insert(0)
