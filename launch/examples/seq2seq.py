"""Fine-tune a Hugging Face encoder-decoder on pairs of texts, on any number of processes::

    python launch/examples/seq2seq.py launch/examples/dates.jsonl
    torchrun --nproc-per-node=2 launch/examples/seq2seq.py launch/examples/dates.jsonl
    python launch/examples/seq2seq.py summaries.jsonl --pretrained google-t5/t5-small --lr 3e-4 --tokens 16384

The file has a JSON object per line, with ``source`` and ``target``. The 2,000 dates of ``dates.jsonl`` are made up:
as people write them, and as ISO 8601 does. The global batch is stated in tokens, those of the source and the target.
Needs ``pip install 'distaccum[hf]'``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from distaccum import DataSpec, MaskedLM, PadCollator, RunConfig, Trainer
from distaccum.data.datasets.tokenizer import load_tokenizer, padding_id, train_tokenizer

MAX_LENGTH = 256

parser = argparse.ArgumentParser(description="Fine-tune an encoder-decoder.")
parser.add_argument("path", help="JSON-lines file with source and target")
parser.add_argument("--pretrained", metavar="NAME", help="model and tokenizer; default: a tiny one, untrained")
parser.add_argument("--tokens", type=int, default=2048, help="tokens per optimizer step, over all processes")
parser.add_argument("--micro-size", type=int, default=32, help="the most pairs of one forward/backward on one process")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--run-dir", help="default: a new folder below runs/")


def main() -> None:
    args = parser.parse_args()
    pairs = [json.loads(line) for line in Path(args.path).read_text(encoding="utf-8").splitlines()]
    sources, targets = ([pair[name] for pair in pairs] for name in ("source", "target"))
    cut = int(0.9 * len(pairs))  # the last tenth is held out

    known = args.pretrained
    tokenizer = load_tokenizer(known) if known else train_tokenizer(sources[:cut] + targets[:cut], vocab_size=300)
    pad = padding_id(tokenizer)
    torch.manual_seed(0)
    if known:
        model = AutoModelForSeq2SeqLM.from_pretrained(known)
    else:
        config = T5Config(
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            pad_token_id=pad,
            decoder_start_token_id=pad,
            dropout_rate=0.0,
        )
        model = AutoModelForSeq2SeqLM.from_config(config)

    inputs = tokenizer(sources, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    labels = tokenizer(text_target=targets, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    start = model.config.decoder_start_token_id
    samples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "decoder_input_ids": [start, *goal[:-1]], "labels": goal}
        for ids, goal in zip(inputs, labels, strict=True)
    ]
    data = DataSpec(
        train=samples[:cut],
        eval_dataset=samples[cut:],
        description=f"{len(samples):,} pairs, the last {len(samples) - cut:,} held out",
        collate=PadCollator({"input_ids": pad, "attention_mask": 0, "decoder_input_ids": pad, "labels": -100}),
        lengths=np.array([len(ids) + len(goal) for ids, goal in zip(inputs[:cut], labels[:cut], strict=True)]),
    )
    settings = {
        "batch": {"global_size": None, "tokens": args.tokens, "group_by_length": True},
        "optim": {"lr": args.lr},
        "schedule": {"warmup_steps": args.steps // 10},
        "trainer": {"eval_every": 50},
        "metrics": {"wandb": {"mode": "disabled"}},
    }
    Trainer(
        model,
        MaskedLM(),  # one label for each position of the decoder
        data,
        micro_batch_size=args.micro_size,
        max_steps=args.steps,
        run_dir=args.run_dir,
        config=RunConfig.from_dict(settings),
    ).fit()


if __name__ == "__main__":
    main()
