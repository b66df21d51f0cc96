"""Whether the loading processes of a ``DataLoader`` over a stream divide it among themselves, by its code alone."""

from __future__ import annotations

import sys
import warnings
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import DataLoader

from distaccum.data.adapters import nested
from distaccum.errors import DataWarning


def warn_of_workers(loader: DataLoader[Any]) -> None:
    """Warns where a stream's class never asks which loading process it is in: each of them would yield all of it.

    What they yield is compared as well, when the first batches are there: a stream that is shuffled differently in each
    process shows in its code alone.
    """
    dataset = loader.dataset
    packages = {"torch", "datasets", "webdataset", "torchdata", "streaming", "litdata"}  # divide by themselves
    if loader.num_workers < 2 or loader.worker_init_fn is not None:  # noqa: PLR2004  one worker has it all
        return
    if any(_asks_for_its_worker(one) or type(one).__module__.split(".")[0] in packages for one in nested(dataset)):
        return
    problem = f"{type(dataset).__name__} does not call torch.utils.data.get_worker_info(): if each of the"
    effect = (
        f"{loader.num_workers} workers of its DataLoader yields the whole stream, every sample is trained on as often"
    )
    remedy = "Divide it by worker, or use num_workers=1"
    warnings.warn(f"{problem} {effect}. {remedy}", DataWarning, stacklevel=2)


def _asks_for_its_worker(dataset: Any) -> bool:
    """Whether a class, or the module that it is in, names ``get_worker_info``."""
    for kind in type(dataset).__mro__:
        if kind is object or kind.__module__.split(".")[0] == "torch":
            continue
        around = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
        functions = [value for value in (*vars(kind).values(), *around.values()) if isinstance(value, FunctionType)]
        if "get_worker_info" in around or any("get_worker_info" in _names(each.__code__) for each in functions):
            return True
    return False


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
