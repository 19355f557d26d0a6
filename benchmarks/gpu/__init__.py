# SPDX-License-Identifier: Apache-2.0
"""All claims about one GPU, measured in one run and compared with other implementations.

    python -m benchmarks.gpu all --minutes 25 --out runs/gpu

A case is one measurement: a block, a step, a fork. `benchmarks.gpu.cases` lists them in the order
of their worth, `benchmarks.gpu.session` runs them in processes of their own within the minutes
given, and writes one JSON file a case and one page of all of them, `page.md`. Cases that have a
file are not run again: a later call continues where this one ended. The page lists the cases that
were not reached or failed, with the reason.

Ways that are compared take turns: first each way once, then each way once more.

`--device cpu` runs every case at a small size, which shows that it runs; its figures mean nothing.
"""
