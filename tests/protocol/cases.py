"""Small jobs whose states are searched."""

from tests.protocol.search import Case


def hosts(**slots):
    """The hosts that the job may use from then on."""
    return "found", tuple(sorted(slots.items()))


def notice(number=None):
    """The worker is asked to leave; None: any one of them."""
    return "drain", "" if number is None else f"worker-{number}"


TWO, THREE, FOUR = ({host: 1 for host in "abcd"[:count]} for count in (2, 3, 4))

EXHAUSTIVE = {
    "two ranks": Case(TWO, faults=3),
    "a newcomer": Case({"a": 1}, changes=(hosts(a=1, b=1),), most=2),
    "a successor": Case(TWO, changes=(hosts(a=1, b=1, c=1),), most=2, trains=True),
    "a host leaves": Case(TWO, changes=(hosts(b=1),), trains=True),
    "a notice": Case(THREE, changes=(notice(2),), most=3, trains=True, steps=1),
    "three ranks": Case(THREE, faults=3, trains=True, steps=1),
    "three ranks from the start": Case(THREE, faults=1, steps=1),
    "a fourth rank": Case(THREE, changes=(hosts(a=1, b=1, c=1, d=1),), trains=True, steps=1),
    "three ranks and a notice": Case(THREE, faults=3, changes=(notice(),), trains=True, steps=1),
    "four ranks": Case(FOUR, trains=True, steps=1),
    "four ranks, two kills": Case(FOUR, faults=2, trains=True, steps=1),
    "four ranks, three kills": Case(FOUR, faults=3, trains=True, steps=1),
}
"""All of their states are seen, the largest in minutes."""

LARGE = {
    "four workers, two changes": Case(
        THREE, faults=3, changes=(hosts(a=1, b=1, c=1, d=1), notice()), trains=True, steps=1
    ),
}
"""Not searched whole yet: it takes hours, so that a folder should keep it."""

RANDOM = {
    "two ranks on each of two hosts": Case(
        {"a": 2, "b": 2}, faults=3, changes=(hosts(a=2, b=2, c=1), notice(0)), most=5, steps=3
    ),
    "at least two": Case({"a": 1, "b": 1, "c": 1}, least=2, faults=2, changes=(hosts(a=1, b=1, c=1, d=2),), steps=3),
    "moving on": Case({"a": 2}, faults=1, changes=(hosts(a=2, b=2), hosts(b=2)), most=4, steps=4),
}
"""They have too many states: random ways are seen."""
