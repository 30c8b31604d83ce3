"""DistributedOptimizer: every argument does what it says, alone and together with the others."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError, MismatchError, UnsupportedRequestError
from hvd_cluster.gradients.buckets import BUCKET_BYTES, SMALL_BYTES, plan
from hvd_cluster.torch.optimizer.inventory import complete_names, size_of
from hvd_cluster.torch.powersgd import PowerSGD
from tests.checks import each_check
from tests.hvd_cluster.torch.training import (
    assert_identical_everywhere,
    build,
    data,
    flat,
    loss_of,
    own,
    sgd,
    train_alone,
    train_together,
    with_and_without_a_core_to_spare,
)

VOCABULARY = 11


def parameters(*sizes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def planned(parameters, groups):
    return [[parameter.numel() for parameter in bucket] for bucket in plan(parameters, groups, size_of)]


def test_small_gradients_share_buckets_and_large_ones_have_their_own():
    large, small = SMALL_BYTES // 4 + 1, SMALL_BYTES // 4
    assert planned(parameters(1, large, 2, large, 3), None) == [[large], [large], [3, 2, 1]]
    full = BUCKET_BYTES // SMALL_BYTES
    assert planned(parameters(1, *[small] * full), None) == [[small] * full, [1]]


def test_buckets_hold_one_type():
    mixed = [*parameters(1, 2), *parameters(3, 4, dtype=torch.float64)]
    assert planned(mixed, None) == [[4, 3], [2, 1]]


def test_groups_are_chunks_or_lists():
    several = parameters(1, 2, 3, 4, 5)
    assert planned(several, 2) == [[1, 2, 3], [4, 5]]
    assert planned(several, 9) == [[1], [2], [3], [4], [5]]
    assert planned(several, [[several[3], several[0]], []]) == [[4, 1], [5, 3, 2]]
    assert planned(several, [[*parameters(6)]]) == [[5, 4, 3, 2, 1]]


def test_default_names():
    first, second, third, fourth = parameters(1, 2, 3, 4)
    names = complete_names([[first, second], [third]], {})
    assert list(names.values()) == ["allreduce.noname.0.0", "allreduce.noname.0.1", "allreduce.noname.1.0"]
    names = complete_names([[fourth, first], [third]], names)
    assert names[fourth] == "allreduce.noname.0.2"
    assert names[third] == "allreduce.noname.1.0"


def assert_equals_one_process(**options):
    together, alone = train_together(sgd, **options), train_alone(sgd)
    torch.testing.assert_close(flat(together), flat(alone), rtol=1e-9, atol=1e-12)
    assert_identical_everywhere(together)


def check_groups():
    def check():
        for groups in (1, 2, 100):
            assert_equals_one_process(groups=groups)
        assert_equals_one_process(groups=2, compression=hvd.Compression.none, gradient_predivide_factor=4.0)

    with_and_without_a_core_to_spare(check)


def check_explicit_groups():
    def check():
        model, alone = build(), train_alone(sgd)
        listed = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(
            sgd(listed), model.named_parameters(), groups=[[listed[0], listed[3]], [listed[1]]]
        )
        for step in range(5):
            images, labels = data(step)
            optimizer.zero_grad()
            loss_of(model, own(images), own(labels)).backward()
            optimizer.step()
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-9, atol=1e-12)

    with_and_without_a_core_to_spare(check)


def check_num_groups():
    with pytest.warns(DeprecationWarning, match="num_groups is deprecated"):
        assert_equals_one_process(num_groups=2)


def check_predivide():
    assert_equals_one_process(gradient_predivide_factor=3.0)
    huge = torch.full((2, 1), 3e38)  # the sum of two is infinite
    parameter = torch.nn.Parameter(torch.zeros(2, 1))
    for groups in (None, 1):
        for gradient in (huge, huge.to_sparse(1)):
            for factor in (1.0, 4.0 * hvd.size()):
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD([parameter], lr=0), gradient_predivide_factor=factor, groups=groups
                )
                parameter.grad = gradient.clone()
                optimizer.synchronize()
                divided_first = factor > 1 or gradient.is_sparse or hvd.size() == 1
                expected = huge if divided_first else huge * torch.inf
                torch.testing.assert_close(parameter.grad.to_dense(), expected)
                del optimizer


def embedding(**options):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    ).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def train_embedding(model, optimizer, mine):
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, VOCABULARY, (2 * hvd.size(), 2), generator=generator)
        labels = torch.randint(0, 3, (2 * hvd.size(),), generator=generator)
        part = slice(2 * hvd.rank(), 2 * hvd.rank() + 2) if mine else slice(None)
        optimizer.zero_grad()
        loss_of(model, words[part], labels[part]).backward()
        optimizer.step()


def check_sparse_gradients():
    alone, plain = embedding()
    train_embedding(alone, plain, mine=False)

    def check():
        for options in ({}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 8.0}, {"groups": 1}):
            model, inner = embedding()
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
            train_embedding(model, optimizer, mine=True)
            torch.testing.assert_close(flat(model), flat(alone), rtol=1e-9, atol=1e-12)
            assert model[0].weight.grad.is_sparse
            assert_identical_everywhere(model)

    with_and_without_a_core_to_spare(check)


def check_a_sparse_gradient_that_one_rank_lacks():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], op=hvd.Sum)
    for present in (range(hvd.size()), [0], []):
        optimizer.zero_grad()
        if hvd.rank() in present:
            torch.nn.functional.embedding(torch.tensor([hvd.rank(), 4]), weight, sparse=True).sum().backward()
        optimizer.step()
    expected = torch.zeros(5, 2)
    for rank in range(hvd.size()):
        expected[rank] -= 1 + (rank == 0)
        expected[4] -= 1 + (rank == 0)
    assert torch.equal(weight.detach(), expected)


def check_a_gradient_that_is_sparse_on_some_ranks_only():
    """Alone, with others in its bucket, and with several packs. The step can be repeated."""

    def check():
        for others in ([], [4, 6, 40_000]):
            for grouped in (False, True):
                sizes = [(5, 2), *others]
                parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
                parameters.append(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
                groups = [parameters] if grouped else None
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=groups, op=hvd.Sum)
                kinds = "sparse in 1 dimension on rank 0, dense on rank" + "s" * (hvd.size() > 2)
                for _ in range(2):
                    optimizer.zero_grad()
                    backward(parameters, sparse=hvd.rank() == 0)
                    with pytest.raises(MismatchError, match=rf"noname.0.0' is {kinds}.*sparse_as_dense=True"):
                        optimizer.step()
                for sparse in (True, True, hvd.rank() == 0):  # when it is known it may be dense somewhere
                    optimizer.zero_grad()
                    backward(parameters, sparse)
                    optimizer.step()
                assert all(bool((parameter == -3.0 * hvd.size()).all()) for parameter in parameters)

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def backward(parameters, sparse):
    weight, *rest = parameters
    torch.nn.functional.embedding(torch.arange(5), weight, sparse=sparse).sum().backward()
    for parameter in rest:
        parameter.sum().backward()


def check_a_sparse_gradient_that_comes_late():
    """One rank has it in the third step. The others have no gradient, and the last rank has another new one."""

    def check():
        for compression in (hvd.Compression.none, PowerSGD):
            first, second = (torch.nn.Parameter(torch.zeros(5, 2)) for _ in range(2))
            other = torch.nn.Parameter(torch.zeros(4))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([first, other, second], lr=1.0), op=hvd.Sum, compression=compression
            )
            for step in range(5):
                optimizer.zero_grad()
                other.sum().backward()
                for parameter, rank in ((first, 0), (second, hvd.size() - 1)):
                    if step >= 2 and hvd.rank() == rank:
                        torch.nn.functional.embedding(torch.tensor([step]), parameter, sparse=True).sum().backward()
                optimizer.step()
                assert first.grad.is_sparse == second.grad.is_sparse == (step >= 2)
            for parameter in (first, second):
                assert parameter.tolist() == [[0.0] * 2] * 2 + [[-1.0] * 2] * 3
            assert other.tolist() == [-5.0 * hvd.size()] * 4

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_a_sparse_gradient_that_some_ranks_know_already():
    """A rank that missed the agreement, about one sparse gradient or several gradients, learns it from the others."""

    def check():
        for sizes in ([], [4, 6, 40_000]):
            for compression in (hvd.Compression.none, PowerSGD):
                for newcomer in {0, hvd.size() - 1}:
                    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in [(5, 2), *sizes]]
                    optimizer = wrapped(parameters, compression)
                    for step in range(4):
                        if step == 2 and hvd.rank() == newcomer:
                            forget_what_is_sparse(optimizer)
                        optimizer.zero_grad()
                        backward(parameters, sparse=True)
                        optimizer.step()
                    assert all(bool((each == -4.0 * hvd.size()).all()) for each in parameters)

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_ranks_that_know_different_sparse_gradients():
    """They have equal sizes and share a pack, so the packs of the ranks look alike."""

    def check():
        first, second = (torch.nn.Parameter(torch.zeros(5, 2)) for _ in range(2))
        other = torch.nn.Parameter(torch.zeros(4))
        optimizer = wrapped([first, other, second], hvd.Compression.none)
        mine, others = (first, second) if hvd.rank() == 0 else (second, first)
        for step in range(4):
            if step == 2:
                forget_what_is_sparse(optimizer, others)
            optimizer.zero_grad()
            other.sum().backward()
            for parameter in (first, second) if step < 2 else [mine]:
                torch.nn.functional.embedding(torch.tensor([0]), parameter, sparse=True).sum().backward()
            optimizer.step()
        counts = [2 * hvd.size() + 2, 2 * hvd.size() + 2 * (hvd.size() - 1)]
        for parameter, count in zip((first, second), counts, strict=True):
            assert parameter.tolist() == [[-float(count)] * 2] + [[0.0] * 2] * 4
        assert other.tolist() == [-4.0 * hvd.size()] * 4

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def forget_what_is_sparse(optimizer, *forgotten):
    """Like a rank that missed the agreement of the others."""
    for parameter, bucket in optimizer._combiner.buckets.items():
        if not forgotten or any(parameter is each for each in forgotten):
            bucket.sparse.pop(parameter, None)


def wrapped(parameters, compression):
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum, compression=compression)


def check_a_sparse_gradient_that_a_new_rank_has_dense():
    """An error on all ranks, after which the step can be repeated."""
    if hvd.size() == 1:
        return
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in [(5, 2), 3]]
    optimizer = wrapped(parameters, hvd.Compression.none)
    backward(parameters, sparse=True)
    optimizer.step()
    if hvd.rank() == 1:
        forget_what_is_sparse(optimizer)
    optimizer.zero_grad()
    backward(parameters, sparse=hvd.rank() != 1)
    with pytest.raises(MismatchError, match="dense on rank 1; give DistributedOptimizer sparse_as_dense=True"):
        optimizer.step()
    optimizer.zero_grad()
    backward(parameters, sparse=True)
    optimizer.step()
    assert all(bool((each == -2.0 * hvd.size()).all()) for each in parameters)


def check_a_sparse_gradient_that_a_rank_missed_while_it_had_joined():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in [(5, 2), 3]]
    optimizer = wrapped(parameters, hvd.Compression.none)
    for trains in (hvd.rank() == 0, True):
        if trains:
            optimizer.zero_grad()
            backward(parameters, sparse=True)
            optimizer.step()
        hvd.join()
    expected = -hvd.size() - (hvd.rank() == 0)
    assert all(bool((each == expected).all()) for each in parameters)
    assert parameters[0].grad.is_sparse


def check_an_error_names_the_parameters_of_its_bucket():
    """The error names the parameter that differs, and the parameters of the same pack."""

    def check():
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]
        names = ("one", "two", "three")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), zip(names, parameters, strict=True))
        for _ in range(2):
            parameters[1].requires_grad_(hvd.rank() > 0)
            sum(parameter.sum() for parameter in parameters).backward()
            said = "'two' is frozen on rank 0, dense on rank.*requires_grad.*gradients.three..one': three, two, one"
            with pytest.raises(MismatchError, match=said):
                optimizer.step()
            parameters[1].requires_grad_(True)
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer
        first = hvd.rank() == 0
        models = {
            r"'b', number 1, is float32 of shape \(4,\) on rank 0, float32 of shape \(3,\)": {
                "a": 2,
                "b": 4 if first else 3,
            },
            r"'x', float32 of shape \(3,\), is on rank 0 only": {"a": 2, "x": 3, "b": 4} if first else {"a": 2, "b": 4},
        }
        for said, sizes in models.items():
            different = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(different.values(), lr=1.0), different.items())
            sum(parameter.sum() for parameter in different.values()).backward()
            with pytest.raises(MismatchError, match=said):
                optimizer.step()
            del optimizer

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_process_set():
    """Half of the ranks train together, each of the others for itself."""
    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, hvd.size() - 1])
    parameter = torch.nn.Parameter(torch.zeros(2))
    for options in ({}, {"groups": 1}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Adasum}):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], process_set=members, **options
        )
        with torch.no_grad():
            parameter.zero_()
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
        expected = (hvd.size() + 1) / 2 if members.included() else hvd.rank() + 1
        if options.get("op") is hvd.Adasum and members.included():  # parallel vectors are averaged
            expected = (1 + hvd.size()) / 2
        torch.testing.assert_close(parameter.detach(), torch.full((2,), -2.0 * expected))
        del optimizer
    hvd.remove_process_set(members)


def check_passes_with_groups_and_compression():
    for options in ({"groups": 2}, {"compression": hvd.Compression.bf16}, {"sparse_as_dense": True}):
        model = build(torch.float32)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=3, **options
        )
        for step in range(2):
            images, labels = (own(rows) for rows in data(step, torch.float32))
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, images[part::3], labels[part::3]).backward()
            optimizer.step()
        assert_identical_everywhere(model)


def check_bad_arguments():
    model = build()
    one, *_ = model.parameters()
    bad = {
        "groups=0 must be": {"groups": 0},
        "groups='ab' must be": {"groups": "ab"},
        "groups=1.5 must be": {"groups": 1.5},
        "groups must be": {"groups": [one]},
        "groups must have lists of parameters, not of int": {"groups": [[one, 1]]},
        "has a parameter more than once": {"groups": [[one], [one]]},
        "gradient_predivide_factor=0.0 must": {"gradient_predivide_factor": 0},
        "gradient_predivide_factor=inf must": {"gradient_predivide_factor": float("inf")},
        "needs op=Average, not Sum": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "op=9 is not a reduction": {"op": 9},
        "made a Linear; let it make a GradientCompressor": {"compression": lambda parameter: torch.nn.Linear(1, 1)},
        "is not a ProcessSet": {"process_set": [0]},
        "is not registered": {"process_set": hvd.ProcessSet([0])},
    }
    for word, options in bad.items():
        with pytest.raises(InvalidRequestError, match=word):
            hvd.DistributedOptimizer(sgd(model.parameters()), **options)
    with (
        pytest.warns(DeprecationWarning, match="groups"),
        pytest.raises(InvalidRequestError, match="groups=-1 must be"),
    ):
        hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=-1)
    word, error = "op Adasum combines no gradients", InvalidRequestError
    if hvd.size() == 3:
        word, error = "power of two of ranks, not 3", UnsupportedRequestError
    with pytest.raises(error, match=word):
        hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum, compression=hvd.Compression.powersgd)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
