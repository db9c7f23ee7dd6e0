import json
import math
import re
import statistics
from types import SimpleNamespace

import pytest
import report
from case_selection import each
from reproduction.claims import Claim
from reproduction.entries import Entry
from reproduction.published import read_published
from reproduction.results import Results
from reproduction.summaries import Benchmarks, render_missed
from reproduction.tables import Source, Table, compare_rows, read_rows, render

from hf_sphere.comparison import holm
from hf_sphere.utils.configs import config_names

# Of Student's t distribution with two degrees of freedom at 97.5 %, from a printed table.
T_QUANTILE = 4.302653


class Measured(Source):
    """All results of a folder, without a queue."""

    def runs(self, group):
        return {run["seed"]: run for run in self.results.runs.values() if run["group"] == group}

    def test(self, group):
        return "paired"


def source(tmp_path, groups: dict[str, dict[int, float]], data: dict | None = None) -> Source:
    """Results of groups, given as values by seed."""
    results = Results(tmp_path)
    for group, values in groups.items():
        for seed, value in values.items():
            content = {"name": f"{group}-seed{seed}", "group": group, "seed": seed, "digest": ""}
            content |= {"metrics": {"eval_accuracy": value, "eval_loss": 1 - value}, "device": "one core"}
            content |= {"versions": {"torch": "2.0"}, "commit": "abc-modified" if seed == 7 else "abc"}
            content |= {"core_minutes": 2.0, "data": data or {"name": "ylecun/mnist", "encoding": "PNG"}}
            results.write(content)
    return Measured.read(results, [])


def cells(text: str) -> dict[str, dict[str, str]]:
    """The cells of a table by row and column."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0].strip("`"): dict(zip(header, row, strict=True)) for row in rows}


def table(*rows: str, **more) -> Table:
    return Table("name", "README.md", list(rows), {"accuracy %": "eval_accuracy"}, **more)


def test_the_overview_of_results_is_short_and_links_to_every_page():
    page = (report.ROOT / "RESULTS.md").read_text()
    assert len(page.splitlines()) <= 100
    linked = set(re.findall(r"\]\((docs/results/.*?)[)#]", page))
    assert linked == {str(path.relative_to(report.ROOT)) for path in report.FOLDER.rglob("*.md")}


def test_goals_that_were_missed_are_listed_and_counted(tmp_path):
    rows = [
        {"what": "build: peak", "value": 2.4, "bound": "at most 2", "holds": False},
        {"what": "time", "value": 1.0, "bound": "at most 2", "holds": True},
        {"what": "without a goal", "value": 1.0},
    ]
    (tmp_path / "index.json").write_text(json.dumps({"device": "CPU, 1 threads", "rows": rows}))
    lines = render_missed(Benchmarks(tmp_path)).splitlines()
    assert lines[0].startswith("1 of the 2 goals")
    assert lines[4:] == ["| `index` | build | peak | 2.4 | at most 2 | CPU, 1 thread |"]


def test_every_claim_is_in_the_appendix_of_its_paper():
    for claim in read_rows(report.ROOT / "results" / "claims.yaml", Claim):
        text = (report.FOLDER / "appendix" / report.page_name(claim.paper)).read_text()
        assert f"| {claim.claim} |" in text or f"- {claim.claim} " in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A\n\nIt helps.\n\nword " + "word " * 1200, "has 1205 words, more than 1200"),
        ("# A\n\nIt helps.\n\n|" + "a |" * 9, "has a table of 9 columns, more than 8"),
        ("# A\n\nIt is a layer.\n\nIt helps.", "must say in its first five lines whether"),
        ("# A\n\nIt helps.\n\n| run | verdict |\n| - | - |\n| a | significant |", "'significant' is no verdict"),
        ("# A\n\nIt helps. There is no significant difference.", "write 'not decided'"),
        (
            "# A\n\nNot decided.\n\n| a | verdict |\n| - | - |\n| a | better‡ |\n| b |  |\n"
            "| c | equivalent (within 0.50) |\n| c | not decided (12 seeds would decide 0.30) |\n\n"
            "| d |\n| - |\n| other |",
            "",
        ),
    ],
)
def test_a_page_of_results_that_is_long_or_wide_or_says_no_plain_verdict_is_named(text, message):
    found = report.check_pages({report.FOLDER / "spherization.md": text})
    assert [message in line for line in found] == [True] * bool(message)


PARTLY = {"core_minutes": 0.1, "time_is_incomplete": True}
OTHER_METRIC = {"metrics": {"eval_accuracy": 0.9, "other": 3.0}}
TWO, PAIRS = {"a": {0: 0.9, 1: 0.8}}, {"a": {0: 0.5, 1: 0.52}, "b": {0: 0.4, 1: 0.42}, "c": {0: 0.7, 1: 0.72}}


@each("texts")
@pytest.mark.parametrize(
    ("rows", "groups", "run", "changes", "texts"),
    [
        (["a"], TWO, "a-seed1", PARTLY, ["2 core-minutes each on average", "1 run timed only in part, which the aver"]),
        (["a"], TWO, "a-seed0", PARTLY, ["| 2 (1 of 2 seeds) |"]),
        (["a"], TWO, "a-seed0", OTHER_METRIC, ["| 3 (1 of 2 seeds) |"]),
        (["a - b", "a - c"], PAIRS, "a-seed0", {}, ["`b`: +10.00", "`c`: -20.00", " 2 runs on one core"]),
    ],
)
def test_notes_and_columns_name_what_differs_between_runs(tmp_path, rows, groups, run, changes, texts):
    measured = source(tmp_path, groups)
    measured.results.runs[run] |= changes
    columns = {"accuracy %": "eval_accuracy", "core-minutes": "core_minutes", "x": "other"}
    text = render(Table("name", "README.md", rows, columns), measured)
    assert [part for part in texts if part not in text] == []


def test_check_fails_if_a_file_is_not_what_the_results_say_a_card_has_none_or_a_page_breaks_a_rule(
    tmp_path, monkeypatch, capsys
):
    # A report of one file and no card, whose queue is empty
    monkeypatch.setattr(report, "read_queue", lambda path: [])
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "CARDS", tmp_path / "hub_cards")
    monkeypatch.setattr(report, "read_tables", lambda: ([], []))
    monkeypatch.setattr(report, "check_pages", lambda files: [])
    monkeypatch.setattr(report, "render_files", lambda *args: {tmp_path / "RESULTS.md": "as it should be"})
    (tmp_path / "RESULTS.md").write_text("as it should be")
    (tmp_path / "hub_cards").mkdir()
    report.main(["--check"])
    card = tmp_path / "hub_cards" / "a" / "README.md"
    card.parent.mkdir()
    card.write_text("of results that are no longer there")
    with pytest.raises(SystemExit, match=r"hub_cards/a/README.md: not what the results files say"):
        report.main(["--check"])
    report.main([])
    assert not list(card.parent.parent.iterdir())
    (tmp_path / "RESULTS.md").write_text("something else")
    with pytest.raises(SystemExit, match=r"RESULTS.md: not what the results files say"):
        report.main(["--check"])
    (tmp_path / "RESULTS.md").write_text("as it should be")
    monkeypatch.setattr(report, "check_pages", lambda files: ["it is long"])
    with pytest.raises(SystemExit, match="breaks a rule"):
        report.main(["--check"])
    assert "Rule of pages: it is long" in capsys.readouterr().err


def test_a_row_has_mean_deviation_and_number_of_seeds(tmp_path):
    row = cells(render(table("a"), source(tmp_path, {"a": {0: 0.90, 1: 0.92, 2: 0.97}})))["a"]
    deviation = 100 * statistics.stdev([0.90, 0.92, 0.97])
    assert row == {"run": "`a`", "accuracy %": f"93.00 ± {deviation:.2f}", "seeds": "3"}


def test_a_published_number_stands_beside_its_difference_and_interval(tmp_path):
    values = [0.99, 0.992, 0.985]
    groups = {"mnist-lenet5-plain": dict(enumerate(values)), "mnist-lenet5-plain-short": {0: 0.9}}
    rows, half = (
        cells(render(table(*groups), source(tmp_path, groups))),
        T_QUANTILE * 100 * statistics.stdev(values) / 3**0.5,
    )
    found = rows["mnist-lenet5-plain"]
    assert found["published"] == "99.1 ± 0.05 %"
    assert found["measured minus published"] == f"-0.20 ({-0.2 - half:+.2f} to {-0.2 + half:+.2f})"
    assert rows["mnist-lenet5-plain-short"]["published"] == ""  # with other settings


def test_runs_are_compared_in_pairs_on_the_seeds_that_both_have(tmp_path):
    groups = {"a": {0: 0.5, 1: 0.7, 2: 0.9}, "b": {2: 0.8, 0: 0.41, 1: 0.59}}
    half = T_QUANTILE * statistics.stdev([9.0, 11.0, 10.0]) / math.sqrt(3)
    interval = f"+10.00 ({10 - half:+.2f} to {10 + half:+.2f})"
    assert cells(render(table("a - b"), source(tmp_path, groups)))["a"]["minus `b`"] == interval
    groups = {"a": groups["a"] | {7: 0.1}, "b": groups["b"] | {9: 0.9}}
    row = cells(render(table("a - b"), source(tmp_path, groups)))["a"]
    assert (row["minus `b`"], row["verdict"]) == (f"{interval}, seeds 0, 1, 2", "better")
    row = cells(render(table("c - d"), source(tmp_path, {"c": {0: 0.5, 1: 0.7}, "d": {5: 0.3, 6: 0.5}})))["c"]
    assert row["minus `d`"] == "no common seed"
    assert "verdict" not in row


def test_p_values_are_corrected_within_a_table_with_planned_tests_without_results(tmp_path):
    groups = {"a": {0: 0.5, 1: 0.7, 2: 0.9}, "b": {0: 0.41, 1: 0.59, 2: 0.8}, "c": {0: 0.51, 1: 0.69, 2: 0.95}}
    found = source(tmp_path, groups)
    alone, both = compare_rows(table("a - b"), found), compare_rows(table("a - b", "c - b"), found)
    assert alone[0].corrected["paired"] == alone[0].p_value("paired")
    assert [row.corrected["welch"] for row in both] == holm([row.p_value("welch") for row in both])
    found.planned = {"later": [SimpleNamespace(seed=seed) for seed in range(3)], "one seed": [SimpleNamespace(seed=0)]}
    (row,) = compare_rows(table("a - b", "later - b", "one seed - b", "not in the queue - b"), found)
    assert (row.tests, row.corrected["paired"]) == (2, 2 * row.p_value("paired"))


@pytest.mark.parametrize(("name", "other"), [("data_hash", "1f"), ("threads", 2), ("processor", "family 7")])
def test_runs_are_alike_if_only_one_has_a_fact_recorded(tmp_path, name, other):
    measured = source(tmp_path, {"a": {0: 0.5, 1: 0.6}, "b": {0: 0.4, 1: 0.7}})
    measured.results.runs["a-seed0"][name] = "1e"
    assert "Compared with runs of other" not in render(table("b", "a - b"), measured)
    measured.results.runs["b-seed0"][name] = other
    assert "copies of the data: `a`." in render(table("b", "a - b"), measured)


def test_the_accuracy_of_the_last_epochs_is_that_of_the_history(tmp_path):
    measured = source(tmp_path, {"a": {0: 0.9}})
    measured.results.runs["a-seed0"]["history"] = {"eval_accuracy": [0.1, 0.2, 0.3, 0.4, 0.6]}
    assert measured.values("a", "eval_accuracy_last_quarter") == {0: pytest.approx(0.5)}


QUEUED = Entry("mnist", 1, "classification", ["spherization/mnist-lenet5-plain"], 1.0)


@each("values")
@each("entries")
@pytest.mark.parametrize(
    ("values", "entries", "command"),
    [
        ({0: 0.9}, [], ""),
        ({0: 0.9}, [QUEUED], ""),  # of other settings
        ({}, [QUEUED], "`python benchmarks/reproduce.py --only mnist`"),
        ({}, [], "`hf-sphere train classification --config spherization/<run>`"),
    ],
)
def test_results_of_no_entry_are_not_reported_and_a_missing_run_has_its_command(tmp_path, values, entries, command):
    source(tmp_path, {"mnist-lenet5-plain": values})
    text = render(table("mnist-lenet5-plain"), Source.read(Results.read(tmp_path), entries))
    assert "accuracy %" not in cells(text)["mnist-lenet5-plain"]
    assert command in text


def test_a_run_that_diverged_is_named(tmp_path):
    measured = source(tmp_path, {"a": {0: 0.9, 1: 0.8}})
    measured.results.runs["a-seed1"] |= {"metrics": {}, "diverged": "the loss is not finite"}
    text = render(table("a"), measured)
    assert cells(text)["a"]["accuracy %"] == "90.00"
    assert "Diverged, and in no mean or comparison: a-seed1." in text
    measured.results.runs["a-seed0"] |= {"metrics": {}, "diverged": "the loss is not finite"}
    assert cells(render(table("a"), measured))["a"]["accuracy %"] == "diverged"


def test_missing_seeds_of_a_run_have_their_command(finished):
    entry = Entry("mnist", 1, "classification", ["spherization/mnist-lenet5-plain"], 30.0, seeds=3)
    text = render(table("mnist-lenet5-plain"), finished([entry], {"mnist-lenet5-plain": {0: 0.9}}))
    assert "Not run yet: 2 runs, about 1.0 h on one CPU core: `python benchmarks/reproduce.py --only mnist`." in text


def test_the_table_between_the_markers_is_replaced_and_nothing_else(tmp_path):
    page = "before\n<!-- table: x -->\nold\n<!-- end of table -->\nafter\n<!-- table: y -->\n<!-- end of table -->\n"
    new = report.insert(page, "x", "new \\1", tmp_path)
    assert new == page.replace("old\n", "\nnew \\1\n\n")
    assert report.insert(new, "x", "new \\1", tmp_path) == new


def test_every_published_record_has_a_configuration():
    runs = {name.partition("/")[0] for name in read_published()}
    # Without a configuration: numbers that the paper cites from elsewhere, and statements without a number.
    runs = {name for name in runs if not name.endswith("-reference") and "-statement-" not in name}
    assert runs <= {name.partition("/")[2] for name in config_names()}
