# SPDX-License-Identifier: Apache-2.0
"""Temporary replacement of an attribute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` in the block, and restore the old value afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
