#!/usr/bin/env bash
# Build the sdist, and the wheel from it; install the wheel in a new environment; use it from outside the repository.
# The argument is the Python to use.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${1:-python3}" -m venv "$folder/build"
"$folder/build/bin/python" -m pip install --quiet --disable-pip-version-check build
rm -f dist/hf_sphere-*
"$folder/build/bin/python" -m build --outdir dist
"${1:-python3}" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check "$(ls dist/*.whl)[plots]"
"$folder/environment/bin/python" -m pip check
cd "$folder"
env -u PYTHONPATH HF_HUB_OFFLINE=1 "$folder/environment/bin/python" "$root/.ci/smoke.py"
