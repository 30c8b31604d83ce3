"""The ranges of the engine in profiles of torch.profiler."""

import pytest


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_profile_has_the_names_of_the_timeline(ranks):
    def body():
        import torch
        from torch.profiler import ProfilerActivity, profile

        import hvd_cluster.torch as hvd

        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for _ in range(8):
                hvd.allreduce(torch.ones(1 << 18), name="profiled")
        return {event.name for event in recorded.events()}

    for names in ranks.run(body):
        assert {"SHM_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "WAIT_FOR_RANKS"} <= names
