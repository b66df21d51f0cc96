"""A tokenizer of characters, whose samples can be written by hand, and chats."""

from pathlib import Path

import torch

CHARACTERS = ["$", *map(chr, range(32, 36)), *map(chr, range(37, 127)), "\n"]
"""By their numbers; "%" is the begin token, "$" the end token."""
CHAT = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def save_tokenizer(folder: Path, chat_template: str | None = CHAT) -> str:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # noqa: PLC0415  an optional extra
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    model = Tokenizer(models.WordLevel({one: i for i, one in enumerate(CHARACTERS)}, unk_token="$"))  # noqa: S106
    each = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\t", "removed"), each])
    marks = {"bos_token": "%", "eos_token": "$", "chat_template": chat_template}
    PreTrainedTokenizerFast(tokenizer_object=model, **marks).save_pretrained(folder)
    return str(folder)


def characters_of(ids: torch.Tensor) -> str:
    """What they stand for; of what is ignored "_"."""
    return "".join("_" if i < 0 else CHARACTERS[i] for i in ids.tolist())


def say(*turns: str) -> list[dict[str, str]]:
    """Messages: "u:Hi" is the user's."""
    return [{"role": ROLES[turn[0]], "content": turn[2:]} for turn in turns]
