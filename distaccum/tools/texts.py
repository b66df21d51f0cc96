"""Texts that a language model writes at an evaluation, the same on any number of ranks, and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from distaccum.config.schema import RunConfig
from distaccum.config.trainer import EvalConfig
from distaccum.data.held_out import evaluation_workers
from distaccum.data.loading_processes import reading
from distaccum.data.spec import DataSpec, Tokenizer
from distaccum.distributed.random import RNGState, keys_of
from distaccum.engines.base import Engine
from distaccum.errors import ConfigError
from distaccum.train.evaluate import evaluates

_KEY = "eval.samples"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What the texts begin with, as token ids, and what makes texts of ids."""

    ids: Sequence[Sequence[int]]
    tokenizer: Tokenizer


def writer(data: DataSpec, model: nn.Module, config: RunConfig) -> Texts:
    """What writes the texts of a run that asks for some.

    Args:
        data: held-out samples are read where no prompts are given.
        model: not wrapped yet; no forward is run.
        config: of the run.

    Raises:
        ConfigError: the run has no evaluation, the data no tokenizer, or the model writes no texts; or a prompt has no
            tokens, ids that the model has not, or is too long with what follows.
    """
    settings = config.eval
    if not evaluates(data, config):
        remedy = "Hold data out and set eval_every, or leave it at 0"
        raise ConfigError(_KEY, settings.samples, "the run has no evaluation", remedy)
    _check_model(model, settings)
    tokenizer = data.tokenizer
    for name in ("encode", "decode"):
        if not callable(getattr(tokenizer, name, None)):
            problem = "the data has no tokenizer" if tokenizer is None else f"its tokenizer has no {name}"
            remedy = "Give DataSpec(tokenizer=...) with encode and decode, or data.tokenizer=NAME for data=tokens"
            raise ConfigError(_KEY, settings.samples, problem, remedy)
    assert tokenizer is not None
    if settings.prompts:
        begins = [_encoded(tokenizer, prompt) for prompt in settings.prompts]
        ids = [begins[i % len(begins)] for i in range(settings.samples)]
    else:
        ids = _first_held_out(data, config)
    name = "prompts" if settings.prompts else "prompt_tokens"
    key, shown = f"eval.{name}", getattr(settings, name)
    size, longest = _vocabulary(model), _longest(model)
    for number, one in enumerate(ids):
        if not one:
            raise ConfigError(key, shown, f"text {number} begins with no token", "Give prompts of a token or more")
        if size is not None and not all(0 <= token < size for token in one):
            problem = f"text {number} begins with an id outside of the model's {size} token ids"
            raise ConfigError(key, shown, problem, "Use the tokenizer that the model was made for")
        if longest is not None and len(one) + settings.max_new_tokens > longest:
            problem = f"with {len(one)} tokens of text {number} before them, and the model takes {longest} at most"
            raise ConfigError("eval.max_new_tokens", settings.max_new_tokens, problem, "Ask for fewer, or prompt less")
    return Texts(Prompts(ids=ids, tokenizer=tokenizer), settings)


class Texts:
    """Writes the texts of a run, at each of its evaluations.

    Each text is written by itself, by forwards of the same shape on every rank and with random numbers of its own, so
    that the same weights give the same texts on any number of ranks. All ranks write all of them, and always
    ``max_new_tokens``: a forward may be a collective. What follows an end token is cut off afterwards. Models that are
    compiled run without it, as every forward has a shape of its own.

    Args:
        prompts: of each text.
        settings: of the run.
    """

    def __init__(self, prompts: Prompts, settings: EvalConfig) -> None:
        self._prompts, self._settings = prompts, settings

    @torch.no_grad()
    def __call__(self, engine: Engine) -> list[dict[str, str]]:
        """``prompt`` and ``text``, which the engine's model writes after it, of each; a collective if a forward is one.

        The random numbers of the training, the modes of modules and their buffers are left as they were.
        """
        model = engine.unwrapped_model
        generators = RNGState.capture(engine.device)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        eager = nullcontext() if engine.compiled is None else torch.compiler.set_stance("force_eager")
        try:
            with eager, _same_buffers(model), engine.autocast():
                return [self._text(engine, i, ids) for i, ids in enumerate(self._prompts.ids)]
        finally:
            for module, training in modes:
                module.training = training
            generators.restore()

    def _text(self, engine: Engine, number: int, begin: Sequence[int]) -> dict[str, str]:
        settings, tokenizer = self._settings, self._prompts.tokenizer
        torch.manual_seed(keys_of([number], "texts", 0)[0])
        ids = torch.tensor([list(begin)]).to(engine.device)
        made = _generate(engine.unwrapped_model, ids, settings)
        new: list[int] = made[0, len(begin) :].tolist()  # host read: the text
        end = getattr(tokenizer, "eos_token_id", None)
        if end in new:
            new = new[: new.index(end)]
        return {"prompt": tokenizer.decode(list(begin)), "text": tokenizer.decode(new)}


def _generate(model: Any, ids: Tensor, settings: EvalConfig) -> Tensor:
    """Exactly ``max_new_tokens`` more."""
    length, temperature = settings.max_new_tokens, settings.temperature
    if not _is_hugging_face(model):
        return cast(Tensor, model.generate(ids, max_new_tokens=length, temperature=temperature))
    drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with _without_end(model):
        every = torch.ones_like(ids)
        return cast(Tensor, model.generate(input_ids=ids, attention_mask=every, max_new_tokens=length, **drawn))


@contextmanager
def _without_end(model: nn.Module) -> Iterator[None]:
    """Within the block Hugging Face's ``generate`` stops at no end token, and draws nothing from NaN."""
    holders = [module for module in model.modules() if "generation_config" in vars(module)]
    before = [vars(module)["generation_config"] for module in holders]
    try:
        for module, found in zip(holders, before, strict=True):
            changed = copy(found)
            if changed.pad_token_id is None:
                ends = changed.eos_token_id
                changed.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
            changed.eos_token_id, changed.remove_invalid_values = None, True
            vars(module)["generation_config"] = changed
        yield
    finally:
        for module, found in zip(holders, before, strict=True):
            vars(module)["generation_config"] = found


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """After the block every buffer is the one that it was, with what it held."""
    found = [
        (module, name, buffer, None if buffer is None else (buffer._version, buffer.detach().clone()))
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, held in found:
            module._buffers[name] = buffer
            if buffer is not None and held is not None and buffer._version != held[0]:
                buffer.copy_(held[1])


def _check_model(model: Any, settings: EvalConfig) -> None:
    can = getattr(model, "can_generate", None)
    kind = type(model).__name__
    if not callable(getattr(model, "generate", None)) or (callable(can) and not can()):
        problem = f"{kind} writes no texts"
        remedy = "Use a causal language model with generate(ids, max_new_tokens=..., temperature=...), or leave it at 0"
        raise ConfigError(_KEY, settings.samples, problem, remedy)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        problem = f"{kind} has an encoder and a decoder, and goes on with no prompt"
        raise ConfigError(_KEY, settings.samples, problem, "Leave it at 0")


def _is_hugging_face(model: Any) -> bool:
    return hasattr(model, "generation_config")


def _encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Without the marks that a tokenizer sets at the end of a text, which is to go on."""
    ids = list(tokenizer.encode(prompt))
    marks = {getattr(tokenizer, name, None) for name in ("eos_token_id", "sep_token_id")} - {None}
    while len(ids) > 1 and ids[-1] in marks:
        ids.pop()
    return ids


def _vocabulary(model: Any) -> int | None:
    """The number of token ids; None where the model does not say."""
    size = getattr(model, "vocab_size", None) or getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def _longest(model: Any) -> int | None:
    """The most tokens of a sequence; None where the model does not say."""
    config = getattr(model, "config", None)
    length = getattr(model, "seq_len", None) or getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def _first_held_out(data: DataSpec, config: RunConfig) -> list[list[int]]:
    """The first tokens of the first samples of the first held-out set."""
    name, held_out = next(iter(data.held_out.items()))
    settings, called = config.eval, f" of {name!r}" if name else ""
    if len(held_out) < settings.samples:
        problem = f"{len(held_out)} samples{called} are held out"
        raise ConfigError(_KEY, settings.samples, problem, "Ask for as many at most, or give eval.prompts")
    before = RNGState.capture(torch.device("cpu"))
    workers = evaluation_workers(data, config.trainer.num_workers, asdict(config.trainer.loader))
    of: Callable[[list[Any]], list[list[int] | None]] = _Beginnings(settings.prompt_tokens)
    try:
        found = next(reading(held_out, [list(range(settings.samples))], of, workers))
    finally:
        before.restore()
    if None in found:
        problem = f"the held-out samples{called} do not begin with token ids, nor have input_ids"
        raise ConfigError(_KEY, settings.samples, problem, "Give eval.prompts")
    return list(found)


class _Beginnings:
    """The first tokens of samples, in a loading process too; None of one that begins with none."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, samples: list[Any]) -> list[list[int] | None]:
        """Of these samples."""
        return [self._of(sample) for sample in samples]

    def _of(self, sample: Any) -> list[int] | None:
        if isinstance(sample, Mapping):
            sample = sample.get("input_ids")
        elif isinstance(sample, tuple | list) and sample and not isinstance(sample[0], int):
            sample = sample[0]
        try:
            ids = torch.as_tensor(sample)
        except (TypeError, ValueError, RuntimeError):
            return None
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            return None
        return [int(one) for one in ids[: self._tokens]]
