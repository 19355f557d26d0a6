# SPDX-License-Identifier: Apache-2.0
"""`from recipes.shipped import NAME` gives a row, without torch; a misspelled name is refused."""

import importlib
import os
import subprocess
import sys
import types

import pytest
import torch

import recipes.shipped
from data.cuda_extension import ARCHITECTURES, WITHOUT_DEVICE
from recipes.shipped.table import _TABLE, ROWS
from tests.house.rooms import TREE

NEAREST = "'llama31_8b_ultralong_1n'; did you mean llama31_8b_ultralong_1m"
LAZY = """
import sys
import recipes.shipped
assert "recipes.shipped.table" not in sys.modules
from recipes.shipped import llama31_8b_ultralong_1m
assert llama31_8b_ultralong_1m.layout.cp.size == 8
assert "llama31_8b_ultralong_1m" in dir(recipes.shipped)
heavy = {"torch", "nemo", "nemo_run", "megatron", "lightning"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_recipe_is_imported_by_its_name():
    for name, row in ROWS.items():
        assert getattr(recipes.shipped, name) is row
        assert row.name == name
    assert [row.name for row in _TABLE] == list(ROWS)  # none twice
    assert set(ROWS) <= set(dir(recipes.shipped))


def test_the_import_brings_neither_torch_nor_nemo():
    done = subprocess.run(
        [sys.executable, "-c", LAZY], cwd=TREE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_misspelled_name_is_refused_with_the_nearest():
    with pytest.raises(ImportError, match=NEAREST):
        from recipes.shipped import llama31_8b_ultralong_1n  # noqa: F401
    with pytest.raises(AttributeError, match=NEAREST):
        _ = recipes.shipped.llama31_8b_ultralong_1n


def test_other_questions_are_answered_as_a_package_does():
    assert not hasattr(recipes.shipped, "llama31_8b_ultralong_1n")
    assert not hasattr(recipes.shipped, "__wrapped__")
    from recipes.shipped import select

    assert select is importlib.import_module("recipes.shipped.select")


def test_the_import_of_nemo_by_a_call_names_an_architecture(monkeypatch):
    class Importing(types.ModuleType):
        @property
        def pretrain(self):
            seen.append(os.environ.get(ARCHITECTURES))
            return lambda *_, **__: "the recipe"

    seen = []
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "recipes.pretrain", Importing("recipes.pretrain"))
    assert ROWS["tiny_512"]() == "the recipe"
    assert seen == [WITHOUT_DEVICE]
    assert ARCHITECTURES not in os.environ
