"""Look at embeddings: on the circle, on the sphere, in a page to turn and touch, and along training.

python recipes/visualize_embeddings.py --embeddings outputs/embeddings/mnist-test
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

Alignment, uniformity, effective dimension and the mean angles are in `all_results.json`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from safetensors.torch import load_model
from torch import Tensor
from tqdm.auto import tqdm

from hf_sphere.data import load_image_split
from hf_sphere.data.thumbnails import load_thumbnails
from hf_sphere.embedding_files import Embeddings, read_embeddings
from hf_sphere.metrics import alignment, class_angles, effective_dimension, uniformity
from hf_sphere.snapshot_files import Snapshot, list_snapshots
from hf_sphere.training import parse_arguments
from hf_sphere.training.checkpoints import RESULTS_FILE, RUN_FILE
from hf_sphere.training.embedding import class_names_of, embed, find_preparation, in_order, load_embedder
from hf_sphere.training.results_folders import check_results_dir, claim_results_dir
from hf_sphere.training.run import run_recipe, write_json
from hf_sphere.visualization import (
    check_matplotlib,
    check_plotly,
    choose_view,
    plot_circle,
    plot_class_angles,
    plot_sphere,
    project_to_sphere,
    save_film,
    write_interactive_sphere,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = ("sphere.png", "circle.png", "angles.png", "sphere.html", "film.gif", RESULTS_FILE, RUN_FILE)
EXTRAS = {"sphere": check_matplotlib, "angles": check_matplotlib, "interactive": check_plotly, "film": check_matplotlib}
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
            "help": "What to draw of sphere, angles, interactive and film; if not set the first three, as far as their "
            "extras are installed."
        },
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
        for name in ("max_samples", "film_samples", "film_milliseconds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1; got {value}.")
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
    pictures = choose_pictures(args.pictures)
    output = choose_output(args)
    data = read_embeddings(args.embeddings, split=args.split, max_samples=args.max_samples, seed=args.seed)
    look = Look(data, args)
    snapshots = find_film(data) if "film" in pictures else []
    claim_results_dir(output, FILES, overwrite=args.overwrite_output_dir)
    write_json(output / RUN_FILE, asdict(args))
    write_json(output / RESULTS_FILE, look.measure())
    print(f"saved {output / RESULTS_FILE}")
    draw = {"sphere": look.draw_sphere, "angles": look.draw_angles, "interactive": look.write_page}
    for picture in pictures:
        path = look.draw_film(output, snapshots) if picture == "film" else draw[picture](output)
        if path is not None:
            print(f"drew  {path}")
    for note in look.notes:
        print(f"Note: {note}")


def choose_pictures(asked: Sequence[str] | None) -> list[str]:
    """The pictures that were asked for, or those that the installed extras can draw.

    Raises:
        ImportError: If the extra of a picture that was asked for is missing, or all of them.
    """
    if asked is not None:
        for picture in dict.fromkeys(asked):
            EXTRAS[picture]()
        return list(dict.fromkeys(asked))
    chosen: list[str] = []
    missing: dict[str, ImportError] = {}
    for picture in ("sphere", "angles", "interactive"):
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


def find_film(data: Embeddings) -> list[Snapshot]:
    """Return the snapshots of the run that the embeddings come from.

    Raises:
        ValueError: If there are fewer than two, or the data set that was embedded is not known.
    """
    run, dataset = data.about.get("model"), data.about.get("dataset")
    if run is None or dataset is None:
        raise ValueError(
            f"{data.name} does not say which model embedded which data set, so there is no film of it; "
            "recipes/extract_embeddings.py notes that."
        )
    snapshots = list_snapshots(run)
    if len(snapshots) < 2:
        raise ValueError(
            f"a film needs the snapshots of a run, two at least, and {run} has {len(snapshots)}; train with "
            "--snapshot_epochs 1."
        )
    return snapshots


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
        self.data, self.args = data, args
        self.notes: list[str] = []
        self.dim = args.dim or min(coordinates, 3)
        self.labels = torch.zeros(len(data.embeddings), dtype=torch.long) if data.labels is None else data.labels
        self.class_names = data.class_names if data.labels is not None else ["embeddings"]
        about = data.about
        known = [Path(about[name]).name for name in ("model", "dataset") if name in about]
        self.title = args.title if args.title is not None else ", ".join(known) or Path(data.name).name
        self.directions = None if args.no_directions else self._find_directions()

    def measure(self) -> dict[str, Any]:
        """Measure how the embeddings lie, print it and return it by name."""
        points, about = self.data.embeddings, self.data
        count, coordinates = points.shape
        classes = f"{len(self.labels.unique())} classes" if about.labels is not None else "no labels"
        print(f"{about.name}: {count:,} embeddings of {coordinates} coordinates, {classes}")
        results: dict[str, Any] = {"num_embeddings": count, "embedding_dim": coordinates}
        results["uniformity"] = uniformity(points)
        print(f"{'uniformity':<22}{results['uniformity']:>9.4f}    log mean exp(-2 |x - y|^2): lower is more even")
        results["effective_dimension"] = effective_dimension(points)
        print(f"{'effective dimension':<22}{results['effective_dimension']:>9.2f}    of {coordinates}")
        if about.labels is None:
            self.notes.append("without a column label there are no classes: no colours, alignment and angles.")
            return results
        results["alignment"] = alignment(points, self.labels)
        print(f"{'alignment':<22}{results['alignment']:>9.4f}    mean |x - y|^2 within classes: lower is tighter")
        for name, angles in zip(("within", "between"), class_angles(points, self.labels), strict=True):
            results[f"mean_angle_{name}"] = angles.mean().item()
            print(f"{f'angle {name}':<22}{results[f'mean_angle_{name}']:>9.2f}    degrees, mean over pairs")
        return results

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
        plot_class_angles(self.data.embeddings, self.labels, title=self.title, path=path)
        return path

    def write_page(self, folder: Path) -> Path:
        """Write the interactive sphere."""
        return write_interactive_sphere(
            folder / "sphere.html",
            self.data.embeddings,
            self.labels,
            self.class_names,
            images=None if self.args.no_thumbnails else self._find_thumbnails(),
            directions=self.directions,
            texts=self._texts(),
            title=self.title,
        )

    def draw_film(self, folder: Path, snapshots: Sequence[Snapshot]) -> Path:
        """Draw the embeddings after each epoch, all in the view of the last one."""
        path = folder / "film.gif"
        save_film(self._frames(snapshots), path, milliseconds=self.args.film_milliseconds)
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
        about, accelerator = self.data.about, Accelerator()
        model = load_embedder(about["model"]).to(accelerator.device).eval()
        split = load_image_split(
            about["dataset"],
            about["split"].split("+")[-1],
            **find_preparation(about["model"], model.config),
            config_name=about.get("dataset_config_name"),
            train_classes=about.get("train_classes"),
            max_samples=self.args.film_samples,
            seed=self.args.seed,
            cache_dir=self.args.cache_dir,
            device=accelerator.device,
            progress=not self.args.disable_tqdm,
        )

        def see(snapshot: Snapshot) -> tuple[Tensor, Tensor, Tensor | None]:
            load_model(model, snapshot.path, device=str(accelerator.device))
            columns = list(in_order(embed(model, split.batches, accelerator), split.batches))
            points, labels = (torch.cat([part[name] for part in columns]) for name in ("embedding", "label"))
            return points, labels, self._directions_of(model)

        options: dict[str, Any] = {}
        last = see(snapshots[-1])[0]
        if last.shape[1] > self.dim:
            last, options["basis"] = project_to_sphere(last, self.dim)
        if self.dim == 3:
            options["view"] = choose_view(F.normalize(last.double(), dim=-1))
        for snapshot in tqdm(snapshots, desc="Filming", unit="epoch", disable=self.args.disable_tqdm):
            yield self._figure(*see(snapshot), f"{self.title}: epoch {snapshot.epoch}", **options)

    def _find_directions(self) -> Tensor | None:
        """Directions or prototypes of the classes, from the model that the embeddings come from."""
        name = self.data.about.get("model")
        if name is None or self.data.about.get("head") is None:
            return None
        try:
            model = load_embedder(name)
        except (OSError, ValueError) as error:
            self.notes.append(f"no directions of the classes: {str(error).splitlines()[0]}")
            return None
        return self._directions_of(model, told=True)

    def _directions_of(self, model: Any, *, told: bool = False) -> Tensor | None:
        if self.args.no_directions or not hasattr(model, "head"):
            return None
        directions = model.head.directions()
        reason = None
        if directions is None:
            reason = f"those of a {model.config.head} head have none"
        elif directions.shape[1] != self.data.embeddings.shape[1]:
            reason = f"they have {directions.shape[1]} coordinates, and the embeddings {self.data.embeddings.shape[1]}"
        elif class_names_of(model) != self.class_names:
            reason = "the classes of the data are not those of the model"
        if reason is not None and told:
            self.notes.append(f"no directions of the classes: {reason}.")
        return directions.float().cpu() if reason is None and directions is not None else None

    def _find_thumbnails(self) -> Tensor | None:
        """The images that were embedded, small, if their data set is at hand."""
        about = self.data.about
        if "dataset" not in about or self.data.indices is None:
            self.notes.append(f"no thumbnails: {self.data.name} does not say which images were embedded.")
            return None
        try:
            return load_thumbnails(
                about["dataset"],
                about["split"].split("+"),
                self.data.indices,
                config_name=about.get("dataset_config_name"),
                cache_dir=self.args.cache_dir,
                progress=not self.args.disable_tqdm,
            )
        except (OSError, ValueError) as error:
            self.notes.append(f"no thumbnails: {str(error).splitlines()[0]}")
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
