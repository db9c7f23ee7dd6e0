"""Measure search for neighbors: exact with and without FAISS, approximate on embeddings of CIFAR-10, and prediction.

python benchmarks/search.py --parts exact
python benchmarks/search.py --parts approximate --model <saved CIFAR-10 model> --cifar10 uoft-cs/cifar10
OMP_WAIT_POLICY=passive python benchmarks/search.py --parts prediction --model <saved CIFAR-10 model>

The variable is the one that the recipes set which decode images beside a model.
Writes `results/search_<part>.json`. `--size` scales the numbers of embeddings down; timings need a machine without
other work.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import ratio, report, row, time_in_turn
from torch import Tensor
from torchvision.transforms.v2 import functional as tvF

from hf_sphere.search import ImageEncoder, ImageSource
from hf_sphere.search.neighbor_search import QUERIES, NeighborSearch

K = 10


def exact(args: argparse.Namespace) -> None:
    """Compare exact search with torch with FAISS's flat index and with a plain product and top-k."""
    import faiss

    generator = torch.Generator().manual_seed(0)
    count, num_queries = (max(100, round(args.size * number)) for number in (100_000, 10_000))
    references, queries = (F.normalize(torch.randn(n, 128, generator=generator)) for n in (count, num_queries))
    flat = faiss.IndexFlatIP(128)
    flat.add(references.numpy())
    ours = NeighborSearch(references, kind="torch")

    def plain() -> None:
        for part in queries.split(QUERIES):
            (part @ references.T).topk(K)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    distances = ours.search(queries, K)[0]
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    # By distance, since FAISS orders neighbors by float32 similarities, and nearly equal ones differently.
    theirs = ours.distances(queries, torch.from_numpy(flat.search(queries.numpy(), K)[1])).sort(dim=1).values
    same = float(((distances - theirs).abs() < 1e-6).double().mean())
    processor = {}
    for name, search in (("ours", ours.search), ("flat", lambda points, k: flat.search(points.numpy(), k))):
        start = time.process_time()
        search(queries, K)
        processor[name] = time.process_time() - start
    seconds = time_in_turn(
        {"ours": lambda: ours.search(queries, K), "flat": lambda: flat.search(queries.numpy(), K), "plain": plain},
        rounds=args.rounds,
        warmup=1,
    )
    what = f"{num_queries:,} x {count:,} x 128"
    rows = [
        row(f"{what}: time relative to FAISS's flat index", ratio(seconds["ours"], seconds["flat"]), at_most=2.0),
        row(f"{what}: processor time relative to it", processor["ours"] / processor["flat"]),
        row(f"{what}: plain product and top-k relative to it", ratio(seconds["plain"], seconds["flat"])),
        row(f"{what}: equal neighbors, fraction", same, at_least=1.0),
        row(f"{what}: additional memory, MiB", memory, at_most=512),
        *(row(f"{what}: seconds, {name}", min(times)) for name, times in seconds.items()),
    ]
    report("search_exact", rows, threads=torch.get_num_threads(), note=args.note)


@torch.inference_mode()
def embed_crops(encoder: ImageEncoder, images: Tensor, copies: int, seed: int) -> Tensor:
    """Embed random crops (padded by 4) and mirror images of images (N, C, H, W), uint8, `copies` of each."""
    generator = torch.Generator().manual_seed(seed)
    processor, parts = encoder.processor, []
    for _ in range(copies):
        for batch in images.split(2000):
            top, left, mirrored = torch.randint(0, 9, (3,), generator=generator).tolist()
            batch = tvF.crop(tvF.pad(batch, [4]), top, left, *batch.shape[-2:])
            batch = batch.flip(-1) if mirrored % 2 else batch
            pixels = processor(batch, return_tensors="pt")["pixel_values"]
            parts.append(encoder.model(pixel_values=pixels).embeddings)
    return torch.cat(parts)


def load_cifar10(name: str, split: str) -> Tensor:
    source = ImageSource.of(name, split)
    return torch.stack([tvF.pil_to_tensor(source.open(index)) for index in range(len(source))])


def approximate(args: argparse.Namespace) -> None:
    """Measure recall@10 and speed of approximate search relative to flat, as a curve."""
    import faiss

    encoder = ImageEncoder(args.model)
    copies = max(1, round(args.size * 20))
    references = embed_crops(encoder, load_cifar10(args.cifar10, "train"), copies, seed=0)
    queries = embed_crops(encoder, load_cifar10(args.cifar10, "test")[:1000], 1, seed=1)
    count, dim = references.shape
    flat = NeighborSearch(references, kind="flat")
    farthest = flat.search(queries, K)[0][:, -1:] * (1 + 1e-9) + 1e-12
    rows, curves = [], {}
    for kind in args.kinds:
        start = time.perf_counter()
        search = NeighborSearch(references, kind=kind)
        rows.append(row(f"{kind}: seconds to build", time.perf_counter() - start))
        name = "efSearch" if kind == "hnsw" else "nprobe"
        chosen = search._index.hnsw.efSearch if kind == "hnsw" else search._index.nprobe
        curve = []
        for effort in sorted({*(2**n for n in range(4 if kind == "hnsw" else 0, 10)), chosen}):
            faiss.ParameterSpace().set_index_parameter(search._index, name, effort)
            recall = float((search.search(queries, K)[0] <= farthest).double().mean())
            seconds = time_in_turn(
                {"flat": lambda: flat.search(queries, K), kind: lambda search=search: search.search(queries, K)},
                rounds=args.rounds,
                warmup=0,
            )
            point = {name: effort, "recall_at_10": recall, "speed": ratio(seconds["flat"], seconds[kind])}
            curve.append(point | {"chosen": effort == chosen})
            if effort == chosen:
                rows.append(row(f"{kind}, {name} {effort} as chosen: recall@10", recall, at_least=0.95))
                rows.append(row(f"{kind}, {name} {effort}: speed relative to flat", point["speed"]))
        curves[kind] = curve
    about = {"references": count, "dim": dim, "queries": len(queries), "threads": torch.get_num_threads()}
    report("search_approximate", rows, curves=curves, **about, note=args.note)


def prediction(args: argparse.Namespace) -> None:
    """Compare the throughput of prediction from files with that of the backbone and of decoding alone."""
    encoder = ImageEncoder(args.model)
    count = max(100, round(args.size * 10_000))
    with tempfile.TemporaryDirectory() as folder:
        data = ImageSource.of(args.cifar10, "test")
        for index in range(count):
            data.open(index % len(data)).resize((256, 256)).save(Path(folder, f"{index:06d}.jpg"))
        source = ImageSource.of(folder)
        options: dict[str, Any] = {"batch_size": 256, "progress": False, "num_workers": args.workers}
        pixels = encoder.processor([source.open(0)] * 256, return_tensors="pt")["pixel_values"]
        original = encoder._embed

        def decode() -> None:
            encoder._embed = lambda names, **inputs: {}
            list(encoder.encode(source, **options))
            encoder._embed = original

        def backbone() -> None:
            for start in range(0, count, 256):
                original(["image"] * min(256, count - start), pixel_values=pixels[: count - start])

        seconds = time_in_turn(
            {"decoding": decode, "backbone": backbone, "prediction": lambda: list(encoder.encode(source, **options))},
            rounds=args.rounds,
            warmup=0,
        )
    one = [sum(pair) for pair in zip(seconds["decoding"], seconds["backbone"], strict=True)]
    rows = [
        row("throughput relative to 1 / (1/backbone + 1/decoding)", ratio(one, seconds["prediction"]), at_least=0.9),
        *(row(f"{name}: images per second", count / min(times)) for name, times in seconds.items()),
    ]
    report("search_prediction", rows, images=count, threads=torch.get_num_threads(), note=args.note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"exact": exact, "approximate": approximate, "prediction": prediction}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=["exact"])
    parser.add_argument("--size", type=float, default=1.0, help="fraction of the full number of embeddings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=["ivf", "hnsw"], default=["ivf", "hnsw"])
    parser.add_argument("--model", help="saved model of CIFAR-10, for the parts approximate and prediction")
    parser.add_argument("--cifar10", default="uoft-cs/cifar10", help="Hub id or folder of CIFAR-10")
    parser.add_argument("--workers", type=int, help="decoding processes of the part prediction")
    parser.add_argument("--note", default="", help="remark for the results, for instance on other work of the machine")
    args = parser.parse_args()
    for name in args.parts:
        parts[name](args)


if __name__ == "__main__":
    main()
