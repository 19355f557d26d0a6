# SPDX-License-Identifier: Apache-2.0
"""Python imports this file when it starts, since the tests put its folder on `PYTHONPATH`."""

import os

if "LONGHAUL_WARM_START" in os.environ:
    import longhaul_warm_start

    longhaul_warm_start.hand_over()
