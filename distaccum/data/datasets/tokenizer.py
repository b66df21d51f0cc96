"""Tokenizers: trained on given texts, or pretrained ones by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from distaccum.config.extras import install_command
from distaccum.errors import ConfigError
from distaccum.program import HUB, load

_PAD, _BEGIN, _END = "[PAD]", "[CLS]", "[SEP]"
_BYTES, _NO_UTF8 = 256, 0xFF
_SMALLEST = 256 + 3  # each byte, and the three special tokens


class ByteTokenizer:
    """The bytes of a text in UTF-8 as token ids from 0 to 255."""

    def encode(self, text: str) -> list[int]:
        """Gives the bytes."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Shows what is no UTF-8 as U+FFFD, ids from 256 on included."""
        return bytes(one if one < _BYTES else _NO_UTF8 for one in ids).decode(errors="replace")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Trains a byte-level BPE tokenizer on ``texts``: a transformers ``PreTrainedTokenizerFast``.

    The same texts give the same tokenizer on every rank. It encodes any character, and encloses a text in ``[CLS]`` and
    ``[SEP]``, which are also its begin and end tokens for language models.

    Raises:
        ConfigError: transformers is not installed, or ``vocab_size`` is too small for all bytes.
    """
    if vocab_size < _SMALLEST:
        remedy = f"Give at least {_SMALLEST}"
        raise ConfigError("data.vocab_size", vocab_size, "too few for all bytes and three marks", remedy)
    transformers = _import_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: PLC0415  optional

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _BEGIN, _END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    marks = [(mark, bpe.token_to_id(mark)) for mark in (_BEGIN, _END)]
    bpe.post_processor = processors.TemplateProcessing(single=f"{_BEGIN} $A {_END}", special_tokens=marks)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=_PAD, cls_token=_BEGIN, sep_token=_END, bos_token=_BEGIN, eos_token=_END
    )


def load_tokenizer(name: str) -> Any:
    """The pretrained tokenizer of a model on the Hugging Face hub, or in a folder.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer cannot be loaded.
    """
    transformers = _import_transformers()
    try:
        return load(HUB)("data.tokenizer", name, partial(transformers.AutoTokenizer.from_pretrained, name))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        remedy = "Name a model of the Hugging Face hub, or a folder with a saved tokenizer"
        raise ConfigError("data.tokenizer", name, f"cannot be loaded ({error})", remedy) from error


def padding_id(tokenizer: Any) -> int:
    """The token that pads inputs; any serves behind an attention mask if the tokenizer has no padding token."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in ids if token is not None)


def _import_transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        remedy = f"Run {install_command('hf')}"
        raise ConfigError("data.tokenizer", None, "transformers is not installed", remedy) from error
