# Sourced by quickstart.sh and tests/run.sh: leaves $PY, a Python that has this package and its requirements.
#
#   setup_venv FOLDER [EXTRA]
#
# The active Python is used as it is when it already has torch (an NGC image, whose torch is never replaced); otherwise a
# venv is made in FOLDER by $PYTHON (default: python3.11, python3.12, python3, the first that fits). Safe to run twice: an
# install is skipped while setup.py has not changed.

python_version() { # INTERPRETER -> 3.11, or nothing if it is no Python or an older one
    local found
    found=$("$1" -c 'import sys; print("python", "%d.%d" % sys.version_info[:2]) if sys.version_info >= (3, 11) else 0' 2>/dev/null)
    case $found in "python "*) echo "${found#python }" ;; esac
}

setup_venv() {
    local folder=$1 extra=${2:-} root target stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    target=$root${extra:+[$extra]}
    if [ -z "${PYTHON:-}" ] && command -v python >/dev/null && python -c 'import torch' 2>/dev/null; then
        PY=$(command -v python)
        stamp=$root/$folder.active-$(python_version "$PY")
    else
        local base=${PYTHON:-}
        if [ -z "$base" ]; then
            for base in python3.11 python3.12 python3 none; do
                if [ "$base" = none ]; then
                    echo "setup: found no Python 3.11 or newer; set PYTHON=/path/to/python" >&2
                    return 2
                fi
                [ -n "$(python_version "$base")" ] && break
            done
        elif [ -z "$(python_version "$base")" ]; then
            echo "setup: PYTHON=$base: found no Python 3.11 or newer there" >&2
            return 2
        fi
        # A venv of another interpreter (or a half-made one) is made anew.
        if ! [ -x "$root/$folder/bin/python" ] || ! "$root/$folder/bin/python" -m pip --version >/dev/null 2>&1 ||
            [ "$("$base" -c 'import sys; print(sys.version)')" != "$("$root/$folder/bin/python" -c 'import sys; print(sys.version)')" ]; then
            rm -rf "${root:?}/$folder"
            "$base" -m venv "$root/$folder" || return
        fi
        PY=$root/$folder/bin/python
        stamp=$root/$folder/.installed
    fi
    local want
    want="$(sha256sum "$root/setup.py" | cut -d' ' -f1) $("$PY" -c 'import sys; print(sys.version)') $extra $root"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$PY" -c 'import megatron_lowrank, torch' 2>/dev/null; then
        return 0
    fi
    echo "setup: installing into $("$PY" -c 'import sys; print(sys.prefix)'); a few minutes, without output"
    rm -f "$stamp"
    if "$PY" -c 'import torch' 2>/dev/null; then
        # Hold torch at the very version that is there.
        local held
        held=$(mktemp)
        "$PY" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$held"
        PIP_CONSTRAINT="${PIP_CONSTRAINT:+$PIP_CONSTRAINT }$held" "$PY" -m pip install -q --disable-pip-version-check -e "$target" || { rm -f "$held"; return 1; }
        rm -f "$held"
    else
        # Named exactly: an open range would take whatever is newest.
        "$PY" -m pip install -q --disable-pip-version-check "torch==2.13.0" || return
        "$PY" -m pip install -q --disable-pip-version-check -e "$target" || return
    fi
    echo "$want" >"$stamp"
}
