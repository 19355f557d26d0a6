# SPDX-License-Identifier: Apache-2.0
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import one_rank


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow files, so that no worker is left with one when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def megatron_rank() -> Iterator[None]:
    """Run the test as the only rank of Megatron's groups, on CPU."""
    from megatron.core import parallel_state  # here, since most tests do without it

    from custom_modules.cpu_backend import cpu_backend

    with one_rank(), cpu_backend(force=True):
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="session")
def small_store(tmp_path_factory) -> Path:
    """Return a store of the standard library's `asyncio` and a few long modules."""
    from data.prepare import prepare

    source = tmp_path_factory.mktemp("source")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in [*stdlib.glob("asyncio/*.py"), *stdlib.glob("[a-f]*.py")]:
        (source / f"{path.parent.name}_{path.name}.txt").write_text(path.read_text())
    store = tmp_path_factory.mktemp("stores") / "tiny"
    prepare(str(source), store, vocab_size=512)
    return store
