# Sourced by the other scripts: makes the virtual environment and installs the package in it.
#
#   TITAN_MUON_VENV   the environment (default: .venv in the checkout)
#   PYTHON            the interpreter that makes it (default: python3)
#
# Defines ROOT, VENV and `setup EXTRAS`. A second call with the same pyproject.toml does nothing.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${TITAN_MUON_VENV:-$ROOT/.venv}

die() {
    echo "error: $*" >&2
    exit 1
}

make_environment() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null || die "$python not found; install Python 3.11 or newer, or name one with PYTHON=..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$python" --version) is too old; Python 3.11 or newer is needed. Name one with PYTHON=..."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python lacks the venv or ensurepip module; install it (Debian, Ubuntu: apt install python3-venv), or name another interpreter with PYTHON=..., or an existing environment with TITAN_MUON_VENV=..."
    echo "Making the virtual environment $VENV"
    "$python" -m venv "$VENV" || die "could not make a virtual environment in $VENV"
}

# setup EXTRAS: install titan-muon[EXTRAS], once for each state of pyproject.toml.
setup() {
    local extras=$1 stamp wanted
    mkdir -p "$VENV"
    # Two scripts started at once take turns.
    if command -v flock >/dev/null; then
        exec 9>"$VENV/.titan-muon-lock"
        flock 9
    fi
    [ -x "$VENV/bin/python" ] || make_environment
    stamp=$VENV/.titan-muon-$extras
    wanted="$ROOT $(sha256 "$ROOT/pyproject.toml")"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing titan-muon[$extras] into $VENV; PyTorch is several GB and takes minutes the first time"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[$extras]" ||
            die "pip could not install titan-muon[$extras]; see its message above"
        echo "$wanted" >"$stamp"
    fi
    if command -v flock >/dev/null; then exec 9>&-; fi
    # Tools that look for the environment's interpreter find it on the path.
    export PATH=$VENV/bin:$PATH
}

sha256() {
    "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"
}

count_gpus() {
    "$VENV/bin/python" -c 'import torch; print(torch.cuda.device_count())'
}
