"""The line about a change of the workers of a job."""

import pytest

from executors.job.worlds import Published, describe, summary

FOUR = Published(3, tuple((f"worker-{n}", host) for n, host in enumerate("aabb")))


def without(*workers):
    return Published(4, tuple(entry for entry in FOUR.workers if entry[0] not in workers))


class TestDescribe:
    def test_a_loss_has_rank_host_and_reason_of_the_world_before(self):
        text = describe(FOUR, without("worker-1"), {"worker-1": "exit code 3"}, {})
        assert text == "rank 1 on host a lost (exit code 3)"

    def test_a_rank_that_left_by_plan(self):
        assert describe(FOUR, without("worker-2"), {"worker-1": "is still there"}, {}) == "rank 2 on host b left"

    def test_a_rank_that_was_done(self):
        text = describe(FOUR, without("worker-2"), {}, {"worker-2": "ended with exit code 0"})
        assert text == "rank 2 on host b ended with exit code 0"

    def test_a_newcomer_has_the_rank_of_the_new_world(self):
        after = Published(4, (*FOUR.workers, ("worker-7", "a")))
        assert describe(FOUR, after, {}, {}) == "rank 2 on host a joined"

    def test_losses_come_first_newcomers_last(self):
        after = Published(4, (*without("worker-0", "worker-3").workers, ("worker-9", "c")))
        text = describe(FOUR, after, {"worker-3": "killed"}, {})
        assert text == "rank 3 on host b lost (killed), rank 0 on host a left, rank 2 on host c joined"

    def test_the_same_workers(self):
        assert describe(FOUR, without(), {"worker-9": "never joined"}, {}) == "the same ranks again"


@pytest.mark.parametrize(
    ("size", "steps", "line"),
    [
        (1, 1, "world 4: 1 rank, text, resumed after 0.12 s, 1 step lost"),
        (2, 0, "world 4: 2 ranks, text, resumed after 0.12 s, 0 steps lost"),
    ],
)
def test_the_summary_counts_in_plain_english(size, steps, line):
    assert summary(Published(4, FOUR.workers[:size], text="text"), 0.1234, steps) == line
