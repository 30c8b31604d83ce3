"""Averages of metrics, seeds, prints and curves of ranks that run torch."""

import contextlib
import io
import math
import random

import numpy as np
import pytest
import torch

import hvd_cluster.torch as hvd

pytestmark = pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)


def averaged():
    rank = hvd.rank()
    values = {"loss": torch.tensor(float(rank)), "one": 1} if rank else {}
    each = hvd.metrics.average(values, samples=rank)
    return each, hvd.metrics.average(torch.tensor([float(rank)])), hvd.metrics().size


def test_averages_of_all_ranks(ranks):
    found = ranks.run(averaged)
    assert [str(each) for each in found] == [str(found[0])] * ranks.size
    values, mean, size = found[0]
    assert (mean, size) == ((ranks.size - 1) / 2, ranks.size)
    assert values == {1: {}, 2: {"loss": 1.0, "one": 1.0}, 3: {"loss": pytest.approx(5 / 3), "one": 1.0}}[ranks.size]


def draws(same):
    found = []
    for _ in range(2):
        own = hvd.set_seed(5, same=same)
        found.append((own, torch.rand(2).tolist(), random.random(), np.random.rand()))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("same", [False, True])
def test_seeds(ranks, same):
    found = ranks.run(draws, same)
    for draw in zip(*found, strict=True):
        assert len(set(map(str, draw))) == (1 if same else ranks.size)
    assert (found[0][0] == 5) == same


def printed():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        hvd.print_once("rank", hvd.rank())
        hvd.print_once("last", rank=hvd.size() - 1)
    return out.getvalue()


def test_one_rank_prints(ranks):
    found = ranks.run(printed)
    assert "".join(found) == "rank 0\nlast\n"
    assert found[0].startswith("rank 0")


class Writer:
    def __init__(self):
        self.points = []

    def add_scalar(self, *point):
        self.points.append(point)

    def flush(self):
        self.points.append("flush")

    def close(self):
        self.points.append("close")


def logged():
    writer = Writer()
    with hvd.MetricLogger(writer) as curves:
        mean = curves.log({"rank": float(hvd.rank())}, 4, samples=1 + hvd.rank())
        if hvd.rank():
            curves.log({}, 5, samples=0)
        else:
            curves.log({"rank": math.nan}, 5)
    return mean, str(writer.points)


def test_rank_0_writes_the_averages(ranks):
    found = ranks.run(logged)
    mean = {1: 0.0, 2: 2 / 3, 3: 8 / 6}[ranks.size]
    assert all(each == {"rank": pytest.approx(mean)} for each, _ in found)
    first = str([("rank", found[0][0]["rank"], 4), "flush", ("rank", math.nan, 5), "flush", "close"])
    assert [points for _, points in found] == [first, *["['close']"] * (ranks.size - 1)]
