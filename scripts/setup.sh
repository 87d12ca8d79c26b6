# Sourced by ./run and ./test, in the repository's root. `set_up EXTRA` makes .venv hold the project with the
# extra "worker,http" or "dev". A stamp, written last, says for which state of the project that was done: an
# interrupted set-up has none and is done again, a finished one costs milliseconds.

VENV=.venv
TORCH="torch==2.13.0"
# The folders that setup.py maps into the package.
FOLDERS="benchmarks cli client engine kernels kvindex kvtransfer llm models observability protos services simulator"
FOLDERS="$FOLDERS tokenization"

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

say() {
    printf '==> %s\n' "$*" >&2
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed and was not found; install it, or name it: PYTHON=/path/to/python $0"
}

# The files that decide what an install does. An editable install links each file, so that a new or a removed
# one needs another install; a changed one does not.
fingerprint() {
    {
        cat pyproject.toml setup.py protos/*.proto
        # shellcheck disable=SC2086
        find $FOLDERS -type f ! -name '*_pb2*' ! -path '*/__pycache__/*' ! -path '*/.*' 2>/dev/null | LC_ALL=C sort
    } | sha256sum | cut -d ' ' -f 1
}

pip_install() {
    local log="$VENV/set-up.log"
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >"$log" 2>&1 </dev/null; then
        tail -n 40 "$log" >&2
        die "pip could not install: $*; all it said is in $log"
    fi
}

make_venv() {
    # A set-up that was interrupted may have left an environment without pip.
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv or ensurepip; install them (on Debian and Ubuntu: apt install python3-venv)"
    say "making $VENV with $("$python" --version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || die "$python -m venv $VENV failed"
}

set_up() {
    local extra=$1 state
    state=$(fingerprint)
    if [ "$(cat "$VENV/.quire-$extra" 2>/dev/null)" = "$state" ]; then
        return
    fi
    make_venv
    # Neither may an interrupted install leave an old stamp behind, nor a new one the links of files that are gone.
    rm -rf "$VENV"/.quire-* build
    if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        say "installing $TORCH (the largest part, some minutes at the first time)"
        pip_install "$TORCH"
    fi
    say "installing quire with what it needs for '$extra'"
    pip_install --editable ".[$extra]" --config-settings editable_mode=strict
    # The extra dev has all that worker and http have.
    printf '%s\n' "$state" | tee "$VENV/.quire-worker,http" >"$VENV/.quire-$extra"
}
