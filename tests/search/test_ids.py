"""The user's ids and columns: they name rows in spaces, files, tables and messages."""

import csv
import json

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import normalize

from hf_sphere.commands import duplicates, index as index_command, report, search as search_command
from hf_sphere.search import CompressedSpace, EmbeddingSpace, ImageIndex, ImageSource, LanceSpace
from hf_sphere.search.encoder import VectorEncoder

COUNT = 240
IDS = [f"S{row:03}" for row in range(COUNT)]
GROUPS = [row // 4 for row in range(COUNT)]


def rows(count=COUNT, seed=0):
    """Unit vectors (N, d), of which the last ten are copies of the first."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, 16, generator=generator)
    vectors[-10:] = vectors[:10] + 0.01 * torch.randn(10, 16, generator=generator)
    return normalize(vectors, dim=1)


@pytest.fixture(scope="module")
def space():
    return EmbeddingSpace.fit(rows(), GROUPS, ids=IDS, score="cosine")


@pytest.fixture
def table(tmp_path):
    """A parquet file with ids, texts and a column of vectors of which the name is not usual."""
    cells = {"key": IDS, "title": [f"title {row}" for row in range(COUNT)], "code": rows().tolist()}
    Dataset.from_dict(cells | {"part": GROUPS}).to_parquet(tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


@pytest.fixture
def damaged(tmp_path):
    """A parquet file with a missing vector, one with NaN and a zero one."""
    codes = rows().tolist()
    codes[3], codes[5], codes[7] = None, [float("nan")] * 16, [0.0] * 16
    Dataset.from_dict({"key": IDS, "code": codes}).to_parquet(tmp_path / "damaged.parquet")
    return str(tmp_path / "damaged.parquet")


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


# Spaces


@pytest.mark.parametrize("convert", [list, np.array, pd.Series, pd.Index], ids=lambda kind: kind.__name__)
def test_matches_name_the_ids_that_were_given(convert):
    space = EmbeddingSpace.fit(rows(), ids=convert(IDS), score="cosine")
    found = space.search(rows()[[4, 17]], 2)
    assert found.ids == [[IDS[row] for row in some] for some in found.rows.tolist()]
    assert [ids[0] for ids in found.ids] == ["S004", "S017"]
    assert space.ids == IDS


def test_rows_are_added_and_removed_by_ids():
    space = EmbeddingSpace.fit(rows(), GROUPS, ids=IDS, score="cosine")
    assert space.add(99, rows(12, seed=1)[:2], ids=["a", "b"]) == ["a", "b"]
    assert space.remove(ids=["S000", "a"]) == 2
    assert space.ids == [*IDS[1:], "b"]
    assert space.search(rows()[[9]], 1).ids == [["S009"]]


def test_a_saved_space_has_its_ids(space, tmp_path):
    space.save(tmp_path / "space")
    loaded = EmbeddingSpace.load(tmp_path / "space")
    assert loaded.ids == IDS
    loaded.remove(ids="S003")
    loaded.save(tmp_path / "space")
    assert EmbeddingSpace.load(tmp_path / "space").search(rows()[[4]], 1).ids == [["S004"]]


def test_a_compressed_space_has_the_ids(space, tmp_path):
    pytest.importorskip("faiss")
    space.compress(8).save(tmp_path / "codes")
    assert CompressedSpace.load(tmp_path / "codes").search(rows()[[14]], 1).ids == [["S014"]]


BAD_CHANGES = {
    "known": ({"ids": ["S001", "x"]}, "ids must be different; 1 are in the space or repeated: 'S001'"),
    "none": ({}, r"the space has ids; add rows alike \(ids=\)"),
    "of another type": ({"ids": [1, 2]}, "ids, old and new, must be all texts or all integers"),
    "fewer": ({"ids": ["x"]}, "ids must have one name per row, 2; got 1"),
}


@pytest.mark.parametrize("name", BAD_CHANGES)
def test_new_rows_have_new_ids(space, name):
    options, message = BAD_CHANGES[name]
    with pytest.raises(ValueError, match=message):
        space.add("new", rows(12, seed=1)[:2], **options)
    assert space.ids == IDS


# Rows that are not finite, or zero


def with_faults():
    vectors = rows()
    vectors[5], vectors[7] = torch.nan, 0
    return vectors


def test_invalid_rows_are_refused_by_their_ids():
    text = "2 of 240 are not, with the ids 'S005', 'S007'. Remove them, or leave them out with invalid='skip'"
    with pytest.raises(ValueError, match=text):
        EmbeddingSpace.fit(with_faults(), GROUPS, ids=IDS)
    with pytest.raises(ValueError, match="1 of 2 are not, with the ids 'x'"):
        EmbeddingSpace.fit(rows(), ids=IDS).add(None, with_faults()[[4, 5]], ids=["y", "x"])


def test_invalid_rows_are_left_out_and_listed(caplog):
    space = EmbeddingSpace.fit(with_faults(), GROUPS, ids=IDS, invalid="skip", score="cosine")
    assert space.skipped == ["S005", "S007"]
    assert "2 of 240 vectors are not finite, or zero, and are left out: ids 'S005', 'S007'." in caplog.text
    assert space.groups == [group for row, group in enumerate(GROUPS) if row not in (5, 7)]
    assert space.search(rows()[[8]], 1).ids == [["S008"]]


def test_rows_without_ids_keep_their_numbers_if_others_are_left_out(caplog):
    space = EmbeddingSpace.fit(with_faults(), invalid="skip", score="cosine")
    assert (space.search(rows()[[8]], 1).ids, space.skipped, space.add(None, rows()[0])) == ([[8]], [5, 7], [240])
    assert "are left out: rows 5, 7." in caplog.text


# Pairs, comparisons, LanceDB


def test_pairs_have_both_ids_and_cells():
    found = EmbeddingSpace.fit(rows(), ids=IDS).duplicates(0.9)
    frame = found.to_pandas({"text": pd.Series(IDS, index=range(9, 9 + COUNT))})
    assert frame.columns.tolist() == ["cluster", "cosine", "id_1", "id_2", "text_1", "text_2"]
    assert sorted(zip(frame["id_1"], frame["id_2"], strict=True)) == [(IDS[row], IDS[230 + row]) for row in range(10)]
    assert frame["text_2"].tolist() == frame["id_2"].tolist()
    assert str(found).startswith("20 rows in 10 clusters, threshold 0.9, ")
    with pytest.raises(ValueError, match="column 'text' must have 240 values; got 3"):
        found.to_pandas({"text": "abc"})


def test_pairs_of_rows_without_ids_are_of_rows():
    frame = EmbeddingSpace.fit(rows()).duplicates(0.9).to_pandas()
    assert frame.columns.tolist() == ["cluster", "cosine", "row_1", "row_2"]
    assert len(EmbeddingSpace.fit(rows()[:200]).duplicates(0.999).to_pandas()) == 0


def test_rows_that_are_outside_are_named_by_their_ids(space):
    others = EmbeddingSpace(torch.cat([rows(60, seed=3), space.vectors[:20] * 0.0 - 1.0]), ids=[*range(100, 180)])
    others = EmbeddingSpace(normalize(others.vectors), ids=others.ids)
    found = space.compare(others)
    assert found.outside_ids == [100 + row for row in found.outside.tolist()]


def test_a_table_of_lance_has_ids_which_are_different(tmp_path):
    pytest.importorskip("lancedb")
    batches = ({"vector": rows()[at : at + 60], "key": IDS[at : at + 60]} for at in range(0, COUNT, 60))
    space = LanceSpace.create(tmp_path / "space", batches, id_column="key")
    assert space.remove(ids=["S000"]) == 1
    assert LanceSpace.open(tmp_path / "space").search(rows()[[4]], 1).ids == [["S004"]]
    new = rows(12, seed=1)[:2]
    for ids, message in [
        (["S004", "x"], "ids must be different, but are in the space: 'S004'. Before them, 0 rows were written"),
        (["x", "x"], "ids must be different; 1 are repeated: 'x'"),
        ([1, 2], "ids must be all texts or all integers; got int64 after string"),
    ]:
        with pytest.raises(ValueError, match=message):
            space.add({"vector": new, "key": ids})
    assert space.add({"vector": new, "key": ["x", "S000"]}) == 2


def test_a_table_of_lance_without_ids_has_the_numbers_of_lance(tmp_path):
    pytest.importorskip("lancedb")
    space = LanceSpace.create(tmp_path / "space", rows())
    space.remove(ids=[2])
    assert space.search(rows()[[4]], 1).ids == [[4]]


# Sources and indices


def test_an_index_keeps_ids_and_columns(table, tmp_path):
    index = ImageIndex.build(None, ImageSource.of(table, content="vector"), ids="key", columns=["title"])
    index.save(tmp_path / "index")
    index = ImageIndex.load(tmp_path / "index")
    found = index.search(ImageSource.of(rows()[[4]].numpy(), content="vector"), 1)
    assert found.ids == [["S004"]]
    assert index.images["columns"][int(found.rows[0, 0])] == {"title": "title 4"}
    assert index.remove("S004") == 1
    assert index.add(ImageSource.of(table, content="vector"), progress=False) == 1
    assert sorted(index.images["id"]) == IDS
    assert index.space.ids == index.images["id"]


def test_rows_of_an_index_are_recognized_by_their_ids_wherever_they_are_in_the_table(table, caplog):
    index = ImageIndex.build(None, ImageSource.of(table, content="vector"), ids="key")
    new = torch.cat([rows()[1:], -rows()[:1]])
    new[7] = -new[7]
    Dataset.from_dict({"key": [*IDS[1:], "last"], "code": new.tolist()}).to_parquet(table)
    assert index.add(ImageSource.of(table, content="vector"), progress=False) == 1
    assert "1 rows of the index are no longer in" in caplog.text
    assert "1 rows of the index were embedded again." in caplog.text
    assert index.remove("S000") == 1
    assert index.space.ids == index.images["id"] == [*IDS[1:], "last"]
    torch.testing.assert_close(index.embeddings, normalize(new))
    other = ImageSource.of(rows(12, seed=1)[:2].numpy(), content="vector")
    with pytest.raises(ValueError, match="ids must be different; 1 are repeated: 'S001'"):
        index.add(other, ids=["S001", "x"])
    assert len(index) == COUNT


BAD_COLUMNS = {
    "missing": ("--columns none", r"column 'none' is not there; name texts, numbers or dates among \['key'"),
    "vectors": ("--columns code", r"column 'code' is List"),
    "taken": ("--columns row", r"column 'row' is written by the job; .* among (?!.*'row')"),
    "no ids": ("--id_column none", "no column 'none' for ids"),
    "repeated ids": ("--id_column part", "ids must be different; 60 are repeated: 0, 1, 2, 3, 4 and 55 more"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_columns_that_do_not_fit_are_refused(table, name):
    words, message = BAD_COLUMNS[name]
    Dataset.from_parquet(table).add_column("row", list(range(COUNT))).to_parquet(table)
    with pytest.raises((ValueError, KeyError), match=message):
        duplicates.main([table, *words.split()])


def test_a_column_of_vectors_is_found_by_its_type(table):
    assert ImageSource.of(table, content=None).column == "code"
    both = Dataset.from_parquet(table).add_column("other", rows().tolist())
    with pytest.raises(ValueError, match=r"several columns have vectors: code, other. Name one with --column"):
        ImageSource.of(both, content="vector")
    assert ImageSource.of(both.rename_column("other", "embedding"), content=None).column is None  # has a usual name
    with pytest.raises(ValueError, match="found no vector column"):
        ImageSource.of(Dataset.from_dict({"title": ["a"]}), content=None)


def test_an_array_in_a_file_is_a_source_of_vectors(tmp_path):
    np.save(tmp_path / "rows.npy", rows().numpy())
    source = ImageSource.of(tmp_path / "rows.npy", content=None)
    assert (source.content, len(source), source.names[7]) == ("vector", COUNT, "all/7")
    assert torch.equal(source.encoded, rows())
    for options in ({"column": "vector"}, {"split": "test"}):
        with pytest.raises(ValueError, match="is one array, without columns and splits"):
            ImageSource.of(tmp_path / "rows.npy", content=None, **options)


# Commands


def test_duplicates_of_a_table_have_ids_and_columns(table, tmp_path, capsys):
    words = ["--id_column", "key", "--columns", "title", "--threshold", "0.9", "--table", str(tmp_path / "pairs.csv")]
    duplicates.main([table, *words])
    pairs = read(tmp_path / "pairs.csv")
    assert [row["id_2"] for row in pairs] == [f"S{row + 230}" for row in range(10)]
    assert pairs[0] == {"cluster": "1", "cosine": pairs[0]["cosine"], "id_1": "S000", "id_2": "S230"} | {
        "title_1": "title 0",
        "title_2": "title 230",
    }
    text = capsys.readouterr().err
    assert f"vectors   column code of {table}" in text
    assert text.rstrip().rpartition("\n")[2].startswith("found     20 rows in 10 clusters, threshold 0.9, ")


def test_parts_may_have_the_same_ids_and_suspects_are_a_table(table, tmp_path):
    other = Dataset.from_parquet(table).select(range(230))
    other.to_parquet(tmp_path / "other.parquet")
    words = ["--other", str(tmp_path / "other.parquet"), "--id_column", "key", "--label_column", "part"]
    tables = ["--table", str(tmp_path / "pairs.csv"), "--suspects", str(tmp_path / "suspects.csv")]
    duplicates.main([table, *words, *tables, "--threshold", "0.9"])
    pairs = read(tmp_path / "pairs.csv")
    assert {row["id_1"] for row in pairs if row["part_1"] != row["part_2"]} == {*IDS[:230]}
    assert {"label_1", "label_2"} <= pairs[0].keys()


def test_the_commands_refuse_invalid_rows_by_ids_or_leave_them_out(damaged, tmp_path, capsys, caplog):
    with pytest.raises(ValueError, match=r"3 of 240 are not, with the ids 'S003', 'S005', 'S007'.*--skip_invalid"):
        duplicates.main([damaged, "--id_column", "key"])
    duplicates.main([damaged, "--id_column", "key", "--skip_invalid", "--threshold", "0.9"])
    assert "3 of 240 vectors of" in caplog.text
    report.main([damaged, "--id_column", "key"])
    text = capsys.readouterr().out
    assert "S000,S230" in text
    assert "S003,S233" not in text
    assert "2 of 240 rows are not finite, the first is S003: remove them." in text
    assert "1 of 240 rows are zero, the first is S007: remove them." in text


def test_a_report_repeats_ids_and_columns_of_rows_that_are_wrong_or_outside(table, tmp_path):
    cells = pd.read_parquet(table).assign(title=[f"<b> {row}" for row in range(COUNT)])
    cells.at[5, "code"], cells.at[9, "code"] = np.zeros(16), cells.at[8, "code"]
    cells.to_parquet(source := str(tmp_path / "faults.parquet"))
    page, file = tmp_path / "page.html", tmp_path / "report.json"
    words, output = ["--id_column", "key", "--columns", "title"], ["--page", str(page), "--json", str(file)]
    with pytest.raises(SystemExit):
        report.main([source, *words])
    report.main([source, *words, *output])
    copy = {"wrong": "equal to an earlier row", "id": "S009", "title": "<b> 9"}
    assert json.loads(file.read_text())["rows"] == [{"wrong": "zero", "id": "S005", "title": "<b> 5"}, copy]
    assert "<tr><td>zero</td><td>S005</td><td>&lt;b&gt; 5</td></tr>" in page.read_text()
    ImageIndex.build(None, ImageSource.of(table, content="vector"), columns=["title"]).save(index := tmp_path / "index")
    cells["code"] = normalize(rows(seed=1) + 3, dim=1).tolist()
    cells.to_parquet(source)
    report.main([str(index), "--compare_with", source, *words, *output])
    outside = json.loads(file.read_text())["rows"]
    assert len(outside) > 100
    assert outside[-1]["title"] == f"<b> {int(outside[-1]['id'][1:])}"
    with pytest.raises(ValueError, match="has its vectors, ids and columns; leave out"):
        report.main([str(index), *words, *output])


def test_an_index_and_a_search_repeat_ids_and_columns(table, damaged, tmp_path, capsys):
    words = ["--id_column", "key", "--columns", "title", "part"]
    index_command.main([table, *words, "--output_dir", str(tmp_path / "index"), "--disable_tqdm"])
    assert "added     240 of 240 vectors of" in (text := capsys.readouterr().out)
    assert "column code" in text
    words = ["--query", damaged, "--id_column", "key", "--skip_invalid", "--top_k", "1", "--columns", "key"]
    search_command.main(["--index", str(tmp_path / "index"), *words, "--table", str(tmp_path / "found.csv")])
    found = read(tmp_path / "found.csv")
    assert len(found) == COUNT - 3
    assert found[4]["query"] == found[4]["id"] == "S006"
    assert (found[4]["title"], found[4]["part"], found[4]["query_key"]) == ("title 6", "1", "S006")
    duplicates.main([str(tmp_path / "index"), "--threshold", "0.9", "--table", str(tmp_path / "pairs.csv")])
    assert read(tmp_path / "pairs.csv")[0]["title_2"] == "title 230"
    with pytest.raises(ValueError, match=r"--id_column has no effect on .*, which is an index"):
        duplicates.main([str(tmp_path / "index"), "--id_column", "key"])


def test_an_encoder_of_vectors_yields_the_rows_that_it_is_asked_for():
    vectors = rows(12)
    source = ImageSource.of(Dataset.from_dict({"vector": vectors.tolist()}), content="vector")
    ((at, found),) = VectorEncoder().encode(source, [3, 1])
    assert at.tolist() == [3, 1]
    torch.testing.assert_close(found["embedding"], vectors[[3, 1]])
