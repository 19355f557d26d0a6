# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
from megatron.core import parallel_state

from custom_modules.cpu_backend import cpu_backend
from tests.ranks import one_rank


@pytest.fixture
def megatron_rank() -> Iterator[None]:
    """Run the test as the only rank of Megatron's groups, on CPU."""
    with one_rank(), cpu_backend(force=True):
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
