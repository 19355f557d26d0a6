# SPDX-License-Identifier: Apache-2.0
"""Public data sets with long documents: what they are, and the commands that download them.

Nothing here downloads anything. Figures and licences are those of a data set's own page or paper as
read in November 2026; what could be read in a third party's code or notes only, or not at all, is
in `unverified`. Licences of the texts themselves are not covered by that of a collection: read its
page before you train on it.
"""

import difflib
import shlex
from dataclasses import dataclass

FOLDER = "downloads"
"""Where the commands download to, below the working folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subset:
    """A part of a data set that is downloaded by itself."""

    name: str
    include: str
    """Pattern of its files."""
    size: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataset:
    """A data set of the Hugging Face hub."""

    name: str
    """As `longhaul prepare --source NAME=PATH` takes it, and a ladder's share of it is named."""
    hub_id: str
    what: str
    size: str
    licence: str
    subsets: tuple[Subset, ...]
    text_key: str | None
    """The field that holds a document's text; None if no field does."""
    gated: bool = False
    notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    """What is stated here and could not be read on its own page."""

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that download each subset, in the order of the subsets."""
        return tuple(
            shlex.join([
                "hf", "download", self.hub_id, "--repo-type", "dataset", "--include",
                subset.include, "--local-dir", f"{FOLDER}/{self.name}",
            ])
            for subset in self.subsets
        )  # fmt: skip

    @property
    def prepare(self) -> str | None:
        """The command that prepares what was downloaded; None if `prepare` cannot read it."""
        if self.text_key is None:
            return None
        return shlex.join([
            "longhaul", "prepare", "--source", f"{self.name}={FOLDER}/{self.name}", "--text-key",
            self.text_key, "--tokenizer", "TOKENIZER", "--out", f"stores/{self.name}",
        ])  # fmt: skip


DATASETS = (
    PublicDataset(
        name="fineweb_edu",
        hub_id="HuggingFaceFW/fineweb-edu",
        what="English web pages that a classifier finds educational; mostly short documents",
        size="1.3T tokens",
        licence="ODC-By 1.0",
        subsets=(
            Subset(name="sample of 10B tokens", include="sample/10BT/*.parquet", size="28 GB"),
            Subset(name="sample of 100B tokens", include="sample/100BT/*.parquet", size=""),
            Subset(name="one crawl", include="data/CC-MAIN-2024-10/*.parquet", size=""),
        ),
        text_key="text",
        notes=("the short part of a mix: few of its pages are long",),
        unverified=("the number of tokens", "the sizes in GB"),
    ),
    PublicDataset(
        name="slimpajama",
        hub_id="cerebras/SlimPajama-627B",
        what="RedPajama without duplicates: web, GitHub, books, arXiv, Wikipedia, StackExchange",
        size="627B tokens, 895 GB compressed in 59,166 files",
        licence="that of each source",
        subsets=(
            Subset(name="a tenth", include="train/chunk1/*.jsonl.zst", size="90 GB"),
            Subset(name="all", include="train/*/*.jsonl.zst", size="895 GB"),
        ),
        text_key="text",
        notes=("the field meta.redpajama_set_name states the source of a document",),
        unverified=("the text field", "the folders train/chunk1 to train/chunk10", "meta"),
    ),
    PublicDataset(
        name="longmino",
        hub_id="allenai/dolma3_longmino_pool",
        what="Olmo 3's pool of long documents: scientific PDFs read by olmOCR, by length",
        size="640B tokens in 22.3M documents",
        licence="ODC-By 1.0",
        subsets=(
            Subset(name="8K to 16K tokens", include="data/*-2e13/*.jsonl.zst", size="144B tokens"),
            Subset(name="16K to 32K tokens", include="data/*-2e14/*.jsonl.zst", size="118B tokens"),
            Subset(name="32K to 64K tokens", include="data/*-2e15/*.jsonl.zst", size="139B tokens"),
            Subset(name="64K to 128K tokens", include="data/*-2e16/*.jsonl.zst", size="96B tokens"),
            Subset(name="128K to 256K tokens", include="data/*-2e17/*.jsonl.zst",
                   size="61B tokens"),
            Subset(name="256K to 512K tokens", include="data/*-2e18/*.jsonl.zst",
                   size="35B tokens"),
            Subset(name="512K to 1M tokens", include="data/*-2e19/*.jsonl.zst", size="22B tokens"),
            Subset(name="more than 1M tokens", include="data/*-2e20/*.jsonl.zst",
                   size="27B tokens"),
        ),
        text_key="text",
        notes=(
            "Olmo 3 leaves out the most and the least compressible fifth: `longhaul census` prints "
            "the bounds",
            "the folders count in powers of two: 2e15 is from 2^15 tokens on",
        ),
        unverified=("the licence (that of the mix)", "the folders", "the text field"),
    ),
    PublicDataset(
        name="longmino_mix",
        hub_id="allenai/dolma3_longmino_mix-100B-1125",
        what="the mix that extended Olmo 3 32B to 64K: 34% long documents, 66% of mid-training",
        size="100B tokens, 470 GB compressed",
        licence="ODC-By 1.0",
        subsets=(Subset(name="all", include="*.jsonl.zst", size="470 GB"),),
        text_key="text",
        notes=(
            "the 7B model's mix of 50B tokens is allenai/dolma3_longmino_mix-50B-1025",
            "part of the long documents has synthetic questions and tasks within",
        ),
        unverified=("470 GB", "the text field"),
    ),
    PublicDataset(
        name="txt360_midas",
        hub_id="LLM360/TxT360-Midas",
        what="mid-training data of K2-V2 in a subset for each of its four stages, to 512K tokens",
        size="not stated",
        licence="see its page",
        subsets=(Subset(name="all", include="*", size=""),),
        text_key="text",
        notes=("its subsets are the stages of the model's mid-training: include one folder",),
        unverified=("the size", "the licence", "the format", "the text field"),
    ),
    PublicDataset(
        name="prolong_data_64k",
        hub_id="princeton-nlp/prolong-data-64K",
        what="ProLong's first stage, packed to 64K: code repositories, books, web, arXiv",
        size="40B tokens of Llama 3",
        licence="that of each source",
        subsets=(
            Subset(name="books", include="book-65536/*", size=""),
            Subset(name="code repositories", include="thestackv1_concat_by_repo-65536/*", size=""),
            Subset(name="all", include="*", size=""),
        ),
        text_key=None,
        notes=(
            "the second stage, packed to 512K, is princeton-nlp/prolong-data-512K: 40B tokens",
            "MosaicML's MDS shards of token ids of Llama 3, without text: `longhaul prepare` does "
            "not read them",
            "with a program that writes Megatron's files from MDS, and each document ended by the "
            "eos token, `longhaul adopt` takes them",
        ),
        unverified=("the licence",),
    ),
    PublicDataset(
        name="finepdfs",
        hub_id="HuggingFaceFW/finepdfs",
        what="text of PDFs of Common Crawl in 1,733 languages; much longer than web pages",
        size="3T tokens in 475M documents",
        licence="ODC-By 1.0",
        subsets=(
            Subset(name="English, one file of many",
                   include="data/eng_Latn/train/000_00000.parquet", size=""),
            Subset(name="English", include="data/eng_Latn/train/*.parquet", size=""),
        ),
        text_key="text",
        notes=(
            "another language is another folder, such as data/deu_Latn",
            "HuggingFaceFW/finepdfs-edu has the educational part with the same folders",
            "its authors advise at most 25% of PDFs in a mix",
        ),
        unverified=("the advice on the mix", "the text field"),
    ),
    PublicDataset(
        name="pg19",
        hub_id="emozilla/pg19",
        what="books of Project Gutenberg from before 1919, one document each: a copy of DeepMind's "
        "PG-19 as Parquet",
        size="28,752 books, 11 GB",
        licence="Apache-2.0",
        subsets=(Subset(name="training books", include="data/train-*.parquet", size="11 GB"),),
        text_key="text",
        unverified=("the size", "the licence of this copy", "the file names"),
    ),
    PublicDataset(
        name="institutional_books",
        hub_id="institutional/institutional-books-1.0",
        what="books of Harvard Library in 254 languages, most of 1820 to 1920, read by OCR",
        size="983,004 books, 242B tokens of o200k_base",
        licence="noncommercial, no redistribution",
        gated=True,
        subsets=(Subset(name="all", include="data/*.parquet", size="947 GB"),),
        text_key=None,
        notes=(
            "a book is a list of pages (text_by_page_gen, corrected, and text_by_page_src): join "
            "them to one text first, since `longhaul prepare` takes one text a row",
        ),
        unverified=("947 GB", "the file names"),
    ),
)  # fmt: skip


class UnknownDatasetError(ValueError):
    """A name that no data set has; the message lists those that are known."""


def named(name: str) -> PublicDataset:
    """Return the data set of a name or of a hub id; raise UnknownDatasetError for any other."""
    for dataset in DATASETS:
        if name.lower() == dataset.hub_id.lower() or _plain(name) == dataset.name:
            return dataset
    names = [dataset.name for dataset in DATASETS]
    near = difflib.get_close_matches(_plain(name), names, n=1)
    meant = f"did you mean {near[0]}? There are" if near else "there are"
    raise UnknownDatasetError(f"no data set is called {name}; {meant} {', '.join(names)}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
