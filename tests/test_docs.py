"""What the pages say exists, exists; what exists and must be documented, is."""

import ast
import dataclasses
import inspect
import json
import pkgutil
import re
import runpy
import textwrap
from pathlib import Path

import msgspec
import pytest

import kvcourier
from kvcourier import config
from kvcourier.config import CourierConfig, EndpointConfig, Limits, Timing
from kvcourier.core import handshake, inquiry, messages, params
from kvcourier.doctor.checks import CHECKS
from kvcourier.tracing.otel import VARIABLES

ROOT = Path(__file__).parents[1]
SOURCE = Path(kvcourier.__file__).parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
ARCHITECTURE = DOCS / "architecture.md"
PROTOCOL = DOCS / "protocol.md"
CONFIGURATION = DOCS / "configuration.md"
GLOSSARY = DOCS / "glossary.md"
PARITY = DOCS / "parity.md"
SETTINGS = (EndpointConfig, Timing, Limits, CourierConfig)
PACKAGES = sorted(
    name for _, name, is_package in pkgutil.walk_packages([str(SOURCE)]) if is_package
)

# The words of the project: what a reader of code or pages may have to look up.
TERMS = (
    *("prefill instance, P", "decode instance, D", "instance", "engine id", "incarnation"),
    *("rank", "agent", "agent metadata", "KV cache", "block", "kernel block", "slot", "region"),
    *("descriptor", "descriptor list", "layout", "replicated KV", "heterogeneous TP"),
    *("block size ratio", "mapping plan", "side channel", "handshake", "compatibility verdict"),
    *("registration", "finished blocks", "rendezvous", "transfer id", "push, pull"),
    *("initiator, target agent", "post", "handle", "notification", "lease", "heartbeat"),
    *("expired", "quiesced", "quarantined, quarantine", "kv_transfer_params"),
    *("KV load failure policy", "router", "xPyD", "TTFT, ITL, TPOT", "goodput"),
    *("hold", "want", "delivery", "link", "story", "courier", "wanter", "holder", "route"),
    *("unit", "span"),
)


def code_in(text: str) -> set[str]:
    """Everything between backticks on one line."""
    return set(re.findall(r"`([^`\n]+)`", text))


def section(page: Path, heading: str) -> str:
    """The text of one `## heading`, up to the next of its level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert found, f"{page.name}: expected a section {heading!r}"
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    """Cells of every body row of the tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not set("".join(row)) <= set("- :")]


def struct_fields(module: object) -> dict[str, tuple[str, ...]]:
    """Public wire types that a module declares itself, with their fields."""
    return {
        name: each.__struct_fields__
        for name, each in vars(module).items()
        if inspect.isclass(each)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == module.__name__
        and not name.startswith("_")
    }


def package_docstring(name: str) -> str:
    """A package's docstring, read and not imported: the vLLM connector needs vLLM."""
    source = SOURCE.joinpath(*name.split(".")[1:], "__init__.py")
    return ast.get_docstring(ast.parse(source.read_text())) or ""


def literal_strings(function: object) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def keys_read() -> set[str]:
    """First arguments of the calls by which `parse_params` and its helpers read a field."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(params))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            reader, key = ast.unparse(node.func), node.args[0]
            is_read = reader.startswith(("fields.", "self.")) or reader.endswith("params.get")
            if is_read and isinstance(key, ast.Constant):
                found.add(key.value)
    return found


def keys_returned() -> set[str]:
    """Keys that holders' answers have, in a dictionary or one by one."""
    sources = map(inspect.getsource, (params.handoff_params, params.history_params))
    tree = ast.parse("\n".join(sources))
    return {
        ast.literal_eval(key)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if key is not None
    } | {
        ast.literal_eval(node.slice)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }


# Links and names of files.


def anchor(heading: str) -> str:
    """The fragment by which GitHub finds a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {anchor(each) for each in re.findall(r"^#+ (.+)$", prose, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in headings(linked), f"{page.name} links to {target}: no such heading"


def test_there_are_links_to_check() -> None:
    assert any("](protocol.md#" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_on_a_page_exist(page: Path) -> None:
    names = {
        name
        for name in code_in(page.read_text())
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/([\w-]+\.(py|md|toml))?", name)
    }
    missing = sorted(
        name for name in names if not ((ROOT / name).exists() or (SOURCE / name).exists())
    )
    assert not missing, f"{page.name} names files that are not there: {missing}"


def test_architecture_names_every_package() -> None:
    named = code_in(ARCHITECTURE.read_text())
    missing = [
        path
        for name in PACKAGES
        if (path := f"src/kvcourier/{name.replace('.', '/')}/") not in named
    ]
    assert PACKAGES and not missing, f"give them a line in {ARCHITECTURE.name}: {missing}"


def test_architecture_names_enough_files_to_follow_a_request() -> None:
    life = code_in(section(ARCHITECTURE, "Life of a request"))
    packages = {name.partition("/")[0] for name in life if name.endswith(".py")}
    assert {"router", "engine", "runtime", "core", "layout", "transport"} <= packages


@pytest.mark.parametrize("name", ["kvcourier", *(f"kvcourier.{name}" for name in PACKAGES)])
def test_every_package_says_where_to_start_and_what_moves_together(name: str) -> None:
    text = package_docstring(name)
    assert "Reading path: " in text
    assert "Common changes:" in text


@pytest.mark.parametrize("name", ["kvcourier", *(f"kvcourier.{name}" for name in PACKAGES)])
def test_modules_on_a_reading_path_exist(name: str) -> None:
    text = package_docstring(name)
    folder = SOURCE.joinpath(*name.split(".")[1:])
    path = text.partition("Reading path: ")[2].partition("\n\n")[0]
    for module in code_in(path):
        if re.fullmatch(r"[a-z_]+(\.py)?", module):
            stem = module.removesuffix(".py")
            found = (folder / f"{stem}.py").exists() or (folder / stem).is_dir()
            # A function to begin with may be named beside its module.
            named = any(f"def {stem}(" in each.read_text() for each in folder.glob("*.py"))
            assert found or named, f"{name}: no {module}"


# The protocol.


@pytest.mark.parametrize(
    ("module", "at_least"),
    [(messages, 7), (handshake, 7), (inquiry, 7)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_protocol_names_every_message_and_field(module: object, at_least: int) -> None:
    named = code_in(PROTOCOL.read_text())
    structs = struct_fields(module)
    for base in ("Message", "Question"):  # of which nothing is sent
        structs.pop(base, None)
    if module is handshake:
        # Told in words: the wire form of layout.geometry, which docs/mapping.md explains.
        structs["GroupOffer"] = ()
    assert len(structs) >= at_least
    for name, fields in structs.items():
        assert name in named, f"{PROTOCOL.name}: no {name}"
        assert set(fields) <= named, f"{PROTOCOL.name}: {name}: {sorted(set(fields) - named)}"


def test_protocol_has_a_row_for_every_message_of_the_wire() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(section(PROTOCOL, "Messages"))}
    for each in messages.AnyMessage.__args__:
        assert each.__name__ in rows
        own = set(each.__struct_fields__) - {"sender"}
        told = code_in(rows[each.__name__][3])
        assert own <= told, f"{each.__name__}: {sorted(own - told)}"


def test_protocol_knows_every_key_of_kv_transfer_params() -> None:
    keys = keys_read() | keys_returned()
    assert {"do_remote_decode", "remote_block_ids", "remote_incarnation"} <= keys
    rows = {row[0].strip("`") for row in table_rows(section(PROTOCOL, "kv_transfer_params"))}
    rows.discard("key")
    # Whose child a request is tells nothing of its KV.
    assert rows == keys | {"traceparent"}


def shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize(
    ("heading", "settings"), [("Deadlines and timers", Timing), ("Limits", Limits)]
)
def test_protocol_tells_each_setting_and_its_default(heading: str, settings: type) -> None:
    rows = {row[0].strip("`"): row[1] for row in table_rows(section(PROTOCOL, heading))}
    assert rows.pop("name") == "default"
    assert rows == {each.name: shown(each.default) for each in dataclasses.fields(settings)}


def test_protocol_tells_the_present_version() -> None:
    versions = [row[0] for row in table_rows(section(PROTOCOL, "Version history"))][1:]
    assert versions[-1] == str(messages.PROTOCOL_VERSION)


# Settings.


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_configuration_names_every_field(settings: type) -> None:
    page = CONFIGURATION.read_text()
    name = settings.__name__
    table = page.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0]
    rows = [row[0].strip("`") for row in table_rows(table)]
    assert rows == ["field", *(each.name for each in dataclasses.fields(settings))]
    assert all(row[2] for row in table_rows(table)), f"{name}: a field without a meaning"


@pytest.mark.slow
def test_configuration_is_what_the_code_says() -> None:
    filled = runpy.run_path(str(DOCS / "tables.py"))["filled"]
    page = CONFIGURATION.read_text()
    assert page == filled(page), "run `python docs/tables.py`"


def test_configuration_names_every_environment_variable() -> None:
    rows = {
        row[0].strip("`") for row in table_rows(section(CONFIGURATION, "Environment variables"))
    }
    honoured = {config.SIDE_CHANNEL_HOST_VARIABLE, config.SIDE_CHANNEL_PORT_VARIABLE}
    assert rows == honoured | set(VARIABLES) | {"variable"}


# The doctor.


def test_every_check_of_the_doctor_has_a_row() -> None:
    rows = [row[0].strip("`") for row in table_rows(section(DOCS / "doctor.md", "Checks"))]
    assert rows == ["check", *(check.name for check in CHECKS)]


# Parity with vLLM's connectors.


def parity_rows() -> list[list[str]]:
    """Rows of all tables but the last, which has no column for a verdict."""
    tables = PARITY.read_text().partition("## Only ours")[0]
    return [row for row in table_rows(tables) if row[-1] != "shown by"]


@pytest.mark.parametrize("page", [PARITY, DOCS / "failure-model.md"], ids=lambda page: page.stem)
def test_tests_named_on_a_page_exist(page: Path) -> None:
    named = {name for name in code_in(page.read_text()) if "::" in name}
    assert len(named) > 30
    for name in sorted(named):
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), f"{page.name}: no {path}"
        assert f"def {function}(" in (ROOT / path).read_text(), f"{page.name}: no {name}"


def test_parity_has_a_verdict_for_each_row_and_a_test_or_the_word_that_there_is_none() -> None:
    verdicts = {"same", "differs", "lifted", "kept", "missing"}
    assert len(parity_rows()) > 80
    for row in parity_rows():
        _, theirs, ours, verdict, shown_by = row
        assert theirs and ours and verdict in verdicts, row
        assert shown_by == "*none*" or re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", shown_by), row
    missing = [row for row in parity_rows() if row[3] == "lifted" and row[4] == "*none*"]
    assert not missing, f"a limit counts as lifted if a test shows it: {missing}"


def test_parity_knows_every_metric_and_key_that_we_share_with_vllm() -> None:
    source = (SOURCE / "vllm_connector" / "stats.py").read_text()
    shared = set(re.findall(r'"((?:vllm:nixl_|kvcourier:)\w+)"', source))
    assert len(shared) == 28
    keys = {"kv_lease_duration", "push_registration_timeout", "kv_recompute_threshold"}
    assert shared | keys <= {row[0].strip("`") for row in parity_rows()}


# Measurements.


def test_benchmark_tables_are_what_was_measured() -> None:
    filled = runpy.run_path(str(ROOT / "benchmarks" / "gpu" / "pair_table.py"))["filled"]
    page = (DOCS / "benchmarks.md").read_text()
    assert page == filled(page), "run `python benchmarks/gpu/pair_table.py`"
    assert len(table_rows(page)) > 60


def test_packed_figures_are_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "gpu" / "results" / "packed.json").read_text())
    told = {row[0]: row[1] for row in table_rows(section(DOCS / "packed.md", "What it gains"))}
    best = min(measured["all_ms"]["packed"])
    assert told["direct, 1 UCX thread"] == f"{measured['direct_1thread_ms']:.1f}"
    assert told["direct, 4 UCX threads"] == f"{measured['direct_4threads_ms']:.1f}"
    assert told["packed"] == f"{measured['packed_ms']:.1f} (best {best:.1f})"


@pytest.mark.parametrize(
    ("script", "results"),
    [
        ("turns.py", "results/turns.json"),
        ("gpu/vllm_turns.py", "gpu/results/vllm-turns-one-gpu.json"),
    ],
)
def test_figures_of_turns_are_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, script: str, results: str
) -> None:
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str((folder / script).parent))
    shown = runpy.run_path(str(folder / script))["_row"]
    measured = json.loads((folder / results).read_text())["results"]
    page = (DOCS / "multi-turn.md").read_text().splitlines()
    assert len(measured) > 3
    for result in measured:
        history, mode, *_, ratio = shown(result).strip("| ").split(" | ")
        rows = [line for line in page if line.startswith(f"| {history} | {mode} | ")]
        assert any(row.endswith(f" | {ratio} |") for row in rows), f"{history} {mode}: {ratio}"


# Words.


def test_glossary_has_every_term_once() -> None:
    terms = [row[0] for row in table_rows(GLOSSARY.read_text())]
    for term in TERMS:
        assert terms.count(term) == 1, term
    assert all(row[2] for row in table_rows(GLOSSARY.read_text()))


def test_decisions_are_numbered_and_listed() -> None:
    pages = sorted(page.name for page in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [int(page[:4]) for page in pages] == list(range(1, len(pages) + 1))
    listed = (DOCS / "decisions" / "README.md").read_text()
    for page in pages:
        text = (DOCS / "decisions" / page).read_text()
        assert f"]({page})" in listed
        assert text.startswith(f"# {page[:4]}: ")
        for part in ("**Context.**", "**Choice.**", "**What we gave up.**"):
            assert part in text, f"{page}: no {part}"
