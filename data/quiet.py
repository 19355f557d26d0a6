# SPDX-License-Identifier: Apache-2.0
"""Import the large libraries without the pages of warnings that they print when imported."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hold back warnings, and log lines up to that level, of what is imported inside."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
