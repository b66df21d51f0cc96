from __future__ import annotations

import pytest

from distaccum.config.secrets import is_secret, redact, redact_text, values_of


@pytest.mark.parametrize(
    "key",
    ["api_key", "wandb.api_key", "WANDB_API_KEY", "hf_token", "HF-TOKEN", "token", "db.password", "client_secret"],
)
def test_keys_of_secrets(key: str) -> None:
    assert is_secret(key)


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
        "secrets": {"one": ["<redacted>", 2]},
        "tokens": 4096,
        "pad_token": "<pad>",
        "overrides": ["+x.password=<redacted>", "lr=1e-3", "name=<redacted>"],
        "key": "<redacted>",
    }
    assert settings["tokens"] == 4096
    assert list(values_of(settings)) == ["abc", "first"]


def test_a_traceback_keeps_what_is_no_secret() -> None:
    text = 'File "x.py", line 3\n  get(url, api_key="k-1", n=3)\nKeyError: \'token\' of {"token": "k-2", "a": 1}'
    assert redact_text(text, ["long-enough"]) == text.replace("k-1", "<redacted>").replace("k-2", "<redacted>")
    assert redact_text("at long-enough.", ["long-enough", "at"]) == "at <redacted>."
