"""Settings: their types, names, defaults and groups; what cannot be is named by its key before anything starts."""

import dataclasses
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from distaccum.config.batch import BatchConfig
from distaccum.config.checks import require_fraction, seconds_of
from distaccum.config.compile import COMPILED, CompileConfig
from distaccum.config.engine import ENGINES, DDPConfig, DeepSpeedConfig, FSDP2Config, Zero1Config, engine_config
from distaccum.config.instantiate import build
from distaccum.config.precision import ALIASES, PRECISIONS, PrecisionConfig, canonical
from distaccum.config.schema import RunConfig, conf_dir, plain
from distaccum.errors import ConfigError
from tests.support.commands import TRAIN, run


def test_settings_are_typed_and_frozen_and_have_defaults() -> None:
    assert RunConfig.from_dict({}) == RunConfig()
    config = RunConfig.from_dict({"batch": {"global_size": 48}, "optim": {"lr": 1, "clip_norm": None}})
    assert config.batch.global_size == 48
    assert isinstance(config.optim.lr, float)
    assert config.optim.clip_norm is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch.global_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("batch", "micro_size"),
    [
        ({}, 8),
        ({"global_size": 4}, 4),
        ({"global_size": 64}, 8),
        ({"global_size": None, "tokens": 100}, 8),
        ({"global_size": 4, "micro_size": None}, 4),
        ({"global_size": 4, "micro_size": "auto"}, "auto"),  # a rehearsal finds it
        ({"global_size": 4, "micro_size": 3}, 3),
        ({"global_size": 4, "micro_size": 8}, 8),  # what is stated is refused by the plan, not changed
        ({"micro_size": "16"}, 16),  # as an environment variable gives it
    ],
)
def test_a_micro_batch_that_is_not_stated_is_never_more_than_the_global_batch(
    batch: dict[str, object], micro_size: int | str
) -> None:
    assert RunConfig.from_dict({"batch": batch}).batch.micro_size == micro_size


def test_an_engine_and_a_precision_may_be_given_by_name() -> None:
    config = RunConfig.from_dict({"engine": "ddp", "precision": "16-mixed"})
    assert (config.engine.name, config.precision.name) == ("ddp", "fp16")
    named: dict[str, Any] = {"engine": "zero1", "precision": "16-mixed", "compile": "blocks"}
    assert RunConfig(**named) == RunConfig.from_dict(named)
    assert RunConfig(**named).engine == Zero1Config()
    with pytest.raises(ConfigError, match="precision=fp4: no such choice"):
        RunConfig.from_dict({"precision": "fp4"})


@pytest.mark.parametrize("value", [torch.float32, torch.tensor(1.0), print, {1, 2}])
def test_a_value_that_is_not_plain_is_refused_by_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^schedule\.x=.*Give a number, a text, a list or a mapping"):
        RunConfig.from_dict({"schedule": {"_target_": "a.B", "x": value}})


def test_a_target_of_ones_own_has_none_of_the_defaults_arguments() -> None:
    config = RunConfig.from_dict(
        {
            "optim": {"optimizer": {"_target_": "torch.optim.SGD"}},
            "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        }
    )
    assert config.optim.optimizer == {"_target_": "torch.optim.SGD"}
    assert config.schedule == {"_target_": "distaccum.train.schedules.Constant"}
    config = RunConfig.from_dict({"optim": {"optimizer": {"fused": False}}, "schedule": {"warmup_steps": 5}})
    assert config.optim.optimizer == RunConfig().optim.optimizer | {"fused": False}
    cosine = RunConfig().with_schedule(own_optimizer=False).schedule
    for own in (True, False):
        assert config.with_schedule(own_optimizer=own).schedule == cosine | {"warmup_steps": 5}


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [
        ({"batch": {"size": 3}}, "batch.size", 3),
        ({"batch": {"global_size": "many"}}, "batch.global_size", "many"),
        ({"optim": {"clip_norm": -1}}, "optim.clip_norm", -1),
        ({"batch": {"tokens": "many"}}, "batch.tokens", "many"),
        ({"batch": {"micro_size": "many"}}, "batch.micro_size", "many"),
        ({"batch": {"group_by_length": "long"}}, "batch.group_by_length", "long"),
        ({"checkpoint": {"keep": -1}}, "checkpoint.keep", -1),
        ({"checkpoint": {"background": "sometimes"}}, "checkpoint.background", "sometimes"),
        ({"checkpoint": {"background": 1}}, "checkpoint.background", 1),
        ({"engine": {"bucket_cap_mb": 0}}, "engine.bucket_cap_mb", 0),
        ({"engine": "horovod"}, "engine", "horovod"),
        ({"engine": 3}, "engine", 3),
        ({"engine": {"name": "fsdp2", "sync": "never"}}, "engine.sync", "never"),
        ({"engine": {"name": "fsdp2", "gather_dtype": "bf16"}}, "engine.gather_dtype", "bf16"),
        ({"engine": {"name": "fsdp2", "activation_checkpoint": True}}, "engine.activation_checkpoint", "True"),
        ({"engine": {"name": "fsdp2", "replicas": 0}}, "engine.replicas", 0),
        ({"engine": {"name": "fsdp2", "stage": 3}}, "engine.stage", 3),
        ({"engine": {"name": "ddp", "sync": "every"}}, "engine.sync", "every"),
        ({"engine": {"name": "deepspeed", "stage": 4}}, "engine.stage", 4),
        ({"optim": {"clip_value": 0}}, "optim.clip_value", 0),
        ({"optim": {"optimizer": {"lr": 0.01}}}, "optim.optimizer.lr", 0.01),
    ],
)
def test_a_bad_value_is_named_with_its_key(node: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(node)
    assert (caught.value.key, caught.value.value) == (key, value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"growth_factor": float("inf")}, "growth_factor"),
        ({"growth_factor": float("nan")}, "growth_factor"),
        ({"backoff_factor": 0}, "backoff_factor"),
        ({"max_scale": float("inf")}, "max_scale"),
        ({"initial_scale_power": 65}, "initial_scale_power"),
        ({"initial_scale_power": -15}, "initial_scale_power"),
        ({"initial_scale_power": -1}, "initial_scale_power"),  # below min_scale
        ({"min_scale": 2.0**17}, "initial_scale_power"),
    ],
)
def test_a_scaler_that_cannot_work_is_named_with_its_key(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"precision": {"scaler": settings}})
    assert caught.value.key == f"precision.scaler.{named}"
    assert repr(caught.value.value) in (repr(settings.get(named, 16)), repr(float(settings.get(named, 16))))


def test_a_scale_starts_where_the_settings_say() -> None:
    assert RunConfig.from_dict({}).precision.scaler.initial_scale == 65536
    edges = {"initial_scale_power": 3, "min_scale": 8, "max_scale": 8}
    assert RunConfig.from_dict({"precision": {"scaler": edges}}).precision.scaler.initial_scale == 8
    static = {"static_scale": 0.5}  # the bounds are those of a scale that moves
    assert RunConfig.from_dict({"precision": {"scaler": static}}).precision.scaler.initial_scale == 0.5


NAMES = {
    "fp32": "fp32",
    "no": "fp32",
    "float32": "fp32",
    "32-true": "fp32",
    "tf32": "tf32",
    "fp16": "fp16",
    "16-mixed": "fp16",
    "float16": "fp16",
    "mixed_float16": "fp16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "mixed_bfloat16": "bf16",
}


@pytest.mark.parametrize(("alias", "name"), [*NAMES.items(), ("32", "fp32")])
def test_what_others_call_a_precision_is_the_same_one(alias: str, name: str) -> None:
    assert RunConfig.from_dict({"precision": {"name": alias}}).precision == PrecisionConfig(name=name)
    assert PrecisionConfig.of(alias) == PrecisionConfig(name=name)


@pytest.mark.slow
def test_every_precision_of_the_yaml_groups_composes_to_the_policy_that_it_names() -> None:
    assert {path.stem for path in (conf_dir() / "precision").glob("*.yaml")} == {*PRECISIONS}
    with initialize_config_dir(str(conf_dir()), version_base=None):
        for name in PRECISIONS:
            composed = compose("config", [f"precision={name}", "precision.keep_fp32=[head]"]).precision
            config = RunConfig.from_dict({"precision": OmegaConf.to_container(composed)}).precision
            assert config == PrecisionConfig(name=name, keep_fp32=["head"]), name


def _takes(size: int, rate: float = 0.5, name: str = "") -> tuple[int, float, str]:
    if size > 5:
        raise ValueError("size above 5")
    return size, rate, name


TARGET = f"{__name__}._takes"


def test_a_target_is_called_with_its_node() -> None:
    assert build("part", {"_target_": TARGET, "size": 2, "rate": 1}) == (2, 1, "")
    assert build("part", {"_target_": TARGET, "size": 2}, name="extra") == (2, 0.5, "extra")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, r"part\._target_: is missing"),
        ({"_target_": "no.such"}, r"part\._target_=no\.such: cannot be imported"),
        ({"_target_": TARGET, "size": "2"}, r"part\.size=2: not of type int"),
        ({"_target_": TARGET, "size": True}, r"part\.size=True: not of type int"),
        ({"_target_": TARGET, "size": 1, "rat": 1}, r"part\.rat=1: no such argument; did you mean rate\?"),
        ({"_target_": TARGET, "size": 6}, r"ValueError: size above 5"),
        ({"_target_": TARGET}, r"missing 1 required positional argument: 'size'"),
    ],
)
def test_a_target_that_cannot_be_called_is_explained(node: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("part", node)


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("batch", "samples"),
        ("engine", "ddp"),
        ("engine", "zero1"),
        ("engine", "fsdp2"),
        ("engine", "deepspeed"),
        ("precision", "fp32"),
        ("trainer", "default"),
        ("callbacks", "none"),
        ("checkpoint", "default"),
        ("metrics", "wandb"),
        ("optim", "adamw"),
    ],
)
def test_the_schema_and_the_yaml_state_the_same_defaults(group: str, file: str) -> None:
    node = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{file}.yaml"))
    defaults = RunConfig.from_dict({"engine": file}) if group == "engine" else RunConfig()
    assert getattr(RunConfig.from_dict({group: node}), group) == getattr(defaults, group)


@pytest.mark.parametrize(
    ("stated", "on"),
    [
        ("[wandb,tensorboard]", {"wandb", "tensorboard"}),
        ("[mlflow,wandb]", {"mlflow", "wandb"}),
        ("[jsonl,tensorboard]", {"tensorboard"}),
        ("jsonl", set()),
        ("wandb", {"wandb"}),
    ],
)
def test_trackers_add_up(stated: str, on: set[str]) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        made = RunConfig.from_dict(plain(compose("config", [f"metrics={stated}"]))).metrics
    found = {"wandb": made.wandb.mode is None, "tensorboard": made.tensorboard.enabled, "mlflow": made.mlflow.enabled}
    assert {name for name, enabled in found.items() if enabled} == on


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, float("nan")])
def test_a_fraction_is_between_0_and_1(value: float) -> None:
    require_fraction("data.held_out", 0.1)
    require_fraction("data.held_out", 0.999)
    with pytest.raises(ConfigError, match=r"data\.held_out=.*: not between 0 and 1\. Give"):
        require_fraction("data.held_out", value)


@pytest.mark.parametrize(
    ("config", "name"), [("config", "train"), ("plan", "plan"), ("bench", "bench"), ("link", "link")]
)
def test_the_job_of_a_command_has_the_commands_name(config: str, name: str) -> None:
    """Slurm shows it; by default it is the name of whatever file calls Hydra."""
    OmegaConf.register_new_resolver("distaccum.run_name", lambda *_: "run", replace=True)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert compose(config, return_hydra_config=True).hydra.job.name == name


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"name": "blocked"}, "compile"),
        ({"name": "blocks", "blocks": "blocks.*"}, "compile.blocks"),
        ({"name": "blocks", "blocks": [1]}, "compile.blocks"),
        ({"name": "model", "blocks": ["blocks.*"]}, "compile.blocks"),
        ({"blocks": ["blocks.*"]}, "compile.blocks"),
        ({"name": "model", "mode": "reduce-overhead"}, "compile.mode"),
        ({"name": "model", "mode": "max-autotune"}, "compile.mode"),
        ({"name": "model", "mode": "fast"}, "compile.mode"),
        ({"name": "model", "mode": "max-autotune-no-cudagraphs", "backend": "aot_eager"}, "compile.mode"),
        ({"name": "model", "dynamic": "maybe"}, "compile.dynamic"),
        ({"name": "model", "dynamic": 1}, "compile.dynamic"),
        ({"name": "model", "dynamic": None}, "compile.dynamic"),
        ({"name": "model", "fullgraph": 1}, "compile.fullgraph"),
        ({"name": "model", "loss": "auto"}, "compile.loss"),
        ({"name": "model", "graphs": 1}, "compile.graphs"),
        ({"graphs": True}, "compile.graphs"),
        ({"name": "model", "graphs": True, "backend": "aot_eager"}, "compile.graphs"),
        ({"name": "model", "graphs": True, "dynamic": "auto"}, "compile.graphs"),
        ({"name": "model", "graphs": True, "mode": "reduce-overhead"}, "compile.mode"),
    ],
)
def test_a_setting_that_cannot_be_is_named(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig(**given)
    assert caught.value.key == key


def test_it_may_be_given_by_name() -> None:
    assert CompileConfig.of("blocks") == CompileConfig(name="blocks")
    assert RunConfig.from_dict({"compile": "model"}).compile == CompileConfig(name="model")
    assert not RunConfig().compile.compiles
    with pytest.raises(ConfigError, match="neither a name nor settings but bool"):
        CompileConfig.of(True)  # type: ignore[arg-type]


def test_the_groups_compose_to_what_they_name() -> None:
    assert {path.stem for path in (conf_dir() / "compile").glob("*.yaml")} == {*COMPILED}
    for name in COMPILED:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", [f"compile={name}", "compile.dynamic=auto"]).compile
        node: Any = OmegaConf.to_container(composed)
        assert RunConfig.from_dict({"compile": node}).compile == CompileConfig(name=name, dynamic="auto")


@pytest.mark.parametrize(
    ("batch", "limits", "size", "evaluated"),
    [
        ({}, True, 8, 8),
        ({"micro_tokens": 100}, False, None, 8),
        ({"micro_tokens": 100, "micro_size": "auto"}, False, None, 8),
        ({"micro_tokens": 100, "global_size": 4}, False, None, 4),
        ({"micro_tokens": 100, "micro_size": 3}, True, 3, 3),
        ({"micro_tokens": 100, "micro_size": "3"}, True, 3, 3),
        ({"micro_tokens": "100", "global_size": None, "tokens": 200}, False, None, 8),  # of ${oc.env:...}
    ],
)
def test_samples_are_limited_too_where_their_number_is_stated(
    batch: dict[str, Any], limits: bool, size: int | None, evaluated: int
) -> None:
    made = RunConfig.from_dict({"batch": batch}).batch
    for found in (made, replace(made), RunConfig.from_dict({"batch": asdict(made)}).batch):
        assert (found.limits_samples, found.micro_size, found.first_micro_size) == (limits, size, evaluated)
        assert found.micro_tokens == (100 if batch else None)
        assert not found.rehearses


@pytest.mark.parametrize("size", [None, "auto", 3])
def test_it_is_rehearsed(size: int | str | None) -> None:
    made = RunConfig.from_dict({"batch": {"micro_tokens": "auto", "micro_size": size}}).batch
    for found in (made, replace(made), RunConfig.from_dict({"batch": asdict(made)}).batch):
        assert found.rehearses
        assert (found.micro_tokens, found.micro_size) == ("auto", 3 if size == 3 else None)
        assert found.first_micro_size == (3 if size == 3 else 8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"micro_tokens": 0}, "=0: must be at least 1"),
        ({"micro_tokens": "many"}, "=many: not of type int"),
        ({"micro_tokens": True}, "=True: not of type int"),
        ({"micro_tokens": 9.5}, "=9.5: not of type int"),
        ({"micro_tokens": 9, "packing": "documents"}, "=9: and batch.packing=documents packs a number of samples"),
        ({"micro_tokens": 9, "pad_rows": True}, "=9: and batch.pad_rows=true fills micro-batches up"),
    ],
)
def test_what_it_does_not_take(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^batch\.micro_tokens{message}"):
        BatchConfig(**batch)
    with pytest.raises(ConfigError, match=r"^batch\.micro_size=many: not of type int"):
        BatchConfig(micro_tokens=9, micro_size="many")


REPRODUCIBLE: dict[str, Any] = {"numerics": "reproducible"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch": {"micro_size": 1.5}}, "batch.micro_size=1.5: not of type int. Give a value of the type"),
        ({"precision": {"name": "fp4"}}, "precision=fp4: no such choice. Use one of fp32, tf32"),
        ({"precision": {"reduce_dtype": "fp64"}}, "precision.reduce_dtype=fp64: no such choice. Use one of fp32, bf16"),
        ({"precision": {"underflow_every": -1}}, "every=-1: must be at least 0. Use a whole number from 0, or 0 to sa"),
        ({"precision": {"scaler": {"growth_factor": 1}}}, "growth_factor=1.0: must be above 1. Use a value such as 2"),
        ({"precision": {"scaler": {"backoff_factor": 1}}}, "must lie between 0 and 1. Use a value such as 0.5"),
        ({"precision": {"scaler": {"growth_interval": 0}}}, "must be at least 1. Use a whole number from 1"),
        ({"precision": {"scaler": {"hysteresis": 0}}}, "scaler.hysteresis=0: must be at least 1. Use a whole number"),
        ({"precision": {"scaler": {"min_scale": 0}}}, "scaler.min_scale=0.0: must be a positive finite number"),
        ({"precision": {"scaler": {"static_scale": -1}}}, "static_scale=-1.0: must be a positive finite number. Use a"),
        ({"precision": {"scaler": {"initial_scale_power": 25}}}, "1 .. max_scale=1.67772e+07. Move one of the three"),
        ({"trainer": {"nonfinite": "ignore"}}, "trainer.nonfinite=ignore: no such choice. Use one of stop, skip"),
        ({"trainer": {"max_skips": 0}}, "trainer.max_skips=0: must be at least 1. Use a whole number from 1"),
        ({"trainer": {"max_time": "soon"}}, "trainer.max_time=soon: not a positive length of time. Write HH:MM:SS"),
        ({"optim": {"clip_value": 0.5}}, "optim.clip_value=0.5: and optim.clip_norm=1.0 too. Set one of them to null"),
        ({"optim": {"fused": "maybe"}}, "optim.fused=maybe: no such choice. Use one of auto, True, False"),
        ({"trainer": {"on_spike": "stop"}}, "trainer.on_spike=stop: no such choice"),
        ({"trainer": {"spike_zscore": 0}}, "trainer.spike_zscore=0"),
        ({"trainer": {"spike_window": 1}}, "trainer.spike_window=1: must be at least 2"),
        ({"trainer": {"on_spike": "rollback"}, "checkpoint": {"every": 0}}, "checkpoint.every=0 saves nothing to roll"),
        ({"checkpoint": {"every_minutes": 0}}, "checkpoint.every_minutes=0"),
        ({"checkpoint": {"every_minutes": "soon"}}, "checkpoint.every_minutes"),
        ({"trainer": {"prefetch_windows": -1}}, "trainer.prefetch_windows=-1: must be at least 0"),
        ({"trainer": {"loader": {"prefetch_factor": 0}}}, "trainer.loader.prefetch_factor=0: must be at least 1"),
        ({"trainer": {"loader": {"timeout": 0}}}, "trainer.loader.timeout=0"),
        ({"trainer": {"loader": {"multiprocessing_context": "thread"}}}, "no such choice. Use one of fork"),
        ({"trainer": {"loader": {"pin_memory": "no way"}}}, "trainer.loader.pin_memory"),
        ({"trainer": {"loader": {"prefetch": 2}}}, "trainer.loader.prefetch"),
        ({"trainer": {"threads": 0}}, "trainer.threads=0"),
        ({"batch": {"unit_size": 4}}, "batch.unit_size=4: and numerics=fast knows no units"),
        ({"numerics": "exact"}, "numerics=exact: no such choice"),
        (REPRODUCIBLE | {"batch": {"micro_size": "auto"}}, "batch.micro_size=auto: is found by rate"),
        (REPRODUCIBLE | {"batch": {"micro_tokens": "auto"}}, "batch.micro_tokens=auto: is found by"),
        (REPRODUCIBLE | {"batch": {"unit_size": 4, "micro_size": 8}}, "and batch.micro_size=8"),
        (REPRODUCIBLE | {"batch": {"unit_size": 0}}, "batch.unit_size=0"),
        ({"batch": {"virtual_ranks": 0}}, "batch.virtual_ranks=0"),
        ({"metrics": {"peak_tflops": 0}}, "metrics.peak_tflops=0.0: must be a positive finite number"),
        ({"deterministic": "often"}, "deterministic"),
        ({"checkpoint": {"every": True}}, "checkpoint.every=True: is no interval"),
        ({"trainer": {"eval_every": "epochs"}}, "trainer.eval_every=epochs: is no interval. Give a whole number"),
        ({"trainer": {"eval_every": 1e3}}, "trainer.eval_every=1000.0: is no interval. Write 1000"),
        ({"trainer": {"max_steps": 1e3}}, "trainer.max_steps=1000.0: not of type int or None. Write 1000"),
        ({"callbacks": {"_target_": "own.Stop", "loss": 1}}, "callbacks._target_=own.Stop: has no name. Put a name"),
        ({"callbacks": {"mine": "own.Stop"}}, "callbacks.mine=own.Stop: names no class. Write callbacks.mine._target_"),
        ({"schedule": "cosin"}, "schedule=cosin: no such schedule; did you mean cosine"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(settings)
    assert said in str(error.value)


def test_the_clock_alone_is_enough_to_roll_back_and_to_keep_the_best() -> None:
    settings = {"every": 0, "every_minutes": 30, "best": "eval_loss"}
    config = RunConfig.from_dict({"trainer": {"on_spike": "rollback"}, "checkpoint": settings})
    assert config.checkpoint.saves
    assert config.checkpoint.every_minutes == 30
    for off in ("off", False):  # which YAML makes of it
        assert RunConfig.from_dict({"trainer": {"on_spike": off}}).trainer.on_spike == "off"


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Any) -> None:
    finished = run("--cfg", "job", "trainer.on_spike=off", "checkpoint.every_minutes=15", script=TRAIN, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "every_minutes: 15" in finished.stdout
    assert run("--check", "trainer.on_spike=off", script=TRAIN, cwd=tmp_path).returncode == 0


def test_the_yaml_files_list_the_defaults_of_the_dataclasses() -> None:
    """The dataclass has a default; its YAML is where people read it."""
    listed = {
        path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (conf_dir() / "engine").glob("*.yaml")
    }
    assert listed == {name: asdict(kind()) for name, kind in ENGINES.items()}
    assert OmegaConf.to_container(OmegaConf.load(conf_dir() / "precision" / "fp32.yaml")) == asdict(PrecisionConfig())
    for path in (conf_dir() / "batch").glob("*.yaml"):
        assert {*OmegaConf.load(path)} == {*asdict(BatchConfig())}, path


def test_an_alias_names_a_precision_and_hides_none() -> None:
    assert {canonical(alias) for alias in ALIASES} <= {*PRECISIONS}
    assert [canonical(name) for name in PRECISIONS] == [*PRECISIONS]
    assert canonical("fp4") == "fp4"


@pytest.mark.parametrize("engine", [None, FSDP2Config, {"name": "fsdp2"}, 3, "horovod"])
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"^engine.*Use one of ddp, zero1, fsdp2, deepspeed"):
        engine_config(engine)
    if not isinstance(engine, dict):
        with pytest.raises(ConfigError, match=r"^engine.*Use one of ddp, zero1, fsdp2, deepspeed"):
            RunConfig.from_dict({"engine": engine})


@pytest.mark.parametrize("engine", [FSDP2Config(sync="every"), Zero1Config(), DeepSpeedConfig(stage=3, json={"a": 1})])
def test_settings_are_taken_as_they_are(engine: Any) -> None:
    assert engine_config(engine) is engine
    assert RunConfig.from_dict({"engine": engine}).engine == engine


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPConfig(name="fsdp2"), r"engine\.name=fsdp2: this is DDPConfig"),
        (lambda: Zero1Config(name="ddp"), r"engine\.name=ddp: this is Zero1Config"),
    ],
)
def test_a_name_of_another_engine_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
    assert DDPConfig(bucket_cap_mb=1).bucket_cap_mb == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:01", 1),
        ("12:00:00", 43200),
        ("30:00", 1800),
        ("1-12:00:00", 129600),
        ("01:12:00:00", 129600),
        ("90s", 90),
        ("1.5m", 90),
        ("12h", 43200),
        ("2d", 172800),
        (90, 90),
        (0.5, 0.5),
        ("100:00:00", 360000),
    ],
)
def test_what_people_write(text: object, seconds: float) -> None:
    assert seconds_of("trainer.max_time", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "12", "0s", 0, -3, "1-2", "1-30:00", "12:", "a", "1w", True, float("inf"), [1]]
)
def test_what_is_none(text: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time=.*not a positive length of time.*HH:MM:SS"):
        seconds_of("trainer.max_time", text)
