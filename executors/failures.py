"""The failures of the workers of a job, and which of them is the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from executors.failure import Failure, Kind, likeliest, raised_elsewhere

__all__ = ["Failed", "Failures"]

# With this one Python ends after an exception of the script.
EXCEPTION_CODE = 1


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of ``worker``, which had this ``rank`` in the world of that moment, or none."""

    worker: str
    rank: int | None
    failure: Failure


class Failures:
    """One for each worker that failed, in the order in which they were reported."""

    def __init__(self) -> None:
        self._failed: dict[str, Failed] = {}
        self._exceptions: dict[str, str] = {}
        self._last = ""
        self._blamed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._failed)

    def of(self, worker: str) -> Failure | None:
        """That of ``worker``, if it has failed."""
        failed = self._failed.get(worker)
        return failed.failure if failed else None

    def add(self, worker: str, rank: int | None, failure: Failure) -> None:
        """``worker`` has failed, for the first time."""
        self._failed[worker] = Failed(worker, rank, failure)

    def improve(self, worker: str, failure: Failure) -> None:
        """Another report of the same end: it counts if it is likelier."""
        known = self._failed[worker]
        if failure.kind < known.failure.kind:
            del self._failed[worker]
            self._failed[worker] = replace(known, failure=failure)

    def forget(self, worker: str) -> None:
        """``worker`` has not failed after all."""
        self._failed.pop(worker, None)

    def explain(self, worker: str, failure: Failure) -> None:
        """How the failed ``worker`` ended is known now."""
        self._failed[worker] = replace(self._failed[worker], failure=failure)

    def note_exception(self, worker: str, text: str) -> None:
        """``worker`` has reported an exception, which may end it."""
        self._exceptions[worker] = text

    def has_exception(self, worker: str) -> bool:
        """Whether ``worker`` has reported one."""
        return bool(self._exceptions.get(worker))

    def with_exception(self, worker: str, failure: Failure) -> Failure:
        """``failure``, with the exception that the worker has reported: its standard error may not show it.

        The user may have caught it since. So it is the reason only of an end that may be that of an exception.
        """
        text = self._exceptions.get(worker, "")
        if not text or failure.kind not in (Kind.SIGNAL, Kind.EXIT):
            return failure
        if failure.kind is Kind.EXIT and failure.exit_code in (EXCEPTION_CODE, None):
            return replace(failure, kind=Kind.EXCEPTION, text=f"raised {text}, and {failure.text}")
        return replace(failure, text=f"{failure.text}; before, it raised {text}")

    def end(self, blamed: Sequence[str] = ()) -> None:
        """The job ends; see :attr:`last`. If workers are ``blamed``, the cause is one of them."""
        self._last = next(reversed(self._failed), "")
        self._blamed = tuple(blamed)

    @property
    def has_cause(self) -> bool:
        """Whether a worker failed by itself, and not because of another one."""
        return any(not failed.failure.kind.is_consequence for failed in self._failed.values())

    @property
    def raised_elsewhere(self) -> tuple[int, str] | None:
        """The rank that raised, and how, where all failed because of it and it still runs; None where none is named."""
        named = [raised_elsewhere(failed.failure.last_lines) for failed in self._failed.values()]
        found = None if self.has_cause else next(filter(None, named), None)
        is_known = found is not None and any(failed.rank == found[0] for failed in self._failed.values())
        return None if is_known else found

    @property
    def cause(self) -> Failed:
        """The likeliest, the first among several of one kind."""
        failed = [self._failed[worker] for worker in self._blamed if worker in self._failed] or self._failed.values()
        return likeliest(failed, lambda failed: failed.failure.kind)

    @property
    def last(self) -> Failed | None:
        """The last one before :meth:`end`."""
        return self._failed.get(self._last)
