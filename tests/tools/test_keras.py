"""Keras models on the torch backend: beside Keras's own mean over the whole batch in fp64; the rest is refused."""

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.accumulators import over_sgd
from tests.support.optional import Library

os.environ["KERAS_BACKEND"] = "torch"
keras: Any = Library("keras")

from distaccum import DataSpec, Trainer  # noqa: E402  Keras reads its backend first
from distaccum.config.compile import CompileConfig  # noqa: E402
from distaccum.config.engine import DDPConfig, EngineConfig, Zero1Config, engine_config  # noqa: E402
from distaccum.config.precision import PrecisionConfig, ScalerConfig  # noqa: E402
from distaccum.distributed.world import World  # noqa: E402
from distaccum.engines.context import EngineContext  # noqa: E402
from distaccum.engines.factory import prepare  # noqa: E402
from distaccum.errors import BatchStatisticsWarning, ConfigError, MisuseError  # noqa: E402
from distaccum.tools.keras_loss import KerasLoss  # noqa: E402
from distaccum.tools.keras_model import KerasModel  # noqa: E402
from tests.support.runs import settings  # noqa: E402
from tests.support.threads import run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:keras")
layers: Any = Library("keras.layers")
WINDOWS = (slice(0, 7), slice(7, 10))  # of 10 samples, the last one ragged


def _model(*inner: Any, outputs: int = 3, penalty: float = 0.0) -> Any:
    """The same weights and names each time."""
    keras.utils.set_random_seed(0)
    squares = keras.regularizers.L2(penalty) if penalty else None
    first = layers.Dense(5, "tanh", name="first", kernel_regularizer=squares, bias_regularizer=squares)
    return keras.Sequential([keras.Input((4,)), first, *inner, layers.Dense(outputs, name="last")], name="model")


def _samples(*, classes: bool, weighted: bool, ignored: bool = False) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 4, generator=generator)
    y = torch.randint(3, (10,), generator=generator) if classes else x[:, :3].sin()
    if ignored:
        y[[0, 3, 4, 8, 9]] = -1
    weights = torch.rand(10, generator=generator)
    return [(x[i], y[i], weights[i]) if weighted else (x[i], y[i]) for i in range(10)]


def _classes(**settings: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


PENALTY = 0.3
LOSSES: dict[str, tuple[Callable[[], Any], bool, bool]] = {  # by name: the loss, of classes, with weights
    "squares": (lambda: keras.losses.MeanSquaredError("sum_over_batch_size"), False, False),
    "classes": (_classes, True, False),
    "weighted": (lambda: keras.losses.MeanSquaredError("sum_over_batch_size"), False, True),
    "by weight": (lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), False, True),
    "some ignored": (lambda: _classes(ignore_class=-1), True, False),
    "some ignored, by weight": (lambda: _classes(ignore_class=-1, reduction="mean_with_sample_weight"), True, True),
    "penalized": (lambda: keras.losses.MeanSquaredError("sum_over_batch_size"), False, False),
    "penalized, by weight": (lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), False, True),
}


def _of(name: str) -> tuple[Callable[[], Any], Callable[[], Any], list[tuple[Tensor, ...]]]:
    """The loss of this name, its model and its samples."""
    make, classes, weighted = LOSSES[name]
    samples = _samples(classes=classes, weighted=weighted, ignored="ignored" in name)
    return make, lambda: _model(penalty=PENALTY if "penalized" in name else 0.0), samples


def _columns(samples: Any, window: slice) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*samples[window], strict=True)]


def _truth(name: str, samples: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """In fp64, by hand: each window whole, by the mean as Keras's documentation defines it, and plain SGD."""
    kernel, bias, last, shift = weights = [
        variable.value.detach().double().requires_grad_() for variable in _model().trainable_weights
    ]
    classes, by_weight = LOSSES[name][1], "by weight" in name
    for window in WINDOWS:
        x, y, *weight = (part.double() if part.is_floating_point() else part for part in _columns(samples, window))
        output = (x @ kernel + bias).tanh() @ last + shift
        kept = y != -1 if classes else torch.ones(len(y), dtype=torch.bool)
        values = -output.log_softmax(-1)[torch.arange(len(y)), y] if classes else (output - y).square().mean(-1)
        factor = (weight[0] if weight else torch.ones(len(y)).double())[kept]
        mean = (values[kept] * factor).sum() / (factor.sum() if by_weight else len(factor))
        if "penalized" in name:
            mean = mean + PENALTY * (kernel.square().sum() + bias.square().sum())
        gradients = torch.autograd.grad(mean, weights)
        with torch.no_grad():
            for one, gradient in zip(weights, gradients, strict=True):
                one.sub_(0.1 * gradient)
    return weights


def _plain(loss: Any, model: Any, samples: Any, windows: Sequence[slice] = WINDOWS) -> list[Tensor]:
    """Keras's own loss and model, each window whole, and plain SGD."""
    for window in windows:
        x, y, *weight = _columns(samples, window)
        value = loss(y, model(x, training=True), sample_weight=weight[0] if weight else None)
        sum(model.losses, value).backward()
        with torch.no_grad():
            for variable in model.trainable_weights:
                variable.value.sub_(0.1 * variable.value.grad)
                variable.value.grad = None
    return [variable.value.detach() for variable in model.trainable_weights]


def _error(weights: Any, truth: list[Tensor]) -> float:
    parts = [(one.double() - right).square().sum() for one, right in zip(weights, truth, strict=True)]
    return float(torch.stack(parts).sum().detach().sqrt())


def _train(
    world: World, model: KerasModel, loss: KerasLoss, samples: Any, engine: EngineConfig, **settings: Any
) -> dict[str, Tensor]:
    acc = over_sgd(model, 0.1, (7, 2), count=loss.count, engine=engine, world=world, **settings)
    for window in acc.windows(DataSpec(train=samples, shuffle=False)):
        for micro in window:
            with acc.accumulate():
                acc.backward(loss(acc.model, micro.batch))
    return {name: value.detach().clone() for name, value in acc.engine.unwrapped_model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "world", "engine"),
    [
        ("squares", 1, DDPConfig()),
        ("squares", 2, Zero1Config()),
        ("classes", 2, DDPConfig()),
        ("weighted", 2, DDPConfig()),
        ("by weight", 1, Zero1Config()),
        ("by weight", 2, DDPConfig()),
        ("some ignored", 2, DDPConfig()),
        ("some ignored, by weight", 2, Zero1Config()),
        ("penalized", 1, DDPConfig()),
        ("penalized", 2, Zero1Config()),
        ("penalized, by weight", 2, DDPConfig()),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_the_weights_are_those_of_kerass_own_mean_over_the_whole_batch(
    name: str, world: int, engine: EngineConfig
) -> None:
    make, make_model, samples = _of(name)
    truth = _truth(name, samples)
    models = [KerasModel(make_model()) for _ in range(world)]
    found = run_ranks(world, lambda one: _train(one, models[one.rank], KerasLoss(make()), samples, engine))
    bound = 3 * _error(_plain(make(), make_model(), samples), truth)
    assert bound < 1e-6
    for weights in found:
        assert isinstance(weights, dict), weights
        assert _error(weights.values(), truth) < bound
    kept = models[0].keras.trainable_weights
    assert all(torch.equal(one.value, models[0].state_dict()[one.path]) for one in kept)


@pytest.mark.parametrize("seed", [None, 3])
def test_random_numbers_are_those_of_the_micro_batch(seed: int | None) -> None:
    model = KerasModel(_model(layers.Dropout(0.5, seed=seed, name="drop"), layers.GaussianNoise(1.0, seed=seed)))
    x = torch.ones(2, 4)
    outputs = []
    for key in (1, 2, 1):
        torch.manual_seed(key)
        outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(model.eval()(x), model(x))


def test_copies_have_weights_of_their_own() -> None:
    model = KerasModel(_model())
    copied = deepcopy(model)
    x = torch.ones(2, 4)
    before = model(x).detach()
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert torch.equal(model(x), before)
    assert not torch.equal(copied(x), before)
    copied(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    given = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not torch.func.functional_call(model, given, (x,)).any()
    assert torch.equal(model(x), before)


def test_frozen_layers_are_buffers_and_stay() -> None:
    plain = _model(layers.BatchNormalization(name="norm"))
    plain.get_layer("norm").trainable = False
    plain.get_layer("first").trainable = False
    model = KerasModel(plain)
    assert {name.split("/")[-2] for name, _ in model.named_parameters()} == {"last"}
    assert {name.split("/")[-2] for name, _ in model.named_buffers()} == {"first", "norm"}
    before = deepcopy(dict(model.named_buffers()))
    model(torch.randn(4, 4)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_run_is_resumed_and_evaluated(gloo_world: World, tmp_path: Path) -> None:
    samples = _samples(classes=True, weighted=False)
    states = []
    for number, folder in enumerate(("whole", "resumed")):
        for start in ["never"] if number == 0 else [str(tmp_path / "whole" / "checkpoints" / "step-2")]:
            model = KerasModel(_model(layers.Dropout(0.5, seed=1, name="drop")))
            loss = KerasLoss(_classes())
            data = DataSpec(train=samples, eval_dataset=samples)
            trainer = {"max_steps": 4, "eval_every": 2}
            config = settings((4, 2), trainer, save=2, seed=3, resume=start, schedule={})
            result = Trainer(model, loss, data, config=config, run_dir=tmp_path / folder).fit()
            states.append(model.state_dict())
            plain = model.keras(torch.stack([one[0] for one in samples]), training=False).detach()
            mean = nn.functional.cross_entropy(plain.double(), torch.stack([one[1] for one in samples]))
            assert result["eval_loss"] == pytest.approx(float(mean), rel=1e-5)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def Unreduced(**settings: Any) -> Any:  # noqa: N802  made where it is used: Keras is imported then
    """A value for each coordinate, where Keras's own have one for each sample."""

    class Made(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return (y_true - y_pred).square()

    return Made(**settings)


def Adds(**settings: Any) -> Any:  # noqa: N802  made where it is used: Keras is imported then
    """A loss of its own."""

    class Made(layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(x))
            return x

    return Made(**settings)


def Counts(**settings: Any) -> Any:  # noqa: N802  made where it is used: Keras is imported then
    """Its calls, in a variable."""

    class Made(layers.Layer):  # type: ignore[misc]
        def build(self, _: Any) -> None:
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            return x

    return Made(**settings)


def _compiled() -> Any:
    model = _model()
    model.compile(optimizer=keras.optimizers.Adam(clipnorm=1.0, use_ema=True), loss="mse")
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_compiled, "is compiled: its optimizer (with clipnorm, EMA or loss scale)"),
        (lambda: keras.Sequential([layers.Dense(3)]), "is not built"),
        (lambda: nn.Linear(2, 2), "is no keras.Model"),
        (
            lambda: _model(layers.Dense(5, dtype="bfloat16")),
            "dtype policy bfloat16, and variables are trained in float32",
        ),
        (lambda: _model(layers.Dense(5, dtype="float16")), "Build it with the policy mixed_float16"),
        (lambda: _model(layers.Dense(5, dtype="float64")), "dtype policy float64"),
        (
            lambda: _model(layers.Dense(5, dtype="mixed_float16"), layers.Dense(5, dtype="mixed_bfloat16")),
            "a run has one precision",
        ),
        (lambda: _model(layers.Dense(5, kernel_constraint="non_neg")), "have a constraint"),
        (lambda: _model(layers.Dense(5, activity_regularizer="l2")), "has an activity_regularizer"),
        (lambda: keras.Sequential([keras.Input((2, 3), batch_size=2), layers.GRU(2, stateful=True)]), "is stateful"),
    ],
)
def test_what_kerass_own_loop_would_do_beside_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        KerasModel(make())
    assert says in str(raised.value)


@pytest.mark.parametrize(("layer", "says"), [(Adds, "calls add_loss"), (Counts, "calls change in a forward")])
def test_what_only_a_forward_shows_is_refused_there(layer: Any, says: str) -> None:
    model = KerasModel(_model(layer(name="own")))
    with pytest.raises(MisuseError, match=says):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"engine": "fsdp2"}, "engine="), ({"engine": "deepspeed"}, "engine="), ({"compile": "model"}, "compile=")],
)
def test_engines_that_replace_weights_and_compile_are_refused(settings: dict[str, Any], says: str) -> None:
    if settings.get("engine") == "deepspeed":
        pytest.importorskip("deepspeed")
    context = EngineContext(
        engine=engine_config(settings.get("engine", "ddp")),
        precision=PrecisionConfig(),
        compile=CompileConfig.of(settings.get("compile", "none")),
        global_batch_size=4,
        micro_batch_size=2,
        world_size=1,
        device=torch.device("cpu"),
    )
    with pytest.raises(ConfigError, match=f"^{says}.*KerasModel"):
        prepare(KerasModel(_model()), context)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: "mse", "is no keras.losses.Loss"),
        (lambda: keras.losses.MeanSquaredError(reduction="sum"), "is no mean"),
        (lambda: keras.losses.MeanSquaredError(reduction=None), "is no mean"),
        (lambda: keras.losses.Dice(axis=1), "is a ratio of sums"),
        (lambda: keras.losses.Circle(gamma=80.0), "compares the samples"),
    ],
)
def test_losses_that_are_no_mean_over_samples_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KerasLoss(make())


def test_masks_and_weights_that_do_not_fit_are_refused() -> None:
    loss = KerasLoss(_classes())
    ids = torch.tensor([[1, 2, 0]])
    with pytest.raises(MisuseError, match=r"carries a mask.*KerasLoss\(loss, mask=lambda ids: ids != 0\)"):
        loss(KerasModel(_masked()), (ids, ids))
    with pytest.raises(
        MisuseError, match="mask= leaves 1 values of a micro-batch, and the mask of the model's output 2"
    ):
        KerasLoss(_classes(), mask=lambda ids: ids > 1)(KerasModel(_masked()), (ids, ids))
    with pytest.raises(MisuseError, match="1 entries of a mask for 3 loss values"):
        KerasLoss(_classes(), mask=lambda ids: ids[:, 0]).count((ids, ids))
    with pytest.raises(MisuseError, match="2 weights for 3 loss values"):
        loss.count((ids, ids, torch.ones(2)))
    with pytest.raises(MisuseError, match="collate it so"):
        loss.count({"x": ids})
    with pytest.raises(MisuseError, match="gives 6 loss values for targets of shape"):
        KerasLoss(Unreduced())(KerasModel(_model()), (torch.ones(2, 4), torch.ones(2, 3)))


def _masked() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(5, 4, mask_zero=True, name="ids")], name="model"
    )


@pytest.mark.parametrize("world", [1, 2])
def test_a_mask_that_is_said_beforehand_leaves_out_what_keras_does(world: int) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 5, (10, 3), generator=generator)
    ids[4], ids[:, 0] = 0, 1  # and a whole sample but for its first position
    labels = torch.randint(0, 4, (10, 3), generator=generator)
    samples = list(zip(ids, labels, strict=True))
    table = _masked().weights[0].value.detach().double().requires_grad_()
    for window in WINDOWS:
        kept = ids[window] != 0
        picked = -table[ids[window]].log_softmax(-1).gather(-1, labels[window].unsqueeze(-1)).squeeze(-1)
        (gradient,) = torch.autograd.grad(picked[kept].mean(), table)
        with torch.no_grad():
            table -= 0.1 * gradient
    models = [KerasModel(_masked()) for _ in range(world)]
    found = run_ranks(
        world,
        lambda one: _train(
            one, models[one.rank], KerasLoss(_classes(), mask=lambda ids: ids != 0), samples, DDPConfig()
        ),
    )
    bound = 3 * _error(_plain(_classes(), _masked(), samples), [table])
    assert bound < 1e-6
    for weights in found:
        assert isinstance(weights, dict), weights
        assert _error(weights.values(), [table]) < bound


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")  # 16 bits are slow on a CPU
def test_a_mixed_policy_is_the_runs_precision_and_rounds_as_keras_does(policy: str, world: int) -> None:
    """Micro-batch by micro-batch the forward is Keras's own, bit by bit; gradients and weights are in float32."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        whole = partial(layers.Dense, 5, "tanh", dtype="float32", name="whole", kernel_initializer="ones")
        made = [_model(whole()) for _ in range(world + 1)]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    plain, *others = made
    samples, models = _samples(classes=True, weighted=False), [KerasModel(one) for one in others]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which rounds nothing more
        outputs = models[0](torch.ones(2, 4))
    assert torch.equal(outputs, plain(torch.ones(2, 4), training=True))
    assert outputs.dtype == torch.bfloat16 if policy == "mixed_bfloat16" else torch.float16
    precision = PrecisionConfig(scaler=ScalerConfig(static_scale=2.0**10))
    settings = {"precision": precision, "nonfinite": "stop"}
    found = run_ranks(
        world, lambda one: _train(one, models[one.rank], KerasLoss(_classes()), samples, DDPConfig(), **settings)
    )
    for window in WINDOWS:
        parts = [slice(i, min(i + 2, window.stop)) for i in range(window.start, window.stop, 2)]
        for part in parts:
            x, y = _columns(samples, part)
            values = nn.functional.cross_entropy(plain(x, training=True).float(), y, reduction="sum")
            (values * 2.0**10 / (window.stop - window.start)).backward()
        with torch.no_grad():
            for variable in plain.trainable_weights:
                variable.value.sub_(0.1 * variable.value.grad / 2.0**10)
                variable.value.grad = None
    for weights in found:
        assert isinstance(weights, dict), weights
        assert all(value.dtype == torch.float32 for value in weights.values())
        kept = [variable.value.detach() for variable in plain.trainable_weights]
        # On two ranks micro-batches are cut elsewhere, and 16 bits round their rows' gradients otherwise.
        bound = 1e-6 if world == 1 else 4e-3
        assert _error(weights.values(), [one.double() for one in kept]) < bound


def test_a_stated_precision_is_the_policys_or_refused(gloo_world: World) -> None:
    model = KerasModel(_model(layers.Dense(5, dtype="mixed_bfloat16")))
    acc = over_sgd(model, 0.1, (7, 2), count=len, world=gloo_world)
    assert acc.engine._policy.name == "bf16"
    acc.close()
    run = Trainer(model, KerasLoss(_classes()), _samples(classes=True, weighted=False), config=settings((7, 2), {}))
    assert run._components.config.precision.name == run._components.record["precision"]["name"] == "bf16"
    with pytest.raises(
        ConfigError, match=r"precision=fp16: and KerasModel rounds to bf16 by itself\. Use precision=bf16"
    ):
        over_sgd(model, 0.1, (7, 2), count=len, world=gloo_world, precision="fp16")


def test_trained_batch_normalization_warns_and_has_running_statistics(gloo_world: World) -> None:
    samples = _samples(classes=True, weighted=False)
    norm = layers.BatchNormalization(momentum=0.5, name="norm")
    plain, model = _model(norm), KerasModel(_model(layers.BatchNormalization(momentum=0.5, name="norm")))
    with pytest.warns(BatchStatisticsWarning, match="model/norm"):
        acc = over_sgd(model, 0.1, (8, 4), count=KerasLoss(_classes()).count, world=gloo_world)
    acc.close()
    _plain(_classes(), plain, samples, [slice(0, 5), slice(5, 10)])
    acc = over_sgd(model, 0.1, (5, 5), count=KerasLoss(_classes()).count, world=gloo_world)
    for window in acc.windows(DataSpec(train=samples, shuffle=False)):
        for micro in window:
            with acc.accumulate():
                acc.backward(KerasLoss(_classes())(acc.model, micro.batch))
    found = model.state_dict()
    for variable in plain.weights:
        torch.testing.assert_close(found[variable.path], variable.value.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(found["model/norm/moving_mean"], torch.zeros(5))


def test_sequences_count_every_position() -> None:
    loss = KerasLoss(_classes())
    classes, squares = torch.zeros(2, 5).long(), KerasLoss(keras.losses.MeanSquaredError())
    assert loss.count((None, classes)) == loss.count((None, classes.unsqueeze(-1))) == 10
    assert squares.count((None, torch.zeros(2, 5, 3))) == 10
    assert squares.count((None, torch.zeros(2))) == 2


def test_they_have_the_names_of_their_rooms() -> None:
    from distaccum.losses.keras import KerasLoss as Loss  # noqa: PLC0415
    from distaccum.models.keras import KerasModel as Model  # noqa: PLC0415

    assert (Loss, Model) == (KerasLoss, KerasModel)
