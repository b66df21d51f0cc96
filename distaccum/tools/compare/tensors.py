"""Which tensors of two checkpoints differ, whatever engines and ranks have written them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from distaccum.checkpoint.files import ABSENT, retried
from distaccum.checkpoint.store import MANIFEST
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.checkpoint.weights import same


def differing(one: Path, other: Path, kind: str = "model") -> list[str]:
    """The names of the tensors that are not the same bit by bit, or that one of the folders has not.

    Where both have the same files by their manifests no tensor is read, else one at a time.

    Raises:
        CheckpointError: a file is damaged.
        OSError: a file cannot be read, again and again.
    """
    digests, others = _digests(one, kind), _digests(other, kind)
    if digests == others and digests is not None:
        return []
    first, second = _tensors(one, kind, digests), _tensors(other, kind, others)
    names = dict.fromkeys((*first, *second))
    return [n for n in names if n not in first or n not in second or not same(first[n], second[n])]


def _digests(folder: Path, kind: str) -> dict[str, str] | None:
    """Of the files of a kind, by their names; None where nobody knows."""
    try:
        found = json.loads(retried(partial((folder / MANIFEST).read_bytes), of=folder / MANIFEST))
    except (*ABSENT, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    begin = (f"{kind}.", f"{kind}-")
    return {name: text for name, text in found.items() if name.startswith(begin) and name.endswith(".safetensors")}


def _tensors(folder: Path, kind: str, digests: Mapping[str, str] | None) -> Mapping[str, Tensor]:
    return {} if digests is not None and not digests else TensorFiles(folder, kind)
