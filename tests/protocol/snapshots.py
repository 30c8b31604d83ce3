"""Copies and keys of objects that change: what a search over the states of a program needs of it."""

import functools
import math
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CellType, FunctionType, MethodType

LONGEST_PAST = 10.0
"""Times that are longer ago are all alike."""
FOREVER = 1e8
FUNCTIONS = (FunctionType, MethodType, functools.partial)


def cloned(value, memo=None):
    """A deep copy, also of what functions have closed over. Frozen dataclasses are shared."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    copy = _copy(value, memo)
    memo[id(value)] = copy, value  # which lives as long as its id is known
    return copy


def _copy(value, memo):
    if isinstance(value, list):
        copy = memo.setdefault(id(value), ([], value))[0]
        copy.extend(cloned(each, memo) for each in value)
        return copy
    if isinstance(value, dict):
        copy = memo.setdefault(id(value), ({}, value))[0]
        copy.update((name, cloned(each, memo)) for name, each in value.items())
        return copy
    if isinstance(value, set):
        return set(value)
    if type(value) is tuple:
        return tuple(cloned(each, memo) for each in value)
    if isinstance(value, FunctionType):
        return _copied_function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, cloned(value.__self__, memo))
    if isinstance(value, functools.partial):
        return functools.partial(cloned(value.func, memo), *cloned(value.args, memo), **cloned(value.keywords, memo))
    return _copied_object(value, memo) if _changes(value) else value


def _copied_function(value, memo):
    if not value.__closure__:
        return value
    cells = tuple(CellType() for _ in value.__closure__)
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    memo[id(value)] = copy, value
    for cell, own in zip(cells, value.__closure__, strict=True):
        cell.cell_contents = cloned(own.cell_contents, memo)
    return copy


def _copied_object(value, memo):
    copy = object.__new__(type(value))
    memo[id(value)] = copy, value
    for name in _names(value):
        object.__setattr__(copy, name, cloned(getattr(value, name), memo))
    return copy


def _changes(value):
    """Whether it is an object of ours that changes."""
    kind = type(value)
    if not kind.__module__.startswith(("executors.", "tests.")) or isinstance(value, type | BuiltinFunctionType):
        return False
    if isinstance(value, int | str | tuple):
        return False
    return not (is_dataclass(value) and value.__dataclass_params__.frozen)


def _names(value):
    return getattr(type(value), "__slots__", None) or list(vars(value))


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
        if value is None or isinstance(value, int | bytes):
            return value
        if kind is tuple:
            return tuple(map(self.of, value))
        if kind in (set, frozenset):
            return tuple(sorted(map(repr, map(self.of, value))))
        if kind in FUNCTIONS:
            return self._of_function(value)
        return self._once(value, kind) if kind in (list, dict) or _changes(value) else self._of_value(value, kind)

    def _time(self, value):
        is_fixed = math.isinf(value) or value > FOREVER
        return value if is_fixed else round(max(value - self._now, -LONGEST_PAST), 6)

    def _once(self, value, kind):
        """An object that changes is another one than those that are equal now."""
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if kind in self._essences:
            return kind.__name__, *map(self.of, self._essences[kind](value))
        if isinstance(value, list):
            return tuple(map(self.of, value))
        if isinstance(value, dict):
            return tuple((self.of(name), self.of(each)) for name, each in value.items())
        return type(value).__name__, *(self.of(getattr(value, name)) for name in _names(value))

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
