# ./run and ./test source this file in the repository's root. `set_up EXTRA` installs the project with an
# extra, or with several separated by commas, into .venv, in the versions of requirements/. `set_up dev`
# installs all extras and what tests need. A stamp that is written last records the state of the project. An
# interrupted set-up has no stamp and is repeated; a finished one takes milliseconds.

VENV=.venv
# The extras that the commands in README.md need.
RUN_EXTRAS=worker,http,structured
# The folders that setup.py maps into the package.
FOLDERS=$(sed -n 's/^    "\([a-z]*\)",$/\1/p' setup.py)

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

# Prints a hash of the files that determine an install. An editable install links each file, so a new or
# removed file needs another install, but a changed file does not.
fingerprint() {
    {
        cat pyproject.toml setup.py requirements/*.py requirements/*.txt protos/*.proto
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
    trap 'printf "\n==> interrupted; run it again to go on\n" >&2; exit 130' INT
    make_venv
    # An interrupted install must not leave an old stamp, and a new install must not keep links of removed
    # files.
    rm -rf "$VENV"/.quire-* build
    local locked="$VENV/locked.txt"
    # Install the build tools first, so that packages without a wheel for this Python are built with these
    # versions.
    "$VENV/bin/python" requirements/locked.py build >"$locked"
    pip_install --no-deps --require-hashes --requirement "$locked"
    say "installing what quire needs for '$extra'"
    # shellcheck disable=SC2086
    "$VENV/bin/python" requirements/locked.py ${extra//,/ } >"$locked"
    pip_install --no-deps --require-hashes --no-build-isolation --requirement "$locked"
    say "installing torch (the largest part, some minutes at the first time; progress: $VENV/set-up.log)"
    pip_install --constraint requirements/torch.txt torch
    say "installing quire"
    pip_install --no-deps --no-build-isolation --editable . --config-settings editable_mode=strict
    trap - INT
    # dev contains everything that ./run needs.
    printf '%s\n' "$state" | tee "$VENV/.quire-$RUN_EXTRAS" >"$VENV/.quire-$extra"
}
