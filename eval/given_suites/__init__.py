# SPDX-License-Identifier: Apache-2.0
"""Suites whose samples are published: openai/mrcr, openai/graphwalks, and HELMET's own data.

    published files + tokenizer + lengths  ->  sample files as `longhaul ruler make` writes them

Nothing is drawn, shortened or lengthened: each row is in the bin of its length or is left out.
Nothing here imports torch.
"""
