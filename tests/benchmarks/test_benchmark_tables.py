import json
import re
import shutil

import pytest
import report
from reproduction.benchmark_tables import TABLES, render_benchmarks
from reproduction.summaries import BENCHMARKS, Benchmarks


@pytest.fixture
def change(tmp_path):
    """Render the tables from a copy of the files, one of which a function changes."""

    def render(name: str, edit) -> tuple[dict[str, str], list[str]]:
        folder = tmp_path / "results"
        shutil.copytree(BENCHMARKS, folder, dirs_exist_ok=True)
        path = folder / f"{name}.json"
        content = json.loads(path.read_text("utf-8"))
        edit(content)
        path.write_text(json.dumps(content), "utf-8")
        benchmarks = Benchmarks(folder)
        return render_benchmarks(benchmarks), benchmarks.problems

    return render


def set_value(what: str, **values):
    return lambda content: next(row for row in content["rows"] if row["what"] == what).update(values)


def test_every_table_is_made_from_its_file_and_on_a_page():
    benchmarks = Benchmarks()
    render_benchmarks(benchmarks)
    assert benchmarks.problems == []
    pages = "".join(path.read_text("utf-8") for f in ("docs", "recipes") for path in (report.ROOT / f).rglob("*.md"))
    assert TABLES.keys() <= set(re.findall("<!-- table: (.*) -->", pages))


@pytest.mark.parametrize(
    ("table", "edit", "line"),
    [
        (
            "scaling",
            set_value("vmf, 200,000 classes, batch 64: memory, GB", value=1.5, holds=False),
            "K = 200,000: memory beyond weights and gradient | 1500 MB | at most 1000 MB, missed |",
        ),
        (
            "clustering",
            set_value("10,000 embeddings, SphericalKMeans: NMI", value=0.1234),
            "| `SphericalKMeans` | 0.123 |",
        ),
        ("runtimes", set_value("head etf: export", value=3e-3), "| head etf | 0.003 | 2e-06 |"),
        (
            "lr-transfer",
            set_value("resnet8, adamw: best at 4 x width / best", value=0.9),
            "| ResNet-8: shift | 0.9 | 0.18 |",
        ),
        (
            "lm-widths",
            set_value("muon_hyperball, width 64: test loss - that of adamw_torch", value=0.5, interval=[-0.1, 1.1]),
            "| +0.500 (-0.100 to +1.100) |",
        ),
        (
            "scale-invariance",
            lambda content: content["groups"]["llama"].update({"lm_head.weight": "rows"}),
            "| llama | 0 of 16 | `lm_head` |  |  |",
        ),
        (
            "rejection-level",
            set_value("CIFAR-10, pooled: known rejected", value=0.07),
            "| CIFAR-10 | pooled | 7.0 (± 0.0) % | 20.3 % |",
        ),
        (
            "rejection-unknown",
            set_value("CIFAR-10, two other classes, auto, with unknown", change=[0.5, 0.1, 0.9]),
            "| `auto, with unknown` | 20.0 ± 5.4; +50.0 (+10.0 to +90.0) |",
        ),
        (
            "rejection-runtime",
            set_value("batch of 1, energy: time with / without", value=2.0),
            "| `energy` | 0 | 0 | 1.000 | 2.000 |",
        ),
        (
            "comparison-null",
            set_value(
                "`digits`, two halves of the features: false claims by the widest interval",
                value=0.07,
                interval=[0.0615, 0.0825],
                holds=False,
            ),
            "| 44.4 % (42.2 to 46.5) | 7.0 % (6.2 to 8.2) | 5.5 % (4.6 to 6.6) | 6.0 %, missed |",
        ),
        ("prototypes-search", set_value("K = 10, d = 3: lower bound", value=0.1), "| 10, 3 | 0.4044 | 0.1000 |"),
        (
            "text-embeddings-codes",
            set_value("trained: Recall@1, spherized, binary", value=0.1234),
            "| spherized, binary | 0.017 | 0.123 | 0.017 |",
        ),
        ("text-embeddings", set_value("ONNX, int8: MB", value=12.6), "| ONNX in int8: size | 13 MB |"),
        (
            "pair-batch",
            set_value("batch 8192, in chunks of 64: additional memory, MB", value=1234.5),
            "| 8,192 | 1,234 |  |",
        ),
        (
            "uniformity-gradients",
            set_value("SlicedUniformityLoss, 64 circles, d = 3: relative variance times ms, shift", value=0.0125),
            "| `SlicedUniformityLoss`, 64 circles | 0.013 |",
        ),
        ("fine-tuning", set_value("recall_at_1 %, frozen", value=12.34), "| frozen backbone | 12.3 | 16.3 |"),
        (
            "minilm-language",
            lambda content: content["language"]["plain"].update(float32=200.0),
            "| plain | 200.0 | 116.9 | 48.0 |",
        ),
        (
            "minilm-embeddings",
            lambda content: content["embedding"]["plain"].update(largest_weight=2000),
            "| plain |  |  | 2,000 | 1.0000 |",
        ),
        (
            "ood",
            lambda content: [
                content["models"][f"softmax-{seed}"]["results"]["energy"]["near"].update(auroc=0.5 + seed / 100)
                for seed in range(3)
            ],
            "| softmax | energy | 51.0 ± 1.0 / 29.4 |",
        ),
    ],
)
def test_a_changed_number_changes_its_table_and_no_other(change, table, edit, line):
    before = render_benchmarks(Benchmarks())
    tables, problems = change(TABLES[table][0], edit)
    assert line in tables[table]
    assert [name for name in tables if tables[name] != before[name]] == [table]
    assert problems == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.pop("rows"),
        lambda content: content["rows"].clear(),
        lambda content: content["rows"].append(content["rows"][0]),
        lambda content: content["rows"].pop(0),
        set_value("softmax, 100,000 classes: time in blocks / time with logits", value="fast"),
    ],
    ids=["no list", "empty", "row twice", "row missing", "not a number"],
)
def test_a_damaged_file_is_named_and_its_table_says_not_measured(change, edit):
    tables, problems = change("sharding", edit)
    assert tables["scaling"].startswith("*Not measured: `sharding.json` is missing or damaged")
    assert len(problems) == 1
    assert problems[0].startswith("sharding.json is not used for the table 'scaling': ")


def test_missing_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "ood.json").write_text("{")
    benchmarks = Benchmarks(tmp_path)
    tables = render_benchmarks(benchmarks)
    assert {name: text.startswith("*Not measured: ") for name, text in tables.items()} == dict.fromkeys(TABLES, True)
    assert len(benchmarks.problems) == len(TABLES)
    assert any(
        problem.startswith("ood.json is not used for the table 'ood': JSONDecodeError")
        for problem in benchmarks.problems
    )


def test_a_page_gets_the_tables_of_benchmarks(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    markers = "<!-- table: scaling -->\nold\n<!-- end of table -->\n"
    for path in (tmp_path / "docs" / "a.md", tmp_path / "recipes" / "b" / "README.md"):
        path.parent.mkdir(parents=True)
        path.write_text(markers)
    changed = tmp_path / "recipes" / "b" / "README.md"
    pages = report.fill_pages({}, {}, {"scaling": "new"}, {changed: f"changed\n{markers}"})
    new = "<!-- table: scaling -->\n\nnew\n\n<!-- end of table -->\n"
    assert pages == {tmp_path / "docs" / "a.md": new, changed: f"changed\n{new}"}
    with pytest.raises(ValueError, match="there is no table 'scaling'"):
        report.fill_pages({}, {}, {}, {})
