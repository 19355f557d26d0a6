# SPDX-License-Identifier: Apache-2.0
"""Documents whose last lines can only be predicted from lines far before them.

A source is written `synthetic:KIND[,name=value...]`, as `synthetic:retrieval,length=64K,keys=8`
(`data.long_range.spec`). Document `n` depends on the source's values, `n` and the tokenizer alone,
so that any worker can make any range of them.
"""
