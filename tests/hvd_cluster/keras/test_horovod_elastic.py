"""Horovod's elastic example for Keras on TensorFlow, whose callback after a change trains for a step."""

from pathlib import Path

import pytest

from tests.hvd_cluster.elastic.jobs import assert_agreement

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("horovod_elastic.py")


def test_a_loss_and_a_newcomer(start):
    options = ("--horovod-alias", "--blacklist-cooldown-range", 1, 1)
    job = start(2, *options, script=SCRIPT, variables={"TF_CPP_MIN_LOG_LEVEL": "3"})
    job.kill(1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    resets = [[note for note in job.notes(worker) if note.startswith("reset")] for worker in (0, 2)]
    assert resets == [["reset 1", "reset 2"], ["reset 2"]]
    assert job.log.count(", 0 steps lost") == 2


def test_a_loss_in_the_callback_of_a_change(start):
    options = ("--horovod-alias", "--blacklist-cooldown-range", 1, 1)
    job = start(3, *options, script=SCRIPT, variables={"TF_CPP_MIN_LOG_LEVEL": "3"})
    job.want("die", 2)
    job.kill(1)
    job.until_training(0, 3, 4)
    assert job.end() == 0, job.log
    results = job.results()
    newcomers = sorted((3, 4), key=lambda worker: results[f"worker-{worker}"][2])  # either may be ready first
    assert_agreement(job, 0, *newcomers)
    resets = [note for note in job.notes(0) if note.startswith("reset")]
    assert resets[0] == "reset 1"  # that of 2 was lost; later ones depend on whether the newcomers come together
