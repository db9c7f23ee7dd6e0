"""Use an installed hf_sphere from outside its repository: train on the bundled digits, save, load, predict, plot."""

import importlib.metadata
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the smoke test in the current folder."""
    # The folder of this script is on the path, not the repository.
    import hf_sphere

    installed = Path(hf_sphere.__file__).resolve()
    if installed.is_relative_to(REPOSITORY) and ".venv" not in installed.parts:
        sys.exit(f"{installed} is in the repository, not an installed package.")
    version = importlib.metadata.version("hf_sphere")
    if version != hf_sphere.__version__:
        sys.exit(f"the package has version {version}, but hf_sphere.__version__ is {hf_sphere.__version__}.")

    import torch
    from transformers import AutoModelForImageClassification, TrainingArguments

    from hf_sphere import SphereTrainer, SphereVisionConfig, SphereVisionForImageClassification
    from hf_sphere.data import ImageDataOptions, load_image_data
    from hf_sphere.prototypes import place_prototypes
    from hf_sphere.visualization import plot_sphere

    data = load_image_data(ImageDataOptions("digits", image_size=28), batch_size=32)
    config = SphereVisionConfig(backbone="lenet5", head="spherized", num_channels=1, image_size=28, num_labels=10)
    args = TrainingArguments("run", num_train_epochs=3, learning_rate=2e-3, report_to="none", use_cpu=True)
    trainer = SphereTrainer(SphereVisionForImageClassification(config), args, train_dataset=data.train)
    trainer.train()
    trainer.save_model("model")
    trainer.model = AutoModelForImageClassification.from_pretrained("model")
    test = trainer.predict(data.evaluation)
    accuracy = (test.predictions.argmax(-1) == test.label_ids).mean()
    if accuracy < 0.9:
        sys.exit(f"the accuracy is {accuracy:.3f}, below 0.9.")
    placement = place_prototypes(10, 3)
    plot_sphere(placement.prototypes, torch.arange(10), [str(digit) for digit in range(10)], path="sphere.png")
    print(
        f"hf_sphere {version} from {installed.parent}: test accuracy {accuracy:.3f}, cosine {placement.separation:.4f}"
    )


if __name__ == "__main__":
    main()
