"""Applying the schema: pydantic's findings as one clear line each, then jzero's verdicts."""

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from jzero.config import keys
from jzero.config.document import Document, Optimizer, Scheduler
from jzero.config.draft import Draft
from jzero.config.keys import Section, Verdict
from jzero.config.keywords import nearest
from jzero.config.optimizer_params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULERS
from jzero.config.retired import ZERO
from jzero.config.values import read_flag
from jzero.errors import ConfigError

S = TypeVar("S", bound=Section)

# Where keys belong that the schema keeps under another name or inside a type's own keys.
_ELSEWHERE = {
    "max_grad_norm": ("gradient_clipping",),
    "clip_grad": ("gradient_clipping",),
    "learning_rate": ("optimizer.params.lr",),
    "allgather_size": (f"{ZERO}.allgather_bucket_size",),
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "bfloat16": ("bf16",),
}

SEALED = tuple(
    path
    for path, field in keys.walk(Document)
    if (found := keys.of(field)) is not None and found.switch
)


def show(value: Any) -> str:
    """A value as JSON spells it, cut short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _error(findings: list[str]) -> ConfigError:
    """The first of several findings as an error that says how many more there are."""
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return ConfigError(findings[0] + more)


def _places(name: str) -> list[str]:
    found = list(_ELSEWHERE.get(name, ()))
    found += [path for path, _ in keys.walk(Document) if path.split(".")[-1] == name]
    for base, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if any(name in model.model_fields for model in types.values()):
            found.append(f"{base}.params.{name}")
    return list(dict.fromkeys(found))


def _unknown(model: type[Section], parent: str, name: str) -> str:
    """What to say of a key that its section does not have."""
    path = f"{parent}.{name}" if parent else name
    places = [place for place in _places(name) if place != path]
    if 0 < len(places) <= 3:
        named = [place if "." in place else f"{place} at the top level" for place in places]
        return f"{path}: unknown here; it belongs in {' or '.join(named)}"
    close = nearest(name, list(model.model_fields))
    if close:
        return f"{path}: unknown key; did you mean {close}?"
    leaves = {p.split(".")[-1]: p for p, field in keys.walk(Document)}
    far = nearest(name, list(leaves), cutoff=0.75)
    if far:
        return f"{path}: unknown key; the nearest is {leaves[far]}"
    known = ", ".join(model.model_fields)
    where = f"{parent} has" if parent else "known are"
    return f"{path}: unknown key; {where} {known if len(known) < 400 else known[:400] + ' ...'}"


def _model_at(model: type[Section], parts: list[str]) -> type[Section]:
    for part in parts:
        field = model.model_fields.get(part)
        inner = keys.section_of(field) if field is not None else None
        if inner is None:
            break
        model = inner
    return model


def _say(error: Any, model: type[Section], base: str, draft: Draft) -> str:
    parts = [str(part) for part in error["loc"]]
    path = ".".join([base, *parts] if base else parts)
    parent = ".".join(([base] if base else []) + parts[:-1])
    kind, found = error["type"], show(error["input"])
    name = draft.name(path)
    if kind == "extra_forbidden":
        return _unknown(_model_at(model, parts[:-1]), parent, parts[-1])
    if kind == "jzero_value":
        return f"{name}: found {found}; allowed: {error['ctx']['allowed']}"
    if kind == "missing":
        return f"{name}: must be given"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"{name}: found {found}; allowed: an object {{...}}"
    return f"{name}: found {found}; {error['msg']}"


def read_section(model: type[S], data: Any, base: str, draft: Draft) -> S:
    """A section made from plain data.

    Raises: `ConfigError` with what pydantic found, by the keys' full paths.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{base}: found {show(data)}; allowed: an object {{...}}")
    data = _without_null_sections(model, data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # Unknown keys first: a misspelt key is often why a required one is missing.
        found.sort(key=lambda item: item["type"] != "extra_forbidden")
    # Outside the handler, so that pydantic's own account is not printed along with ours.
    raise _error([_say(item, model, base, draft) for item in found])


def _without_null_sections(model: type[Section], data: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in data.items():
        field = model.model_fields.get(name)
        inner = keys.section_of(field) if field is not None else None
        if inner is not None and value is None:
            continue
        result[name] = (
            _without_null_sections(inner, value) if inner and isinstance(value, dict) else value
        )
    return result


def _typed(
    part: Optimizer | Scheduler, base: str, types: dict[str, type[Section]], draft: Draft
) -> tuple[str, Section]:
    """The canonical type name and the checked params of an optimizer or a scheduler."""
    lower = {name.lower(): name for name in types}
    name = lower.get(part.type.strip().lower())
    if name is None:
        refused = REFUSED_OPTIMIZERS if base == "optimizer" else {}
        for known, reason in refused.items():
            if known.lower() == part.type.strip().lower():
                raise ConfigError(f"{base}.type: found {show(part.type)}; refused: {reason}")
        close = nearest(part.type, tuple(types))
        hint = f"; did you mean {close}?" if close else ""
        own = "; for another, give an Optax transformation yourself" if base == "optimizer" else ""
        raise ConfigError(
            f"{base}.type: found {show(part.type)}; allowed: {', '.join(types)}{hint}{own}"
        )
    if isinstance(part.params, dict) and "max_grad_norm" in part.params and base == "optimizer":
        raise ConfigError(
            "optimizer.params.max_grad_norm: refused: clipping is not the optimizer's; "
            "use the top-level gradient_clipping"
        )
    return name, read_section(types[name], part.params, f"{base}.params", draft)


def read_document(draft: Draft) -> Document:
    """The checked document, with typed optimizer and scheduler params."""
    document = read_section(Document, draft.data, "", draft)
    update: dict[str, Any] = {}
    for base, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        part = getattr(document, base)
        if part is not None:
            name, params = _typed(part, base, types, draft)
            update[base] = part.model_copy(update={"type": name, "params": params})
    return document.model_copy(update=update) if update else document


def is_on(value: Any) -> bool:
    """Whether a section that is only accepted while off is in use, by any `enabled` inside."""
    if value is None or value is False or value == {} or value == []:
        return False
    if isinstance(value, str):
        return value.strip().lower() != "false"
    if not isinstance(value, dict):
        return True
    if "enabled" in value:
        try:
            return read_flag(value["enabled"])
        except ValueError:
            return True
    inner = [v for v in value.values() if isinstance(v, dict)]
    # Without any switch, what is left can only be settings that are meant to act.
    return any(is_on(v) for v in inner) or len(inner) < len(value)


def _is_off(section: Section) -> bool:
    return getattr(section, "enabled", True) is False or getattr(section, "device", "") == "none"


def judge(document: Document, draft: Draft) -> None:
    """Apply the verdicts: add a notice to the draft for every given key that has no effect.

    Keys of a section that is switched off have nothing to say.

    Raises: `ConfigError` for keys that are refused.
    """
    errors: list[str] = []
    _judge(document, "", draft, errors, False)
    if errors:
        raise _error(errors)


def _judge(section: Section, path: str, draft: Draft, errors: list[str], off: bool) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        full = f"{path}.{name}" if path else name
        found = keys.of(field)
        quiet = off
        if found is not None and not off:
            default = field.get_default(call_default_factory=True)
            plain = value.model_dump() if isinstance(value, Section) else value
            if found.switch:
                if is_on(value):
                    has = isinstance(plain, dict) and "enabled" in plain
                    where, what = (f"{full}.enabled", plain["enabled"]) if has else (full, plain)
                    allowed = "false" if has else '{"enabled": false}, or no such key'
                    errors.append(_refusal(draft.name(where), what, found, allowed))
            elif found.verdict in (Verdict.NOT_YET, Verdict.REFUSE):
                if found.bites(value) if found.bites else value != default:
                    allowed = "false" if found.bites is bool else show(default)
                    errors.append(_refusal(draft.name(full), plain, found, allowed))
            elif name in section.model_fields_set:
                quiet = found.verdict is Verdict.NOTICE
                if found.bites(value) if found.bites else quiet:
                    draft.notices.append(f"{draft.name(full)}: no effect: {found.text}")
        if isinstance(value, Section):
            _judge(value, full, draft, errors, quiet or _is_off(value))


def _refusal(name: str, value: Any, found: keys.Key, allowed: str) -> str:
    word = "not supported yet" if found.verdict is Verdict.NOT_YET else "refused"
    return f"{name}: found {show(value)}; {word}: {found.text}; allowed: {allowed}"
