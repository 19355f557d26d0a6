# SPDX-License-Identifier: Apache-2.0
"""Passwords of URLs are taken out of texts."""

import pytest

from recipes.spec.passwords import without_passwords


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("to http://user:pa55@host:5000/api failed", "to http://***@host:5000/api failed"),
        ("'https://token@host' and ftp://u:p@h", "'https://***@host' and ftp://***@h"),
        ("Failed to parse: http://user:p@s/#s?@host/api", "Failed to parse: http://***@host/api"),
        ("http://host:5000/api, ask ops@example.com", "http://host:5000/api, ask ops@example.com"),
    ],
)
def test_user_and_password_of_a_url_are_masked_and_no_other_word(text, masked):
    assert without_passwords(text) == masked
