"""Run the backend suite through each engine alone and write `engines.json` (some three minutes).

python -m tests.suite.record
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from importlib.metadata import version

from tests.suite import backend
from tests.suite.test_backend import TABLE

ENGINES = ("onnxruntime", "array", "reference")


def main() -> None:
    """Write the table."""
    with tempfile.TemporaryDirectory() as folder, backend.quiet(folder):
        cases: dict[str, dict[str, object]] = {
            name: {"declared": backend.declared(proto)} for name, proto in backend.models()
        }
        for engine in ENGINES:
            backend.OneEngine.engine = engine
            for _, name, item in backend.cases(backend.OneEngine):
                cases[name][engine] = backend.outcome(item).split(":")[0]
    record = {
        "versions": {name: version(name) for name in ("onnx", "onnxruntime", "numpy")},
        "passed": {e: Counter(row[e] for row in cases.values())["pass"] for e in ENGINES},
        "cases": cases,
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(cases.items()))
    head = json.dumps({k: v for k, v in record.items() if k != "cases"}, indent=1)[:-2]
    TABLE.write_text(f'{head},\n "cases": {{\n{lines}\n }}\n}}\n')
    print(record["passed"])


if __name__ == "__main__":
    main()
