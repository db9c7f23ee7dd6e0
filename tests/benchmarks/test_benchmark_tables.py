import json
import re
import shutil

import pytest
import report
from reproduction.benchmark_tables import TABLES, render_benchmarks
from reproduction.summaries import BENCHMARKS, Benchmarks


def change(tmp_path, name: str, edit) -> tuple[dict[str, str], list[str]]:
    """Render the tables from a copy of the files, one of which a function changes."""
    folder = tmp_path / "results"
    shutil.copytree(BENCHMARKS, folder, dirs_exist_ok=True)
    path = folder / f"{name}.json"
    content = json.loads(path.read_text("utf-8"))
    edit(content)
    path.write_text(json.dumps(content), "utf-8")
    benchmarks = Benchmarks(folder)
    return render_benchmarks(benchmarks), benchmarks.problems


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
            "rejection-level",
            set_value("CIFAR-10, pooled: known rejected", value=0.07),
            "| CIFAR-10 | pooled | 7.0 (± 0.0) % | 20.3 % |",
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
        ("text-embeddings", set_value("ONNX, int8: MB", value=12.6), "| ONNX in int8: size | 13 MB |"),
        ("fine-tuning", set_value("recall_at_1 %, frozen", value=12.34), "| frozen backbone | 12.3 | 16.3 |"),
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
def test_a_changed_number_changes_its_table_and_no_other(tmp_path, table, edit, line):
    before = render_benchmarks(Benchmarks())
    tables, problems = change(tmp_path, TABLES[table][0], edit)
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
def test_a_damaged_file_is_named_and_its_table_says_not_measured(tmp_path, edit):
    tables, problems = change(tmp_path, "sharding", edit)
    assert tables["scaling"].startswith("*Not measured: `sharding.json` is missing or damaged")
    assert len(problems) == 1
    assert problems[0].startswith("sharding.json is not used for the table 'scaling': ")
