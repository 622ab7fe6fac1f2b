# Sourced by quickstart and test: makes or reuses a virtual environment that holds the package.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }

# The first Python of a version that jzero runs on: $PYTHON if it is set, else what is on the path.
find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "jzero needs Python 3.11, 3.12 or 3.13, and ${PYTHON:-the path} has none of them."
  say "Install one, or name it: PYTHON=/path/to/python3.12 $0"
  return 1
}

# pip inside the environment; the outer Python's where the environment could not be given its own.
pip_install() {
  local pip=("$python" -m pip)
  "$python" -c 'import pip' 2>/dev/null || pip=("$base" -m pip --python "$python")
  "${pip[@]}" --quiet --disable-pip-version-check --no-input install "$@" </dev/null
}

# environment FOLDER REQUIREMENT...: sets $python to that of FOLDER (below the root), where the
# requirements, as pip takes them, are installed. They are installed again only when they, the
# project's own, or the checkout's place have changed.
environment() {
  local venv=$root/$1 stamp wanted
  shift
  python=$venv/bin/python
  stamp=$venv/installed
  base=$(find_python)
  wanted=$(printf '%s\n' "$root" "$@" && cat "$root/pyproject.toml")
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && "$python" -c '' 2>/dev/null; then
    return
  fi
  say "Setting up ${venv#"$root/"} with $("$base" --version); the first time takes some minutes ..."
  if ! "$python" -c '' 2>/dev/null; then
    rm -rf "$venv"
    if "$base" -c 'import ensurepip' 2>/dev/null; then
      "$base" -m venv "$venv"
    else
      "$base" -m venv --without-pip "$venv"
    fi
  fi
  rm -f "$stamp"
  if ! (cd "$root" && pip_install "$@"); then
    say "pip could not install the requirements; what it says above tells why."
    return 1
  fi
  printf '%s\n' "$wanted" >"$stamp"
}
