# SPDX-License-Identifier: Apache-2.0
"""Read a user's text, JSON or YAML file: return its content, or raise one sentence with its path.

A file may have another encoding, be truncated, hold gigabytes, be nested too deeply, or have
circular aliases. Each is refused before it is read further.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**18
"""Bytes of a recipe or a cluster file; the largest that is shipped has 7,886."""
LARGEST_JSON = 2**22
"""Bytes of a config; quantized models list their modules in it."""
MOST_VALUES = 1_000_000
"""Values that the aliases of a file may expand to."""
LONGEST_SHOWN = 60
"""Characters of a value that an error repeats."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that PyYAML raises for a value that is invalid for its type, such as month 13."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML was built with it; both create plain values only, never objects."""


def read_text(path: Path, most: int = LARGEST) -> str:
    """Return the UTF-8 text of a file of at most `most` bytes; raise ValueError otherwise."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file")
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"{path} cannot be read: {why}; name a readable file") from error
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes; check the path")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte 0x{content[error.start]:02x} at {error.start:,}); "
            "save it as UTF-8"
        ) from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; raise ValueError for a file that is not one."""
    text = read_text(path, LARGEST_JSON)
    try:
        return json.loads(text)
    except ValueError as error:  # a number with too many digits for Python is not a JSONDecodeError
        raise ValueError(f"{path} is not JSON ({error})") from None
    except RecursionError:
        raise ValueError(
            f"{path} is not JSON that can be read (nested too deeply); check the path"
        ) from None


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file.

    Raises ValueError for invalid YAML, for a duplicate key in a mapping, and for a circular alias.
    """
    text = read_text(path)
    try:
        loader = LOADER(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            for problem in _problems(node):
                raise ValueError(f"{path} {problem}")
            return _value(loader, node, path)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {_on_one_line(error)}") from None
    except RecursionError:
        raise ValueError(
            f"{path} is not YAML that can be read (nested too deeply); check the path"
        ) from None


def _value(loader: Any, top: yaml.Node, path: Path) -> Any:
    """Return the value of a tree of nodes; raise ValueError for a word invalid for its type."""
    try:
        return loader.construct_document(top)
    except UNREADABLE:
        for node in _scalars(top):
            try:
                LOADER("").construct_object(node)
            except UNREADABLE:
                word, kind = str(node.value)[:LONGEST_SHOWN], node.tag.rpartition(":")[2]
                raise ValueError(
                    f"{path} has a value that is not YAML in line {_line(node)}: {word!r} cannot "
                    f"be read as {kind}; write one, or text in quotes"
                ) from None
        raise


def _scalars(top: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Yield the words and numbers of a tree of nodes in order, each once."""
    seen: set[int] = set()
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            yield node
        waiting += reversed(_children(node))


def _problems(top: yaml.Node) -> Iterator[str]:
    """Yield the errors of a tree of nodes, each with its line."""
    above: set[int] = set()
    sizes: dict[int, int] = {}
    waiting: list[tuple[yaml.Node, bool]] = [(top, False)]
    while waiting:
        node, left = waiting.pop()
        if left:
            above.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in _children(node))
            if sizes[id(node)] > MOST_VALUES:
                yield (
                    f"line {_line(node)}: aliases expand to more than {MOST_VALUES:,} values; "
                    "write the values out"
                )
                return
            continue
        if id(node) in above:
            yield (f"line {_line(node)}: an alias refers to a value that contains it; write it out")
            return
        if id(node) in sizes:
            continue
        above.add(id(node))
        waiting.append((node, True))
        waiting += [(child, False) for child in _children(node)]
        if isinstance(node, yaml.MappingNode):
            yield from _repeated(node)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _repeated(mapping: yaml.MappingNode) -> Iterator[str]:
    seen: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.tag != "tag:yaml.org,2002:merge" and (key.tag, key.value) in seen:
            yield (
                f"has {key.value} twice, in lines {seen[key.tag, key.value]} and {_line(key)}; "
                "remove one of them"
            )
        seen[key.tag, key.value] = _line(key)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _on_one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or not problem:
        return f"{' '.join(str(error).split())[:200]}; save it as plain text"
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}"
