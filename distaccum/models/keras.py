"""A Keras 3 model on the torch backend as a module that every part of distaccum can train.

Keras keeps its weights in variables of its own, its random numbers in seed generators, and its extra losses beside the
forward. Here the variables are parameters and buffers of a module; random numbers are those of the micro-batch,
whichever rank computes it; and what its own loop would add to the gradient is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from distaccum.errors import ConfigError, MisuseError, shorten

_SEED = "seed_generator_state"
_POLICY = "float32"
_POLICIES = {"mixed_bfloat16": "bf16", "bfloat16": "bf16", "mixed_float16": "fp16", "float16": "fp16"}


class KerasModel(nn.Module):
    """A Keras model as a module: trainable variables are its parameters, all other weights its buffers.

    They have the paths of the variables as names, and share their memory: after a training the Keras model has the
    trained weights. A forward is in Keras's training mode where the module is.

    Args:
        model: built, on the torch backend; not compiled.

    Raises:
        ConfigError: the backend is another, or the model is none of Keras, not built, compiled, in a policy that
            rounds by itself, quantized, or has layers that do more in training than to compute an output.
    """

    computes_with_variables = True
    """Not with the module's own tensors: refused where an engine puts others in their place, and by ``compile``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        keras = _import_keras(model)
        _check(keras, model)
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
        before = [buffer._version for buffer in self._buffers.values() if buffer is not None]
        with self._given(), _on(self._device):
            if not self.training:
                return model(*inputs, training=False, **named)
            self._seed()
            output = model(*inputs, training=True, **named)
            if model.losses:
                problem = f"{model.name}: a layer calls add_loss, and what it adds is not divided by the window's count"
                raise MisuseError(f"{problem}: compute it in the loss, from an output of the model")
        held = [(name, buffer) for name, buffer in self._buffers.items() if buffer is not None]
        changed = [name for (name, buffer), was in zip(held, before, strict=True) if buffer._version != was]
        if changed:
            problem = (
                f"{model.name}: {shorten(changed)} change in a forward of the training, by the micro-batch of a rank"
            )
            raise MisuseError(f"{problem}: freeze the layer (trainable=False), or use one without")
        return output

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
    layers = [model, *model._flatten_layers(include_self=False)]
    for layer in layers:
        _check_layer(layer)
    regularized = [one.path for one in model.trainable_weights if getattr(one, "regularizer", None) is not None]
    if regularized:
        problem = f"{shorten(regularized)} have a regularizer, which is not divided by the window's count"
        remedy = "Leave it out, and use optim.optimizer.weight_decay; or compute it in a loss of your own"
        raise ConfigError("model", model.name, problem, remedy)
    constrained = [one.path for one in model.trainable_weights if getattr(one, "constraint", None) is not None]
    if constrained:
        problem = f"{shorten(constrained)} have a constraint, which Keras's optimizers apply and torch's do not"
        raise ConfigError("model", model.name, problem, "Leave it out")


def _check_layer(layer: Any) -> None:
    kind = type(layer).__name__
    if kind == "InputLayer":  # computes nothing
        return
    policy = layer.dtype_policy
    if (policy.name, policy.compute_dtype, policy.variable_dtype) != (_POLICY, _POLICY, _POLICY):
        means = f", and use precision={_POLICIES[policy.name]}" if policy.name in _POLICIES else ""
        problem = f"has the dtype policy {policy.name}, by which Keras rounds by itself"  # float64: products in float32
        raise ConfigError("model", layer.name, problem, f"Build it with the policy float32{means}")
    if getattr(layer, "activity_regularizer", None) is not None:
        problem = f"({kind}) has an activity_regularizer, which is a mean over the micro-batch of a rank"
        raise ConfigError("model", layer.name, problem, "Leave it out, or compute it in a loss of your own")
    if kind == "BatchNormalization" and layer.trainable:
        problem = "(BatchNormalization) takes its statistics from the micro-batch of a rank"
        remedy = "Use GroupNormalization or LayerNormalization, or freeze it: layer.trainable = False"
        raise ConfigError("model", layer.name, problem, remedy)
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
