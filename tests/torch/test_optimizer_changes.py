"""DistributedOptimizer: gradients that are replaced, transposed, or absent between backward and the step."""

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.checks import each_check

def check_a_sparse_gradient_grows_after_the_step():
    """Without zero_grad(), after a step in which the ranks had one row, or none."""
    for rows in (0, 1):
        weight = torch.nn.Parameter(torch.zeros(5, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        for count in (2, rows if hvd.rank() == 0 else 0, 2):
            if count:
                torch.nn.functional.embedding(torch.arange(count), weight, sparse=True).sum().backward()
            optimizer.step()
            if count == 2:
                optimizer.zero_grad()
        assert weight.grad is None


@each_check(globals())
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
