# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness: names to configurations, their data, and what is refused.

The harness's index of 14,000 tasks takes seconds to build, so it is built only for a name that the
user's own folder (`--include-path`) does not have. Data files that a task names by a relative path
lie next to its YAML file.
"""

import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.harness.guards import METRIC, no_more_samples_than, without_code_of_others
from eval.suite_results import Group
from recipes.spec.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS = "max_seq_lengths"
"""Metadata by which a task that makes its prompts is told their lengths."""
PREFIX_ROOM = 256
"""Tokens that a prompt may exceed its length by: RULER does not count the beginning of the answer,
which it adds to the prompt, nor the spaces that the tokenizer sees there."""
SEED, NUMPY_SEED = 0, 1234  # the harness's own
INSTALL = "pip install -e '.[eval]'"


@dataclass(frozen=True)
class SuiteTask:
    """A task of the harness with its configuration, which has no other tasks in it."""

    name: str
    config: dict[str, Any]
    digest: str
    makes_prompts: bool
    """Whether it makes prompts of a length that it is told."""


class UnknownTaskError(ValueError):
    """A group lists a task that the harness does not know."""


def require_harness() -> None:
    """Raise ValueError with the command that installs it if the harness is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "--suite needs lm-evaluation-harness, which is not installed; in the clone of Longhaul "
            f"run {INSTALL}"
        )


def harness_version() -> str:
    """Return the installed version of the harness."""
    return importlib.metadata.version("lm_eval")


@functools.cache
def tokenizer_in(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in a folder; runs no code of the folder."""
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return found


def template_sha256(folder: Path) -> str:
    """Return the SHA-256 of the chat template of the tokenizer in a folder.

    Raises:
        ValueError: if it has none, or several and none is the default.
    """
    try:
        template = tokenizer_in(folder).get_chat_template()
    except ValueError:
        raise ValueError(
            f"--chat-template: the tokenizer in {folder} has no chat template (no "
            "chat_template.jinja, and no chat_template in tokenizer_config.json, or several without"
            " a default); evaluate a base model without --chat-template"
        ) from None
    return hashlib.sha256(template.encode()).hexdigest()


def find(names: Sequence[str], include: Path | None) -> tuple[list[SuiteTask], list[Group], Any]:
    """Return the tasks of names, the groups among them, and the harness's manager of both.

    Raises ValueError for an unknown name, and for tasks that this command does not run.
    """
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise ValueError(f"--include-path {include} is not a folder")
    folder = None if include is None else str(include.resolve())
    manager = TaskManager(include_path=folder, include_defaults=False)
    if include is not None and not manager.all_tasks:
        raise ValueError(f"--include-path: {include} has no YAML file of a task")
    if not all(name in manager.task_index for name in names):
        manager = TaskManager(include_path=folder)
        return *_found(names, manager), manager
    try:
        return *_found(names, manager), manager
    except UnknownTaskError:  # a group of the folder may list tasks of the harness
        manager = TaskManager(include_path=folder)
        return *_found(names, manager), manager


def require_few_shot(tasks: Sequence[SuiteTask], count: int | None) -> None:
    """Raise ValueError for a task that is always asked without examples, if some are asked for.

    The harness leaves such a task as it is, without an error.
    """
    for task in tasks:
        if count and task.config.get("num_fewshot") == 0:
            raise ValueError(
                f"--few-shot {count}: task {task.name} states num_fewshot: 0, so it is asked "
                "without examples; evaluate it by a command without --few-shot"
            )
        if count and task.makes_prompts:
            raise ValueError(
                f"--few-shot {count}: task {task.name} makes prompts of a length, which examples "
                "would exceed; evaluate it by a command without --few-shot"
            )
        if count and task.config.get("test_split") and not _has_examples(task.config):
            raise ValueError(
                f"--few-shot {count}: task {task.name} names no fewshot_split, training_split or "
                "validation_split, so a question could be among its own examples; evaluate it by "
                "a command without --few-shot"
            )


def _has_examples(config: Mapping[str, Any]) -> bool:
    """Whether a task has examples from which the harness leaves out the question that is asked."""
    named = ("fewshot_split", "training_split", "validation_split")
    own = config.get("fewshot_config") or {}
    return any(config.get(name) for name in named) or bool(own.get("samples") or own.get("split"))


def _found(names: Sequence[str], manager: Any) -> tuple[list[SuiteTask], list[Group]]:
    configs: dict[str, dict[str, Any]] = {}
    groups = []
    for name in names:
        if name not in manager.task_index:
            close = did_you_mean(name, manager.all_tasks, "task of the harness")
            raise ValueError(f"no task or group of the harness is called {name!r}; {close}")
        found = list(_members(manager.task_index, name, {}, name))
        for config in found:
            task = str(config["task"])
            if task in configs and _digest(configs[task]) != _digest(config):
                raise ValueError(
                    f"--suite has the task {task} with two configurations, one of them of {name}; "
                    "evaluate them by two commands"
                )
            configs[task] = config
        if (group := _group(manager.task_index[name], found)) is not None:
            groups.append(group)
    return [_task(config) for config in configs.values()], groups


def _members(
    index: Any, item: str | dict[str, Any], overrides: dict[str, Any], of: str
) -> Iterator[dict[str, Any]]:
    """Yield the configuration of a task, or those of a group's tasks, as the harness merges."""
    from lm_eval.tasks._factory import GROUP_FIELD_NAMES
    from lm_eval.tasks._index import Kind

    if isinstance(item, dict):
        own = {key: value for key, value in item.items() if key not in ("task", "group")}
        name = str(item.get("group", item.get("task")))
        if name in index:
            yield from _members(index, name, overrides | own, of)
        elif "group" in item:
            for child in item["task"]:
                yield from _members(index, child, overrides, of)
        else:
            yield overrides | own | {"task": f"{of}::{name}"}
        return
    if item not in index:
        raise UnknownTaskError(
            f"the group {of} lists a task {item!r} that the harness does not have"
        )
    entry = index[item]
    if entry.kind == Kind.TAG:
        for name in sorted(entry.tags):
            yield from _members(index, name, overrides, of)
    elif entry.kind == Kind.GROUP:
        content = _read(entry.yaml_path, item)
        own = {key: value for key, value in content.items() if key not in GROUP_FIELD_NAMES}
        children = content["task"] if isinstance(content["task"], list) else []
        if not children:
            raise ValueError(f"the group {item} lists no tasks in {entry.yaml_path}")
        for child in children:
            yield from _members(index, child, own | overrides, item)
    else:
        found = _read(entry.yaml_path, item) | overrides | {"task": item}
        yield _with_local_files(found, Path(entry.yaml_path).parent)


def _read(file: Path, name: str) -> dict[str, Any]:
    """Return the configuration in a YAML file, with the functions that it names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        with without_code_of_others():
            return dict(load_yaml(file))
    except ImportError as error:
        package = f"pip install {error.name}" if error.name else "install what it imports"
        raise ValueError(f"task {name} cannot be imported ({error}); {package}") from error
    except Exception as error:  # a task is code of others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"task {name} cannot be read from {file} ({reason})") from error


def _with_local_files(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration whose relative data files lie next to its YAML file."""
    kwargs = config.get("dataset_kwargs") or {}
    if "data_files" not in kwargs:
        return config

    def absolute(files: Any) -> Any:
        if isinstance(files, dict):
            return {key: absolute(value) for key, value in files.items()}
        if isinstance(files, list):
            return [absolute(value) for value in files]
        if "://" in files or "*" in files:
            return files
        path = folder / files
        if not path.is_file():
            raise ValueError(
                f"task {config['task']} reads {files}, which is not in {folder}, the folder of its "
                "YAML file"
            )
        return str(path.resolve())

    files = absolute(kwargs["data_files"])
    return config | {"dataset_kwargs": {**kwargs, "data_files": files}}


def _task(config: dict[str, Any]) -> SuiteTask:
    name = str(config["task"])
    if (config.get("dataset_kwargs") or {}).get("trust_remote_code"):
        raise ValueError(
            f"task {name} asks for trust_remote_code, which runs code of its data set on this "
            "machine; this command never does"
        )
    _require_text(name, config)
    return SuiteTask(name, config, _digest(config), _makes_prompts(config))


def _require_text(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a task that runs a model's code, or is not of text."""
    if config.get("unsafe_code"):
        raise ValueError(f"task {name} runs code that the model writes; this command never does")
    if config.get("doc_to_image") is not None or config.get("doc_to_audio") is not None:
        raise ValueError(f"task {name} has images or audio; models here read text alone")


def _makes_prompts(config: dict[str, Any]) -> bool:
    """Return whether a task makes prompts of a length; BABILong's are parts of its data set."""
    made = config.get("custom_dataset")
    module = inspect.getmodule(made) if callable(made) else None
    named = LENGTHS in inspect.getsource(module) if module is not None else False
    return named and not config.get("dataset_path")


def _digest(config: dict[str, Any]) -> str:
    """Return the sha256 of a configuration, with the files of its functions and its local data."""

    def text(value: Any) -> str:
        if isinstance(value, functools.partial):
            return f"{text(value.func)} {value.args!r} {value.keywords!r}"
        if not inspect.isfunction(value) and not inspect.isclass(value):
            return repr(value)
        file = inspect.getsourcefile(value)
        source = inspect.getsource(value) if file is None else Path(file).read_text("utf-8")
        return f"{value.__qualname__} {source}"

    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=text).encode())
    kwargs = config.get("dataset_kwargs") or {}
    for file in _files([kwargs.get("data_files"), kwargs.get("data_dir")]):
        digest.update(file.read_bytes())
    for file in _files(config.get("dataset_path")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(value: Any) -> Iterator[Path]:
    if not value:  # tasks that make their prompts state an empty path
        return
    if isinstance(value, dict):
        for each in value.values():
            yield from _files(each)
    elif isinstance(value, list):
        for each in value:
            yield from _files(each)
    elif isinstance(value, str) and Path(value).is_dir():
        yield from sorted(path for path in Path(value).rglob("*") if path.is_file())
    elif isinstance(value, str) and "://" not in value:
        found = (Path(path) for path in sorted(glob.glob(value, recursive=True)))
        yield from (path for path in found if path.is_file())


def _group(entry: Any, members: Sequence[dict[str, Any]]) -> Group | None:
    wanted = (entry.cfg or {}).get("aggregate_metric_list") or []
    wanted = wanted if isinstance(wanted, list) else [wanted]
    metrics = tuple(str(each["metric"]) for each in wanted)
    tasks = tuple(str(config["task"]) for config in members)
    by_size = all(each.get("weight_by_size", True) for each in wanted)
    return Group(entry.name, tasks, metrics, by_size) if metrics else None


def built(
    task: SuiteTask, manager: Any, *, tokenizer: Path, length: int | None, limit: int | None
) -> Any:
    """Return the harness's object of a task with its data loaded; it has at least one sample.

    Tasks that draw their prompts begin with the same seed on every rank and in every run. Raises
    ValueError in one sentence if the data are missing.
    """
    config = dict(task.config)
    metadata = config.get("metadata") or {}
    config["metadata"] = {**metadata, "tokenizer": str(tokenizer)}
    if length is not None:
        config["metadata"][LENGTHS] = [length]
    where = config.get("dataset_path") or "its own function"
    refused: list[str] = []
    try:
        with without_code_of_others(refused):
            random.seed(SEED)
            np.random.seed(NUMPY_SEED)
            with no_more_samples_than(config, limit):
                (loaded,) = manager.load([config])["tasks"].values()
            count = len(loaded.eval_docs)
    except (IndexError, StopIteration):  # the harness and `datasets` take the first one
        count = 0
    except Exception as error:  # a task is code of others
        if not refused:
            raise ValueError(_missing(task.name, str(where), error)) from error
    if refused:
        raise ValueError(
            f"task {task.name} cannot be run: {METRIC} {refused[0]}, and this command never runs "
            "such code"
        )
    if count == 0:
        raise ValueError(f"task {task.name} has no samples, so it cannot be scored")
    _require_text(task.name, vars(loaded.config))
    return loaded


def _missing(name: str, where: str, error: Exception) -> str:
    from datasets import config

    reason = " ".join(str(error).split()) or type(error).__name__
    if any(each in reason for each in ("trust_remote_code", "scripts are no longer", METRIC)):
        return f"task {name} ({where}) needs code of others, which is never run here ({reason})"
    return (
        f"the data of task {name} ({where}) cannot be loaded: {reason}; ranks do not download: run "
        "the command once with network access to fill the cache, copy a filled cache to "
        f"{config.HF_DATASETS_CACHE}, or write a task over local files for --include-path"
    )
