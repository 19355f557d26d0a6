# SPDX-License-Identifier: Apache-2.0
"""Text of others without the passwords of its URLs; light."""

import re

USER_INFO = re.compile(r"(?<=://)\S+@")
"""Up to the last at sign: a password that was not encoded may have any character."""


def without_passwords(text: str) -> str:
    """Return a text with `***` in place of user and password of each URL."""
    return USER_INFO.sub("***@", text)
