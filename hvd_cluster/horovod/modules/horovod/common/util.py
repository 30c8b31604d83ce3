"""Functions that scripts import from Horovod's module of this name.

``verbose`` is accepted for compatibility and has no effect: no function here tries something out.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from hvd_cluster.core import features
from hvd_cluster.core.features import EXTENSIONS, check_extension, extension_available
from hvd_cluster.ops.arguments import choose_op

__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")

RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)[._-]?(a|b|c|dev|pre|rc)?", re.IGNORECASE)

_cache = functools.cache  # also a name of Horovod's


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: no part is compiled for one version of a framework, so no version can be wrong."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework ``ext_base_name``, such as "torch", sees a GPU; False where there is no binding for it."""
    return extension_available(ext_base_name) and bool(import_module(f"hvd_cluster.{ext_base_name}")._check_has_gpu())


def mpi_built(verbose: bool = False) -> bool:
    """As :func:`hvd_cluster.core.features.mpi_built`."""
    return features.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As :func:`hvd_cluster.core.features.gloo_built`."""
    return features.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """As :func:`hvd_cluster.core.features.nccl_built`."""
    return features.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """As :func:`hvd_cluster.core.features.ddl_built`."""
    return features.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As :func:`hvd_cluster.core.features.ccl_built`."""
    return features.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment inside of the block; those that are None stay as they are."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """A function of ``op`` and the deprecated ``average``, which gives Average, Sum... of ``reduce_ops``."""

    def choose(op: Any, average: bool | None) -> Any:
        return getattr(reduce_ops, choose_op(average, op).name.capitalize())

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether ``num_rank`` is 1, 2, 4, 8..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  Horovod's name
    """``l`` in ``n`` pieces, of which the first ones are longer by one if the length is not a multiple of ``n``."""
    length, longer = divmod(len(l), n)
    starts = [place * length + min(place, longer) for place in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(starts)]


def is_iterable(x: object) -> bool:
    """Whether ``iter`` takes ``x``."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` or newer; a pre-release is older than its release.

    ValueError where ``target`` is not of the form major.minor.patch, or one of the two is no version.
    """
    if not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"target={target!r} must be a version of the form major.minor.patch, such as '2.4.0'")
    return _order(ver) >= _order(target)


def _order(version: str) -> tuple[tuple[int, ...], bool]:
    match = RELEASE.match(version) if isinstance(version, str) else None
    if match is None:
        raise ValueError(f"{version!r} is not a version, such as '2.4.0'")
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), match[2] is None
