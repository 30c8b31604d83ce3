"""Models and optimizers on their way to the workers and back."""

import threading

import pytest

torch = pytest.importorskip("torch")

from hvd_cluster.spark.torch.learning_rates import scale_optimizers, scaled_state  # noqa: E402
from hvd_cluster.spark.torch.payload import (  # noqa: E402
    checkpoint_bytes,
    checkpoint_of,
    on_cpu,
    optimizer_of,
    packed,
    unpacked,
)

pytestmark = pytest.mark.leaves("environment")  # torch sets a variable with the first step of an optimizer


class NeedsMore(torch.optim.Optimizer):
    """Has a required argument, which is no learning rate."""

    def __init__(self, params, *, power):
        super().__init__(params, {"power": power})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["power"] * parameter.grad


def test_a_model_and_its_optimizer_stay_together():
    model = torch.nn.Linear(2, 1)
    model.hook = lambda: 7
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1)
    copied, of_copy, function = unpacked(packed((model, optimizer, model.hook)))
    assert of_copy.param_groups[0]["params"][0] is copied.weight
    assert [group["lr"] for group in of_copy.param_groups] == [0.5, 0.1]
    assert copied.weight is not model.weight
    assert function() == 7


def test_something_that_cannot_travel():
    model = torch.nn.Linear(2, 1)
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot travel to the workers: .*lock"):
        packed(model)


def test_an_optimizer_of_the_model_is_taken_as_it_is():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    assert optimizer_of(optimizer, model) is optimizer


def test_an_optimizer_of_a_copy_of_the_model():
    trained, model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [trained.weight], "lr": 0.5}, {"params": [trained.bias]}], 0.1, 0.9)
    trained(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = optimizer_of(optimizer, model)
    assert [group["params"][0] is own for group, own in zip(found.param_groups, model.parameters(), strict=True)]
    assert found.param_groups[0]["lr"] == 0.5
    assert torch.equal(found.state[model.weight]["momentum_buffer"], torch.ones(1, 2))
    assert optimizer.param_groups[0]["params"][0] is trained.weight


def test_an_optimizer_with_another_required_argument():
    optimizer, model = NeedsMore(torch.nn.Linear(2, 1).parameters(), power=3), torch.nn.Linear(2, 1)
    found = optimizer_of(optimizer, model)
    assert found.param_groups[0]["power"] == 3
    assert found.param_groups[0]["params"][0] is model.weight


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match="the optimizer has 2 parameters, which are not those of the model"):
        optimizer_of(torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=1), torch.nn.Linear(2, 1))


def test_learning_rates():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.25)
    scale_optimizers([optimizer], 4)
    assert optimizer.param_groups[0]["lr"] == 1
    assert scaled_state(optimizer.state_dict(), 1 / 4)["param_groups"][0]["lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 1
    scale_optimizers([NeedsMore(torch.nn.Linear(2, 1).parameters(), power=3)], 2)  # there is none


def test_later_steps_do_not_change_a_kept_state():
    model = torch.nn.Linear(2, 1)
    kept = on_cpu({"model": model.state_dict(), "list": [torch.ones(1)], "number": 3})
    before = model.weight.detach().clone()
    model.weight.data += 1
    assert torch.equal(kept["model"]["weight"], before)
    assert kept["number"] == 3


def test_a_checkpoint_runs_no_code():
    found = checkpoint_of(checkpoint_bytes({"model": {"w": torch.ones(2)}, "optimizer": {}, "history": [{"epoch": 0}]}))
    assert torch.equal(found["model"]["w"], torch.ones(2))
    assert found["history"] == [{"epoch": 0}]
    with pytest.raises(ValueError, match=r"is damaged, or was not written by a TorchEstimator: .*; remove it, or give"):
        checkpoint_of(packed({"model": NeedsMore, "optimizer": print}))
    with pytest.raises(ValueError, match="not written by a TorchEstimator"):
        checkpoint_of(b"rubbish")
    with pytest.raises(ValueError, match="no model and no optimizer"):
        checkpoint_of(checkpoint_bytes({"weights": 3}))
