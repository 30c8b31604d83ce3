"""The course of a job until its ranks run, which launchers tell the workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["COURSE", "Course"]

COURSE = "HVD_JOB_COURSE"
"""The variable that has it."""


@dataclass(frozen=True, slots=True)
class Course:
    """When a worker had its place, and when the job was requested; None for a worker that came later.

    In seconds since the epoch, by the clock of the launcher. None in ``placed``: it has its place now.
    """

    requested: float | None = None
    placed: float | None = None

    def variable(self) -> dict[str, str]:
        """The variable of a worker."""
        times = (self.requested, time.time() if self.placed is None else self.placed)
        return {COURSE: " ".join([f"{seconds:.6f}" for seconds in times if seconds is not None])}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Course:
        """The course in the variables of a worker; an empty one in any other process."""
        try:
            *requested, placed = [float(text) for text in environment.get(COURSE, "").split()]
        except ValueError:
            return cls()
        return cls(requested[0] if requested else None, placed)
