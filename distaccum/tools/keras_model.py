"""A Keras 3 model on the torch backend as a module that every part of distaccum can train.

Keras keeps its weights in variables of its own, its random numbers in seed generators, and its extra losses beside the
forward. Here the variables are parameters and buffers of a module; random numbers are those of the micro-batch,
whichever rank computes it; and what its own loop would add to the gradient is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError, shorten

_SEED = "seed_generator_state"
_BATCH_NORM = "BatchNormalization"
_FLOAT32 = "float32"
_MIXED = {"mixed_bfloat16": "bf16", "mixed_float16": "fp16"}
_WHOLE = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


class KerasModel(nn.Module):
    """A Keras model as a module: trainable variables are its parameters, all other weights its buffers.

    They have the paths of the variables as names, and share their memory: after a training the Keras model has the
    trained weights. A forward is in Keras's training mode where the module is. Of a model in the policy
    ``mixed_bfloat16`` or ``mixed_float16`` Keras itself rounds what its layers compute; the run's precision is that.

    Args:
        model: built, on the torch backend; not compiled.

    Raises:
        ConfigError: the backend is another, or the model is none of Keras, not built, compiled, in a policy that
            rounds variables, quantized, or has layers that do more in training than to compute an output.
    """

    computes_with_variables = True
    """Not with the module's own tensors: refused where an engine puts others in their place, and by ``compile``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        keras = _import_keras(model)
        _check(keras, model)
        self.rounds_to = _rounds_to(model)
        """``bf16`` or ``fp16``, where layers round by themselves; None: as the run's precision says."""
        self.masked: Tensor | None = None
        """Keras's mask of the last output."""
        self._keras = [model]  # in a list: a Keras model is a module, whose parameters would be there twice
        self._variables: list[tuple[str, Any]] = []
        names = _names([*model.trainable_weights, *model.non_trainable_weights])
        for variable in model.trainable_weights:
            name = names[id(variable)]
            self.register_parameter(name, variable.value)
            self._variables.append((name, variable))
        for variable in model.non_trainable_weights:
            name = names[id(variable)]
            self.register_buffer(name, variable.value.detach())
            self._variables.append((name, variable))
        norms = [one for one in _layers(model) if type(one).__name__ == _BATCH_NORM and one.trainable]
        self._norms = [one.path for one in norms]
        self._running = {names[id(variable)] for one in norms for variable in one.non_trainable_weights}
        weights = {id(variable) for variable in model.weights}
        self._seeds = [one for one in model.variables if id(one) not in weights and one.name == _SEED]

    @property
    def keras(self) -> Any:
        """The Keras model, with the weights of now: to save, for example."""
        self._give()
        return self._keras[0]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output of the Keras model.

        Raises:
            MisuseError: in training a layer adds a loss of its own, or changes a variable that is not trained.
        """
        (model,) = self._keras
        before = self._versions()
        with self._given(), _on(self._device), self._rounding():
            if self.training:
                self._seed()
            output = model(*inputs, training=self.training, **named)
            self.masked = getattr(output, "_keras_mask", None)
            if not self.training:
                return output
            if any(layer._get_own_losses() for layer in _layers(model)):
                problem = f"{model.name}: a layer calls add_loss, and what it adds is not divided by the window's count"
                raise MisuseError(f"{problem}: compute it in the loss, from an output of the model")
        if changed := [name for name, version in self._versions().items() if version != before[name]]:
            problem = (
                f"{model.name}: {shorten(changed)} change in a forward of the training, by the micro-batch of a rank"
            )
            raise MisuseError(f"{problem}: freeze the layer (trainable=False), or use one without")
        return output

    def penalty(self) -> Tensor | None:
        """The sum of the regularizers, 0-dim, as of the last forward's weights; None: there is none."""
        (model,) = self._keras
        with self._given(), _on(self._device), _without_autocast(self._device):
            found = model._get_regularization_losses()
        return sum(found[1:], found[0]) if found else None

    @property
    def batch_norms(self) -> list[str]:
        """The layers that normalise over a micro-batch."""
        return self._norms if self.training else []

    def _versions(self) -> dict[str, int]:
        """Of the buffers that a forward leaves alone: all but running statistics."""
        held = self._buffers.items()
        return {name: one._version for name, one in held if one is not None and name not in self._running}

    def _rounding(self) -> AbstractContextManager[object]:
        """Where layers round by themselves autocast would round others."""
        return nullcontext() if self.rounds_to is None else _without_autocast(self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device  # type: ignore[union-attr]

    def _give(self) -> None:
        """Gives the variables the module's tensors: an engine may have moved them."""
        for name, variable in self._variables:
            tensor = getattr(self, name)
            if variable._value is not tensor:
                variable._value = tensor

    @contextmanager
    def _given(self) -> Iterator[None]:
        """Within the block the variables have the tensors that the module has now, which may be given for one call."""
        before = [variable._value for _, variable in self._variables]
        self._give()
        try:
            yield
        finally:
            for (_, variable), value in zip(self._variables, before, strict=True):
                variable._value = value

    def _apply(self, fn: Any, recurse: bool = True) -> KerasModel:
        """Moves the weights, and the variables with them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._give()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModel:
        """A copy has tensors of its own, and gives them to the same Keras model for each of its forwards."""
        for shared in (self._keras, self._seeds, *(variable for _, variable in self._variables)):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied

    def _seed(self) -> None:
        """Begins the layers' own random numbers anew, with torch's, which are those of the micro-batch."""
        with torch.no_grad():
            for state in self._seeds:
                drawn = torch.randint(0, 2**31 - 1, (2,))
                drawn[1] = 0
                state.assign(drawn.to(state.value.dtype))


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, enabled=False)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Within the block Keras makes its tensors on ``device``."""
    import keras  # noqa: PLC0415  it is there, as its model is

    name = "cpu" if device.type == "cpu" else f"gpu:{device.index or 0}" if device.type == "cuda" else device.type
    with keras.device(name):
        yield


def _import_keras(model: Any) -> Any:
    try:
        import keras  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ConfigError("model", None, "keras is not installed", "pip install 'distaccum[keras]'") from error
    if (found := keras.backend.backend()) != "torch":
        remedy = "Set KERAS_BACKEND=torch before Keras is imported"
        raise ConfigError("KERAS_BACKEND", found, "computes without torch", remedy)
    if not isinstance(model, keras.Model) or not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "is no keras.Model", "Give an object of keras.Model")
    return keras


def _check(keras: Any, model: Any) -> None:
    if not model.built:
        raise ConfigError("model", model.name, "is not built, so that it has no weights", "Call model.build(shape)")
    if model.compiled:
        problem = "is compiled: its optimizer (with clipnorm, EMA or loss scale), loss and metrics would not be used"
        remedy = "Leave compile() out; the loss is KerasLoss, the optimizer and what it clips are optim's"
        raise ConfigError("model", model.name, problem, remedy)
    if any(not hasattr(variable, "_value") for variable in model.weights):
        problem = f"keras {keras.__version__} keeps a variable's tensor elsewhere than in _value"
        raise ConfigError("model", model.name, problem, "Use keras 3.8 to 3.15")
    for layer in _layers(model):
        _check_layer(layer)
    constrained = [one.path for one in model.trainable_weights if getattr(one, "constraint", None) is not None]
    if constrained:
        problem = f"{shorten(constrained)} have a constraint, which Keras's optimizers apply and torch's do not"
        raise ConfigError("model", model.name, problem, "Leave it out")


def _layers(model: Any) -> list[Any]:
    return [model, *model._flatten_layers(include_self=False)]


def _rounds_to(model: Any) -> str | None:
    """What the precision of the policies is called here; None: all are float32."""
    found = {_MIXED[one] for layer in _layers(model) if (one := layer.dtype_policy.name) in _MIXED}
    if len(found) > 1:
        problem = "has layers in mixed_bfloat16 and in mixed_float16, and a run has one precision"
        raise ConfigError("model", model.name, problem, "Use one of the two, and float32 for some layers")
    return next(iter(found), None)


def _check_layer(layer: Any) -> None:
    kind = type(layer).__name__
    if kind == "InputLayer":  # computes nothing
        return
    policy = layer.dtype_policy
    if policy.name not in (_FLOAT32, *_MIXED) or policy.variable_dtype != _FLOAT32:
        problem = f"has the dtype policy {policy.name}, and variables are trained in float32"
        if policy.name == "float64":
            problem = "has the dtype policy float64, and a run computes in float32 at most"
        remedy = f"Build it with the policy {_WHOLE.get(policy.name, _FLOAT32)}"
        raise ConfigError("model", layer.name, problem, remedy)
    if getattr(layer, "activity_regularizer", None) is not None:
        problem = f"({kind}) has an activity_regularizer, which is a mean over the micro-batch of a rank"
        raise ConfigError("model", layer.name, problem, "Leave it out, or compute it in a loss of your own")
    if getattr(layer, "stateful", False):
        problem = f"({kind}) is stateful: a micro-batch would go on with the state of the one before"
        raise ConfigError("model", layer.name, problem, "Build it with stateful=False")


def _names(variables: list[Any]) -> dict[int, str]:
    """The variables' paths, by identity, without dots, which no name of torch may have.

    Raises:
        ConfigError: two variables have one.
    """
    names = {id(variable): variable.path.replace(".", "_") for variable in variables}
    twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
    if twice:
        problem = f"two weights have the path {shorten(twice)}, by which checkpoints know them"
        raise ConfigError("model", twice[0], problem, "Give the layers names that differ")
    return names
