"""Classify the images of a folder or dataset, and write a CSV or parquet file.

hf-sphere predict --model_name_or_path outputs/birds --images photos --output photos.csv
hf-sphere predict --model_name_or_path outputs/digits --images digits --output digits.parquet

The columns: `file`; `label`, if the images are in class folders or labeled; `prediction` and `confidence`, its
probability (softmax, or the sigmoid if the model is for several classes per image); `concentration`, if the head has
one; and `prediction_2`, `confidence_2` and so on; of a regression instead `value_` and its name. If the model has a
rejection, `known` and `p_value`, and with `--coverage` the `classes` that are needed (a JSON list in a CSV file), none
of unknown images. `prediction` is the most likely class of unknown images, too: select the rows that are `known`. An
interrupted run continues where it stopped when the command is repeated.
"""

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_sphere import search
from hf_sphere.training.output_dir import check_output_file
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments
from hf_sphere.utils.files import atomic_file, lock_folder
from hf_sphere.utils.problem_types import class_probabilities, problem_type, why_no_accuracy
from hf_sphere.utils.texts import write_csv

SUFFIXES = (".csv", ".parquet")


@dataclass
class PredictionArguments(Arguments):
    """Model, images and file."""

    model_name_or_path: str = argument(help="Image model with a head: folder or Hub id.")
    images: str = argument(help="Folder of images (at any depth), image file, or name of a dataset.")
    output: str = argument(help="File to write, with the suffix .csv or .parquet.")
    split: str | None = argument(None, "Split of a dataset; the evaluation split if not set.")
    top_k: int = argument(5, "Predictions per image, at most the number of classes; of a regression all values.", ge=1)
    coverage: float | None = argument(
        None, "List classes that include the right one for at least this fraction of known images.", gt=0, lt=1
    )
    batch_size: int = argument(64, "Images per batch.", ge=1)
    num_workers: int | None = argument(None, "Number of decoding processes; one per core if not set.", ge=0, le=1024)
    skip_invalid: bool = argument(False, "Leave out images that cannot be read.")
    overwrite_output: bool = argument(False, "Replace the file.")
    disable_tqdm: bool = argument(False, "Disable the progress bar.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.output).suffix not in SUFFIXES:
            raise ValueError(f"--output must end in {' or '.join(SUFFIXES)}; got {self.output}.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and predict."""
    (args,) = parse_arguments((PredictionArguments,), argv, __doc__)
    output, name = Path(args.output), args.model_name_or_path
    check_output_file(args.output, overwrite=args.overwrite_output)
    source, encoder = search.ImageSource.of(args.images, args.split), search.ImageEncoder(name)
    if not encoder.class_names:
        raise ValueError(f"{name} has no classes to predict; give a model with a head.")
    rejection: Any = getattr(encoder.model, "rejection", None)
    if args.coverage is not None and rejection is None:
        raise ValueError(f"--coverage needs a model with a rejection; fit one to {name} with hf-sphere reject.")
    if args.coverage is not None:
        rejection.check_coverage(args.coverage)
    from hf_sphere.search.extract import finished_batches

    with lock_folder(output, wait=False):
        rows = predict(args, encoder, source, finished_batches(output))
        write_table(rows, output)
        shutil.rmtree(finished_batches(output), ignore_errors=True)
    print(f"wrote     {output}: {len(rows):,} of {len(source):,} images")
    if rejection is not None:
        unknown, level = sum(not row["known"] for row in rows), rejection.settings["level"]
        print(f"unknown   {unknown:,} of {len(rows):,} images, at level {level:g}")
    labeled = [row for row in rows if row.get("label") in encoder.class_names]
    if labeled and (reason := why_no_accuracy(problem_type(encoder.model))):
        print(f"accuracy  none: {reason}")
    elif labeled:
        percent = 100 * sum(row["label"] == row["prediction"] for row in labeled) / len(labeled)
        print(f"accuracy  {percent:.2f} % of the {len(labeled):,} images with a label that the model knows")
        if trained := count_trained(name, args.images, source.split):
            print(f"record    the model was trained on {trained:,} of these images, so the accuracy is optimistic")


def count_trained(model: str, images: str, split: str | None) -> int:
    """Return how many of the images a model was trained on; 0 if it has no record, or one of other data."""
    import torch
    from datasets import DatasetDict

    from hf_sphere.data.provenance import DataRecord, fingerprint, identify_rows
    from hf_sphere.data.sources import load_splits

    if (record := DataRecord.read(model)) is None:
        return 0
    splits = DatasetDict()
    with contextlib.suppress(ValueError, OSError):  # a folder of images need not be a dataset
        splits = load_splits(images)
    if fingerprint(splits) != record.data:
        return 0
    rows = identify_rows(splits, split or "+".join(splits), None, record.data)
    return int(torch.isin(rows, record.ids["train"]).sum())


def predict(
    args: PredictionArguments, encoder: "search.ImageEncoder", source: "search.ImageSource", folder: Path
) -> list[dict[str, Any]]:
    """Return a row per image; finished batches are kept in the folder."""
    table: list[dict[str, Any]] = []
    options: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": args.num_workers, "folder": folder}
    options |= {"skip_invalid": args.skip_invalid, "progress": not args.disable_tqdm}
    for indices, columns in encoder.encode(source, **options):
        cells = encoder.name_cells(source, indices, columns)
        if (values := columns.get("values")) is not None:
            cells |= {f"value_{name}": values[:, n].tolist() for n, name in enumerate(encoder.class_names)}
        else:
            probabilities: Any = class_probabilities(columns["logits"], problem_type(encoder.model))
            # Stable: of classes with equal probabilities, the first is the prediction.
            ranked = probabilities.sort(descending=True, stable=True)
            for rank in range(1, min(args.top_k, len(encoder.class_names))):
                cells[f"prediction_{rank + 1}"] = [encoder.class_names[n] for n in ranked.indices[:, rank].tolist()]
                cells[f"confidence_{rank + 1}"] = ranked.values[:, rank].tolist()
        if args.coverage is not None:
            rejection: Any = encoder.model.rejection
            names = ("known", "class_p_values", "prediction")
            chosen = rejection.prediction_set(*(columns[name] for name in names), args.coverage)
            pairs = zip(ranked.indices.tolist(), chosen.tolist(), strict=True)
            cells["classes"] = [[encoder.class_names[n] for n in order if is_in[n]] for order, is_in in pairs]
        del cells["row"]
        table += [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    return table


def write_table(table: list[dict[str, Any]], output: Path) -> None:
    """Write the rows in the format of the suffix."""
    if not table:
        raise ValueError("none of the images can be read, so there is nothing to write.")
    with atomic_file(output) as unfinished:
        if output.suffix == ".csv":
            with unfinished.open("w", newline="", encoding="utf-8") as file:
                write_csv([{key: _as_text(value) for key, value in row.items()} for row in table], file)
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(table), unfinished)


def _as_text(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"  # six digits are all that float32 has
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, bool)) else value
