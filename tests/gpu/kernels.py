"""The kernels on a real GPU compute the same as the reference."""

from __future__ import annotations

import numpy as np

from collectives.api import DType, ReduceOp
from collectives.backends.memory import Floats
from collectives.backends.nccl.cupy_device import shared_device
from collectives.backends.nccl.interface import Placed, recipe
from tests.collectives.backends.matrix import decode, encode
from tests.collectives.backends.nccl.kernels import carried, returned
from tests.gpu.arrays import Arrays

LENGTHS = (1, 0, 7, 100_003, 33) + (5,) * 200
FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


def numbers(length, dtype):
    random = np.random.default_rng(length)
    if dtype is DType.BOOL:
        return random.integers(0, 2, length).astype(bool)
    return encode(random.integers(-9, 9, length) if dtype.is_integer else random.normal(size=length), dtype)


def check_packing(arrays, dtype, op, before, after):
    conversion = recipe(dtype, op, before, after, 3).conversion
    tensors = [numbers(length, dtype) for length in LENGTHS]
    ends = np.cumsum([0, *LENGTHS])
    pieces = [Placed(int(at), arrays.upload(each, dtype)) for at, each in zip(ends, tensors, strict=False)]
    pieces = [piece for piece in pieces if piece.buffer.count]
    room = arrays.device.empty(conversion.carrier, (int(ends[-1]),))
    arrays.device.pack(pieces, room, conversion, before)
    expected = [carried(each, conversion, before) for each in tensors]
    np.testing.assert_array_equal(arrays.download(room), np.concatenate(expected), err_msg=str(conversion))
    arrays.device.unpack(room, pieces, conversion, after)
    wanted = [returned(each, conversion, after) for each in expected if each.size]
    for (_, buffer), result in zip(pieces, wanted, strict=True):
        np.testing.assert_array_equal(arrays.download(buffer), result, err_msg=str(conversion))


def check_memory(arrays):
    device = arrays.device
    for dtype in FLOATS:
        one, other = (numbers(length, dtype) for length in (9001, 9001))
        first, second = arrays.upload(one, dtype), arrays.upload(other, dtype)
        wide = [decode(each, dtype) for each in (one, other)]
        found = device.products(Floats((first,), 2.0), Floats((second,), 3.0))
        dots = (6 * wide[0] @ wide[1], 4 * wide[0] @ wide[0], 9 * wide[1] @ wide[1])
        np.testing.assert_allclose(found, dots, rtol=1e-9)
        device.combine(Floats((first,)), Floats((first,), 0.5), Floats((second,), 3.0))
        sums = decode(arrays.download(first), dtype)
        np.testing.assert_allclose(sums, 0.5 * wide[0] + 3 * wide[1], rtol=1e-2, atol=1e-2)
        device.fill(second, float("inf"))
        assert np.isinf(decode(arrays.download(second), dtype)).all()
    assert device.load(device.store([1.5, 2.5])) == [1.5, 2.5]


def main():
    arrays = Arrays(shared_device(0))
    for dtype in DType:
        if dtype.real is dtype:
            factors = (1.0, 1.0) if dtype is DType.BOOL else (0.5, 3.0)
            for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
                check_packing(arrays, dtype, op, 1.0, 1.0)
                check_packing(arrays, dtype, op, *factors)
            if dtype.is_integer:
                check_packing(arrays, dtype, ReduceOp.AVERAGE, 1.0, 1.0)
                check_packing(arrays, dtype, ReduceOp.AVERAGE, 2.0, 0.5)
    check_memory(arrays)


if __name__ == "__main__":
    main()
