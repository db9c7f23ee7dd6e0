#!/usr/bin/env bash
# Build the sdist, and the wheel from it; install the wheel in a new environment; run the jobs and the README outside the
# repository (.ci/smoke.py), first without extras.
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
python="$folder/environment/bin/python"
wheel="$root/$(ls dist/hf_sphere-*.whl)"
"$python" -m pip install --quiet --disable-pip-version-check "$wheel"
"$python" -m pip check
cd "$folder"
env -u PYTHONPATH "$python" "$root/.ci/smoke.py" "$folder/run" "$wheel[plots,plotly,app,onnx,faiss,lance]"
