"""README.md and docs/: the command line accepts all commands, Python code runs, and links have targets.

The commands of a block run here on a tiny trained run, unless the block has one of these comments before it:

<!-- too long: REASON -->                            the commands take too long for a test
<!-- tested by tests/test_x.py::test_y, ... -->      another test does the same

The command lines of all blocks are checked, with or without a comment: files, flags, config fields and their values.
"""

import argparse
import ast
import collections
import contextlib
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from absl.testing import flagsaver

import exvae
import launch
from exvae import config as configs
from exvae.sweeps import sweep

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
# No program is on this PATH, so bash passes every command to this function, with variables and loops expanded.
SHELL = """
PATH=/nowhere
command_not_found_handle() { local IFS=$'\\x1f'; printf '%s\\n' "$*"; }
source() { command_not_found_handle source "$@"; }
"""


class Block(NamedTuple):
    page: Path
    language: str
    text: str
    mark: str


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text())
    return [Block(page, match["language"], match["text"], match["mark"] or "") for match in found]


def inline_commands(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    commands = re.findall(r"`((?:python|make|pip|npm) [^`]+)`", re.sub(r"\s+", " ", text))
    return [command for command in commands if not command.startswith(("npm ", "python docs/"))]


def words_of(script: str, folder: Path) -> list[list[str]]:
    """The commands of a script, as bash parses it. None of them runs."""
    done = subprocess.run(["/bin/bash", "-c", SHELL + script], cwd=folder, capture_output=True, text=True)
    assert done.stderr == "", done.stderr
    return [line.split("\x1f") for line in done.stdout.split("\n")[:-1]]


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@contextlib.contextmanager
def command_line(words: list[str]):
    """Parses a command line of `launch.py`, and restores the flags at the end."""
    argv = ["launch.py", *words]
    with flagsaver.flagsaver(), mock.patch.object(sys, "argv", argv):
        launch.parse(argv)
        yield argv


def check_launch(words: list[str]) -> None:
    with command_line(words):
        configs.validate(launch.CONFIG.value)
        if launch.is_sweep():
            assert sweep.make_points(launch.CONFIG.value, sweep.parse(launch.SWEEP.value), Path("runs"))
        if launch.DISTRIBUTED.value:
            assert launch.TASK.value in ("train", "evaluate")
        if launch.OUT.value:
            assert launch.TASK.value in launch.TASKS_WITH_OUT


def run_module(name: str, words: list[str]) -> None:
    """`python -m NAME WORDS`, in this process."""
    with mock.patch.object(sys, "argv", [name, *words]):
        runpy.run_module(name, run_name="__main__")


class Accepted(Exception):
    """Raised when argparse has accepted a command line, so that nothing after it runs."""


def check_module(name: str, words: list[str]) -> None:
    """Checks that argparse accepts the arguments of `python -m NAME WORDS`."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None, namespace=None):
        parse(parser, args, namespace)
        raise Accepted

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop), pytest.raises(Accepted):
        run_module(name, words)


def check_benchmark(name: str, words: list[str]) -> None:
    """Reads the flags from the source, because two benchmarks that define the same flag cannot both be imported."""
    source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
    kinds = {flag: kind for kind, flag in re.findall(r"flags\.DEFINE_(\w+)\(\s*\"(\w+)\"", source)}
    if "--" in words:  # options of another benchmark
        check_benchmark("benchmarks.train_step", words[words.index("--") + 1 :])
        words = words[: words.index("--")]
    for word in words:
        flag, equals, value = word.removeprefix("--").partition("=")
        assert word.startswith("--") and equals and flag in kinds, f"{name} has no {word}"
        if kinds[flag] in ("integer", "float"):
            assert isinstance(ast.literal_eval(value), int if kinds[flag] == "integer" else int | float)


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert [word for word in words if "=" not in word] and all(word in targets for word in words if "=" not in word)


def check(words: list[str]) -> None:
    """Fails for a command that is invalid or of an unknown kind."""
    match words:
        case ["python", "launch.py", *rest]:
            check_launch(rest)
        case ["python", "-m", name, *rest] if name.startswith("benchmarks."):
            check_benchmark(name, rest)
        case ["python", "-m", name, *rest]:
            check_module(name, rest)
        case ["make", *rest]:
            check_make(rest)
        case ["pip", "install", "-r", name]:
            assert (ROOT / name).is_file(), name
        case ["srun", *rest]:
            check(rest[rest.index("python") :])
        case ["gcloud", *rest]:
            inside = next(word for word in rest if word.startswith("--command=")).removeprefix("--command=")
            check(shlex.split(inside.replace(".venv/bin/", "").partition(" && ")[2]))
        case ["source", ".venv/bin/activate"]:
            pass
        case _:
            pytest.fail(f"unknown kind of command: {shlex.join(words)}")


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_command_lines_of_the_page_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # One script for the whole page, because later blocks use variables of earlier ones.
    script = "".join(block.text for block in blocks(page) if block.language == "bash")
    commands = words_of(script, tmp_path)
    commands += [words for text in inline_commands(page) for words in words_of(text, tmp_path)]
    for words in commands:
        check(words)


def test_invalid_commands_fail_the_check(tmp_path):
    for text in (
        "python launch.py --config=experiments/mnist_va.py",
        "python launch.py --config=experiments/mnist_vae.py --config.train.epocs=3",
        "python launch.py --config=experiments/mnist_vae.py:prior=vamb",
        "python launch.py --config=experiments/mnist_vae.py --sweep='sed=0,1'",
        "python launch.py --config=experiments/quickstart.py --config.eval.method=prune",
        "python -m exvae.tables runs/x --markdwn",
        "python -m benchmarks.scale --plots=x.png",
        "make quickstrat",
        "for i in 1; do pithon launch.py; done",
    ):
        (words,) = words_of(text, tmp_path)
        with pytest.raises((ValueError, SystemExit, AssertionError, pytest.fail.Exception)):
            check(words)


def test_every_block_runs_or_has_a_comment():
    languages = {"bash", "python", "bibtex", "text"}
    for block in (block for page in PAGES for block in blocks(page)):
        where = f"{id_of(block.page)}: {block.text[:60]}"
        assert block.language in languages, where
        kind, _, rest = block.mark.partition(": " if block.mark.startswith("too long") else " by ")
        if kind == "tested":
            for name in rest.split(", "):
                path, _, test = name.partition("::")
                assert f"def {test}(" in (ROOT / path).read_text(), f"{where}: there is no {name}"
        elif kind == "too long":
            assert rest, where
        else:
            assert block.mark == "", f"{where}: unknown comment {block.mark}"
            assert block.language != "bash" or block.page.name == "tasks.md", f"{where}: no test runs it"


@pytest.fixture
def clone(trained, tmp_path, monkeypatch):
    """A reader's working folder: the experiments, and the tiny run in place of the quickstart."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    shutil.copytree(trained[1], tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_of_the_pages_runs_when_pasted(clone):
    results = []  # tests/test_extending.py runs those of extending.md
    pages = [page for page in PAGES if page.name != "extending.md"]
    for block in (block for page in pages for block in blocks(page) if block.language == "python"):
        results.append({})
        exec(compile(block.text, id_of(block.page), "exec"), results[-1])
    readme, python, _, loop = results
    assert readme["new"].shape == (16, 28, 28, 1) and len(readme["other"].exemplars) == 16
    assert python["new"].shape == python["back"].shape == (16, 28, 28, 1)
    assert python["path"].shape == (8, 10, 28, 28, 1) and python["more"].shape == (16, 4, 28, 28, 1)
    assert python["why"].responsibility.shape == (16, 5) and python["nats"].shape == (16,)
    assert len(loop["x"]) == len(loop["y"]) == 100


def test_commands_without_a_mark_run(clone, tiny_flags, capsys):
    """Commands run on the tiny run, with its config fields added."""
    text = "".join(
        block.text for page in PAGES for block in blocks(page) if block.language == "bash" and not block.mark
    )
    # A label of the tiny data, which may not contain the label 3 of the page.
    label = int(exvae.load("runs/quickstart").exemplars.labels[0])
    text = re.sub(r"(generate\.label=)\d+", rf"\g<1>{label}", text)
    commands = words_of(text, clone)
    assert len(commands) > 5
    for words in commands:
        match words:
            case ["python", "launch.py", *rest]:
                with command_line([*rest[:1], *tiny_flags, *rest[1:]]):
                    workdir = Path(launch.WORKDIR.value)
                    launch.perform(launch.TASK.value, launch.CONFIG.value, workdir, launch.OUT.value)
            case ["python", "-m", name, *rest]:
                with pytest.raises(SystemExit, match="^0$"):
                    run_module(name, rest)
            case _:
                pytest.fail(f"unknown kind of command: {shlex.join(words)}")
    figures = {path.name for path in (clone / "runs" / "quickstart" / "figures").iterdir()}
    assert figures >= {"random.png", "plates.png", "interpolation.png", "grid.png", "crossover.png", "chain_noise.png"}
    assert (clone / "table.md").is_file() and len(list((clone / "runs/quickstart/new_images").iterdir())) == 100


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        slug = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        assert "--" not in slug and slug.isascii(), f"{id_of(page)}: GitHub and the site name {heading!r} differently"
        found.add(slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_and_pictures_of_the_page_exist(page):
    for target in LINK.findall(re.sub(r"<!--.*?-->|^```.*?^```$", "", page.read_text(), flags=re.M | re.S)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{id_of(page)}: {target} does not exist"
        assert not anchor or anchor in slugs(file), f"{id_of(page)}: {target}: {file.name} has no such heading"
        if page.parent.name == "docs":
            assert file.is_relative_to(ROOT / "docs"), f"{id_of(page)}: {target} is not on the site"


def test_every_page_and_picture_is_used():
    text = "".join(page.read_text() for page in PAGES)
    for picture in (path for path in (ROOT / "docs").iterdir() if path.suffix in (".png", ".jpg")):
        assert picture.name in text, f"{picture.name} is on no page"
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert str(page.relative_to(ROOT / "docs")) in navigation, f"{id_of(page)} is not in mkdocs.yml"


def markers_in_code() -> collections.Counter[tuple[str, str]]:
    """(paper or authors' code, file) -> comments that begin with `Differs from the`."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in [*(ROOT / "exvae").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        name = str(path.relative_to(ROOT)).removeprefix("exvae/")
        found.update((whose, name) for whose in re.findall(r"Differs from (?:the )?([^:]*):", path.read_text()))
    return found


def markers_on_page(text: str) -> collections.Counter[tuple[str, str]]:
    """(paper or authors' code, file) -> rows of docs/differences.md that name the file in their last column."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for section in re.split(r"^## ", text, flags=re.M):
        whose = section.partition("\n")[0].removeprefix("From the ")
        for row in re.findall(r"^\|.*\|$", section, re.M)[2:]:  # without the header
            names = re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[-2])
            assert names, f"no file in the last column: {row}"
            found.update((whose, name) for name in names)
    return found


def test_differences_of_the_page_are_those_marked_in_the_code():
    code, page = markers_in_code(), markers_on_page((ROOT / "docs" / "differences.md").read_text())
    assert len(page) > 20
    assert code == page, f"only in the code: {dict(code - page)}; only on the page: {dict(page - code)}"


def test_tree_of_the_code_equals_the_folder():
    text = next(block.text for block in blocks(ROOT / "docs" / "how-it-works.md") if "\nexvae/\n" in block.text)
    named = set(re.findall(r"^  (\w[\w./]*)", text, re.M))
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "exvae").iterdir() if not path.name.startswith("__")}
    assert named == there


def load_generator(name="make_configuration"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", list(sys.path)):
        spec.loader.exec_module(module)
    return module


def test_benchmark_tables_are_made_from_the_results():
    generator = load_generator("make_benchmarks")
    page = generator.PAGE.read_text()
    assert page == generator.page(), "run python docs/make_benchmarks.py"
    assert all(f"<!-- {name} -->" in page for name in generator.TABLES)


def test_configuration_page_is_generated_from_the_config():
    generator = load_generator()
    assert generator.PAGE.read_text() == generator.page(), "run python docs/make_configuration.py"
    fields = {field.name: field for field in generator.read_fields()}
    defaults = configs.flat(configs.get_config())
    assert fields.keys() == defaults.keys()
    assert all(fields[name].comment or name in generator.NOTES for name in fields), "a field has no comment and no note"
    assert {name: ast.literal_eval(field.default) for name, field in fields.items()} == defaults
    assert generator.NOTES.keys() <= fields.keys() and generator.GROUPS.keys() <= set(configs.get_config())


def test_configuration_page_has_the_rules_of_validate():
    generator = load_generator()
    assert generator.allowed("optim.estimator", "plain") == "`plain`, `stl`"
    assert generator.allowed("train.epochs", 2000) == "integer, at least 1"
    assert generator.allowed("optim.ema", 0.0) == "number, at least 0 and less than 1"
    assert generator.allowed("augment.label_smoothing", 0.1) == "number, at least 0, less than 1"
    assert generator.allowed("augment.lambdas", (1.0, 0.4)) == "numbers in 0..1"
    assert generator.allowed("data.dir", "") == ""
