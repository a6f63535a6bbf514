"""Texts and token files become windows, and what is malformed is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models_zoo.model_files import load

TEXT = "To be, or not to be, that is the question. "


def test_a_text_becomes_bytes_that_predict_the_next_byte(tmp_path: Path) -> None:
    file = tmp_path / "hamlet.txt"
    file.write_text(TEXT * 4)
    rows = load("gpt2").build_dataset(data=str(file), seq_len=10)
    assert len(rows) == (len(TEXT) * 4 - 1) // 10
    assert bytes(rows[0]["input_ids"].tolist()) == b"To be, or "
    assert bytes(rows[0]["labels"].tolist()) == b"o be, or n"
    assert bytes(rows[1]["input_ids"].tolist()) == b"not to be,"


def test_windows_end_where_they_should(tmp_path: Path) -> None:
    file = tmp_path / "hamlet.txt"
    file.write_text(TEXT)
    rows = load("gpt2").build_dataset(data=str(file), seq_len=10)
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_every_language_model_reads_a_text(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hamlet.txt"
    file.write_text(TEXT * 10)
    rows = load(name).build_dataset(data=str(file))
    assert load(name).build_model()(**{key: row[None] for key, row in rows[0].items()}) > 0


def test_tokens_of_nanogpt_and_of_numpy_are_read(tmp_path: Path) -> None:
    tokens = np.arange(1000, 1200)
    tokens.astype(np.uint16).tofile(tmp_path / "train.bin")
    np.save(tmp_path / "train.npy", tokens)
    for name in ("train.bin", "train.npy"):
        rows = load("gpt2").build_dataset(size="124m", data=str(tmp_path / name), seq_len=16)
        assert rows[1]["input_ids"].tolist() == list(range(1016, 1032))


def test_a_token_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(200, 300))
    rows = load("gpt2").build_dataset(data=str(tmp_path / "train.npy"), seq_len=64)
    with pytest.raises(ValueError, match=r"holds token 264 .* the model knows 0 to 255"):
        rows[0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "transformer_lm", "intent"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt: no such file"):
        load(name).build_dataset(data=str(tmp_path / "nothing.txt"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "the file is empty"),
        ("short.txt", b"To be", "5 tokens; one window needs 65"),
        ("odd.bin", b"123", "an odd number of bytes"),
        ("text.npy", b"To be", "not an array that numpy.save wrote"),
    ],
)
def test_a_malformed_file_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("gpt2").build_dataset(data=str(tmp_path / name))


def test_text_needs_a_vocabulary_that_holds_every_byte(tmp_path: Path) -> None:
    (tmp_path / "hamlet.txt").write_text(TEXT)
    with pytest.raises(ValueError, match="vocab_size 100 is below 256"):
        load("gpt2").build_dataset(data=str(tmp_path / "hamlet.txt"), vocab_size=100)


def test_masked_words_are_about_fifteen_percent_and_never_padding() -> None:
    rows = load("bert").build_dataset()
    batch = torch.utils.data.default_collate([rows[index] for index in range(256)])
    real, chosen = batch["attention_mask"] == 1, batch["labels"] != -100
    shown_as_mask = batch["input_ids"] == 259
    assert not (chosen & ~real).any()
    assert not (shown_as_mask & ~chosen).any()
    assert 0.14 < chosen.sum() / real.sum() < 0.18
    assert 0.75 < (shown_as_mask & chosen).sum() / chosen.sum() < 0.88  # 80 %, and one for certain


def test_padding_does_not_change_what_bert_says_of_the_words() -> None:
    bert = load("bert").build_model().eval()
    words = torch.arange(20)[None]
    sentences = torch.zeros_like(words)
    whole = bert.logits(words[:, :12], torch.ones(1, 12), sentences[:, :12])
    padded = bert.logits(words, (words < 12).long(), sentences)
    torch.testing.assert_close(padded[:, :12], whole)


def test_words_of_a_text_are_numbered_by_how_often_they_occur(tmp_path: Path) -> None:
    file = tmp_path / "wiki.txt"
    file.write_text("the cat saw the dog\nthe <unk> slept\n")
    rows = load("transformer_lm").build_dataset(data=str(file), vocab_size=4, seq_len=9)
    # the ×3 → 1, <eos> ×2 → 2, cat ×1 → 3 (first of its kind), all others → 0; ten words in all.
    assert rows[0]["input_ids"].tolist() == [1, 3, 0, 1, 0, 2, 1, 0, 0]
    assert rows[0]["labels"].tolist()[-1] == 2


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a UTF-8 text"):
        load("transformer_lm").build_dataset(data=str(tmp_path / "wiki.txt"))
