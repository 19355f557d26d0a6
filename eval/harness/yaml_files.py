# SPDX-License-Identifier: Apache-2.0
"""The YAML files of a user's folder of tasks, each read once before any is used."""

from pathlib import Path

import yaml


def require_yaml(folder: Path) -> None:
    """Raise ValueError for the first broken YAML file of a folder; the harness skips it unsaid."""
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    for file in TaskIndex._iter_yaml_files(folder):
        try:
            load_yaml(file, resolve_func=False)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{mark.name}, line {mark.line + 1}" if mark else str(file)
            said = " ".join(str(error.problem or error.context).split())
            raise ValueError(f"{where}, is not valid YAML: {said}") from None
        except (OSError, ValueError, yaml.YAMLError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read as a task ({reason})") from None
