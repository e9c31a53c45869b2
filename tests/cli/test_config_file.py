"""`--config`: the file fills in flags, flags win, mistakes are named with their place."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from kvcourier.cli.config_file import ConfigFile
from kvcourier.config import TransferMode

seen: dict[str, Any] = {}
app = typer.Typer(rich_markup_mode=None)


@app.command()
def serve(
    model: str,
    num_blocks: int = 10,
    lease: float = 30.0,
    mode: TransferMode = TransferMode.PULL,
    modes: str = "pull",
    prefix_caching: bool = True,
    backend: Annotated[list[str] | None, typer.Option()] = None,
    wanted: Annotated[str, typer.Option()] = "",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    config: ConfigFile = None,
) -> None:
    seen.clear()
    seen.update({name: value for name, value in locals().items() if name != "config"})


@app.command()
def other() -> None:
    pass


def run(tmp_path: Path, content: str | bytes, *flags: str) -> Any:
    path = tmp_path / "settings.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    seen.clear()
    return CliRunner().invoke(app, ["serve", "m", "--config", str(path), *flags])


FULL = """
[serve]
num-blocks = 20
lease = 4.5
mode = "push"
modes = ["pull", "push"]
prefix-caching = false
backend = ["UCX", "LIBFABRIC"]
json = "out.json"

[other]
"""


def test_the_file_sets_every_kind_of_flag(tmp_path: Path) -> None:
    assert run(tmp_path, FULL).exit_code == 0
    assert seen == {
        "model": "m",
        "num_blocks": 20,
        "lease": 4.5,
        "mode": TransferMode.PUSH,
        "modes": "pull,push",
        "prefix_caching": False,
        "backend": ["UCX", "LIBFABRIC"],
        "wanted": "",
        "json_file": Path("out.json"),
    }


def test_flags_win(tmp_path: Path) -> None:
    flags = ("--num-blocks", "30", "--mode", "pull", "--prefix-caching", "--backend", "OBJ")
    assert run(tmp_path, FULL, *flags).exit_code == 0
    assert (seen["num_blocks"], seen["mode"]) == (30, TransferMode.PULL)
    assert (seen["prefix_caching"], seen["backend"]) == (True, ["OBJ"])
    assert seen["lease"] == 4.5


def test_the_order_of_flags_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(FULL)
    arguments = ["serve", "--num-blocks", "30", "m", "--config", str(path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (seen["num_blocks"], seen["lease"]) == (30, 4.5)


def test_underscores_are_fine(tmp_path: Path) -> None:
    assert run(tmp_path, "[serve]\nnum_blocks = 7").exit_code == 0
    assert seen["num_blocks"] == 7


def test_one_value_for_a_repeatable_flag(tmp_path: Path) -> None:
    assert run(tmp_path, '[serve]\nbackend = "UCX"').exit_code == 0
    assert seen["backend"] == ["UCX"]


@pytest.mark.parametrize("content", ["", "[other]"])
def test_a_file_without_our_table_changes_nothing(tmp_path: Path, content: str) -> None:
    assert run(tmp_path, content).exit_code == 0
    assert seen["num_blocks"] == 10


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[serve]\nnum-block = 1", "did you mean 'num-blocks'?"),
        ("[serve]\nxyzzy = 1", "expected one of"),
        ("[serve]\nmode = 'shove'", "[serve] mode"),
        ("[serve]\nnum-blocks = true", "[serve] num-blocks"),
        ("[serve]\nnum-blocks = 1.5", "[serve] num-blocks"),
        ("[serve]\nnum-blocks = [1, 2]", "[serve] num-blocks"),
        ("[serve]\nprefix-caching = 'no'", "expected true or false, found 'no'"),
        ("[serve]\nprefix-caching = 0", "expected true or false, found 0"),
        ("[serve.mode]\nx = 1", "expected a value, found a table"),
        ("[serve]\nconfig = 'again.toml'", "config is no setting"),
        ("num-blocks = 1", "expected only tables named after commands"),
        ("[server]", "[other], [serve]), found 'server'"),
        ("serve = 3", "found 'serve'"),
        ("[serve", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    result = run(tmp_path, content)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert "settings.toml" in result.stderr
    assert seen == {}


def test_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--config", str(tmp_path / "no.toml")])
    assert result.exit_code == 2
    assert "cannot read" in result.stderr


def test_commands_of_a_group_have_tables_of_their_own(tmp_path: Path) -> None:
    group, inner = typer.Typer(rich_markup_mode=None), typer.Typer(rich_markup_mode=None)

    @inner.command("fast")
    def fast(laps: int = 1, config: ConfigFile = None) -> None:
        seen.update(laps=laps)

    @group.command("plain")
    def plain(config: ConfigFile = None) -> None:
        seen.update(plain=True)

    group.add_typer(inner, name="race")
    path = tmp_path / "settings.toml"

    def run_group(content: str, *arguments: str) -> Any:
        path.write_text(content)
        seen.clear()
        return CliRunner().invoke(group, [*arguments, "--config", str(path)])

    assert run_group("[race.fast]\nlaps = 3\n[plain]\n", "race", "fast").exit_code == 0
    assert seen == {"laps": 3}
    assert run_group("[race.fast]\nlaps = 3\n[plain]\n", "plain").exit_code == 0
    for content, found in (("[race.slow]\n", "race.slow"), ("[race]\nlaps = 3\n", "race.laps")):
        refused = run_group(content, "race", "fast")
        assert refused.exit_code == 2
        assert f"found '{found}'" in refused.output
        assert "[plain], [race.fast]" in refused.output
