"""Prints text that a trained model continues::

distaccum export runs/nanogpt/checkpoints/step-2000 weights.safetensors
python sample.py weights.safetensors --start "The "
"""

from __future__ import annotations

import argparse

import torch
from model import GPT, GPTConfig
from safetensors.torch import load_file

parser = argparse.ArgumentParser(description="Samples from a model of bytes.")
parser.add_argument("weights", help="a safetensors file, as distaccum export writes it")
parser.add_argument("--start", default="\n")
parser.add_argument("--tokens", type=int, default=300)
parser.add_argument("--temperature", type=float, default=0.8)
parser.add_argument("--top-k", type=int, default=50)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--n-head", type=int, default=4, help="the one size that the weights do not tell")
args = parser.parse_args()

weights = load_file(args.weights)
(vocab_size, n_embd), block_size = weights["wte.weight"].shape, len(weights["wpe.weight"])
n_layer = sum(name.endswith("c_attn.weight") for name in weights)
bias = "ln_f.bias" in weights
model = GPT(GPTConfig(block_size, vocab_size, n_layer, args.n_head, n_embd, bias=bias)).eval()
model.load_state_dict(weights, strict=False)  # lm_head's weight is wte's
torch.manual_seed(args.seed)
start = torch.tensor([list(args.start.encode())])
ids = model.generate(start, args.tokens, args.temperature, args.top_k)[0].tolist()
print(bytes(ids).decode(errors="replace"))
