"""Pure: the plan of a campaign, as text that can be played again, and the search for the shortest one that fails."""

import json
from dataclasses import asdict, dataclass, field, replace

from tests.faults.events import Ambush, Blow


@dataclass(frozen=True)
class Event:
    """What happens at once: ``parts``, Blows and at most one Ambush, when the job has at least ``grow`` ranks.

    If it ``ends`` the training, the ambush lies while the job ends.
    """

    parts: tuple[Blow | Ambush, ...]
    grow: int = 0
    ends: bool = False

    @property
    def blows(self):
        return tuple(part for part in self.parts if isinstance(part, Blow))

    @property
    def ambush(self):
        return next((part for part in self.parts if isinstance(part, Ambush)), None)

    def __str__(self):
        return " + ".join(map(str, self.parts)) + (" at the end" if self.ends else "")


@dataclass(frozen=True)
class Plan:
    """A whole campaign: the names of its arena, model and samples, the most ranks, and its ``events``."""

    arena: str
    ranks: int
    model: str
    samples: str
    events: tuple[Event, ...] = field(default=())

    def encode(self):
        """As text."""
        events = [{**asdict(event), "parts": [*map(_encoded, event.parts)]} for event in self.events]
        return json.dumps({**asdict(self), "events": events}, indent=1)

    @classmethod
    def decode(cls, text):
        """The reverse of :meth:`encode`."""
        given = json.loads(text)
        events = [Event(tuple(map(_decoded, each["parts"])), each["grow"], each["ends"]) for each in given["events"]]
        return cls(**{**given, "events": tuple(events)})


def _encoded(part):
    return {"is": type(part).__name__, **asdict(part)}


def _decoded(given):
    kind = {"Blow": Blow, "Ambush": Ambush}[given.pop("is")]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def fitting(event, size):
    """``event`` for a job of ``size`` ranks, of which at least one is left alone; it was drawn for another number."""
    targets, parts = set(), []
    for part in [_within(part, size) for part in event.parts]:
        if isinstance(part, Blow) and part.removes:
            if part.target in targets or len(targets | set(part.removes)) >= size:
                continue
            targets |= set(part.removes)
        parts.append(part)
    return replace(event, parts=tuple(parts))


def _within(part, size):
    if isinstance(part, Ambush):
        return replace(part, spared=part.spared % size if part.spared >= 0 else part.spared)
    if part.kind == "offer":
        return part
    return replace(part, target=part.target % size, beside=tuple(rank for rank in part.beside if rank < size))


# The shortest form.


def shrink(plan, fails):
    """The shortest plan that was found and ``fails``, as ``plan`` does: first fewer events, then fewer parts of each,
    then simpler ones. ``fails`` is called with plans, and with none twice.
    """
    known = {plan: True}

    def still(other):
        if other not in known:
            known[other] = fails(other)
        return known[other]

    plan = replace(plan, events=fewest(plan.events, lambda events: still(replace(plan, events=events))))
    for number in range(len(plan.events)):
        plan = _with_fewer_parts(plan, number, still)
    return _simplest(plan, still)


def fewest(items, fails):
    """Delta debugging: a part of the tuple ``items`` that still ``fails``, and does not without any single one."""
    pieces = 2
    while len(items) > 1:
        length = -(-len(items) // pieces)
        starts = range(0, len(items), length)
        rest = [items[begin : begin + length] for begin in starts]
        rest += [items[:begin] + items[begin + length :] for begin in starts if pieces > 2 or len(items) > 2]
        smaller = next((each for each in rest if each and len(each) < len(items) and fails(each)), None)
        if smaller is not None:
            items, pieces = smaller, 2
        elif length == 1:
            break
        else:
            pieces = min(len(items), 2 * pieces)
    return items


def _with_fewer_parts(plan, number, fails):
    def with_parts(parts):
        return _with_event(plan, number, replace(plan.events[number], parts=parts))

    return with_parts(fewest(plan.events[number].parts, lambda parts: fails(with_parts(parts))))


def _with_event(plan, number, event):
    return replace(plan, events=(*plan.events[:number], event, *plan.events[number + 1 :]))


def _simplest(plan, fails):
    """Take each simplification that still fails, until there is none."""
    while True:
        simpler = next((each for each in _simpler(plan) if fails(each)), None)
        if simpler is None:
            return plan
        plan = simpler


def _simpler(plan):
    for name, value in (("arena", "local"), ("model", "numpy"), ("samples", "sampler")):
        if getattr(plan, name) != value:
            yield replace(plan, **{name: value})
    if plan.ranks > 2:
        yield replace(plan, ranks=plan.ranks - 1)
    for number, event in enumerate(plan.events):
        for simpler in _simpler_events(event):
            yield _with_event(plan, number, simpler)


def _simpler_events(event):
    if event.grow:
        yield replace(event, grow=0)
    for number, part in enumerate(event.parts):
        for simpler in _simpler_parts(part):
            yield replace(event, parts=(*event.parts[:number], simpler, *event.parts[number + 1 :]))


def _simpler_parts(part):
    """With no delay, a shorter time or fewer ranks."""
    if isinstance(part, Ambush) and part.count > 1:
        yield replace(part, count=1)
    if isinstance(part, Ambush) and part.kind in {"stop", "exhaust", "starve"} and part.seconds > 1:
        yield replace(part, seconds=_half(part.seconds))
    if isinstance(part, Blow):
        if part.at:
            yield replace(part, at=0.0)
        if part.seconds > 1:
            yield replace(part, seconds=_half(part.seconds))


def _half(seconds):
    return max(1.0, round(seconds / 2, 1))
