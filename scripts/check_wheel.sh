#!/usr/bin/env bash
# Build the wheel, install it alone and import it: what a user of plain PyTorch gets.
#
# The second environment borrows the first one's packages by links, all but this package and
# those that the core must do without, so that PyTorch is not installed twice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup torchtitan,dev

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/wheel" "$ROOT"
python -m venv "$work/venv"
site_packages='import sysconfig; print(sysconfig.get_path("purelib"))'
lent=$(python -c "$site_packages")
mkdir "$work/borrowed"
for entry in "$lent"/*; do
    case $(basename "$entry") in
        titan_muon* | __editable__* | *.pth | torchtitan* | torchao* | triton* | spmd_types*) ;;
        pip | pip-* | setuptools* | _distutils_hack) ;;
        *) ln -s "$entry" "$work/borrowed/" ;;
    esac
done
echo "$work/borrowed" >"$("$work/venv/bin/python" -c "$site_packages")/borrowed.pth"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$work"/wheel/*.whl

cd "$work"
"$work/venv/bin/python" -I "$ROOT/scripts/check_wheel.py"
