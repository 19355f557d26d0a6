# SPDX-License-Identifier: Apache-2.0
"""Limits while the harness loads a task: no code of others, no more samples than are asked for."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

METRIC = "it downloads the code of the metric"


@contextmanager
def without_code_of_others(refused: list[str] | None = None) -> Iterator[None]:
    """Load tokenizers and data sets without code of theirs; RULER's tasks ask for it always.

    Metrics of the package `evaluate` are scripts that it downloads. They are refused, and their
    names are appended to `refused`, since the harness continues without a metric. A module that is
    imported meanwhile keeps the refusal.
    """
    import datasets
    from transformers import AutoTokenizer

    evaluate = import_module("evaluate")  # lm-eval brings it
    original = AutoTokenizer.from_pretrained
    load = datasets.load_dataset
    load_metric = evaluate.load

    names = [] if refused is None else refused

    def metric(path: str, *_: Any, **__: Any) -> Any:
        names.append(path)
        raise ValueError(f"{METRIC} {path}")

    def tokenizer(*words: Any, **given: Any) -> Any:
        return original(*words, **{**given, "trust_remote_code": False})

    @wraps(load)
    def data_set(*words: Any, **given: Any) -> Any:
        if given.pop("trust_remote_code", False):
            raise ValueError("it asks for trust_remote_code")
        return load(*words, **given)

    AutoTokenizer.from_pretrained = tokenizer
    datasets.load_dataset = data_set
    evaluate.load = metric  # type: ignore[attr-defined]
    try:
        yield
    finally:
        AutoTokenizer.from_pretrained = original
        datasets.load_dataset = load
        evaluate.load = load_metric  # type: ignore[attr-defined]


@contextmanager
def no_more_samples_than(config: dict[str, Any], limit: int | None) -> Iterator[None]:
    """Let a task that makes its samples make no more than will be evaluated.

    RULER's tasks make 500 of each length, which takes a quarter of an hour at 128K. The functions
    that make them take `num_samples` and are called by name from the module of the task.
    """
    made = config.get("custom_dataset")
    module = sys.modules.get(getattr(made, "__module__", ""), None)
    scope = getattr(made, "__globals__", vars(module) if module else {})
    takers = {
        name: value
        for name, value in scope.items()
        if limit is not None
        and inspect.isfunction(value)
        and "num_samples" in inspect.signature(value).parameters
    }

    def fewer(function: Any) -> Any:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*words: Any, **given: Any) -> Any:
            bound = signature.bind(*words, **given)
            bound.apply_defaults()
            bound.arguments["num_samples"] = min(bound.arguments["num_samples"], limit)
            return function(*bound.args, **bound.kwargs)

        return call

    scope.update({name: fewer(value) for name, value in takers.items()})
    try:
        yield
    finally:
        scope.update(takers)
