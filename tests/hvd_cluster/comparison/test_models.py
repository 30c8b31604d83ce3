"""How models of ranks differ, and what ranks that present different ones conclude."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvd_cluster.comparison.models import Entry, Judgement, Model, Told, crossed, difference, entry_of, judge


def model(*entries, groups=""):
    """Of names with sizes, such as "a3"."""
    return Model(tuple(Entry(entry[:-1], (int(entry[-1]),), "float32") for entry in entries), groups=groups)


BODY = ("body.weight3", "out.weight4")


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ((*BODY, "head5"), BODY, r"the parameter 'head', float32 of shape (5,), is on rank 0 only, and not on rank 2"),
        (BODY, ("head5", *BODY), r"the parameter 'head', float32 of shape (5,), is on rank 2 only, and not on rank 0"),
        ((), BODY, r"the parameter 'body.weight', float32 of shape (3,), is on rank 2 only, and not on rank 0"),
        (
            ("a3", "b3"),
            ("b3", "a3"),
            "the parameter number 0 is 'a', float32 of shape (3,), on rank 0, 'b', float32 of shape (3,), on rank 2; "
            "give all ranks the same model, with its parameters in the same order",
        ),
        (
            ("a3", "b4"),
            ("a3", "b5"),
            "the parameter 'b', number 1, is float32 of shape (4,) on rank 0, float32 of shape (5,) on rank 2",
        ),
        (("a3", "a3"), ("a3",), "the parameter number 1 is 'a', float32 of shape (3,), on rank 0, absent on rank 2"),
    ],
)
def test_the_first_difference(first, second, text):
    assert text in difference({0: model(*first), 2: model(*second)})


def test_other_dtypes_and_groups():
    one, other = Model((Entry("a", (), "float32"),)), Model((Entry("a", (), "float64"),))
    assert "'a', number 0, is float32 of shape () on ranks 0, 2, float64 of shape () on rank 1" in difference(
        {0: one, 1: other, 2: one}
    )
    assert "groups=2 on rank 0, groups=3 on rank 1" in difference(
        {0: model("a3", groups="groups=2"), 1: model("a3", groups="groups=3")}
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a3", "b4"), ("a3", "b4")),
        (("a3", "b4"), ("module.a3", "module.b4")),
        (("dense3", "dense3"), ("sequential/dense3", "sequential/dense3")),
        (("conv3", "sequential/dense3"), ("conv3", "dense3")),
    ],
)
def test_other_names_do_no_harm(first, second):
    models = {0: model(*first), 1: model(*second)}
    assert difference(models) is None
    told = {rank: Told(each, [], [each]) for rank, each in models.items()}
    assert set(judge(told).agreed.values()) == {models[0].names}


def test_digests_tell_models_apart():
    models = [model(*entries) for entries in ((), ("a3",), ("b3",), ("a4",), ("a3", "a3"))]
    models.append(model("a3", groups="groups=1"))
    assert len({each.digest for each in models}) == len(models)
    assert model("a3") == model("a3")
    assert all(0 <= each.digest < 1 << 63 for each in models)


A, B, OTHER = model("a3"), model("b4"), model("c5")


@pytest.mark.parametrize(
    ("told", "judgement"),
    [
        ([Told(A, [A, B], [A, B]), Told(B, [A, B], [A, B])], Judgement({A: A.names, B: B.names})),
        ([Told(A, [A, B], [A, B]), Told(B, [B], [A, B])], Judgement({B: B.names})),
        ([Told(A, [A], [A, B]), Told(B, [B], [A, B])], Judgement({})),
    ],
)
def test_threads_may_present_their_models_in_another_order(told, judgement):
    assert judge(dict(enumerate(told))) == judgement


def test_a_model_that_another_rank_does_not_have_is_an_error():
    judgement = judge({0: Told(A, [A], [A, OTHER]), 1: Told(B, [B], [A, B])})
    assert not judgement.agreed
    assert "the parameter 'a', float32 of shape (3,), is on rank 0 only" in judgement.error


def test_the_text_of_models_in_another_order():
    text = crossed({0: A.summary, 1: model("b4", "c5", "d6").summary, 2: A.summary})
    assert "that with 'a' on ranks 0, 2, that with 'b' to 'd' on rank 1" in text


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32")])
def test_a_dtype_has_one_name(dtype):
    """MXNet has types of NumPy, and what the user has written."""
    assert entry_of("w", SimpleNamespace(shape=[2], dtype=dtype)).kind == "float32 of shape (2,)"
