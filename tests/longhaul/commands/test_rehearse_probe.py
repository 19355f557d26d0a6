# SPDX-License-Identifier: Apache-2.0
"""`longhaul rehearse --probe`: real weights are extended a little, measured before and after."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.rehearsal.extension import MOST_ON_CPU
from tests.house.rooms import TREE
from tests.recipes.hugging_face.support.models import folder
from tests.recipes.hugging_face.test_parity import imported
from tests.warm_start import MORE, path_with

NATIVE, LENGTH = 128, 256
LADDER = f"""
name: longer
source: own
stages:
  - seq_length: {LENGTH}
    rope: {{method: yarn, factor: 2}}
    tokens: 1M
    tokens_per_batch: 16K
    lr: {{peak: 1.0e-3}}
    documents: across
  - seq_length: 64K
    rope: {{method: yarn, factor: 512}}
    tokens: 1M
    tokens_per_batch: 64K
    lr: {{peak: 1.0e-3}}
    documents: across
"""


NAMED = ("--card", "base", "--ladder", "ladder.yaml")


@pytest.fixture(scope="module")
def imported_base(small_store, tmp_path_factory) -> Path:
    """Return an import of a small Qwen 3 with the store's tokenizer."""
    models = tmp_path_factory.mktemp("models")
    source = folder(
        models / "published", "qwen3", num_attention_heads=4, max_position_embeddings=NATIVE
    )
    shutil.copytree(small_store / "tokenizer", source, dirs_exist_ok=True)
    imported(source, models / "base")
    return models / "base"


@pytest.fixture
def base(imported_base, tmp_path) -> Path:
    """Return the import and the ladder in the test's folder."""
    for path in (imported_base, imported_base.with_name("published")):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "ladder.yaml").write_text(LADDER)
    return tmp_path / "base"


@pytest.fixture
def probe(base, small_store, answer):
    """Return a function that probes the small base on one CPU rank."""

    def run(*words: object, store: Path = small_store):
        return answer("rehearse", *NAMED, "--probe", "--store", store, *words)

    return run


@pytest.mark.nightly
@pytest.mark.slow
def test_a_base_is_measured_trained_a_little_and_measured_again(probe, small_store, tmp_path):
    small = ("--stage", LENGTH, "--device", "cpu", "--ranks", 1, "--tokens", 8192, "--documents", 2)
    code, shown, said = probe(*small)
    run = tmp_path / "runs" / "probes" / "base_longer_256"
    log = run / "output.log"
    assert code == 0, shown + said + (log.read_text()[-4000:] if log.exists() else "")
    seen = json.loads((run / "probe.json").read_text())
    names = ["own rotation", "stage's rotation, untrained", "after the probe"]
    assert list(seen["readings"]) == names
    assert (seen["native"], seen["length"], seen["documents"]) == (NATIVE, LENGTH, 2)
    assert (seen["steps"], seen["tokens"], len(seen["losses"])) == (8, 8192, 8)
    for reading in seen["readings"].values():
        assert [row[:2] for row in reading["ranges"]] == [[0, 64], [64, 128], [128, 256]]
        assert reading["contexts"] == [128, 256]
    before, after = (seen["readings"][name]["ranges"] for name in names[1:])
    for old, new in zip(before, after, strict=True):  # random weights learn at once
        assert all(late < early for early, late in zip(old[2], new[2], strict=True))
    verdict = seen["verdict"]
    of_documents = [row[1] - row[0] for row in seen["readings"][names[2]]["by_context"]]
    assert verdict["cost"]["mean"] == pytest.approx(sum(of_documents) / 2)
    assert verdict["same_tokens"]
    assert f"verdict: {verdict['word']}" in shown
    assert "128-256 *" in shown
    assert "queries and keys are normalised (QK norm)" in shown  # a fact of the base
    assert [fact["name"] for fact in seen["facts"]] == ["qk_norm", "native_context"]

    steps = (run / "stages" / "base_longer_probe_256" / "metrics.jsonl").read_text()
    (run / "eval" / "base_longer_probe_256.json").unlink()
    # The rest is there, and is read again. In a process of its own, as what libraries print to a
    # test's stdout is not kept from it.
    words = ("rehearse", *NAMED, "--probe", "--store", small_store, *small, "--json")
    again = subprocess.run(
        [sys.executable, "-m", "longhaul.cli", *map(str, words)],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env=os.environ | {"PYTHONPATH": path_with(TREE)} | MORE,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["verdict"] == verdict
    assert "base_longer_probe_256 evaluated (1 of 3)" in again.stderr
    assert (run / "stages" / "base_longer_probe_256" / "metrics.jsonl").read_text() == steps


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stage", "64K", "--from", "base", "--device", "cpu"), "takes CPU ranks hours"),
        (("--stage", "64K"), "starts from the stage before; name the weights to probe with --from"),
        (("--stage", LENGTH), "has 0"),
        (("--stage", LENGTH, "--device", "cuda"), "--device is 'cuda'; expected cpu"),
        (("--stage", LENGTH, "--from", "nowhere"), "--from: there is no folder nowhere"),
        (("--stage", LENGTH, "--from", "published"), "holds no complete checkpoint"),
        (("--stage", LENGTH, "--length", "1K"), "--length is 1,024, and the stage is for 256"),
        (("--stage", LENGTH, "--length", "128"), "the weights were trained for 128; a probe reads"),
        (("--stage", LENGTH, "--length", "200", "--device", "cpu"), "positions; take 192"),
        (
            ("--stage", LENGTH, "--device", "cpu", "--tokens", "100"),
            "--tokens is 100, and a sequence of the probe has 256",
        ),
        (("--stage", LENGTH, "--ranks", "2"), "--ranks is 2, and the ranks of a probe on GPUs"),
        (("--stage", LENGTH, "--nodes", "2"), "a probe runs on one node, and its layout takes 2"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_cannot_be_probed_is_one_sentence(probe, words, said):
    assert said in probe(*words).error()


def test_a_store_that_is_missing_or_of_another_tokenizer_is_refused(probe, tmp_path):
    words = ("--stage", LENGTH, "--device", "cpu")
    error = probe(*words, store=tmp_path / "none").error()
    assert "there is no token store at" in error
    assert "--tokenizer base/hugging_face" in error
    from data.prepare import prepare

    (tmp_path / "text").mkdir()
    for number in range(40):
        text = f"other words, another tokenizer, document {number}\n" * 40
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    prepare(str(tmp_path / "text"), tmp_path / "other", vocab_size=300)
    assert "tokenizer" in probe(*words, store=tmp_path / "other").error()


def test_options_of_a_probe_need_it_and_a_card_is_needed(answer):
    assert (
        "--tokens has an effect only with --probe"
        in answer("rehearse", "tiny_2k", "--tokens", "1M").error()
    )
    assert (
        "--card is missing"
        in answer("rehearse", "--probe", "--ladder", "nemo", "--stage", "64K").error()
    )
    assert f"{MOST_ON_CPU:,}" == "32,768"
