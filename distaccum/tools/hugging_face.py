"""What a run and a model of Hugging Face transformers tell each other: classes, task, and the files that describe it.

Data have names of classes (:func:`class_names`), and a loss has a problem. From these come the settings of the model's
configuration (:func:`from_data`), with which a model that is there is compared (:func:`check`), and the folder
``model/`` of a run (:func:`describe`): ``config.json`` and the tokenizer's files, which ``distaccum export`` puts
beside the weights. :func:`merged` puts adapters into the model below them.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from distaccum.checkpoint import state, weights
from distaccum.checkpoint.files import sync
from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.data.datasets.tokenizer import padding_id
from distaccum.data.spec import DataSpec, is_map_style
from distaccum.distributed.random import RNGState
from distaccum.errors import CheckpointError, ConfigError, shorten
from distaccum.losses.transformers import SequenceClassification
from distaccum.models.pretrained import is_reordered
from distaccum.train import adapters

CONFIG = "config.json"
FOLDER = "model"
"""In a run directory."""
# What describes a model and its tokenizer, beside the weights.
DESCRIBES = (
    *(CONFIG, "generation_config.json", "preprocessor_config.json", "chat_template.*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
)
_OF_TOKENS = ("CausalLM", "LMHeadModel", "MaskedLM", "ForConditionalGeneration", "TokenClassification")
_LABELS = ("id2label", "label2id", "problem_type")
_log = logging.getLogger(__name__)


# Classes: their names, and what they are in a model's configuration.


def class_names(data: DataSpec, model: nn.Module | None = None) -> list[str]:
    """The classes' names, in the order of their numbers: the model's own, else the data's; empty: not known.

    Of data they are the ``classes`` of the spec or of a dataset, as torchvision has them, or a ``ClassLabel`` of
    ``datasets``.
    """
    found: list[Any] = [data.classes]
    for whole in (*data.held_out.values(), data.train):
        dataset: Any = whole
        while dataset is not None:
            found += [getattr(dataset, "classes", None), *_class_labels(getattr(dataset, "features", None))]
            dataset = getattr(dataset, "dataset", None)  # of a Subset
    lists = ([str(name) for name in one] for one in found if one and isinstance(one, list | tuple))
    return _own_names(_config(model)) or next(lists, [])


def _class_labels(features: Any) -> Iterator[Any]:
    """The names of each column of classes, or of lists of them; the column of the labels first."""
    if isinstance(features, Mapping):
        for key in sorted(features, key=lambda key: key not in ("labels", "label")):
            yield getattr(getattr(features[key], "feature", features[key]), "names", None)


def _config(model: nn.Module | None) -> Any:
    """A model's configuration, as transformers has it; None where it has none."""
    return getattr(base_of(model), "config", None)


def base_of(model: Any) -> Any:
    """The model below PEFT's adapters; any other itself."""
    below = getattr(model, "get_base_model", None)
    return below() if callable(below) else model


def _own_names(config: Any) -> list[str]:
    """The names in a configuration, unless they are those that transformers makes up."""
    labels = getattr(config, "id2label", None) or {}
    names = [str(labels[key]) for key in sorted(labels)]
    return [] if names and names[0].startswith("LABEL_") else names


def from_data(data: DataSpec, loss: Any) -> dict[str, Any]:
    """Settings of the configuration of a model that is trained on data with a loss, as far as these tell."""
    names, found = class_names(data), dict[str, Any]()
    if hasattr(data.tokenizer, "pad_token_id"):
        found["pad_token_id"] = padding_id(data.tokenizer)  # by which some heads find a text's end
    if isinstance(loss, SequenceClassification):
        found["problem_type"] = loss.problem.replace("_label", "_label_classification")
        if loss.problem != "single_label" and (values := _values(data)):
            found["num_labels"] = values
            names = names if len(names) == values and loss.problem == "multi_label" else []
    if names:
        labels = dict(enumerate(names))
        found |= {"num_labels": len(names), "id2label": labels, "label2id": {name: i for i, name in labels.items()}}
    return found


def _values(data: DataSpec) -> int | None:
    """How many a sample's labels are; None where nobody knows before the run."""
    before = RNGState.capture(torch.device("cpu"))
    try:
        with suppress(Exception):  # the training itself says so, where it reads the sample
            if is_map_style(data.train):
                return int((data.collate or default_collate)([data.train[0]])["labels"].numel())
    finally:
        before.restore()
    return None


def check(data: DataSpec, model: nn.Module, loss: Any) -> None:
    """Refuses a classifier whose classes are others than the data's, or in another order.

    Raises:
        ConfigError: either.
    """
    if data.classes and getattr(loss, "problem", "") == "regression":
        problem = f"and the data's labels are numbers of classes ({shorten(list(data.classes))})"
        raise ConfigError("loss.problem", "regression", problem, "Use data.problem=regression, for labels like 0.5")
    config, kind = _config(model), type(base_of(model)).__name__
    if isinstance(loss, SequenceClassification) and kind.endswith(_OF_TOKENS):
        remedy = "Use model.task=sequence_classification"
        raise ConfigError("model", kind, "predicts tokens, and the loss is of whole samples", remedy)
    told = from_data(data, loss) if hasattr(config, "id2label") and kind.endswith("Classification") else {}
    if "num_labels" not in told:
        return
    expected, names, own = told["num_labels"], list(told.get("id2label", {}).values()), _own_names(config)
    if config.num_labels != expected:
        what = f"{expected} classes ({shorten(names)})" if names else f"{expected} values in a sample's labels"
        problem = f"has {config.num_labels} labels{f' ({shorten(own)})' if own else ''}, and the data {what}"
        remedy = f"Use model.options={{num_labels: {expected}}}, or leave it out, as it follows from the data"
        raise ConfigError("model", kind, problem, remedy)
    if is_reordered(names, own):
        problem = f"numbers its classes {', '.join(own)}, and the data {', '.join(names)}"
        remedy = f"Use data.classes=[{','.join(own)}], or dataset.align_labels_with_mapping(model.config.label2id, ...)"
        raise ConfigError("model", kind, problem, remedy)


# The folder ``model/`` of a run.


def describe(model: nn.Module, data: DataSpec, loss: Any, run: Path) -> None:
    """Writes what ``from_pretrained`` reads beside the weights into a run directory; nothing for other models.

    The configuration has the names of the classes and the task. What cannot be written is a warning, as the run does
    without.
    """
    base = base_of(model)
    if not hasattr(getattr(base, "config", None), "save_pretrained"):
        return
    config = deepcopy(base.config)
    config.architectures = [type(base).__name__]
    told = from_data(data, loss) if type(base).__name__.endswith("Classification") else {}
    is_named = told.get("num_labels") != config.num_labels or _own_names(config)
    for key in _LABELS:
        if key in told and not (is_named and key != "problem_type"):
            setattr(config, key, told[key])
    try:
        shutil.rmtree(run / FOLDER, ignore_errors=True)
        with whole_folder(run / FOLDER) as staged:
            config.save_pretrained(staged)
            _drop_cache(staged / CONFIG)
            if callable(getattr(base, "can_generate", None)) and base.can_generate():
                base.generation_config.save_pretrained(staged)
            _save_tokenizer(data.tokenizer, str(getattr(base, "name_or_path", "")), staged)
    except Exception as error:  # of libraries and disks
        _log.warning("%s is not written (%s): distaccum export needs --config-from", run / FOLDER, error)


def _drop_cache(file: Path) -> None:
    """Training switches the cache of keys off, which generating needs."""
    config = json.loads(file.read_text())
    config.pop("use_cache", None)
    file.write_text(json.dumps(config, indent=2) + "\n")


def _save_tokenizer(tokenizer: Any, name: str, folder: Path) -> None:
    """The data's tokenizer, else what the model's folder, or the hub's cache, has of one, or of a processor."""
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif Path(name).is_dir():
        copy_tokenizer(Path(name), folder)
    elif name:
        with suppress(Exception):  # not in the cache
            processor = sys.modules["transformers"].AutoProcessor
            processor.from_pretrained(name, local_files_only=True).save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies what is beside weights and configuration in a folder."""
    for pattern in DESCRIBES:
        for path in source.glob(pattern):
            if path.is_file() and path.name != CONFIG:
                shutil.copyfile(path, folder / path.name)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder``, which takes its place at the end of the block, or is removed.

    Raises:
        CheckpointError: ``folder`` is there.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there: name another, or remove it")
    staged = folder.with_name(f".{folder.name}.{token_hex(8)}")
    staged.mkdir()
    try:
        yield staged
        for path in (*staged.iterdir(), staged):
            sync(path)
        staged.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


# Adapters, merged.


def merged(checkpoint: Path, *, average: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the model in which a checkpoint's adapters are merged, in fp32, and settings of its configuration.

    The model is made as the run made it.

    Args:
        checkpoint: of a run with adapters.
        average: the kind of the moving average to take; empty: the weights as they train.

    Raises:
        CheckpointError: the run's model is an object of a program, or its base has other weights than it had.
        ConfigError: the model cannot be made.
    """
    run = state.read(checkpoint).run
    node, saved = run.config["model"], run.facts["adapters"]
    if str(node["_target_"]).startswith("peft."):
        problem = "its model is an object of a program, which no configuration names"
        remedy = "export without --merge, and use PeftModel.from_pretrained(base, FOLDER).merge_and_unload()"
        raise CheckpointError(f"{checkpoint}: {problem}: {remedy}")
    told: dict[str, Any] = {}
    if "from_data" in signature_of(target_of("model", node)):
        with suppress(OSError):
            config = json.loads((checkpoint.parent.parent / FOLDER / CONFIG).read_text())
            told = {"from_data": {key: config[key] for key in _LABELS if key in config}}
            if config.get("pad_token_id") is not None:
                told["from_data"]["pad_token_id"] = config["pad_token_id"]
    torch.manual_seed(run.config["seed"])
    model = build("model", node, **told)
    adapters.set_base_aside(model)
    if adapters.facts(model).get("digest") != saved["digest"]:
        problem = f"{saved['base']} has other weights now than those that the adapters were trained over"
        raise CheckpointError(f"{checkpoint}: {problem}: give it back, or export without --merge")
    weights.check(model, checkpoint, key="--merge")
    weights.fill(model, checkpoint, average=average)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied", UserWarning)  # see below
        whole: Any = model.float().merge_and_unload()
    tensors = {name: tensor.detach() for name, tensor in whole.state_dict().items()}
    return tensors, {"tie_word_embeddings": False} if _is_untied(whole) else {}


def _is_untied(model: Any) -> bool:
    """Whether the output layer has weights of its own, as one that is trained whole."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return output is not None and output.weight is not model.get_input_embeddings().weight
