"""From the matrices of a batch to inputs, labels, losses and metrics of torch."""

import pytest

torch = pytest.importorskip("torch")

from hvd_cluster.spark.torch.batches import (  # noqa: E402
    BatchLayout,
    CombinedLoss,
    fitted_label,
    fitted_outputs,
    for_each_label,
    metric_groups,
    metric_values,
    unreduced,
)

CPU = torch.device("cpu")


def tensors(layout, *sides):
    return layout.tensors(sides, CPU, torch.float32)


def test_inputs_are_floats_and_labels_keep_their_dtype():
    batch = (torch.arange(6).reshape(3, 2), torch.ones(3, 1, dtype=torch.float64)), (torch.arange(3).reshape(3, 1),)
    inputs, labels, weights = tensors(BatchLayout(["a", "b"], ["y"]), *batch)
    assert [each.dtype for each in inputs] == [torch.float32] * 2
    assert [each.shape for each in inputs] == [(3, 2), (3, 1)]
    assert labels[0].dtype == torch.int64
    assert weights is None


def test_tensors_get_their_shapes():
    layout = BatchLayout(["image"], ["mask"], input_shapes=[[-1, 1, 2, 3]], label_shapes=[[2, 2]])
    inputs, labels, _ = tensors(layout, (torch.arange(12.0).reshape(2, 6),), (torch.zeros(2, 4),))
    assert inputs[0].shape == (2, 1, 2, 3)
    assert labels[0].shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("input_shapes", BatchLayout(["image"], ["y"], input_shapes=[[-1, 1, 2, 2]])),
        ("label_shapes", BatchLayout(["image"], ["y"], label_shapes=[[2]])),
    ],
)
def test_a_shape_that_does_not_fit(name, layout):
    with pytest.raises(ValueError, match=rf"{name} says that a row of .* has the shape .*, but it has [16] elements"):
        tensors(layout, (torch.zeros(2, 6),), (torch.zeros(2, 1),))


def test_a_transformation_of_the_batch():
    def shift(batch):
        assert set(batch) == {("a", "b"), "user", "y", "w"}
        return batch | {("a", "b"): batch["a", "b"].double() + 1, "user": batch["user"] // 2}

    layout = BatchLayout([["a", "b"], "user"], ["y"], "w", transformation=shift)
    features = torch.zeros(2, 2), torch.tensor([[4], [6]])
    inputs, _, weights = tensors(layout, features, (torch.zeros(2, 1),), torch.ones(2, dtype=torch.int32))
    assert torch.equal(inputs[0], torch.ones(2, 2))
    assert inputs[0].dtype == weights.dtype == torch.float32
    assert torch.equal(inputs[1], torch.tensor([[2], [3]]))  # integers that it has made stay so


def lengths(batch):
    """Of strings, in place of them; a label is there in training only."""
    assert set(batch) >= {"text", ("title", "body"), "x"}
    assert ("y" in batch) is ("w" in batch)
    pairs = torch.tensor([[float(len(each)) for each in row] for row in batch["title", "body"]], dtype=torch.float64)
    return batch | {"text": torch.tensor([[len(each)] for each in batch["text"]]), ("title", "body"): pairs}


STRINGS = [["a"], [""], ["\u00fcber"]], [["a", "bc"], ["", ""], ["d", "e"]], torch.arange(3)[:, None]


def test_strings_become_tensors():
    layout = BatchLayout(["text", ["title", "body"], "x"], ["y"], "w", transformation=lengths)
    inputs, _, _ = tensors(layout, STRINGS, (torch.zeros(3, 1),), torch.ones(3))
    scored = layout.inputs(STRINGS, CPU, torch.float32)
    for texts, pairs, x in (inputs, scored):
        assert (texts.tolist(), texts.dtype) == ([[1], [0], [4]], torch.int64)
        assert (pairs.tolist(), pairs.dtype) == ([[1, 2], [0, 0], [1, 1]], torch.float32)
        assert (x.tolist(), x.dtype) == ([[0], [1], [2]], torch.float32)


def test_strings_that_no_function_changes_come_to_the_model():
    layout = BatchLayout(["text", ["title", "body"], "x"], ["y"], input_shapes=[[-1], [-1, 2], [-1]])
    texts, pairs, x = layout.inputs(STRINGS, CPU, torch.float32)
    assert texts == ["a", "", "\u00fcber"]
    assert pairs == STRINGS[1]
    assert x.shape == (3,)


@pytest.mark.parametrize(("key", "error"), [("y", ValueError), ("vocabulary", KeyError)])
def test_a_transformation_that_needs_labels(key, error):
    layout = BatchLayout(["text"], ["y"], transformation=lambda batch: {"text": batch[key]})
    with pytest.raises(error, match="asked for 'y', but transform gives .* alone: .'text'.*" if key == "y" else key):
        layout.inputs([[["a"]]], CPU, torch.float32)


@pytest.mark.parametrize("made", [None, {}, {"a": 3}, {"a": ["text"]}])
def test_a_transformation_that_returns_too_little(made):
    layout = BatchLayout(["a"], ["y"], transformation=lambda batch: made)
    with pytest.raises(ValueError, match="transformation_fn returned no tensor for 'a'"):
        tensors(layout, (torch.zeros(2, 1),), (torch.zeros(2, 1),))


@pytest.mark.parametrize(
    ("label", "output", "shape", "dtype"),
    [
        (torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3), (3,), torch.float32),
        (torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1), (3, 1), torch.float32),
        (torch.zeros(3, 10, dtype=torch.int8), torch.zeros(3, 10), (3, 10), torch.float32),
        (torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 10), (3,), torch.int64),
        (torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 10), (3,), torch.int64),
        (torch.zeros(3, 1), torch.zeros(3, 10), (3,), torch.float32),
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 10, 4), (3, 4), torch.int64),
    ],
)
def test_a_label_fits_its_output(label, output, shape, dtype):
    fitted = fitted_label(label, output)
    assert (fitted.shape, fitted.dtype) == (shape, dtype)


def test_outputs_that_are_no_tensors():
    with pytest.raises(ValueError, match="the model returned dict, but must return a tensor, or a list of them"):
        fitted_outputs({"scores": torch.zeros(2)}, [torch.zeros(2)])


def test_another_number_of_outputs():
    with pytest.raises(ValueError, match="the model has 2 outputs, but label_cols names 1 columns"):
        fitted_outputs((torch.zeros(2), torch.zeros(2)), [torch.zeros(2)])


def test_losses_are_weighted():
    outputs, labels = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])], [torch.zeros(2), torch.zeros(2)]
    losses = [torch.nn.functional.l1_loss, torch.nn.MSELoss()]
    assert CombinedLoss(losses, None, False)(outputs, labels, None) == (2 + 4) / 2
    assert CombinedLoss(losses, [1.0, 0.25], False)(outputs, labels, None) == 2 + 1


@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.MSELoss()])
def test_rows_are_weighted(loss):
    output, label, weights = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1), torch.tensor([1.0, 0.5])
    assert CombinedLoss([loss], None, True)([output], [label], weights) == (1 + 9 / 2) / 2
    if isinstance(loss, torch.nn.Module):
        assert loss.reduction == "mean"  # the user's own object stays as it is


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_a_label_that_torch_would_repeat_is_refused(name):
    loss = CombinedLoss([getattr(torch.nn.functional, name)], None, False)
    with pytest.raises(
        ValueError, match=r"output of the model has the shape \(4, 1\), but the label \(4, 2\); let the"
    ):
        loss([torch.ones(4, 1)], [torch.ones(4, 2)], None)
    quantiles = CombinedLoss([lambda output, label: (output - label[:, None]).abs().mean()], None, False)
    assert quantiles([torch.ones(4, 3)], [torch.zeros(4)], None) == 1  # a loss that repeats it on purpose


def test_a_class_that_the_model_does_not_have():
    loss = CombinedLoss([torch.nn.functional.cross_entropy], None, False)
    message = "labels from 0 to 7, but the model has 5 outputs for a row, so the classes are 0 to 4; correct the label"
    with pytest.raises(ValueError, match=message):
        loss([torch.zeros(2, 5)], [torch.tensor([0, 7])], None)

    def users_own(output, label):
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        CombinedLoss([users_own], None, False)([torch.zeros(2, 5)], [torch.zeros(2)], None)


def test_a_loss_that_cannot_weigh_rows():
    with pytest.raises(ValueError, match=r"takes no argument reduction.*reduction='none'"):
        unreduced(lambda output, label: (output - label).mean())

    class Module(torch.nn.Module):
        def forward(self, output, label):
            return (output - label).mean()

    with pytest.raises(ValueError, match=r"Module.* takes no argument reduction"):
        unreduced(Module())


def test_one_for_each_label():
    assert for_each_label(print, 2, "loss") == [print, print]
    with pytest.raises(ValueError, match="loss has 3 values, but there are 2 labels"):
        for_each_label([print] * 3, 2, "loss")
    with pytest.raises(ValueError, match="must be a function"):
        for_each_label("mse", 1, "loss")


def test_metrics_come_in_groups():
    def error(output, label):
        return (output - label).abs().mean()

    groups = metric_groups([[error], [error, lambda output, label: 7]], 2)
    outputs = [torch.ones(2, requires_grad=True), torch.ones(2) * 2]
    values = metric_values(groups, outputs, [torch.zeros(2), torch.zeros(2)])
    assert values == {(0, 0): 1, (0, 1): 2, (1, 0): 1, (1, 1): 7}
    assert not values[0, 0].requires_grad
    assert metric_groups([error], 2) == [[error, error]]
