"""Train a Hugging Face language model on the paragraphs of a text, with a global batch stated in tokens::

    python launch/examples/causal_lm.py
    torchrun --nproc-per-node=2 launch/examples/causal_lm.py book.txt
    python launch/examples/causal_lm.py book.txt --pretrained gpt2 --lr 5e-5

Without a file, the text is the documentation that comes with every CPython. Needs ``pip install 'distaccum[hf]'``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from distaccum import CausalLM, DataSpec, PadCollator, RunConfig, Trainer
from distaccum.data.datasets.text import documentation
from distaccum.data.datasets.tokenizer import load_tokenizer, padding_id, train_tokenizer

MAX_LENGTH = 128

parser = argparse.ArgumentParser(description="Train a causal language model.")
parser.add_argument("path", nargs="?", help="a text file; default: CPython's documentation")
parser.add_argument("--pretrained", metavar="NAME", help="model and tokenizer; default: a tiny one, untrained")
parser.add_argument("--tokens", type=int, default=2048, help="tokens per optimizer step, over all processes")
parser.add_argument("--micro-size", type=int, default=8, help="the most paragraphs of one forward/backward")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--run-dir", help="default: a new folder below runs/")


def main() -> None:
    args = parser.parse_args()
    text = Path(args.path).read_text(encoding="utf-8") if args.path else documentation().decode()
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    cut = int(0.9 * len(paragraphs))  # the last tenth is held out

    known = args.pretrained
    tokenizer = load_tokenizer(known) if known else train_tokenizer(paragraphs[:cut], vocab_size=2000)
    ids = tokenizer(paragraphs, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    samples = [{"input_ids": part, "attention_mask": [1] * len(part), "labels": part} for part in ids]
    data = DataSpec(
        train=samples[:cut],
        eval_dataset=samples[cut:],
        description=f"{len(samples):,} paragraphs, the last {len(samples) - cut:,} held out",
        collate=PadCollator({"input_ids": padding_id(tokenizer), "attention_mask": 0, "labels": -100}),
        lengths=np.array([len(part) for part in ids[:cut]]),
    )

    torch.manual_seed(0)
    if known:
        model = AutoModelForCausalLM.from_pretrained(known)
    else:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=MAX_LENGTH,
            use_cache=False,
        )
        model = AutoModelForCausalLM.from_config(config)
    settings = {
        "batch": {"global_size": None, "tokens": args.tokens, "group_by_length": True},
        "optim": {"lr": args.lr},
        "schedule": {"warmup_steps": args.steps // 10},
        "trainer": {"eval_every": 20},
        "metrics": {"wandb": {"mode": "disabled"}},
    }
    Trainer(
        model,
        CausalLM(),
        data,
        micro_batch_size=args.micro_size,
        max_steps=args.steps,
        run_dir=args.run_dir,
        config=RunConfig.from_dict(settings),
    ).fit()


if __name__ == "__main__":
    main()
