"""A state of everything is a number of 64 bits: the numbers of its three parts, of which each is computed once.

* A box: the driver, by its number, and the messages that are on their way to it.
* A job: the ranks, and what is true for all of them.
* A plan: how many faults may come, and the planned changes.

The parts depend little on each other: what the ranks can do depends on their job only, and what the driver does with it
on the box only. So there are many times fewer parts than states, and the followers of most states are found by numbers
alone. No two states have the same number.
"""

from tests.protocol.forgotten import forgetting, is_stale
from tests.protocol.ranks import SENT, STEP, TOLD, UNSENT, Job, renamed_in

PLAN_BITS, JOB_BITS = 8, 28
BOX = PLAN_BITS + JOB_BITS
PLANS, JOBS = (1 << PLAN_BITS) - 1, (1 << JOB_BITS) - 1
OUTBOX = Job._fields.index("outbox")
HALF = 32
OUTPUTS = (1 << HALF) - 1
NOTHING = 0
"""The number of the empty word, of the empty output, and of the job and the plan of a state that is an end."""


class Numbering:
    """Values by number, and numbers by value; the number 0 is that of ``nothing``."""

    def __init__(self, nothing, most):
        self.values = [nothing]
        self._numbers = {nothing: NOTHING}
        self._most = most

    def __len__(self):
        return len(self.values)

    def __getitem__(self, number):
        return self.values[number]

    def of(self, value):
        """Its number, which it may get now."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            if number > self._most:
                raise OverflowError(f"a state has room for {self._most} parts of a kind, and there are more")
            self.values.append(value)
        return number


class States:
    """The states of the ranks of ``protocol`` beside ``drivers``, with up to ``rounds`` worlds."""

    def __init__(self, drivers, protocol, rounds=8):
        self.drivers = drivers
        self.protocol = protocol
        self._rounds = rounds
        self.boxes = Numbering(None, (1 << 64 - BOX) - 1)
        self.jobs = Numbering(None, JOBS)
        self.plans = Numbering(None, PLANS)
        self._words = Numbering((), JOBS)
        self._outputs = Numbering((), JOBS)
        self._is_end = bytearray([True])
        self._far = set()
        self._steps = {}
        self._moves = {}
        self._late_moves = {}
        self._fault_kinds = Numbering(None, JOBS)
        self._plan_faults = {}
        self._faults = {}
        self._heard = {}
        self._put_out = {}
        self._plans_after = {}

    # Parts.

    def first(self, slots, faults, changes):
        """The state in which the driver has found the hosts with ``slots``."""
        job = Job(may_be_lost=faults > 0).putting(TOLD, ("found", tuple(sorted(slots.items()))))
        return self._moved(self._box(0, ()), self.plans.of((faults, changes)), self._numbered([("", job)]))[0]

    def training(self, slots, faults, changes):
        """The state in which all ranks of the first world have the state of the training."""
        state = self.first(slots, faults, ())
        while self._is_starting(*self.parts(state)):
            names = dict(self.named_followers(state))
            state = next(follower for name, follower in names.items() if f"collective {STEP}" not in name)
        return state & ~PLANS | self.plans.of((faults, changes))

    def _is_starting(self, box, job, _):
        return box[1] or not all(rank.op == STEP for rank in job.ranks)

    def parts(self, state):
        """The box, the job and the plan."""
        box, job, plan = state >> BOX, state >> PLAN_BITS & JOBS, state & PLANS
        return self.boxes[box], self.jobs[job], self.plans[plan]

    def is_end(self, state):
        return self._is_end[state >> BOX]

    def is_far(self, state):
        """Whether it has more worlds than are searched."""
        return bool(self._far) and (state >> PLAN_BITS & JOBS) in self._far

    def end(self, state):
        """None for success, or the error; "" while the job goes on."""
        return self.drivers[self.boxes[state >> BOX][0]].end

    def _box(self, number, messages):
        driver = self.drivers[number]
        if self.protocol.is_reduced:
            messages = [each for each in messages if not is_stale(each, driver.unformed)]
        box = self.boxes.of((number, tuple(sorted(messages)) if driver.end == "" else ()))
        if box == len(self._is_end):
            self._is_end.append(driver.end != "")
        return box

    def _numbered(self, moves):
        """The jobs of those without a word, and pairs of the job and the word of the others; all by number."""
        silent, spoken, before, number = [], [], None, NOTHING
        for _, job in moves:
            word = self._words.of(job.outbox)
            if job[:OUTBOX] != before:  # the same kill may have two words
                before, number = job[:OUTBOX], self._number(job)
            if word:
                spoken.append((number << PLAN_BITS, word))
            else:
                silent.append(number << PLAN_BITS)
        return silent, spoken

    def _number(self, job):
        number = self.jobs.of(forgetting(job) if self.protocol.is_reduced else job._replace(outbox=()))
        if self._has_many_worlds(self.jobs[number]):
            self._far.add(number)
        return number

    def _has_many_worlds(self, job):
        return len(job.worlds) > self._rounds

    # A search that goes on has the numbers of the earlier one.

    def lists(self):
        """What the numbers of states stand for."""
        numberings = {"boxes": self.boxes, "jobs": self.jobs, "plans": self.plans}
        return {name: each.values for name, each in numberings.items()} | {"drivers": self.drivers.known}

    def restore(self, lists):
        """Those of an earlier search, which are the same as far as both go."""
        self.drivers.extend(lists["drivers"])
        numbers = [
            *map(self.jobs.of, lists["jobs"][1:]),
            *map(self.plans.of, lists["plans"][1:]),
            *(self._box(*box) for box in lists["boxes"][1:]),
        ]
        if numbers != [number for name in ("jobs", "plans", "boxes") for number in range(1, len(lists[name]))]:
            raise RuntimeError("the states do not get the same numbers again")
        self._far.update(number for number, job in enumerate(self.jobs.values) if job and self._has_many_worlds(job))

    @property
    def sizes(self):
        """How many parts there are."""
        return f"{len(self.jobs)} jobs, {len(self.boxes)} boxes, {len(self.drivers)} drivers"

    # Followers, by number.

    def followers(self, state):
        """Those without a fault of the surroundings, of which slow ones come only where there are no others."""
        box, job, plan = state >> BOX, state >> PLAN_BITS & JOBS, state & PLANS
        steps, moves = self._steps.get(box), self._moves.get(job)
        if steps is None:
            steps = self._steps[box] = [step[1:] for step in self._named_steps(box)]
        if moves is None:
            moves = self._moves[job] = self._numbered(self.protocol.quick(self.jobs[job]))
        found = self._stepped(steps, job << PLAN_BITS, plan)
        found += self._moved(box, plan, moves)
        return found or self._slow(box, job, plan)

    def _slow(self, box, job, plan):
        if job not in self._late_moves:
            self._late_moves[job] = self._numbered(self.protocol.slow(self.jobs[job]))
        alarms = [step[1:] for step in self._named_steps(box, late=True)]
        return self._stepped(alarms, job << PLAN_BITS, plan) + self._moved(box, plan, self._late_moves[job])

    def faults(self, state):
        """Kills and planned changes."""
        box, job, plan = state >> BOX, state >> PLAN_BITS & JOBS, state & PLANS
        if plan not in self._plan_faults:
            self._plan_faults[plan] = self._kinds_of_faults(plan)
        found = []
        for kind, after in self._plan_faults[plan]:
            moves = self._faults.get(job << HALF | kind)
            if moves is None:
                moves = self._numbered(self._fault_moves(self.jobs[job], self._fault_kinds[kind]))
                self._faults[job << HALF | kind] = moves
            found += self._moved(box, after, moves)
        return found

    def _kinds_of_faults(self, plan):
        """The kinds of faults that may come, by number, and the plan after each of them."""
        faults, changes = self.plans[plan]
        found = []
        if faults:
            found.append((self._fault_kinds.of(("kill", faults == 1)), self.plans.of((faults - 1, changes))))
        if changes:
            found.append((self._fault_kinds.of(changes[0]), self.plans.of((faults, changes[1:]))))
        return found

    def _fault_moves(self, job, kind):
        return self.protocol.kills(job, kind[1]) if kind[0] == "kill" else self.protocol.changes(job, *kind)

    def _stepped(self, steps, job, plan):
        """The states after ``steps`` of the driver."""
        rest = job | plan
        return [self._with_output(box, job, plan, output) if output else box << BOX | rest for box, output in steps]

    def _moved(self, box, plan, moves):
        """The states after ``moves``, as far as the driver can take their words."""
        silent, spoken = moves
        base = box << BOX | plan
        found = [base | job for job in silent]
        for job, word in spoken:
            heard = self._heard.get(box << HALF | word)
            if heard is None:
                heard = self._hear(box, word)
            if heard & OUTPUTS:
                found.append(self._with_output(heard >> HALF, job, plan, heard & OUTPUTS))
            elif heard:
                found.append(heard >> HALF << BOX | job | plan)
        return found

    def _hear(self, box, word):
        """The box after ``word``, and the output, in one number; NOTHING: the word cannot come there."""
        number, messages = self.boxes[box]
        new, output = self._after(number, messages, self._words[word])
        heard = self._heard[box << HALF | word] = new << HALF | output
        return heard

    def _after(self, number, messages, word):
        """The box after a driver with ``messages`` has got ``word``, and the output, which has new names."""
        told, rest = [], list(word)
        while rest:
            kind, value = rest.pop(0)
            if kind == TOLD:
                number, outputs, names = self.drivers.after(number, value)
                messages, rest = _later(messages, outputs, names), list(renamed_in(tuple(rest), names))
                told += [(outputs, tuple(sorted(names.items())))] if outputs or names else []
            elif kind == SENT:
                messages = (*messages, value)
            else:
                others = [message for message in messages if message[:2] != ("report", value)]
                if (len(others) < len(messages)) != (kind == UNSENT):
                    return NOTHING, NOTHING
                messages = others
        return self._box(number, messages), self._outputs.of(tuple(told))

    def _with_output(self, box, job, plan, output):
        """The state after the driver has put out something."""
        key = job << HALF | output
        found = self._put_out.get(key)
        if found is None:
            silent, spoken = self._numbered([("", self._ordered(self.jobs[job >> PLAN_BITS], self._outputs[output]))])
            found = self._put_out[key] = spoken[0] if spoken else (silent[0], NOTHING)
        if self._is_end[box]:
            return box << BOX
        job, word = found
        if word:
            box = (self._heard.get(box << HALF | word) or self._hear(box, word)) >> HALF
        return box << BOX | job | self._renamed(plan, output)

    def _ordered(self, job, outputs):
        for orders, names in outputs:
            for order in orders:
                job = self.protocol.ordered(job, *order)
            job = job.renamed(dict(names)) if names else job
        return job

    def _renamed(self, plan, output):
        key = plan << HALF | output
        if key not in self._plans_after:
            for _, names in self._outputs[output]:
                faults, changes = self.plans[plan]
                plan = self.plans.of((faults, renamed_in(changes, dict(names))))
            self._plans_after[key] = plan
        return self._plans_after[key]

    def _named_steps(self, box, late=False):
        """What the driver does by itself: a name, the box, and the output."""
        number, messages = self.boxes[box]
        for message in () if late else dict.fromkeys(messages):
            rest = list(messages)
            rest.remove(message)
            yield f"driver: {message[:3]}", *self._after(number, rest, [(TOLD, message)])
        for place in self.drivers[number].late if late else self.drivers[number].soon:
            yield "late alarm" if late else "alarm", *self._after(number, messages, [(TOLD, ("ring", place))])

    # Followers, by name.

    def named_followers(self, state):
        """Pairs of a name and a state, as :meth:`followers`."""
        job = self.jobs[state >> PLAN_BITS & JOBS]
        found = [*self._named_stepped(state), *self._named(state, self.protocol.quick(job))]
        return found or [*self._named_stepped(state, late=True), *self._named(state, self.protocol.slow(job))]

    def named_faults(self, state):
        """Pairs of a name and a state, as :meth:`faults`."""
        job = self.jobs[state >> PLAN_BITS & JOBS]
        for kind, plan in self._kinds_of_faults(state & PLANS):
            yield from self._named(state, self._fault_moves(job, self._fault_kinds[kind]), plan)

    def _named(self, state, moves, plan=None):
        plan = state & PLANS if plan is None else plan
        for name, job in moves:
            for follower in self._moved(state >> BOX, plan, self._numbered([(name, job)])):
                yield name, follower

    def _named_stepped(self, state, late=False):
        for name, box, output in self._named_steps(state >> BOX, late):
            job = state & JOBS << PLAN_BITS
            yield name, self._stepped([(box, output)], job, state & PLANS)[0]


def _later(messages, outputs, names):
    """The messages when further worlds may have been published, with new names."""
    worlds = sum(order[0] == "world" for order in outputs)
    if worlds:
        messages = [_aged(message, worlds) for message in messages]
    return renamed_in(tuple(messages), names) if names else messages


def _aged(message, worlds):
    is_about_one = message[0] == "report" and message[3] is not None
    return (*message[:3], message[3] + worlds, message[4]) if is_about_one else message
