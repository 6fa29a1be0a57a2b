#!/usr/bin/env bash
# The rows that need a GPU, in one go within six minutes: CUDA graphs of fixed-step solves, compiled steps, bfloat16.
# Results go to benchmarks/results/gpu/; nothing else is touched.  Use: benchmarks/gpu.sh  (PYTHON=... to choose one)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

"$PYTHON" - <<'PY' || exit 1
import sys
import torch
if not torch.cuda.is_available():
    sys.exit(f"gpu.sh: no GPU that torch {torch.__version__} can use; the GPU rows stay unmeasured")
print("GPU:", torch.cuda.get_device_name(0))
PY

failed=0
timeout 90 "$PYTHON" -m pytest -q tests/test_compiled.py -k cuda || failed=1
# a case that fails or takes too long does not stop the others from being written
timeout 260 "$PYTHON" - <<'PY' || failed=1
from benchmarks import compiled, store
from benchmarks.tables import table

store.RESULTS = store.RESULTS / "gpu"
store.RESULTS.mkdir(parents=True, exist_ok=True)
about, rows, failed = store.environment() | {"preset": "gpu"}, [], []
for case in sorted(compiled.cases(compiled.PRESETS["gpu"], 1), key=lambda case: case["what"] != "captured"):
    try:
        rows += [{"case": case, **row, "run": about} for row in compiled.measure(case)]
    except RuntimeError as error:
        failed.append(f"{case}: {str(error).splitlines()[-1]}")
    store.write_rows(store.path_of("compiled"), rows)
print(table(compiled.COLUMNS, compiled.summary(rows)))
print("wrote", store.path_of("compiled"))
if failed:
    raise SystemExit("not measured:\n" + "\n".join(failed))
PY
exit $failed
