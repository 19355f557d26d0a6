# SPDX-License-Identifier: Apache-2.0
"""What NeMo's classes take is known on a Python whose `inspect` does not find it."""

import inspect
import os
import subprocess
import sys

import pytest
import yaml
from nemo.lightning.io.mixin import IOMixin

from recipes.nemo2.strategy import CpuStrategy, LongContextStrategy
from tests import old_inspect
from tests.golden.rewrite import RECIPES
from tests.house.rooms import TREE
from tests.warm_start import path_with

# Named as the command, so that the tests' server starts it.
LONGHAUL = """
import sys
from tests import old_inspect
old_inspect.install()
from longhaul import cli
for words in (["--dryrun"], ["trainer.strategy.fsdpp=megatron"]):
    sys.argv[3:] = ["tiny_512", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print(f"ended {ended.code}", file=sys.stderr)
"""


@pytest.fixture
def old(monkeypatch):
    """Have this process look at classes as an old Python does."""
    monkeypatch.setattr(inspect, "_signature_from_callable", inspect._signature_from_callable)
    old_inspect.install()


def test_without_the_statement_an_old_python_would_not_know(old, monkeypatch):
    monkeypatch.delattr(IOMixin, "__signature__")
    assert list(inspect.signature(CpuStrategy).parameters) == ["args", "kwargs"]


@pytest.mark.parametrize("strategy", [LongContextStrategy, CpuStrategy])
def test_a_class_takes_what_its_init_takes(old, strategy):
    parameters = inspect.signature(strategy).parameters
    assert "self" not in parameters
    assert parameters["fsdp"].default is None
    of_init = inspect.signature(strategy.__init__).parameters
    assert list(of_init.values())[1:] == list(parameters.values())


def test_a_class_states_its_own_and_not_that_of_the_class_above():
    class Above(IOMixin):
        def __init__(self, size: int = 1) -> None:
            self.size = size

    class Below(Above):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __call__(self, value: float) -> None:
            """Take something else than the class does."""

    assert str(inspect.signature(Above)) == "(size: int = 1) -> None"
    assert str(inspect.signature(Below)) == "(name: str) -> None"
    assert str(inspect.signature(Below("x"))) == "(value: float) -> None"


def test_a_recipe_is_the_same_on_an_old_python_and_refuses_a_misspelled_field(tmp_path):
    script = tmp_path / "longhaul"
    script.write_text(LONGHAUL)
    done = subprocess.run(
        [sys.executable, script, "pretrain", "--factory"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path_with(TREE)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ended 2" in done.stderr, done.stderr
    refused = "trainer.strategy.fsdpp is not a parameter of CpuStrategy; did you mean fsdp?"
    assert refused in done.stderr
    shown, golden = (
        yaml.safe_load(text)
        for text in (done.stdout.partition("\n# ")[0], (RECIPES / "tiny_512.yaml").read_text())
    )
    assert shown["trainer"]["strategy"]["_target_"] == golden["trainer"]["strategy"]["_target_"]
    assert shown["model"] == golden["model"]
