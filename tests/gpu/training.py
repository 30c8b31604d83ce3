"""Operations and training on a real GPU: equal bits on all ranks, the same as in one process, no growth of memory."""

from __future__ import annotations

import argparse
import hashlib

import hvd_cluster
from tests.gpu.rank import prepare

STEPS = 20
BATCH = 64


def model(dtype):
    import torch

    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def batch(step, dtype):
    import torch

    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 32, generator=generator, dtype=torch.float64)
    return images.to("cuda", dtype), torch.randint(0, 8, (BATCH,), generator=generator).to("cuda")


def train(net, optimizer, part, dtype):
    import torch

    for step in range(STEPS):
        images, labels = batch(step, dtype)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images[part]), labels[part]).backward()
        optimizer.step()


def digest(net):
    data = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in net.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def alone(dtype):
    import torch

    net = model(dtype)
    train(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), slice(None), dtype)
    return net


def check_training():
    """Every rank has its part of each batch, and SyncBatchNorm sees the whole."""
    import torch

    import hvd_cluster.torch as hvd

    size, rank, dtype = hvd.size(), hvd.rank(), torch.float64
    net = hvd.SyncBatchNorm.convert_sync_batchnorm(model(dtype))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), 0)
    share = BATCH // size
    train(net, optimizer, slice(rank * share, (rank + 1) * share), dtype)
    digests = hvd.allgather_object(digest(net))
    assert len(set(digests)) == 1, "the ranks have different parameters"
    for ours, theirs in zip(net.parameters(), alone(dtype).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def check_operations():
    import torch

    import hvd_cluster.torch as hvd

    size, rank = hvd.size(), hvd.rank()
    mine = torch.full((rank + 1, 3), float(rank), device="cuda")
    joined = hvd.allgather(mine)
    assert joined.shape == (size * (size + 1) // 2, 3)
    assert joined[-1, 0].item() == size - 1
    assert hvd.broadcast(mine[:1], size - 1)[0, 0].item() == size - 1
    assert hvd.reducescatter(torch.ones(size, 2, device="cuda"), op=hvd.Sum).sum().item() == 2 * size
    result, splits = hvd.alltoall(torch.arange(float(size), device="cuda"), torch.ones(size, dtype=torch.int32))
    assert result.tolist() == [float(rank)] * size
    assert splits.tolist() == [1] * size
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,), device="cuda")
    assert hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense().sum().item() == size
    scaled = hvd.allreduce(torch.ones(5, device="cuda", dtype=torch.bfloat16), op=hvd.Average)
    assert scaled.tolist() == [1.0] * 5


def check_streams():
    """A result is used on a side stream, and memory is reused while operations run."""
    import torch

    import hvd_cluster.torch as hvd

    side = torch.cuda.Stream()
    for step in range(50):
        with torch.cuda.stream(side):
            work = torch.ones(1 << 20, device="cuda")
            for _ in range(5):
                work = work * 1.0 + step
            total = hvd.allreduce(work, op=hvd.Sum)
            del work
            scratch = torch.full((1 << 20,), -1.0, device="cuda")
            wrong = (total != hvd.size() * (1 + 5 * step)).sum()
        assert wrong.item() == 0, step
        del scratch, total


def check_scaler():
    """Mixed precision: the ranks skip the same step, that in which one of them has an infinite gradient."""
    import torch

    import hvd_cluster.torch as hvd

    net = model(torch.float32)
    ends = torch.nn.ModuleList([net[0], net[3]])  # the one between them has statistics of its own on each rank
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    scaler, part = torch.amp.GradScaler("cuda", init_scale=1024.0), slice(hvd.rank(), None, hvd.size())
    for step in range(5):
        images, labels = batch(step, torch.float32)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(net(images[part]), labels[part])
        before, is_skipped = digest(ends), step == 2
        scaler.scale(loss * float("inf") if is_skipped and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (digest(ends) == before) == is_skipped, step
    assert scaler.get_scale() == 512.0
    assert len(set(hvd.allgather_object(digest(ends)))) == 1


def check_memory():
    """Memory is released some milliseconds after an operation, so a round may find that of the last two in use."""
    import torch

    import hvd_cluster.torch as hvd

    sizes = []
    for _ in range(40):
        hvd.grouped_allreduce([torch.ones(1 << 18, device="cuda") for _ in range(4)], op=hvd.Sum)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_reserved())
    assert max(sizes[20:]) <= max(sizes[:20]) + (16 << 20), sizes


CHECKS = {
    "operations": check_operations,
    "streams": check_streams,
    "training": check_training,
    "scaler": check_scaler,
    "memory": check_memory,
}


def body(check):
    import torch

    import hvd_cluster.torch as hvd

    prepare()
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    check()
    hvd.shutdown()
    return "done"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    done = hvd_cluster.run(body, (CHECKS[arguments.check],), num_proc=arguments.ranks)
    assert done == ["done"] * arguments.ranks


if __name__ == "__main__":
    main()
