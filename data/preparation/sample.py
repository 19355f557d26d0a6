# SPDX-License-Identifier: Apache-2.0
"""The documents that a tokenizer is trained on: those with the smallest hashes.

They depend neither on the order of the source nor on how many processes read it. A long document
gives its first characters. Of a source of more than `READ_BYTES`, shards at equal distances are
read, since a trainer needs no more than a sample. Synthetic text is used if there is no other.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from data.formats.records import LongText, Unusable, UnusableError
from data.preparation.merge import require_both_splits
from data.preparation.plan import Plan, Shard
from data.preparation.shard import shard_records
from data.preparation.task import ContentHash, split_of
from data.readers import broken, judge, without_documents

SAMPLE_BYTES = 2**26
"""Text a tokenizer is trained on at most."""
READ_BYTES = 2**30
"""Bytes of the source that are read for it at most, but for one shard."""


def training_texts(plan: Plan, *, skip_broken: bool) -> list[str]:
    """Return the texts to train a tokenizer on, those with the smallest hashes first.

    Raises SourceError for a broken record and, if the whole source was read, for an empty split.
    """
    kept: list[tuple[float, str, int]] = []
    kept_bytes = 0
    limit = 1.0
    documents: Counter[str] = Counter()
    skipped = Counter[str]()
    made = {source.name for source in plan.sources if source.kind == "synthetic"}
    candidates = [shard for shard in plan.shards if shard.source not in made] or plan.shards
    shards = _chosen(candidates)
    for place, text in _documents(plan, shards, skipped, skip_broken):
        split = split_of(place, plan.settings.heldout_fraction)
        documents[split] += 1
        if split == "heldout" or place >= limit:
            continue
        size = len(text.encode())
        heapq.heappush(kept, (-place, text, size))
        kept_bytes += size
        while kept_bytes > SAMPLE_BYTES and len(kept) > 1:
            place_, _, size = heapq.heappop(kept)
            kept_bytes -= size
            limit = min(limit, -place_)
    named = " and ".join(source.origin for source in plan.sources)
    if len(shards) == len(plan.shards):
        if not documents:
            for source in plan.sources:
                skipped.update(source.skipped)
            raise without_documents(named, skipped)
        require_both_splits(named, plan.settings.heldout_fraction, documents)
    return [text for _, text, _ in sorted(kept, reverse=True)]


def require_first_document(plan: Plan, *, skip_broken: bool) -> None:
    """Raise SourceError if the first record of a source that is read cannot be used."""
    for source in plan.sources:
        if source.kind != "documents":
            continue  # it was looked at when the plan was made
        skipped = Counter(source.skipped)
        shards = [shard for shard in plan.shards if shard.source == source.name]
        if next(_documents(plan, shards, skipped, skip_broken), None) is None:
            raise without_documents(source.origin, skipped)


def _chosen(shards: Sequence[Shard]) -> list[Shard]:
    total = sum(shard.cost for shard in shards)
    step = max(1, -(-total // READ_BYTES))
    return list(shards[::step])


def _documents(
    plan: Plan, shards: Sequence[Shard], skipped: Counter[str], skip_broken: bool
) -> Iterator[tuple[float, str]]:
    """Yield the hash and the text of every document; of a long one, its beginning."""
    is_first = True
    for shard in shards:
        rest = shard_records(shard, plan.settings.text_key, None, skipped)
        for origin, content in rest:
            digest = ContentHash(plan.settings.seed)
            text = content if isinstance(content, str | Unusable) else _beginning(content, digest)
            judged = judge(text)
            if isinstance(judged, str):
                if isinstance(content, str):
                    digest.update(judged.encode())
                is_first = False
                yield digest.place(), judged
            elif judged.reason == "broken" and not skip_broken:
                raise broken(origin, judged, rest if is_first else ())
            else:
                skipped[judged.reason] += 1


def _beginning(text: LongText, digest: ContentHash) -> str | Unusable:
    """Return the first characters of a long text; all of it enters the hash."""
    kept, left = [], SAMPLE_BYTES // 4
    try:
        for chunk in text.chunks():
            digest.update(chunk.encode(errors="surrogatepass"))
            if left > 0:
                kept.append(chunk[:left])
                left -= len(chunk)
    except UnusableError as error:
        return error.found
    return "".join(kept)
