"""Tensors and some words as one piece of bytes, which one collective sends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, torch's own on the CPU: the bits that a kernel gives depend on it
_LENGTH = 8  # bytes, of a number


def to_message(words: bytes, tensors: Sequence[Tensor]) -> Tensor:
    """A copy on the host: the words, how the tensors are laid out, and these as they lie in memory."""
    dense = [tensor if _is_dense(tensor) else tensor.contiguous() for tensor in map(Tensor.detach, tensors)]
    layouts = [(str(one.dtype).removeprefix("torch."), list(one.shape), list(one.stride())) for one in dense]
    told = json.dumps(layouts).encode()
    beginning = b"".join((len(words).to_bytes(_LENGTH, "little"), len(told).to_bytes(_LENGTH, "little"), words, told))
    starts, end = list[int](), _aligned(len(beginning))
    for tensor in dense:
        starts.append(end)
        end += _aligned(tensor.nbytes)
    message = torch.zeros(end, dtype=torch.uint8)
    message[: len(beginning)] = torch.frombuffer(bytearray(beginning), dtype=torch.uint8)
    for start, tensor in zip(starts, dense, strict=True):
        _placed(message, start, tensor.dtype, tensor.shape, tensor.stride()).copy_(tensor)
    return message


def from_message(message: Tensor) -> tuple[bytes, list[Tensor]]:
    """What :func:`to_message` was given; the tensors lie in ``message``."""
    begin = 2 * _LENGTH
    lengths = message[:begin].numpy().tobytes()
    middle = begin + int.from_bytes(lengths[:_LENGTH], "little")
    end = middle + int.from_bytes(lengths[_LENGTH:], "little")
    tensors, start = list[Tensor](), _aligned(end)
    for dtype, shape, stride in json.loads(message[middle:end].numpy().tobytes()):
        tensors.append(_placed(message, start, getattr(torch, dtype), shape, stride))
        start += _aligned(tensors[-1].nbytes)
    return message[begin:middle].numpy().tobytes(), tensors


def digest_of(message: Tensor) -> str:
    """What tells this message from a damaged one."""
    return hashlib.blake2b(message.numpy()).hexdigest()  # type: ignore[arg-type]  # an array is a buffer


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _placed(message: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    elements = 1
    for size in shape:
        elements *= size
    flat = message[start : start + elements * dtype.itemsize].view(dtype)
    return flat.as_strided(list(shape), list(stride), flat.storage_offset())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
