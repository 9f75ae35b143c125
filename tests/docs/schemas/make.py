"""
Make the schemas of this folder from the published packages: see README.md.

    python make.py FOLDER_OF_KUBERNETES_VALIDATE

needs the packages kubernetes-validate (unpacked there) and kubeflow-trainer-api (installed).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_WORDS = ("description", "title", "default", "example")


def without_words(schema: Any) -> Any:
    """Return *schema* without its texts for people; names of properties stay."""
    if isinstance(schema, list):
        return [without_words(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name not in _WORDS or isinstance(value, dict)}
    return {name: without_words(value) for name, value in kept.items()}


def needed(names: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions of *names* and of all that these refer to."""
    found: dict[str, Any] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = re.sub(r'"[^"]*#/(?:definitions|\$defs)/', '"#/$defs/', json.dumps(without_words(definitions[name])))
        found[name] = json.loads(text)
        waiting += re.findall(r'"#/\$defs/([^"]+)"', text)
    return dict(sorted(found.items()))


def plain_unions(definitions: dict[str, Any]) -> dict[str, Any]:
    """
    Return *definitions* with the values of a union in place of the Python object that holds one.

    The package writes and reads such a value (a quantity, an integer or a string) without its object.
    """
    is_union = "actual_instance"
    return {
        name: definition["properties"][is_union] if is_union in definition.get("properties", {}) else definition
        for name, definition in definitions.items()
    }


def write(name: str, definitions: dict[str, Any], kinds: dict[str, str]) -> None:
    """Write one file: the definitions, and the one of each kind of manifest."""
    content = {"kinds": kinds, "$defs": definitions}
    (HERE / name).write_text(json.dumps(content, indent=None, sort_keys=True, separators=(",", ":")) + "\n")


def make_kubernetes(folder: Path) -> None:
    """Write the schemas of Job and Service, which refuse unknown fields."""
    source = folder / "kubernetes-json-schema" / "v1.37.0-local-strict" / "_definitions.json"
    text = json.loads(source.read_text())
    definitions = text.get("$defs") or text.get("definitions")
    kinds = {"Job": "io.k8s.api.batch.v1.Job", "Service": "io.k8s.api.core.v1.Service"}
    write("kubernetes.json", needed(list(kinds.values()), definitions), kinds)


def make_trainer() -> None:
    """Write the schemas of JobSet and TrainJob; as in a cluster, unknown fields are errors."""
    from kubeflow_trainer_api import models

    kinds = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
    definitions: dict[str, Any] = {}
    for name in kinds.values():
        schema = getattr(models, name).model_json_schema(by_alias=True)
        definitions |= schema.pop("$defs") | {name: schema}
    for definition in definitions.values():
        if definition.get("properties"):
            definition["additionalProperties"] = False
    write("trainer.json", plain_unions(needed(list(kinds.values()), definitions)), kinds)


if __name__ == "__main__":
    make_kubernetes(Path(sys.argv[1]))
    make_trainer()
