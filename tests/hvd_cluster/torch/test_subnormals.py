"""Ranks whose threads take subnormal numbers for zero, as torch and TensorFlow can tell them, get the same sums."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.kernels.subnormals import KeptSubnormals
from hvd_cluster.ops.objects import allgather_object

TINY = torch.full((1,), 2.0**-130)  # of float32, whose smallest normal number is 2**-126

needs_the_mode = pytest.mark.skipif(
    not torch.set_flush_denormal(True) or torch.set_flush_denormal(False) is None,
    reason="this processor has no mode in which subnormal numbers are zero",
)


def flushes():
    """Whether the calling thread takes subnormal numbers for zero."""
    return bool(TINY * 0.5 == 0)


@needs_the_mode
def test_a_block_keeps_subnormal_numbers_and_leaves_the_mode_as_it_was():
    numbers = KeptSubnormals()
    for wanted in (True, False, True, False):
        torch.set_flush_denormal(wanted)
        with numbers:
            assert not flushes()
        assert flushes() == wanted


def check_sums(elements, dtype, op):
    tiny = torch.finfo(dtype).smallest_normal / 8
    mine = torch.full((elements,), tiny, dtype=dtype)
    torch.set_flush_denormal(hvd.rank() == 0)
    try:
        for _ in range(20):
            total = hvd.allreduce(mine, name=f"{elements} {dtype}", op=op)
            assert flushes() == (hvd.rank() == 0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(total, mine * (2 if op is hvd.Sum else 1))
    everyone = allgather_object(total.view(torch.uint8).numpy().tobytes())
    assert everyone[0] == everyone[1]


def check_all_sums(pool):
    for elements in (100, 1 << 18):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for op in (hvd.Sum, hvd.Average):
                pool.run(check_sums, elements, dtype, op)


@needs_the_mode
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_of_different_modes_get_the_same_sums(ranks):
    check_all_sums(ranks)


@needs_the_mode
def test_ranks_of_different_modes_on_two_hosts_get_the_same_sums(two_hosts):
    check_all_sums(two_hosts)
