"""Micro-batches of one shape, and in parts: the gradient and the rows are those of the samples alone."""

from collections import UserDict, namedtuple
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from distaccum import Accumulator, CrossEntropy, DataSpec, PadCollator, RunConfig
from distaccum.config.compile import CompileConfig
from distaccum.data.cutting import CannotCutError, cut, shape_of
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.plan.shuffle import Shuffle
from distaccum.data.plan.tokens import TokenPlan
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError, VerificationError
from distaccum.models.gpt import GPT
from distaccum.train.components import build_components
from tests.support.threads import run_ranks

SAMPLES, GLOBAL, MICRO, LONGEST, VOCABULARY, SEED = 23, 7, 3, 12, 11, 5  # windows of 7, 7, 7 and 2 samples
IGNORED = -100
Sample = tuple[Tensor, Tensor]


def _samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=generator).tolist()
    lines = [torch.randint(1, VOCABULARY, (length + 1,), generator=generator) for length in lengths]
    return [(line[:-1], line[1:]) for line in lines]


def _data(*, pad_rows: bool = False, **lengths: int) -> DataSpec:
    collate = PadCollator((0, IGNORED), **lengths)
    return DataSpec(train=_samples(), collate=collate, ignored={1: IGNORED}, pad_rows=pad_rows)


def _made() -> GPT:
    torch.manual_seed(1)
    return GPT(vocab_size=VOCABULARY, seq_len=16, n_layer=1, n_head=2, n_embd=8).double()


MODEL = _made()  # once: ranks that are threads share torch's generator


def _model() -> GPT:
    return deepcopy(MODEL)


@cache
def _truth() -> list[Tensor]:
    """The gradient of each window: sample by sample, without any padding."""
    model, samples = _model(), _samples()
    order = [int(i) for i in Shuffle(SAMPLES, seed=SEED, epoch=0)(torch.arange(SAMPLES).numpy())]
    found = []
    for begin in range(0, SAMPLES, GLOBAL):
        window = [samples[i] for i in order[begin : begin + GLOBAL]]
        losses = [F.cross_entropy(model(x[None]).flatten(0, 1), y, reduction="sum") for x, y in window]
        mean = torch.stack(losses).sum() / sum(len(y) for _, y in window)
        found.append(_flat(torch.autograd.grad(mean, list(model.parameters()))))
    return found


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _make(world: World, model: nn.Module, **options: Any) -> Accumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes: Any = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO, "seed": SEED}
    return Accumulator(model, optimizer, world=world, **(sizes | options))


def _run(world: World, data: DataSpec) -> tuple[list[Tensor], set[tuple[int, ...]]]:
    """The gradient that the optimizer is given in each window, and the shapes that the model has seen."""
    model, shapes, gradients = _model(), set[tuple[int, ...]](), list[Tensor]()
    model.register_forward_pre_hook(lambda _, inputs: shapes.add(tuple(inputs[0].shape)))
    acc = _make(world, model, count=CrossEntropy().count, verify="never")
    (optimizer,) = acc.engine.optimizers
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: gradients.append(_flat([p.grad.clone() for p in parameters])))
    for window in acc.windows(data):
        acc.step(window, CrossEntropy())
    return gradients, shapes


PADDED: dict[str, tuple[dict[str, Any], set[tuple[int, ...]]]] = {
    "to a multiple": ({"pad_to_multiple_of": 4}, {(n, t) for n in (1, 2, 3) for t in (4, 8, 12)}),
    "to one length": ({"pad_to": 13}, {(n, 13) for n in (1, 2, 3)}),
    "to one number of rows": ({"pad_rows": True}, {(3, t) for t in range(2, 13)}),
    "to one shape": ({"pad_rows": True, "pad_to": 13}, {(3, 13)}),
}


@pytest.mark.parametrize(("ranks", "kind"), [(1, "to one shape"), *((2, kind) for kind in PADDED)])
def test_padding_leaves_the_gradient_of_the_samples(ranks: int, kind: str) -> None:
    options, allowed = PADDED[kind]
    truths = _truth()
    for found in run_ranks(ranks, lambda world: _run(world, _data(**options))):
        assert not isinstance(found, BaseException), found
        gradients, shapes = found
        assert shapes <= allowed
        assert len(gradients) == 4
        for ours, truth in zip(gradients, truths, strict=True):
            error = float((ours - truth).norm() / truth.norm())
            print(f"{ranks} ranks, padded {kind}: {error:.1e}")
            assert error <= 1e-15


@pytest.mark.slow
def test_compiled_code_sees_one_shape(gloo_world: World) -> None:
    graphs = {}
    for kind, data in (("as they are", _data()), ("one shape", _data(pad_rows=True, pad_to=13))):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))
        compiled = CompileConfig(name="model", backend="eager")
        acc = _make(gloo_world, model, count=CrossEntropy().count, verify="never", compile=compiled)
        for window in acc.windows(data):
            acc.step(window, CrossEntropy())
        assert acc.engine.compiled is not None
        graphs[kind] = acc.engine.compiled.graphs
        acc.close()
    assert graphs["one shape"] == 1
    assert graphs["as they are"] > 4


def test_rows_are_those_of_the_largest_share() -> None:
    """Shares of 1 sample are no reason to compute micro-batches of 3; larger ones, later, are."""

    def rows(world: World) -> list[list[int]]:
        found: list[list[int]] = []
        acc = _make(world, _model(), global_batch_size=2, micro_batch_size=2, count=CrossEntropy().count)
        for window in acc.windows(_data(pad_rows=True, pad_to=13)):
            found.append([len(micro.batch[0]) for micro in window.plain.micro_batches])
            acc.step(window, CrossEntropy())
            if len(found) == 2:
                acc.set_global_batch_size(5)
        return found

    first, second = run_ranks(2, rows)
    assert first == [[1], [1], [2], [2], [2], [2]]  # 2 + 2 + 5 + 5 + 5 + 4
    assert second == [[1], [1], [2, 2], [2, 2], [2, 2], [2]]


def test_rows_of_a_plan() -> None:
    sizes: Any = {"micro_batch_size": 3}
    batch = [BatchPlan(samples=99, global_batch_size=7, world_size=world, **sizes) for world in (1, 2, 4, 8)]
    assert [plan.rows for plan in batch] == [3, 3, 2, 1]
    assert TokenPlan(lengths=np.array([5] * 9), tokens=12, world_size=2, **sizes).rows == 3


class Bidirectional(nn.Module):
    """Every token sees all of them, padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        logits: Tensor = self.out(hidden + hidden.mean(1, keepdim=True))
        return logits


class EveryToken(CrossEntropy):
    """Counts what is ignored."""

    def count(self, batch: Sample) -> int:
        return batch[1].numel()


def test_a_count_of_padding_is_refused(gloo_world: World) -> None:
    samples = [sample for sample in _samples() if len(sample[0]) == LONGEST] * 7  # of one length
    acc, data = _make(gloo_world, _model(), count=EveryToken().count), replace(_data(pad_to=13), train=samples)
    with pytest.raises(VerificationError, match="two samples count 24, and 26 where they are padded to the fixed"):
        acc.step(next(acc.windows(data)), EveryToken())
    rows, data = _make(gloo_world, _model(), count=EveryToken().count, verify="never"), replace(data, pad_rows=True)
    with pytest.raises(DataError, match="a sample counts 12 and 36 without and with the rows"):
        next(rows.windows(replace(data, collate=None)))


class EveryLogit(CrossEntropy):
    """With a term of all logits, those of ignored labels too."""

    def __call__(self, model: nn.Module, batch: Sample) -> Tensor:
        return super().__call__(model, batch) + 1e-4 * model(batch[0]).logsumexp(-1).square().sum()


class BesideAnother(EveryLogit):
    """The other one is a term of each micro-batch, of which there is a warning."""

    def count(self, batch: Sample) -> Any:
        return {"fixed": 1, "tokens": super().count(batch)}

    def __call__(self, model: nn.Module, batch: Sample) -> Any:
        return {"fixed": 0.0 * model(batch[0]).sum() + 1.0, "tokens": super().__call__(model, batch)}


class OfTheBatch(nn.Module):
    """Statistics of the micro-batch while it trains, of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        logits: Tensor = self.out(hidden - hidden.mean((0, 1)) if self.training else hidden)
        return logits


def _longest_first(samples: list[Sample]) -> Any:
    return PadCollator((0, IGNORED))(sorted(samples, key=lambda sample: -len(sample[0])))


SEES, MASK = (Bidirectional, CrossEntropy()), "where they are padded to the fixed shape: let the model mask padding"


@pytest.mark.parametrize(
    ("options", "sizes", "made", "said"),
    [
        ({"pad_to": 13}, {}, SEES, MASK),
        ({"pad_to_multiple_of": 13}, {}, SEES, MASK),
        ({"pad_to": 13, "pad_rows": True}, {}, SEES, MASK),
        ({"pad_rows": True}, {}, (_model, EveryLogit()), "two samples have the loss"),
        ({"pad_rows": True}, {"micro_batch_size": 2}, (_model, EveryLogit()), "a sample has the loss"),
        (
            {"pad_to": 13},
            {"global_batch_size": 1, "micro_batch_size": 1},
            (Bidirectional, CrossEntropy()),
            "two samples",
        ),
        ({"pad_rows": True}, {}, (_model, BesideAnother()), "two samples have the loss 'tokens'"),
        ({"pad_to": 13}, {}, (OfTheBatch, CrossEntropy()), "two samples have the loss"),
        ({"pad_rows": True}, {"collate": _longest_first, "seed": 5}, (_model, CrossEntropy()), "sorts its samples"),
        ({"pad_rows": True}, {"collate": _longest_first, "seed": 6}, (_model, CrossEntropy()), "sorts its samples"),
    ],
)
def test_what_padding_changes_is_found_wherever_it_hides(
    gloo_world: World, options: Any, sizes: Any, made: Any, said: str
) -> None:
    model, loss = made
    data = replace(_data(**options), **({"collate": sizes.pop("collate")} if "collate" in sizes else {}))
    acc = _make(gloo_world, model(), count=loss.count, **sizes)
    with pytest.raises(VerificationError, match=said):
        acc.step(next(acc.windows(data)), loss)


def test_what_draws_random_numbers_by_shape_is_padded(gloo_world: World) -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.3), nn.Linear(8, VOCABULARY))
    acc = _make(gloo_world, model, count=CrossEntropy().count)
    acc.step(next(acc.windows(_data(pad_to=13, pad_rows=True))), CrossEntropy())
    assert acc.progress.step == 1


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.embed(ids).mT).mT)
        return logits


@pytest.mark.parametrize(
    ("data", "model", "said"),
    [
        (
            _data(pad_rows=True),
            Normalised,
            r"batch\.pad_rows=True: the model's norm takes statistics of the micro-batch",
        ),
        (_data(pad_to=13), Normalised, r"data\.pad_to: the model's norm takes statistics of the micro"),
        (DataSpec(train=_samples(), pad_rows=True), _model, r"pad_rows=True: the data does not say with which labels"),
        (DataSpec(train=iter(_samples()), pad_rows=True), _model, r"batch\.pad_rows=True: the data is a stream"),
    ],
)
def test_what_cannot_be_padded_is_refused_before_there_are_ranks(data: Any, model: Any, said: str) -> None:
    config = RunConfig.from_dict({"batch": {"global_size": GLOBAL, "micro_size": MICRO}})
    with pytest.raises(ConfigError, match=said):
        build_components(config, data, model(), CrossEntropy(), world_size=1, device=torch.device("cpu"))


def test_the_setting_reaches_the_data() -> None:
    config = RunConfig.from_dict({"batch": {"global_size": GLOBAL, "micro_size": MICRO, "pad_rows": True}})
    made = build_components(config, _data(), _model(), CrossEntropy(), world_size=1, device=torch.device("cpu"))
    assert made.data.pad_rows


ROWS = 4
X, Y = torch.arange(12.0).reshape(ROWS, 3), torch.arange(ROWS)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Held:
    x: Tensor
    name: str = "a"


def flat(batch: Any) -> list[Any]:
    if isinstance(batch, Tensor | np.ndarray):
        return list(batch.tolist())
    if isinstance(batch, dict | UserDict):
        return [value for part in batch.values() for value in flat(part)]
    if isinstance(batch, list | tuple):
        return [value for part in batch for value in flat(part)]
    return flat(batch.x) if isinstance(batch, Held) else [batch]


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        Pair(X, Y),
        UserDict(x=X),
        Held(X),
        X.numpy(),
        ["a", "b", "c", "d"],
        [{"boxes": torch.ones(n)} for n in range(1, ROWS + 1)],  # of different sizes: one value a sample
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_parts_end_to_end_are_the_whole_in_the_same_containers(batch: Any) -> None:
    parts = [cut(batch, start, stop, ROWS) for start, stop in ((0, 1), (1, 3), (3, 4))]
    assert all(type(part) is type(batch) for part in parts)
    by_field = [sorted(map(str, flat(part))) for part in parts]
    assert sorted(map(str, flat(batch))) == sorted(value for values in by_field for value in values)
    if isinstance(batch, tuple | list) and isinstance(batch[0], Tensor):
        assert [len(part[0]) for part in parts] == [1, 2, 1]


def test_what_is_of_no_sample_is_in_every_part_and_two_fields_are_no_samples() -> None:
    part = cut({"x": X, "task": "mlm", "train": True, "mask": None}, 1, 3, ROWS)
    assert (part["task"], part["train"], part["mask"], len(part["x"])) == ("mlm", True, None, 2)
    inputs, labels = cut([X[:2], Y[:2]], 0, 1, 2)
    assert (inputs.shape, labels.shape) == ((1, 3), (1,))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": X, "table": torch.ones(7)}, "shape [7]"),
        ({"x": X, "scale": torch.tensor(2.0)}, "shape []"),
        ({"x": X, "items": 4}, "type int"),
        ({"x": X, "packed": pack_sequence([X[0], X[1]])}, "type PackedSequence"),
        ((X.T, Y), "shape [3, 4]"),
    ],
)
def test_what_may_be_of_all_samples_is_not_cut(batch: Any, said: str) -> None:
    with pytest.raises(CannotCutError, match=said.replace("[", r"\[").replace("]", r"\]")):
        cut(batch, 0, 2, ROWS)


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((X, Y), (4, 3)),
        ({"ids": torch.ones(2, 7), "labels": torch.ones(2, 7)}, (2, 7)),
        ({"pair": (X, Y), "image": torch.ones(2, 3, 8, 8)}, (2, 192)),
        (torch.tensor(1.0), (0, 0)),
        ([], (0, 0)),
    ],
)
def test_the_shape_is_that_of_the_largest_tensor(batch: Any, shape: tuple[int, int]) -> None:
    assert shape_of(batch) == shape
