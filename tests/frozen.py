# SPDX-License-Identifier: Apache-2.0
"""Leave what was imported before this module out of every later garbage collection.

Imported last by the process from which ranks are forked: NeMo's modules are a million objects, and
each save of a checkpoint collects garbage, which took a second of every rank.
"""

import gc

gc.collect()
gc.freeze()
