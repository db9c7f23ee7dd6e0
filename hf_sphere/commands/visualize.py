r"""Plot embeddings: on the circle or sphere, and on an interactive page.

hf-sphere visualize --embeddings outputs/embeddings/mnist-test
hf-sphere visualize --embeddings outputs/embeddings/mnist-vmf \
    --beside outputs/embeddings/mnist-cosine outputs/embeddings/mnist-spherized

The embeddings come from `hf-sphere extract`, or are any dataset with the column `embedding` (and `label`,
for colors). Embeddings with 2 or 3 coordinates are plotted without projection. Others are projected on the leading
principal directions about the origin (PCA on the sphere), which is stated in the pictures. From the provenance that
`hf-sphere extract` stores, the class directions or prototypes of the model and thumbnails of the images are loaded.

sphere        sphere.png or circle.png: embeddings by class, with the class directions
angles        angles.png: angles within and between classes
interactive   sphere.html: a page to rotate the sphere, show the image or the text of an embedding, and select classes
gallery       gallery.png: these embeddings beside --beside

Alignment, uniformity, effective dimension and the mean angles are written to `all_results.json`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hf_sphere import search, visualization
from hf_sphere.training.output_dir import RESULTS_FILE, RUN_FILE, check_results_dir, results_dir, write_settings
from hf_sphere.utils.arguments import SEED, Arguments, argument, parse_arguments
from hf_sphere.utils.files import read_whole, write_json

DEFAULT_PICTURES = ("sphere", "angles", "interactive")
PICTURES = (*DEFAULT_PICTURES, "gallery")
FILES = ("sphere.png", "circle.png", "angles.png", "sphere.html", "gallery.png")


@dataclass
class VisualizationArguments(Arguments):
    """Embeddings and pictures."""

    embeddings: str = argument(help="Embeddings: a folder written by hf-sphere extract, or a dataset.")
    output_dir: str | None = argument(None, "Output folder; <embeddings>/pictures if not set.")
    overwrite_output_dir: bool = argument(False, "Replace the pictures in output_dir.")
    pictures: list[str] | None = argument(
        None,
        "Pictures; default: sphere, angles and interactive if their extras are installed, and gallery with --beside.",
        choices=PICTURES,
    )
    beside: list[str] = argument(list, "Further embeddings of the same classes, for the gallery.")
    dim: Literal[2, 3] | None = argument(None, "2 for the circle, 3 for the sphere; default: as the embeddings.")
    split: str | None = argument(None, "Split to read, for datasets with several splits.")
    max_samples: int | None = argument(None, "Maximum number of embeddings, sampled at random.", ge=1)
    seed: int = argument(0, "Seed of the samples of --max_samples.", **SEED)
    title: str | None = argument(None, "Title; model and dataset if not set.")
    no_thumbnails: bool = argument(False, "Omit the images from the interactive page.")
    cache_dir: str | None = argument(None, "Folder for decoded images; in the Hugging Face home if not set.")
    disable_tqdm: bool = argument(False, "Disable progress bars.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pictures is not None and ("gallery" in self.pictures) != bool(self.beside):
            raise ValueError("the picture gallery and --beside require each other; set both or neither.")
        if self.output_dir is None and not read_whole(self.embeddings, Path.is_dir):
            raise ValueError(f"{self.embeddings} is not a folder. If it is a dataset on the Hub, set --output_dir.")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the arguments and the data, then write the results and the pictures."""
    (args,) = parse_arguments((VisualizationArguments,), argv, __doc__)
    pictures = []
    for picture in args.pictures or [*DEFAULT_PICTURES, *["gallery"] * bool(args.beside)]:
        try:
            (visualization.check_plotly if picture == "interactive" else visualization.check_matplotlib)()
            pictures.append(picture)
        except ImportError as error:
            if args.pictures:
                raise
            print(f"Note: no picture {picture}: {error}")
    output = Path(args.output_dir or Path(args.embeddings) / "pictures")
    check_results_dir(output, overwrite=args.overwrite_output_dir)
    reading = {"split": args.split, "max_samples": args.max_samples, "seed": args.seed}
    drawn = visualization.EmbeddingPictures(
        search.read_embeddings(args.embeddings, **reading), dim=args.dim, title=args.title
    )
    beside = [search.read_embeddings(name, needed=["label"], **reading) for name in args.beside]
    others = [visualization.EmbeddingPictures(each, dim=drawn.dim, title=args.title) for each in beside]
    drawn.check_gallery(others)
    results = drawn.measure()
    print(drawn.data.name)
    for name, value in results.items():
        print(f"{name.replace('_', ' '):<22}{value:>9,.6g}")
    with results_dir(output, [*FILES, RESULTS_FILE, RUN_FILE], overwrite=args.overwrite_output_dir):
        write_settings(output, asdict(args))
        write_json(output / RESULTS_FILE, results)
        print(f"saved {output / RESULTS_FILE}")
        loading = {"cache_dir": args.cache_dir, "progress": not args.disable_tqdm}
        draw: dict[str, tuple[str, Callable[..., Any]]] = {
            "sphere": ("circle.png" if drawn.dim == 2 else "sphere.png", drawn.plot),
            "angles": ("angles.png", drawn.plot_angles),
            "interactive": ("sphere.html", partial(drawn.write_page, thumbnails=not args.no_thumbnails, **loading)),
            "gallery": ("gallery.png", partial(drawn.plot, others=others, title=args.title or "")),
        }
        for picture in pictures:
            name, plot = draw[picture]
            plot(output / name)
            if (output / name).exists():
                print(f"drew  {output / name}")
    for each in (drawn, *others):
        for note in each.notes:
            print(f"Note: {note if each is drawn else f'{each.data.name}: {note}'}")
