"""The parameters of estimators: a param of Spark, a setter and a getter for each."""

import inspect
import logging

import pytest

from hvd_cluster.spark.estimators.params import EstimatorParams, ParameterEffect
from hvd_cluster.spark.estimators.store import Store

HOROVOD = [
    "num_proc",
    "backend",
    "store",
    "model",
    "optimizer",
    "loss",
    "loss_weights",
    "metrics",
    "feature_cols",
    "label_cols",
    "continuous_cols",
    "categorical_cols",
    "sample_weight_col",
    "validation",
    "batch_size",
    "val_batch_size",
    "epochs",
    "train_steps_per_epoch",
    "validation_steps_per_epoch",
    "callbacks",
    "gradient_compression",
    "compress_sparse_cols",
    "shuffle",
    "shuffle_buffer_size",
    "random_seed",
    "verbose",
    "partitions_per_process",
    "run_id",
    "transformation_fn",
    "transformation_edit_fields",
    "transformation_removed_fields",
    "train_reader_num_workers",
    "val_reader_num_workers",
    "reader_pool_type",
    "label_shapes",
    "inmemory_cache_all",
    "use_gpu",
    "mp_start_method",
    "data_module",
]
IRREGULAR = ["ShufflingBufferSize", "TrainReaderNumWorker", "ValReaderNumWorker", "InMemoryCacheAll"]
VALUES = {
    "a_store": Store.create("/tmp"),
    "anything": object(),
    "truth": False,
    "listed": [print],
    "numbers": [0.5],
    "column_names": ["a"],
    "one_column": "a",
    "folder_name": "a",
    "shapes": [[1]],
    "called": print,
}


def accessor(name):
    return "".join(word.capitalize() for word in name.split("_"))


@pytest.mark.parametrize("name", HOROVOD)
def test_a_parameter_has_a_param_a_setter_and_a_getter(name):
    params = EstimatorParams()
    assert params.hasParam(name)
    assert params.isDefined(name)
    assert name in params.explainParams()
    given = VALUES.get(EstimatorParams.PARAMETERS[name].convert.__name__, 3)
    assert getattr(params, f"set{accessor(name)}")(given) is params
    assert getattr(params, f"get{accessor(name)}")() == given


@pytest.mark.parametrize("name", IRREGULAR)
def test_names_of_horovod_that_do_not_follow_the_rule(name):
    params = EstimatorParams()
    assert getattr(params, f"set{name}")(7) is params
    assert getattr(params, f"get{name}")() == 7


def test_the_defaults_are_those_of_horovod():
    values = EstimatorParams().settings()
    assert (values["batch_size"], values["epochs"], values["shuffle"], values["verbose"]) == (32, 1, True, 1)
    assert values["metrics"] == values["callbacks"] == []
    assert values["val_batch_size"] is values["num_proc"] is values["validation"] is None


def test_parameters_come_by_keyword_only():
    with pytest.raises(TypeError):
        EstimatorParams(2)
    kinds = {each.kind for each in inspect.signature(EstimatorParams).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(TypeError, match="EstimatorParams has no parameter 'batchsize'; did you mean 'batch_size'"):
        EstimatorParams(batchsize=3)


def test_lists_of_the_caller_are_copied():
    features, metrics = ["a"], [print]
    params = EstimatorParams(feature_cols=features, metrics=metrics)
    features.append("b")
    metrics.append(len)
    assert params.getFeatureCols() == ["a"]
    assert params.getMetrics() == [print]


def test_none_stands_for_the_default():
    params = EstimatorParams(epochs=3, validation=0.2).setEpochs(None).setCallbacks(None)
    assert (params.settings()["epochs"], params.settings()["callbacks"]) == (1, [])
    assert (params.getEpochs(), params.getCallbacks()) == (1, [])
    assert params.setParams(validation=None).getValidation() is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("batch_size", 0, "batch_size"),
        ("epochs", 1.5, "epochs"),
        ("feature_cols", [], "list of names of columns"),
        ("label_cols", [3], "list of names of columns"),
        ("sample_weight_col", 3, "name of a column"),
        ("run_id", 3, "run_id is 3, but must be the name of a folder"),
        ("run_id", "", "run_id is '', but must be the name of a folder"),
        ("loss_weights", ["a"], "list of numbers"),
        ("label_shapes", [3], "list of shapes"),
        ("transformation_fn", 3, "must be a function"),
        ("random_seed", -1, "random_seed"),
        ("store", "/tmp/x", r"store is '/tmp/x', but must be a Store; give Store.create\(path\)"),
    ],
)
def test_values_that_are_not_allowed(name, value, text):
    with pytest.raises(ValueError, match=text):
        EstimatorParams(**{name: value})


def test_a_param_map_is_checked_as_well():
    params = EstimatorParams()
    with pytest.raises(ValueError, match="batch_size"):
        params.copy({params.batch_size: 0}).settings()


NO_EFFECT = [each for each in EstimatorParams.PARAMETERS.values() if each.effect is ParameterEffect.NONE]


@pytest.mark.parametrize("parameter", NO_EFFECT, ids=lambda each: each.name)
def test_a_parameter_without_an_effect_says_so_once(parameter, caplog):
    with caplog.at_level(logging.WARNING):
        EstimatorParams().settings()
        assert not caplog.records
        EstimatorParams(**{parameter.name: "other"}).settings()
    assert [record.getMessage() for record in caplog.records] == [f"{parameter.name} has no effect: {parameter.note}"]


@pytest.mark.parametrize("name", ["continuous_cols", "categorical_cols", "data_module"])
def test_a_refused_parameter_names_the_remedy(name):
    with pytest.raises(ValueError, match=f"{name} is .*no such feature here: .*(feature_cols|transformation_fn)"):
        EstimatorParams(**{name: ["a"]}).settings()
