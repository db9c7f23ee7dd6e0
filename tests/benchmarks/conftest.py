import pytest
from reproduction.entries import Entry, plan
from reproduction.results import Results
from reproduction.tables import Source


@pytest.fixture
def finished(tmp_path):
    """Results of the first runs of an entry, by group and seed; each value is the accuracy, or all metrics."""

    def make(entries: list[Entry], values: dict[str, dict[int, float | dict]] | None = None) -> Source:
        for run in (run for entry in entries for run in plan(entry)):
            value = (values or {}).get(run.group, {}).get(run.seed)
            if value is None:
                continue
            content = {"name": run.name, "group": run.group, "seed": run.seed, "digest": run.digest({})}
            content |= {"metrics": value if isinstance(value, dict) else {"eval_accuracy": value}}
            content |= {"device": "one core", "core_minutes": 2.0, "data": {"name": "ylecun/mnist", "encoding": "PNG"}}
            content |= {"versions": {"torch": "2.15.0"}, "commit": "abc", "command": f"python {run.script}"}
            if not content["metrics"]:
                content["diverged"] = "the loss is not finite"
            Results(tmp_path).write(content)
        return Source.read(Results.read(tmp_path), entries)

    return make
