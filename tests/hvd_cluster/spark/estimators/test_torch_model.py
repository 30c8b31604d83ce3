"""TorchModel without a cluster: accessors, optimizers, copies, the model in a worker."""

import pickle
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvd_cluster.spark.torch import TorchModel  # noqa: E402
from hvd_cluster.spark.torch.model import load_predict  # noqa: E402

# torch sets a variable.
pytestmark = pytest.mark.leaves("environment")


def model_of(net=None, **options):
    return TorchModel(
        **{
            "model": torch.nn.Linear(2, 1) if net is None else net,
            "feature_columns": [["a", "b"]],
            "label_columns": ["y"],
            **options,
        }
    )


def test_accessors():
    history = [{"epoch": 0, "train": {"loss": 1.0}}]
    net, loss = torch.nn.Linear(2, 1), torch.nn.MSELoss()
    model = model_of(net, history=history, run_id="r", input_shapes=[[-1, 2]], loss=loss)
    assert model.getHistory() == model.get_history() == history
    assert model.getModel() is net
    assert (model.getRunId(), model.getFeatureColumns(), model.getLabelColumns()) == ("r", [["a", "b"]], ["y"])
    assert (model.getInputShapes(), model.getLoss(), model.getOptimizer()) == ([[-1, 2]], loss, None)
    assert (model.getOutputCols(), model.getHandleInvalid()) == (None, "error")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("History", [1]),
        ("FeatureColumns", ["c"]),
        ("LabelColumns", ["z"]),
        ("RunId", "other"),
        ("OutputCols", ["p"]),
        ("InputShapes", [[-1, 1, 2]]),
        ("Loss", [len]),
        ("LossConstructors", [len]),
        ("TransformationFn", len),
        ("HandleInvalid", "keep"),
        ("TransformBatchSize", 7),
        ("TransformOnGpu", True),
    ],
)
def test_setters_return_the_model(name, value):
    model = model_of()
    assert getattr(model, f"set{name}")(value) is model
    assert getattr(model, f"get{name}")() == value


def test_horovods_spelling():
    assert model_of().setLabelColoumns(["z"]).getLabelColumns() == ["z"]


def test_a_name_alone_is_a_list_of_one():
    model = TorchModel(feature_columns="abc", label_columns="label")
    assert (model.getFeatureColumns(), model.getLabelColumns()) == (["abc"], ["label"])
    assert model.setFeatureColumns("x").setLabelColumns("yz").getFeatureColumns() == ["x"]
    assert model.getLabelColumns() == ["yz"]


def test_values_that_are_not_allowed():
    with pytest.raises(ValueError, match="handle_invalid is 'drop', but must be one of 'error', 'skip', 'keep'"):
        model_of().setHandleInvalid("drop")
    with pytest.raises(ValueError, match="transform_batch_size"):
        model_of().setTransformBatchSize(0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        TorchModel(modle=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.Adam([{"params": [net.weight], "lr": 0.5}, {"params": [net.bias]}], lr=0.1),
        lambda net: torch.optim.Rprop(net.parameters(), etas=(0.4, 1.3)),
    ],
)
def test_the_optimizer_is_new_with_groups_and_state(make):
    net = torch.nn.Linear(2, 1)
    trained = make(net)
    net(torch.ones(3, 2)).sum().backward()
    trained.step()
    found = model_of(net, optimizer=trained).getOptimizer()
    assert found is not trained
    assert type(found) is type(trained)
    assert [group["lr"] for group in found.param_groups] == [group["lr"] for group in trained.param_groups]
    parameters = [each for group in found.param_groups for each in group["params"]]
    assert {id(each) for each in parameters} == {id(each) for each in net.parameters()}
    assert str(found.state_dict()) == str(trained.state_dict())
    before = str(trained.state_dict())
    found.step()
    assert str(trained.state_dict()) == before


def test_an_optimizer_of_another_model_is_moved_to_this_one():
    net = torch.nn.Linear(2, 1)
    found = model_of(net, optimizer=torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.3)).getOptimizer()
    assert [each is own for each, own in zip(found.param_groups[0]["params"], net.parameters(), strict=True)]
    assert found.param_groups[0]["lr"] == 0.3
    with pytest.raises(ValueError, match="the optimizer has 2 parameters, which are not those of the model"):
        model_of(net, optimizer=torch.optim.SGD(torch.nn.Linear(5, 1).parameters(), lr=0.3)).getOptimizer()


def test_a_copy_keeps_what_was_trained():
    """A model has the uid of its estimator, whose parameters a search over parameters passes to transform."""
    model = model_of()
    other = torch.nn.Linear(2, 1)
    copied = model.copy({model.model: other, model.run_id: "x", model.output_cols: ["p"], model.transformation_fn: len})
    assert copied.getTransformationFn() is None
    assert copied.uid == model.uid
    assert copied.getModel() is model.getModel()
    assert (copied.getRunId(), copied.getOutputCols(), model.getOutputCols()) == (None, ["p"], None)
    values = {param.name: value for param, value in copied.extractParamMap().items()}
    assert values["output_cols"] == ["p"]
    assert values["handle_invalid"] == "error"
    assert values["feature_columns"] == [["a", "b"]]


def test_a_model_can_be_pickled():
    copied = pickle.loads(pickle.dumps(model_of()))
    assert copied.getFeatureColumns() == [["a", "b"]]


def test_the_model_in_a_worker_has_the_shapes_and_the_dtype():
    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
            self.drop = torch.nn.Dropout(0.999)

        def forward(self, image, number):
            seen.append((image.shape, image.dtype, number.shape, number.dtype))
            return self.drop(image) * self.scale, number.to(torch.bfloat16)

    model = model_of(Net(), feature_columns=["i", "n"], input_shapes=[[-1, 2, 3], [-1]], label_columns=["y", "z"])
    predict = load_predict(model._payload(), None)
    inputs = [np.arange(24, dtype=np.float32).reshape(4, 6), np.array([[1], [2], [3], [4]], np.int64)]
    inputs[0].flags.writeable = False
    image, number = predict(inputs)
    assert image.dtype == np.float64
    np.testing.assert_equal(image.reshape(4, 6), inputs[0])
    np.testing.assert_equal(number, [1.0, 2.0, 3.0, 4.0])


def test_strings_in_a_worker():
    class Lengths(torch.nn.Module):
        def forward(self, texts, images):
            assert type(texts) is type(images) is list
            return torch.tensor([[float(len(text)), image[0]] for text, image in zip(texts, images, strict=True)])

    inputs = [np.array([["a"], ["\u00fcber"]], object), np.array([[b"\0"], [b"\1\0"]], object)]
    model = model_of(Lengths(), feature_columns=["text", "image"])
    np.testing.assert_equal(load_predict(model._payload(), None)(inputs)[0], [[1, 0], [4, 1]])
    model.setModel(torch.nn.Bilinear(1, 1, 1)).setTransformationFn(
        lambda batch: {key: torch.tensor([[float(len(each))] for each in values]) for key, values in batch.items()}
    )
    assert load_predict(model._payload(), None)(inputs)[0].shape == (2, 1)


def test_outputs_and_shapes_that_do_not_fit():
    class Named(torch.nn.Module):
        def forward(self, x):
            return {"y": x}

    with pytest.raises(ValueError, match="the model returned a dict, but must return a tensor"):
        load_predict(model_of(Named())._payload(), None)([np.ones((2, 2), np.float32)])
    wrong = model_of(input_shapes=[[-1, 5]])
    with pytest.raises(ValueError, match=r"input_shapes says that a row of .* has the shape \[5\]"):
        load_predict(wrong._payload(), None)([np.ones((2, 2), np.float32)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="transform_on_gpu is set, but torch finds no GPU on this executor"):
        load_predict(model_of()._payload(), 0)


def test_a_model_that_cannot_travel():
    net = torch.nn.Linear(2, 1)
    net.lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot travel to the workers"):
        model_of(net)._payload()
