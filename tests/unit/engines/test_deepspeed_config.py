"""The DeepSpeed JSON: generated, merged with a user's, refused, read back; and held against DeepSpeed itself."""

import importlib
import json
import re
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from distaccum.config.engine import DeepSpeedConfig
from distaccum.config.instantiate import build
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.config.schema import RunConfig
from distaccum.data.plan.batch import BatchPlan
from distaccum.engines.deepspeed.compat import check_parameters
from distaccum.engines.deepspeed.config.generate import HELD, KINDS, REFUSED, generate
from distaccum.errors import ConfigError
from distaccum.tools.from_deepspeed import from_deepspeed_json

RANKS = 2
FP16 = PrecisionConfig(name="fp16")


def _generate(
    json: Any = None, precision: PrecisionConfig | str = "fp32", *, stage: int = 2, ranks: int = RANKS, **changed: Any
) -> dict[str, Any]:
    engine = DeepSpeedConfig(
        stage=stage, json=json, **{key: changed.pop(key) for key in list(changed) if key.startswith("offload")}
    )
    sizes = {"global_batch_size": 32, "micro_batch_size": 8, "micro_steps": 2}
    known = {"clip_norm": 1.0, "clip_value": None, **sizes, **changed}
    return generate(engine, PrecisionConfig.of(precision), world_size=ranks, **known)


def _lies_in(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and _lies_in(part[key], whole[key]) for key in part)
    return bool(part == whole)


# --- generated ---


def test_the_whole_of_stage_2_in_fp16() -> None:
    assert _generate(precision="fp16") == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "managed_gradient_accumulation": True,
        "gradient_clipping": 1.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": False},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        },
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "reduce_scatter": True, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


@pytest.mark.parametrize(("size", "micro", "ranks"), [(32, 8, 2), (33, 8, 2), (7, 2, 3), (5, 5, 1), (3, 1, 4)])
def test_the_three_sizes_multiply_as_deepspeed_insists(size: int, micro: int, ranks: int) -> None:
    plan = BatchPlan(samples=1000, global_batch_size=size, micro_batch_size=micro, world_size=ranks)
    made = _generate(
        global_batch_size=size,
        micro_batch_size=micro,
        micro_steps=plan.accumulation_steps,
        ranks=ranks,
        json={"train_batch_size": size},
    )
    assert made["gradient_accumulation_steps"] == plan.accumulation_steps
    assert made["train_batch_size"] == micro * plan.accumulation_steps * ranks >= size


def test_a_batch_that_is_not_known_in_samples() -> None:
    made = _generate(global_batch_size=None, micro_batch_size=None, micro_steps=None)
    assert made["train_batch_size"] == RANKS
    assert made["train_micro_batch_size_per_gpu"] == made["gradient_accumulation_steps"] == 1


def test_no_clipping_is_said_for_the_default_is_1_and_without_casting_nothing_is_excepted() -> None:
    assert _generate(clip_norm=None)["gradient_clipping"] == 0.0
    assert _generate(precision=PrecisionConfig(keep_fp32=["norm"])) == _generate()


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_formats(name: str, stage: int) -> None:
    made = _generate(precision=PrecisionConfig(name=name, reduce_dtype="bf16"), stage=stage)
    assert made["fp16"]["enabled"] is (name == "fp16")
    assert made["bf16"]["enabled"] is (name == "bf16")
    assert made["communication_data_type"] == "bf16"
    kept = name if stage == 0 and name in ("fp16", "bf16") else "fp32"  # stage 0 refuses a mixture
    assert made["data_types"]["grad_accum_dtype"] == kept


def test_a_scaler() -> None:
    scaler = ScalerConfig(initial_scale_power=10, growth_interval=7, hysteresis=3, consecutive_hysteresis=True)
    section = _generate(precision=replace(FP16, scaler=scaler))["fp16"]
    assert (section["initial_scale_power"], section["loss_scale_window"], section["hysteresis"]) == (10, 7, 3)
    assert section["consecutive_hysteresis"] is True
    static = replace(FP16, scaler=ScalerConfig(static_scale=128.0, growth_factor=3.0))
    assert _generate(precision=static)["fp16"]["loss_scale"] == 128.0


def test_offloads() -> None:
    zero = _generate(stage=3, offload_optimizer=True, offload_parameters=True)["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    mine = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    zero = _generate(mine, offload_optimizer=True)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"clip_value": 0.5, "clip_norm": None}, "optim.clip_value=0.5: DeepSpeed clips by the global norm only"),
    ({"stage": 0, "offload_optimizer": True}, "engine.offload_optimizer=True: engine.stage=0 shards no gradients"),
    ({"stage": 1, "offload_optimizer": True}, "engine.offload_optimizer=True: engine.stage=1 shards no gradients"),
    ({"stage": 2, "offload_parameters": True}, "engine.offload_parameters=True: engine.stage=2 does not shard"),
    ({"precision": PrecisionConfig(name="bf16", keep_fp32=["norm"])}, "precision.keep_fp32=['norm']: DeepSpeed casts"),
    ({"precision": PrecisionConfig(name="bf16", only=["body"])}, "precision.only=['body']: DeepSpeed casts"),
    ({"precision": replace(FP16, scaler=ScalerConfig(growth_factor=4.0))}, "precision.scaler.growth_factor=4.0: "),
    ({"precision": replace(FP16, scaler=ScalerConfig(backoff_factor=0.25))}, "precision.scaler.backoff_factor=0.25: "),
    ({"precision": replace(FP16, scaler=ScalerConfig(min_scale=0.5))}, "precision.scaler.min_scale=0.5: DeepSpeed"),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE)
def test_what_deepspeed_cannot_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        _generate(**settings)
    assert re.search(r"\. (Use|Leave) ", str(raised.value))


# --- a user's own ---


PASSED_ON: dict[str, Any] = {
    "comms_logger": {"enabled": True, "verbose": False},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 200000000,
        "overlap_comm": True,
        "reduce_scatter": False,
        "round_robin_gradients": True,
        "stage3_param_persistence_threshold": 10,
    },
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    "aio": {"block_size": 1048576},
    "fp16": {"enabled": False, "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": False},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "tensorboard": {"enabled": False},
    "steps_per_print": 50,
    "wall_clock_breakdown": True,
    "train_batch_size": 32,
    "gradient_clipping": 1,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1,
    "torch_autocast": {"enabled": False},
    "communication_data_type": "fp32",
    "sequence_parallel_size": 1,
}


def test_what_is_not_ours_passes_and_what_agrees_does_too(tmp_path: Path) -> None:
    made = _generate(PASSED_ON)
    assert _lies_in(PASSED_ON, made)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(PASSED_ON), encoding="utf-8")
    assert _generate(str(file)) == _generate(file) == made


def test_merging_changes_nothing_of_the_mapping_that_it_is_given() -> None:
    before = json.dumps(PASSED_ON)
    _generate(PASSED_ON)["zero_optimization"]["stage"] = 9
    assert json.dumps(PASSED_ON) == before


def test_auto_is_ours_or_else_deepspeeds_default() -> None:
    """What transformers' own example file says."""
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": "auto",
        "communication_data_type": None,
    }
    ours = _generate(precision="fp16", stage=3)
    ours["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    assert _generate(auto, "fp16", stage=3) == ours


def test_old_spellings() -> None:
    assert _generate({"bfloat16": {"enabled": True}}, "bf16") == _generate(precision="bf16")
    old = {"zero_optimization": {"cpu_offload": True, "stage": 2}}
    assert _generate(old, offload_optimizer=True) == _generate(offload_optimizer=True)
    assert _generate({"zero_optimization": {"cpu_offload": False}}) == _generate()
    assert _generate({"data_types": {"grad_accum_dtype": "float32"}}) == _generate()


_AUTO = 'write "auto" in the file'
_OUT = "Leave out what distaccum needs otherwise"
_QUOTES = "without quotes"
_GONE = "Correct or delete"
_HOLDS = "but distaccum needs"

# A file, what the run is otherwise, and what its message has to hold: key, both values, remedy.
WRONG: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"train_batch_size": 64}, {}, ["train_batch_size=64 but batch.global_size=32", _AUTO]),
    ({"train_batch_size": 48}, {"global_batch_size": 33, "micro_steps": 3}, ["=48 but batch.global_size=33", _AUTO]),
    ({"train_batch_size": 64}, {"global_batch_size": None}, ["train_batch_size=64 but batch.global_size=null", _AUTO]),
    ({"train_micro_batch_size_per_gpu": 4}, {}, ["_per_gpu=4 but batch.micro_size=8", _AUTO]),
    (
        {"gradient_accumulation_steps": 4},
        {},
        ["gradient_accumulation_steps=4 but batch.global_size=32 and batch.micro_size=8 on 2 ranks make 2", _AUTO],
    ),
    ({"gradient_clipping": 0.5}, {}, ["gradient_clipping=0.5 but optim.clip_norm=1.0", _AUTO]),
    ({"gradient_clipping": 0.5}, {"clip_norm": None}, ["gradient_clipping=0.5 but optim.clip_norm=null", _AUTO]),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"precision": "bf16"},
        ["fp16.enabled=true but precision=bf16", "fp16.enabled=true and bf16.enabled=true exclude", "Keep that of"],
    ),
    ({"fp16": {"enabled": True}}, {}, ["fp16.enabled=true but precision=fp32", _AUTO]),
    ({"bf16": {"enabled": False}}, {"precision": "bf16"}, ["bf16.enabled=false but precision=bf16", _AUTO]),
    ({"bfloat16": {"enabled": True}}, {}, ["bf16.enabled=true but precision=fp32", _AUTO]),
    (
        {"fp16": {"loss_scale_window": 1000, "hysteresis": 2, "loss_scale": 8, "min_loss_scale": 4}},
        {"precision": "fp16"},
        [
            "fp16.loss_scale_window=1000 but precision.scaler.growth_interval=2000",
            "fp16.hysteresis=2 but precision.scaler.hysteresis=1",
            "fp16.loss_scale=8 but precision.scaler.static_scale=null",
            "fp16.min_loss_scale=4 but precision.scaler.min_scale=1.0",
            _AUTO,
        ],
    ),
    ({"zero_optimization": {"stage": 3}}, {}, ["zero_optimization.stage=3 but engine.stage=2", _AUTO]),
    ({"zero_optimization": {"stage": 4}}, {}, ["stage=4 is no stage of ZeRO, and engine.stage=2", "Use 0, 1, 2 or 3"]),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        {"stage": 0},
        ["offload_optimizer.device=cpu but engine.offload_optimizer=false asks for none", _AUTO],
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        {"stage": 3, "offload_parameters": True},
        ["offload_param.device=nvme but engine.offload_parameters=true asks for cpu", _AUTO],
    ),
    ({"zero_optimization": {"cpu_offload": True}}, {}, ["device=cpu but engine.offload_optimizer=false", _AUTO]),
    ({"zero_optimization": {"contiguous_gradients": False}}, {}, ["contiguous_gradients=false but", "true", _OUT]),
    ({"communication_data_type": "fp16"}, {}, ["_data_type=fp16 but precision.reduce_dtype=fp32", _AUTO]),
    (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"precision": "bf16"},
        ["grad_accum_dtype=bf16 but precision=bf16 at engine.stage=2 has fp32", _AUTO],
    ),
    ({"data_types": {"param_dtype": "fp16"}}, {}, ["data_types.param_dtype=fp16 but precision=fp32", _AUTO]),
    ({"optimizer": {"type": "Adam"}}, {}, ['optimizer={"type": "Adam"}: optim=... owns it', "Delete optimizer"]),
    ({"scheduler": {"type": "WarmupLR"}}, {}, ["scheduler=", "schedule=... owns it", "Delete scheduler"]),
    ({"amp": {"enabled": True}}, {}, ['amp={"enabled": true}: Apex', "precision=...", "Delete amp"]),
    ({"torch_autocast": {"enabled": True}}, {}, ["enabled=true but", "needs false", "never backs off", _OUT]),
    ({"prescale_gradients": True}, {}, [f"prescale_gradients=true {_HOLDS} false: distaccum divides", _OUT]),
    ({"gradient_predivide_factor": 2}, {}, [f"gradient_predivide_factor=2 {_HOLDS} 1.0", _OUT]),
    ({"gradient_allreduce_op": "sum"}, {}, [f"gradient_allreduce_op=sum {_HOLDS} mean", _OUT]),
    ({"managed_gradient_accumulation": False}, {}, [f"managed_gradient_accumulation=false {_HOLDS} true", _OUT]),
    ({"sequence_parallel_size": 2}, {}, [f"sequence_parallel_size=2 {_HOLDS} 1", _OUT]),
    ({"data_parallel_size": 8}, {}, ["data_parallel_size=8 but the world size is 2", _AUTO]),
    ({"data_efficiency": {"enabled": True}}, {}, [f"data_efficiency.enabled=true {_HOLDS} false", _OUT]),
    ({"elasticity": {"enabled": True}}, {}, ["elasticity=", "batch.global_size", "Delete elasticity"]),
    ({"sparse_gradients": True}, {}, ["sparse_gradients=true: DeepSpeed has removed it", "Delete sparse_gradients"]),
    ({"pipeline": {"stages": 2}}, {}, ['pipeline={"stages": 2}: every rank', "Delete pipeline"]),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, {}, ["zero_optimization.zenflow=", "Delete zero_opt"]),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, {}, ["gradients=true but", "needs false", _OUT]),
    ({"zero_force_ds_cpu_optimizer": True}, {}, [f"zero_force_ds_cpu_optimizer=true {_HOLDS} false", _OUT]),
    ({"gradient_clipping": "1.0"}, {}, ['gradient_clipping="1.0" is not a number, and optim.clip_norm=1.0', _QUOTES]),
    ({"train_batch_size": "32"}, {}, ['="32" is not a whole number, and batch.global_size=32', _QUOTES]),
    ({"train_batch_size": 31.5}, {}, ["=31.5 is not a whole number, and batch.global_size=32", _QUOTES]),
    ({"fp16": {"enabled": "false"}}, {}, ['fp16.enabled="false" is not true or false, and precision=fp32', _QUOTES]),
    ({"fp16": True}, {"precision": "fp16"}, ["fp16=true is not a section", _QUOTES]),
    ({"zero_optimization": True}, {}, ["zero_optimization=true is not a section", _QUOTES]),
    ({"zero_optimization": {"stage": True}}, {}, ["stage=true is not a whole number, and engine.stage=2", _QUOTES]),
    ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, {}, ['bucket_size="5e8" is not a whole', _QUOTES]),
    ({"train_batchsize": 32}, {}, ["train_batchsize=32: no such key", "did you mean train_batch_size", _GONE]),
    ({"zero_optimisation": {"stage": 3}}, {}, ["did you mean zero_optimization", _GONE]),
    ({"zero_optimization.stage": 2}, {}, ["zero_optimization.stage=2: no such key", _GONE]),
    ({"zero_optimization": {"overlap_com": True}}, {}, ["did you mean zero_optimization.overlap_comm", _GONE]),
    ({"fp16": {"opt_level": "O2"}}, {}, ["fp16.opt_level=O2: no such key", _GONE]),
]


@pytest.mark.parametrize(("theirs", "run", "parts"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_file_is_one_line_of_key_values_and_remedy(
    theirs: dict[str, Any], run: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        _generate(theirs, **run)
    message = str(raised.value)
    assert message.startswith("engine.json: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_everything_wrong_is_said_at_once() -> None:
    theirs = {"train_batch_size": 64, "gradient_clipping": 0.5, "amp": {}, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError) as raised:
        _generate(theirs)
    assert str(raised.value) == (
        "engine.json: train_batch_size=64 but batch.global_size=32; gradient_clipping=0.5 but optim.clip_norm=1.0;"
        " amp={}: Apex is not used, precision=... chooses the format; zero_optimization.stage=3 but engine.stage=2."
        ' Change one of each pair, or write "auto" in the file. Delete amp'
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        _generate(str(file))
    for text, problem in (
        ("{", "not JSON"),
        ("[1]", "holds no mapping but"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "stated twice: train_batch_size"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=problem):
            _generate(str(file))
    with pytest.raises(ConfigError, match=r"engine\.json=3: neither a file nor a mapping"):
        _generate(3)


@pytest.mark.parametrize(
    "twice",
    [
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
    ],
)
def test_one_thing_under_two_names(twice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"name.* Delete "):
        _generate(twice, "bf16", offload_optimizer=True)


def test_neither_torch_nor_deepspeed_is_imported() -> None:
    code = (
        "import sys, distaccum.tools.from_deepspeed;assert not {'torch', 'deepspeed', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- read back ---


FILE: dict[str, Any] = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 4, "auto_cast": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu"},
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 2e-4, "warmup_min_lr": 1e-5, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "comms_logger": {"enabled": True},
}


def _back(config: dict[str, Any], ranks: int = RANKS) -> dict[str, Any]:
    """What distaccum generates from a configuration."""
    batch = config.get("batch")
    sizes: dict[str, Any] = dict.fromkeys(("global_batch_size", "micro_batch_size", "micro_steps"))
    if batch is not None:
        stated = {"global_batch_size": batch["global_size"], "micro_batch_size": batch["micro_size"]}
        plan = BatchPlan(samples=10_000, world_size=ranks, **stated)
        sizes = {**stated, "micro_steps": plan.accumulation_steps}
    precision = dict(config["precision"])
    if "scaler" in precision:
        precision["scaler"] = ScalerConfig(**precision["scaler"])
    clips = {"clip_norm": config["optim"]["clip_norm"], "clip_value": None}
    engine = DeepSpeedConfig(**config["engine"])
    return generate(engine, PrecisionConfig(**precision), world_size=ranks, **sizes, **clips)


def test_a_whole_file_read_as_configuration() -> None:
    config = from_deepspeed_json(FILE, world_size=RANKS)
    assert config["batch"] == {"global_size": 64, "micro_size": 8}
    assert config["engine"] == {
        "name": "deepspeed",
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
        "json": {
            "fp16": {"auto_cast": True},
            "zero_optimization": {
                "overlap_comm": True,
                "reduce_bucket_size": 5e8,
                "offload_param": {"pin_memory": True},
            },
            "comms_logger": {"enabled": True},
        },
    }
    assert config["precision"]["reduce_dtype"] == "fp16"  # DeepSpeed's default there
    assert config["precision"]["scaler"]["growth_interval"] == 1000
    assert config["optim"] == {
        "lr": 2e-4,
        "clip_norm": 1.0,
        "optimizer": {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95], "weight_decay": 0.0},
    }
    assert config["trainer"] == {"max_steps": 100}
    stated = {key: value for key, value in FILE.items() if key not in ("optimizer", "scheduler")}
    assert _lies_in(stated, _back(config))


def test_what_is_read_is_a_configuration_of_distaccums() -> None:
    config = from_deepspeed_json(FILE, world_size=RANKS)
    assert OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config)))) == config
    run = RunConfig.from_dict(config)
    assert run.engine == DeepSpeedConfig(**config["engine"])
    assert run.precision.scaler == ScalerConfig(**config["precision"]["scaler"])
    schedule = build("schedule", run.schedule, total_steps=run.trainer.max_steps)
    assert [schedule(step) for step in (0, 11, 101)] == pytest.approx([0.05, 1.0, 0.05])
    optimizer = build("optim.optimizer", run.optim.optimizer, torch.nn.Linear(1, 1).parameters(), lr=run.optim.lr)
    assert list(optimizer.defaults["betas"]) == [0.9, 0.95]


def test_settings_of_a_format_that_auto_leaves_off_are_not_kept() -> None:
    scaler = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}
    assert from_deepspeed_json({"fp16": scaler}, world_size=RANKS)["engine"]["json"] is None
    bf16 = from_deepspeed_json({"fp16": scaler, "bf16": {"enabled": True}}, world_size=RANKS)
    assert bf16["engine"]["json"] is None


def test_an_empty_file_is_deepspeeds_defaults() -> None:
    with pytest.raises(ConfigError, match="world_size=0: must be at least 1"):
        from_deepspeed_json({}, world_size=0)
    config = from_deepspeed_json({}, world_size=RANKS)
    assert "batch" not in config
    assert config["optim"] == {"clip_norm": 1.0}
    assert config["engine"]["stage"] == 0
    assert config["schedule"] == {"_target_": "distaccum.train.schedules.Constant"}
    assert from_deepspeed_json({"gradient_clipping": 0}, world_size=RANKS)["optim"] == {"clip_norm": None}


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"train_batch_size": 32}, (32, 16)),
        ({"train_micro_batch_size_per_gpu": 4}, (8, 4)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, (32, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (32, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (24, 4)),
    ],
)
def test_batches_read_as_deepspeed_reads_them(sizes: dict[str, int], batch: tuple[int, int]) -> None:
    config = from_deepspeed_json(sizes, world_size=RANKS)
    assert tuple(config["batch"].values()) == batch
    assert _lies_in(sizes, _back(config))


@pytest.mark.parametrize(
    ("kind", "params", "node"),
    [
        ("AdamW", {"lr": 1e-3, "eps": 1e-6}, {"_target_": "torch.optim.AdamW", "eps": 1e-6, "weight_decay": 0.0}),
        (
            "adam",
            {"adam_w_mode": False, "bias_correction": True},
            {"_target_": "torch.optim.Adam", "weight_decay": 0.0},
        ),
        ("Adam", {"torch_adam": True}, {"_target_": "torch.optim.AdamW", "weight_decay": 0.01}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"_target_": "torch.optim.SGD", "momentum": 0.9}),
        ("Adagrad", {"lr": 0.1}, {"_target_": "torch.optim.Adagrad"}),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], node: dict[str, Any]) -> None:
    config = from_deepspeed_json({"optimizer": {"type": kind, "params": params}}, world_size=RANKS)
    assert config["optim"]["optimizer"] == node
    assert config["optim"]["lr"] == params.get("lr", 1e-3)


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, "=64: is not"),
    ({"train_batch_size": 33}, "train_batch_size=33: is not train_micro_batch_size_per_gpu=16 x"),
    ({"train_batch_size": 0}, "train_batch_size=0: must be at least 1"),
    ({"train_batch_size": 1}, "train_batch_size=1: is not"),
    ({"gradient_accumulation_steps": 4}, "steps of unknown size"),
    ({"optimizer": {"type": "Lamb", "params": {"lr": 1.0}}}, "optimizer.type=Lamb: DeepSpeed's own"),
    ({"optimizer": {"type": "Adam", "params": {"freeze_step": 3, "cuda_aware": True}}}, "params.freeze_step=3; "),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm=1.0"),
    ({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm=1.0"),
    ({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, "optimizer.params.lr: is not stated"),
    ({"optimizer": {"type": "SGD", "params": {"lr": "0.1"}}}, "not a number"),
    ({"optimizer": {"type": "Adam", "legacy_fusion": True}}, "optimizer.legacy_fusion=true"),
    ({"optimizer": {"params": {}}}, "names no type"),
    ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.type=OneCycle: no counterpart"),
    ({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 3}}}, "params.last_batch_iteration=3"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "schedule.curve=cubic"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "schedule.warmup_steps=0"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}}}, "warmup_max_lr: is not stated"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "exclude each other"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=true"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "engine.offload_optimizer=True"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "device=nvme but"),
    ({"zero_optimization": {"stage": 5}}, "stage"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype=fp32 but"),
    ({"gradient_clipping": -1}, "gradient_clipping=-1: must be a positive"),
    ({"optimizer": {"type": "Adan", "params": {"lr": 1.0}}}, "optimizer.type=Adan: no optimizer of torch.optim"),
    ({"trian_batch_size": 4}, "did you mean train_batch_size"),
]


@pytest.mark.parametrize(("theirs", "message"), UNREADABLE, ids=lambda value: str(value)[:40])
def test_what_has_no_counterpart_is_named(theirs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_deepspeed_json(theirs, world_size=RANKS)


_BUCKETS = st.fixed_dictionaries(
    {},
    optional={
        "reduce_bucket_size": st.integers(1, 10**9),
        "overlap_comm": st.booleans(),
        "reduce_scatter": st.booleans(),
        "contiguous_gradients": st.just(True),
        "round_robin_gradients": st.booleans(),
    },
)


@st.composite
def _files(draw: st.DrawFn) -> dict[str, Any]:
    stage = draw(st.integers(0, 3))
    name = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    zero = {**draw(_BUCKETS), "stage": stage}
    if stage >= 2 and draw(st.booleans()):
        zero["offload_optimizer"] = {"device": draw(st.sampled_from(["cpu", "none"])), "pin_memory": True}
    scaler = st.fixed_dictionaries(
        {},
        optional={
            "loss_scale": st.sampled_from([0, 128]),
            "initial_scale_power": st.integers(4, 40),
            "loss_scale_window": st.integers(1, 5000),
            "hysteresis": st.integers(1, 4 if stage else 1),
            "consecutive_hysteresis": st.booleans(),
            "min_loss_scale": st.integers(1, 16),
            "auto_cast": st.booleans(),
        },
    )
    micro, steps = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    rest = st.fixed_dictionaries(
        {},
        optional={
            "gradient_clipping": st.sampled_from([0, 0.0, 1, 0.5]),
            "communication_data_type": st.sampled_from(["fp32", "bf16", name]),
            "wall_clock_breakdown": st.booleans(),
            "comms_logger": st.just({"enabled": True}),
            "zero_allow_untested_optimizer": st.just(True),
        },
    )
    file = {**draw(rest), **sizes, "zero_optimization": zero}
    if draw(st.booleans()):
        file["train_batch_size"] = micro * steps * RANKS
    if name == "bf16":
        file["bf16"] = {"enabled": True}
    file["fp16"] = {**draw(scaler), "enabled": name == "fp16"}
    return file


@given(_files())
@settings(max_examples=100)
def test_round_trip(file: dict[str, Any]) -> None:
    config = from_deepspeed_json(file, world_size=RANKS)
    assert _lies_in(file, _back(config))
    again = from_deepspeed_json(_back(config), world_size=RANKS)
    assert again["engine"]["stage"] == config["engine"]["stage"]
    assert again["batch"] == config["batch"]
    assert again["optim"] == config["optim"]
    assert _back(again) == _back(config)


# --- DeepSpeed itself ---


@pytest.fixture(scope="module", name="deepspeed")
def _deepspeed() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed")
        for part in ("runtime.config", "runtime.lr_schedules", "runtime.zero.config", "runtime.precision_config"):
            importlib.import_module(f"deepspeed.{part}")
    return sys.modules["deepspeed"]


@pytest.mark.parametrize("theirs", [None, PASSED_ON], ids=["alone", "merged"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_takes_it(deepspeed: Any, stage: int, name: str, theirs: dict[str, Any] | None) -> None:
    if theirs is not None:
        unstaged = {key: value for key, value in theirs["zero_optimization"].items() if key != "stage"}
        theirs = {key: value for key, value in theirs.items() if key not in ("fp16", "bf16", "sequence_parallel_size")}
        theirs["zero_optimization"] = unstaged
    made = _generate(theirs, name, stage=stage, ranks=1, micro_steps=4, offload_optimizer=stage >= 2)
    read = deepspeed.runtime.config.DeepSpeedConfig(json.loads(json.dumps(made)))
    assert read.zero_optimization_stage == stage
    assert read.float16_config.enabled is (name == "fp16")
    assert read.bfloat16_config.enabled is (name == "bf16")
    assert read.gradient_clipping == 1.0
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (32, 4)
    assert read.communication_data_type is torch.float32
    assert read.zero_config.overlap_comm is (theirs is not None)


def test_the_lists_of_keys_are_those_of_deepspeed(deepspeed: Any) -> None:
    """So that a new version's keys are noticed, and none is refused for being unknown here."""
    zero, precision = deepspeed.runtime.zero, deepspeed.runtime.precision_config
    for section, schema in (
        ("zero_optimization", zero.config.DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", zero.offload_config.DeepSpeedZeroOffloadParamConfig),
        ("fp16", precision.DeepSpeedFP16Config),
        ("bf16", precision.DeepSpeedBF16Config),
    ):
        known = {name for key, field in schema.model_fields.items() for name in (key, field.alias or key)}
        assert known == {key.rpartition(".")[2] for key in KINDS if key.rpartition(".")[0] == section}, section
    removed = deepspeed.runtime.config
    assert set(removed._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(REFUSED)
    assert {f"zero_optimization.{key}" for key in removed._REMOVED_ZERO_CONFIG_KEYS} <= set(REFUSED)
    assert not set(HELD) & set(REFUSED)


@pytest.mark.parametrize("curve", ["log", "linear"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1}),
        ("WarmupDecayLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "total_num_steps": 20}),
        ("WarmupCosineLR", {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "total_num_steps": 20}),
    ],
)
def test_schedules_are_deepspeeds(deepspeed: Any, kind: str, more: dict[str, Any], curve: str) -> None:
    params = {"warmup_num_steps": 6, "warmup_type": curve, **more}
    file = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": {"type": kind, "params": params}}
    config = from_deepspeed_json(file, world_size=RANKS)
    module, _, name = config["schedule"].pop("_target_").rpartition(".")
    ours = getattr(importlib.import_module(module), name)(total_steps=20, **config["schedule"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = getattr(deepspeed.runtime.lr_schedules, kind)(optimizer, **params)
    for step in range(25):
        assert ours(step) * config["optim"]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-15), step
        theirs.step()


def test_every_setting_of_the_scaler_is_in_the_json_or_refused() -> None:
    """``max_scale`` alone has no place there, and is kept by the engine."""
    values: dict[str, Any] = {
        "initial_scale_power": 5,
        "growth_interval": 3,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
        "min_scale": 2.0,
        "static_scale": 8.0,
    }
    refused: dict[str, Any] = {"growth_factor": 3.0, "backoff_factor": 0.25}
    assert {*values, *refused} == {field.name for field in fields(ScalerConfig)} - {"max_scale"}
    plain = _generate(precision=FP16)
    for name, value in values.items():
        assert _generate(precision=replace(FP16, scaler=ScalerConfig(**{name: value}))) != plain, name
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=name):
            _generate(precision=replace(FP16, scaler=ScalerConfig(**{name: value})))


@pytest.mark.parametrize("stage", range(4))
def test_what_would_be_stepped_in_float32_is_refused(stage: int) -> None:
    """DeepSpeed keeps its own copy of an fp64 parameter in fp32, and steps that, without a word."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"engine=deepspeed: steps 1\.bias in float32, which is in float64"):
        check_parameters(model, stage)
    model[1].requires_grad_(False)
    check_parameters(model, stage)


def test_stage_3_gathers_one_format() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    check_parameters(model, 2)
    with pytest.raises(ConfigError, match=r"DeepSpeed gathers one format, not 0\.bias in float32 and 1\.bias in bflo"):
        check_parameters(model, 3)
