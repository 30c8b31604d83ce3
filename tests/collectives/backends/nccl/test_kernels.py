"""The kernels of the GPU compute the same as the reference. Here a compiler for the host compiles them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from collectives.api import DType, ReduceOp
from collectives.backends.nccl.interface import DTypeConversion, recipe
from collectives.backends.nccl.sources import PIECES, source
from tests.collectives.backends.matrix import encode
from tests.collectives.backends.nccl.kernels import carried, returned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HOST = """
#include <cstddef>
#define __device__
#define __global__
struct Place { unsigned x, y; };
static Place blockIdx, threadIdx, blockDim = {32, 1}, gridDim = {3, 1};
#define OVER_ALL(call, rows) \\
    for (blockIdx.y = 0; blockIdx.y < (unsigned)(rows); ++blockIdx.y) \\
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) \\
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) call;
"""
CALLS = """
extern "C" void run_pack(Pieces* pieces, CARRIER* room, double factor, int rows) {
    OVER_ALL(pack(*pieces, room, factor), rows)
}
extern "C" void run_unpack(Pieces* pieces, const CARRIER* room, double factor, int rows) {
    OVER_ALL(unpack(*pieces, room, factor), rows)
}
extern "C" void run_fill(NUMBER* target, Long count, unsigned long long bits) { OVER_ALL(fill(target, count, bits), 1) }
extern "C" void run_scale(const NUMBER* source, NUMBER* target, Long count, double factor) {
    OVER_ALL(scale(source, target, count, factor), 1)
}
#ifndef INTEGER
extern "C" void run_combine(void* upper, void* lower, Floats* first, Floats* second, Long count) {
    OVER_ALL(combine(upper, lower, *first, *second, count), 1)
}
extern "C" void run_products(double* sums, Floats* first, Floats* second, Long count) {
    OVER_ALL(products(sums, *first, *second, count), 1)
}
#endif
"""
LENGTHS = (1, 0, 7, 1000, 33)
CASES = [
    (DType.BOOL, ReduceOp.SUM, 1.0, 1.0),
    (DType.UINT8, ReduceOp.SUM, 0.5, 3.0),
    (DType.INT8, ReduceOp.AVERAGE, 1.0, 1.0),
    (DType.INT8, ReduceOp.AVERAGE, 2.0, 0.5),
    (DType.INT16, ReduceOp.SUM, 1.0, 1.0),
    (DType.INT16, ReduceOp.MAX, -0.5, 3.0),
    (DType.INT32, ReduceOp.SUM, 1.0, 1.0),
    (DType.INT64, ReduceOp.AVERAGE, 1.0, 1.0),
    *((dtype, ReduceOp.SUM, 0.3, 3.0) for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)),
    *((dtype, ReduceOp.MAX, -1.0, 0.5) for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)),
    *((dtype, ReduceOp.MIN, 1.0, 1.0) for dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)),
    (DType.FLOAT16, ReduceOp.SUM, 1.0, 1.0),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function from a conversion to its kernels."""
    folder, libraries = tmp_path_factory.mktemp("kernels"), {}

    def compile_once(conversion):
        if conversion not in libraries:
            text = folder / f"{len(libraries)}.cpp"
            text.write_text(HOST + source(conversion) + CALLS)
            library = text.with_suffix(".so")
            command = ["g++", "-std=c++17", "-O1", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC", "-o"]
            subprocess.run([*command, str(library), str(text)], check=True, timeout=100)
            libraries[conversion] = ctypes.CDLL(str(library))
        return libraries[conversion]

    return compile_once


def numbers(length, dtype):
    """With NaN, infinities, both zeros and the largest numbers, as far as the type has them."""
    random = np.random.default_rng(length)
    if dtype is DType.BOOL:
        return random.integers(0, 2, length).astype(bool)
    if dtype.is_integer:
        limits = np.iinfo(dtype.storage)
        return random.integers(limits.min // 4, limits.max // 4, length).astype(dtype.storage)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 65504.0, 1e-7])
    return encode(np.concatenate([special, random.normal(size=length)])[:length], dtype)


def pieces_of(arrays):
    table = np.zeros(3 * PIECES, np.int64)
    at = 0
    for row, array in enumerate(arrays):
        table[3 * row : 3 * row + 3] = at, array.ctypes.data, array.size
        at += array.size
    return table


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)  # which keeps the array alive


def same(found, expected, dtype):
    """Bit for bit, but for the bits of NaN."""
    assert found.dtype == expected.dtype
    if dtype is DType.BFLOAT16:
        found, expected = ((each.astype(np.uint32) << 16).view(np.float32) for each in (found, expected))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("dtype", "op", "before", "after"), CASES)
def test_pack_and_unpack(dtype, op, before, after, compiled):
    conversion = recipe(dtype, op, before, after, 3).conversion
    library, carrier = compiled(conversion), np.dtype(conversion.carrier.storage)
    arrays = [numbers(length, dtype) for length in LENGTHS]
    room, count = np.full(sum(LENGTHS), 99, carrier), len(LENGTHS)
    library.run_pack(pointer(pieces_of(arrays)), pointer(room), ctypes.c_double(before), count)
    expected = [carried(array, conversion, before) for array in arrays]
    same(room, np.concatenate(expected), conversion.carrier)
    targets = [np.empty_like(array) for array in arrays]
    library.run_unpack(pointer(pieces_of(targets)), pointer(room), ctypes.c_double(after), count)
    for target, carriers in zip(targets, expected, strict=True):
        same(target, returned(carriers, conversion, after), dtype)


@pytest.mark.parametrize("dtype", [DType.INT16, DType.BFLOAT16, DType.FLOAT64], ids=lambda dtype: dtype.label)
def test_fill_and_scale(dtype, compiled):
    library, array = compiled(DTypeConversion(dtype, dtype)), numbers(500, dtype)
    result = np.empty_like(array)
    library.run_scale(pointer(array), pointer(result), ctypes.c_longlong(500), ctypes.c_double(0.3))
    same(result, carried(array, DTypeConversion(dtype, dtype), 0.3), dtype)
    bits = int.from_bytes(array[400:401].tobytes(), "little")
    library.run_fill(pointer(result), ctypes.c_longlong(500), ctypes.c_ulonglong(bits))
    assert (result == array[400]).all()


class Operand(ctypes.Structure):
    _fields_ = [("upper", ctypes.c_void_p), ("lower", ctypes.c_void_p), ("factor", ctypes.c_double)]


def operand(array, factor, lower=None):
    return ctypes.byref(Operand(array.ctypes.data, 0 if lower is None else lower.ctypes.data, factor))


def test_combine_of_halves_in_two_planes(compiled):
    """16-bit floats are added up in float32, whose halves are kept apart."""
    library = compiled(DTypeConversion(DType.BFLOAT16, DType.BFLOAT16))
    values = [np.random.default_rng(seed).normal(size=300) for seed in range(2)]
    one, other = (encode(each, DType.BFLOAT16) for each in values)
    upper, lower = np.empty(300, np.uint16), np.empty(300, np.uint16)
    count = ctypes.c_longlong(300)
    library.run_combine(pointer(upper), pointer(lower), operand(one, 0.5), operand(other, 3.0), count)
    wide = [(each.astype(np.uint32) << 16).view(np.float32) for each in (one, other)]
    expected = wide[0] * np.float32(0.5) + wide[1] * np.float32(3.0)
    found = (upper.astype(np.uint32) << 16 | lower).view(np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    library.run_combine(pointer(one), None, operand(upper, 1.0, lower), operand(other, 0.0), count)
    np.testing.assert_array_equal(one, encode(found, DType.BFLOAT16))


def test_products(compiled):
    library = compiled(DTypeConversion(DType.FLOAT32, DType.FLOAT32))
    one, other = (np.random.default_rng(seed).normal(size=1000).astype(np.float32) for seed in range(2))
    sums = np.empty(3 * 96)
    library.run_products(pointer(sums), operand(one, 9.0), operand(other, 9.0), ctypes.c_longlong(1000))
    first, second = one.astype(np.float64), other.astype(np.float64)
    np.testing.assert_allclose(sums.reshape(-1, 3).sum(axis=0), [first @ second, first @ first, second @ second])
