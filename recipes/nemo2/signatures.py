# SPDX-License-Identifier: Apache-2.0
"""Give NeMo's classes the signature of their `__init__`, on every Python.

`inspect.signature` of a class takes the `__new__` or the `__init__` that is nearest in its bases
only since Python 3.11.5. Before, an inherited `__new__` comes first, and NeMo's `IOMixin` has one
of `(cls, *args, **kwargs)`: a class below it without an `__init__` of its own then seems to take
anything. fiddle, which asks `inspect`, has no default of it to read and refuses no misspelled
argument. Importing this module states the signature where `inspect` looks first.
"""

import inspect
from types import MethodType
from typing import Any

from nemo.lightning.io.mixin import IOMixin


class InitSignature:
    """A `__signature__` that each class below the one that holds it answers for itself."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        """Return what the class takes; an instance, where it can be called, has its own."""
        if instance is not None:
            raise AttributeError("__signature__")
        return inspect.signature(MethodType(owner.__init__, owner))  # bound: without self


IOMixin.__signature__ = InitSignature()
