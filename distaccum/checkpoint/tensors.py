"""Named tensors in safetensors files: each is written once, by one of its ranks, and read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.errors import CheckpointError


def write(folder: Path, kind: str, tensors: Mapping[str, Tensor], world: World, *, shared: bool) -> None:
    """Writes this rank's share to ``KIND.safetensors``, or ``KIND-R.safetensors`` where other ranks write too.

    A tensor of several ranks is written by the first of them. A collective if ``shared``; else rank 0 has every tensor.
    """
    given = world.all_gather_object(list(tensors)) if shared else [list(tensors)]
    before: set[str] = set().union(*given[: world.rank])
    own = {name: tensor for name, tensor in tensors.items() if name not in before}
    alone = all(set(names) <= set(given[0]) for names in given)
    if world.is_main or own:
        save_file(_storable(own), folder / f"{kind}{'' if alone else f'-{world.rank}'}.safetensors")


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a folder's ``KIND*.safetensors``, or of one file; each is read when it is asked for.

    Raises:
        CheckpointError: a file is missing or no safetensors file.
    """

    def __init__(self, path: Path, kind: str = "model") -> None:
        of_folder = (*path.glob(f"{kind}.safetensors"), *path.glob(f"{kind}-*.safetensors"))
        files = sorted(of_folder) if path.is_dir() else [path]
        if not files:
            raise CheckpointError(f"{path} holds no {kind}.safetensors")
        self._opened, self._homes = ExitStack(), dict[str, Any]()
        for file in files:
            try:
                handle = self._opened.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from error
            self._homes |= dict.fromkeys(handle.keys(), handle)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._homes[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read without the tensor."""
        return tuple(self._homes[name].get_slice(name).get_shape())


def save_whole(tensors: Mapping[str, Tensor], file: Path) -> None:
    """All of them in one file, which is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(_storable(tensors), file, metadata={"format": "pt"})  # writes elsewhere first, and renames
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written ({error})") from error


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors wants them: a tied weight is stored under each name."""
    taken: dict[int, list[tuple[int, int]]] = {}  # by storage: begins and ends
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        begin = plain.data_ptr()
        end, stretches = begin + plain.nbytes, taken.setdefault(plain.untyped_storage().data_ptr(), [])
        overlaps = any(begin < other_end and other_begin < end for other_begin, other_end in stretches)
        result[name] = plain.clone() if overlaps else plain
        stretches.append((begin, end))
    return result
