"""Prints, as JSON, the state of every module that importing torch loads: compared between ``python -u`` and workers."""

import importlib
import json
import logging
import re
import sys
import types
import weakref

for name in sys.argv[1].split(","):
    importlib.import_module(name)
SETTINGS = importlib.import_module("elasticlib.utils._process_settings")

ADDRESS = re.compile(r"0x[0-9a-f]+|\b\d{12,}\b")
MAPPINGS = (dict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
COLLECTIONS = (list, tuple, set, frozenset, weakref.WeakSet, *MAPPINGS)
NAMES = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def shown(value: object, depth: int = 0) -> str:
    """A text that is the same for the same state: no addresses, no order of sets, nothing below three levels."""
    if isinstance(value, (int, float, str, bytes, bool, type(None), complex)):
        return ADDRESS.sub("", repr(value)[:200])
    if isinstance(value, COLLECTIONS) and depth < 3:
        items = (
            dict.items(value) if isinstance(value, dict) else value.items() if isinstance(value, MAPPINGS) else value
        )
        parts = [shown(each, depth + 1) for each in items]  # of a dict as it is: one of lazy values would import them
        # The order of strings in sets is each interpreter's own, and what is made from sets has it too.
        return f"{type(value).__name__}[{len(parts)}]({', '.join(sorted(parts))})"[:4000]
    if isinstance(value, NAMES):
        return f"<{type(value).__name__} {value.__name__}>"
    if isinstance(value, (logging.Logger, logging.Handler)):
        return f"<{type(value).__name__} {value.name} {value.level} {len(getattr(value, 'handlers', ()))}>"
    try:
        text = ADDRESS.sub("", repr(value)[:300])
    except Exception as error:
        text = f"<{type(error).__name__}>"
    fields = getattr(value, "__dict__", None)
    if isinstance(fields, dict) and depth < 2 and len(fields) < 50:
        text += " " + ", ".join(f"{key}={shown(each, depth + 1)}" for key, each in fields.items())
    return text[:4000]


seen = {}
for name, module in sorted(sys.modules.items()):
    if name == "__main__" or not isinstance(module, types.ModuleType):
        continue
    for key, value in list(vars(module).items()):
        if type(value) is not types.ModuleType and key not in ("__builtins__", "__cached__", "__file__", "__path__"):
            seen[f"{name}.{key}"] = shown(value)
modules = sorted(sys.modules)
# The list by which the plugin compares a process before and after a test.
seen |= {f"setting: {name}": shown(value) for name, value in SETTINGS.process_settings().items()}
print(json.dumps({"modules": modules, "state": seen}))
