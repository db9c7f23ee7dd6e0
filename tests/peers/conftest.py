"""The tests of a peer that do not apply here: each must exist and fail, so that the lists stay true."""

import fnmatch
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Expect the tests in `NOT_APPLICABLE` of their module, patterns of names with reasons, to fail."""
    listing = [item for item in items if hasattr(getattr(item, "module", None), "NOT_APPLICABLE")]
    for module in dict.fromkeys(item.module for item in listing):
        tests = {item.nodeid.split("::", 1)[1]: item for item in listing if item.module is module}
        for pattern, reason in module.NOT_APPLICABLE.items():
            names = fnmatch.filter(tests, pattern.replace("[", "[[]"))
            if not names and not any("::" in argument for argument in config.args):
                raise pytest.UsageError(f"{module.__name__} lists {pattern} as not applicable; there is no such test.")
            for name in names:
                tests[name].add_marker(pytest.mark.xfail(reason=reason, strict=True))
