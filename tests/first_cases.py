# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that keeps the first case of each parametrised test: a quick look."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect every case of a test but the one that is collected first."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.split("[")[0], item)
    kept = [item for item in items if first[item.nodeid.split("[")[0]] is item]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
