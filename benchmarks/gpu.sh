#!/usr/bin/env bash
# Everything that is measured on one GPU, in one call of under 10 minutes: convolutions of a cohort, W1 and W2 against
# hand-written loops and pfl, then FedEntOpt's table I on CIFAR-10, projected.
#
#   bash benchmarks/gpu.sh                  on the machine with the GPU; no network is needed
#   bash benchmarks/gpu.sh --wheels FOLDER  where there is a network: fills FOLDER (55 MB) for a bare machine
#   bash benchmarks/gpu.sh --dry-run        all of it on the CPU, small, in three minutes; its figures mean nothing
#
# A bare machine has Python 3.12, PyTorch and numpy. FEDSKEW_BENCH_WHEELS names the folder that was filled; without it
# what PYTHON (python3) has installed is used. Data are random tensors of CIFAR-10's shape. OUT: a folder that also gets
# what is printed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if [ "${1:-}" = --wheels ]; then
    mkdir -p "$2"
    get=("$python" -m pip download --quiet --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64
        --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$2")
    "${get[@]}" pydantic safetensors tomli-w threadpoolctl pillow
    # Without what they depend on, which is PyTorch and numpy, or listed here.
    "${get[@]}" --no-deps scipy scikit-learn joblib pfl==0.6.0 multiprocess dill "dp-accounting<0.6" prv-accountant \
        absl-py attrs dm-tree wrapt "packaging<26"
    exit
fi

device=cuda simulators=() table=(--rounds 20)
if [ "${1:-}" = --dry-run ]; then
    device=cpu simulators=(--quick --only tuned fedskew fedskew-cohort pfl)
    table=(--rounds 1 --samples 2000 --clients 10 --seeds 2)
fi
if [ -n "${FEDSKEW_BENCH_WHEELS:-}" ]; then
    # A wheel is an archive of what is installed; so neither pip nor a virtual environment is needed.
    for wheel in "$FEDSKEW_BENCH_WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" .bench/wheels-unpacked; done
    notes=.bench/wheels-unpacked/fedskew-0.dist-info # runs note fedskew's version
    mkdir -p $notes && sed -n 's/^version = "\(.*\)"/Metadata-Version: 2.1\nName: fedskew\nVersion: \1/p' pyproject.toml > $notes/METADATA
fi
export PYTHONPATH=$PWD/src:$PWD/benchmarks:$PWD/.bench/wheels-unpacked OMP_NUM_THREADS=1
if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    exec > >(tee "$OUT/gpu.txt") 2>&1
fi

if [ "$device" = cuda ]; then nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; fi
"$python" -c 'import platform, torch; print("Python", platform.python_version(), "PyTorch", torch.__version__)'
if [ "$device" = cuda ]; then "$python" benchmarks/convolutions.py || echo "convolutions failed"; fi
for workload in w1 w2; do
    "$python" benchmarks/simulators.py $workload --device $device --data random --installed "${simulators[@]}" ||
        echo "$workload failed"
    echo
done
# Cells are begun until 9 minutes are over, so that the table is printed before the tenth is.
"$python" benchmarks/table1.py --device $device "${table[@]}" --budget $((520 - SECONDS))
echo
echo "All of it took $SECONDS s."
