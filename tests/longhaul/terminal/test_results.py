# SPDX-License-Identifier: Apache-2.0
import io
import os

from rich.console import Console

from longhaul.terminal import results
from tests.conditions import until


def test_a_result_is_announced_once_when_its_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "SECONDS", 0.01)
    files = {name: tmp_path / f"{name}.json" for name in ("base", "late", "never")}
    files["base"].write_text("from before")
    os.utime(files["base"], ns=(1, 1))
    out = io.StringIO()
    with results.announcing(Console(file=out), files, "evaluated"):
        assert out.getvalue() == ""
        files["base"].write_text("again")
        until(lambda: "base evaluated (1 of 3)\n" in out.getvalue())
        files["late"].write_text("new")
    assert out.getvalue() == "base evaluated (1 of 3)\nlate evaluated (2 of 3)\n"


def test_parts_of_a_result_are_named_while_nothing_else_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "SECONDS", 0.01)
    monkeypatch.setattr(results, "SILENT_SECONDS", 0.0)
    found = ["of before"]
    out = io.StringIO()
    with results.announcing(
        Console(file=out), {"one": tmp_path / "one"}, "evaluated", lambda _: tuple(found)
    ):
        found.append("loss by position")
        until(lambda: out.getvalue() != "")
        monkeypatch.setattr(results, "SILENT_SECONDS", 60.0)
        found.append("gain from context")
    assert out.getvalue() == "one: loss by position measured\n"


def test_a_single_result_is_not_announced(tmp_path):
    out = io.StringIO()
    with results.announcing(Console(file=out), {"one": tmp_path / "one"}, "evaluated"):
        (tmp_path / "one").touch()
    assert out.getvalue() == ""
