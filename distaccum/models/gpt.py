"""A GPT: pre-norm transformer blocks, scaled dot-product attention, rotary or learned positions, tied embeddings.

Source: A. Radford et al., "Language models are unsupervised multitask learners" (2019), for the layout and for scaling
the initial weights of residual projections by the depth; J. Su et al., "RoFormer" (2021), for rotary positions. With
``positions=learned``, ``bias=true`` and ``gelu=tanh`` it is GPT-2, parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from distaccum.errors import ConfigError, MisuseError, kinds_of

KERNELS = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_IDS = (torch.int32, torch.int64)
_NO_KERNEL = ("No available kernel", "No viable backend")  # CUDA's words, and the CPU's
_CHOICES = {"positions": ("rotary", "learned"), "gelu": ("exact", "tanh"), "attention": tuple(KERNELS)}


class GPT(nn.Module):
    """Token ids ``(B, T)`` to logits ``(B, T, vocab_size)``.

    Args:
        vocab_size: Number of token ids.
        seq_len: Longest sequence in tokens.
        n_layer: Number of blocks.
        n_head: Number of attention heads; it must divide ``n_embd``.
        n_embd: Width of the model.
        dropout: Dropout probability.
        vocab_multiple: Round the embedding up to a multiple of this number of rows, such as 64, which makes a loss in
            chunks faster. The added rows are zeros and no token ids; logits and loss do not change.
        positions (rotary | learned): Position embedding: ``rotary``, without parameters, or ``learned``.
        bias: Give linear layers and norms a bias.
        gelu (exact | tanh): ``exact``, or ``tanh``, the approximation that GPT-2 uses.
        attention (auto | flash | efficient | cudnn | math): Attention kernel. ``auto``: torch chooses.

    Raises:
        ConfigError: a size is not positive, sizes do not go together, or there is no such choice.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        dropout: float = 0.0,
        vocab_multiple: int = 1,
        positions: str = "rotary",
        bias: bool = False,
        gelu: str = "exact",
        attention: str = "auto",
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        for name, size in (sizes | {"vocab_multiple": vocab_multiple}).items():
            if size < 1:
                raise ConfigError(f"model.{name}", size, "must be at least 1", "Give a positive size")
        if n_embd % n_head:
            remedy = "Make the width a multiple of the number of heads"
            raise ConfigError("model.n_embd", n_embd, f"not divisible by model.n_head={n_head}", remedy)
        for name, choice in (("positions", positions), ("gelu", gelu), ("attention", attention)):
            if choice not in _CHOICES[name]:
                raise ConfigError(f"model.{name}", choice, "no such choice", f"Use one of {', '.join(_CHOICES[name])}")
        if positions == "rotary" and n_embd // n_head % 2:
            remedy = "Rotary positions turn pairs of channels: make the width of a head even"
            raise ConfigError("model.n_embd", n_embd, f"gives heads of odd width {n_embd // n_head}", remedy)
        if not 0 <= dropout < 1:
            raise ConfigError("model.dropout", dropout, "not in [0, 1)", "Give the share of activations to drop")
        self.seq_len = seq_len
        self._vocab_size, self._padded = vocab_size, bool(vocab_size % vocab_multiple)
        self.tokens = TokenEmbedding(vocab_size, n_embd, multiple=vocab_multiple)
        if positions == "rotary":
            self.rotation = Rotation(seq_len, n_embd // n_head)
        else:
            self.positions = TokenEmbedding(seq_len, n_embd)
        self.dropout = nn.Dropout(dropout)
        kinds: dict[str, Any] = {"depth": n_layer, "bias": bias, "gelu": gelu, "attention": attention}
        blocks = [Block(n_embd, n_head, dropout, **kinds) for _ in range(n_layer)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(n_embd, bias=bias)
        self.apply(_initialise)
        for block in blocks:
            block.scale_residuals()

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self._vocab_size

    def forward(
        self, ids: Tensor, output: Callable[..., Tensor] = F.linear, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits; or what ``output(hidden, weight)`` gives in their place, such as a loss in chunks.

        Where the vocabulary is padded, ``output`` is given ``classes``, the rows of the weight that are token ids.

        Args:
            ids: ``(B, T)``.
            output: the last layer.
            position_ids: ``(B, T)``, of rows with several documents: 0 begins another one, and a token sees those that
                are before it in its own.

        Raises:
            ValueError: the sequence, or a document, is longer than ``seq_len``.
            MisuseError: these are no token ids.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in _IDS or ids.ndim != 2:  # noqa: PLR2004  (B, T)
            problem = f"the GPT takes token ids, int64 (batch, length), and the data gives {kinds_of(ids)}"
            remedy = "name a model for these data: model=cnn for images (1, H, W), or one of your own by model._target_"
            raise MisuseError(f"{problem}: {remedy} (docs/bring-your-own.md)")
        length = ids.shape[1]
        if position_ids is None and length > self.seq_len:
            raise ValueError(f"a sequence of {length} tokens, but the model was built for seq_len={self.seq_len}")
        x, angles = self.tokens(ids), None
        mask = None if position_ids is None else documents_mask(position_ids)
        if hasattr(self, "rotation"):
            angles = self.rotation(length if position_ids is None else position_ids)
        elif position_ids is None:
            x = x + self.positions.weight[:length]
        else:
            x = x + self.positions(position_ids)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, angles, mask)
        x, weight = self.norm(x), self.tokens.weight
        if not self._padded:
            return output(x, weight)
        if output is F.linear:
            return F.linear(x, weight[: self._vocab_size])  # logits[..., :n] would be a view: FSDP2 warns
        return output(x, weight, classes=self._vocab_size)

    @torch.no_grad()
    def generate(self, ids: Tensor, *, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        """Goes on with token ids ``(B, T)``; gives them with the new ones behind, ``(B, T + max_new_tokens)``.

        Tokens are drawn by torch's global generator of the host, whatever the device; at a temperature of 0 the
        likeliest is taken. There is one forward for each new token. A logit of NaN counts as 0.

        Raises:
            ValueError: the whole is longer than ``seq_len``.
        """
        if ids.shape[1] + max_new_tokens > self.seq_len:
            whole = f"{ids.shape[1]} tokens and {max_new_tokens} new ones"
            raise ValueError(f"{whole}, but the model was built for seq_len={self.seq_len}")
        for _ in range(max_new_tokens):
            logits = self(ids)[:, -1].float().cpu().nan_to_num()
            if temperature:
                below = logits - logits.amax(-1, keepdim=True)
                following = torch.multinomial((below / temperature).softmax(-1), 1)
            else:
                following = logits.argmax(-1, keepdim=True)
            ids = torch.cat((ids, following.to(ids.device)), dim=1)
        return ids


class TokenEmbedding(nn.Embedding):
    """With small initial weights, as they are the output's too; and rows of zeros, up to a multiple of so many."""

    def __init__(self, size: int, width: int, *, multiple: int = 1) -> None:
        self._size = size  # for reset_parameters, which the next line calls
        super().__init__(math.ceil(size / multiple) * multiple, width)

    def reset_parameters(self) -> None:
        _initialise(self)


Angles = tuple[Tensor, Tensor]


class Rotation(nn.Module):
    """Cosine and sine, each ``(T, head_width / 2)``, of the angle by which a pair of channels turns at a position."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, seq_len: int, head_width: int) -> None:
        super().__init__()
        self._sizes = seq_len, head_width
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(seq_len, head_width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Computes the buffers, also after the meta device."""
        seq_len, head_width = self._sizes
        device, host = self.cosine.device, torch.device("cpu")  # one table for all devices: their powers differ
        frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, device=host) / head_width)
        angles = torch.outer(torch.arange(seq_len, device=host), frequencies)
        self.cosine, self.sine = angles.cos().to(device), angles.sin().to(device)

    def forward(self, positions: int | Tensor) -> Angles:
        """Of the first positions; or of each of ``(B, T)``, then ``(B, 1, T, head_width / 2)``."""
        if isinstance(positions, int):
            return self.cosine[:positions], self.sine[:positions]
        return self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turns the channel pairs of ``x``, ``(..., T, head_width)``, by their positions' angles."""
    cosine, sine = (part.to(x.dtype) for part in angles)  # x is 16 bits wide under autocast
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised residual; ``(B, T, C)`` to the same."""

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        dropout: float,
        *,
        depth: int,
        bias: bool = False,
        gelu: str = "exact",
        attention: str = "auto",
    ) -> None:
        super().__init__()
        self._depth = depth
        self.attention_norm = nn.LayerNorm(n_embd, bias=bias)
        self.attention = Attention(n_embd, n_head, dropout, bias=bias, kernel=attention)
        self.norm = nn.LayerNorm(n_embd, bias=bias)
        self.expand = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        if gelu == "tanh":
            self.activation = nn.GELU(approximate="tanh")  # a module, so that a checkpoint tells it from the exact one
        self.contract = nn.Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Makes the weights of all that is inside, after the meta device."""
        self.apply(_initialise)
        self.scale_residuals()

    def scale_residuals(self) -> None:
        """Draws the projections into the residual stream again, the smaller the deeper the model."""
        for projection in (self.attention.project, self.contract):
            nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * self._depth))

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask)
        expanded = self.expand(self.norm(x))
        active = self.activation(expanded) if hasattr(self, "activation") else F.gelu(expanded)
        fed: Tensor = self.dropout(self.contract(active))
        return x + fed


class Attention(nn.Module):
    """Causal multi-head self-attention; ``(B, T, C)`` to the same."""

    def __init__(self, n_embd: int, n_head: int, dropout: float, *, bias: bool = False, kernel: str = "auto") -> None:
        super().__init__()
        self.n_head = n_head
        self.query_key_value = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.project = nn.Linear(n_embd, n_embd, bias=bias)
        self.dropout = dropout
        self._kernel = kernel  # changes no meaning: a checkpoint resumes with another one

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None = None) -> Tensor:
        """Raises ConfigError if the kernel that was chosen cannot do it."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.n_head, width // self.n_head)
        mixing = split.permute(2, 0, 3, 1, 4)
        query, key = (mixing if angles is None else rotate(mixing[:2], angles))[:2]
        value = mixing[2]
        drop = self.dropout if self.training else 0.0
        mixed = _attend(query, key, value, mask, drop=drop, kernel=self._kernel)
        return F.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)), drop, self.training)


def documents_mask(position_ids: Tensor) -> Tensor:
    """Which tokens see which, ``(B, 1, T, T)``: those before them in their own document, of positions ``(B, T)``."""
    documents = (position_ids == 0).cumsum(-1)
    length = position_ids.shape[-1]
    before = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return ((documents.unsqueeze(-1) == documents.unsqueeze(-2)) & before).unsqueeze(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, drop: float, kernel: str) -> Tensor:
    backend, causal = KERNELS[kernel], mask is None
    if backend is None:
        return F.scaled_dot_product_attention(query, key, value, mask, drop, is_causal=causal)
    try:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, mask, drop, is_causal=causal)
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        problem = f"torch has no such kernel for {query.dtype} of head width {query.shape[-1]} on {query.device.type}"
        raise ConfigError("model.attention", kernel, problem, "Use auto, or another kernel") from error


def _initialise(module: nn.Module) -> None:
    if isinstance(module, TokenEmbedding):
        nn.init.normal_(module.weight[: module._size], std=0.02)
        nn.init.zeros_(module.weight[module._size :])
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
