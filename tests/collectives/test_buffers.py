"""Any array -> buffer."""

import array
from dataclasses import dataclass

import numpy as np
import pytest

from collectives.api import DType, InvalidRequestError
from collectives.buffers import as_buffer, empty

NUMPY = [dtype for dtype in DType if dtype is not DType.BFLOAT16]
SHAPES = [(), (1,), (0,), (5,), (2, 3), (2, 0, 3)]


@pytest.mark.parametrize("dtype", NUMPY, ids=lambda dtype: dtype.label)
def test_a_numpy_array_is_viewed(dtype):
    for shape in SHAPES:
        owner = np.ones(shape, dtype.label)
        buffer = as_buffer(owner)
        assert (buffer.dtype, buffer.shape, buffer.device) == (dtype, shape, "cpu")
        assert buffer.owner is owner
        assert buffer.pointer == owner.__array_interface__["data"][0]
        assert (buffer.host.ndim, buffer.host.size, buffer.host.dtype) == (1, owner.size, dtype.storage)
        assert buffer.bytes.nbytes == owner.nbytes
        buffer.host[:] = 0
        assert not owner.any()


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_a_new_buffer(dtype):
    for shape in SHAPES:
        buffer = empty(dtype, shape)
        assert (buffer.dtype, buffer.shape, buffer.owner.shape) == (dtype, shape, shape)
        assert np.may_share_memory(buffer.host, buffer.owner) or not buffer.owner.size


def test_the_buffer_protocol_is_viewed():
    owner = array.array("d", [1.0, 2.0])
    buffer = as_buffer(owner)
    assert (buffer.dtype, buffer.shape, buffer.owner) == (DType.FLOAT64, (2,), owner)
    buffer.host[0] = 7.0
    assert owner[0] == 7.0
    assert as_buffer(b"abc").bytes.tolist() == [97, 98, 99]
    assert as_buffer(memoryview(bytearray(6)).cast("B", (2, 3))).shape == (2, 3)


def test_the_array_interface_is_viewed():
    class Holder:
        def __init__(self, inner):
            self.inner = inner
            self.__array_interface__ = inner.__array_interface__

    owner = Holder(np.arange(6, dtype=np.int16).reshape(2, 3))
    buffer = as_buffer(owner)
    assert (buffer.dtype, buffer.shape, buffer.owner) == (DType.INT16, (2, 3), owner)
    buffer.host[5] = -1
    assert owner.inner[1, 2] == -1


def test_dlpack_is_viewed():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.int64, torch.uint8, torch.bool, torch.float16):
        owner = torch.ones(2, 3, dtype=dtype)
        buffer = as_buffer(owner)
        assert (buffer.dtype.label, buffer.shape) == (str(dtype).removeprefix("torch."), (2, 3))
        assert buffer.owner is owner
        assert buffer.pointer == owner.data_ptr()
        buffer.host[0] = 0
        assert not owner[0, 0]


def test_a_tensor_that_cannot_be_viewed_is_refused():
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16), torch.ones(2).to_sparse()]
    for tensor in tensors:
        with pytest.raises(InvalidRequestError, match="a Tensor cannot be viewed as an array: "):
            as_buffer(tensor)


@dataclass
class Device:
    """Memory that only a GPU could read."""

    __cuda_array_interface__: dict


def interface(**fields):
    return {"shape": (2, 3), "typestr": "<f4", "data": (0x7F00_0000, False), "version": 3} | fields


@pytest.mark.parametrize("strides", [None, (12, 4)])
def test_device_memory_has_an_address_and_no_array(strides):
    buffer = as_buffer(Device(interface(strides=strides)))
    assert (buffer.dtype, buffer.shape, buffer.device) == (DType.FLOAT32, (2, 3), "cuda")
    assert (buffer.pointer, buffer.array) == (0x7F00_0000, None)
    with pytest.raises(InvalidRequestError, match="the tensor is on cuda; this backend works on host memory"):
        _ = buffer.host


NOT_CONTIGUOUS = [
    np.ones((4, 4))[:, :2],
    np.ones((4, 4)).T,
    np.ones(8)[::2],
    np.ones(8)[::-1],
    memoryview(bytearray(8))[::2],
    Device(interface(strides=(4, 8))),
    Device(interface(strides=(24, 8))),
]


@pytest.mark.parametrize("value", NOT_CONTIGUOUS, ids=str)
def test_what_has_gaps_is_refused(value):
    with pytest.raises(InvalidRequestError, match="is not C-contiguous; copy it first"):
        as_buffer(value)


UNSUPPORTED = [
    np.ones(2, np.uint16),
    np.ones(2, np.clongdouble),
    np.array([object()]),
    np.array(["text"]),
    np.ones(2, ">f4"),
    np.ones(2, ">i8"),
    np.zeros(2, [("x", "f4")]),
    np.zeros(2, "M8[s]"),
    Device(interface(typestr="<c32")),
    Device(interface(typestr=">f4")),
]


@pytest.mark.parametrize("value", UNSUPPORTED, ids=lambda value: str(getattr(value, "dtype", value)))
def test_an_unsupported_type_is_refused_with_those_that_work(value):
    with pytest.raises(
        InvalidRequestError, match=r"is not supported; convert the tensor to one of: uint8, int8, .*bool"
    ):
        as_buffer(value)


@pytest.mark.parametrize("value", [None, 3, 1.5, [1.0, 2.0], "text", object()], ids=repr)
def test_what_is_no_array_is_refused(value):
    with pytest.raises(InvalidRequestError, match=f"a {type(value).__name__} is not an array; give a NumPy array or"):
        as_buffer(value)


def test_nothing_is_copied():
    owner = np.zeros(3)
    for value in (owner, memoryview(owner), owner.reshape(3, 1)):
        assert as_buffer(value).pointer == owner.ctypes.data
