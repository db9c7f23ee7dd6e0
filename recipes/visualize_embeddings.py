"""Look at embeddings: on the circle, on the sphere, in a page to turn and touch, and along training.

python recipes/visualize_embeddings.py --embeddings outputs/embeddings/mnist-test
python recipes/visualize_embeddings.py --embeddings outputs/embeddings/mnist-vmf \
    --beside outputs/embeddings/mnist-cosine outputs/embeddings/mnist-spherized
python recipes/visualize_embeddings.py --embeddings outputs/embeddings/mnist-test --pictures film --dim 3

The embeddings are those of `recipes/extract_embeddings.py`, or any data set with the column `embedding` (and `label`,
for colours). Those of 2 or 3 coordinates are drawn as they are, others projected on the leading principal directions
about the origin (PCA on the sphere), and the pictures say so. What belongs to them is found by what
`extract_embeddings.py` noted: class directions or prototypes in the model, thumbnails in the data set, the film's
weights in the run's snapshots (`--snapshot_epochs 1` in training).

sphere        sphere.png or circle.png: embeddings by class, with the directions of the classes
angles        angles.png: angles within and between classes
interactive   sphere.html: one file to open in a browser: turn it, touch a point for its image, choose classes
film          film.gif: the same along training
gallery       gallery.png: these embeddings and those of --beside, side by side

Alignment, uniformity, effective dimension and the mean angles are in `all_results.json`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm.auto import tqdm

from hf_sphere.embeddings.provenance import embed_snapshots, find_directions, find_snapshots_of, find_thumbnails
from hf_sphere.embeddings.store import Embeddings, read_embeddings
from hf_sphere.metrics import alignment, class_angles, effective_dimension, uniformity
from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.output_dir import RESULTS_FILE, RUN_FILE, check_results_dir, prepare_results_dir
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.files import write_json
from hf_sphere.utils.snapshots import Snapshot
from hf_sphere.visualization import (
    Panel,
    check_matplotlib,
    check_plotly,
    choose_view,
    plot_circle,
    plot_class_angles,
    plot_gallery,
    plot_sphere,
    project_to_sphere,
    save_film,
    write_interactive_sphere,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = ("sphere.png", "circle.png", "angles.png", "sphere.html", "film.gif", "gallery.png", RESULTS_FILE, RUN_FILE)
EXTRAS = {
    "sphere": check_matplotlib,
    "angles": check_matplotlib,
    "interactive": check_plotly,
    "film": check_matplotlib,
    "gallery": check_matplotlib,
}
"""What a picture needs, and says if it is not there."""


@dataclass
class VisualizationArguments:
    """What to look at, and how."""

    embeddings: str = field(metadata={"help": "Embeddings: a folder that recipes/extract_embeddings.py wrote."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder to write; <embeddings>/pictures if not set."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the pictures in output_dir."})
    pictures: list[str] | None = field(
        default=None,
        metadata={
            "help": "What to draw of sphere, angles, interactive, film and gallery; if not set the first three, as far "
            "as their extras are installed, and the gallery where there is one."
        },
    )
    beside: list[str] = field(
        default_factory=list, metadata={"help": "Further embeddings of the same classes, for the gallery."}
    )
    dim: Literal[2, 3] | None = field(
        default=None,
        metadata={"help": "Draw on the circle (2) or on the sphere (3); if not set the circle for 2 coordinates."},
    )
    lengths: bool = field(
        default=False, metadata={"help": "Draw 2 coordinates where they are in the plane, not their directions."}
    )
    split: str | None = field(default=None, metadata={"help": "Split to read of data sets that have several."})
    max_samples: int | None = field(default=None, metadata={"help": "Use only so many embeddings."})
    seed: int = field(default=0, metadata={"help": "Seed of the choice of --max_samples and of --film_samples."})
    title: str | None = field(default=None, metadata={"help": "Heading; model and data set if not set."})
    no_directions: bool = field(default=False, metadata={"help": "Leave out the directions of the classes."})
    no_thumbnails: bool = field(default=False, metadata={"help": "Leave the images out of the page."})
    film_samples: int = field(default=2000, metadata={"help": "Images in the film."})
    film_milliseconds: int = field(default=400, metadata={"help": "How long each epoch of the film is shown."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Folder for decoded images; below the Hugging Face home if not set."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})

    def __post_init__(self) -> None:
        unknown = [name for name in self.pictures or [] if name not in EXTRAS]
        if unknown:
            raise ValueError(f"--pictures are any of {', '.join(EXTRAS)}; got {unknown[0]!r}.")
        for name, least in (("max_samples", 1), ("film_samples", 1), ("film_milliseconds", 20)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}; got {value}.")
        twice = [name for name in self.beside if [self.embeddings, *self.beside].count(name) > 1]
        if twice:
            raise ValueError(f"--beside names other embeddings, each once; got {twice[0]} twice.")
        if self.pictures is not None and ("gallery" in self.pictures) != bool(self.beside):
            raise ValueError("the gallery and --beside need each other; name further embeddings, or leave both out.")
        if self.lengths and self.dim == 3:
            raise ValueError("--lengths is for the plane, and --dim 3 asks for the sphere; leave one of them out.")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and do as it says."""
    (args,) = parse_arguments((VisualizationArguments,), argv, "Look at embeddings.")
    transformers.utils.logging.disable_progress_bar()
    try:
        visualize(args)
    except KeyboardInterrupt:
        print("\nStopped; the pictures that were announced are whole.", file=sys.stderr)
        sys.exit(130)


def visualize(args: VisualizationArguments) -> None:
    """Measure, write the results and draw."""
    pictures = choose_pictures(args)
    output = choose_output(args)
    reading = {"split": args.split, "max_samples": args.max_samples, "seed": args.seed}
    data = read_embeddings(args.embeddings, **reading)
    look = Look(data, args)
    others = [Look(read_embeddings(name, needed=["label"], **reading), args) for name in args.beside]
    check_gallery([look, *others])
    snapshots = find_snapshots_of(data) if "film" in pictures else []
    results = look.measure()
    prepare_results_dir(output, FILES, overwrite=args.overwrite_output_dir)
    write_json(output / RUN_FILE, asdict(args))
    write_json(output / RESULTS_FILE, results)
    print(f"saved {output / RESULTS_FILE}")
    draw = {
        "sphere": look.draw_sphere,
        "angles": look.draw_angles,
        "interactive": look.write_page,
        "film": partial(look.draw_film, snapshots=snapshots),
        "gallery": partial(look.draw_gallery, others=others),
    }
    for picture in pictures:
        path = draw[picture](output)
        if path is not None:
            print(f"drew  {path}")
    for one in (look, *others):
        for note in one.notes:
            print(f"Note: {note if one is look else f'{one.data.name}: {note}'}")


def choose_pictures(args: VisualizationArguments) -> list[str]:
    """The pictures that were asked for, or those that the installed extras can draw.

    Raises:
        ImportError: If the extra of a picture that was asked for is missing, or all of them.
    """
    if args.pictures is not None:
        for picture in args.pictures:
            EXTRAS[picture]()
        return list(dict.fromkeys(args.pictures))
    chosen: list[str] = []
    missing: dict[str, ImportError] = {}
    for picture in ("sphere", "angles", "interactive", *(["gallery"] if args.beside else [])):
        try:
            EXTRAS[picture]()
            chosen.append(picture)
        except ImportError as error:
            missing[str(error)] = error
    if not chosen:
        raise next(iter(missing.values()))
    for message in missing:
        print(f"Note: {message}")
    return chosen


def check_gallery(looks: Sequence["Look"]) -> None:
    """Refuse a gallery of embeddings that cannot share a legend, or a kind of picture."""
    first = looks[0]
    for other in looks[1:]:
        if other.dim < first.dim:
            raise ValueError(f"{other.data.name} has 2 coordinates; draw all on the circle, with --dim 2.")
        if other.class_names != first.class_names:
            raise ValueError(
                f"{other.data.name} and {first.data.name} have other classes, {shorten(other.class_names)} and "
                f"{shorten(first.class_names)}; a gallery has one legend."
            )


def shorten(names: Sequence[str]) -> str:
    """Name the first classes."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def choose_output(args: VisualizationArguments) -> Path:
    """Find the folder to write to, and refuse one with other results."""
    if args.output_dir is None and not Path(args.embeddings).is_dir():
        raise ValueError(
            f"{args.embeddings} is no folder. If it is a data set of the Hub, name a folder for the pictures with "
            "--output_dir."
        )
    output = Path(args.output_dir or Path(args.embeddings) / "pictures")
    check_results_dir(output, overwrite=args.overwrite_output_dir)
    return output


class Look:
    """Embeddings and what belongs to them, drawn picture by picture.

    Attributes:
        notes: What could not be found or drawn, and why.
    """

    def __init__(self, data: Embeddings, args: VisualizationArguments) -> None:
        coordinates = data.embeddings.shape[1]
        if coordinates < 2:
            raise ValueError(f"{data.name} has embeddings of {coordinates} coordinate; pictures need 2 at least.")
        if args.lengths and coordinates != 2:
            raise ValueError(
                f"--lengths draws embeddings of 2 coordinates where they are; those of {data.name} have {coordinates}."
            )
        if args.dim is not None and args.dim > coordinates:
            raise ValueError(f"--dim {args.dim} needs as many coordinates; {data.name} has {coordinates}.")
        spoilt = ~data.embeddings.isfinite().all(-1)
        if not args.lengths:
            spoilt |= ~data.embeddings.any(-1)
        if spoilt.any():
            raise ValueError(
                f"{int(spoilt.sum())} of {len(spoilt)} embeddings of {data.name} are zero or not finite and have no "
                f"direction, the first one in row {int(spoilt.nonzero()[0, 0])}; leave them out."
            )
        self.data, self.args = data, args
        self.notes: list[str] = []
        self.dim = args.dim or min(coordinates, 3)
        self.labels = torch.zeros(len(data.embeddings), dtype=torch.long) if data.labels is None else data.labels
        self.class_names = data.class_names if data.labels is not None else ["embeddings"]
        about = data.about
        known = [Path(about[name]).name for name in ("model", "dataset") if name in about]
        self.name = ", ".join(known) or Path(data.name).name
        self.title = self.name if args.title is None else args.title
        self.directions: Tensor | None = None
        if not args.no_directions:
            self.directions = self._find("directions of the classes", partial(find_directions, data))

    def measure(self) -> dict[str, Any]:
        """Measure how the directions of the embeddings lie, print it and return it by name."""
        points, labels = F.normalize(self.data.embeddings.double(), dim=-1), self.labels
        count, coordinates = points.shape
        number = len(labels.unique())
        classes = "no labels" if self.data.labels is None else f"{number} {'class' if number == 1 else 'classes'}"
        print(f"{self.data.name}: {count:,} embeddings of {coordinates} coordinates, {classes}")
        self.results: dict[str, Any] = {"num_embeddings": count, "embedding_dim": coordinates}
        self._measure("uniformity", lambda: uniformity(points), "log mean exp(-2 |x - y|^2): lower is more even")
        self._measure("effective_dimension", lambda: effective_dimension(points), f"of {coordinates}")
        if self.data.labels is None:
            self.notes.append("without a column label there are no classes: no colours, alignment and angles.")
            return self.results
        within = "mean |x - y|^2 within classes: lower is tighter"
        self._measure("alignment", lambda: alignment(points, labels), within)
        for place, name in enumerate(("mean_angle_within", "mean_angle_between")):
            mean = partial(lambda place: class_angles(points, labels)[place].mean().item(), place)
            self._measure(name, mean, "degrees, over pairs")
        return self.results

    def _measure(self, name: str, measure: Callable[[], float], detail: str) -> None:
        """Keep a measure and print it, or note why there is none: too few points, a single class."""
        try:
            self.results[name] = measure()
        except ValueError as error:
            self.notes.append(f"no {name.replace('_', ' ')}: {error}")
            return
        print(f"{name.replace('_', ' '):<22}{self.results[name]:>9.4g}    {detail}")

    def draw_sphere(self, folder: Path) -> Path:
        """Draw the embeddings on the circle or on the sphere."""
        path = folder / ("circle.png" if self.dim == 2 else "sphere.png")
        self._figure(self.data.embeddings, self.labels, self.directions, self.title, path=path)
        return path

    def draw_angles(self, folder: Path) -> Path | None:
        """Draw the angles within and between classes."""
        if self.data.labels is None:
            return None
        path = folder / "angles.png"
        try:
            plot_class_angles(self.data.embeddings, self.labels, title=self.title, path=path)
        except ValueError as error:  # a single class has no other, single points have no pair
            self.notes.append(f"no picture of angles: {error}")
            return None
        return path

    def write_page(self, folder: Path) -> Path:
        """Write the interactive sphere."""
        images = None
        if not self.args.no_thumbnails:
            options = {"cache_dir": self.args.cache_dir, "progress": not self.args.disable_tqdm}
            images = self._find("thumbnails", partial(find_thumbnails, self.data, **options))
        return write_interactive_sphere(
            folder / "sphere.html",
            self.data.embeddings,
            self.labels,
            self.class_names,
            images=images,
            directions=self.directions,
            texts=self._texts(),
            title=self.title,
        )

    def draw_film(self, folder: Path, snapshots: Sequence[Snapshot]) -> Path:
        """Draw the embeddings after each epoch, all in the view of the last one."""
        path = folder / "film.gif"
        save_film(self._frames(snapshots), path, milliseconds=self.args.film_milliseconds)
        return path

    def draw_gallery(self, folder: Path, others: Sequence["Look"]) -> Path:
        """Draw these embeddings and others side by side."""
        path = folder / "gallery.png"
        panels: dict[str, Panel] = {}
        for look in (self, *others):
            name = look.name if look.name not in panels else look.data.name
            panels[name] = Panel(look.data.embeddings, look.labels, look.directions, self.args.lengths)
        plot_gallery(
            panels,
            self.class_names,
            dim=self.dim,
            columns=2 if self.dim == 3 else 3,
            title=self.args.title or "",
            path=path,
        )
        return path

    def _figure(
        self, points: Tensor, labels: Tensor, directions: Tensor | None, title: str, **options: Any
    ) -> "Figure":
        if self.dim == 2:
            options["lengths"] = self.args.lengths
        plot = plot_circle if self.dim == 2 else plot_sphere
        return plot(points, labels, self.class_names, directions=directions, title=title, **options)

    def _frames(self, snapshots: Sequence[Snapshot]) -> Iterator["Figure"]:
        """Yield a picture a snapshot."""
        args = self.args
        reading = {"max_samples": args.film_samples, "seed": args.seed, "cache_dir": args.cache_dir}
        (last,) = embed_snapshots(self.data, snapshots[-1:], **reading, progress=not args.disable_tqdm)
        options: dict[str, Any] = {}
        shown = last.points
        if shown.shape[1] > self.dim:
            shown, options["basis"] = project_to_sphere(shown, self.dim)
        if self.dim == 3:
            options["view"] = choose_view(F.normalize(shown.double(), dim=-1))
        moments = embed_snapshots(self.data, snapshots, **reading, progress=False)
        for now in tqdm(moments, desc="Filming", total=len(snapshots), unit="epoch", disable=args.disable_tqdm):
            directions = None if args.no_directions else now.directions
            title = f"{self.title}: epoch {now.epoch}"
            yield self._figure(now.points, now.labels, directions, title, **options)

    def _find(self, what: str, find: Callable[[], Tensor | None]) -> Tensor | None:
        """Find what belongs to the embeddings, or note why it cannot be found."""
        try:
            return find()
        except (OSError, ValueError) as error:
            self.notes.append(f"no {what}: {str(error).splitlines()[0]}")
            return None

    def _texts(self) -> list[str] | None:
        """What the page says of each embedding beside its class."""
        data = self.data
        parts: list[list[str]] = []
        if data.indices is not None:
            parts.append([f"row {index}" for index in data.indices.tolist()])
        if data.predictions is not None and data.confidences is not None:
            told = zip(data.predictions.tolist(), data.confidences.tolist(), strict=True)
            parts.append([f"predicted {data.predicted_names[k]} ({100 * p:.1f} %)" for k, p in told])
        return ["\n".join(lines) for lines in zip(*parts, strict=True)] if parts else None


if __name__ == "__main__":
    run_recipe(main)
