# SPDX-License-Identifier: Apache-2.0
"""A queue of Megatron's checkpoint writer that ends with its rank.

The writer (`FileSystemWriterAsync`) collects the results of its processes in a queue that a process
of its own serves, from the first save on. Megatron's own server does not notice that the rank was
killed: after SIGKILL, such as when memory runs out, it and its resource tracker run on, with 300 MB
for each rank. The server here waits for the end of its parent.
"""

import os
import threading
from multiprocessing import get_context, parent_process
from multiprocessing.managers import SyncManager


def end_results_queue_with_rank() -> None:
    """Start the queue's server, before the first save of this process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async  # not in the server

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=get_context("spawn"))
        manager.start(initializer=_end_with_parent)
        filesystem_async._results_queue = manager.Queue()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
