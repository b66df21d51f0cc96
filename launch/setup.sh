# shellcheck shell=bash
# Sourced by train.sh and test.sh: a virtual environment in the checkout, made once from the lock files.
# requirements.lock is what the main job needs; with development=yes, requirements-dev.lock comes on top, and with the
# word engine=deepspeed among the arguments DeepSpeed.
# PYTHON names the interpreter to make it from (3.11 or later). REQUIRE_HASHES=yes takes the files with hashes in their
# place, by which pip refuses any file that is not the package index's own. Sets $root and $python.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"

outdated() { ! cmp -s "$root/$1" "$root/.venv/installed/$1"; }
remember() { mkdir -p "$root/.venv/installed" && cp "$root/$1" "$root/.venv/installed/$1"; }
locked() {
    if [ "${REQUIRE_HASHES:-no}" = yes ]; then
        install --require-hashes -r "$root/$1-hashed.lock"
    else
        install -r "$root/$1.lock"
    fi
}
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@" >&2; }

if outdated requirements.lock; then
    base=${PYTHON:-python3}
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "distaccum needs Python 3.11 or later; name one with PYTHON=..." >&2
        exit 1
    fi
    echo "Setting up $root/.venv (once) ..." >&2
    "$base" -m venv --clear "$root/.venv"
    locked requirements
    remember requirements.lock
fi
if [ "${development:-no}" = yes ] && outdated requirements-dev.lock; then
    echo "Adding what the tests need to $root/.venv (once) ..." >&2
    locked requirements-dev
    remember requirements-dev.lock
fi
if outdated pyproject.toml; then
    install --no-deps -e "$root"
    remember pyproject.toml
fi
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
if [[ " $* " == *" engine=deepspeed "* ]] && ! has deepspeed; then
    echo "Adding DeepSpeed to $root/.venv (once) ..." >&2
    install -c "$root/requirements-dev.lock" -e "$root[deepspeed]"
fi
