# SPDX-License-Identifier: Apache-2.0
"""What samples are made of: text of our own, or the files that RULER downloads.

    ruler-offline   prose, words, documents and questions of our own
    ruler           PaulGrahamEssays.json, squad.json and hotpotqa.json of a folder

RULER's word lists are optional in that folder: `adjectivelist.txt`, `nounlist.txt` and
`verblist.txt` of the package `wonderwords`, and `english_words.json` of RULER.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.files.sha256 import sha256_of
from eval.ruler import words
from eval.ruler.haystack import Prose
from eval.ruler.length import RulerError
from eval.ruler.library import Library
from eval.ruler.own_documents import OwnLibrary
from eval.ruler.published_documents import essays, hotpot, read_json, squad
from eval.ruler.tokens import Tokens

OFFLINE, PUBLISHED = "ruler-offline", "ruler"
ESSAYS, SQUAD, HOTPOT = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"
WRITTEN_BY = {
    ESSAYS: "download_paulgraham_essay.py",
    SQUAD: "download_qa_dataset.sh",
    HOTPOT: "download_qa_dataset.sh",
}
"""Script of NVIDIA/RULER, in `scripts/data/synthetic/json`, that writes each file."""
ADJECTIVES, NOUNS, VERBS = "adjectivelist.txt", "nounlist.txt", "verblist.txt"
ENGLISH = "english_words.json"


class Sources:
    """The texts of a suite, each read or made when it is first needed."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take the folder with RULER's files; without one, text of our own.

        Raises:
            RulerError: if a file is missing.
        """
        self._folder = folder
        self.suite = OFFLINE if folder is None else PUBLISHED
        self.files: tuple[Path, ...] = ()
        if folder is not None:
            _require_files(folder)
            optional = (ADJECTIVES, NOUNS, VERBS, ENGLISH)
            there = [name for name in optional if (folder / name).is_file()]
            self.files = tuple(folder / name for name in (*WRITTEN_BY, *there))

    @cached_property
    def sha256(self) -> dict[str, str]:
        """Sum of each file; empty for text of our own."""
        sums = sha256_of(self.files)
        return {path.name: one for path, one in zip(self.files, sums, strict=True)}

    @property
    def own_words(self) -> bool:
        """Whether keys and word lists are of our own words."""
        names = {path.name for path in self.files}
        return not names >= {ADJECTIVES, NOUNS, VERBS}

    @cached_property
    def prose(self) -> Prose:
        """The text in which needles are hidden."""
        return Prose(None if self._folder is None else essays(self._folder / ESSAYS))

    @cached_property
    def adjectives(self) -> Sequence[str]:
        """First parts of keys."""
        return self._words(ADJECTIVES, words.ADJECTIVES)

    @cached_property
    def nouns(self) -> Sequence[str]:
        """Second parts of keys."""
        return self._words(NOUNS, words.NOUNS)

    @cached_property
    def words(self) -> Sequence[str]:
        """Words of numbered lists."""
        verbs = self._words(VERBS, words.VERBS)
        return sorted(words.distinct(self.nouns, self.adjectives, verbs))

    @cached_property
    def many_words(self) -> Sequence[str]:
        """Words of numbered lists that need more than there are in `words`."""
        path = None if self._folder is None else self._folder / ENGLISH
        if path is None or not path.is_file():
            return sorted(words.distinct(self.words, words.compounds(words.NOUNS)))
        content = read_json(path)
        if not isinstance(content, dict) or not content:
            raise RulerError(f"{path} is not RULER's list of English words; leave it out")
        return words.distinct([str(word) for word in content.values()])

    @cached_property
    def single(self) -> Library:
        """Questions about one document."""
        return OwnLibrary(hops=1) if self._folder is None else squad(self._folder / SQUAD)

    @cached_property
    def multiple(self) -> Library:
        """Questions about several documents."""
        return OwnLibrary(hops=2) if self._folder is None else hotpot(self._folder / HOTPOT)

    def _words(self, name: str, own: Sequence[str]) -> Sequence[str]:
        if self.own_words or self._folder is None:
            return own
        path = self._folder / name
        try:
            read = words.distinct(path.read_text(encoding="utf-8").split())
        except UnicodeDecodeError:
            raise RulerError(f"{path} is not UTF-8 text; copy it again") from None
        if len(read) < len(own) // 2:
            raise RulerError(f"{path} has {len(read):,} words, too few; copy it again")
        return read


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the samples of one file have in common."""

    length: int
    """Tokens of prompt and answer together."""
    budget: int
    """Tokens of the prompt at most."""
    seed: int
    tokens: Tokens
    sources: Sources


def _require_files(folder: Path) -> None:
    missing = [name for name in WRITTEN_BY if not (folder / name).is_file()]
    if not missing:
        return
    if not folder.is_dir():
        raise RulerError(f"--ruler-data {folder} is not a folder; name one with RULER's files")
    scripts = " and ".join(dict.fromkeys(WRITTEN_BY[name] for name in missing))
    raise RulerError(
        f"--ruler-data {folder} lacks {', '.join(missing)}; put there what {scripts} of "
        "github.com/NVIDIA/RULER (scripts/data/synthetic/json) writes, or leave out --ruler-data "
        "for the suite ruler-offline"
    )
