# SPDX-License-Identifier: Apache-2.0
"""Two small tokenizers of different families, and answers found by reading a prompt."""

import re
from collections import Counter
from collections.abc import Callable

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from data.tokenization.tokenizer import DocumentTokenizer, train
from eval.ruler import forms
from eval.ruler.haystack import Prose
from eval.ruler.own_documents import OwnLibrary
from eval.ruler.samples import Sample


def texts() -> list[str]:
    library = OwnLibrary(hops=1)
    documents = [library.document(at) for at in range(library.documents(60))]
    templates = [
        form.template + form.prefix
        for form in (
            forms.NEEDLES, forms.VARIABLES, forms.COMMON_WORDS, forms.FREQUENT_WORDS, forms.QUESTION
        )
    ]  # fmt: skip
    return [*documents, *templates, forms.NOISE, " ".join(Prose().parts(4000))]


def byte_level() -> DocumentTokenizer:
    """Return a tokenizer as GPT-2's, Llama 3's and Qwen's: units encode apart as together."""
    return train(texts(), 600)


def with_marks() -> DocumentTokenizer:
    """Return a tokenizer as Llama 2's: a mark before every text, and a beginning of sequence."""
    from transformers import PreTrainedTokenizerFast

    from data.tokenization import tokenizer

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    return tokenizer._for_documents("with marks", wrapped)


def read_answers(sample: Sample) -> set[str]:
    """Return the answers of a sample, by reading its prompt alone."""
    kind = sample.task.partition("_")[0]
    readers: dict[str, Callable[[str], set[str]]] = {
        "niah": _needles, "vt": _variables, "cwe": _common_words, "fwe": _frequent_words,
        "qa": _questions,
    }  # fmt: skip
    return readers[kind](sample.prompt)


def _needles(prompt: str) -> set[str]:
    prefix = prompt.rpartition("The special magic ")[2]
    asked = re.fullmatch(r"\w+ for (.+) mentioned in the provided text (?:is|are)", prefix)
    keys = set(re.split(r", and |, ", asked[1]))
    pairs = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
    return {value for key, value in pairs if key in keys}


def _variables(prompt: str) -> set[str]:
    text = prompt.split("Memorize and track")[-1]
    value = re.search(r"are assigned the value (\d+), they are: $", text)[1]
    known = dict(re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE))
    found = {name for name, source in known.items() if source == value}
    while more := {name for name, source in known.items() if source in found} - found:
        found |= more
    return found


def _common_words(prompt: str) -> set[str]:
    words = re.findall(r"\d+\. (\S+)", prompt.split("Below is a numbered")[-1])
    return {word for word, _ in Counter(words).most_common(10)}


def _frequent_words(prompt: str) -> set[str]:
    text = prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    counted = Counter(word for word in text.split() if word != "...").most_common(4)
    assert counted[2][1] > counted[3][1]
    return {word for word, _ in counted[:3]}


def _questions(prompt: str) -> set[str]:
    query = re.search(r"Question: (.+) Answer:$", prompt)[1]
    if asked := re.search(r"was the (.+ of \w+) finished\?", query):
        return {re.search(rf"The {asked[1]} was finished in (\d+) by", prompt)[1]}
    if asked := re.search(r"In which town was (\w+ \w+) born\?", query):
        return {re.search(rf"{asked[1]} was born in (\w+)\.", prompt)[1]}
    landmark = re.search(r"finished the (.+)\?", query)[1]
    person = re.search(rf"The {landmark} was finished in \d+ by (\w+ \w+)\.", prompt)[1]
    if query.startswith("Who"):
        return {person}
    return {re.search(rf"{person} was born in (\w+)\.", prompt)[1]}
