# SPDX-License-Identifier: Apache-2.0
"""Make the signature of NeMo's classes that of their `__init__` on every Python version.

Only since Python 3.11.5 does `inspect.signature` of a class use the nearest `__new__` or `__init__`
in its bases. Before, an inherited `__new__` comes first, and NeMo's `IOMixin` has one of
`(cls, *args, **kwargs)`: a subclass without its own `__init__` then seems to accept anything, so
fiddle, which uses `inspect`, finds no defaults and refuses no misspelled argument. Importing this
module sets the signature where `inspect` looks first.
"""

import inspect
from types import MethodType
from typing import Any

from nemo.lightning.io.mixin import IOMixin


class InitSignature:
    """A `__signature__` that each subclass computes for itself."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        """Return the signature of the class; a callable instance has its own."""
        if instance is not None:
            raise AttributeError("__signature__")
        return inspect.signature(MethodType(owner.__init__, owner))  # bound: without self


IOMixin.__signature__ = InitSignature()
