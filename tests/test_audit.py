"""The audit of the dependencies reports what it checked."""

from types import ModuleType

import pytest

FINE = {"name": "fine", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}


@pytest.fixture(scope="module")
def audit(load_file) -> ModuleType:
    return load_file(".ci/audit.py")


def test_packages_without_vulnerabilities_pass(audit):
    text, passed = audit.summarize([FINE, UNKNOWN])
    assert passed
    assert text == "1 packages checked, 0 with known vulnerabilities.\n1 packages not checked: unknown."


def test_a_vulnerability_is_listed_with_its_fix_and_fails(audit):
    text, passed = audit.summarize([FINE, BAD])
    assert not passed
    assert "bad 2.0: CVE-1, fixed in 2.1" in text


def test_an_audit_that_checked_nothing_fails(audit):
    text, passed = audit.summarize([UNKNOWN])
    assert not passed
    assert "Nothing was checked" in text
