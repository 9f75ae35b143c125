"""
Compile and import every module of elasticlib with the Python that runs this file: ``python import_all.py``.

Rules of this file: it needs what elasticlib needs and nothing else, and runs on the oldest Python that is promised.
Modules that need torch are imported where torch is; the others always.
"""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("elasticlib.__main__", "elasticlib.workers.child.program._main_definitions")
"""Compiled only: what these do needs whoever starts them."""
EXTRAS = ("hypothesis", "pytest", "_pytest", "exceptiongroup", "etcd")
"""Packages that some modules need but elasticlib itself does not."""


def modules():
    """Names of all modules, from their files: nothing is imported to find them."""
    for path in sorted((ROOT / "elasticlib").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def main():
    """Print how many modules there are, and what failed; 1 when something did."""
    sys.path.insert(0, str(ROOT))
    has_torch = importlib.util.find_spec("torch") is not None
    count, left_out, failed = 0, 0, 0
    for name, path in modules():
        count += 1
        try:
            compile(path.read_text(encoding="utf-8"), str(path), "exec")
            if name not in PROGRAMS:
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in EXTRAS or (missing == "torch" and not has_torch):  # that one is heavy
                left_out += 1
                continue
            failed += 1
            traceback.print_exc()
        except Exception:
            failed += 1
            traceback.print_exc()
    print(f"{count} modules, {left_out} without what they need, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
