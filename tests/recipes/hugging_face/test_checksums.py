# SPDX-License-Identifier: Apache-2.0
"""The SHA-256 of an export's files are those of sha256sum, and a flipped bit is named."""

import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.checkpoints.files import DamagedFileError
from recipes.hugging_face.checksums import SUMS, damages, unverified, write_sums
from tests.recipes.hugging_face.support.models import folder
from tests.recipes.hugging_face.test_parity import imported


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "published", max_shard_size="40KB")


@pytest.fixture
def export(published, tmp_path, answer) -> Path:
    """Return an export of several weight files."""
    imported(published, tmp_path / "imported")
    words = ("--from", "imported", "--to", "export", "--max-shard-gib", "0.00005")
    assert answer("export", *words).code == 0
    return tmp_path / "export"


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_sha256sum_checks_every_file_of_an_export(export):
    names = {file.name for file in export.iterdir()} - {SUMS}
    checked = subprocess.run(
        ["sha256sum", "-c", SUMS], cwd=export, capture_output=True, text=True, check=True
    )
    assert {line.removesuffix(": OK") for line in checked.stdout.splitlines()} == names
    assert {"config.json", "longhaul_rotation.json", "tokenizer.json"} < names


def test_a_flipped_bit_of_an_export_is_named_wherever_it_is_read(export, answer):
    assert answer("checkpoint", "verify", export).out == f"{export}: verified\n"
    shard = sorted(export.glob("*.safetensors"))[1]
    flip(shard)
    said = f"{shard} is damaged: its SHA-256 differs from what was written"
    assert said in answer("import", "--from", export).error()
    assert not Path("models").exists()
    code, out, _ = answer("checkpoint", "verify", export, "--json")
    assert (code, said in out, "config.json" in out) == (1, True, False)
    kept = answer("import", "--from", export, "--no-verify")
    assert kept.code == 0
    assert f"note: {export} is not verified, as --no-verify asks" in kept.err
    flip(shard)
    assert answer("import", "--from", export, "--to", "again").code == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_other_files_of_an_export_are_compared_too(export, answer, name):
    flip(export / name, at=-3)
    assert f"{export / name} is damaged" in answer("import", "--from", export).error()


def test_a_folder_without_sums_is_taken_and_that_is_said(published, answer):
    said = f"{published} has no {SUMS}, so its files are not verified"
    done = answer("import", "--from", published)
    assert (done.code, f"note: {said}" in done.err) == (0, True)
    assert not (Path("models") / published.name / "hugging_face" / SUMS).exists()
    assert (
        f"{published} has no {SUMS} to compare" in answer("checkpoint", "verify", published).error()
    )


def test_only_files_that_are_downloaded_are_compared_where_others_are_listed(published, tmp_path):
    model = Path(shutil.copytree(published, tmp_path / "model"))
    (model / "original.bin").write_bytes(b"of another program")
    write_sums(model)
    (model / "original.bin").unlink()
    assert unverified(model, patterns=("*.safetensors", "*.json")) == ""
    assert unverified(model) == ""  # another program's, which nothing here reads
    (model / "config.json").unlink()
    with pytest.raises(DamagedFileError, match=r"config\.json cannot be read \(No such file"):
        unverified(model)


def test_files_in_folders_have_sums_too(published, tmp_path):
    model = Path(shutil.copytree(published, tmp_path / "model"))
    template = model / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ messages }}")
    write_sums(model)
    assert "  additional_chat_templates/tool_use.jinja\n" in (model / SUMS).read_text()
    assert damages(model) == []
    template.write_text("{{ others }}")
    [damage] = damages(model)
    assert "tool_use.jinja" in damage


@pytest.mark.parametrize("listed", ["", "# by hand\n\n", "config.json"])
def test_weights_without_a_sum_are_not_called_verified(published, tmp_path, listed):
    model = Path(shutil.copytree(published, tmp_path / "model"))
    write_sums(model)
    lines = (model / SUMS).read_text().splitlines(keepends=True)
    kept = [line for line in lines if listed and line.endswith(f"  {listed}\n")]
    (model / SUMS).write_text("".join(kept) or listed)
    assert "has no sum of model-00001-of-00008.safetensors, " in unverified(model)


@pytest.mark.parametrize(
    "line", ["no sum", f"{'0' * 64}  ../config.json", f"{'0' * 64}  /etc/passwd", f"{'0' * 63}  a"]
)
def test_sums_that_sha256sum_would_not_write_are_refused_by_their_line(tmp_path, line):
    (tmp_path / SUMS).write_text(f"{'0' * 64} *config.json\n{line}\n")
    with pytest.raises(ValueError, match=f"{SUMS} line 2 is .*as sha256sum writes"):
        damages(tmp_path)
