import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distaccum.config.instantiate import build
from distaccum.config.secrets import is_secret, redact, redact_text, values_of, values_of_environment
from distaccum.errors import ConfigError
from distaccum.train.callbacks import Callback
from distaccum.train.run_log import hide_on_stderr, log_to_stderr


@pytest.mark.parametrize(
    "key",
    ["api_key", "wandb.api_key", "WANDB_API_KEY", "hf_token", "HF-TOKEN", "token", "db.password", "client_secret"],
)
def test_keys_of_secrets(key: str) -> None:
    assert is_secret(key)


def test_further_keys() -> None:
    for key in ("db_pwd", "auth", "proxy-auth", "bearer", "slack_webhook", "session_cookie", "azure.storage_key"):
        assert is_secret(key)
    assert not is_secret("author")


@pytest.mark.parametrize(
    "key",
    ["batch.tokens", "tokenizer", "pad_token", "eos_token_id", "max_tokens", "tokens_per_s", "keys", "data.vocab_size"],
)
def test_what_language_models_call_tokens_is_no_secret(key: str) -> None:
    assert not is_secret(key)


def test_settings_are_copied_without_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "value-of-the-environment")
    settings = {
        "data": {"api_key": "abc", "url": "https://user:pass@host/x", "path": "/data/value-of-the-environment/x"},
        "secrets": {"one": ["first", 2]},
        "tokens": 4096,
        "pad_token": "<pad>",
        "overrides": ["+x.password=a b", "lr=1e-3", "name=sk-0123456789abcdef0123"],
        "key": "AKIA0123456789ABCDEF",
    }
    assert redact(settings) == {
        "data": {"api_key": "<redacted>", "url": "https://<redacted>@host/x", "path": "/data/<redacted>/x"},
        "secrets": {"one": ["<redacted>", "<redacted>"]},
        "tokens": 4096,
        "pad_token": "<pad>",
        "overrides": ["+x.password=<redacted>", "lr=1e-3", "name=<redacted>"],
        "key": "<redacted>",
    }
    assert settings["tokens"] == 4096
    assert list(values_of(settings)) == ["abc", "first", "2"]
    assert values_of_environment({"PWD": "/home/a", "DB_PWD": "x"}) == {"x"}


def test_a_traceback_keeps_what_is_no_secret() -> None:
    text = 'File "x.py", line 3\n  get(url, api_key="k-1", n=3)\nKeyError: \'token\' of {"token": "k-2", "a": 1}'
    assert redact_text(text, ["long-enough"]) == text.replace("k-1", "<redacted>").replace("k-2", "<redacted>")
    assert redact_text("at long-enough.", ["long-enough", "at"]) == "at <redacted>."


def test_what_goes_to_stderr_has_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "value-of-the-environment")
    with log_to_stderr(0, verbose=False):
        logging.getLogger("distaccum.x").error("at value-of-the-environment with pwd=abc")
        hide_on_stderr(lambda text: redact_text(text, ["value-of-a-setting"]))
        logging.getLogger("other").error("at value-of-a-setting")
    said = capsys.readouterr().err
    assert said == "distaccum: at <redacted> with pwd=<redacted>\nERROR other: at <redacted>\n"


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "os.mkdir", "path": "ran"},
        {"_target_": "subprocess.Popen", "args": ["mkdir", "ran"]},
        {"_target_": "builtins.exec", "source": "import os; os.mkdir('ran')"},
        {"_target_": "torch.load", "f": "harm.pt", "weights_only": False},
        {"_target_": "pathlib.Path.mkdir"},
        {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        {"_target_": "torch.hub.load", "repo_or_dir": "x", "model": "y"},
        {"_target_": "distaccum.train.ema.EMA", "decay": {"_target_": "os.mkdir", "path": "ran"}},
    ],
)
@pytest.mark.fault("`callbacks.x._target_=torch.load`, or another function that makes no part of a run, at any depth")
def test_what_makes_no_part_of_a_run_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Callable[[str], None], node: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "harm.pt").write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(ConfigError) as caught:
        build("callbacks.x", node, takes=Callback)
    says(str(caught.value))
    assert not (tmp_path / "ran").exists()


class _Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def _made() -> Callback:
    return Callback()


def _untold():  # type: ignore[no-untyped-def]
    return Callback()


@pytest.mark.parametrize("name", ["_made", "_untold"])
def test_a_function_of_ones_own_may_make_a_callback(name: str) -> None:
    assert isinstance(build("callbacks.x", {"_target_": f"{__name__}.{name}"}, takes=Callback), Callback)
