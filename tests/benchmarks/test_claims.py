import json
import re
from dataclasses import replace

import pytest
from reproduction.claims import (
    Claim,
    ClaimRow,
    claim_rows,
    compare_all,
    render_claims,
    render_overview,
    render_page,
    show_core_hours,
    show_step_time,
)
from reproduction.entries import Entry
from reproduction.summaries import Benchmarks, Measurement, render_front, render_measured
from reproduction.tables import Source, Table, render

PLAIN, SPHERIZED = "mnist-lenet5-plain", "mnist-lenet5-spherized"
CONFIGS = [f"spherization/{PLAIN}", f"spherization/{SPHERIZED}"]
ENTRY = Entry("mnist", 1, "classification", CONFIGS, 30.0, seeds=3, test="paired")
CLAIM = Claim("spherization", "It retains the accuracy.", f"{SPHERIZED} - {PLAIN}")
VALUES = {PLAIN: {0: 0.980, 1: 0.981, 2: 0.979}, SPHERIZED: {0: 0.9850, 1: 0.9859, 2: 0.9841}}
TABLE = Table("t", "README.md", [f"{SPHERIZED} - {PLAIN}"], {"accuracy %": "eval_accuracy"})


def only_row(claim: Claim, tables: list[Table], source: Source) -> ClaimRow:
    (row,) = claim_rows([claim], tables, source, Benchmarks())
    return row


def test_a_claim_has_published_and_measured_difference_verdict_and_runs(finished):
    row = only_row(CLAIM, [], finished([ENTRY], VALUES))
    runs = f"`{SPHERIZED}`: seeds 0 to 2; `{PLAIN}`: seeds 0 to 2"
    p_values = "paired < 0.001 (Welch 0.0031)"
    measured = ["98.50 / 98.00", "3", "+0.50 (+0.48 to +0.52)", p_values, "better", "≈ 1.0", "0.2"]
    assert row == ClaimRow(CLAIM, "+0.04", *measured, "", runs)


def test_a_claim_of_equivalence_has_the_p_value_of_its_test(finished):
    values = VALUES | {SPHERIZED: {0: 0.9802, 1: 0.9808, 2: 0.9791}}
    row = only_row(replace(CLAIM, is_equivalence=True), [], finished([ENTRY], values))
    assert row.verdict == "equivalent (within 0.20)"
    assert "; equivalence within 0.20, p 0.0" in row.p_values


def test_the_time_of_a_step_is_that_of_a_benchmark_or_of_the_runs_on_one_processor(finished, benchmarks):
    source = finished([ENTRY], VALUES)
    timed = replace(CLAIM, step_time={"benchmark": "fast", "row": "speed"})
    assert show_step_time(timed, source, benchmarks) == "1.50"
    for seed, run in source.runs(SPHERIZED).items():
        run |= {"core_minutes": 3.0 + seed, "processor": "other" if seed == 2 else None}
    assert show_step_time(CLAIM, source, benchmarks) == "≈ 1.8"
    assert show_step_time(replace(CLAIM, compare=f"{PLAIN} - 0.5"), source, benchmarks) == ""
    for run in source.runs(PLAIN).values():
        run |= {"device": "a GPU", "minutes": 30.0}
    assert show_step_time(CLAIM, source, benchmarks) == ""
    assert show_core_hours(CLAIM, source) == "0.2 + 1.5 GPU"


def test_a_run_of_which_only_the_end_was_timed_counts_as_the_mean_of_the_others(finished):
    source = finished([ENTRY], VALUES)
    for name in (PLAIN, SPHERIZED):
        for seed, run in source.runs(name).items():
            run |= {"core_minutes": 1.0, "time_is_incomplete": True} if seed == 1 else {"core_minutes": 60.0}
    assert show_core_hours(CLAIM, source) == "6.0"


def test_the_overview_has_a_comparison_of_two_pages_once_at_its_first_place(finished):
    named = [("spherization", CLAIM.compare, "both"), ("spherization", f"{PLAIN} - 0.9", "the same, against 90 %")]
    claims = [Claim(paper, setting, compare, setting=setting) for paper, compare, setting in named]
    claims.append(Claim("heads", "again", CLAIM.compare, setting="again"))
    rows = claim_rows(claims, [], finished([ENTRY], VALUES), Benchmarks())
    settings = [line.split(" | ")[1] for line in render_overview(rows).splitlines() if line.startswith("| `")]
    assert settings == ["both", "the same, against 90 %"]


def test_a_claim_without_runs_says_what_they_take(finished):
    row = only_row(CLAIM, [], finished([ENTRY]))
    assert (row.measured, row.verdict) == ("", "not run")
    takes = "6 runs missing, about 3.0 h on one CPU core, data `ylecun/mnist`"
    assert row.runs == f"{takes}: `python benchmarks/reproduce.py --only mnist`"


def test_a_number_can_be_the_reference(finished):
    claim = Claim("spherization", "x", f"{PLAIN} - 0.5", "projections/mass")
    values = {PLAIN: {seed: {"eval_accuracy": 0.9, "projections/mass": 0.61 + seed / 100} for seed in range(3)}}
    row = only_row(claim, [], finished([ENTRY], values))
    assert (row.published, row.measured[:5], row.verdict) == ("", "+0.12", "higher")
    assert row.p_values.startswith("one-sample ")


def test_a_pair_is_not_tested_until_all_its_seeds_are_finished(finished):
    row = only_row(CLAIM, [], finished([ENTRY], VALUES | {SPHERIZED: {0: 0.9850, 1: 0.9858}}))
    assert (row.measured[:5], row.p_values, row.verdict) == ("+0.49", "", "incomplete")


def test_a_page_has_the_claims_with_a_result_and_the_appendix_their_runs_and_the_others(finished):
    claims = [
        replace(CLAIM, setting="MNIST, LeNet-5", note="In words."),
        Claim("prototypes", "y", takes="a day"),
        Claim("spherization", "z", takes="2 h"),
        Claim("spherization", "not on the page", compare=f"{PLAIN} - 0.9"),
    ]
    rows = claim_rows(claims, [], finished([ENTRY], VALUES), Benchmarks())
    shown = render_page(rows, "spherization")
    assert [line for line in shown.splitlines() if "MNIST, LeNet-5" in line] == [
        "| MNIST, LeNet-5 | +0.04 | 98.50 / 98.00 | 3 | +0.50 (+0.48 to +0.52) | better | ≈ 1.0 | 0.2 |"
    ]
    assert "not on the page" not in shown
    _, runs, missing = render_claims(rows, "spherization").split("<details markdown>")
    assert "- It retains the accuracy. paired < 0.001 (Welch" in runs
    assert "). In words. `mnist-lenet5-spherized`: seeds 0 to 2;" in runs
    assert ("Claims that are not measured: 1</summary>" in missing, "| z |  | 2 h |" in missing) == (True, True)
    overview = render_overview(rows)
    assert "| `spherization` | MNIST, LeNet-5 | +0.50 (+0.48 to +0.52) | better | ≈ 1.0 |" in overview
    assert "2 further claims are not measured" in overview


def test_the_claims_of_each_paper_are_corrected_together(finished):
    claims = [CLAIM, Claim("spherization", "x", f"{PLAIN} - 0.9"), Claim("prototypes", "y", f"{PLAIN} - 0.8")]
    found = compare_all(claims, [], finished([ENTRY], VALUES))
    assert [row.table for row in found] == ["claims, spherization"] * 2 + ["claims, prototypes"]
    assert [row.tests for row in found] == [2, 2, 1]
    assert max(row.corrected["paired"] / row.p_value("paired") for row in found[:2]) == pytest.approx(2)


def test_a_claim_quotes_the_verdict_of_the_table_that_compares_it(finished):
    claims, source = [CLAIM, Claim("spherization", "x", f"{PLAIN} - 0.9")], finished([ENTRY], VALUES)
    found = compare_all(claims, [TABLE], source)
    assert [(row.table, row.run, row.tests) for row in found] == [
        ("t", SPHERIZED, 1),
        ("claims, spherization", PLAIN, 1),
    ]
    assert only_row(CLAIM, [TABLE], source).verdict == found[0].verdict


def test_two_tables_with_the_same_comparison_are_an_error(finished):
    with pytest.raises(ValueError, match=f"u and t both compare {SPHERIZED} with {PLAIN}"):
        compare_all([], [TABLE, replace(TABLE, table="u")], finished([ENTRY], VALUES))


def test_a_second_analysis_stands_after_the_planned_one(finished):
    def run(value: float, last: float) -> dict:
        return {"eval_accuracy": value, "eval_accuracy_last_quarter": last}

    values = {PLAIN: {seed: run(0.98 + seed / 100, 0.985 + seed / 10_000) for seed in range(3)}}
    values[SPHERIZED] = {seed: run(0.99 - seed / 100, 0.985 + (2 - seed) / 10_000) for seed in range(3)}
    table = replace(TABLE, post_hoc={"later": "eval_accuracy_last_quarter"})
    row = only_row(CLAIM, [table], finished([ENTRY], values))
    assert row.verdict.startswith("not decided (")
    later = row.post_hoc.removeprefix("Post hoc, `eval_accuracy_last_quarter`: ").removesuffix(".")
    assert (later.split()[0], later.split(", ")[-1]) == ("+0.00", "equivalent (within 0.15)")
    assert f"Post hoc, later: `{SPHERIZED}`, minus `{PLAIN}`: {later}." in render(table, finished([ENTRY], values))


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (Claim("nobody", "x", CLAIM.compare), "there is no paper 'nobody'"),
        (Claim("spherization", "x", PLAIN), "`compare` must be `a - b`"),
        (Claim("spherization", "x", f"{PLAIN} - mnist-lenet6"), "no run or configuration 'mnist-lenet6'"),
        (Claim("spherization", "x", CLAIM.compare, published=[PLAIN, "y"]), "has no record y"),
        (replace(CLAIM, published=[PLAIN, "omniart-regression-lr0.01"]), "different metrics"),
        (Claim("spherization", "x", "cifar10-vgg11-plain - cifar10-vgg11-spherized"), "so it needs `takes`"),
        (Claim("spherization", "x"), "so it needs `takes`"),
    ],
)
def test_an_invalid_claim_is_an_error(claim, message, finished):
    with pytest.raises(ValueError, match=re.escape(message)):
        claim_rows([claim], [], finished([ENTRY]), Benchmarks())


@pytest.fixture
def benchmarks(tmp_path):
    rows = [{"what": "speed", "value": 1.5, "bound": "at most 1", "holds": False}, {"what": "size", "value": "large"}]
    (tmp_path / "fast.json").write_text(json.dumps({"device": "CPU, 1 threads", "rows": rows}))
    (tmp_path / "cut.json").write_text("{")
    return Benchmarks(tmp_path)


def measured(row: Measurement, finished, benchmarks: Benchmarks, values: dict | None = None) -> list[str]:
    text = render_measured([row], finished([ENTRY], values), benchmarks)
    return [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]


def test_a_measured_run_has_deviation_seeds_and_file(finished, benchmarks):
    found = measured(Measurement("x", run=PLAIN), finished, benchmarks, {PLAIN: {0: 0.98, 2: 0.99}})
    file = f"[{PLAIN}-seed0.json](results/runs/{PLAIN}-seed0.json)"
    assert found == ["x", "98.50", "%", "higher", "± 0.71", "2", file]


@pytest.mark.parametrize(
    ("spherized", "shown"),
    [
        ({0: 0.9850, 1: 0.9859, 2: 0.9841}, "| plain: +0.50 (+0.48 to +0.52), better |"),
        ({0: 0.9801, 1: 0.9812, 2: 0.9789}, "equivalent (within 0.20) |"),
        ({0: 0.990, 1: 0.981, 2: 0.970}, "not decided ("),
    ],
)
def test_a_measured_run_has_the_verdict_of_its_table(spherized, shown, finished, benchmarks):
    row = Measurement("x", run=SPHERIZED, table="t", than="plain")
    assert shown in render_measured([row], finished([ENTRY], VALUES | {SPHERIZED: spherized}), benchmarks, [TABLE])


def test_a_number_of_the_front_page_stands_beside_that_of_the_row_before(finished, benchmarks):
    rows = [Measurement("x", run=PLAIN), Measurement("y", run=SPHERIZED, front="{value} of {seeds}, not {before}")]
    source = finished([ENTRY], {PLAIN: {0: 0.98}, SPHERIZED: {0: 0.985, 1: 0.985}})
    assert render_front(rows, source, benchmarks) == "- 98.50 % of 2, not 98.00 %"


def test_a_measured_benchmark_says_that_its_goal_was_missed(finished, benchmarks):
    found = measured(Measurement("x", benchmark="fast", row="speed"), finished, benchmarks)
    file = "[fast.json](benchmarks/results/fast.json)"
    assert found == ["x", "1.50", "", "lower", "goal: at most 1, missed", "", file]
