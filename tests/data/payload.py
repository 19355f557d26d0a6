# SPDX-License-Identifier: Apache-2.0
"""What a file with code in it does: a folder appears where somebody reads it as a pickle."""

import os
from pathlib import Path


class Payload:
    """Creates a folder when it is read as a pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)
