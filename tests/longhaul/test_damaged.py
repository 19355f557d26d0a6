# SPDX-License-Identifier: Apache-2.0
"""A store or a checkpoint that is damaged, or that would run code, is refused by each command.

One stage is trained; its files are changed in their place and put back.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.ranks import Ranks
from tests.runs.conftest import NEMO
from tests.runs.train import evaluate_on_forked_rank, recipe, train_on_forked_rank

pytestmark = pytest.mark.slow

STAGE, LENGTH = "tiny_512", 512


class Trained(NamedTuple):
    """A run of one stage, and how it was trained."""

    run: Path
    options: dict
    store: Path

    @property
    def stage(self) -> Path:
        return self.run / "stages" / STAGE

    @property
    def checkpoint(self) -> Path:
        return self.stage / "checkpoints" / "step=2"

    @property
    def weights(self) -> Path:
        return self.checkpoint / "weights"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_store) -> Trained:
    """Return a stage of two steps on two ranks, with a copy of the store that may be damaged."""
    import shutil

    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage

    folder = tmp_path_factory.mktemp("trained")
    store = Path(shutil.copytree(small_store, folder / "store"))
    options = {"run": str(folder / "run"), "store": str(store), "layout": {"dp": 2}, "steps": 2}
    made = recipe(options)
    made.trainer.val_check_interval = 2
    records.record(ResolvedStage.of(made), start="scratch")
    with Ranks(train_on_forked_rank, 2, options, str(folder / "log"), server=NEMO) as ranks:
        ranks.results(300)
    return Trained(folder / "run", options, store)


@contextmanager
def changed(path: Path, change: Callable[[Path], object]) -> Iterator[Path]:
    """Give a file as `change` leaves it; it is put back at the end."""
    content = path.read_bytes()
    try:
        change(path)
        yield path
    finally:
        path.write_bytes(content)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def without_sums(path: Path) -> None:
    facts = json.loads(path.read_text())
    del facts["files"], facts["own_sha256"]
    path.write_text(json.dumps(facts))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


class Touching:
    """What touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def commands(trained: Trained) -> dict[str, tuple]:
    """Return the words of each command that opens a checkpoint."""
    run = ("--run", trained.run, "--stage", STAGE)
    start = trained.stage / "checkpoints"
    return {
        "export": ("export", "--from", trained.stage, "--to", "exported"),
        "evaluate": ("evaluate", *run),
        "rope search": ("rope", "search", *run, "--target", 2 * LENGTH, "--out", "found.json"),
        "resume": ("pretrain", "--yaml", trained.stage / "config.yaml"),
        "start": (
            "pretrain", "--factory", "tiny_2k", f"data.store={trained.store}",
            f"resume.start={start}",
        ),
    }  # fmt: skip


NAMES = ("export", "evaluate", "rope search", "resume", "start")


@pytest.mark.parametrize("name", NAMES)
def test_an_index_that_would_run_code_is_refused_by_name_and_nothing_runs(
    trained, answer, tmp_path, name
):
    foreign = pickle.dumps(Touching(tmp_path / "ran"))
    with changed(trained.weights / ".metadata", lambda path: path.write_bytes(foreign)) as path:
        said = answer(*commands(trained)[name]).error()
        with changed(trained.checkpoint / "longhaul.json", without_sums):
            untold = answer(*commands(trained)[name]).error()
    assert f"{path} is damaged: its SHA-256 differs" in said
    assert "and it asks for posix.system; nothing of it was run" in said
    assert f"{path} asks for posix.system" in untold
    assert not (tmp_path / "ran").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_or_missing_file_is_one_sentence_with_its_name(trained, answer, name):
    words = commands(trained)[name]
    for file, change, said in (
        (".metadata", cut, "is not the whole index of a checkpoint"),
        (".metadata", lambda path: path.write_bytes(b"garbage"), "is not the whole index"),
        (".metadata", Path.unlink, "is not the whole index of a checkpoint (no such file"),
        ("__0_0.distcp", cut, "has 1,000 bytes where"),
        ("__0_0.distcp", Path.unlink, "is missing; restore it from a copy"),
        ("common.pt", cut, "has 1,000 bytes where"),
    ):
        with changed(trained.weights / file, change) as path:
            assert f"error: {path} {said}" in answer(*words).error()


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_marker_is_refused_by_name(trained, answer, name):
    half = trained.checkpoint.joinpath("longhaul.json").stat().st_size // 2
    with changed(
        trained.checkpoint / "longhaul.json",
        lambda path: path.write_bytes(path.read_bytes()[:half]),
    ) as path:
        assert f"{path} is damaged (" in answer(*commands(trained)[name]).error()


@pytest.mark.parametrize("name", ["evaluate", "rope search", "resume", "start"])
def test_a_flipped_byte_of_the_store_is_refused_by_name(trained, answer, name):
    split = "heldout" if name in ("evaluate", "rope search") else "train"
    for ending in ("idx", "bin"):
        with changed(trained.store / f"{split}.{ending}", flipped) as path:
            said = answer(*commands(trained)[name]).error()
        assert f"{path} is damaged: its SHA-256" in said
        assert "prepare the store again" in said


def test_a_ladder_is_not_started_on_a_damaged_store(trained, answer, small_store):
    with changed(trained.store / "train.idx", flipped) as path:
        words = ("--ladder", "tiny", "--store", trained.store, "--out", "run")
        assert f"{path} is damaged" in answer("run", *words).error()
    assert not Path("run/stages").exists()


def test_an_exchanged_tokenizer_is_refused_before_ranks_start(trained, answer):
    def exchanged(path: Path) -> None:
        definition = json.loads(path.read_text())
        definition["model"]["merges"].pop()
        path.write_text(json.dumps(definition))

    with changed(trained.store / "tokenizer" / "tokenizer.json", exchanged):
        said = answer("evaluate", "--run", trained.run, "--store", trained.store).error()
    assert "was made with another tokenizer" in said


def test_preflight_reads_the_whole_store_unless_told_not_to(trained, answer):
    words = ("preflight", "--store", trained.store, "--seconds", 0)
    with changed(trained.store / "train.bin", flipped) as path:
        told, untold = answer(*words), answer(*words, "--no-verify")
    assert f"FAIL store's content: {path} is damaged" in told.out
    assert "store's content" not in untold.out
    assert "ok   store's content" in answer(*words).out


def test_a_flipped_byte_of_a_checkpoint_is_refused_by_the_export_that_reads_it(trained, answer):
    words = commands(trained)["export"]
    with changed(trained.weights / "__0_1.distcp", flipped) as path:
        assert f"error: {path} is damaged: its SHA-256 differs" in answer(*words).error()
        assert not Path("exported").exists()
        code, _, err = answer(*words, "--no-verify")
    assert code == 0, err
    assert f"note: {trained.checkpoint} is not verified, as --no-verify asks" in err


def test_a_checkpoint_without_sums_is_exported_with_a_note(trained, answer):
    with changed(trained.checkpoint / "longhaul.json", without_sums):
        code, _, err = answer(*commands(trained)["export"])
    assert code == 0
    assert "was saved without SHA-256 sums and is not verified" in err


def test_ranks_that_resume_from_a_damaged_checkpoint_are_all_told_of_the_file(trained, tmp_path):
    options = trained.options | {"steps": 4}
    with (
        changed(trained.weights / "__0_0.distcp", flipped) as path,
        Ranks(train_on_forked_rank, 2, options, str(tmp_path / "log"), server=NEMO) as ranks,
        pytest.raises(Exception, match=rf"{path} is damaged: its SHA-256 differs"),
    ):
        ranks.results(300)


def test_ranks_refuse_an_index_that_would_run_code(trained, tmp_path):
    foreign = pickle.dumps(Touching(tmp_path / "ran"))
    options = trained.options | {"run": str(tmp_path), "start": str(trained.checkpoint)}
    with (
        changed(trained.weights / ".metadata", lambda path: path.write_bytes(foreign)) as path,
        Ranks(train_on_forked_rank, 2, options, str(tmp_path / "log"), server=NEMO) as ranks,
        pytest.raises(Exception, match=rf"{path} is damaged: .*and it asks for posix\.system"),
    ):
        ranks.results(300)
    assert not (tmp_path / "ran").exists()


def test_ranks_that_evaluate_compare_the_checkpoint_unless_told_not_to(trained, tmp_path, answer):
    options = {
        "run": str(trained.run), "stages": [STAGE], "store": str(trained.store),
        "lengths": [LENGTH], "documents": 1, "trials": 0,
    }  # fmt: skip
    log = str(tmp_path / "log")
    with changed(trained.weights / "__0_0.distcp", flipped) as path:
        with (
            Ranks(evaluate_on_forked_rank, 2, options, log, server=NEMO) as ranks,
            pytest.raises(Exception, match=rf"{path} is damaged: its SHA-256 differs"),
        ):
            ranks.results(300)
        unverified = options | {"verify": False}
        with Ranks(evaluate_on_forked_rank, 2, unverified, log, server=NEMO) as ranks:
            ranks.results(300)
    assert (trained.run / "eval" / f"{STAGE}.json").is_file()
    shown = answer("report", "--run", trained.run)  # what `evaluate` names as the next command
    assert shown.code == 0, shown.err
    assert f"{trained.run / 'report.html'}\n" in shown.out


def test_no_verify_reaches_the_ranks_in_the_recipe_and_is_said(trained, answer):
    words = ("pretrain", "--factory", "tiny_2k", "--no-verify", "--to-yaml", "recipe.yaml")
    assert answer(*words).code == 0
    assert yaml.safe_load(Path("recipe.yaml").read_text())["resume"]["verify"] is False


def test_what_no_verify_leaves_out_is_said_and_nothing_is_read(trained):
    from longhaul.run_folder.undamaged import require_undamaged
    from recipes.resolved.stage import ResolvedStage

    stage = ResolvedStage.of(recipe(trained.options))
    with changed(trained.store / "train.bin", flipped):
        notes = require_undamaged([stage], False)
    assert notes == [
        f"{trained.checkpoint} is not verified, as --no-verify asks",
        f"the store {trained.store} is not verified, as --no-verify asks",
    ]
    assert require_undamaged([stage], None) == []
    (read,) = require_undamaged([stage], True)
    assert "MB have the SHA-256 that was written" in read
