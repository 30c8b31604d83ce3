"""Adasum: against the formula, and the cases everybody can check by hand."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType
from collectives.backends.adasum import adasum
from collectives.backends.completion import DONE
from collectives.buffers import Buffer
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.members import group_of, in_threads

TIMEOUT = 20.0
TOLERANCE = {DType.FLOAT16: 2e-3, DType.BFLOAT16: 2e-2, DType.FLOAT32: 1e-5, DType.FLOAT64: 1e-12}


def pair(a, b):
    """The paper's formula."""
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def tree(vectors):
    while len(vectors) > 1:
        vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def encode(values, dtype):
    if dtype is DType.BFLOAT16:
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values).astype(dtype.storage)


def decode(stored, dtype):
    if dtype is DType.BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def buffers_of(arrays, dtype):
    return [Buffer(array, dtype, array.shape, array) for array in arrays]


def on_all_members(inputs, dtype, **scales):
    """``inputs[member][tensor]`` -> the results of every member, in place of its inputs."""
    group = InprocGroup(len(inputs))

    def body(rank):
        backend = InprocBackend(group_of(group.size, rank), group, TIMEOUT)
        tensors = buffers_of(inputs[rank], dtype)
        assert adasum(backend, tensors, tensors, **scales) is DONE

    in_threads(len(inputs), body, TIMEOUT)
    return inputs


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.label)
def test_each_tensor_of_a_batch_is_combined_by_the_formula(size, dtype):
    lengths = (1, 70_001, 0, 5)
    generator = np.random.default_rng(size)
    inputs = [[encode(generator.normal(size=length), dtype) for length in lengths] for _ in range(size)]
    expected = [tree([decode(member[index], dtype) for member in inputs]) for index in range(len(lengths))]
    results = on_all_members(inputs, dtype)
    for index, value in enumerate(expected):
        np.testing.assert_allclose(
            decode(results[0][index], dtype), value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        assert {member[index].tobytes() for member in results} == {results[0][index].tobytes()}


@settings(max_examples=30)
@given(st.sampled_from([2, 4]), st.integers(1, 40), st.randoms(use_true_random=False))
def test_orthogonal_vectors_add_up_and_parallel_ones_are_averaged(size, length, random):
    orthogonal = [np.zeros(size * length) for _ in range(size)]
    for rank, vector in enumerate(orthogonal):
        vector[rank * length : (rank + 1) * length] = random.uniform(1, 2)
    total = sum(orthogonal)
    parallel = [np.full(length, -random.uniform(1, 3))] * size
    for inputs, expected in ((orthogonal, total), (parallel, parallel[0].copy())):
        results = on_all_members([[vector.copy()] for vector in inputs], DType.FLOAT64)
        for member in results:
            np.testing.assert_allclose(member[0], expected, rtol=1e-12)


def test_zeros_leave_the_other_as_it_is():
    results = on_all_members([[np.zeros(3)], [np.arange(3.0)]], DType.FLOAT64)
    for member in results:
        np.testing.assert_array_equal(member[0], np.arange(3.0))


def test_scales_go_before_and_after():
    inputs = [np.array([1.0, 2.0, 3.0]), np.array([-1.0, 0.5, 2.0])]
    expected = 3.0 * tree([0.5 * vector for vector in inputs])
    results = on_all_members([[vector.copy()] for vector in inputs], DType.FLOAT64, prescale=0.5, postscale=3.0)
    for member in results:
        np.testing.assert_allclose(member[0], expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("size", [2, 8])
def test_many_pieces_with_and_without_destinations_of_their_own(size, dtype, monkeypatch):
    monkeypatch.setattr("collectives.backends.adasum.PIECE", 64)
    monkeypatch.setattr("collectives.backends.memory.CHUNK", 50)
    lengths = (3, 701, 0, 130)
    generator = np.random.default_rng(size)
    sources = [[encode(generator.normal(size=length), dtype) for length in lengths] for _ in range(size)]
    kept = [[each.copy() for each in member] for member in sources]
    destinations = [[np.empty_like(each) for each in member] for member in sources]
    group = InprocGroup(size)

    def body(rank):
        backend = InprocBackend(group_of(group.size, rank), group, TIMEOUT)
        adasum(backend, buffers_of(sources[rank], dtype), buffers_of(destinations[rank], dtype), 0.5, 2.0)

    in_threads(size, body, TIMEOUT)
    expected = [tree([decode(member[index], dtype) for member in kept]) for index in range(len(lengths))]
    in_place = on_all_members([[each.copy() for each in member] for member in kept], dtype, prescale=0.5, postscale=2.0)
    for index, value in enumerate(expected):
        np.testing.assert_allclose(
            decode(destinations[0][index], dtype), value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        assert {member[index].tobytes() for member in destinations + in_place} == {destinations[0][index].tobytes()}
    for member, untouched in zip(sources, kept, strict=True):
        assert all(np.array_equal(*each) for each in zip(member, untouched, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.label)
def test_the_destinations_are_all_the_memory_that_is_needed(dtype, monkeypatch):
    monkeypatch.setattr("collectives.backends.adasum.PIECE", 1 << 14)
    monkeypatch.setattr("collectives.backends.memory.CHUNK", 1 << 10)
    monkeypatch.setattr("collectives.backends.adasum._gather", lambda *given: DONE)  # inproc copies what it gathers
    inputs = [[np.ones(1 << 19, dtype.storage)] for _ in range(4)]
    tracemalloc.start()
    try:
        on_all_members(inputs, dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < inputs[0][0].nbytes / 2
