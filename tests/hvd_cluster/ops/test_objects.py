"""Objects of a process that is no member of a job yet; tests/hvd_cluster/torch/test_objects.py has those of ranks."""

from types import SimpleNamespace

from hvd_cluster.core import basics
from hvd_cluster.ops.objects import broadcast_object
from hvd_cluster.storage.checkpoints import on_root
from tests.ranks import player


def test_a_newcomer_of_an_elastic_job_gets_its_own_object(monkeypatch):
    """A script loads a checkpoint before its elastic function, also in a newcomer, whose rank is that of its future."""
    on_ranks = player(monkeypatch)
    monkeypatch.setattr(basics, "rank", lambda: 2)
    monkeypatch.setattr(basics, "worlds", lambda: SimpleNamespace(is_alone=True))
    called = []

    def body(rank):
        own = broadcast_object("own", 0, process_set=rank.process_set)
        return own, on_root(lambda: called.append("read"), "checkpoint.load")

    assert on_ranks(1, body) == [("own", None)]
    assert not called
