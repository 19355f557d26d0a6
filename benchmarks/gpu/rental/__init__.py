# SPDX-License-Identifier: Apache-2.0
"""A kit that runs the cases of `benchmarks.gpu` on a rented machine where nothing can be installed.

The machine needs one GPU of compute capability 9.0, and a `python3` of Python 3.12 with torch 2.11
for CUDA 13. A call is one command there: it takes at most 60 MiB along, of which the tree is a
part, and is a minute away from the next. So the software travels in archives, which are built here
without a GPU:

    python -m benchmarks.gpu.rental.prepare

It writes the ignored folder `.kit`, checks the archives in an environment that has torch alone,
and prints which files each call carries. The calls, in the root of the tree there:

    benchmarks/gpu/rental/first.sh      carries archive a: everything but Transformer Engine
    benchmarks/gpu/rental/keep.sh       carries a part of the weights, and only stores it
    benchmarks/gpu/rental/second.sh     carries archive b, Transformer Engine, and other weights
    benchmarks/gpu/rental/third.sh      carries nothing new

A call on the same machine finds what an earlier one has unpacked; on another machine, carry the
archives again. Environment variables: OUT, the folder of the results (runs/rental); SECONDS_LEFT,
the seconds of the call; DEVICE=cpu for a rehearsal without a GPU; PYTHON, the interpreter.

`carried.txt` names the distributions of archive a, `device_code` cuts Transformer Engine's library
to one architecture, and `unpack` is the program of the other machine.
"""
