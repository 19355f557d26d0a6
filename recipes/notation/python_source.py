# SPDX-License-Identifier: Apache-2.0
"""A layout as Python source, formatted as `ruff format` does it: how a shipped row writes it."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from recipes.spec.layout import ContextParallel, Layout

WIDTH, INDENT = 100, 4
"""Columns of a line (`line-length` of pyproject.toml) and of a level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call: what is called, and its arguments, each with its keyword or an empty one."""

    name: str
    arguments: tuple[tuple[str, "Call | str"], ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{before}{value}' for before, value in self.arguments)})"


def layout_call(layout: Layout) -> Call:
    """Return the call that makes a layout; fields that have their default are left out."""
    return _made(layout)


def formatted(source: Call | str, *, before: str = "", after: str = "", indent: int = 0) -> str:
    """Return source on one line, or on as many as the width takes, between two texts."""
    margin, deeper = " " * indent, indent + INDENT
    line = f"{margin}{before}{source}{after}"
    if isinstance(source, str) or len(line) <= WIDTH:
        return line
    arguments = " " * deeper + ", ".join(f"{name}{value}" for name, value in source.arguments)
    if len(arguments) > WIDTH:
        arguments = "\n".join(
            formatted(value, before=name, after=",", indent=deeper)
            for name, value in source.arguments
        )
    return f"{margin}{before}{source.name}(\n{arguments}\n{margin}){after}"


def _source(value: object) -> Call | str:
    if isinstance(value, ContextParallel):
        return _context_parallel(value)
    if is_dataclass(value):
        return _made(value)
    if isinstance(value, list):
        return f"[{', '.join(str(_source(each)) for each in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _made(value: Any) -> Call:
    default = type(value)()
    return _call(
        type(value).__name__,
        **{
            field.name: getattr(value, field.name)
            for field in fields(value)
            if getattr(value, field.name) != getattr(default, field.name)
        },
    )


def _context_parallel(cp: ContextParallel) -> Call:
    """Return the named constructor of a kind, with its sizes."""
    kind, ulysses = cp.how.kind, cp.how.ulysses or 1
    heads = {"heads_per_stage": cp.how.heads_per_stage} if cp.how.heads_per_stage else {}
    ring = cp.size // ulysses
    if kind == "hybrid":
        return _call("ContextParallel.hybrid", ulysses=ulysses, ring=ring, **heads)
    if kind == "a2a+p2p":
        return _call("ContextParallel.transformer_engine_hybrid", a2a=ulysses, p2p=ring)
    if kind in ("p2p", "a2a", "all_gather"):
        return _call("ContextParallel.transformer_engine", kind, cp.size)
    return _call(f"ContextParallel.{kind}", cp.size, **heads)


def _call(name: str, /, *positional: object, **keywords: object) -> Call:
    given = [("", _source(value)) for value in positional]
    named = [(f"{keyword}=", _source(value)) for keyword, value in keywords.items()]
    return Call(name=name, arguments=(*given, *named))
