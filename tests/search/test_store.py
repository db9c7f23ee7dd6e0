import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, List, Value, load_dataset
from hypothesis import HealthCheck, given, settings, strategies as st

from hf_sphere.search import store
from hf_sphere.search.store import Columns, Embeddings, embeddings_writer, read_embeddings

CLASSES = ["cat", "dog"]
MODEL_CLASSES = ["dog", "cat", "bird"]


def columns_of(count: int = 4, start: int = 0) -> dict[str, torch.Tensor]:
    """Columns as written by the recipe."""
    logits = torch.randn(count, 3)
    confidence, prediction = logits.softmax(-1).max(-1)
    return {
        "embedding": torch.randn(count, 5),
        "label": torch.arange(count) % 2,
        "prediction": prediction,
        "confidence": confidence,
        "logits": logits,
        "concentration": torch.rand(count) + 1,
        "index": torch.arange(start, start + count),
        "row_id": (7 << 32) + torch.arange(start, start + count),
    }


def write(folder: Path, *parts: Columns, split: str = "test", about: dict | None = None) -> Path:
    names = {"class_names": CLASSES, "predicted_names": MODEL_CLASSES}
    with embeddings_writer(folder, split, about or {}, **names) as add:
        for part in parts:
            add(part)
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "embedded"


def save(folder, split: str = "train", **columns) -> str:
    """Save a dataset as another program would."""
    folder.mkdir(exist_ok=True)
    Dataset.from_dict(columns).to_parquet(folder / f"{split}.parquet")
    return str(folder)


class TestWriting:
    def test_datasets_loads_written_embeddings(self, folder):
        written = columns_of()
        rows = load_dataset(str(write(folder, written)))["test"].with_format("torch")
        for name, values in written.items():
            assert torch.equal(rows[name][:], values), name
        features = rows.features
        assert features["embedding"] == List(Value("float32"), length=5)
        assert features["logits"] == List(Value("float32"), length=3)
        assert features["label"] == ClassLabel(names=CLASSES)
        assert features["prediction"] == ClassLabel(names=MODEL_CLASSES)
        assert (features["confidence"], features["index"]) == (Value("float32"), Value("int64"))

    def test_batches_are_written_in_order(self, folder):
        parts = [columns_of(250), columns_of(3, start=250)]
        rows = load_dataset(str(write(folder, *parts)))["test"]
        assert rows["index"][:] == list(range(253))

    @pytest.mark.parametrize("split", ["test", "query", "images_background", "part.2"])
    def test_any_split_name_loads(self, folder, split):
        assert list(load_dataset(str(write(folder, columns_of(), split=split)))) == [split]

    def test_result_files_are_not_loaded_as_data(self, folder):
        write(folder, columns_of())
        (folder / "evaluation").mkdir()
        (folder / "evaluation" / "test.json").write_text('{"eval_accuracy": 1.0}')
        assert load_dataset(str(folder))["test"].num_rows == 4

    def test_split_names_unsupported_by_datasets_and_no_embeddings_are_rejected(self, folder):
        for split in ("", "test[:10]", "../test", "test-1"):
            with pytest.raises(ValueError, match="the name of a split consists of letters"):
                write(folder, columns_of(), split=split)
        with pytest.raises(ValueError, match="no embeddings were added"):
            write(folder)
        with pytest.raises(ValueError, match="class_names must be a list of texts"):  # noqa: SIM117
            with embeddings_writer(folder, "test", {}, class_names="ab") as add:
                add({"embedding": torch.randn(1, 2), "label": torch.tensor([1])})
        assert not folder.exists()

    def test_model_and_size_are_stored_with_the_data(self, folder):
        write(folder, columns_of(3), columns_of(4), about={"model": "some/model"})
        about = json.loads((folder / "embeddings.json").read_text())
        assert about == {"model": "some/model", "embedding_dim": 5, "num_images": 7}

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_an_error_keeps_the_existing_files_and_adds_none(self, folder, error):
        write(folder, columns_of())
        before = sorted(path.name for path in folder.parent.rglob("*"))
        with pytest.raises(error), embeddings_writer(folder, "test", {}, class_names=CLASSES) as add:  # noqa: PT012
            add({"embedding": torch.randn(300, 2)})
            raise error
        assert sorted(path.name for path in folder.parent.rglob("*")) == before
        assert len(read_embeddings(str(folder)).embeddings) == 4


class TestReading:
    def test_written_embeddings_are_read(self, folder):
        written = columns_of()
        data = read_embeddings(str(write(folder, written, about={"distance": "cosine"})))
        for name, values in (
            ("embedding", data.embeddings),
            ("label", data.labels),
            ("prediction", data.predictions),
            ("confidence", data.certainties["confidence"]),
            ("concentration", data.certainties["concentration"]),
        ):
            assert torch.equal(values, written[name]), name
        assert (data.class_names, data.predicted_names) == (CLASSES, MODEL_CLASSES)
        assert data.about["distance"] == "cosine"

    @pytest.mark.parametrize("number", [int, float])
    def test_only_the_embedding_column_is_required(self, folder, number):
        data = read_embeddings(save(folder, embedding=[[number(1), number(2)], [number(3), number(4)]]))
        assert data.embeddings.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert data.embeddings.dtype == torch.float32
        assert (data.labels, data.predictions, data.certainties) == (None, None, {})
        assert data.about == {}

    @pytest.mark.parametrize(
        ("labels", "names"),
        [([3, 0, 3], ["0", "3"]), (["b", "a", "b"], ["a", "b"]), (["0", "-1", "0"], ["-1", "0"])],
        ids=["integers", "names", "numeric names"],
    )
    def test_labels_can_be_integers_or_names(self, folder, labels, names):
        data = read_embeddings(save(folder, embedding=[[1.0]] * 3, label=labels))
        assert data.class_names == names
        assert data.labels.tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"text": ["a"]}, "no column embedding; it has: text"),
            ({"embedding": [[1.0]], "prediction": [0]}, "no column confidence"),
            ({"embedding": [[1.0]], "prediction": [0], "confidence": [0.5]}, "has no names of classes; cast it"),
            ({"embedding": [[1.0, 2.0], [3.0]]}, "column embedding of .* must be numbers, the same number of them for"),
            ({"embedding": [[1.0, 2.0], None]}, "column embedding of .* must be finite; 1 of 2 are not, "),
            ({"embedding": [[], []]}, r"column embedding of .* must have the shape \(N, d\)"),
            ({"embedding": [[1.0, None], [3.0, 4.0]]}, "must be finite; 1 of 2 are not, the first at index 0"),
            ({"embedding": [1.0, 2.0]}, r"must have the shape \(N, d\)"),
            ({"embedding": [["a"], ["b"]]}, "must be numbers"),
            ({"embedding": [[1.0]] * 3, "index": [4, None, 5]}, "column index of .* must be integers"),
        ],
    )
    def test_missing_columns_and_invalid_cells_are_rejected(self, folder, columns, message):
        with pytest.raises((ValueError, TypeError), match=message):
            read_embeddings(save(folder, **columns))

    def test_several_splits_require_a_choice(self, folder):
        save(folder, "train", embedding=[[1.0]])
        name = save(folder, "test", embedding=[[2.0]])
        with pytest.raises(ValueError, match=r"has the splits train, test; choose one with --split"):
            read_embeddings(name)
        assert read_embeddings(name, split="test").embeddings.tolist() == [[2.0]]
        for option in ({}, {"only_split": True}):
            with pytest.raises(ValueError, match="no split 'validation'"):
                read_embeddings(name, split="validation", **option)

    def test_a_wrong_name_for_the_only_split_is_rejected_by_default(self, folder):
        name = save(folder, embedding=[[1.0]])
        assert read_embeddings(name).split == read_embeddings(name, split="train").split == "train"
        with pytest.raises(ValueError, match=r"no split 'test'; the data has train\. Choose one with --split"):
            read_embeddings(name, split="test")
        assert read_embeddings(name, split="test", only_split=True).split == "train"

    def test_row_sampling_depends_on_the_seed(self, folder):
        name = save(folder, embedding=[[float(row)] for row in range(100)])
        drawn = [read_embeddings(name, max_samples=10, seed=seed).embeddings[:, 0].tolist() for seed in (0, 0, 1)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert drawn[0] == sorted(set(drawn[0]))
        assert len(drawn[0]) == 10
        assert len(read_embeddings(save(folder, embedding=[[1.0]] * 3), max_samples=10).embeddings) == 3

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("confidence", 1.5, r"is 1\.5 in row 2, not a probability"),
            ("confidence", -0.5, r"is -0\.5 in row 2, not a probability"),
            ("concentration", -3.0, r"is -3\.0 in row 2, not at least 0"),
        ],
    )
    def test_an_invalid_certainty_is_reported_with_column_file_and_row(self, folder, column, value, message):
        columns = columns_of()
        columns[column][2] = value
        name = str(write(folder, columns))
        with pytest.raises(ValueError, match=f"column {column} of {name}, split 'test', {message}"):
            read_embeddings(name)

    @pytest.mark.parametrize(("column", "values"), [("confidence", [0.0, 1.0]), ("concentration", [0.0, 1e8])])
    def test_certainties_at_the_bounds_are_accepted(self, folder, column, values):
        columns = columns_of(2) | {column: torch.tensor(values)}
        data = read_embeddings(str(write(folder, columns)))
        assert data.certainties[column].tolist() == values

    @pytest.mark.parametrize("column", ["embedding", "logits"])
    @pytest.mark.parametrize("value", [1e300, 1e39, float("nan"), float("inf")])
    def test_a_vector_that_is_not_finite_in_float32_is_named_by_its_row(self, folder, column, value):
        vectors = {"embedding": [[0.0, 1.0]] * 40} | {column: [[0.0, 1.0]] * 39 + [[value, 1.0]]}
        with pytest.raises(ValueError, match=rf"column {column} .*must be finite; 1 of 40 are not, .* at index 39"):
            read_embeddings(save(folder, **vectors))

    def test_bad_input_is_refused(self, folder):
        with pytest.raises(ValueError, match="no column label; it has: embedding, text"):
            read_embeddings(save(folder, embedding=[[1.0]], text=["a"]), needed=["label"])
        for labels in ([-1, -1, -1], [0, 2, -1]):
            row = labels.index(-1)
            with pytest.raises(ValueError, match=f"label of .*split 'train', is -1 in row {row}, not a class"):
                read_embeddings(save(folder, embedding=[[1.0]] * 3, label=labels))
        columns = columns_of(50)
        columns["concentration"][7:] = -1.0
        name = str(write(folder, columns))
        drawn = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:5].sort().values
        first = int(drawn[drawn >= 7][0])
        with pytest.raises(ValueError, match=rf"is -1\.0 in row {first},"):
            read_embeddings(name, max_samples=5)
        with pytest.raises(ValueError, match="--max_samples must be an integer of at least 1; got 0"):
            read_embeddings(save(folder, embedding=[[1.0]]), max_samples=0)


NAMES = ["cat", "dog", "bird", "cow"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    class_names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    predicted_names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    data=st.data(),
)
def test_labels_and_predictions_are_compared_by_name(class_names, predicted_names, data):
    rows = st.tuples(st.sampled_from(class_names), st.sampled_from(predicted_names))
    pairs = data.draw(st.lists(rows, min_size=1, max_size=20))
    labels = torch.tensor([class_names.index(label) for label, _ in pairs])
    predictions = torch.tensor([predicted_names.index(prediction) for _, prediction in pairs])
    empty = torch.empty(len(pairs))
    of_data, of_model = (labels, class_names), (predictions, predicted_names)
    made = Embeddings("made", "test", empty[:, None], *of_data, *of_model, {}, {})
    known, correct = made.match_predictions()
    assert known.tolist() == [label in predicted_names for label, _ in pairs]
    assert correct.tolist() == [label == prediction for label, prediction in pairs]


def test_source_rows_and_identities_of_images_are_read_and_optional(tmp_path):
    for name, more, expected in (("with", {"index": torch.tensor([4, 2, 9])}, [4, 2, 9]), ("without", {}, None)):
        with embeddings_writer(tmp_path / name, "test", {}) as add:
            add({"embedding": torch.eye(3), **more})
        indices = read_embeddings(str(tmp_path / name)).indices
        assert (indices if indices is None else indices.tolist()) == expected
    columns = columns_of()
    assert torch.equal(read_embeddings(str(write(tmp_path / "now", columns))).row_ids, columns.pop("row_id"))
    assert read_embeddings(str(write(tmp_path / "earlier", columns))).row_ids is None


def test_embeddings_that_are_replaced_while_they_are_read_are_of_one_version(tmp_path, monkeypatch):
    def write_version(version: str) -> None:
        with embeddings_writer(tmp_path / "vectors", "test", {"model": version}) as add:
            add({"embedding": torch.full((2, 2), float(version))})

    def load_and_replace(name: str) -> Any:
        monkeypatch.setattr(store, "load_splits", load_splits)
        splits = load_splits(name)
        write_version("2")
        return splits

    write_version("1")
    load_splits = store.load_splits
    monkeypatch.setattr(store, "load_splits", load_and_replace)
    data = read_embeddings(str(tmp_path / "vectors"))
    assert (data.about["model"], data.embeddings[0, 0]) == ("2", 2)
