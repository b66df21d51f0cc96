"""The layout of a safetensors file, as https://github.com/huggingface/safetensors describes it.

Eight bytes with the length of a header, the header in JSON, and the tensors' bytes without gaps. The order is the
library's own: types that align most first, then by name. The library writes such a file whole or not at all; here
the pieces are given out, so that who writes them can hash them too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# What every supported version of safetensors has a name for, in the order of a file.
TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PLACES = {dtype: place for place, dtype in enumerate(TYPES)}
_ALIGNED = 8  # bytes, of a header


def pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], host: Callable[[Tensor], Tensor] = Tensor.cpu
) -> list[memoryview | bytes]:
    """The bytes of a file with these tensors, in its order; those of tensors on the host are theirs, no copy.

    Args:
        tensors: contiguous, of :data:`TYPES`, without overlaps.
        metadata: for the header; left out where it is empty.
        host: brings a tensor to the host.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    content, end = list[memoryview | bytes](), 0
    for name in sorted(tensors, key=lambda name: (_PLACES[tensors[name].dtype], name.encode())):
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        content.append(host(tensor).reshape(-1).view(torch.uint8).numpy().data)
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNED)
    return [struct.pack("<Q", len(header)) + header, *content]
