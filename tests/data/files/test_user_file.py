# SPDX-License-Identifier: Apache-2.0
"""A file of a user is read, or refused in one sentence with its path."""

import pytest
import yaml

from data.files.user_file import LARGEST, MOST_VALUES, read_json, read_text, read_yaml

LAUGHS = "a0: &a0 [1]\n" + "".join(
    f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 9)
)


def test_plain_yaml_is_what_pyyaml_reads(tmp_path):
    text = "a: &x {b: 1, c: [1.5, true, null]}\nd: *x\ne: {<<: *x, b: 3}\n'1': one\n1: whole\n"
    (tmp_path / "file.yaml").write_text(text)
    assert read_yaml(tmp_path / "file.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_a_byte_order_mark_is_passed_over(tmp_path, read):
    (tmp_path / "file").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read(tmp_path / "file") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: 1\nb: 2\na: 3\n", "has a twice, in lines 1 and 3"),
        (b"a: {b: 1, b: 1}\n", "has b twice"),
        (b"a: &a [*a]\n", "an alias refers to a value that contains it"),
        (LAUGHS.encode(), f"expand to more than {MOST_VALUES:,} values"),
        (b"name: caf\xe9\n", "is not UTF-8 text (byte 0xe9 at 9); save it as UTF-8"),
        ("name: x\n".encode("utf-16"), "is not UTF-8 text (byte 0xff at 0)"),
        (b"a: [1, 2", "is not YAML: did not find expected ',' or ']' in line"),
        (b"a: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        (b"[" * 20_000, "is not YAML"),
        (b"a\0b: 1", "is not YAML"),
        (b"a: 1\nb: 2026-13-45\n", "in line 2: '2026-13-45' cannot be read as timestamp"),
        (b"2026-13-45: 1\n", "in line 1: '2026-13-45' cannot be read as timestamp"),
        (b"a: 2026-01-01T00:00:00+99:00\n", "cannot be read as timestamp"),
        (b"a: !!timestamp noon\n", "in line 1: 'noon' cannot be read as timestamp"),
        (b"a: &x !!bool no\nb: [*x, {c: !!bool maybe}]\n", "in line 2: 'maybe' cannot be read"),
        (b"a: !!int eight\n", "'eight' cannot be read as int; write one, or text in quotes"),
        (b"a: !!int ''\n", "'' cannot be read as int"),
        (b"a: " + b"1" * 5_000, f"'{'1' * 60}' cannot be read as int"),
        (b"#" * (LARGEST + 1), f"has more than {LARGEST:,} bytes"),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_refused_by_its_path(tmp_path, content, said):
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - compared as a whole below
        read_yaml(path)
    assert str(refused.value).startswith(f"{path} ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1', "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "is not JSON .*digits"),
        (b'{"a": "caf\xe9"}', "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_json_is_refused_by_its_path(tmp_path, content, said):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        read_json(path)
    assert str(refused.value).startswith(f"{path} ")


def test_a_folder_and_a_file_that_is_not_there_are_told(tmp_path):
    with pytest.raises(ValueError, match="is a folder; expected a file"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="nowhere cannot be read: no such file or directory"):
        read_text(tmp_path / "nowhere")
