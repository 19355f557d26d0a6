# SPDX-License-Identifier: Apache-2.0
"""What we give to the harness's type `vllm` is what its source takes; vLLM is not imported."""

import ast
import importlib.util
import inspect
import os
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")

import torch.distributed as dist
from lm_eval.api.model import TemplateLM

from eval.harness import vllm
from eval.harness.model import OverlongError


def source() -> ast.ClassDef:
    """Return the harness's class as its file has it."""
    [folder] = importlib.util.find_spec("lm_eval.models").submodule_search_locations
    tree = ast.parse((Path(folder) / "vllm_causallms.py").read_text("utf-8"))
    [found] = [each for each in ast.walk(tree) if getattr(each, "name", "") == "VLLM"]
    return found


def test_each_argument_is_one_that_the_harness_names():
    functions = {each.name: each for each in source().body if isinstance(each, ast.FunctionDef)}
    named = {argument.arg for argument in functions["__init__"].args.args}
    given = vllm.arguments(Path("export"), longest=8192, tensor_parallel=2)
    assert given.keys() <= named
    assert (given["max_model_len"], given["tensor_parallel_size"]) == (8192, 2)
    assert given["trust_remote_code"] is False


def test_each_method_that_we_replace_is_one_that_the_harness_has():
    functions = {each.name: each for each in source().body if isinstance(each, ast.FunctionDef)}
    own = vllm.type_over(object)
    for name in (
        "max_length", "modify_gen_kwargs", "loglikelihood_rolling", "apply_chat_template",
        "tokenizer_name", "loglikelihood", "generate_until",
    ):  # fmt: skip
        assert name in functions
        assert hasattr(own, name)
    rolling = inspect.signature(own.loglikelihood_rolling).parameters
    assert [*rolling] == [argument.arg for argument in functions["loglikelihood_rolling"].args.args]
    [returned] = [
        each for each in ast.walk(functions["modify_gen_kwargs"]) if isinstance(each, ast.Return)
    ]
    assert len(returned.value.elts) == 3
    read = {
        each.attr for name in ("generate_until", "_loglikelihood_tokens", "loglikelihood_rolling")
        for each in ast.walk(functions[name]) if isinstance(each, ast.Attribute)
    }  # fmt: skip
    assert {"max_length", "modify_gen_kwargs"} <= read


class Engine(TemplateLM):
    """The part of the harness's type that decides on lengths and settings."""

    eot_token_id = 0

    def tok_encode(self, string: str, **_) -> list[int]:
        return list(string.encode())

    def _loglikelihood_tokens(self, requests, **_):
        return []

    def generate_until(self, requests, disable_tqdm=False):
        return []

    def modify_gen_kwargs(self, gen_kwargs, eos=None, default_max_gen_toks=256):
        return {"skip_special_tokens": False, "temperature": 0.0}, [eos], default_max_gen_toks

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [float(min(len(each.args[0]), self.max_length)) for each in requests]


def test_a_log_likelihood_leaves_room_for_the_token_that_vllm_generates():
    from lm_eval.api.instance import Instance

    def request(kind, *arguments):
        return Instance(kind, {}, arguments, 0, metadata=("some_task", 7, 1))

    made = vllm.type_over(Engine)
    lm = made.__new__(made)
    lm.longest, lm.other_ends = 10, (7, 9)
    lm._require_room(request("loglikelihood", "a", "b"), 9, 0)
    assert lm.most == 10
    with pytest.raises(OverlongError, match="10 tokens and 1 to generate do not fit in 10"):
        lm._require_room(request("loglikelihood", "a", "b"), 10, 0)
    settings, until, most = lm.modify_gen_kwargs({}, eos="</s>", default_max_gen_toks=5)
    assert settings == {
        "skip_special_tokens": True, "temperature": 0.0, "stop_token_ids": [7, 9],
    }  # fmt: skip
    assert (until, most) == (["</s>"], 5)
    lm.longest = 20
    assert lm.loglikelihood_rolling([request("loglikelihood_rolling", "x" * 30)]) == [20.0]
    assert lm.most == 20


def test_the_engine_finds_no_variables_of_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    for name in vllm.OF_ENGINE:
        monkeypatch.setenv(name, "")
    with vllm.only_rank():
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert not any(name.startswith(vllm.OF_TORCHRUN) for name in os.environ)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_without_vllm_or_gpus_a_sentence_says_what_would_do(monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ValueError, match=r"not installed; run pip install 'lm-eval\[vllm\]"):
            vllm.require_vllm(1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    vllm.require_vllm(1)
    with pytest.raises(ValueError, match=r"--tp 2 needs as many GPUs; this machine has 1"):
        vllm.require_vllm(2)
