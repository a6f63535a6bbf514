"""Sentences with intents are read line by line, and a bad line is named by its number."""

from pathlib import Path

import pytest
import torch

from tests.models_zoo.model_files import load

LINES = "weather\tWill it rain?\nmusic\tPlay some jazz, please\nweather\tis it cold\n"


def test_labels_are_numbered_in_the_order_of_the_alphabet(tmp_path: Path) -> None:
    (tmp_path / "intents.tsv").write_text(LINES)
    rows = load("intent").build_dataset(data=str(tmp_path / "intents.tsv"))
    assert [int(rows[index]["labels"]) for index in range(len(rows))] == [1, 0, 1]


def test_words_are_cut_out_whatever_their_case_and_punctuation() -> None:
    word_ids = load("intent").word_ids
    assert torch.equal(word_ids("Will it RAIN?", 1000, 5), word_ids("will, it rain", 1000, 5))
    assert word_ids("will it rain", 1000, 5).tolist()[3:] == [0, 0]
    assert len(word_ids("will it rain", 1000, 2)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("weather rain\n", r":1: expected label<TAB>text, found 'weather rain'"),
        (LINES + "\tno label\n", r":4: expected label<TAB>text"),
        (LINES + "music\t \n", r":4: expected label<TAB>text"),
        ("", "the file is empty"),
    ],
)
def test_a_malformed_line_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "intents.tsv").write_text(content)
    with pytest.raises(ValueError, match=message):
        load("intent").build_dataset(data=str(tmp_path / "intents.tsv"))


def test_more_intents_than_the_model_has_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "intents.tsv").write_text(LINES)
    with pytest.raises(ValueError, match=r"2 intents found .*give intents=2"):
        load("intent").build_dataset(data=str(tmp_path / "intents.tsv"), intents=1)


def test_padding_does_not_count() -> None:
    file = load("intent")
    model = file.build_model()
    short, long = (file.word_ids("play some jazz", 1024, length) for length in (3, 30))
    torch.testing.assert_close(model(short[None]), model(long[None]))
