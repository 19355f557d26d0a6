# SPDX-License-Identifier: Apache-2.0
"""A model's name becomes a folder, or one sentence that says what would do."""

from pathlib import Path

import pytest
import requests
from huggingface_hub import errors

from data.hub import TOKENIZER_FILES, HubError, local_folder
from data.tokenization.tokenizer import TokenizerError, load

NAME = "meta-llama/Llama-3.1-8B"


def raising(error: Exception):
    def download(*_: object, **__: object) -> str:
        raise error

    return download


def test_a_folder_is_itself_and_a_name_what_was_downloaded(tmp_path, monkeypatch):
    asked = {}

    def download(name: str, **settings: object) -> str:
        asked.update(settings, name=name)
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert local_folder(str(tmp_path), TOKENIZER_FILES) == tmp_path
    assert asked == {}
    assert local_folder(NAME, TOKENIZER_FILES, "main") == tmp_path / "cache"
    asked_for_name = {"name": NAME, "revision": "main", "allow_patterns": [*TOKENIZER_FILES]}
    assert asked == asked_for_name
    assert local_folder(f"hf:{NAME}", TOKENIZER_FILES, "main") == tmp_path / "cache"
    assert asked == asked_for_name


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.GatedRepoError("403", response=requests.Response()), "accept its terms"),
        (errors.RepositoryNotFoundError("404", response=requests.Response()), "check the spelling"),
        (errors.RevisionNotFoundError("404", response=requests.Response()), "no revision v9"),
        (errors.LocalEntryNotFoundError("see https://a.b"), "cannot be reached: without network"),
        (requests.exceptions.ProxyError("no\nproxy"), "cannot be reached (no proxy): without"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_the_hub_does_not_give_is_one_sentence(monkeypatch, error, said):
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(error))
    for give in (lambda: local_folder(NAME, TOKENIZER_FILES, "v9"), lambda: load(NAME)):
        with pytest.raises((HubError, TokenizerError)) as refused:
            give()
        told = str(refused.value).replace("no revision None", "no revision v9")
        assert f"{NAME} is not a folder here, and " in told
        assert said in told
        assert "\n" not in told
        assert "https" not in told
    assert isinstance(refused.value, TokenizerError)


def test_a_word_that_is_no_name_never_reaches_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(AssertionError("asked")))
    with pytest.raises(HubError, match=r"no folder a/b/c, and it is not a Hugging Face hub name"):
        local_folder("a/b/c", TOKENIZER_FILES)


def test_a_prefix_without_a_name_is_refused():
    with pytest.raises(HubError, match="no folder hf:, and"):
        local_folder("hf:", TOKENIZER_FILES)


def test_a_tokenizer_without_network_is_not_tried_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerError, match="`hf auth login` first"):
        load("nobody/no-model")
    assert not list(Path(tmp_path).iterdir())
