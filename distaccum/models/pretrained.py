"""Models of Hugging Face transformers: by name or folder, with their weights or random ones; with adapters by PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from distaccum.errors import ConfigError, near_misses, shorten
from distaccum.program import HUB, LORA, load

TASKS = {  # the class of transformers, and PEFT's name
    "causal_lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "masked_lm": ("AutoModelForMaskedLM", "FEATURE_EXTRACTION"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    "sequence_classification": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "token_classification": ("AutoModelForTokenClassification", "TOKEN_CLS"),
}
_LABELS = {"num_labels", "id2label", "label2id"}


def pretrained(
    *,
    name: str,
    task: str = "causal_lm",
    from_config: bool = False,
    options: Mapping[str, Any] | None = None,
    fresh: Sequence[str] = (),
    base_dtype: str = "fp32",
    lora: Mapping[str, Any] | None = None,
    from_data: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model of transformers, to be trained: in fp32, whatever its files are in, and without a cache of keys.

    With ``lora.r`` its weights are frozen, and adapters (LoRA, by PEFT) are trained, in fp32.

    Args:
        name: A model of the Hugging Face hub, such as ``distilbert-base-uncased``, or a folder with ``config.json`` and
            safetensors; with ``from_config`` also a type of model, such as ``llama``.
        task: Head of the model: ``causal_lm``, ``masked_lm``, ``seq2seq``, ``sequence_classification`` or
            ``token_classification``.
        from_config: Start from random weights: only the configuration is read.
        options: Settings that replace those of the model's configuration, such as ``{num_labels: 3}``.
        fresh: Names of weights that the files may lack, as patterns such as ``[score.*]``; they start random.
        base_dtype (fp32 | bf16): Number format of the frozen weights below adapters.
        lora: LoRA adapters by PEFT's names, such as ``{r: 8, alpha: 16}``: ``r``, the rank (null: no adapters);
            ``alpha``, which scales their product by alpha / r; ``dropout`` of their inputs; ``target_modules``, names
            of layers or ``all-linear`` (null: PEFT's choice); ``modules_to_save``, which are trained whole.
        from_data: ``num_labels``, ``id2label``, ``label2id``, ``problem_type`` and ``pad_token_id`` of a classifier's
            configuration, taken from the run's data and loss; ``options`` come first.

    Raises:
        ConfigError: no such model, task or setting; weights are missing that ``fresh`` does not name; PEFT cannot give
            the model such adapters; or transformers or peft is not installed.
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
    adapter = load(LORA)(lora or {}, base_dtype)
    told = from_data if from_data and task.endswith("_classification") else {}
    config = _configuration(transformers, name, dict(options or {}), told, from_config=from_config)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # for generating; in training it would hold every key and value
    kind = getattr(transformers, TASKS[task][0])
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
    cast(model.parameters(), torch.bfloat16 if base_dtype == "bf16" else torch.float32)
    trained: nn.Module = (adapter(model, TASKS[task][1]) if adapter else model).train()
    return trained


def cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Changes parameters' format in place. Not the buffers': they may be in one of their own."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _configuration(
    transformers: ModuleType, name: str, options: dict[str, Any], told: Mapping[str, Any], *, from_config: bool
) -> Any:
    auto = transformers.AutoConfig
    make = auto.for_model if from_config and _is_type(transformers, name) else auto.from_pretrained
    fetched = load(HUB)
    try:
        if make is auto.for_model:
            config = make(name)
            settings = _with_labels(_checked(options, config), told, config)
            return make(name, **settings) if settings else config
        config = fetched("model.name", name, partial(make, name))
        settings = _with_labels(_checked(options, config), told, config)
        return fetched("model.name", name, partial(make, name, **settings)) if settings else config
    except ConfigError:
        raise
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


def _with_labels(options: dict[str, Any], told: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The settings with those that data and loss tell.

    A model that has the data's classes in an order of its own keeps it, and is refused where the run is checked.
    """
    names, own = told.get("id2label", {}), config.id2label if told else {}
    keeps = _LABELS & options.keys() or is_reordered(names.values(), [own[i] for i in sorted(own)])
    return {key: value for key, value in told.items() if key not in _LABELS or not keeps} | options


def is_reordered(names: Iterable[str], own: Iterable[str]) -> bool:
    """Whether these are the same names in another order, by whatever capitals."""
    one, other = [name.casefold() for name in names], [name.casefold() for name in own]
    return one != other and sorted(one) == sorted(other)


def _read(transformers: ModuleType, kind: Any, name: str, config: Any, fresh: Sequence[str]) -> Any:
    how: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    how |= _dtype(transformers)
    model, found = load(HUB)("model.name", name, partial(kind.from_pretrained, name, config=config, **how))
    others = {name for name, *_ in found["mismatched_keys"]}  # of another shape: as many classes
    missing = sorted(others.union(found["missing_keys"]))
    for glob in fresh:
        if not any(fnmatchcase(key, glob) for key in missing):
            problem = f"fits no weight that is missing{near_misses(glob, missing)}"
            raise ConfigError("model.fresh", glob, problem, "Leave it out, or mend it")
    refused = [key for key in missing if not any(fnmatchcase(key, glob) for glob in fresh)]
    if refused:
        problem = f"has no {shorten(refused)}{' of that shape' if others.intersection(refused) else ''}"
        globs = ",".join(dict.fromkeys(f"{key.rpartition('.')[0] or key}.*" for key in refused))
        remedy = f"Use weights of this {type(model).__name__}; or model.fresh=[{globs}] begins with random values"
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
        return import_module("transformers")
    except ImportError as error:
        remedy = "Run python -m pip install 'distaccum[hf]'"
        raise ConfigError("model", "pretrained", "transformers is not installed", remedy) from error
