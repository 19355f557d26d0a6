# SPDX-License-Identifier: Apache-2.0
"""The claims about one GPU, measured in turn with other implementations.

    python -m benchmarks.gpu all --seconds 1500 --out runs/gpu

A case is one measurement: a block, a step, a training through the command line.
`benchmarks.gpu.cases` has them in three lists (`first`, `second`, `third`), in the order of their
worth. `benchmarks.gpu.session` runs a list in as few processes as it can, within the seconds given.
`benchmarks.gpu.guards` marks cases during which something else used the GPU. Results are in one
file, `results.jsonl`, with a page of all of them, `page.md`. Cases that have a result are not run
again: a later call continues where this one ended.

`benchmarks.gpu.rental` carries all of this to a rented machine on which nothing can be installed,
and keeps what comes back in `benchmarks/gpu/measured`.

`--device cpu` runs every case at a small size, which shows that it runs; its figures mean nothing.
"""
