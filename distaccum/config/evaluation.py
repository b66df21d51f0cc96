"""What an evaluation gives beside its numbers: texts that the model writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from distaccum.config.checks import require, require_annotated, require_count


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Texts that a language model goes on with at every evaluation.

    Args:
        samples: how many texts; 0: none.
        prompts: what they begin with, in turn; none: the first held-out samples.
        prompt_tokens: how many tokens of a held-out sample are the prompt.
        max_new_tokens: how many tokens follow; a text ends before that with the tokenizer's end token.
        temperature: by which the logits are divided before a token is drawn; 0: the likeliest token is taken.
        seed: of what is drawn, which is the same at every evaluation.
    """

    samples: int = 0
    prompts: list[str] = field(default_factory=list)
    prompt_tokens: int = 32
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_annotated("eval", self)
        require_count("eval.samples", self.samples, off="0 for no texts")
        for key, value in (("prompt_tokens", self.prompt_tokens), ("max_new_tokens", self.max_new_tokens)):
            require(value >= 1, f"eval.{key}", value, "must be at least 1", "Give a number of tokens")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        require(finite, "eval.temperature", self.temperature, "out of range", "Use 0 or a positive number")
        require(0 <= self.seed < 2**63, "eval.seed", self.seed, "out of range", "Use a whole number from 0 to 2**63-1")
        asked = not self.prompts or self.samples >= len(self.prompts)
        problem = f"and there are {len(self.prompts)} prompts, each of which begins a text"
        require(asked, "eval.samples", self.samples, problem, "Give at least as many samples as prompts")
