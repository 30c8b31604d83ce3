"""The kernels against Python integers, float64 and torch."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from collectives.api import DType, EngineError, InvalidRequestError, ReduceOp
from collectives.kernels import conversion
from collectives.kernels.conversion import CHUNK
from collectives.kernels.reduction import narrow, scale_array, widen
from hvd_cluster.torch import kernels
from tests.collectives.kernels.reductions import reduce_arrays

OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
INTEGERS = (DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64)
FLOATS = (DType.FLOAT32, DType.FLOAT64)
HALVES = (DType.FLOAT16, DType.BFLOAT16)
REAL = [dtype for dtype in DType if dtype.real is dtype]
SIZES = (0, 1, 2, 3, 7, CHUNK - 1, 2 * CHUNK + 3)
COUNTS = (1, 2, 3, 5)
TORCH = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}

every = pytest.mark.parametrize
every_op = every("op", OPS, ids=lambda op: op.name.lower())
every_dtype_and_op = every(
    ("dtype", "op"),
    [*itertools.product(REAL, OPS), *((dtype, ReduceOp.AVERAGE) for dtype in INTEGERS)],
    ids=lambda value: value.name.lower(),
)
labels = {"ids": lambda dtype: dtype.label}


@pytest.fixture(params=["numpy", "torch"])
def converting(request, monkeypatch):
    """Conversions of 16-bit floats by NumPy, and by the functions that the torch binding registers."""
    monkeypatch.setattr(conversion, "_in_use", dict(conversion.NUMPY))
    if request.param == "torch":
        kernels.register()


converted = pytest.mark.usefixtures("converting")


@every("dtype", INTEGERS, **labels)
@every_op
def test_integers_wrap(dtype, op):
    for count in COUNTS:
        inputs = [random_array(dtype, 7, seed) for seed in range(count)]
        out = np.empty_like(inputs[0])
        reduce_arrays(out, inputs, dtype, op)
        rows = zip(*([int(number) for number in each] for each in inputs), strict=True)
        assert out.tolist() == [wrap(functools.reduce(PYTHON[op], row), dtype) for row in rows]


@every("dtype", FLOATS, **labels)
@every_op
def test_floats_are_combined_in_order(dtype, op):
    for size, count in itertools.product(SIZES, COUNTS):
        inputs = [random_array(dtype, size, seed) for seed in range(count)]
        out = np.empty_like(inputs[0])
        reduce_arrays(out, inputs, dtype, op, 0.5, 3.0)
        expected = functools.reduce(UFUNCS[op], [each * out.dtype.type(0.5) for each in inputs]) * out.dtype.type(3)
        assert_bits(out, expected)


@converted
@every("dtype", HALVES, **labels)
@every_op
@every("scales", [(1.0, 1.0), (0.5, 3.0)])
def test_halves_are_rounded_once(dtype, op, scales):
    for size, count in itertools.product(SIZES, COUNTS):
        inputs = [random_array(dtype, size, seed) for seed in range(count)]
        out = np.empty_like(inputs[0])
        reduce_arrays(out, inputs, dtype, op, *scales)
        wide = [torch_widen(each, dtype) * np.float32(scales[0]) for each in inputs]
        assert_bits(out, torch_narrow(functools.reduce(UFUNCS[op], wide) * np.float32(scales[1]), dtype))


@every("dtype", HALVES, **labels)
@every("length", [3, CHUNK, 2 * CHUNK - 5])
def test_torch_averages_two_halves_as_numpy_does(dtype, length, monkeypatch):
    """All bit patterns, with subnormal numbers and halfway cases; only the first chunk can be averaged directly."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    finite = patterns[np.abs(widen(patterns, dtype)) < 6e35]
    for seed in range(8):
        generator = np.random.default_rng(seed)
        first = generator.permutation(patterns)[:length]
        second = np.concatenate([generator.choice(finite, CHUNK), generator.permutation(patterns)])[:length]
        if seed % 2:  # nearly equal numbers, which cancel or have sums halfway between two numbers
            bits = second.view(np.uint16) ^ generator.choice(np.array([0, 1, 2, 3, 1 << 15], np.uint16), length)
            first[: CHUNK // 2] = bits.view(dtype.storage)[: CHUNK // 2]
        results = [first.copy() for _ in range(2)]
        monkeypatch.setattr(conversion, "_in_use", dict(conversion.NUMPY))
        reduce_arrays(results[0], [results[0], second], dtype, ReduceOp.SUM, postscale=0.5)
        kernels.register()
        reduce_arrays(results[1], [results[1], second], dtype, ReduceOp.SUM, postscale=0.5)
        np.testing.assert_array_equal(*(widen(each, dtype) for each in results))


@every("dtype", HALVES, **labels)
def test_torch_averages_directly_only_where_no_sum_can_overflow(dtype):
    kernels.register()
    halves, out = conversion.conversion(dtype.label), np.empty(2, dtype.storage)

    def averages(*numbers):
        pieces = [halves.halves(stored(np.array(each), dtype))[0] for each in numbers]
        return halves.mean(*pieces, halves.halves(out)[0])

    assert averages([math.inf, math.nan], [1.0, -65504.0])
    for number in (math.inf, -math.inf, math.nan, 3e38):
        assert not averages([1.0, 1.0], [1.0, number])


@every("dtype", HALVES, **labels)
def test_torch_adds_two_halves_as_numpy_does(dtype, monkeypatch):
    """All bit patterns, with subnormal numbers, infinity and sums halfway between two numbers, to four others."""
    first = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    for seed in range(4):
        second = np.random.default_rng(seed).permutation(first)
        results = [np.empty_like(first) for _ in range(2)]
        monkeypatch.setattr(conversion, "_in_use", dict(conversion.NUMPY))
        reduce_arrays(results[0], [first, second], dtype, ReduceOp.SUM)
        kernels.register()
        results[1][:] = first
        reduce_arrays(results[1], [results[1], second], dtype, ReduceOp.SUM)  # the result is one of the inputs
        numbers = [widen(each, dtype) for each in results]
        np.testing.assert_array_equal(*numbers)
        np.testing.assert_array_equal(*map(np.signbit, (each[~np.isnan(each)] for each in numbers)))


@every_op
def test_bool(op):
    rows = np.array(list(itertools.product([False, True], repeat=3)))
    for count in (1, 2, 3):
        inputs = [np.ascontiguousarray(column) for column in rows.T[:count]]
        out = np.empty(len(rows), bool)
        reduce_arrays(out, inputs, DType.BOOL, op)
        meaning = any if op in (ReduceOp.SUM, ReduceOp.MAX) else all
        assert out.tolist() == [meaning(row[:count]) for row in rows.tolist()]


@converted
@every_dtype_and_op
@every("scales", [(1.0, 1.0), (1.0, 0.5), (-2.0, 1.0), (0.25, 3.0)])
def test_out_may_be_any_input(dtype, op, scales):
    if dtype is DType.BOOL:
        scales = (1.0, 1.0)
    for size, count in itertools.product((0, 3, 2 * CHUNK + 3), COUNTS):
        inputs = [random_array(dtype, size, seed) for seed in range(count)]
        expected = np.empty_like(inputs[0])
        reduce_arrays(expected, inputs, dtype, op, *scales)
        for place in range(count):
            copies = [each.copy() for each in inputs]
            reduce_arrays(copies[place], copies, dtype, op, *scales)
            assert_bits(copies[place], expected)
            memory = [each.copy() for each in inputs]
            reduce_arrays(memory[place][:], memory, dtype, op, *scales)
            assert_bits(memory[place], expected)


@converted
@every("dtype", REAL, **labels)
def test_inputs_stay_as_they_are(dtype):
    inputs = [random_array(dtype, CHUNK + 1, seed) for seed in range(3)]
    before = [each.copy() for each in inputs]
    for scale in (1.0,) if dtype is DType.BOOL else (1.0, 0.5):
        reduce_arrays(np.empty_like(inputs[0]), inputs, dtype, ReduceOp.SUM, scale, scale)
    for each, copy in zip(inputs, before, strict=True):
        assert_bits(each, copy)


@every("dtype", INTEGERS, **labels)
@given(data=st.data())
@settings(max_examples=30)
def test_integers_are_scaled_in_float64_and_truncated(dtype, data):
    factor = data.draw(st.floats(-4, 4, width=32))
    values = data.draw(st.lists(st.integers(*limits(dtype)), max_size=5))
    source = np.array(values, dtype.storage)
    out = np.empty_like(source)
    scale_array(source, out, dtype, factor)
    scaled = [math.trunc(float(value) * factor) for value in values]
    inside = [-(1 << 63) <= number < 1 << 63 for number in scaled]
    expected = [wrap(number, dtype) for number in scaled]
    assert [a for a, b in zip(out.tolist(), inside, strict=True) if b] == list(itertools.compress(expected, inside))


def test_an_average_of_integers_truncates_towards_zero():
    inputs = [np.array([-3, 3, -1, 5], np.int32), np.array([-4, 4, 0, 0], np.int32)]
    out = np.empty(4, np.int32)
    reduce_arrays(out, inputs, DType.INT32, ReduceOp.SUM, 1.0, 0.5)
    assert out.tolist() == [-3, 3, 0, 2]
    reduce_arrays(out, inputs, DType.INT32, ReduceOp.SUM, 0.5, 1.0)
    assert out.tolist() == [-3, 3, 0, 2]


@every("dtype", INTEGERS, **labels)
@given(data=st.data())
@settings(max_examples=60)
def test_an_average_is_the_exact_sum_divided(dtype, data):
    count = data.draw(st.integers(1, 60))
    rows = data.draw(st.lists(st.lists(st.integers(*limits(dtype)), min_size=3, max_size=3), min_size=count))
    inputs = [np.array(row, dtype.storage) for row in rows[:count]]
    out = np.empty(3, dtype.storage)
    reduce_arrays(out, inputs, dtype, ReduceOp.AVERAGE)
    totals = [wrap(sum(column), DType.INT64) for column in zip(*rows[:count], strict=True)]
    assert out.tolist() == [abs(total) // count * (1 if total >= 0 else -1) for total in totals]


@every("dtype", INTEGERS, **labels)
def test_the_average_of_equal_inputs_is_the_input(dtype):
    values = np.array([0, 1, 99, 100, *limits(dtype)] if dtype is not DType.INT64 else [0, -1, 99, 100], dtype.storage)
    out = np.empty_like(values)
    for count in (*range(1, 130), 1000):
        reduce_arrays(out, [values] * count, dtype, ReduceOp.AVERAGE)
        assert_bits(out, values)


def test_a_scaled_average_is_truncated_once():
    inputs = [np.array([100, 3, -3], np.int8)] * 2 + [np.array([100, 4, -4], np.int8)]
    out = np.empty(3, np.int8)
    reduce_arrays(out, inputs, DType.INT8, ReduceOp.AVERAGE, 1.0, 0.5)
    assert out.tolist() == [50, 1, -1]
    reduce_arrays(out, inputs, DType.INT8, ReduceOp.AVERAGE, 3.0, 0.5)
    assert out.tolist() == [wrap(150, DType.INT8), 5, -5]
    reduce_arrays(out, [np.array([7, 7, -7], np.int8)] * 49, DType.INT8, ReduceOp.AVERAGE, 1.0, 3.0)
    assert out.tolist() == [21, 21, -21]


@converted
@every("dtype", [dtype for dtype in REAL if dtype is not DType.BOOL], **labels)
@every("factor", [1.0, 0.5, -3.0])
def test_scale_is_a_reduction_of_one(dtype, factor):
    for size in SIZES:
        source = random_array(dtype, size, 1)
        expected, out, in_place = np.empty_like(source), np.empty_like(source), source.copy()
        reduce_arrays(expected, [source], dtype, ReduceOp.SUM, factor)
        scale_array(source, out, dtype, factor)
        scale_array(in_place, in_place, dtype, factor)
        assert_bits(out, expected)
        assert_bits(in_place, expected)


@converted
@every("dtype", HALVES, **labels)
@every("length", [1 << 16, 100], ids=["long", "short"])
def test_widening_is_exact(dtype, length):
    """All 65536 numbers, with infinities and NaN among them, and without, which is computed differently."""
    everything = np.arange(1 << 16, dtype=np.uint16)
    finite = everything[np.isfinite(torch_widen(everything.view(dtype.storage), dtype))]
    for bits in (everything, finite):
        for start in range(0, bits.size, length):
            source = bits[start : start + length].view(dtype.storage)
            assert_bits(widen(source, dtype), torch_widen(source, dtype))


@converted
@every("dtype", HALVES, **labels)
@every("length", [1 << 16, 100], ids=["long", "short"])
def test_narrowing_rounds_to_nearest_even(dtype, length):
    """The float32 numbers at, just beside and half way between all neighbours, and any others."""
    for numbers in (near_boundaries(dtype), np.random.default_rng(0).integers(0, 1 << 32, 1 << 17, np.uint32)):
        source = numbers.view(np.float32)
        for part in (source, source[np.abs(np.nan_to_num(source, nan=np.inf)) < 65519]):
            expected = torch_narrow(part, dtype)
            for start in range(0, part.size if length > 100 else 5000, length):
                piece = slice(start, start + length)
                out = np.empty_like(expected[piece])
                narrow(part[piece], out, dtype)
                assert_bits(out, expected[piece])


@converted
@every("length", [1 << 13, 3], ids=["long", "short"])
@every("sign", [1.0, -1.0])
def test_narrowing_to_float16_meets_infinity_at_65520(length, sign):
    for number, expected in ((np.nextafter(np.float32(65520), np.float32(0)), 65504.0), (np.float32(65520), np.inf)):
        out = np.empty(length, np.float16)
        narrow(np.full(length, number * sign, np.float32), out, DType.FLOAT16)
        assert (out == expected * sign).all()


@converted
@every("dtype", [*FLOATS, *HALVES], **labels)
def test_nan_and_infinity(dtype):
    for size in (6, CHUNK + 6):
        first, second = np.zeros(size), np.ones(size)
        first[-6:] = [np.nan, 1, np.inf, -np.inf, np.inf, np.nan]
        second[-6:] = [1, np.nan, 1, 1, -np.inf, np.nan]
        inputs = [stored(first, dtype), stored(second, dtype)]
        with np.errstate(invalid="ignore"):
            for op in OPS:
                out = np.empty_like(inputs[0])
                reduce_arrays(out, inputs, dtype, op)
                np.testing.assert_array_equal(numbers_of(out, dtype), UFUNCS[op](first, second))


@converted
@every("dtype", [*FLOATS, *HALVES], **labels)
def test_overflow_is_infinity_without_a_warning(dtype):
    largest = stored(np.full(5, {DType.FLOAT64: 1.7e308, DType.FLOAT16: 65504.0}.get(dtype, 3.3e38)), dtype)
    out = np.empty_like(largest)
    reduce_arrays(out, [largest, largest], dtype, ReduceOp.SUM)
    assert np.isinf(numbers_of(out, dtype)).all()
    scale_array(largest, out, dtype, -2.0)
    assert np.isneginf(numbers_of(out, dtype)).all()


@every("dtype", HALVES, **labels)
def test_the_torch_binding_registers_its_conversions(dtype):
    assert conversion.conversion(dtype.label) is not conversion.NUMPY[dtype.label]


def test_only_16_bit_floats_are_converted():
    with pytest.raises(InvalidRequestError, match="float32 is not converted to float32; register float16 or bfloat16"):
        conversion.register(DType.FLOAT32, conversion.NUMPY["float16"])


@converted
@every("dtype", HALVES, **labels)
def test_halves_that_must_not_be_written_are_read(dtype):
    source = random_array(dtype, 100, 1)
    expected = widen(source, dtype)
    source.flags.writeable = False
    assert_bits(widen(source, dtype), expected)


COUNT_THREADS = """
import numpy, psutil, torch
from collectives.api import DType, ReduceOp
from collectives.kernels.reduction import reduction
from hvd_cluster.torch import kernels
kernels.register()
torch.set_num_threads(4)
before = psutil.Process().num_threads()
for dtype in (DType.FLOAT16, DType.BFLOAT16):
    halves = numpy.ones(1 << 18, dtype.storage)
    reduction(dtype, ReduceOp.SUM, 1.0, 0.5).combine_silently(halves, [halves, halves])
    reduction(dtype, ReduceOp.SUM).combine_silently(halves, [halves, halves])
print(psutil.Process().num_threads() - before)
"""


@pytest.mark.parametrize("dtype", HALVES)
def test_torch_converts_after_an_inference_mode_in_which_it_began(dtype, monkeypatch):
    monkeypatch.setattr(conversion, "_in_use", dict(conversion.NUMPY))
    kernels.register()
    ones = torch_narrow(np.ones(2 * CHUNK + 5, np.float32), dtype)
    _sum_in_and_after_inference_mode(ones, dtype)  # the temporaries of the first sum serve the second one


def _sum_in_and_after_inference_mode(ones, dtype):
    for mode in (True, False):
        out = np.empty_like(ones)
        with torch.inference_mode(mode):
            reduce_arrays(out, [ones, ones], dtype, ReduceOp.SUM)
        assert (torch_widen(out, dtype) == 2.0).all()


def test_torch_converts_in_the_calling_thread():
    """A rank has one thread for its exchange; others would take the cores of other ranks."""
    command = [sys.executable, "-c", COUNT_THREADS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0"


IN_FOREIGN_THREADS = """
import ctypes, numpy, torch
from collectives.api import DType, ReduceOp
from collectives.kernels.reduction import reduction
from hvd_cluster.torch import kernels
kernels.register()
halves = numpy.zeros(1 << 10, numpy.uint16)
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def combine(_):
    reduction(DType.BFLOAT16, ReduceOp.SUM).combine_silently(halves, [halves] * 3)
threads = ctypes.CDLL(None)
for _ in range(20):
    thread = ctypes.c_size_t()
    assert threads.pthread_create(ctypes.byref(thread), None, combine, None) == 0
    assert threads.pthread_join(thread, None) == 0
print("combined")
"""


def test_torch_converts_in_threads_that_python_does_not_know():
    """XLA calls Python from such threads. What Python keeps for one ends with the call, on which torch crashed."""
    command = [sys.executable, "-X", "faulthandler", "-c", IN_FOREIGN_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "combined\n"), done.stderr


def test_a_bool_is_not_scaled():
    flags = np.ones(3, bool)
    with pytest.raises(InvalidRequestError, match=r"averaged\) by 0\.5; use SUM or MAX for any"):
        reduce_arrays(flags, [flags, flags], DType.BOOL, ReduceOp.SUM, 1.0, 0.5)
    with pytest.raises(InvalidRequestError, match=r"by 2\.0"):
        scale_array(flags, flags, DType.BOOL, 2.0)


@every(("op", "dtype"), [(ReduceOp.AVERAGE, DType.FLOAT64), (ReduceOp.ADASUM, DType.INT8)])
def test_what_does_not_combine_is_refused(op, dtype):
    with pytest.raises(EngineError, match=f"not combine elements of {dtype.label}; allowed: SUM, MIN, MAX, PRODUCT"):
        reduce_arrays(np.ones(1), [np.ones(1)], dtype, op)


@every("dtype", REAL, **labels)
def test_temporaries_are_of_the_size_of_a_chunk(dtype):
    inputs = [random_array(dtype, 20 * CHUNK, seed) for seed in range(3)]
    scale = 1.0 if dtype is DType.BOOL else 0.5
    tracemalloc.start()
    reduce_arrays(inputs[2], inputs, dtype, ReduceOp.SUM, scale, scale)
    scale_array(inputs[0], inputs[1], dtype, scale)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * CHUNK * 8


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.lists(st.floats(width=32), min_size=1, max_size=20))
@example([3.3895314e38], [0.0])
@settings(max_examples=60)
def test_bfloat16_sums_agree_with_torch(left, right):
    size = min(len(left), len(right))
    inputs = [stored(np.array(each[:size]), DType.BFLOAT16) for each in (left, right)]
    out = np.empty_like(inputs[0])
    reduce_arrays(out, inputs, DType.BFLOAT16, ReduceOp.SUM)
    with np.errstate(all="ignore"):
        wide = torch_widen(inputs[0], DType.BFLOAT16) + torch_widen(inputs[1], DType.BFLOAT16)
    assert_bits(out, torch_narrow(wide, DType.BFLOAT16))


PYTHON = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.PRODUCT: lambda a, b: a * b,
}
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def random_array(dtype, size, seed):
    generator = np.random.default_rng([seed, size])
    if dtype is DType.BOOL:
        return generator.integers(0, 2, size).astype(bool)
    if dtype in INTEGERS:
        return generator.integers(*limits(dtype), size, dtype.storage, endpoint=True)
    return stored(generator.normal(size=size) * 10, dtype)


def stored(numbers, dtype):
    return torch_narrow(numbers.astype(np.float32), dtype) if dtype in HALVES else numbers.astype(dtype.storage)


def numbers_of(array, dtype):
    return torch_widen(array, dtype) if dtype in HALVES else array


def torch_narrow(wide, dtype):
    return torch.from_numpy(wide.astype(np.float32)).to(TORCH[dtype]).view(torch.uint16).numpy().view(dtype.storage)


def torch_widen(array, dtype):
    return torch.from_numpy(array.view(np.uint16)).view(TORCH[dtype]).float().numpy()


def near_boundaries(dtype):
    neighbours = torch_widen(np.arange(1 << 16, dtype=np.uint16).view(dtype.storage), dtype).view(np.uint32)
    step = 1 << (12 if dtype is DType.FLOAT16 else 15)
    return np.concatenate([neighbours + np.uint32(offset) for offset in (0, 1, step - 1, step, step + 1, 2 * step - 1)])


def limits(dtype):
    info = np.iinfo(dtype.storage)
    return int(info.min), int(info.max)


def wrap(number, dtype):
    low, high = limits(dtype)
    return (number - low) % (high - low + 1) + low


def assert_bits(actual, expected):
    """The same bits; of a NaN only that it is one."""
    assert actual.dtype == expected.dtype
    unsigned = f"u{actual.itemsize}"
    different = actual.view(unsigned) != expected.view(unsigned)
    if actual.dtype.kind == "f":
        different &= ~(np.isnan(actual) & np.isnan(expected))
    elif actual.dtype == np.uint16:
        different &= ~((actual & 0x7FFF > 0x7F80) & (expected & 0x7FFF > 0x7F80))
    assert not different.any(), (actual[different][:5], expected[different][:5])
