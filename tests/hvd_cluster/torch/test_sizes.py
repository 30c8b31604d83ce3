"""Tensors whose sizes sometimes repeat and sometimes change, so that attempts without the coordinator are declined.

Results of earlier calls are kept: the memory of an attempt must not be theirs.
"""

import random

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.checks import each_check

STEPS = 60


def sizes(columns=1):
    """For each step and rank, ``columns`` numbers of rows: the last ones on all ranks, or others on some."""
    draw, ranks = random.Random(columns), range(hvd.size())
    rows = {rank: [3] * columns for rank in ranks}
    for _ in range(STEPS):
        if draw.random() < 0.4:
            most = draw.choice([1, 6, 60_000])
            rows |= {rank: [draw.randint(0, most) for _ in range(columns)] for rank in ranks if draw.random() < 0.6}
        yield [rows[rank] for rank in ranks]


def full(rows, rank, step):
    return torch.full((rows, 2), 100.0 * step + rank + 1)


def check_operations_whose_results_have_other_shapes():
    kept = []
    for step, rows in enumerate(sizes()):
        ragged = [full(count, rank, step) for rank, [count] in enumerate(rows)]
        alike = [full(rows[0][0], rank, step) for rank in range(hvd.size())]
        scattered = torch.tensor_split(sum(alike), hvd.size())[hvd.rank()]
        gathered = hvd.allgather(ragged[hvd.rank()], name="gathered")
        part = hvd.reducescatter(alike[hvd.rank()], op=hvd.Sum, name="scattered")
        first, second = hvd.grouped_allgather([ragged[hvd.rank()], alike[hvd.rank()]], name="group")
        kept += [
            (gathered, torch.cat(ragged)),
            (part, scattered),
            (first, torch.cat(ragged)),
            (second, torch.cat(alike)),
        ]
        del kept[:-24]
        assert all(torch.equal(result, expected) for result, expected in kept)


def check_alltoall():
    for step, rows in enumerate(sizes(hvd.size())):
        splits = rows[hvd.rank()]
        expected = [full(of_rank[hvd.rank()], rank, step) for rank, of_rank in enumerate(rows)]
        result, received = hvd.alltoall(full(sum(splits), hvd.rank(), step), splits, name="parts")
        assert torch.equal(result, torch.cat(expected))
        assert received.tolist() == [len(part) for part in expected]


def check_tensors_in_their_own_memory():
    """A rank that is late, because it does something else first, lets the others attempt in vain."""
    tensors = {length: torch.empty(length) for length in (0, 3, 50_000)}
    draw = random.Random(5)
    for step in range(STEPS):
        length = draw.choice([*tensors, 3, 3, 3])
        tensor = tensors[length].fill_(hvd.rank() + step)
        is_interrupted = step % 9 == 0
        handles = [hvd.allgather_async(torch.ones(1), name="other")] if is_interrupted and hvd.rank() == 0 else []
        assert hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=2.0, name=f"sum of {length}") is tensor
        assert (tensor == 2.0 * (step * hvd.size() + sum(range(hvd.size())))).all()
        handles += [hvd.allgather_async(torch.ones(1), name="other")] if is_interrupted and hvd.rank() else []
        assert all(len(hvd.synchronize(handle)) == hvd.size() for handle in handles)


def check_sparse_tensors():
    for rows in sizes():
        own = [min(count, 500) for [count] in rows]
        indices = torch.arange(own[hvd.rank()])[None]
        sparse = torch.sparse_coo_tensor(indices, torch.ones(own[hvd.rank()], 2), (500, 2), check_invariants=True)
        expected = torch.zeros(500, 2)
        for count in own:
            expected[:count] += 1
        assert torch.equal(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense(), expected)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@each_check(globals())
def test_sizes(ranks, check):
    ranks.run(check)


@each_check(globals())
def test_sizes_on_two_hosts(two_hosts, check):
    two_hosts.run(check)
