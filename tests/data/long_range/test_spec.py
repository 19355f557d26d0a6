# SPDX-License-Identifier: Apache-2.0
import pytest

from data.long_range.spec import COMMON, OWN, LongRangeError, Spec


def test_values_are_parsed_and_written_out_again() -> None:
    source = "synthetic:retrieval,length=4K-1M,documents=12,seed=3,keys=8,queries=2,form=code"
    spec = Spec.parse(source)
    assert spec.length == (4096, 2**20)
    assert (spec.documents, spec.seed, spec.keys, spec.queries) == (12, 3, 8, 2)
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize("kind", OWN)
def test_the_written_out_name_has_every_value_of_the_kind(kind: str) -> None:
    name = str(Spec.parse(f"synthetic:{kind}"))
    given = {word.partition("=")[0] for word in name.partition(",")[2].split(",")}
    assert given == {*COMMON, *OWN[kind]} - {"filler"}
    assert Spec.parse(name) == Spec.parse(f"synthetic:{kind}")


def test_a_filler_may_have_commas_in_its_path() -> None:
    spec = Spec.parse("synthetic:copy,filler=/data/a, b,c.jsonl,length=8K")
    assert (spec.filler, spec.length) == ("/data/a, b,c.jsonl", (8192, 8192))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("needle", "'needle' is not a kind of synthetic:KIND; choose retrieval, variables or copy"),
        ("", "'' is not a kind"),
        ("questions", "'questions' is not a kind"),
        ("retrieval,depth=0.5", "retrieval has no value named 'depth'"),
        ("copy,keys=3", "copy has no value named 'keys'; it takes length, documents, seed, filler"),
        ("copy,size=8K", "no value named 'size'"),
        ("retrieval,keys=4,keys=5", "keys is given twice"),
        ("retrieval,keys=0", "keys='0' is not a whole number from 1 to 10,000"),
        ("retrieval,keys=many", "keys='many' is not a whole number"),
        ("retrieval,documents=-1", "documents='-1' is not a whole number from 1"),
        ("retrieval,length=0", "length='0' is not a number of tokens from 64 to 16M"),
        ("retrieval,length=8K-4K", "length='8K-4K' is not"),
        ("retrieval,length=64 K", "length='64 K' is not"),
        ("retrieval,length=99M", "length='99M' is not"),
        ("retrieval,queries=5", "queries=5 asks for more than keys=4"),
        ("variables,queries=9,chains=8", "queries=9 asks for more than chains=8"),
        ("retrieval,form=rhyme", "form='rhyme' is not known; choose prose or code"),
        ("copy,length=1K,passage=400", "does not fit twice into a document of 1,024"),
        ("copy,filler=", "filler='' is not a source of text"),
        ("copy,filler=synthetic:copy", "filler='synthetic:copy' is not a source of text"),
    ],
)
def test_a_wrong_word_is_named_with_the_valid_ones(words: str, sentence: str) -> None:
    with pytest.raises(LongRangeError) as error:
        Spec.parse(f"synthetic:{words}")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
