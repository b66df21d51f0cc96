"""Write a tiny model, untrained, and a tokenizer of the texts of ``reviews.csv``, with a chat template, into a folder::

    python launch/examples/tiny_model.py llama FOLDER
    python launch/examples/tiny_model.py bert FOLDER

It stands for a pretrained model where there is no network. Needs ``pip install 'distaccum[hf]'``.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from distaccum.data.datasets.tokenizer import train_tokenizer

CHAT = (
    "{% for message in messages %}[CLS]{{ message['role'] }}: {{ message['content'] }}[SEP]{% endfor %}"
    "{% if add_generation_prompt %}[CLS]assistant: {% endif %}"
)


def main() -> None:
    kind, folder = sys.argv[1:]
    with Path(__file__).with_name("reviews.csv").open(encoding="utf-8") as file:
        tokenizer = train_tokenizer([row["text"] for row in csv.DictReader(file)], vocab_size=500)
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    if kind == "llama":
        config.num_key_value_heads = 2
    made = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    made.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
