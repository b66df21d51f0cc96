"""Models of Hugging Face transformers: by name or folder, with their weights or random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from distaccum.errors import ConfigError, near_misses, shorten

TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
}


def pretrained(
    *,
    name: str,
    task: str = "causal_lm",
    from_config: bool = False,
    options: Mapping[str, Any] | None = None,
    fresh: Sequence[str] = (),
) -> nn.Module:
    """A model of transformers, to be trained: in fp32, whatever its files are in, and without a cache of keys.

    Args:
        name: a model of the Hugging Face hub, or a folder with ``config.json`` and safetensors; with ``from_config``
            also a type of model, as ``llama``.
        task: the head: ``causal_lm``, ``masked_lm``, ``seq2seq``, ``sequence_classification`` or
            ``token_classification``.
        from_config: random weights of the run's seed; only the configuration is read.
        options: settings of the model's configuration that take the place of its own, as ``num_labels``.
        fresh: globs of weights that the files need not have, as ``[score.*]``: they begin with random values.

    Raises:
        ConfigError: no such model, task or setting; weights are missing that ``fresh`` does not name; or transformers
            is not installed.
    """
    transformers = _import_transformers()
    if task not in TASKS:
        problem = f"no such task{near_misses(task, TASKS)}"
        raise ConfigError("model.task", task, problem, f"Use one of {', '.join(TASKS)}")
    if torch.empty(0).is_meta:
        remedy = "Leave it out: every rank reads the weights"
        raise ConfigError("engine.meta_init", True, "model=pretrained has its weights", remedy)
    if from_config and fresh:
        problem = "and model.from_config=true, so that every weight begins with random values"
        raise ConfigError("model.fresh", list(fresh), problem, "Leave one of them out")
    config = _configuration(transformers, name, dict(options or {}), from_config=from_config)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # for generating; in training it would hold every key and value
    kind = getattr(transformers, TASKS[task])
    try:
        if from_config:
            model = kind.from_config(config, **_dtype(transformers))
        else:
            model = _read(transformers, kind, name, config, fresh)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        remedy = "Name a model of the Hugging Face hub or a folder with safetensors, and a task that it has a head for"
        raise ConfigError("model.name", name, f"cannot be made ({_first(error)})", remedy) from error
    for parameter in model.parameters():  # not the buffers: they may be in a format of their own
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    trained: nn.Module = model.train()
    return trained


def _configuration(transformers: ModuleType, name: str, options: dict[str, Any], *, from_config: bool) -> Any:
    auto = transformers.AutoConfig
    make = auto.for_model if from_config and _is_type(transformers, name) else auto.from_pretrained
    try:
        config = make(name)
        return make(name, **_checked(options, config)) if options else config
    except (OSError, ValueError, TypeError) as error:
        remedy = "Name a model of the Hugging Face hub, or a folder with config.json"
        raise ConfigError("model.name", name, f"has no configuration ({_first(error)})", remedy) from error


def _is_type(transformers: ModuleType, name: str) -> bool:
    """Whether transformers has a model of that type, and no folder is meant."""
    return not Path(name).exists() and name in transformers.CONFIG_MAPPING


def _checked(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """Settings that the configuration has; transformers would keep others without a word."""
    for key, value in options.items():
        if not hasattr(config, key):
            names = [name for name in config.to_dict() if not name.startswith("_")]
            problem = f"{type(config).__name__} has no such setting{near_misses(key, names)}"
            raise ConfigError(f"model.options.{key}", value, problem, "Use a name of its config.json")
    return options


def _read(transformers: ModuleType, kind: Any, name: str, config: Any, fresh: Sequence[str]) -> Any:
    how = {"use_safetensors": True, "output_loading_info": True, **_dtype(transformers)}
    model, found = kind.from_pretrained(name, config=config, **how)
    missing = sorted(found["missing_keys"])
    for glob in fresh:
        if not any(fnmatchcase(key, glob) for key in missing):
            problem = f"fits no weight that is missing{near_misses(glob, missing)}"
            raise ConfigError("model.fresh", glob, problem, "Leave it out, or mend it")
    refused = [key for key in missing if not any(fnmatchcase(key, glob) for glob in fresh)]
    if refused:
        problem = f"has no {shorten(refused)}"
        remedy = f"Use weights of this {type(model).__name__}; or model.fresh=[{refused[0]}] begins with random values"
        raise ConfigError("model.name", name, problem, remedy)
    return model


def _dtype(transformers: ModuleType) -> dict[str, torch.dtype]:
    """fp32, by the name that the argument has; random weights that are drawn in 16 bits would be others."""
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    return {"dtype" if version >= (4, 56) else "torch_dtype": torch.float32}


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _import_transformers() -> ModuleType:
    try:
        import transformers  # noqa: PLC0415  an optional extra
    except ImportError as error:
        remedy = "Run python -m pip install 'distaccum[hf]'"
        raise ConfigError("model", "pretrained", "transformers is not installed", remedy) from error
    return transformers
