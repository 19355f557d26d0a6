# SPDX-License-Identifier: Apache-2.0
"""`longhaul data inspect` of a stage, and stages with a mix that a store cannot have."""

import json
import shutil
from pathlib import Path

import pytest

from data.adoption.adopt import adopt
from data.adoption.checks import HeldOut
from data.adoption.pairs import Named
from data.prepare import prepare
from data.store import Manifest
from recipes.checkpoints.marker import write_marker

LADDER = """
name: mine
cards: [tiny]
stages:
  - seq_length: 512
    tokens: 80K
    tokens_per_batch: 4K
    lr: {peak: 1e-3}
    start: scratch
    documents: within
    mix:
      shares:
        - {source: code, weight: 0.75, end_weight: 0.25}
        - {source: text, weight: 0.25}
      other_lengths:
        - {seq_length: 128, steps: 0.2}
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of two sources and one of a single source without a name."""
    folder = tmp_path_factory.mktemp("two words")
    for name, repeats in (("code", 60), ("text", 25)):
        lines = [
            json.dumps({"text": f"{name} {n} " + "one two three four. " * (1 + n * 7 % repeats)})
            for n in range(150)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    prepare(str(folder / "code.jsonl"), folder / "first", vocab_size=300)
    tokenizer = folder / "first" / "tokenizer"
    prepare(str(folder / "text.jsonl"), folder / "second", tokenizer=str(tokenizer))
    named = [
        Named(path=folder / "first" / "train", name="code"),
        Named(path=folder / "second" / "train", name="text"),
    ]
    adopt(named, folder / "both", tokenizer=str(tokenizer), heldout=HeldOut(documents=2))
    return folder


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(LADDER)
    return path


def test_the_page_says_what_a_stage_takes(answer, stores, ladder) -> None:
    said = answer("data", "inspect", stores / "both", ladder, "--card", "tiny")
    assert said.code == 0, said.err
    assert "75.0% to 50.0%" in said.out
    assert "longhaul data inspect" in said.err
    assert "--step 1" in said.err
    asked = ["data", "inspect", stores / "both", ladder, "--card", "tiny", "--json"]
    content = json.loads(answer(*asked).out)
    assert [need["words"] for need in content["sources"]] == ["code", "text"]
    taken = {
        length: sum(
            group["rows_taken"]
            for group in content["groups"]
            if group["seq_length_tokens"] == length
        )
        for length in (512, 128)
    }
    assert taken == {512: 16 * 8, 128: 4 * 8}


def test_the_documents_of_a_step_fill_its_sequences(answer, stores, ladder) -> None:
    asked = ["data", "inspect", stores / "both", ladder, "--card", "tiny"]
    content = json.loads(answer(*asked, "--step", 2, "--data-ranks", 4, "--json").out)
    assert [sequence["data_rank"] for sequence in content["sequences"]] == [
        rank for rank in range(4) for _ in range(2)
    ]
    for sequence in content["sequences"]:
        assert 256 < sum(piece["tokens"] for piece in sequence["pieces"]) <= 512
    page = answer(*asked, "--step", 2).out
    for sequence in content["sequences"]:
        assert f"{sequence['pieces'][0]['tokens']:,}" in page


def test_sequences_of_another_length_are_listed_by_themselves(answer, stores, ladder) -> None:
    asked = ["data", "inspect", stores / "both", ladder, "--card", "tiny"]
    steps = (json.loads(answer(*asked, "--step", n, "--json").out) for n in range(1, 21))
    content = next(step for step in steps if step["seq_length_tokens"] == 128)
    assert content["joined_to_tokens"] == 512
    assert len(content["sequences"]) == 8 * 4
    for sequence in content["sequences"]:
        assert 0 < sum(piece["tokens"] for piece in sequence["pieces"]) <= 128
    page = answer(*asked, "--step", content["step"]).out
    assert "sequences of 128 tokens, 4 of them end to end in each row of the batch" in page


def test_the_only_stage_with_a_mix_needs_no_name(answer, stores, tmp_path) -> None:
    path = tmp_path / "two.yaml"
    first, mix = LADDER.partition("    mix:")[0], LADDER.partition("    mix:")[2]
    second = first.partition("stages:\n")[2].replace("seq_length: 512", "seq_length: 1K")
    second = second.replace("start: scratch", "start: previous")
    path.write_text(f"{first}{second}    mix:{mix}")
    asked = ["data", "inspect", stores / "both", path, "--card", "tiny"]
    said = answer(*asked)
    assert said.code == 0, said.err
    assert "note: 1K is the only stage of mine with a mix" in said.err
    assert "mix: 75% to 50% code, 25% to 50% text; whole documents by best fit" in said.out
    path.write_text(f"{first}    mix:{mix}{second}    mix:{mix}")
    assert (
        "--stage is missing; name one of ladder mine, which has 512, 1K" in answer(*asked).error()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "21"], "--step is 21, and the stage has 20 steps"),
        (["--data-ranks", "3"], "--data-ranks is 3"),
        (["--stage", "1K"], "no stage of 1K"),
    ],
)
def test_wrong_words_are_named(answer, stores, ladder, words, said) -> None:
    asked = ["data", "inspect", stores / "both", ladder, "--card", "tiny", *words]
    assert said in answer(*asked).error()


def test_a_stage_without_a_mix_says_where_to_write_one(answer, stores) -> None:
    asked = ["data", "inspect", stores / "first", "tiny", "--stage", "512"]
    assert "tokens has no mix; write `mix:` into a ladder file" in answer(*asked).error()


def test_a_store_of_one_source_takes_the_packing_alone(answer, stores, ladder) -> None:
    said = answer("data", "inspect", stores / "first", ladder, "--card", "tiny")
    assert said.code == 0
    assert "one source without a name" in said.err
    assert "code" not in said.out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("source: text", "source: books", "has no source books, which the mix takes; it has code"),
        (
            "text, weight: 0.25}",
            "text, weight: 0.25, at_least: 4K}",
            "no training documents of text from 4,096",
        ),
        ("text, weight: 0.25}", "text, weight: x}", "shares[1].weight is 'x'; expected a number"),
        ("seq_length: 128", "seq_length: 100", "other_lengths has 100"),
        ("within", "across", "need documents: within"),
        ("      other", "      most_repeats: 1\n      other", "are missing at most_repeats 1"),
    ],
)
def test_a_mix_that_cannot_be_had_is_told_before_anything_is_packed(
    answer, stores, ladder, old, new, said
) -> None:
    ladder.write_text(LADDER.replace(old, new).replace("80K", "800K"))
    asked = ["data", "inspect", stores / "both", ladder, "--card", "tiny"]
    assert said in answer(*asked).error()


def test_a_run_is_shown_as_it_ran(answer, stores, ladder, tmp_path) -> None:
    """With fewer steps than its ladder has, another share, and a window that it skipped."""
    folder = tmp_path / "a run" / "stages" / "tiny_mine_512"
    folder.mkdir(parents=True)
    shares = [{"_target_": "data.mixture.config.Share", "source": "text", "weight": 1.0}]
    mix = {"_target_": "data.mixture.config.Mix", "shares": shares}
    data = {
        "mix": mix, "seq_length": 512, "global_batch_size": 8, "documents": "within",
        "store": str(stores / "both"),
    }  # fmt: skip
    recipe = {"data": data, "trainer": {"max_steps": 7}}
    (folder / "config.yaml").write_text(json.dumps(recipe))
    asked = ["data", "inspect", "--run", tmp_path / "a run", "--stage", "tiny_mine_512"]
    content = json.loads(answer(*asked, "--json").out)
    assert (content["steps"], content["sequences_a_step"]) == (7, 8)
    assert [need["words"] for need in content["sources"]] == ["text"]
    before = [json.loads(answer(*asked, "--step", n, "--json").out)["sequences"] for n in (3, 4)]
    (folder / "rewinds.jsonl").write_text(json.dumps({"step": 3, "samples": [16, 8]}) + "\n")
    after = json.loads(answer(*asked, "--step", 3, "--json").out)["sequences"]
    assert after == before[1] != before[0]
    assert "name a stage of" in answer(*asked[:-1], "other").error()
    assert "names its own store" in answer("data", "inspect", stores / "both", *asked[2:]).error()


def test_the_report_has_the_mix_that_a_stage_has_read(answer, stores, tmp_path) -> None:
    store, run = tmp_path / "store", tmp_path / "a run"
    shutil.copytree(stores / "both", store, ignore=shutil.ignore_patterns("rows-*"))
    folder = run / "stages" / "tiny_mine_512"
    checkpoint = folder / "checkpoints" / "step=5"
    checkpoint.mkdir(parents=True)
    manifest = Manifest.load(store)
    facts = {"step": 5, "max_steps": 7, "tokenizer": manifest.tokenizer.fingerprint}
    write_marker(checkpoint, facts)
    shares = [{"source": "code", "weight": 3.0}, {"source": "text", "weight": 1.0}]
    data = {
        "mix": {"shares": shares}, "seq_length": 512, "global_batch_size": 8,
        "documents": "within", "store": str(store),
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps({"data": data, "trainer": {"max_steps": 7}}))
    (folder / "rewinds.jsonl").write_text(json.dumps({"step": 3, "samples": [16, 8]}) + "\n")
    record = {"name": folder.name, "seq_length": 512, "tokens": 7 * 4096, "tokens_per_batch": 4096}
    (folder / "stage.json").write_text(json.dumps(record))

    asked = ["report", run, "--json"]
    before = json.loads(answer(*asked).out)["data_mix"]
    assert before["stages"] == []
    assert "there are no packed rows at" in before["unknown"][0]
    assert "packs them again" in before["unknown"][0]

    counted = {"code": 0, "text": 0}
    for step in range(1, 6):
        content = json.loads(answer("data", "inspect", "--run", run, "--step", step, "--json").out)
        for sequence in content["sequences"]:
            counted[sequence["source"]] += sum(piece["tokens"] for piece in sequence["pieces"])
    (stage,) = json.loads(answer(*asked).out)["data_mix"]["stages"]
    assert (stage["stage"], stage["step"]) == (folder.name, 5)
    assert {each["source"]: each["tokens"] for each in stage["sources"]} == counted
    assert [each["share_asked"] for each in stage["sources"]] == pytest.approx([0.75, 0.25])
    page = (run / "report.html").read_text()
    assert "<h2>Data mix as read</h2>" in page
    assert f"<td>{counted['code']:,}</td>" in page

    data |= {"mix": None, "store": str(stores / "first")}
    (folder / "config.yaml").write_text(json.dumps({"data": data, "trainer": {"max_steps": 7}}))
    (stage,) = json.loads(answer(*asked).out)["data_mix"]["stages"]
    assert stage["sources"] == [
        {"source": "documents", "share_asked": 1, "share_read": 1, "tokens": 5 * 4096}
    ]

    data["store"] = str(tmp_path / "gone")
    (folder / "config.yaml").write_text(json.dumps({"data": data, "trainer": {"max_steps": 7}}))
    gone = json.loads(answer(*asked).out)["data_mix"]
    assert gone["stages"] == []
    assert f"What {folder.name} read of each source is not known: there is no" in gone["unknown"][0]
    page = (run / "report.html").read_text()
    assert "is not known: there is no store at" in page
    assert "share read" not in page


def test_a_run_with_a_mix_makes_no_store_of_other_documents(answer, ladder, tmp_path) -> None:
    asked = ["run", "--ladder", ladder, "--card", "tiny", "--store", tmp_path / "gone"]
    said = answer(*asked, "--device", "cpu").error()
    assert f"no token store at {tmp_path / 'gone'}, and the mix takes its sources" in said
    assert not (tmp_path / "gone").exists()


def test_a_run_that_has_begun_makes_no_other_store(answer, tmp_path) -> None:
    (tmp_path / "begun").mkdir()
    record = {"ladder": "tiny", "card": "tiny", "stages": ["tiny_512", "tiny_2k", "tiny_8k"]}
    (tmp_path / "begun" / "run.json").write_text(json.dumps(record))
    asked = ["run", "--ladder", "tiny", "--store", tmp_path / "gone", "--out", tmp_path / "begun"]
    assert "begun was begun with it" in answer(*asked, "--executor", "local").error()


def test_a_recipe_is_its_ladder_s_stage(answer, stores) -> None:
    of_recipe, of_stage = (
        json.loads(answer("data", "inspect", stores / "both", *words, "--json").out)
        for words in (["tiny_512"], ["tiny", "--stage", "512"])
    )
    assert of_recipe == of_stage
    assert of_recipe["packing"] == "cut"
