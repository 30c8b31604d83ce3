"""The outcome of a function in a worker: its value, or its exception with rank, host and traceback.

The worker calls :func:`capture` and sends the bytes; the driver does ``cloudpickle.loads(data).unwrap()``.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import cloudpickle

from executors.api import RemoteError, WorkerError
from executors.failures import Failure, FailureKind, brief, kind_of_error

Dumps = Callable[[object], bytes]


def _dumps(value: object) -> bytes:
    data: bytes = cloudpickle.dumps(value)
    return data


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker; ``name`` is the readable name of the host, ``dumps`` pickles values and exceptions."""

    rank: int
    host: str
    name: str
    dumps: Dumps = _dumps

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.name}"

    def error(self, text: str, exit_code: int | None = None) -> WorkerError:
        return WorkerError(text, self.rank, self.host, exit_code)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a function on one rank.

    ``payload`` is the pickled value, or the pickled exception where there is a ``traceback``. It stays pickled until
    :meth:`unwrap`, so that an outcome with any content can be read. ``kind`` is that of the failure.
    """

    rank: int
    host: str
    payload: bytes = field(repr=False)
    traceback: str | None = None
    host_name: str = ""
    kind: FailureKind = FailureKind.EXCEPTION

    @classmethod
    def of(cls, error: BaseException, rank: int, host: str, host_name: str = "") -> Outcome:
        """The outcome of a worker that sent none, such as one that died: :meth:`unwrap` raises ``error``."""
        return cls(rank, host, _dumps(error), "", host_name, kind_of_error(error))

    @classmethod
    def raised(cls, error: Exception, rank: int, host: str, host_name: str = "") -> Outcome:
        """The outcome of a function that raised ``error``; to be called where it is caught."""
        return _failure(error, error, _Worker(rank, host, host_name or host))

    @property
    def failed(self) -> bool:
        """Whether the function raised, or its value could not be sent."""
        return self.traceback is not None

    @property
    def consequence(self) -> bool:
        """Whether the function failed because another rank did."""
        return self.failed and self.kind.is_consequence

    def unwrap(self) -> object:
        """The value of the function.

        Raises the worker's own exception, with its own type, and with a RemoteError as its cause. Raises WorkerError if
        the function left by ``sys.exit``, or if the value or exception cannot be pickled or unpickled.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self._load()

    def exception(self) -> BaseException | None:
        """The exception that :meth:`unwrap` raises because the function failed, or None."""
        if self.traceback is None:
            return None
        try:
            error = self._load()
        except WorkerError as reason:
            return reason
        if not isinstance(error, BaseException):
            raise TypeError(f"the outcome of rank {self.rank} failed with {error!r}, which is not an exception")
        error.__cause__ = self._origin()
        return error

    def failure(self) -> Failure:
        """That of a function that failed."""
        error = self.exception()
        return Failure(self.kind, f"raised {_shown(error)}", error=error)

    def _load(self) -> object:
        try:
            return pickle.loads(self.payload)
        except Exception as error:  # noqa: BLE001  unpickling runs code of the user
            raise WorkerError(
                f"the result of rank {self.rank} on {self.host_name or self.host} cannot be unpickled in the driver "
                f"({brief(error)}); its modules must be importable in the driver too",
                self.rank,
                self.host,
            ) from self._origin()

    def _origin(self) -> RemoteError | None:
        return None if not self.traceback else RemoteError(self.rank, self.host, self.traceback, self.host_name)


def values(outcomes: Iterable[Outcome]) -> list[object]:
    """The values by rank. Raises the failure of the lowest rank: which of several is the cause, the driver knows."""
    return [outcome.unwrap() for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def capture(fn: Callable[[], object], rank: int, host: str, host_name: str = "", dumps: Dumps = _dumps) -> bytes:
    """Call ``fn`` and pickle its :class:`Outcome`. Raises only KeyboardInterrupt, which ends the worker.

    ``host_name`` is the readable name of the host, if ``host`` is an identifier for machines. ``dumps`` pickles the
    value or the exception. It must be of the same library as the pickler of the call: each library keeps its own list
    of the classes that it has pickled by value, and only through that list does a class of the main script come back as
    the same class.
    """
    return _dumps(observe(fn, rank, host, host_name, dumps))


def observe(fn: Callable[[], object], rank: int, host: str, host_name: str = "", dumps: Dumps = _dumps) -> Outcome:
    """The outcome that :func:`capture` pickles."""
    worker = _Worker(rank, host, host_name or host, dumps)
    try:
        value = fn()
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        return _failure(_exited(error, worker), error, worker)
    except BaseException as error:  # noqa: BLE001  the driver handles every exception
        return _failure(error, error, worker)
    return _success(value, worker)


def _success(value: object, worker: _Worker) -> Outcome:
    try:
        return Outcome(worker.rank, worker.host, worker.dumps(value), None, worker.name)
    except Exception as reason:  # noqa: BLE001  pickling runs code of the user
        error = worker.error(
            f"{worker} returned a value of type {_name(value)} that cannot be pickled "
            f"({brief(reason)}); return plain data, such as numbers, lists or arrays"
        )
        return _failure(error, reason, worker)


def _failure(error: BaseException, origin: BaseException, worker: _Worker) -> Outcome:
    own_frame = origin.__traceback__
    frames = own_frame.tb_next if own_frame else None
    text = "".join(traceback.format_exception(type(origin), origin, frames))
    payload = _dump_error(error, worker)
    return Outcome(worker.rank, worker.host, payload, text, worker.name, kind_of_error(origin))


def _dump_error(error: BaseException, worker: _Worker) -> bytes:
    try:
        return dump_error(error, worker.dumps)
    except Exception as reason:  # noqa: BLE001  pickling runs code of the user
        stand_in = worker.error(
            f"{worker} raised {brief(error)}; the exception itself, of type {_name(error)}, "
            f"cannot be pickled ({brief(reason)})"
        )
        return _dumps(stand_in)


def dump_error(error: BaseException, dumps: Dumps) -> bytes:
    """``error`` so that it unpickles as itself, but for its cause. Raises an exception where that cannot be."""
    try:
        return _dump_checked(error, error, dumps)
    except Exception:  # noqa: BLE001  pickling runs code of the user
        return _dump_checked(_Parts(error), error, dumps)


def _dump_checked(form: object, error: BaseException, dumps: Dumps) -> bytes:
    data = dumps(form)
    # An exception with a constructor of its own often pickles well and only fails when it is unpickled.
    if type(pickle.loads(data)) is not type(error):
        raise TypeError("it unpickles as another type")
    return data


class _Parts:
    """Unpickles as the original exception, without a call of its constructor."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[object, ...]]:
        return _rebuild, (type(self._error), self._error.args, dict(vars(self._error)))


def _rebuild(kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _exited(error: SystemExit, worker: _Worker) -> WorkerError:
    code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    shown = "" if error.code is None else repr(error.code)
    return worker.error(f"{worker} called sys.exit({shown}) instead of returning a value", code)


def _shown(error: BaseException | None) -> str:
    try:
        return repr(error)
    except Exception:  # noqa: BLE001  it runs code of the user
        return "<an exception whose repr() fails>"


def _name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
