#!/bin/sh
# Makes .venv with the exact packages of requirements-dev.txt and puts kvpool's sources on its path.
# Whatever is missing on the machine is said in one line, which starts with "kvpool:".
set -eu
cd "$(dirname "$0")/.."

venv=.venv
log=$venv/setup.log
torch=$(grep '^torch==' requirements-dev.txt)

fail() {
    echo "kvpool: $*" >&2
    exit 1
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed, found $("${PYTHON:-python3}" -V 2>&1 | tail -n 1); name one with \`make PYTHON=/path/to/python3.11\`"
}

need_compiler() {
    compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null 2>&1 || fail "no C++ compiler: \`$compiler\` is not there; install g++ 11 or clang 14 or newer, or set CXX"
    program='#include <concepts>
template <std::integral T> T twice(T x) { return 2 * x; }
int main() { return twice(0); }'
    printf '%s\n' "$program" | $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
        fail "\`$compiler\` does not compile C++20 ($($compiler --version | head -n 1)); install g++ 11 or clang 14 or newer, or set CXX"
}

need_disk() {
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge 4194304 ] || fail "4 GiB of disk are needed here for the packages, $((free_kib / 1024)) MiB are free"
}

# Runs pip; when it fails, says which of the usual causes it was.
install() {
    "$venv/bin/python" -m pip install --quiet --progress-bar off --disable-pip-version-check --retries 2 --log "$log" "$@" 2>"$venv/pip.err" && return
    if grep -q 'No space left' "$log" "$venv/pip.err"; then
        fail "the disk is full: $(df -Ph . | awk 'NR == 2 { print $4 }') are free here; make room and run it again"
    elif grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Network is unreachable|Connection (refused|reset)' "$log"; then
        fail "no network: the packages of requirements-dev.txt could not be fetched; run it again when the package index answers"
    fi
    fail "pip failed: $(grep -iE '^ *error' "$venv/pip.err" | head -n 1 | sed 's/^ *//'); all of it is in $log"
}

need_compiler
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    "$python" -c 'import sysconfig, pathlib, sys; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())' ||
        fail "$python has no Python.h; install its headers (python3-dev or python3-devel)"
    need_disk
    echo "making $venv with $("$python" -V) (a minute or two, 3 GB)"
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 || fail "$python cannot make a virtual environment; install its venv module (python3-venv)"
fi
: >"$log"
install "$torch"
install --no-deps -r requirements-dev.txt

# kvpool itself: a path and the command. `make build` puts the native part into src/; no import hook is needed.
"$venv/bin/python" - "$PWD/src" <<'END'
import pathlib, sys, sysconfig

pathlib.Path(sysconfig.get_path("purelib"), "kvpool.pth").write_text(sys.argv[1] + "\n")
command = pathlib.Path(sysconfig.get_path("scripts"), "kvpool")
command.write_text(f"#!{sys.executable}\nimport sys\n\nfrom kvpool.cli import main\n\nsys.exit(main())\n")
command.chmod(0o755)
END
