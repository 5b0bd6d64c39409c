"""What host attention checks about tensors and integer arrays before native code sees their addresses.

Every function raises ValueError naming the argument and the offending value.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neo_compile import _C

__all__ = [
    "IntArray",
    "address",
    "check_is_tensor",
    "check_out",
    "check_tensor",
    "dtype_code",
    "int32_array",
    "pairs_array",
    "rows",
    "sinks_address",
    "softcap_code",
    "window_code",
]

IntArray: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[Any]"

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def check_tensor(name: str, x: Tensor, dim: int) -> int:
    """dtype code of a CPU tensor whose innermost dimension is contiguous."""
    check_is_tensor(name, x)
    code = _DTYPE_CODES.get(x.dtype)
    if code is None:
        raise ValueError(f"{name} is {x.dtype}; float32, float16 and bfloat16 are supported")
    if x.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, its shape is {tuple(x.shape)}")
    if not x.is_cpu:
        raise ValueError(f"{name} is on {x.device}; host attention needs CPU tensors")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, its strides are {x.stride()}")
    return code


def check_is_tensor(name: str, x: object) -> None:
    if isinstance(x, Tensor):
        return
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    read_only = " (and a read-only one)" if isinstance(x, np.ndarray) and not x.flags.writeable else ""
    raise ValueError(f"{name} must be a torch tensor, not {kind}{read_only}")


def rows(name: str, x: Tensor, shape: tuple[int, int, int]) -> _C.Rows:
    """x as rows for the kernels: what is wrong is only found out once something is."""
    code = _DTYPE_CODES.get(x.dtype) if isinstance(x, Tensor) else None
    if code is None or x.shape != shape or not x.is_cpu:
        check_tensor(name, x, 3)
        raise ValueError(f"{name} has shape {tuple(x.shape)}, the plan and cache say {shape}")
    strides = x.stride()
    if strides[2] != 1:
        check_tensor(name, x, 3)  # refused unless there is only one column
    data = x.data_ptr()
    if not data and x.numel():
        raise ValueError(f"{name} {tuple(x.shape)} has no memory (a fake tensor, or one whose storage was freed)")
    return _C.Rows(data, strides[0], strides[1], code)


def dtype_code(dtype: torch.dtype) -> int | None:
    return _DTYPE_CODES.get(dtype)


def window_code(window: int | None) -> int:
    if window is None:
        return 0
    if window < 1:
        raise ValueError(f"window = {window} must be at least 1 (None: no window)")
    return window


def softcap_code(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if not 0.0 < softcap < float("inf"):
        raise ValueError(f"softcap = {softcap} must be positive and finite (None: no cap)")
    return softcap


def sinks_address(sinks: Tensor | None, num_q_heads: int) -> int:
    if sinks is None:
        return 0
    check_is_tensor("sinks", sinks)
    if sinks.dtype != torch.float32 or sinks.shape != (num_q_heads,) or not sinks.is_contiguous():
        raise ValueError(f"sinks must be contiguous float32 [{num_q_heads}], not {sinks.dtype} {tuple(sinks.shape)}")
    if sinks.device.type != "cpu":
        raise ValueError(f"sinks is on {sinks.device}; host attention needs CPU tensors")
    return sinks.data_ptr()


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def int32_array(name: str, values: IntArray, dim: int) -> npt.NDArray[np.int32]:
    array = _int_array(name, values, dim)
    if array.dtype != np.int32:
        if array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
            raise ValueError(f"{name} holds values beyond int32")
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)


def _int_array(name: str, values: IntArray, dim: int) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"{name} is on {values.device}; host attention needs CPU tensors")
        values = values.detach().numpy()
    array = _rectangular(name, values)
    if array.size == 0 and not isinstance(values, np.ndarray):  # an empty list says nothing about its type
        array = array.reshape((0,) * dim).astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim != dim:
        raise ValueError(f"{name} must be integers with {dim} dimension(s), not {array.dtype} {array.shape}")
    return array


def _rectangular(name: str, values: Any) -> npt.NDArray[Any]:
    """np.asarray, but rows that differ in length are named (numpy only says that it is so)."""
    try:
        return np.asarray(values)
    except ValueError:
        lengths = [len(row) if isinstance(row, Sequence | np.ndarray) else None for row in values]
        odd = next((i for i, length in enumerate(lengths) if length != lengths[0]), None)
        if odd is None:
            raise
        first, other = ("a number" if n is None else f"{n} long" for n in (lengths[0], lengths[odd]))
        hint = "pad the rows to one length: entries past a request's context are never read"
        raise ValueError(f"{name} is ragged: {name}[0] is {first}, {name}[{odd}] is {other}; {hint}") from None


def pairs_array(pairs: IntArray, num_blocks: tuple[int, int]) -> npt.NDArray[np.int64]:
    array = np.ascontiguousarray(_int_array("pairs", pairs, 2), dtype=np.int64)
    if array.shape[1] != 2 and len(array):
        raise ValueError(f"pairs must be [N, 2], not {array.shape}")
    if not len(array):
        return array.reshape(0, 2)
    for column, name, count in ((0, "src", num_blocks[0]), (1, "dst", num_blocks[1])):
        bad = np.flatnonzero((array[:, column] < 0) | (array[:, column] >= count))
        if bad.size:
            i = int(bad[0])
            raise ValueError(f"pairs[{i}, {column}] = {array[i, column]} is not one of {name}'s {count} blocks")
    written, times = np.unique(array[:, 1], return_counts=True)
    if times.max() > 1:
        raise ValueError(f"pairs write block {written[times.argmax()]} of dst more than once")
    return array


def check_out(out: Tensor, inputs: dict[str, Tensor]) -> None:
    """Refuses an `out` that overlaps itself (expanded, or with interleaved strides) or an input, or is read-only.

    Read-only to the operating system (a file mapped for reading, say), where a write would end the process. That a
    tensor was made from a read-only numpy array torch itself forgets, after a warning.
    """
    check_is_tensor("out", out)
    if out.device.type != "cpu":
        return  # named by `rows`
    dims = sorted((stride, size) for stride, size in zip(out.stride(), out.shape, strict=True) if size > 1)
    spans = [0, *((size - 1) * stride for stride, size in dims)]
    if any(stride <= sum(spans[: i + 1]) for i, (stride, _) in enumerate(dims)):
        raise ValueError(f"out overlaps itself: strides {out.stride()} for shape {tuple(out.shape)}")
    begin, end = _byte_range(out)
    for name, x in inputs.items():
        other_begin, other_end = _byte_range(x)
        if begin < other_end and other_begin < end:
            raise ValueError(f"out overlaps {name} in memory")
    if begin < end and not (is_writable(begin) and is_writable(end - 1)):
        raise ValueError(f"out lies in memory that is read-only: {tuple(out.shape)} at address {begin:#x}")


def is_writable(byte_address: int) -> bool:
    """Whether this process may write to the byte. Its value stays: the kernel is asked to copy it out and in again."""
    byte = memoryview((ctypes.c_char * 1).from_address(byte_address))
    reader, writer = os.pipe()
    try:
        os.write(writer, byte)
        os.readv(reader, [byte])
    except OSError as error:
        if error.errno == errno.EFAULT:
            return False
        raise
    finally:
        os.close(reader)
        os.close(writer)
    return True


def _byte_range(x: Tensor) -> tuple[int, int]:
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
