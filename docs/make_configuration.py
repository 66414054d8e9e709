"""docs/configuration.md, made from exvae/config.py.

python docs/make_configuration.py            writes the page

Field names, defaults and meanings come from the source of `get_config()`, where every field has a comment. The allowed
values come from `validate`: given a wrong value, it raises an error whose message contains the rule.
"""

from __future__ import annotations

import ast
import copy
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from exvae import config as configs
from exvae.errors import UserError

PAGE = ROOT / "docs" / "configuration.md"
TOO_SMALL, TOO_LARGE, NO_SUCH_NAME = -(10**9), 10**9, "no such name"
SENTINEL = re.compile(r"(?:^|; )(-1|0|\(\)|''):? ([^;]+)")  # "0: half of the training set"

INTRODUCTION = """# Configuration

`python docs/make_configuration.py` makes this page from `exvae/config.py`. Do not edit it.

Set a field on the command line with `--config.FIELD=value`. A misspelt field or name is an error, and the message
suggests the nearest one. The defaults are the paper's settings for MNIST and the dense VAE. Each file in `experiments/`
changes a few fields. A run saves its whole config in `config.json`.

In the tables, N is the number of training images, B the batch size, M the number of exemplars drawn for a step, K the
number of neighbours, and S the number of importance samples.
"""
CONVENTION = """## Values with a special meaning

Some fields have a value that is not a quantity. They follow one convention:

- **0** means "automatic" if the best value depends on the data or the machine, and "off" or "all" if the field is a
  limit or an option that can be absent.
- **-1** means "none" or "any" in fields where 0 already has a meaning.
- **()** and **''**, an empty list and an empty text, mean "not given".
"""
FREE = """## Fields that may change when a run resumes

A run can be resumed only with its original config. These fields are exceptions, because they do not affect the steps
already taken:
"""
COSINE = "With `optim.schedule=cosine`, `train.epochs` must stay the same: the rate of every step depends on it."

GROUPS = {
    "data": "The training, validation and test images. [Data](data.md) has the names.",
    "model": "Encoder, decoder and p(x|z).",
    "prior": "The prior of the top latent.",
    "retrieval": "Retrieval augmented training (RAT). Only the exemplar prior uses it. "
    "[Scaling](scaling.md#many-exemplars) explains the ScaNN index.",
    "objective": "The training objective.",
    "optim": "The optimizer.",
    "train": "The training loop.",
    "eval": "Options of `--task=evaluate` and of the evaluation at the end of training. "
    "See [Tasks](tasks.md#evaluate).",
    "generate": "Options of `--task=sample`, `interpolate` and `iterate`. See [Tasks](tasks.md#generate).",
    "represent": "Options of `--task=represent`. See [Tasks](tasks.md#represent).",
    "augment": "Options of `--task=augment`. See [Tasks](tasks.md#augment).",
}
# Remarks that the page adds to the comment in the source.
NOTES = {
    "compile_cache_mib": "See [Tasks](tasks.md#compilation).",
    "data.name": "See [Data](data.md#data-sets).",
    "data.dir": "See [Data](data.md#where-named-data-sets-are-looked-for).",
    "data.device_mib": "From the host, each step copies only the images it needs. On a CPU, 0 means `data.memory_mib`.",
    "data.memory_mib": "0: always.",
    "model.latent_dim": "The hierarchical architectures are `hvae`, `convhvae` and `pixelsnail`. CelebA: 128.",
    "model.likelihood": "`discretized_logistic` has 256 levels, and nothing is binarized.",
    "prior.num_exemplars": "At most N, and at least 2 with leave-one-out.",
    "prior.num_pseudo_inputs": "Omniglot: 1000.",
    "retrieval.search": "The experiments with convolutional architectures use `exact`.",
    "retrieval.num_neighbours": "At most M. CelebA: 5.",
    "retrieval.leaves_searched": "Enough means that the leaves hold three times the candidates.",
    "retrieval.reorder": "With 0 and 4-bit codes, five times as many rows as candidates are rescored.",
    "objective.samples": "An even number of codes is drawn in pairs with opposite noise.",
    "optim.estimator": "`stl` (sticking the landing) has the same mean and less variance.",
    "optim.ema": "The average is updated in every eighth step, with a smaller decay at first. The best checkpoint "
    "holds the average.",
    "optim.weight_decay": "As in AdamW.",
    "train.batch_size": "At most N, and a multiple of the number of devices.",
    "train.checkpoint_minutes": "See [Tasks](tasks.md#resume).",
    "generate.index": "Typed as `3,5`.",
    "represent.explain": "The eight are spread over the test set.",
    "augment.lambdas": "Fashion-MNIST: 1, 0.8.",
}


class Field(NamedTuple):
    """One field of get_config()."""

    name: str  # 'train.epochs'
    default: str  # as written in the source
    comment: str


def _comments(source: str) -> dict[int, str]:
    """Comments by the number of their line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def read_fields() -> Iterator[Field]:
    """Yield the fields of get_config() in order, each with the comment on its line or, failing that, above it."""
    source = inspect.getsource(configs.get_config)
    lines, comments = source.splitlines(), _comments(source)
    groups = {"config": ""}  # by the name of the variable
    for statement in ast.parse(source).body[0].body:
        if not isinstance(statement, ast.Assign):
            continue
        names = [ast.unparse(target) for target in statement.targets]
        value = ast.get_source_segment(source, statement.value)
        owner, _, field = names[0].partition(".")
        if "ConfigDict(" in value:
            groups |= {name: f"{field}." for name in names if field}
        elif field:
            found = [comments[n] for n in range(statement.lineno, statement.end_lineno + 1) if n in comments]
            above, number = [], statement.lineno - 1
            while number in comments and lines[number - 1].lstrip().startswith("#"):
                above, number = [comments[number], *above], number - 1
            found = found or above
            yield Field(f"{groups[owner]}{field}", value, " ".join(found))


def _rule(field: str, value: Any) -> str:
    """The rule in the error that `validate` raises for this value of the field; '' if the value is allowed."""
    config = copy.deepcopy(configs.get_config())
    config.update_from_flattened_dict({field: value})
    try:
        configs.validate(config)
    except UserError as error:
        found = re.search(r" must (?:be|hold) (.*?)(?:;|, with commas|$)", str(error))
        return found[1] if found else ""
    return ""


def allowed(field: str, default: Any) -> str:
    """The allowed values as text: 'at least 1', '`plain`, `stl`', 'True or False'."""
    if isinstance(default, bool):
        return "`True` or `False`"
    if isinstance(default, str):
        names = _rule(field, NO_SUCH_NAME).removeprefix("one of ").split(", ")
        return ", ".join(f"`{name}`" for name in names) if names != [""] else ""
    if isinstance(default, tuple):
        return _rule(field, (TOO_SMALL,))
    kind = "integer" if isinstance(default, int) else "number"
    rules = [_rule(field, type(default)(value)) for value in (TOO_SMALL, TOO_LARGE)]
    return ", ".join([kind, *dict.fromkeys(filter(None, rules))])


def _typed(default: str) -> str:
    """A default as typed on the command line: without quotes, or underscores in numbers."""
    value = ast.literal_eval(default)
    if isinstance(value, str):
        return value or "''"
    return default if isinstance(value, tuple | bool) else default.replace("_", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _row(field: Field, default: Any) -> tuple[str, ...]:
    note = NOTES.get(field.name, "")
    comment = field.comment + (". " if note and field.comment else "")
    return f"`{field.name}`", f"`{_typed(field.default)}`", allowed(field.name, default), f"{comment}{note}"


def page() -> str:
    """The text of docs/configuration.md."""
    defaults = configs.flat(configs.get_config().to_dict())
    fields = list(read_fields())
    sections: dict[str, list[Field]] = {}
    for field in fields:
        sections.setdefault(field.name.rpartition(".")[0], []).append(field)
    sentinels = [
        (f"`{field.name}`", f"`{value}`", meaning.strip())
        for field in fields
        for value, meaning in SENTINEL.findall(field.comment)
    ]
    free = ", ".join(f"`{name}`" for name in configs.FREE_ON_RESUME)
    parts = [INTRODUCTION, CONVENTION, _table(("field", "value", "meaning"), sentinels), f"{FREE}{free}.\n\n{COSINE}\n"]
    for group, members in sections.items():
        parts += [f"## `{group}`\n" if group else "## General\n"]
        parts += [f"{GROUPS[group]}\n"] if group in GROUPS else []
        rows = [_row(field, defaults[field.name]) for field in members]
        parts.append(_table(("field", "default", "values", "meaning"), rows))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(list(read_fields()))} fields -> {PAGE}")
