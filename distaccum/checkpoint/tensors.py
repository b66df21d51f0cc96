"""Named tensors in safetensors files: each is written once, by one of its ranks, and read one at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distaccum.checkpoint.files import Pieces, pointed, retried
from distaccum.distributed.world import World
from distaccum.engines.state import kind_of
from distaccum.errors import CheckpointError

# The layout of a safetensors file, as https://github.com/huggingface/safetensors describes it.
#
# Eight bytes with the length of a header, the header in JSON, and the tensors' bytes without gaps. The order is the
# library's own: types that align most first, then by name. The library writes such a file whole or not at all; here
# the pieces are given out, so that who writes them can hash them too.

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
_KINDS = {"F": "float", "B": "float", "I": "int", "U": "int", "C": "complex"}  # BOOL apart


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


_NOTES = "distaccum"  # in a file's metadata: what is stored as bytes
# Files of an optimizer: some, so that several threads hash them, here and when they are verified; not too many.
_PART, _MOST_PARTS = 2**27, 16


@dataclass(frozen=True)
class Share:
    """The tensors of a kind that this rank writes into files named ``stem``; None where it writes no file of them."""

    stem: str
    tensors: Mapping[str, Tensor] | None

    def files(
        self, *, in_parts: bool = False, host: Callable[[Tensor], Tensor] = Tensor.cpu
    ) -> Iterator[tuple[str, Pieces]]:
        """They are ``STEM.safetensors``; what is large comes ``in_parts``, ``STEM-I.safetensors``.

        ``host`` brings a tensor to the host.
        """
        if self.tensors is None:
            return
        stored, notes = storable(self.tensors)
        parts = _parts(stored) if in_parts else [stored]
        for i, part in enumerate(parts):
            noted = {name: note for name, note in notes.items() if name in part}
            metadata = {_NOTES: json.dumps(noted)} if noted else {}
            yield f"{self.stem}{f'-{i}' if len(parts) > 1 else ''}.safetensors", pieces(part, metadata, host)


def share(kind: str, tensors: Mapping[str, Tensor], world: World, *, shared: bool) -> Share:
    """What this rank writes of them: as ``KIND``, or as ``KIND-R`` where other ranks write too.

    A tensor of several ranks is given by the first of them. A collective if ``shared``; else rank 0 has every tensor.
    """
    given = world.all_gather_object(list(tensors)) if shared else [list(tensors)]
    before: set[str] = set().union(*given[: world.rank])
    own = {name: tensor for name, tensor in tensors.items() if name not in before}
    alone = all(set(names) <= set(given[0]) for names in given)
    return Share(f"{kind}{'' if alone else f'-{world.rank}'}", own if world.is_main or own else None)


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in their order, in parts of about the same size; one where they are few."""
    size = max(_PART, math.ceil(sum(tensor.nbytes for tensor in tensors.values()) / _MOST_PARTS))
    parts, filled = [dict[str, Tensor]()], 0
    for name, tensor in tensors.items():
        if filled >= size:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    return parts


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a folder's ``KIND*.safetensors``, or of one file; each is read when it is asked for.

    Raises:
        CheckpointError: a file is missing or no safetensors file, or two have the same tensor.
        OSError: a file cannot be read, again and again.
    """

    def __init__(self, path: Path, kind: str = "model") -> None:
        files = retried(lambda: _files(path, kind))
        if not files:
            raise CheckpointError(f"{path} holds no {kind}.safetensors")
        self._opened, self._homes, self._notes = ExitStack(), dict[str, Any](), dict[str, Any]()
        for file in files:
            handle = self._opened.enter_context(_open(file))
            twice = self._homes.keys() & set(handle.keys())
            if twice:
                raise CheckpointError(f"{file} has {min(twice)}, which another file of the folder has too")
            self._homes |= dict.fromkeys(handle.keys(), handle)
            self._notes |= _notes(file, handle)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._homes[name].get_tensor(name)
        if name not in self._notes:
            return tensor
        dtype, shape = self._notes[name]
        # A copy: the mapped file does not align for wide types, and torch reads past that.
        return tensor.clone().view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read without the tensor."""
        if name in self._notes:
            return tuple(self._notes[name][1])
        return tuple(self._homes[name].get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """That of its numbers, as :func:`~distaccum.engines.state.kind_of` names it; read without the tensor."""
        if name in self._notes:
            return kind_of(self._notes[name][0])
        written = str(self._homes[name].get_slice(name).get_dtype())
        return "bool" if written == "BOOL" else _KINDS[written[0]]


def _files(path: Path, kind: str) -> list[Path]:
    path = pointed(path)
    if not path.is_dir():
        return [path]
    index = path / f"{kind}.safetensors.index.json"  # Hugging Face's, of a model in several files
    if index.exists():
        return [path / name for name in _indexed(index)]
    return sorted((*path.glob(f"{kind}.safetensors"), *path.glob(f"{kind}-*.safetensors")))


def _indexed(index: Path) -> list[str]:
    """The files that an index names, once each.

    Raises:
        CheckpointError: it is none, or names a file that is elsewhere.
    """
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        plain = all(name == Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: no index of safetensors files ({error!r})") from error
    if not (names and plain):
        raise CheckpointError(f"{index}: no index of safetensors files beside it")
    return names


def _open(file: Path) -> Any:
    """The file, mapped. Of an error of the file system safetensors makes any of three, a missing file among them."""
    if not retried(file.exists):
        raise CheckpointError(f"{file}: cannot be read as safetensors (no such file)")

    def attempt() -> Any:
        with file.open("rb"):  # an error of its own says which one it is
            pass
        try:
            return safe_open(file, framework="pt")
        except (FileNotFoundError, RuntimeError) as error:
            raise OSError(f"{file}: cannot be read ({error})") from error

    try:
        return retried(attempt)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from error


def _notes(file: Path, handle: Any) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Types and shapes of what is stored as bytes.

    Raises:
        CheckpointError: they are none, or do not fit the bytes.
    """
    found: dict[str, tuple[torch.dtype, list[int]]] = {}
    try:
        for name, note in json.loads((handle.metadata() or {}).get(_NOTES, "{}")).items():
            found[name] = _note(note, handle.get_slice(name).get_shape())
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{file}: its notes on types are damaged ({error})") from error
    return found


def _note(note: Mapping[str, Any], stored: list[int]) -> tuple[torch.dtype, list[int]]:
    dtype, shape = getattr(torch, note["dtype"]), [int(size) for size in note["shape"]]
    if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0 or stored != [math.prod(shape) * dtype.itemsize]:
        raise ValueError(f"{dict(note)} for {stored} bytes")
    return dtype, shape


def storable(
    tensors: Mapping[str, Tensor], *, known: frozenset[torch.dtype] = frozenset(TYPES)
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Contiguous tensors that share no memory, as safetensors wants them: a tied weight is stored under each name.

    Of types that are not ``known`` the bytes are stored.

    Returns:
        The tensors, and by name the type and the shape of what is stored as bytes.
    """
    result = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    places = {name: (plain.untyped_storage().data_ptr(), plain.data_ptr()) for name, plain in result.items()}
    notes, storage, end = dict[str, Any](), 0, 0  # of the ones before, in memory's order: a storage may hold thousands
    for name in sorted(result, key=places.__getitem__):
        (own, begin), plain = places[name], result[name]
        end = end if own == storage else 0
        result[name] = plain.clone() if begin < end else plain
        storage, end = own, max(end, begin + plain.nbytes)
    for name, tensor in tensors.items():
        if tensor.dtype not in known:
            notes[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            result[name] = result[name].reshape(-1).view(torch.uint8)
    return result, notes
