# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe resolves to its golden file; `make golden` rewrites them."""

from tests.golden.rewrite import RECIPES, resolved


def test_each_shipped_recipe_resolves_to_its_golden_file():
    expected = {path.stem: path.read_text() for path in RECIPES.glob("*.yaml")}
    assert resolved() == expected
