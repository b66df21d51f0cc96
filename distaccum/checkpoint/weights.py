"""Copies weights from files into a model that no engine has wrapped yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from distaccum.checkpoint.tensors import TensorFiles
from distaccum.engines.modules import clean, is_meta, shard_like, to_local
from distaccum.engines.state import from_bytes, is_extra, kind_of, model_state, set_extra_state, to_bytes
from distaccum.errors import CheckpointError, ConfigError, near_misses, shorten

# What holds all numbers of its kind, or a type that checkpoints have in its place.
_WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128)


class InModel(Mapping[str, Tensor]):
    """The tensors of files under every name that they have in a model.

    safetensors and Hugging Face write a tied weight under one of its names only, and a model without its head under
    names without the head's ``base_model_prefix``.

    Args:
        model: not wrapped yet.
        files: to read from.
        without: names of the files that are left out.
    """

    def __init__(self, model: nn.Module, files: TensorFiles, *, without: Sequence[str] = ()) -> None:
        self._files = files
        renamed = _renamed(model, files)
        self._stored: dict[str, str] = {name: stored for stored, name in renamed.items() if stored not in without}
        self.ties = _tied_names(model)
        for group in self.ties:
            first = next((name for name in group if name in renamed.values()), None)
            if first is not None and first in self._stored:
                self._stored |= {name: self._stored[first] for name in group if name not in renamed.values()}

    def stored(self, name: str) -> str:
        """The name of a tensor in the files."""
        return self._stored[name]

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._stored[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read without the tensor."""
        return self._files.shape(self._stored[name])

    def kind(self, name: str) -> str:
        """Read without the tensor."""
        return self._files.kind(self._stored[name])


def _renamed(model: nn.Module, files: Iterable[str]) -> dict[str, str]:
    """The model's name of each of the files' names, as transformers finds it by ``base_model_prefix``."""
    stored, own = list(files), {clean(name) for name in model.state_dict()}
    known = getattr(model, "base_model_prefix", None)
    prefix = f"{known}." if isinstance(known, str) and known else None
    if prefix is None:
        return {name: name for name in stored}
    expected, given = (any(name.startswith(prefix) for name in names) for names in (own, stored))
    if expected and not given:
        return {name: prefix + name if prefix + name in own else name for name in stored}
    return {name: name if expected else name.removeprefix(prefix) for name in stored}


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each tensor that the model has under several."""
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(clean(name))
    return [group for group in names.values() if len(group) > 1]


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Names in which files differ from a model, and may."""

    missing: tuple[str, ...] = ()
    """The model's; they keep its initial values."""
    unexpected: tuple[str, ...] = ()
    """The files'; they are left out."""

    def __str__(self) -> str:
        kept = f"initial values of {shorten(self.missing)}" if self.missing else ""
        left = f"without {shorten(self.unexpected)}" if self.unexpected else ""
        return "; ".join(part for part in (kept, left) if part)


def check(
    model: nn.Module, path: Path, *, key: str = "init_from", missing: Sequence[str] = (), unexpected: Sequence[str] = ()
) -> Differences:
    """In what the file, or the folder's model, differs from the model, where it may.

    Of the names of a tied weight one is enough. Initial weights may leave out the extra state of modules.

    Args:
        model: not wrapped yet.
        path: of a safetensors file, or a folder.
        key: the setting that names it.
        missing: globs of the model's names that need not be there.
        unexpected: globs of other names that may be.

    Raises:
        ConfigError: it differs in anything else, cannot be read, or a glob fits no name.
    """
    try:
        files = TensorFiles(path)
    except (CheckpointError, OSError) as error:
        remedy = "Name a safetensors file, a checkpoint, or a folder with model.safetensors"
        raise ConfigError(key, path, str(error).removeprefix(f"{path}: "), remedy) from error
    own, given = model_state(model), InModel(model, files)
    _check_globs("init.missing", missing, own)
    _check_globs("init.unexpected", unexpected, files)
    absent = [name for name in own if name not in given and not (is_extra(name) and key == "init_from")]
    remedy = f"Use weights of this {type(model).__name__}"
    anew = "" if key == "init_from" else f"begin anew with init_from={path}: "
    refused = [name for name in absent if not _fits(name, missing)]
    if refused:
        problem = f"has no {shorten(refused, most=1)}{near_misses(refused[0], files)}"
        raise ConfigError(
            key, path, problem, f"{remedy}; or {anew}init.missing=[{refused[0]}] keeps its initial values"
        )
    unknown = [given.stored(name) for name in given if name not in own]
    refused = [name for name in unknown if not _fits(name, unexpected)]
    if refused:
        problem = f"has {shorten(refused, most=1)}, which the model has not"
        raise ConfigError(key, path, problem, f"{remedy}; or {anew}init.unexpected=[{refused[0]}] leaves it out")
    if absent and is_meta(model):
        problem = f"{shorten(absent)} would keep initial values, and a model on the meta device has none"
        raise ConfigError("init.missing", list(missing), problem, "Use engine.meta_init=false")
    own = {name: tensor for name, tensor in own.items() if name not in absent}
    for name, tensor in own.items():
        if is_extra(name) and name in given:
            _check_extra(key, path, name, given[name])
        if not is_extra(name) and given.shape(name) != tuple(tensor.shape):
            problem = f"has {name} of shape {list(given.shape(name))}, and the model of {list(tensor.shape)}"
            raise ConfigError(key, path, problem, "Give the model the sizes that it was trained with")
        if not is_extra(name) and given.kind(name) != kind_of(tensor.dtype):
            problem = f"has {name} as {given.kind(name)}, and the model as {kind_of(tensor.dtype)} ({tensor.dtype})"
            raise ConfigError(key, path, problem, "Give both one kind of number: a cast would change what it says")
        if not is_extra(name) and tensor.dtype not in _WIDE and not _holds(tensor.dtype, given[name]):
            problem = f"has numbers in {name} that {tensor.dtype} does not hold"
            raise ConfigError(key, path, problem, "Give the model the type that it was trained with")
    for group in given.ties:
        stored = list(dict.fromkeys(given.stored(name) for name in group if name in given))
        for name in stored[1:]:
            if not same(files[name], files[stored[0]]):
                problem = f"has two values, {stored[0]} and {name}, for what is one tensor in the model"
                raise ConfigError(key, path, problem, "Untie them in the model, or use weights that were tied")
    return Differences(missing=tuple(absent), unexpected=tuple(unknown))


def _check_extra(key: str, path: Path, name: str, value: Tensor) -> None:
    try:
        from_bytes(value)
    except CheckpointError as error:
        problem = f"has extra state of a module as {name}: {error}"
        raise ConfigError(key, path, problem, "Use a checkpoint that you or distaccum have written") from error


def _holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Whether a cast to a narrow type makes nothing else of a whole number, and of no finite one an infinite one."""
    found = value.to(dtype)
    if dtype.is_floating_point:
        return torch.equal(found.float().isfinite(), value.float().isfinite())
    return bool((found == value).all())


def _check_globs(key: str, globs: Sequence[str], names: Iterable[str]) -> None:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(key, glob, f"fits no name{near_misses(glob, names)}", "Leave it out, or mend it")


def _fits(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether they are the same bit for bit, NaN included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def check_storable(model: nn.Module) -> None:
    """Refuses before the run a model that could not be saved in it.

    Raises:
        ConfigError: a tensor is sparse, quantized or nested, or a module's extra state cannot be read without code.
    """
    key, remedy = "model", "Or use checkpoint.every=0"
    for name, value in model.state_dict().items():
        try:
            if is_extra(name):
                to_bytes(name, value)
                continue
        except CheckpointError as error:
            raise ConfigError(key, type(model).__name__, str(error), remedy) from error
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            problem = f"{name} is {kind}, and a checkpoint holds dense tensors"
            remedy = "Register it with persistent=False, or keep it as dense tensors; or use checkpoint.every=0"
            raise ConfigError(key, type(model).__name__, problem, remedy)


def read(model: nn.Module, path: Path, *, unexpected: Sequence[str] = ()) -> InModel:
    """The tensors of a file, or of the folder's model, by all names that they have in ``model``."""
    return InModel(model, TensorFiles(path), without=unexpected)


@torch.no_grad()
def fill(model: nn.Module, path: Path, *, missing: Sequence[str] = (), average: str = "") -> None:
    """Overwrites every parameter and buffer but those ``missing``; one tensor is read at a time.

    Of a model in shards a rank takes its own. Where ``average`` names the kind of one that the folder has, weights are
    taken from that, and the rest from the model.
    """
    given = read(model, path)
    averages: Mapping[str, Tensor] = TensorFiles(path, average) if average else {}
    for name, tensor in model_state(model).items():
        if name in missing:
            continue
        if not is_extra(name):
            value = averages[name] if name in averages else given[name]
            to_local(tensor).copy_(to_local(shard_like(value, tensor)))
        elif name in given:
            set_extra_state(model, name, given[name])
