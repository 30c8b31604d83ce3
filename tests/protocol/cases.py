"""Small jobs whose states are searched."""

from tests.protocol.search import Case


def hosts(**slots):
    """The hosts that the job may use from then on."""
    return "found", tuple(sorted(slots.items()))


def notice(number):
    """The worker is asked to leave."""
    return "drain", f"worker-{number}"


EXHAUSTIVE = {
    "two ranks": Case({"a": 1, "b": 1}, faults=2),
    "a newcomer": Case({"a": 1}, faults=1, changes=(hosts(a=1, b=1),), most=2),
    "a successor": Case({"a": 1, "b": 1}, faults=1, changes=(hosts(a=1, b=1, c=1),), most=2, trains=True),
    "a host leaves": Case({"a": 1, "b": 1}, faults=1, changes=(hosts(b=1),), trains=True),
    "a notice": Case({"a": 1, "b": 1, "c": 1}, faults=1, changes=(notice(2),), most=3, trains=True, steps=1),
}
"""All of their states are seen, if there is time."""

RANDOM = {
    "four ranks": Case({"a": 2, "b": 2}, faults=3, changes=(hosts(a=2, b=2, c=1), notice(0)), most=5, steps=3),
    "at least two": Case({"a": 1, "b": 1, "c": 1}, least=2, faults=2, changes=(hosts(a=1, b=1, c=1, d=2),), steps=3),
    "moving on": Case({"a": 2}, faults=1, changes=(hosts(a=2, b=2), hosts(b=2)), most=4, steps=4),
}
"""They have too many states: random ways are seen."""
