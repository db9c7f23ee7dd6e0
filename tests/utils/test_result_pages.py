"""Results as tables in notebooks, and pages of HTML, in which texts of others are no markup."""

import math
import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from hf_sphere import visualization
from hf_sphere.commands import duplicates
from hf_sphere.commands.main import main
from hf_sphere.comparison import compare_runs
from hf_sphere.prototypes import place_prototypes
from hf_sphere.search import EmbeddingSpace, report_vectors
from hf_sphere.search.duplicates import Duplicates
from hf_sphere.utils import pages

ODD = "<b>'\"&\n\x1b[31m`|"


def vectors() -> torch.Tensor:
    points = torch.randn(40, 1, 8) + 0.05 * torch.randn(40, 3, 8)
    return torch.cat([points.flatten(0, 1), points[:2, 0], points[:2, 0]])


def results() -> dict[str, object]:
    groups = [f"{ODD}{row // 3}" for row in range(124)]
    space = EmbeddingSpace.fit(vectors(), groups, score="cosine")
    labels = [ODD, "b"] * 62
    runs = {ODD: {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: 2.0, 1: 2.5, 2: 3.0}}
    return {
        "EmbeddingSpace(124 vectors of 8 dimensions": space,
        "Matches(5 queries, 3 rows each, cosine; 5 queries have a match)": space.search(
            space.vectors[:5], 3, false_accept=0.1
        ),
        "Duplicates(": space.duplicates(0.9, labels=labels),
        "Comparison(": space.compare(torch.randn(60, 8)),
        "VectorReport(124 rows": report_vectors(vectors(), groups),
        "Placement(separation=-0.33": place_prototypes(4, 3),
        "| run | seeds": compare_runs(runs, reference=ODD, higher_is_better=True),
    }


def test_results_have_a_short_repr_and_a_table_without_markup_of_others():
    for start, result in results().items():
        assert repr(result).startswith(start)
        assert len(repr(result)) < 1000
        assert "tensor(" not in repr(result)
        assert isinstance(result.to_pandas(), pd.DataFrame)
        shown = result._repr_html_()
        assert "<table>" in shown
        assert not re.search(r"<(?!/?(p|div|table|tr|th|td|code)[ >])", shown)
        assert "\x1b" not in shown


def test_the_tables_have_the_values_of_the_results():
    found = results()
    matches, duplicates = found["Matches(5 queries, 3 rows each, cosine; 5 queries have a match)"], found["Duplicates("]
    frame = matches.to_pandas()
    assert [*frame] == ["query", "rank", "id", "row", "score", "p_value", "accepted"]
    assert frame["row"].tolist() == matches.rows.flatten().tolist()
    assert frame[frame["rank"] == 1]["query"].tolist() == [0, 1, 2, 3, 4]
    assert len(duplicates.to_pandas()) == len(duplicates.pairs) > 0
    frame = found["Placement(separation=-0.33"].to_pandas()
    assert frame["cosine"].tolist() == pytest.approx([-1 / 3] * 4, abs=1e-5)


def test_a_long_table_says_how_many_rows_are_left_out(monkeypatch):
    space = EmbeddingSpace(torch.randn(50, 3))
    assert "and 30 more rows: to_pandas()" in space._repr_html_()


def test_lines_of_markdown_become_headings_tables_and_paragraphs():
    text = pages.draw_markdown(
        [f"First `code` {ODD}", "## Title", "| a | b |\n|---|---:|\n| <i> | x &#124; y |", "last"]
    )
    assert text.startswith("<p>First <code>code</code> &lt;b&gt;")
    assert "<h2>Title</h2>" in text
    assert "<tr><th>a</th><th>b</th></tr><tr><td>&lt;i&gt;</td><td>x | y</td></tr></table></div>\n<p>last</p>" in text


def test_numbers_of_a_table_are_short_and_missing_ones_empty():
    text = pages.draw_table(pd.DataFrame({ODD: [1.23456789, math.nan], "b": [None, 3]}))
    assert "<td>1.235</td><td></td>" in text
    assert "<b>" not in text


@pytest.mark.parametrize("name", ["a 'b' \"c\".png", "<img src=x onerror=alert(1)>.png", "line\nbreak.png"])
def test_a_page_of_duplicates_has_names_without_markup_and_flags_wrong_labels(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for copy in ("one", "two"):
        (tmp_path / "photos" / copy).mkdir(parents=True)
        Image.new("RGB", (40, 30), "red").save(tmp_path / "photos" / copy / name)
    words = ["--threshold", "0.99", "--label_column", "label", "--page", "found.html"]
    main(["duplicates", "photos", *words])
    page = (tmp_path / "found.html").read_text()
    assert "<h2>Cluster 1: 2 rows, cosines from 1.0000 (several labels)</h2>" in page
    assert page.count("data:image/webp;base64,") == 2
    assert "<img src=x" not in page
    assert "line\nbreak" not in page
    assert capsys.readouterr().out == "wrote     found.html\n"
    assert not re.search(r"(src|href)=.?(http|//)", page)


def test_a_page_of_very_many_pairs_stays_small_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "MOST_BYTES", 100_000)
    clusters = [torch.arange(start, start + 2) for start in range(0, 20_000, 2)]
    none = [], torch.tensor([]), [], []
    found = Duplicates(clusters, torch.stack(clusters), torch.ones(10_000), 0.9, True, 1.0, *none, range(20_000))
    columns = {"row": range(20_000), "text": ["long " * 1000] * 20_000}
    parts = duplicates.draw_clusters(None, found, columns, [])
    assert sum(map(len, parts)) < 120_000
    assert re.fullmatch(r"<p>9,\d\d\d more clusters are left out; see the table \(--table\).</p>", parts[-1])


def test_a_page_of_duplicates_folds_large_clusters_and_those_after_the_first_ones():
    group = torch.cat([torch.arange(70).repeat_interleave(2), torch.full((8,), 70)])
    found = EmbeddingSpace.fit(torch.randn(71, 40)[group]).duplicates(0.999)
    text = "".join(duplicates.draw_clusters(None, found, {"row": range(148)}, []))
    assert text.count('class="card"') == 148
    first, _, last = text.partition("<details><summary>More clusters</summary>")
    assert "<h2>Cluster 1: 8 rows, cosines from 1.0000</h2>" in first
    assert re.search(r'(<div class="card">\d+</div>){6}</div><details><summary>2 more</summary>', first)
    assert (first.count("<h2>"), last.count("<h2>")) == (49, 22)


def test_a_page_of_a_report_has_verdicts_numbers_and_figure_or_why_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"embedding": vectors().tolist()}), "rows.parquet")
    main(["report", "rows.parquet", "--page", "report.html"])
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "<td>hub skewness</td>" in page

    def without(*_: object, **__: object) -> None:
        raise ImportError("figures require matplotlib: pip install 'hf_sphere[plots]'.")

    monkeypatch.setattr(visualization, "plot_report", without)
    main(["report", "rows.parquet", "--page", "report.html"])
    assert "No figure: figures require matplotlib" in (tmp_path / "report.html").read_text()
