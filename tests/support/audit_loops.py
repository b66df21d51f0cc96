"""Training loops with known faults, each a few lines as people write them, and right ones.

A fault that was reported in the issues of a public project names it above it; the code is our own. A loop trains two
windows of ``STEPS`` micro-batches on each rank. ``FAULTS`` and ``RIGHT`` say what an audit finds in each of ``LOOPS``.
"""

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


def count(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


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


def tokens_of(batches: list[Batch]) -> int:
    number = torch.tensor(sum(map(count, batches)))
    dist.all_reduce(number)
    return int(number)


@dataclass
class Rig:
    """One rank's model, optimizer and windows."""

    even: bool = False
    windows: tuple[int, ...] = (STEPS, STEPS)
    lr: float = 0.1
    scale: float = 2.0**16
    record: Callable[[Any], None] = lambda batch: None
    rank: int = field(default_factory=dist.get_rank)
    world: int = field(default_factory=dist.get_world_size)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.plain = TokenModel()
        self.model = DistributedDataParallel(self.plain)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=self.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.batches = micro_batches(self.rank, sum(self.windows), even=self.even)

    def each(self) -> Iterator[list[Batch]]:
        at = 0
        for number in self.windows:
            yield self.batches[at : at + number]
            at += number

    def sync(self, last: bool) -> Any:
        """``no_sync`` but for the last micro-step."""
        return nullcontext() if last else self.model.no_sync()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.plain.parameters(), norm)

    def scaled_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def sum_over_ranks(self) -> None:
        for parameter in self.plain.parameters():
            dist.all_reduce(parameter.grad)


@dataclass
class Micro:
    """What a loop has in its hands when it makes the loss of a micro-batch."""

    rig: Rig
    logits: Tensor
    labels: Tensor
    window: list[Batch]

    @property
    def mean(self) -> Tensor:
        return mean(self.logits, self.labels)

    @property
    def total(self) -> Tensor:
        return total(self.logits, self.labels)

    @property
    def steps(self) -> int:
        return len(self.window)

    @property
    def world(self) -> int:
        return self.rig.world

    @property
    def tokens(self) -> int:
        return tokens_of(self.window)

    @property
    def right(self) -> Tensor:
        """Tokens counted over the window and the ranks, then one division."""
        return self.total * self.world / self.tokens


Act = Callable[[Rig], object]


def loop(
    loss: Callable[[Micro], Tensor],
    *,
    before: Act = lambda rig: None,
    reduces: Callable[[int, int], bool] = lambda i, steps: i == steps - 1,
    after: Act = lambda rig: None,
    step: Act = Rig.step,
    plain: bool = False,
) -> Act:
    """The usual loop, with something else in it.

    ``before`` and ``after``: of each micro-step. ``reduces``: whether number ``i`` of them does. ``plain``: the forward
    goes past DistributedDataParallel.
    """

    def run(rig: Rig) -> None:
        for window in rig.each():
            for i, batch in enumerate(window):
                before(rig)
                with rig.sync(last=reduces(i, len(window))):
                    logits = (rig.plain if plain else rig.model)(batch["input_ids"])
                    loss(Micro(rig, logits, batch["labels"], window)).backward()
                after(rig)
            step(rig)

    return run


def weighted_by_samples(rig: Rig) -> None:
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


def mean_of_samples(micro: Micro) -> Tensor:
    every = F.cross_entropy(micro.logits.transpose(1, 2), micro.labels, ignore_index=IGNORED, reduction="none")
    return (every.sum(1) / (micro.labels != IGNORED).sum(1)).mean() / micro.steps


def first_labels_counted(micro: Micro) -> Tensor:
    rows = micro.world * sum(len(batch["labels"]) for batch in micro.window)
    return micro.total * micro.world / (micro.tokens + rows)


def shifted_twice(micro: Micro) -> Tensor:
    again = F.pad(micro.labels[:, 1:], (0, 1), value=IGNORED)
    shifted = [{"labels": F.pad(b["labels"][:, 1:], (0, 1), value=IGNORED)} for b in micro.window]
    return total(micro.logits, again) * micro.world / tokens_of(shifted)


def one_layer_off(rig: Rig) -> None:
    rig.plain.head.weight.register_hook(lambda gradient: gradient / 2)
    loop(lambda m: m.right)(rig)


def clip_unseen(rig: Rig) -> None:
    _clip_grad_norm_before_the_audit(rig.plain.parameters(), 0.5)
    rig.step()


def clip_and_step(rig: Rig, norm: float, *, unscales: bool) -> None:
    if unscales:
        rig.scaler.unscale_(rig.optimizer)
    rig.clip(norm)
    rig.scaled_step()


LOOPS: dict[str, Act] = {
    # Faults of the factor. NVIDIA-NeMo/RL#84: gradients are accumulated over micro-batches, and never averaged.
    "summed": loop(lambda m: m.mean),
    # NVIDIA-NeMo/Automodel#3830: a local mean times the data-parallel size, never divided: 8.00x.
    "summed_and_times_world": loop(lambda m: m.mean * m.world),
    # NVIDIA-NeMo/Automodel#3846: the factor that belongs to a global divisor, without one.
    "times_world": loop(lambda m: m.mean * m.world / m.steps),
    # huggingface/accelerate#3533, modelscope/ms-swift#10117: the loop divides, and the library once more.
    "divided_twice": loop(lambda m: m.mean / m.steps / STEPS),
    # modelscope/ms-swift#10117 on unequal samples: counted over the window, then divided by its steps too.
    "divided_after_counting": loop(lambda m: m.right / m.steps),
    # NVIDIA-NeMo/Automodel#3846's other half: divided by all ranks' tokens, and averaged by DDP again.
    "global_count_then_average": loop(lambda m: m.total / m.tokens),
    # A loss of reduction="sum", as losses of old codes are.
    "sum_never_divided": loop(lambda m: m.total),
    # Means of means. karpathy/nanochat#59, ml-explore/mlx-lm#1413, huggingface/transformers#34191: loss / steps.
    "mean_of_micro_batches": loop(lambda m: m.mean / m.steps),
    # huggingface/transformers#34242: tokens counted over the window, and not over the ranks.
    "mean_of_ranks": loop(lambda m: m.total / sum(map(count, m.window))),
    # verl-project/verl#5625: token means weighted by the share of the samples, which here differ.
    "weighted_by_samples": weighted_by_samples,
    # huggingface/trl#3938: the mean of each completion, then the mean of those means.
    "mean_of_samples": loop(mean_of_samples),
    # What is counted. A masked sum over all positions: ``(loss * mask).mean()``.
    "padding_counted": loop(lambda m: m.total / m.labels.numel() / m.steps),
    # huggingface/transformers#46204: counts one label a row that the shift has dropped.
    "first_labels_counted": loop(first_labels_counted),
    # huggingface/transformers#47394: labels that are shifted already are shifted again.
    "shifted_twice": loop(shifted_twice),
    # Parts of the gradient. deepspeedai/DeepSpeed#7439: an epoch's last window has 2 micro-batches, and divides by 4.
    "short_window": loop(lambda m: m.mean / STEPS),
    # huggingface/transformers#1563, verl-project/verl#436: clipped after each backward.
    "clipped_every_micro_step": loop(lambda m: m.mean / m.steps, after=lambda rig: rig.clip(0.05)),
    # modelscope/FunASR#3472: ``batch_idx % accumulation`` syncs the first micro-step and not the last.
    "reduced_in_the_first": loop(lambda m: m.mean / m.steps, reduces=lambda i, _: i % STEPS == 0),
    # The forward goes past DistributedDataParallel, so that nothing is reduced.
    "never_reduced": loop(lambda m: m.mean / m.steps, plain=True),
    # huggingface/accelerate#641's loop outside of ``accumulate()``: zero_grad() before each backward.
    "zeroed_every_micro_step": loop(
        lambda m: m.mean / m.steps, before=lambda rig: rig.optimizer.zero_grad(), step=lambda rig: rig.optimizer.step()
    ),
    # The gradients of a window are left over for the next.
    "never_zeroed": loop(lambda m: m.mean / m.steps, step=lambda rig: rig.optimizer.step()),
    # NVIDIA/Megatron-LM#6660: what was reduced is summed over the ranks again in every micro-step.
    "doubled_every_micro_step": loop(lambda m: m.mean / m.steps / m.world, after=Rig.sum_over_ranks, plain=True),
    # milesial/Pytorch-UNet#468, pytorch/examples#1196: no ``unscale_`` before clipping.
    "clipped_before_unscaling": loop(
        lambda m: m.rig.scaler.scale(m.mean / m.steps), step=lambda rig: clip_and_step(rig, 1.0, unscales=False)
    ),
    # ``optimizer.step()`` where ``scaler.step(optimizer)`` is meant.
    "never_unscaled": loop(lambda m: m.rig.scaler.scale(m.mean / m.steps)),
    # NVIDIA-NeMo/RL#84 under clipping, which hides a factor from the step, and not from the audit.
    "summed_and_clipped": loop(lambda m: m.mean, step=lambda rig: (rig.clip(0.5), rig.step())),
    # As before, by a function that was imported before the audit began, which cannot be seen.
    "clipped_unseen": loop(lambda m: m.mean, step=clip_unseen),
    # NVIDIA-NeMo/RL#212's masked sample: rank 1's loss is multiplied away, and its tokens are counted.
    "one_rank_without_a_loss": loop(lambda m: m.right * (1e-12 if m.rig.rank == 1 else 1.0)),
    # A hook that halves one parameter's gradient.
    "one_layer_off": one_layer_off,
    # Right ones. Hand-written DDP.
    "counted_by_hand": loop(lambda m: m.right),
    # Reduced in every micro-step: right, at four times the traffic.
    "counted_without_no_sync": loop(lambda m: m.right, reduces=lambda *_: True),
    # Scaled, unscaled, then clipped.
    "counted_and_clipped": loop(
        lambda m: m.rig.scaler.scale(m.right), step=lambda rig: clip_and_step(rig, 0.05, unscales=True)
    ),
}


def told(report: Any) -> dict[str, Any]:
    findings = [
        {"right": one.right, "causes": [cause.name for cause in one.causes], "error": one.error}
        for one in report.findings
    ]
    return {"right": report.right, "text": str(report), "findings": findings}


@dataclass(frozen=True)
class Expected:
    """The causes an audit has to name, and a part of their words; ``rig``: settings of the :class:`Rig`."""

    loop: str  # a name in LOOPS
    causes: set[str]
    words: str = ""
    rig: dict[str, Any] = field(default_factory=dict)
    window: int = 0  # of the finding that is looked at


_EVEN: dict[str, Any] = {"even": True}
FAULTS = [
    Expected("summed", {"micro-batches summed"}, "4.00x = 4 micro-batches", _EVEN),
    Expected("summed_and_times_world", {"world size x micro-batches"}, "8.00x = 2 ranks x 4 micro-batches", _EVEN),
    Expected("times_world", {"times the world size"}, "2.00x = 2 ranks", _EVEN),
    Expected("divided_twice", {"divided by the micro-batches twice"}, "1/4 = 1 / 4 micro-batches", _EVEN),
    Expected("divided_after_counting", {"divided by the micro-batches twice"}, "1/4"),
    Expected("global_count_then_average", {"averaged over the ranks twice"}, "1/2 = 1 / 2 ranks"),
    Expected("sum_never_divided", {"sum not divided"}, "items"),
    Expected("mean_of_micro_batches", {"mean of means over micro-batches"}, "mean of means"),
    # NVIDIA-NeMo/RL#3791: each micro-batch divides by its own tokens, and their sum arrives M times too large.
    Expected("summed", {"mean of means over micro-batches", "micro-batches summed"}, "4.00x"),
    Expected("mean_of_ranks", {"mean of means over ranks"}, "the ranks have"),
    Expected("weighted_by_samples", {"mean of means over micro-batches"}, "weighted by its samples"),
    Expected("mean_of_samples", {"mean of means over samples"}, "each sample's"),
    Expected("padding_counted", {"padding counted"}, "padding"),
    Expected("first_labels_counted", {"shifted-out labels counted"}, "the shift drops it"),
    Expected("shifted_twice", {"labels shifted twice"}, "shifted twice"),
    Expected("short_window", {"short window"}, "2 micro-batches divided by 4", _EVEN | {"windows": (4, 2)}, window=1),
    Expected(
        "short_window",
        {"mean of means over micro-batches", "short window"},
        "2 micro-batches divided by 4",
        {"windows": (4, 4, 4, 2)},
        window=2,
    ),
    Expected("clipped_every_micro_step", {"clipped inside the window"}, "before the window's accumulation", _EVEN),
    Expected("reduced_in_the_first", {"rank missing at the boundary"}, "no_sync() at the boundary", _EVEN),
    Expected("never_reduced", {"not reduced"}, "its own gradient", _EVEN),
    Expected("zeroed_every_micro_step", {"zeroed inside the window"}, "the first 3 of 4", _EVEN),
    Expected("never_zeroed", {"left over"}, "window before", _EVEN, window=1),
    Expected("doubled_every_micro_step", {"reduced in every micro-step"}, "by the world size", _EVEN),
    Expected("clipped_before_unscaling", {"clipped before unscaling"}, "65536", _EVEN),
    Expected("never_unscaled", {"loss scale left in"}, "1024", _EVEN | {"scale": 1024.0}),
    Expected("summed_and_clipped", {"micro-batches summed"}, "4.00x", _EVEN),
    Expected("clipped_unseen", {"clipped"}, "the norm is 0.5", _EVEN),
    Expected("one_rank_without_a_loss", {"rank missing"}, "rank 1's gradient is missing"),
    Expected("one_layer_off", {"some parameters"}, "head.weight"),
]
RIGHT = [
    Expected("counted_by_hand", set()),
    Expected("counted_by_hand", set(), rig={"windows": (4, 4, 1)}),
    Expected("counted_without_no_sync", set()),
    Expected("counted_and_clipped", set()),
    Expected("mean_of_micro_batches", set(), rig=_EVEN),
]
