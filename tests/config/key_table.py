"""The keys of a configuration and their verdicts as a table, from the schema itself.

`python tests/config/key_table.py docs/deepspeed.md` renews the tables in that file.
"""

import json
import pathlib
import re
import sys

from jzero.config import keys
from jzero.config.document import Document
from jzero.config.keys import Section, Verdict
from jzero.config.optimizer_params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULERS
from jzero.config.retired import ALIASES, OFFLOADS, RETIRED

# Tables stand between these marks in the documentation.
MARK = "<!-- keys: {} -->"
END = "<!-- end -->"


def verdicts() -> dict[str, tuple[str, str]]:
    """Every known key's full path -> (verdict's word, reason), old names and types included."""
    found = {path: _verdict(field) for path, field in keys.walk(Document)}
    for base, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for kind, model in types.items():
            found[f"{base}.{kind}"] = (Verdict.MAP.value, _summary(model))
            for path, field in keys.walk(model, f"{base}.{kind}"):
                found[path] = _verdict(field)
    for kind, reason in REFUSED_OPTIMIZERS.items():
        found[f"optimizer.{kind}"] = (Verdict.REFUSE.value, reason)
    found["optimizer.params.max_grad_norm"] = (Verdict.REFUSE.value, "use gradient_clipping")
    for old, new in (ALIASES | OFFLOADS).items():
        found[old] = ("other name", f"the same as `{new}`")
    for old, text in RETIRED.items():
        found[old] = (Verdict.NOTICE.value, text)
    return found


def _verdict(field: keys.FieldInfo) -> tuple[str, str]:
    found = keys.of(field)
    return (found.verdict.value, found.text) if found else ("section", "")


def _summary(model: type[Section]) -> str:
    text = " ".join((model.__doc__ or "").split())
    return text.partition(": ")[2].rstrip(".") or "its keys are below"


def _default(field: keys.FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, Section) else f"`{json.dumps(value)}`"


def _row(path: str, field: keys.FieldInfo) -> str:
    return f"| `{path}` | {_default(field)} | {' | '.join(_verdict(field))} |"


def _rows(model: type[Section], base: str) -> list[str]:
    """A row for every key below a section."""
    return [_row(path, field) for path, field in keys.walk(model, base) if keys.of(field)]


def tables() -> dict[str, str]:
    """The documentation's tables by name, as Markdown."""
    header = ["| key | default | jzero | |", "| --- | --- | --- | --- |"]
    zero, top, inside = list(header), list(header), list(header)
    for name, field in Document.model_fields.items():
        inner = keys.section_of(field)
        if inner is None:
            top.append(_row(name, field))
        elif name == "zero_optimization":
            zero += _rows(inner, name)
        elif name in ("optimizer", "scheduler"):
            top += [_row(name, field), *_rows(inner, name)]
        else:
            inside += _rows(inner, name)
    parts = {"zero_optimization": zero, "top level": top, "sections": inside}
    for base, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        lines: list[str] = []
        for kind, model in types.items():
            lines += [f"**{kind}**: {_summary(model)}.", "", *header, *_rows(model, "params"), ""]
        parts[base] = lines[:-1]
    known = verdicts()
    parts["old names"] = ["| key | jzero | |", "| --- | --- | --- |"]
    parts["old names"] += [
        f"| `{path}` | {' | '.join(known[path])} |" for path in {**ALIASES, **OFFLOADS, **RETIRED}
    ]
    return {name: "\n".join(lines) for name, lines in parts.items()}


def renew(text: str) -> str:
    """A document with every marked table replaced by the schema's."""
    for name, table in tables().items():
        mark = MARK.format(name)
        pattern = re.compile(re.escape(mark) + r".*?" + re.escape(END), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the document has no place for the table {name!r} ({mark} ... {END})")
        text = pattern.sub(lambda _, m=mark, t=table: f"{m}\n{t}\n{END}", text)
    return text


if __name__ == "__main__":
    page = pathlib.Path(sys.argv[1])
    page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
