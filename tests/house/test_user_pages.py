# SPDX-License-Identifier: Apache-2.0
"""The pages from own data to an export are typed as they are, in a folder of their own.

Small random models are at the paths that the pages import from. On the laptop everything is
trained, evaluated, exported and loaded; on one GPU what needs none; the page of the cluster is
typed by `tests/slurm/test_dgx_page.py`. The plans of both GPU pages are made for the published
shapes too.
"""

import json
import re
from pathlib import Path

import pytest

from recipes.hugging_face.config import exported_config
from recipes.models import CARDS
from tests.house.blocks import OF_USERS, blocks, typed
from tests.house.rooms import TREE
from tests.recipes.hugging_face.support import models
from tests.warm_start import path_with

DGX, ONE_GPU, LAPTOP = OF_USERS
TREE_FIRST = {"PYTHONPATH": path_with(TREE)}
LLAMA = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
"""What plans and layouts of a Llama 3 depend on, but for its widths."""
PLANNED = re.compile(r"^longhaul (?:ladders|plan|show) ", re.MULTILINE)


def type_page(page: Path, folder: Path) -> dict[str, str]:
    """Type every block of a page that is not marked; return what each wrote. All must succeed."""
    shown = {}
    for block in blocks(page.read_text()):
        if not block.reason:
            code, shown[block.code] = typed(block, folder, TREE_FIRST)
            assert code == 0, f"{block.code}{shown[block.code]}"
    return shown


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Type the page of one GPU with a small model of its family; return the folder and output."""
    folder = tmp_path_factory.mktemp("one_gpu")
    models.folder(folder / "meta-llama" / "Llama-3.2-1B", **LLAMA)
    with (folder / "books.jsonl").open("w") as books:
        for number in range(40):
            books.write(json.dumps({"text": f"{number} words of a book. " * 20}) + "\n")
    return folder, type_page(ONE_GPU, folder)


@pytest.mark.slow
@pytest.mark.nightly  # its commands are also those of the guide, test_ladder and hugging_face.md
@pytest.mark.timeout(1800)
def test_the_laptop_s_page_trains_evaluates_and_exports(tmp_path):
    type_page(LAPTOP, tmp_path)
    scaling = json.loads((tmp_path / "my_model_2k" / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 4.0)
    run = tmp_path / "runs" / "my_model_longer"
    page = (run / "report.html").read_text()
    assert "Nothing is retrieved" in page
    metrics = [
        [json.loads(line)["loss"] for line in (stage / "metrics.jsonl").open()]
        for stage in sorted((run / "stages").iterdir())
    ]
    assert [len(losses) for losses in metrics] == [7, 7]
    assert metrics[1][-1] < metrics[0][0]


@pytest.mark.slow
def test_the_page_of_one_gpu_is_typed_up_to_the_training(one_gpu):
    folder, _ = one_gpu
    assert (folder / "models" / "llama1b" / "longhaul.json").is_file()
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_the_page_of_one_gpu_names_the_run_that_is_trained(one_gpu):
    run = "longhaul run --ladder long.yaml --card models/llama1b --gpus 1"
    lines = [line for one in blocks(ONE_GPU.read_text()) for line in one.code.splitlines()]
    assert run in lines
    shown = one_gpu[1][f"{run} --dryrun\n"]
    named = set(re.findall(r"runs/(\w+)(?:/stages/(\w+))?", ONE_GPU.read_text()))
    assert named == {("llama1b_long", ""), ("llama1b_long", "llama1b_long_256k")}
    assert all(f"runs/{name}" in shown and stage in shown for name, stage in named)


@pytest.mark.parametrize(
    ("page", "card", "folder"),
    [(DGX, "llama31_8b", "llama"), (ONE_GPU, "llama32_1b", "llama1b")],
    ids=["four nodes", "one GPU"],
)
def test_the_published_model_fits_on_the_machines_of_its_page(page, card, folder, tmp_path):
    """Type the plans where the import has the published shape, which no test can fill."""
    published = CARDS[card]
    config = exported_config(
        None, published, published.native_rope, published.native_context, dtype="bfloat16"
    )
    place = tmp_path / "models" / folder / "hugging_face"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    (tmp_path / "slurm").symlink_to(TREE / "slurm")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    chosen = [
        block
        for block in blocks(page.read_text())
        if not block.reason and (PLANNED.search(block.code) or "site.yaml" in block.code)
    ]
    shown = ""
    for block in chosen:
        code, said = typed(block, tmp_path, TREE_FIRST)
        assert code == 0, f"{block.code}{said}"
        shown += said
    assert "train it:\n  longhaul run --ladder" in shown
