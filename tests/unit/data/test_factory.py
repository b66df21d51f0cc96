"""Plans and window loaders of given data: grouped, by tokens, counted, and where a loop was in them."""

import re
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from distaccum.data.batch_size import BatchSize
from distaccum.data.counter import GlobalCounter
from distaccum.data.cursor import DataCursor, position_mismatch
from distaccum.data.datasets.lines import lines
from distaccum.data.factory import build_loader, make_plan
from distaccum.data.loader import MicroBatchIds, WindowLoader, padding_share
from distaccum.data.plan.batch import CONFIG_KEYS, KEYWORDS, SizeNames
from distaccum.data.spec import DataSpec
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError, DataError, MisuseError
from distaccum.losses.normalize import normalize_loss
from distaccum.tools.longest import longest_micro_batch
from tests.support.optional import Library

transformers = Library("transformers")
LENGTHS = np.random.default_rng(0).integers(1, 40, 50)
DATA: Any = [torch.full((int(length),), i) for i, length in enumerate(LENGTHS)]
SOURCE = DataSpec(
    train=DATA,
    eval_dataset=None,
    description="",
    lengths=LENGTHS,
    collate=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, True, -1),
)


def _plan(world: int, **sizes: Any) -> Any:
    given: dict[str, Any] = {"global_batch_size": 16, "tokens": None, "micro_batch_size": 4, "seed": 0}
    return make_plan(SOURCE, world_size=world, **(given | sizes))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sizes", [{}, {"global_batch_size": None, "tokens": 300}])
def test_grouping_moves_samples_within_their_window_only(world: int, sizes: dict[str, Any]) -> None:
    plan = _plan(world, **sizes)

    def windows(plan: Any) -> list[list[int]]:
        streams = [iter(MicroBatchIds(plan, rank)) for rank in range(world)]
        cut = plan.epoch(0)
        return [
            sorted(i for r in range(world) for part in cut.micro_batches(k, r) if len(part) for i in next(streams[r]))
            for k in range(cut.windows_per_epoch)
        ]

    by_length = _plan(world, group_by_length=True, **sizes)
    assert windows(by_length) == windows(plan)
    assert by_length.position == plan.position
    assert sorted(i for window in windows(by_length) for i in window) == list(range(50))
    plain, grouped = (padding_share(LENGTHS, plan, grouped=grouped) for grouped in (False, True))
    assert 0 < grouped < 0.6 * plain


def test_batches_are_padded_to_the_longest_of_the_micro_batch(gloo_world: World) -> None:
    loader = build_loader(SOURCE, _plan(1, group_by_length=True), gloo_world)
    for window in loader.windows(0, 0, GlobalCounter(gloo_world, lambda batch: int((batch >= 0).sum()))):
        assert window.counts["loss"] == sum(LENGTHS[i] for m in window.micro_batches for i in m.batch[:, 0].tolist())
        assert all(int((m.batch >= 0).sum(1).max()) == m.batch.shape[1] for m in window.micro_batches)


def test_one_small_all_reduce_a_window(gloo_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    all_reduce_host = World.all_reduce_host
    monkeypatch.setattr(
        World, "all_reduce_host", lambda self, xs: (calls.append(len(xs)), all_reduce_host(self, xs))[1]
    )
    windows = list(build_loader(SOURCE, _plan(1), gloo_world).windows(0, 0, GlobalCounter(gloo_world, len)))
    assert calls == [2] * len(windows)


STREAM, BY_TOKENS = DataSpec(train=iter(DATA)), {"global_batch_size": None, "tokens": 7}
UNWORKABLE: list[tuple[DataSpec, dict[str, Any], str]] = [
    (SOURCE, {"global_batch_size": None}, "{G}: is not given, and {T} neither"),
    (SOURCE, {"tokens": 7}, "{T}=7: and {G}=16 is given too"),
    (DataSpec(train=DATA), BY_TOKENS, "{T}=7: the data does not say how long"),
    (STREAM, BY_TOKENS, "{T}=7: the data is a stream"),
    (replace(STREAM, lengths=LENGTHS), {"group_by_length": True}, "batch.group_by_length=True: the data is a stream"),
    (SOURCE, {"micro_batch_size": 17}, "{M}=17: larger than {G}=16"),
    (SOURCE, BY_TOKENS | {"tokens": 0}, "{T}=0: must be at least 1"),
    (STREAM, {"micro_batch_size": 3, "batched": True}, "{G}=16: no multiple of {M}=3"),
    (replace(STREAM, weights=[1.0]), {}, "data.weights: the data is a stream"),
    (DataSpec(train=DATA, weights=[1.0] * 50, shuffle=False), {}, "data.weights: the samples are drawn at random"),
    (DataSpec(train=DATA, weights=[1.0]), {}, "data.weights: has the shape (1,) for 50 samples"),
    (DataSpec(train=DATA, weights=torch.zeros(50, requires_grad=True)), {}, "data.weights: are from 0 to 0"),
    (DataSpec(train=DATA, weights=np.arange(50) - 1.0), {}, "data.weights: are from -1 to 48"),
    (DataSpec(train=DATA, weights=[float("nan")] * 50), {}, "data.weights: are from nan to nan"),
]


@pytest.mark.parametrize("names", [KEYWORDS, CONFIG_KEYS], ids=["Python", "command line"])
@pytest.mark.parametrize(("source", "sizes", "message"), UNWORKABLE)
def test_what_cannot_work_is_refused_by_the_name_that_was_typed(
    source: DataSpec, sizes: dict[str, Any], message: str, names: SizeNames
) -> None:
    given: dict[str, Any] = {"global_batch_size": 16, "tokens": None, "micro_batch_size": 4, "seed": 0, "world_size": 1}
    expected = message.format(G=names.global_batch_size, M=names.micro_batch_size, T=names.tokens)
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        make_plan(source, names=names, **(given | sizes))


def test_broken_samples_are_no_longest_micro_batch() -> None:
    def kept(samples: list[Any]) -> Any:
        there = [one for one in samples if one is not None]
        return torch.tensor(there) if there else None

    data = DataSpec(train=[None, 1, None, 2, 3], collate=kept)
    assert [longest_micro_batch(data, size).tolist() for size in (1, 2, 9)] == [[1], [1, 2], [1, 2, 3]]
    by_length = replace(data, lengths=np.array([9, 1, 9, 2, 3]))
    assert longest_micro_batch(by_length, 2).tolist() == [3, 2]
    for train, collate, message in (
        ([None] * 3, kept, "every sample is None"),
        ([1, 2], lambda _: None, "the collate function gave None for samples that are there"),
        ([None, {"x": 1, "y": None}], None, r"sample 1\['y'\] is None, which torch's default_collate cannot batch"),
    ):
        with pytest.raises(DataError, match=message):
            longest_micro_batch(DataSpec(train=train, collate=collate), 1)


def test_counts_and_a_loss_that_counts_nothing_weighs_nothing(gloo_world: World) -> None:
    counter = GlobalCounter(gloo_world, lambda batch: batch)
    first = [counter.micro_batch({"a": 1.5, "b": 0}), counter.micro_batch({"a": 2})]
    assert counter.all_reduce(first) == ({"a": 3.5, "b": 0.0}, [])
    with pytest.raises(MisuseError, match="a batch counts 'c', and the first window only"):
        counter.all_reduce([counter.micro_batch({"c": 1})])
    with pytest.raises(MisuseError, match="the count of 'loss' is -1"):
        counter.micro_batch(-1)
    with pytest.raises(MisuseError, match="give a finite number that is at least 0, read on the host"):
        counter.micro_batch(torch.ones(2))
    totals: dict[str, Tensor] = {"a": torch.tensor(6.0, requires_grad=True), "b": torch.tensor(5.0)}
    assert normalize_loss(totals, {"a": 3.0, "b": 0.0}, gradient_divide_factor=2).item() == 4.0


def test_lines_are_samples_of_their_own_length() -> None:
    source = lines(seq_len=20)
    assert source.eval_dataset is not None
    assert source.lengths is not None
    inputs, labels = source.train[3]  # type: ignore[index]
    assert torch.equal(inputs[1:], labels[:-1])
    assert len(inputs) == source.lengths[3]
    assert source.lengths.max() == 20
    assert source.collate is not None
    padded, ignored = source.collate([source.train[i] for i in range(8)])  # type: ignore[index]
    assert padded.shape == ignored.shape == (8, source.lengths[:8].max())
    assert int((ignored != -100).sum()) == source.lengths[:8].sum()
    with pytest.raises(ConfigError, match=r"data\.path=/nowhere: no such file"):
        lines(path="/nowhere")


def test_a_request_to_stop_is_seen_after_the_next_all_reduce_and_can_be_forgotten(gloo_world: World) -> None:
    counter = GlobalCounter(gloo_world, len)
    counter.request_stop()
    assert not counter.stopping  # the other ranks do not know yet
    counter.all_reduce([])
    assert counter.stopping
    counter.clear_stop()
    counter.all_reduce([])
    assert not counter.stopping


FULL = 16
X = torch.zeros(5, 3)  # fewer than a full micro-batch, so that nothing but the batch itself can say so
Pair = namedtuple("Pair", ["name", "x"])


@dataclass
class Fields:
    name: str
    x: torch.Tensor


class Graphs:
    num_graphs = 5


class TensorDict:
    batch_size = torch.Size([5])


MEASURED: dict[str, tuple[Any, int]] = {
    "text first": ({"source": "wiki", "x": X}, 5),
    "number first": ({"epoch": 3, "x": X}, 5),
    "None first": ((None, X), 5),
    "array": (np.zeros((5, 2)), 5),
    "arrays of numpy": ({"x": np.zeros((5, 2)), "scale": np.float32(2)}, 5),
    "packed": (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
    "dataclass": (Fields("wiki", X), 5),
    "namedtuple": (Pair("wiki", X), 5),
    "BatchEncoding": (lambda: transformers.BatchEncoding({"input_ids": X}), 5),
    "graphs": (Graphs(), 5),
    "TensorDict": ({"td": TensorDict(), "x": X}, 5),
    "nested": ({"a": {"b": [{"c": X}]}, "names": list("abcde")}, 5),
    "ragged lists": ({"ids": [[1], [1, 2], [3], [4], [5]]}, 5),
    "texts": (["a", "bc", "d"], 3),
    "numbers": ([4, 7, 1], 3),
    "jagged": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 2),
    "sparse": (torch.eye(5).to_sparse(), 5),
    "pair of one kind": ([X, X], 5),
    "fields of lists": (([X[0]] * 5, [{"boxes": X}] * 5), 5),
    "images and labels": ((list(X), torch.zeros(5)), 5),
    "columns of a list": ({"words": [torch.zeros(5)] * 4, "label": torch.zeros(5)}, 5),
    "empty": ({"x": X[:0]}, 0),
    "empty list": ([], 0),
    "empty extra": ({"x": X, "extra": []}, 5),
    "list of full size": ([torch.zeros(3, 4)] * FULL, FULL),
    "too many rows to be fields": ([torch.zeros(40, 4)] * 5, 5),
}


@pytest.mark.parametrize("kind", MEASURED)
def test_batches_are_measured_by_all_of_their_parts(kind: str) -> None:
    batch, size = MEASURED[kind]
    assert BatchSize(FULL)(batch() if kind == "BatchEncoding" else batch) == size


ASKED: dict[str, tuple[Any, str]] = {
    "disagree": ({"x": X, "meta": {"boxes": torch.zeros(7, 4)}}, r"\['x'\] has 5 and \['meta'\]\['boxes'\] has 7"),
    "lengths of a packing": ((torch.zeros(1, 9), torch.zeros(1, 9), torch.zeros(4)), r"\[0\] has 1 and \[2\] has 4"),
    "list that disagrees": ((torch.zeros(5, 3), ["a", "b"]), r"\[0\] has 5 and \[1\] has 2"),
    "nothing": (torch.tensor(3.0), "does not say how many samples"),
    "text": ("a line of text", "does not say how many samples"),
    "object": (object(), r"\(object\) does not say how many samples"),
    "fields or samples": ([torch.zeros(3, 4)] * 5, "may hold 3 or 5 samples"),
    "a sample of a tuple": ((torch.zeros(3, 4), 7), "may be a batch of 3, or one sample"),
    "a sample of a dict": ({"x": torch.zeros(3), "label": torch.tensor(1)}, "may be a batch of 3, or one sample"),
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_does_not_say_it_is_asked_for(kind: str) -> None:
    batch, message = ASKED[kind]
    with pytest.raises(DataError, match=f"{message}.*: state it, as in DataSpec"):
        BatchSize(FULL)(batch)


def test_a_full_batch_shows_how_later_ones_are_read() -> None:
    size = BatchSize(4)
    assert size([torch.zeros(3, 4)] * 4) == 4  # samples of 3 rows, not 4 fields of 3 samples
    assert size([torch.zeros(3, 4)] * 2) == 2
    size = BatchSize(4)
    assert size((torch.zeros(4, 2), torch.tensor(1.0))) == 4
    assert size((torch.zeros(3, 2), torch.tensor(1.0))) == 3


def test_a_function_of_the_users_is_believed_where_it_gives_a_number() -> None:
    assert BatchSize(4, lambda batch: len(batch["boxes"]))({"x": X, "boxes": [1, 2]}) == 2
    assert BatchSize(4, lambda _: torch.tensor(3))(None) == 3
    for wrong in (2.5, None, -1, True):
        with pytest.raises(DataError, match=r"batch_size\(\) of the DataSpec gives"):
            BatchSize(4, lambda _, wrong=wrong: wrong)({})  # type: ignore[misc]


class Windows(WindowLoader):
    """A loader of a user's own."""

    restored: Any = None

    @property
    def position(self) -> dict[str, Any]:
        return {"samples": 8}

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        self.restored = state


class LooksLikeOne:
    """Has the methods of a loader for a reason of its own."""

    position: Any = None
    windows = state = load_state = None


def _cursor(built: list[Any]) -> DataCursor:
    return DataCursor(lambda data: (built.append(data), Windows())[1])


def test_only_a_subclass_is_a_loader() -> None:
    built: list[Any] = []
    own, other = Windows(), LooksLikeOne()
    assert _cursor(built).as_loader(own) is own
    assert built == []
    assert _cursor(built).as_loader(other) is not other
    assert built == [other]


def test_a_loader_is_kept_from_epoch_to_epoch() -> None:
    built: list[Any] = []
    cursor, data = _cursor(built), [1, 2]
    assert cursor.as_loader(data) is cursor.as_loader(data)
    cursor.as_loader([1, 2])
    assert len(built) == 2


def test_a_restored_state_reaches_the_next_loader_once() -> None:
    cursor, loader, later = _cursor([]), Windows(), Windows()
    assert cursor.state() == {"position": {}, "data": None}
    cursor.restore({"samples": 8}, "there")
    assert cursor.state() == {"position": {"samples": 8}, "data": "there"}
    assert cursor.as_loader(loader) is loader
    cursor.as_loader(later)
    assert (loader.restored, later.restored) == ("there", None)
    assert cursor.state() == {"position": {"samples": 8}, "data": None}


def test_a_position_of_other_data_is_refused() -> None:
    cursor = _cursor([])
    cursor.restore({"samples": 9}, None)
    with pytest.raises(CheckpointError, match="saved with samples=9, and this loop has samples=8: its data position"):
        cursor.as_loader(Windows())


def test_positions_are_compared_by_the_current_keys() -> None:
    assert position_mismatch({"a": 1, "b": 2}, {"a": 1}) is None
    assert position_mismatch({"a": 1}, {"a": 1, "b": 2}) == ("b", None, 2)
    assert position_mismatch({"a": 1, "b": 3}, {"b": 2, "a": 0}) == ("b", 3, 2)
