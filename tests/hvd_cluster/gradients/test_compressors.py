"""Compressors without a framework: tensors are NumPy arrays."""

import numpy as np
import pytest

from hvd_cluster.gradients.compression import CastCompressor, IntoCompressor, compressor_for


class Small(IntoCompressor):
    """Sends float32."""

    @staticmethod
    def compress(tensor):
        return tensor.astype(np.float32), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.astype(ctx)

    @staticmethod
    def decompress_into(tensor, ctx, target):
        target[...] = tensor


class Doubled(Small):
    """A user's subclass, which knows nothing of ``decompress_into``."""

    @staticmethod
    def decompress(tensor, ctx):
        return 2 * tensor.astype(ctx)


def travelled(compressor, gradient):
    """The result of ``compressor`` where the sum of all ranks is ten times the tensor of one."""
    rounds = compressor_for(compressor, gradient).rounds(gradient)
    sent = next(rounds)
    assert sent.dtype == np.float32
    try:
        rounds.send(sent * 10)
    except StopIteration as end:
        return end.value


def test_the_result_is_written_into_the_gradient():
    gradient = np.arange(3.0)
    assert travelled(Small, gradient) is gradient
    assert gradient.tolist() == [0.0, 10.0, 20.0]


def test_a_subclass_with_another_decompress_uses_that():
    gradient = np.arange(3.0)
    assert travelled(Doubled, gradient).tolist() == [0.0, 20.0, 40.0]
    assert gradient.tolist() == [0.0, 1.0, 2.0]


class Half(CastCompressor):
    dtype = np.float16

    @staticmethod
    def float_type(tensor):
        return tensor.dtype if tensor.dtype.kind == "f" else None

    @staticmethod
    def cast(tensor, dtype):
        return tensor.astype(dtype)


@pytest.mark.parametrize(("given", "sent"), [("float64", "float16"), ("float32", "float16"), ("int64", "int64")])
def test_floats_alone_travel_in_16_bits_and_come_back_as_they_were(given, sent):
    tensor = np.arange(3, dtype=given)
    small, context = Half.compress(tensor)
    assert small.dtype == sent
    restored = Half.decompress(small, context)
    assert restored.dtype == given
    assert restored.tolist() == [0, 1, 2]
