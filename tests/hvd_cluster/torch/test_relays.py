"""Two hosts, of two and three ranks, that are one: rank 0 reaches those of the second through a relay in rank 2."""

import os
import signal

import pytest
import torch

import hvd_cluster.torch as hvd

HOSTS = ["a", "a", "b", "b", "b"]
LEADER = 2


def initialize(sets=()):
    hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in sets])


def sums(steps):
    """Many tensors, in another order on each rank, the same names in each step."""
    found = []
    for _ in range(steps):
        order = [(hvd.rank() * 7 + index * 3) % 20 for index in range(20)]
        handles = {i: hvd.allreduce_async(torch.full((4,), i + hvd.rank()), op=hvd.Sum, name=f"t{i}") for i in order}
        found.append([hvd.synchronize(handles[i])[0].item() for i in range(20)])
        lengths = hvd.allgather(torch.zeros(hvd.rank() + len(found) % 2), name="changing").shape[0]
        found[-1].append(lengths)
    return found


def test_collectives_through_a_relay(fresh_pool):
    pool = fresh_pool(5, HOSTS)
    pool.run(initialize)
    for found in pool.run(sums, 6):
        for step, row in enumerate(found):
            assert row == [5 * i + 10 for i in range(20)] + [10 + 5 * ((step + 1) % 2)]
    pool.run(hvd.shutdown)


def test_starting_again(fresh_pool):
    pool = fresh_pool(5, HOSTS)
    for _ in range(3):
        pool.run(hvd.init)
        assert pool.run(sums, 2)[4][1][0] == 10
        pool.run(hvd.shutdown)


def hold_forever():
    """On a slow machine, too, ids wait for the other ranks of the host."""
    from collectives.net import relay

    relay.HOLD_SECONDS = 1000.0


def heard_in_steady_steps():
    """The messages from other ranks to the coordinator in ten steps of five tensors, once all names are known."""
    from collectives.controller.coordinator import Coordinator

    receive, heard = Coordinator.receive, []

    def listen(self, rank, message, now):
        if rank:
            heard.append((rank, message))
        receive(self, rank, message, now)

    def step():
        handles = [hvd.allreduce_async(torch.ones(3), name=f"steady {index}") for index in range(5)]
        for handle in handles:
            hvd.synchronize(handle)

    step()
    step()  # so that nobody is still at the first, where names are new
    Coordinator.receive = listen
    for _ in range(10):
        step()
    Coordinator.receive = receive
    return {(rank, type(message).__name__, bool(getattr(message, "requests", ()))) for rank, message in heard}


def test_in_the_steady_state_a_host_speaks_with_one_voice(fresh_pool):
    pool = fresh_pool(5, HOSTS)
    pool.run(hold_forever)
    pool.run(initialize)
    assert pool.run(heard_in_steady_steps)[0] == {(1, "Ready", False), (LEADER, "Together", False)}
    pool.run(hvd.shutdown)


def die(victim, place):
    """The errors after the death of ``victim``: between two allreduces of others, or while they wait for a name."""

    def train():
        tensor = torch.ones(1 << 20)
        for step in range(50):
            if hvd.rank() == victim and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            if place == "negotiation" and step == 20:
                hvd.allreduce(tensor, name="lonely")
            hvd.allreduce_(tensor, op=hvd.Average, name="doomed")

    with pytest.raises(hvd.HorovodInternalError) as caught:
        train()
    hvd.shutdown()
    return str(caught.value)


@pytest.mark.parametrize(
    ("victim", "place"),
    [(0, "backend"), (1, "negotiation"), (LEADER, "backend"), (LEADER, "negotiation"), (4, "backend")],
)
def test_every_rank_names_the_rank_that_died(fresh_pool, victim, place):
    pool = fresh_pool(5, HOSTS)
    pool.run(initialize)
    outcomes = pool.outcomes(die, victim, place)
    texts = [outcome.unwrap() for rank, outcome in enumerate(outcomes) if rank != victim]
    host = HOSTS[victim]
    assert all(text.startswith(f"rank {victim} on host '{host}' is gone") for text in texts), texts
