import copy
import itertools
import os
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, Features, Value
from tokenizers import ByteLevelBPETokenizer, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel, WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import EsmTokenizer, PreTrainedTokenizerFast

from hf_sphere.data import Masking, TextBatches, TextDataOptions, Vocabulary, load_text_data
from hf_sphere.data.sources import load_splits

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "un", "##believ", "##able", "cat", "##s", "sat", "."]
LINES = ["The cats sat.", "", "unbelievable cats", "The cat sat. The cats sat.", "."] * 4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece with thirteen tokens."""
    backend = Tokenizer(WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )  # fmt: skip
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


def dna_tokenizer(step: int = 1) -> PreTrainedTokenizerFast:
    """Four bases; all other characters are dropped. The tokens are multiples of `step`."""
    words = ["[PAD]", "[CLS]", "[SEP]", "A", "C", "G", "T", "[MASK]"]
    backend = Tokenizer(WordLevel({word: step * place for place, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", step), ("[SEP]", 2 * step)]
    )  # fmt: skip
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def plain_tokens(tokenizer, lines: list[str]) -> list[int]:
    return list(itertools.chain.from_iterable(tokenizer(line, add_special_tokens=False).input_ids for line in lines))


@pytest.fixture
def load(tokenizer, tmp_path: Path):
    """Load lines per split, or a named dataset, in blocks of six text tokens."""
    numbers = itertools.count()

    def load_splits(splits: dict | None = None, name: str | None = None, **options):
        if name is None:
            folder = tmp_path / f"data{next(numbers)}"
            folder.mkdir()
            for split, rows in (splits or {"train": LINES, "test": LINES[:9]}).items():
                rows = rows if isinstance(rows, Dataset) else Dataset.from_dict({"text": rows})
                rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
            name = str(folder)
        loading = {key: options.pop(key) for key in ("batch_size", "block_length", "seed") if key in options}
        tokens = options.pop("tokenizer", tokenizer)
        options = TextDataOptions(name, **({"cache_dir": str(tmp_path / "cache")} | options))
        return load_text_data(options, tokens, **({"block_length": 8, "progress": False} | loading))

    return load_splits


@pytest.mark.parametrize("shown", [True, False])
def test_bars_of_datasets_are_shown_afterwards_if_they_were_before(shown, load, monkeypatch):
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS", raising=False)
    was_shown = datasets.is_progress_bar_enabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    load()
    try:
        assert datasets.is_progress_bar_enabled() == shown
    finally:
        (datasets.enable_progress_bars if was_shown else datasets.disable_progress_bars)()


def tokens_of(batches: TextBatches) -> list[int]:
    return batches.tokens.flatten().tolist()


# Tokenization and blocks


def test_blocks_are_the_concatenated_tokens_without_the_remainder_between_special_tokens(load, tokenizer):
    expected = plain_tokens(tokenizer, LINES)
    assert len(expected) % 6  # so there is a remainder
    missing = Dataset.from_dict({"text": [None, *LINES]}, Features({"text": Value("string")}))  # as an empty text
    data = load({"train": LINES, "test": missing}, batch_size=100)
    assert tokens_of(data.train) == tokens_of(data.evaluation) == expected[: len(expected) // 6 * 6]
    assert tokens_of(load(preprocessing_num_workers=2).train) == tokens_of(data.train)
    (batch,) = data.train.epoch()
    assert batch["input_ids"].shape[1] == 8
    assert (set(batch["input_ids"][:, 0].tolist()), set(batch["input_ids"][:, -1].tolist())) == ({2}, {3})


def test_special_and_ordinary_tokens_of_any_tokenizer_are_distinguished(tokenizer, tmp_path):
    # Amino acids, without letters of lower case
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "L", "A", "G", "<mask>"]), encoding="utf-8")
    slow_tokenizer = EsmTokenizer(str(file))
    # Byte-level BPE like that of RoBERTa, with very few merges
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(LINES, vocab_size=275, special_tokens=special, show_progress=False)
    backend = trained._tokenizer
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )  # fmt: skip
    byte_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>")
    for of, frame, ordinary in (
        (tokenizer, (2, 3, 4), range(5, 13)),
        (dna_tokenizer(1), (1, 2, 7), range(3, 7)),  # without letters of ours
        (dna_tokenizer(3), (3, 6, 21), range(9, 20, 3)),
        (slow_tokenizer, (0, 2, 7), range(4, 7)),
    ):
        found = Vocabulary.of(of)
        assert (*found.prefix, *found.suffix, found.mask) == frame
        assert found.ordinary.tolist() == [*ordinary]
    assert Vocabulary.of(tokenizer).special.tolist() == list(range(5))
    assert Vocabulary.of(byte_tokenizer).prefix == (0,)
    assert not {0, 2, 4} & set(Vocabulary.of(byte_tokenizer).ordinary.tolist())


def test_unknown_words_are_no_targets(load):
    data = load({"train": ["the cat zzz sat."] * 9, "test": LINES}, mask_probability=1.0)
    (batch,) = data.train.epoch()
    inside = batch["labels"][:, 1:-1]
    assert (data.train.tokens == 1).any()
    assert torch.equal(inside == -100, batch["input_ids"][:, 1:-1] == 1)


def test_tokenized_text_is_read_from_the_cache(load, monkeypatch, tokenizer, tmp_path):
    first = load()
    folder = str(next(tmp_path.glob("data*")))
    monkeypatch.setattr(type(tokenizer), "_encode_plus", lambda *_, **__: pytest.fail("tokenized twice"))
    monkeypatch.setattr(Vocabulary, "of", lambda _: first.train.vocabulary)
    assert tokens_of(load(name=folder).train) == tokens_of(first.train)


# Sources of text


def test_a_text_file_with_any_suffix_loads_as_a_training_split(load, tokenizer, tmp_path):
    file = tmp_path / "LINES.TXT"
    file.write_text("\n".join(LINES), encoding="utf-8-sig")  # the mark of the byte order is no text
    data = load(name=str(file), validation_fraction=0.25)
    blocks = plain_tokens(tokenizer, LINES)
    assert tokens_of(data.train) + tokens_of(data.evaluation) == blocks[: len(blocks) // 6 * 6]
    assert (data.eval_split, data.validation) == ("the last 25% of train", None)


def test_a_folder_of_text_files_loads_as_its_splits_and_a_subfolder_as_a_configuration(load, tmp_path):
    folder = tmp_path / "both" / "texts"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("\n".join(LINES))
    assert load(name=str(folder)).eval_split == "test"
    assert load(name=str(tmp_path / "both"), dataset_config_name="texts").eval_split == "test"


def test_a_file_or_folder_whose_name_is_a_pattern_is_not_read_as_another(tmp_path):
    for number in ("1", "[1]"):
        (tmp_path / f"book{number}.txt").write_text(number)
        (tmp_path / f"books{number}").mkdir()
        (tmp_path / f"books{number}" / "a.txt").write_text(number)
    assert load_splits(str(tmp_path / "book[1].txt"))["train"]["text"][:] == ["[1]"]
    with pytest.raises(ValueError, match="as a pattern; rename the folder"):
        load_splits(str(tmp_path / "books[1]"))


def test_files_that_are_in_no_split_are_logged(tmp_path, caplog):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("1", "2"):
        (folder / f"{name}.txt").write_text(name)
    assert len(load_splits(str(folder))["train"]) == 2
    assert not caplog.text
    (folder / "train-journey.txt").write_text("3")
    assert load_splits(str(folder))["train"]["text"][:] == ["3"]
    assert f"2 of 3 files in {folder} are in no split, such as 1.txt" in caplog.text


def test_other_text_columns_are_found_or_specified(load):
    for column, options in (("sentence", {}), ("words", {"text_column_name": "words"})):
        rows = Dataset.from_dict({"number": [1] * len(LINES), column: LINES})
        assert tokens_of(load({"train": rows, "test": rows}, **options).train) == tokens_of(load().train)


# Splits


def test_the_validation_split_selects_and_the_test_split_reports(load):
    for splits, evaluation, validation in (
        (["train", "validation", "test"], "test", "validation"),
        (["train", "validation"], "validation", None),
        (["validation", "test"], "test", None),
    ):
        data = load(dict.fromkeys(splits, LINES), train_split=splits[0])
        assert (data.eval_split, data.validation_split) == (evaluation, validation)
        assert (data.validation is None) == (validation is None)


def test_the_end_of_the_training_text_is_held_out_and_the_requested_number_of_blocks_used(load):
    splits = {"train": LINES, "validation": LINES, "test": LINES}
    whole, data = load().train, load(splits, validation_fraction=0.3)
    held_out = round(0.3 * len(whole.tokens))
    assert torch.equal(data.train.tokens, whole.tokens[:-held_out])
    assert torch.equal(data.validation.tokens, whole.tokens[-held_out:])
    assert data.validation_split == "the last 30% of train"
    data = load(splits, max_train_samples=5, max_eval_samples=2)
    assert [part.num_examples for part in (data.train, data.evaluation, data.validation)] == [5, 2, 2]


def test_the_options_determine_the_masking(load):
    for options, expected in (
        ({}, Masking(0.15)),
        ({"mask_probability": 0.3}, Masking(0.3)),
        ({"objective": "reconstruction"}, None),
    ):
        data = load(**options)
        assert data.train.masking == data.evaluation.masking == expected


# Errors


NUMBERS, PIXELS = Dataset.from_dict({"text": [1, 2]}), Dataset.from_dict({"pixels": ["a"]})


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ({"train": ["cat"], "test": LINES}, {}, "train has too little text for 8 tokens"),
        ({"train": LINES, "test": [""]}, {}, "test has too little text for"),
        ({"train": LINES}, {}, "no split to report results on; the data has train"),
        (None, {"eval_split": "dev"}, "no split 'dev'; the data has"),
        (None, {"train_split": "full"}, "no split 'full'; the data has"),
        (None, {"text_column_name": "txt"}, "no text column 'txt'; the data has"),
        (None, {"objective": "masks"}, "objective must be masked or reconstruction; got 'masks'"),
        (None, {"validation_fraction": 1.5}, "validation_fraction must be at least 0 and below 1; got 1.5"),
        (None, {"validation_fraction": 0.001}, "the last 0% of train has too little text"),
        (None, {"validation_fraction": 0.5, "validation_split": "test"}, "exclude each other"),
        (None, {"validation_split": "test"}, "--validation_split test is also the split of --eval_split"),
        (None, {"validation_split": "train"}, "--validation_split train is also the split of --train_split"),
        (None, {"max_train_samples": 0}, "max_train_samples must be at least 1; got 0"),
        (dict.fromkeys(("train", "test"), NUMBERS), {}, "column 'text' does not contain text but .*int64"),
        (dict.fromkeys(("train", "test"), PIXELS), {}, "found no text column.*--text_column_name"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_invalid_options_are_refused(load, splits, options, message):
    with pytest.raises(ValueError, match=message):
        load(splits, **options)


def test_an_unreadable_file_is_refused_with_the_reason(load, tmp_path):
    (tmp_path / "a.pdf").touch()
    with pytest.raises(ValueError, match=r"a\.pdf is no file of rows, whose suffixes are"):
        load(name=str(tmp_path / "a.pdf"))
    (tmp_path / "a.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 9)
    with pytest.raises(ValueError, match=r"a.txt cannot be read as a dataset: 'utf-8' codec can't decode byte 0xe9"):
        load(name=str(tmp_path / "a.txt"))
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"b\.txt is not a regular file"):
        load_splits(str(tmp_path / "b.txt"))


def test_a_tokenizer_without_a_mask_token_in_texts_is_refused(tokenizer, load):
    split = copy.deepcopy(tokenizer)
    split.split_special_tokens = True
    with pytest.raises(ValueError, match=r"has no mask token, or does not find it in a text; load it with split_sp"):
        Vocabulary.of(split)
    backend = tokenizer.backend_tokenizer
    without = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", name_or_path="some/model")
    with pytest.raises(ValueError, match="the tokenizer of 'some/model' has no mask token"):
        load(tokenizer=without)
