"""Copies and keys of objects that change: what a search over the states of a program needs of it."""

import functools
import math
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType, MethodType, NoneType

LONGEST_PAST = 10.0
"""Times that are longer ago are all alike."""
FOREVER = 1e8
FUNCTIONS = (FunctionType, MethodType, functools.partial)


def cloned(value, memo=None):
    """A deep copy, also of what functions have closed over. Frozen dataclasses are shared."""
    if type(value) in ATOMS:
        return value
    memo = {} if memo is None else memo
    known = memo.get(id(value))
    if known is not None:
        return known[0]
    copy = COPIES.get(type(value), _copied)(value, memo)
    memo[id(value)] = copy, value  # which lives as long as its id is known
    return copy


def _copied_list(value, memo):
    copy = []
    memo[id(value)] = copy, value
    copy.extend([each if type(each) in ATOMS else cloned(each, memo) for each in value])
    return copy


def _copied_dict(value, memo):
    copy = {}
    memo[id(value)] = copy, value
    for name, each in value.items():
        copy[name] = each if type(each) in ATOMS else cloned(each, memo)
    return copy


def _copied_set(value, _):
    return set(value)


def _copied_tuple(value, memo):
    return tuple([each if type(each) in ATOMS else cloned(each, memo) for each in value])


def _copied_method(value, memo):
    return MethodType(value.__func__, cloned(value.__self__, memo))


def _copied_partial(value, memo):
    return functools.partial(cloned(value.func, memo), *cloned(value.args, memo), **cloned(value.keywords, memo))


def _copied_function(value, memo):
    if not value.__closure__:
        return value
    cells = tuple(CellType() for _ in value.__closure__)
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    memo[id(value)] = copy, value
    for cell, own in zip(cells, value.__closure__, strict=True):
        cell.cell_contents = cloned(own.cell_contents, memo)
    return copy


def _copied(value, memo):
    """Of an object, if it changes."""
    if not _changes(type(value)):
        return value
    copy = object.__new__(type(value))
    memo[id(value)] = copy, value
    for name in _slots(type(value)) or ():
        object.__setattr__(copy, name, cloned(getattr(value, name), memo))
    for name, each in getattr(value, "__dict__", NO_NAMES).items():
        copy.__dict__[name] = each if type(each) in ATOMS else cloned(each, memo)
    return copy


NO_NAMES = {}
ATOMS = frozenset({str, int, float, bool, bytes, NoneType})
COPIES = {
    list: _copied_list,
    dict: _copied_dict,
    set: _copied_set,
    tuple: _copied_tuple,
    FunctionType: _copied_function,
    MethodType: _copied_method,
    functools.partial: _copied_partial,
}


@functools.cache
def _changes(kind):
    """Whether the objects of a class are ours, and change."""
    if not kind.__module__.startswith(("executors.", "tests.")) or issubclass(kind, int | str | tuple | type):
        return False
    return not (is_dataclass(kind) and kind.__dataclass_params__.frozen)


def _names(value):
    return _slots(type(value)) or vars(value)


@functools.cache
def _slots(kind):
    return getattr(kind, "__slots__", None)


def key_of(value, now, essences=None, names=None):
    """A hashable value that is equal for states with the same future; floats are times, which count from ``now``.

    ``essences`` has for a class a function from an object to the parts that its future depends on; None: all do.
    ``names`` has new names for strings.
    """
    return _Key(now, essences or {}, names or {}).of(value)


class _Key:
    def __init__(self, now, essences, names):
        self._now = now
        self._essences = essences
        self._names = names
        self._seen = {}

    def of(self, value):
        kind = type(value)
        if kind is str:
            return self._names.get(value, value)
        if kind is float:
            return self._time(value)
        if kind in ATOMS or isinstance(value, int):
            return value
        if kind is tuple:
            return tuple([self.of(each) for each in value])
        if kind in (set, frozenset):
            return tuple(sorted(map(repr, map(self.of, value))))
        if kind in FUNCTIONS:
            return self._of_function(value)
        return self._once(value, kind) if kind in (list, dict) or _changes(kind) else self._of_value(value, kind)

    def _time(self, value):
        is_fixed = math.isinf(value) or value > FOREVER
        return value if is_fixed else round(max(value - self._now, -LONGEST_PAST), 6)

    def _once(self, value, kind):
        """An object that changes is another one than those that are equal now."""
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if kind in self._essences:
            return kind.__name__, *[self.of(each) for each in self._essences[kind](value)]
        if kind is list:
            return tuple([self.of(each) for each in value])
        if kind is dict:
            return tuple([(self.of(name), self.of(each)) for name, each in value.items()])
        return kind.__name__, *[self.of(getattr(value, name)) for name in _names(value)]

    def _of_value(self, value, kind):
        if kind in self._essences:
            return kind.__name__, *map(self.of, self._essences[kind](value))
        if self._essences and is_dataclass(value) and not isinstance(value, type):
            return type(value).__name__, *(self.of(getattr(value, field.name)) for field in fields(value))
        return repr(value)

    def _of_function(self, value):
        if isinstance(value, FunctionType):
            return value.__qualname__, *(self.of(cell.cell_contents) for cell in value.__closure__ or ())
        if isinstance(value, MethodType):
            return value.__name__, self.of(value.__self__)
        return self.of(value.func), self.of(value.args), self.of(value.keywords)
