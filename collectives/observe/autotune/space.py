"""The parameters that a search may change, and the values that each may have. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from collectives.api import PATIENCE_SECONDS, Changes, Parameters, Topology
from collectives.backends.base import is_large

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Knob:
    """A number from ``least`` to ``most``, of two digits. Equal steps of a search are equal factors of the value."""

    name: str
    least: int | float
    most: int | float

    def value(self, position: float) -> int | float:
        """The value at ``position``, 0 to 1; a multiple of ``least`` if that is an integer."""
        factor = float((self.most / self.least) ** min(1.0, max(0.0, position)))
        return self.least * round(factor) if isinstance(self.least, int) else float(f"{self.least * factor:.1e}")

    def position(self, value: int | float) -> float:
        """The position of ``value``, or of the limit that is next to it."""
        value = min(self.most, max(self.least, value))
        return math.log(value / self.least) / math.log(self.most / self.least)


@dataclass(frozen=True, slots=True)
class Switch:
    """Other values of parameters that have few: each alternative is tried once."""

    name: str
    alternative: Changes


@dataclass(frozen=True, slots=True)
class Space:
    """The ``knobs`` and ``switches`` that make a difference in a world, without the parameters that the user set."""

    knobs: tuple[Knob, ...]
    switches: tuple[Switch, ...]

    @classmethod
    def of(cls, present: Parameters, topology: Topology, fixed: Collection[str]) -> Space:
        """The space around ``present``; ``fixed`` are the names of the parameters that the user has set."""
        free = set(Parameters.__dataclass_fields__) - set(fixed)
        has_stages = 1 < topology.cross_size < topology.size
        has_flat = has_stages and not is_large(topology.size)  # one that is connected
        return cls(
            tuple(knob for knob in (*KNOBS, *(STAGE_KNOBS if has_stages else ())) if knob.name in free),
            tuple(switch for switch in _switches(present, has_flat) if free.issuperset(switch.alternative)),
        )

    @property
    def names(self) -> list[str]:
        """The parameters that may change."""
        switched = [name for switch in self.switches for name in switch.alternative]
        return list(dict.fromkeys([knob.name for knob in self.knobs] + switched))

    def positions(self, parameters: Changes) -> list[float]:
        """Where ``parameters`` are on each knob."""
        return [knob.position(parameters[knob.name]) for knob in self.knobs]

    def changes(self, positions: list[float]) -> Changes:
        """The parameters at ``positions`` of the knobs."""
        return {knob.name: knob.value(place) for knob, place in zip(self.knobs, positions, strict=True)}


KNOBS = (
    Knob("fusion_threshold", 64 * KIBIBYTE, 128 * MEBIBYTE),
    Knob("cycle_time", 0.0001, 0.1),
    Knob("patience", 0.001, 0.1),
)
STAGE_KNOBS = (Knob("pipeline_piece", 64 * KIBIBYTE, 32 * MEBIBYTE),)


def _switches(present: Parameters, has_flat: bool) -> list[Switch]:
    switches: list[Switch] = []
    # Not the other way round: a script that changes gradients after backward, which travel in step(), would fail then.
    if not present.patient:
        switches.append(Switch("patient", {"patient": True, "cycle_time": PATIENCE_SECONDS}))
    if has_flat:
        names = ("hierarchical_allreduce", "hierarchical_allgather")
        switches += [Switch(name, {name: not getattr(present, name)}) for name in names]
    if present.cache_capacity:
        switches.append(Switch("cache_capacity", {"cache_capacity": 0}))
    return switches
