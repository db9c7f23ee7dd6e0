"""Check the installed packages for known vulnerabilities with pip-audit, and print what was checked.

pip-audit also succeeds if it could check nothing, for instance because the index has no vulnerability data; this script
fails then.
"""

import json
import subprocess
import sys
from typing import Any


def summarize(dependencies: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return a text on the dependencies of a report of pip-audit, and whether the audit passed."""
    skipped = [one for one in dependencies if "skip_reason" in one]
    found = [one for one in dependencies if one.get("vulns")]
    lines = [f"{len(dependencies) - len(skipped)} packages checked, {len(found)} with known vulnerabilities."]
    for one in found:
        for vulnerability in one["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "no release"
            lines.append(f"  {one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    if skipped:
        lines.append(f"{len(skipped)} packages not checked: {', '.join(one['name'] for one in skipped)}.")
    if len(skipped) == len(dependencies):
        lines.append("Nothing was checked: the index has no vulnerability data on these packages.")
    return "\n".join(lines), not found and len(skipped) < len(dependencies)


def main() -> None:
    """Run pip-audit on the current environment."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if not ended.stdout:
        sys.exit(f"pip-audit could not check the packages:\n{ended.stderr}")
    text, passed = summarize(json.loads(ended.stdout)["dependencies"])
    print(text)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
