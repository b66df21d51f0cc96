"""Models of the Hugging Face hub: from the cache where they are there, with no wait for a hub that is out of reach."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from distaccum.errors import ConfigError

_ANSWER_S = 10.0
_OF_PATHS = ("/", ".", "~")  # how no model of the hub begins
T = TypeVar("T")


def fetched(key: str, name: str, make: Callable[..., T]) -> T:
    """What ``make`` makes of a model: of its folder, else of the hub's cache, else of the hub.

    Args:
        key: the setting that names the model, for messages.
        name: of the model, or a folder.
        make: as ``from_pretrained`` is called with the name; takes ``local_files_only``.

    Raises:
        ConfigError: the name is a path, of nothing; or the model is not in the cache, and the hub does not answer
            within seconds.
        OSError: as ``make`` raises it, of a model that is not there.
    """
    with _without_report():
        return _fetched(key, name, make)


@contextmanager
def _without_report() -> Iterator[None]:
    """Without transformers' table of missing and unneeded weights: the missing ones are refused, or named to be new."""
    logger = logging.getLogger("transformers.modeling_utils")

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _fetched(key: str, name: str, make: Callable[..., T]) -> T:
    if Path(name).exists():
        return make()
    if name.startswith(_OF_PATHS) or name.count("/") > 1:
        raise ConfigError(key, name, "no such folder", "Give one that is there, or a model of the Hugging Face hub")
    try:
        return make(local_files_only=True)
    except OSError:  # not in the cache, or only a part of it
        _expect_answer(key, name)
    return make()


def _expect_answer(key: str, name: str) -> None:
    """Asks once: transformers tries for a minute, file by file."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415  an optional extra

    try:
        HfApi().model_info(name, timeout=_ANSWER_S)
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return  # it has answered, or the name is none of a model: said by who loads it
    except Exception as error:  # of whatever library it asks with
        problem = f"no folder, not in the cache, and the hub cannot be reached ({type(error).__name__})"
        remedy = f"Give a folder, or run `hf download {name}` where there is a network"
        raise ConfigError(key, name, problem, remedy) from error
