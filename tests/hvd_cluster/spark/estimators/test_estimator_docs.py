"""The page about estimators lists each parameter in the table of its effect, with its reason."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

from hvd_cluster.spark.estimators.params import ParameterEffect
from hvd_cluster.spark.keras import KerasEstimator
from hvd_cluster.spark.torch import TorchEstimator

WHOLE = (Path(__file__).parents[4] / "docs" / "spark-estimators.md").read_text()
PAGE = WHOLE.partition("## Parameters")[2]
PARAMETERS = {**KerasEstimator.PARAMETERS, **TorchEstimator.PARAMETERS}.values()
TABLES = [re.findall(r"^\| (`.*?) \| (.*) \|$", part, re.MULTILINE) for part in PAGE.split("\n\n")]
ROWS = [{name: text for cells, text in table for name in re.findall(r"`(\w+)`", cells)} for table in TABLES if table]


def test_there_is_a_table_for_each_effect():
    assert len(ROWS) == len(ParameterEffect)


@pytest.mark.parametrize(("rows", "effect"), list(zip(ROWS, ParameterEffect, strict=False)), ids=lambda each: "")
def test_a_table_has_the_parameters_of_its_effect(rows, effect):
    assert set(rows) == {each.name for each in PARAMETERS if each.effect is effect}


@pytest.mark.parametrize("effect", [ParameterEffect.NONE, ParameterEffect.REFUSED])
def test_the_reasons_are_those_of_the_messages(effect):
    def words(text):
        return text.replace("`", "")

    for each in PARAMETERS:
        if each.effect is effect and not each.name.startswith("transformation"):
            assert words(ROWS[list(ParameterEffect).index(effect)][each.name]) == each.note


@pytest.mark.leaves("environment")  # Lightning sets a variable when it is imported
def test_lightning_has_a_table_of_what_differs():
    """With the reasons of the messages; a default is the one of the code."""
    pytest.importorskip("lightning")
    from hvd_cluster.spark.lightning import LightningEstimator

    section = WHOLE.partition("## Lightning")[2].partition("\n## ")[0]
    rows = {name: cells for name, *cells in re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", section, re.MULTILINE)}
    usual, own = TorchEstimator.PARAMETERS, LightningEstimator.PARAMETERS
    differing = {name for name, each in own.items() if name not in usual or each.effect is not usual[name].effect}
    assert set(rows) == differing | (usual.keys() - own.keys())
    begins = {ParameterEffect.NONE: "no effect: {}", ParameterEffect.REFUSED: "refused: {}"}
    for name in differing:
        default, meaning = rows[name]
        assert default == str(own[name].default)
        assert own[name].effect is ParameterEffect.IMPLEMENTED or meaning == begins[own[name].effect].format(
            own[name].note
        )
