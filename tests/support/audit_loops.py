"""Training loops with known faults, each a few lines as people write them, and right ones.

A fault that was reported in the issues of a public project names it in its docstring; the code is our own. A loop
trains two windows of ``STEPS`` micro-batches on each rank. ``FAULTS`` and ``RIGHT`` have them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as _clip_grad_norm_before_the_audit

VOCABULARY, WIDTH, ROWS, LENGTH, STEPS, IGNORED = 13, 6, 3, 9, 4, -100
Batch = dict[str, Tensor]


class TokenModel(nn.Module):
    """Predicts the next token from the last two; nothing in it is shared by the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Dropout(0.5), nn.LayerNorm(11))
        self.head = nn.Linear(11, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        logits: Tensor = self.head(self.body(hidden + hidden.roll(1, 1)))
        return logits


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """What all loops here mean to train."""
    return total(model(batch["input_ids"]), batch["labels"])


def counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def count(batch: Batch) -> int:
    return counted(batch["labels"])


def micro_batches(rank: int, number: int, *, even: bool) -> list[Batch]:
    """Rows of 1 to 9 tokens, those of rank 1 the longer ones; or all of 9."""
    generator = torch.Generator().manual_seed(5 + rank)
    found = []
    for _ in range(number):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        longest = LENGTH if rank else LENGTH // 2
        lengths = torch.randint(1 + 2 * rank, longest + 1, (ROWS, 1), generator=generator)
        labels = ids[:, 1:] if even else torch.where(torch.arange(LENGTH) < lengths, ids[:, 1:], IGNORED)
        found.append({"input_ids": ids[:, :-1].contiguous(), "labels": labels.contiguous()})
    return found


@dataclass
class Rig:
    """One rank's model, optimizer and windows."""

    even: bool = False
    windows: tuple[int, ...] = (STEPS, STEPS)
    lr: float = 0.1
    record: Callable[[Any], None] = lambda batch: None
    rank: int = field(default_factory=dist.get_rank)
    world: int = field(default_factory=dist.get_world_size)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.plain = TokenModel()
        self.model = DistributedDataParallel(self.plain)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=self.lr)
        self.batches = micro_batches(self.rank, sum(self.windows), even=self.even)

    def each(self) -> Iterator[list[Batch]]:
        """The micro-batches of each window."""
        at = 0
        for number in self.windows:
            yield self.batches[at : at + number]
            at += number

    def sync(self, last: bool) -> Any:
        """``no_sync`` but for the last micro-step."""
        return nullcontext() if last else self.model.no_sync()

    def tokens(self, batches: list[Batch]) -> int:
        """Of all ranks."""
        number = torch.tensor(sum(map(count, batches)))
        dist.all_reduce(number)
        return int(number)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Weigh = Callable[[Rig, Tensor, Tensor, list[Batch]], Tensor]


def _loop(rig: Rig, loss: Weigh) -> None:
    """The usual loop, with another loss."""
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                loss(rig, rig.model(batch["input_ids"]), batch["labels"], window).backward()
        rig.step()


# ------------------------------------------------------------------------------------------ faults of the factor


def summed(rig: Rig) -> None:
    """NVIDIA-NeMo/RL#84: gradients are accumulated over micro-batches, and never averaged."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels))


def summed_and_times_world(rig: Rig) -> None:
    """NVIDIA-NeMo/Automodel#3830: a local mean times the data-parallel size, never divided: 8.00x."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels) * rig.world)


def times_world(rig: Rig) -> None:
    """NVIDIA-NeMo/Automodel#3846: the factor that belongs to a global divisor, without one."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels) * rig.world / len(window))


def divided_twice(rig: Rig) -> None:
    """huggingface/accelerate#3533, modelscope/ms-swift#10117: the loop divides, and the library once more."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels) / len(window) / STEPS)


def divided_after_counting(rig: Rig) -> None:
    """modelscope/ms-swift#10117 on unequal samples: counted over the window, then divided by its steps too."""
    _loop(
        rig,
        lambda rig, logits, labels, window: total(logits, labels) * rig.world / rig.tokens(window) / len(window),
    )


def global_count_then_average(rig: Rig) -> None:
    """NVIDIA-NeMo/Automodel#3846's other half: divided by all ranks' tokens, and averaged by DDP again."""
    _loop(rig, lambda rig, logits, labels, window: total(logits, labels) / rig.tokens(window))


def sum_never_divided(rig: Rig) -> None:
    """A loss of reduction="sum", as losses of old codes are."""
    _loop(rig, lambda rig, logits, labels, window: total(logits, labels))


# ------------------------------------------------------------------------------------------ means of means


def mean_of_micro_batches(rig: Rig) -> None:
    """karpathy/nanochat#59, ml-explore/mlx-lm#1413, huggingface/transformers#34191: loss / accumulation steps."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels) / len(window))


def micro_batch_means_summed(rig: Rig) -> None:
    """NVIDIA-NeMo/RL#3791: each micro-batch divides by its own tokens, and their sum arrives M times too large."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels))


def mean_of_ranks(rig: Rig) -> None:
    """huggingface/transformers#34242: tokens counted over the window, and not over the ranks."""
    _loop(rig, lambda rig, logits, labels, window: total(logits, labels) / sum(map(count, window)))


def weighted_by_samples(rig: Rig) -> None:
    """verl-project/verl#5625: token means weighted by the share of the samples, which here differ."""
    for window in rig.each():
        ragged = [{k: v[: 1 + (i + rig.rank) % ROWS] for k, v in b.items()} for i, b in enumerate(window)]
        samples = torch.tensor(sum(len(b["labels"]) for b in ragged))
        dist.all_reduce(samples)
        for i, b in enumerate(ragged):
            with rig.sync(last=i == len(ragged) - 1):
                rig.record(b)
                share = len(b["labels"]) * rig.world / int(samples)
                (mean(rig.model(b["input_ids"]), b["labels"]) * share).backward()
        rig.step()


def mean_of_samples(rig: Rig) -> None:
    """huggingface/trl#3938: the mean of each completion, then the mean of those means."""

    def loss(rig: Rig, logits: Tensor, labels: Tensor, window: list[Batch]) -> Tensor:
        every = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        return (every.sum(1) / (labels != IGNORED).sum(1)).mean() / len(window)

    _loop(rig, loss)


# ------------------------------------------------------------------------------------------ what is counted


def padding_counted(rig: Rig) -> None:
    """A masked sum over all positions: ``(loss * mask).mean()``."""
    _loop(rig, lambda rig, logits, labels, window: total(logits, labels) / labels.numel() / len(window))


def first_labels_counted(rig: Rig) -> None:
    """huggingface/transformers#46204: counts one label a row that the shift has dropped."""

    def loss(rig: Rig, logits: Tensor, labels: Tensor, window: list[Batch]) -> Tensor:
        rows = rig.world * sum(len(batch["labels"]) for batch in window)
        return total(logits, labels) * rig.world / (rig.tokens(window) + rows)

    _loop(rig, loss)


def shifted_twice(rig: Rig) -> None:
    """huggingface/transformers#47394: labels that are shifted already are shifted again."""

    def loss(rig: Rig, logits: Tensor, labels: Tensor, window: list[Batch]) -> Tensor:
        again = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        shifted = [{"labels": F.pad(b["labels"][:, 1:], (0, 1), value=IGNORED)} for b in window]
        return total(logits, again) * rig.world / rig.tokens(shifted)

    _loop(rig, loss)


# ------------------------------------------------------------------------------------------ parts of the gradient


def short_window(rig: Rig) -> None:
    """deepspeedai/DeepSpeed#7439: the last window of an epoch has 2 micro-batches, and divides by 4."""
    _loop(rig, lambda rig, logits, labels, window: mean(logits, labels) / STEPS)


def clipped_every_micro_step(rig: Rig) -> None:
    """huggingface/transformers#1563, verl-project/verl#436: clipped after each backward."""
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                (mean(rig.model(batch["input_ids"]), batch["labels"]) / len(window)).backward()
            torch.nn.utils.clip_grad_norm_(rig.plain.parameters(), 0.05)
        rig.step()


def reduced_in_the_first(rig: Rig) -> None:
    """modelscope/FunASR#3472: ``batch_idx % accumulation`` syncs the first micro-step and not the last."""
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i % STEPS == 0):
                (mean(rig.model(batch["input_ids"]), batch["labels"]) / len(window)).backward()
        rig.step()


def never_reduced(rig: Rig) -> None:
    """The forward goes past DistributedDataParallel, so that nothing is reduced."""
    for window in rig.each():
        for batch in window:
            (mean(rig.plain(batch["input_ids"]), batch["labels"]) / len(window)).backward()
        rig.step()


def zeroed_every_micro_step(rig: Rig) -> None:
    """huggingface/accelerate#641's loop outside of ``accumulate()``: zero_grad() before each backward."""
    for window in rig.each():
        for i, batch in enumerate(window):
            rig.optimizer.zero_grad()
            with rig.sync(last=i == len(window) - 1):
                (mean(rig.model(batch["input_ids"]), batch["labels"]) / len(window)).backward()
        rig.optimizer.step()


def never_zeroed(rig: Rig) -> None:
    """The gradients of a window are left over for the next."""
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                (mean(rig.model(batch["input_ids"]), batch["labels"]) / len(window)).backward()
        rig.optimizer.step()


def doubled_every_micro_step(rig: Rig) -> None:
    """NVIDIA/Megatron-LM#6660: what was reduced is summed over the ranks again in every micro-step."""
    for window in rig.each():
        for batch in window:
            (mean(rig.plain(batch["input_ids"]), batch["labels"]) / len(window) / rig.world).backward()
            for parameter in rig.plain.parameters():
                dist.all_reduce(parameter.grad)
        rig.step()


def _scaler(scale: float = 2.0**16) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def clipped_before_unscaling(rig: Rig) -> None:
    """milesial/Pytorch-UNet#468, pytorch/examples#1196: no ``unscale_`` before clipping."""
    scaler = _scaler()
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                scaler.scale(mean(rig.model(batch["input_ids"]), batch["labels"]) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(rig.plain.parameters(), 1.0)
        scaler.step(rig.optimizer)
        scaler.update()
        rig.optimizer.zero_grad()


def never_unscaled(rig: Rig) -> None:
    """``optimizer.step()`` where ``scaler.step(optimizer)`` is meant."""
    scaler = _scaler(1024.0)
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                scaler.scale(mean(rig.model(batch["input_ids"]), batch["labels"]) / len(window)).backward()
        rig.step()


def summed_and_clipped(rig: Rig) -> None:
    """NVIDIA-NeMo/RL#84 under clipping, which hides a factor from the step, and not from the audit."""
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                mean(rig.model(batch["input_ids"]), batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(rig.plain.parameters(), 0.5)
        rig.step()


def clipped_unseen(rig: Rig) -> None:
    """As before, by a function that was imported before the audit began, which cannot be seen."""
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                mean(rig.model(batch["input_ids"]), batch["labels"]).backward()
        _clip_grad_norm_before_the_audit(rig.plain.parameters(), 0.5)
        rig.step()


def one_rank_without_a_loss(rig: Rig) -> None:
    """NVIDIA-NeMo/RL#212's masked sample: rank 1's loss is multiplied away, and its tokens are counted."""

    def loss(rig: Rig, logits: Tensor, labels: Tensor, window: list[Batch]) -> Tensor:
        part = total(logits, labels) * rig.world / rig.tokens(window)
        return part * (1e-12 if rig.rank == 1 else 1.0)

    _loop(rig, loss)


def one_layer_off(rig: Rig) -> None:
    """A hook that halves one parameter's gradient."""
    rig.plain.head.weight.register_hook(lambda gradient: gradient / 2)
    counted_by_hand(rig)


# ------------------------------------------------------------------------------------------ right ones


def counted_by_hand(rig: Rig) -> None:
    """Hand-written DDP: tokens counted over the window and the ranks, then one division."""
    _loop(rig, lambda rig, logits, labels, window: total(logits, labels) * rig.world / rig.tokens(window))


def counted_without_no_sync(rig: Rig) -> None:
    """The same, reduced in every micro-step: right, at four times the traffic."""
    for window in rig.each():
        for batch in window:
            loss = total(rig.model(batch["input_ids"]), batch["labels"]) * rig.world / rig.tokens(window)
            loss.backward()
        rig.step()


def counted_and_clipped(rig: Rig) -> None:
    """The same, scaled, unscaled, then clipped."""
    scaler = _scaler()
    for window in rig.each():
        for i, batch in enumerate(window):
            with rig.sync(last=i == len(window) - 1):
                loss = total(rig.model(batch["input_ids"]), batch["labels"]) * rig.world / rig.tokens(window)
                scaler.scale(loss).backward()
        scaler.unscale_(rig.optimizer)
        torch.nn.utils.clip_grad_norm_(rig.plain.parameters(), 0.05)
        scaler.step(rig.optimizer)
        scaler.update()
        rig.optimizer.zero_grad()


@dataclass(frozen=True)
class Expected:
    """The causes an audit has to name, and a part of their words; ``rig``: settings of the :class:`Rig`."""

    loop: Callable[[Rig], None]
    causes: set[str]
    words: str = ""
    rig: dict[str, Any] = field(default_factory=dict)
    window: int = 0  # of the finding that is looked at


_EVEN: dict[str, Any] = {"even": True}
FAULTS = [
    Expected(summed, {"micro-batches summed"}, "4.00x = 4 micro-batches", _EVEN),
    Expected(summed_and_times_world, {"world size x micro-batches"}, "8.00x = 2 ranks x 4 micro-batches", _EVEN),
    Expected(times_world, {"times the world size"}, "2.00x = 2 ranks", _EVEN),
    Expected(divided_twice, {"divided by the micro-batches twice"}, "1/4 = 1 / 4 micro-batches", _EVEN),
    Expected(divided_after_counting, {"divided by the micro-batches twice"}, "1/4"),
    Expected(global_count_then_average, {"averaged over the ranks twice"}, "1/2 = 1 / 2 ranks"),
    Expected(sum_never_divided, {"sum not divided"}, "items"),
    Expected(mean_of_micro_batches, {"mean of means over micro-batches"}, "mean of means"),
    Expected(micro_batch_means_summed, {"mean of means over micro-batches", "micro-batches summed"}, "4.00x"),
    Expected(mean_of_ranks, {"mean of means over ranks"}, "the ranks have"),
    Expected(weighted_by_samples, {"mean of means over micro-batches"}, "weighted by its samples"),
    Expected(mean_of_samples, {"mean of means over samples"}, "each sample's"),
    Expected(padding_counted, {"padding counted"}, "padding"),
    Expected(first_labels_counted, {"shifted-out labels counted"}, "the shift drops it"),
    Expected(shifted_twice, {"labels shifted twice"}, "shifted twice"),
    Expected(short_window, {"short window"}, "2 micro-batches divided by 4", _EVEN | {"windows": (4, 2)}, window=1),
    Expected(
        short_window,
        {"mean of means over micro-batches", "short window"},
        "2 micro-batches divided by 4",
        {"windows": (4, 4, 4, 2)},
        window=2,
    ),
    Expected(clipped_every_micro_step, {"clipped inside the window"}, "before the window's accumulation", _EVEN),
    Expected(reduced_in_the_first, {"rank missing at the boundary"}, "no_sync() at the boundary", _EVEN),
    Expected(never_reduced, {"not reduced"}, "its own gradient", _EVEN),
    Expected(zeroed_every_micro_step, {"zeroed inside the window"}, "the first 3 of 4", _EVEN),
    Expected(never_zeroed, {"left over"}, "window before", _EVEN, window=1),
    Expected(doubled_every_micro_step, {"reduced in every micro-step"}, "by the world size", _EVEN),
    Expected(clipped_before_unscaling, {"clipped before unscaling"}, "65536", _EVEN),
    Expected(never_unscaled, {"loss scale left in"}, "1024", _EVEN),
    Expected(summed_and_clipped, {"micro-batches summed"}, "4.00x", _EVEN),
    Expected(clipped_unseen, {"clipped"}, "the norm is 0.5", _EVEN),
    Expected(one_rank_without_a_loss, {"rank missing"}, "rank 1's gradient is missing"),
    Expected(one_layer_off, {"some parameters"}, "head.weight"),
]
RIGHT = [
    Expected(counted_by_hand, set()),
    Expected(counted_by_hand, set(), rig={"windows": (4, 4, 1)}),
    Expected(counted_without_no_sync, set()),
    Expected(counted_and_clipped, set()),
    Expected(mean_of_micro_batches, set(), rig=_EVEN),
]
