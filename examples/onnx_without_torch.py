"""Classify images with a model exported by hf-sphere export, with onnxruntime, numpy and Pillow alone.

python examples/onnx_without_torch.py outputs/birds.onnx bird.jpg another.jpg

Preprocessing and class names are read from the metadata of the file. If the model has a rejection, an image that is
unlike those of its classes is `unknown`, with its p-value, and --coverage 0.9 lists the classes that are needed. A
model for several classes per image has a probability for each, and a regression has values.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow reads without another program; EPS would start Ghostscript."""

TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""`Image.Transpose` that turns an image upright, by EXIF orientation."""


def prepare(file: str, options: dict) -> np.ndarray:
    """Read an image, and resize and normalize it as in training: (channels, height, width), float32."""
    with Image.open(file, formats=FORMATS) as image:
        image.load()
        turn = TURNS.get(image.getexif().get(274))
    image = image if turn is None else image.transpose(Image.Transpose(turn))
    if image.mode.startswith("I;16"):  # Pillow would clip the values at 255
        image = Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        behind = Image.new("RGBA", image.size, (*options.get("background_color", (255, 255, 255)), 255))
        image = Image.alpha_composite(behind, image.convert("RGBA"))
    image = image.convert("L" if options["num_channels"] == 1 else "RGB")
    height, width = options["size"]["height"], options["size"]["width"]
    whole = (width, height)
    if crop := options.get("crop_pct"):  # keep the aspect ratio, and cut out the center
        least = (int(width / crop + 1e-6), int(height / crop + 1e-6))
        scale = max(least[0] / image.width, least[1] / image.height)
        whole = (max(least[0], int(image.width * scale)), max(least[1], int(image.height * scale)))
    if image.size != whole:
        image = image.resize(whole, Image.Resampling(options["resample"]))
    left, top = round((whole[0] - width) / 2), round((whole[1] - height) / 2)
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32)
    pixels = pixels.reshape(height, width, -1) * options["rescale_factor"]
    pixels = (pixels - np.array(options["image_mean"])) / np.array(options["image_std"])
    return pixels.astype(np.float32).transpose(2, 0, 1)


def needed_classes(results: dict, probabilities: np.ndarray, rejection: dict, coverage: float) -> list[list[int]]:
    """Return the classes of each image with a p-value above 1 - coverage, most probable first; none if unknown."""
    chosen = results["class_p_values"] > (1 - coverage) * (1 + 1e-6)  # p-values are rounded
    order = np.argsort(-probabilities, axis=1, kind="stable")
    if not rejection["by_class"]:
        chosen[np.arange(len(chosen)), order[:, 0]] = True
    chosen &= results["known"][:, None]
    return [[index for index in row if chosen[n, index]] for n, row in enumerate(order)]


def main() -> None:
    """Print the most probable class of each image, its probability and the certainty of the embedding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="ONNX file of an image classifier")
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--coverage", type=float, help="share of known images whose class is listed, such as 0.9")
    args = parser.parse_args()
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    options, names = json.loads(metadata["preprocessing"]), json.loads(metadata["class_names"])
    outputs = [output.name for output in session.get_outputs()]
    rejection = json.loads(metadata.get("rejection", "{}"))
    if args.coverage is not None:
        if "class_p_values" not in outputs:
            parser.error("--coverage needs a model whose rejection was fitted to labeled images")
        if not 0 < args.coverage <= 1 - rejection["level"] + 1e-9:
            parser.error(f"--coverage must be above 0 and at most {1 - rejection['level']:g}, 1 - the level")
    try:
        batch = np.stack([prepare(file, options) for file in args.images])
    except OSError as error:  # no such file, or no image
        parser.error(str(error))
    results = dict(zip(outputs, session.run(None, {"pixel_values": batch}), strict=True))
    logits, kind = results["logits"].astype(np.float64), metadata.get("problem_type")
    if kind == "regression":
        for row, file in enumerate(args.images):
            print(f"{file}  {'  '.join(f'{name} {logits[row, n]:.4g}' for n, name in enumerate(names))}")
        return
    if kind == "multi_label_classification":
        probabilities = 0.5 + 0.5 * np.tanh(logits / 2)  # the sigmoid
    else:
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
    classes = needed_classes(results, probabilities, rejection, args.coverage) if args.coverage else []
    for row, file in enumerate(args.images):
        best = int(probabilities[row].argmax())
        certainty = f"  concentration {results['concentration'][row]:.4g}" if "concentration" in results else ""
        if "known" in results and not results["known"][row]:
            print(f"{file}  unknown  p-value {results['p_value'][row]:.4g}{certainty}")
            continue
        needed = f"  {json.dumps([names[n] for n in classes[row]], ensure_ascii=False)}" if classes else ""
        order = np.argsort(-probabilities[row]) if kind == "multi_label_classification" else [best]
        found = "  ".join(f"{names[n]}  {probabilities[row, n]:.4f}" for n in order)
        print(f"{file}  {found}{certainty}{needed}")


if __name__ == "__main__":
    main()
