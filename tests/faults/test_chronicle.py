"""The checks of a campaign find what they are for."""

import json
from dataclasses import replace

import pytest

from tests.faults.bout import Outcome
from tests.faults.chronicle import (
    Chronicle,
    Hit,
    Result,
    ViolationError,
    check_lost,
    check_notice,
    check_result,
    check_success,
    check_values,
)
from tests.faults.jobs.models import BATCH, SAMPLES
from tests.faults.replay import Replay

WORKERS = ["worker-0", "worker-1"]


def history():
    """Two ranks train an epoch and begin the next: the notes of both, by step."""
    model, notes = Replay(), []
    state = model.alone()
    starts = [*range(0, SAMPLES, 2 * BATCH), 0]
    for step, start in enumerate(starts):
        samples = [list(range(start + rank, start + 2 * BATCH, 2)) for rank in (0, 1)]
        digest = model.repeat(state, samples)
        note = {"time": step, "step": step + 1, "round": 0, "epoch": step // (len(starts) - 1), "digest": digest}
        notes.append({**note, "workers": WORKERS, "samples": samples})
    return notes


def read(folder, *notes):
    for worker, own in zip(WORKERS, notes, strict=False):
        lines = [json.dumps(note) for note in ({"pid": 1}, *own)]
        (folder / worker).write_text("\n".join(lines) + "\n{")  # the last line is on its way
    chronicle = Chronicle(folder)
    chronicle.read()
    return chronicle


def test_a_faultless_history(tmp_path):
    chronicle = read(tmp_path, history(), history())
    chronicle.check_epochs()
    check_values(chronicle.kept)
    assert chronicle.newest.workers == tuple(WORKERS)
    assert chronicle.pids == {"worker-0": 1, "worker-1": 1}


def test_ranks_that_differ(tmp_path):
    notes = history()
    with pytest.raises(ViolationError, match="worker-0 and worker-1 differ after step 3 in world 0"):
        read(tmp_path, notes, [*notes[:2], {**notes[2], "digest": "other"}])


def test_a_step_that_was_done_again_counts_once(tmp_path):
    notes = history()
    again = [{**note, "round": 1} for note in notes[5:]]
    read(tmp_path, [*notes[:7], *again]).check_epochs()


def test_a_step_that_is_missing(tmp_path):
    notes = history()
    with pytest.raises(ViolationError, match=r"no rank made the steps \[4\]"):
        read(tmp_path, notes[:3] + notes[4:]).check_epochs()


def test_a_sample_that_was_seen_twice(tmp_path):
    notes = history()
    notes[1]["samples"][0][0] = 3
    with pytest.raises(ViolationError, match=r"epoch 0 has not seen each sample once, .* \{3: 2, 24: 0\}"):
        read(tmp_path, notes).check_epochs()


def test_parameters_that_the_samples_do_not_give(tmp_path):
    notes = history()
    notes[2]["digest"] = "other"
    with pytest.raises(ViolationError, match="step 3 in world 0 gave other parameters than its samples"):
        check_values(read(tmp_path, notes).kept)


LOG = """\
world 4: 2 ranks, rank 1 lost (killed), resumed after 0.10 s, 0 steps lost
world 5: 1 rank, rank 1 {}, resumed after 0.02 s, 0 steps lost
"""


def test_a_notice():
    outcome = Outcome("drain rank 1", (4, 2), (5, 1), pause=0.1, lost=0)
    check_notice(outcome, LOG.format("left"))
    with pytest.raises(ViolationError, match="a notice was not used: drain rank 1"):
        check_notice(outcome, LOG.format("lost (its task was lost)"))
    with pytest.raises(ViolationError, match="a notice was not used"):
        check_notice(replace(outcome, lost=1), LOG.format("left"))


def test_a_step_that_is_lost():
    check_lost(LOG)
    with pytest.raises(ViolationError, match=r"steps were done again: .'world 5: .*, 2 steps lost'"):
        check_lost(LOG.format("left").replace("0.02 s, 0", "0.02 s, 2"))


def test_a_result_that_differs(tmp_path):
    notes = history()
    chronicle = read(tmp_path, notes)
    wanted = Replay().undisturbed(len(notes)).ravel().tolist()
    chronicle.results["worker-0"] = Result(wanted, len(notes), 0, 1)
    assert check_result(chronicle) == 0
    wanted[0] *= 1 + 1e-6
    with pytest.raises(ViolationError, match="differ from those of an undisturbed training by"):
        check_result(chronicle)


def ended(tmp_path, *results, killed=()):
    """A chronicle with ``results``: of each worker the round and the size of its last world."""
    chronicle = read(tmp_path, history())
    for number, (round, size) in enumerate(results):
        chronicle.results[f"worker-{number}"] = Result([], 1, round, size)
    chronicle.hits += [Hit(worker, "kill", "before the shutdown", 0.0, 0, 1) for worker in killed]
    return chronicle


def test_a_success_needs_all_ranks_of_the_last_world(tmp_path):
    check_success(0, ended(tmp_path, (3, 2), (3, 2)))
    check_success(0, ended(tmp_path, (2, 3), (3, 2), (3, 2)))
    check_success(1, ended(tmp_path))
    for results in ([], [(3, 2)], [(2, 3), (3, 2)]):
        with pytest.raises(ViolationError, match=r"the driver says success, but of the [12] ranks of the last world"):
            check_success(0, ended(tmp_path, *results))


def test_a_rank_that_is_killed_after_its_return_is_no_success_of_a_process(tmp_path):
    chronicle = ended(tmp_path, (3, 2), (3, 2), killed=["worker-1"])
    check_success(0, chronicle, tells_by_exit=False)
    with pytest.raises(ViolationError, match=r"only \['worker-0'\] returned"):
        check_success(0, chronicle)


def test_the_hits_of_traps(tmp_path):
    note = {"hit": "stop", "point": "before the sync", "time": 1.0, "round": 4, "pid": 7}
    (tmp_path / "driver").write_text(json.dumps(note) + "\n")
    chronicle = read(tmp_path, history())
    assert chronicle.hits == [Hit("driver", "stop", "before the sync", 1.0, 4, 7)]
