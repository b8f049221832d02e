"""Whose signature an image must have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.errors import BadRequest
from dsec.images.bases import read_table, rule_for
from dsec.images.names import parse
from dsec.images.signatures import Rule

TABLE = """
[bases]
tools = "docker://registry.example/team/tools:1"
[verify]
"*" = {key = "all"}
"docker://Registry.example" = {key = "host"}
"docker://registry.example/team" = {identity = "ci@example", issuer = "https://issuer.example"}
"docker://registry.example/team/tools" = {key = "tools"}
"docker://localhost:5000" = false
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "bases.toml"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("rest", "rule"),
    [
        ("other.example/a:1", Rule(key="all")),
        ("registry.example/a/b", Rule(key="host")),
        ("registry.example/team/tools/more:1", Rule(key="tools")),
        ("registry.example/team/tools:1", Rule(key="tools")),
        ("registry.example/team/other", Rule(identity="ci@example", issuer="https://issuer.example")),
        ("REGISTRY.example:443/team/tools:1", Rule(key="tools")),
        ("registry.example./team/tools", Rule(key="tools")),
        ("registry.example.evil.example/team/tools", Rule(key="all")),
        ("localhost:5000/a", None),
        ("localhost/a", Rule(key="all")),
        ("[::1]:5000/a", Rule(key="all")),
    ],
)
def test_the_narrowest_rule_counts(table: Path, rest: str, rule: Rule | None) -> None:
    assert rule_for(rest, table) == rule


def test_a_table_may_be_a_link_or_absent(table: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(table)
    assert rule_for("a.example/a", tmp_path / "link") == Rule(key="all")
    assert rule_for("a.example/a", tmp_path / "none") is None
    assert list(read_table(table)) == ["tools"]


@pytest.mark.parametrize(
    "text",
    [
        'verify = "x"',
        '[verify]\n"*" = true',
        '[verify]\n"*" = {}',
        '[verify]\n"*" = {key = ""}',
        '[verify]\n"*" = {key = "a\\nb"}',
        '[verify]\n"*" = {key = 5}',
        '[verify]\n"*" = {identity = "x"}',
        '[verify]\n"*" = {key = "x", identity = "y", issuer = "z"}',
        '[verify]\n"tools" = {key = "x"}',
        '[verify]\n"docker://a b" = {key = "x"}',
        "[other]\n",
        "\udcff",
    ],
)
def test_a_wrong_table_is_no_permission(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bases.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadRequest) as caught:
        rule_for("a.example/a", path)
    assert caught.value.hint


def test_a_directory_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(BadRequest):
        rule_for("a.example/a", tmp_path)


HUB_TABLE = """
[verify]
"*" = false
"docker://docker.io" = {key = "hub"}
"docker://index.docker.io/library/nginx" = {key = "nginx"}
"docker://docker.io/redis" = {key = "redis"}
"docker://team/tools" = {key = "tools"}
"""


@pytest.mark.parametrize(
    ("name", "meant", "key"),
    [
        ("docker.io/library/nginx:1", "docker.io/library/nginx:1", "nginx"),
        ("docker.io/nginx:1", "docker.io/library/nginx:1", "nginx"),
        ("index.docker.io/nginx", "docker.io/library/nginx", "nginx"),
        ("index.docker.io/library/nginx", "docker.io/library/nginx", "nginx"),
        ("library/nginx", "docker.io/library/nginx", "nginx"),
        ("DOCKER.IO/nginx", "DOCKER.IO/nginx", "nginx"),
        ("registry-1.docker.io/library/nginx", "registry-1.docker.io/library/nginx", "nginx"),
        ("docker.io:443/library/nginx", "docker.io:443/library/nginx", "nginx"),
        ("docker.io./library/nginx", "docker.io./library/nginx", "nginx"),
        ("docker.io/redis", "docker.io/library/redis", "redis"),
        ("docker.io/redis/tools", "docker.io/redis/tools", "redis"),
        ("docker.io/team/tools", "docker.io/team/tools", "tools"),
        ("team/tools:1", "docker.io/team/tools:1", "tools"),
        ("docker.io/other/nginx", "docker.io/other/nginx", "hub"),
        ("localhost/nginx", "localhost/nginx", ""),
        ("docker.io.example/library/nginx", "docker.io.example/library/nginx", ""),
    ],
)
def test_every_spelling_of_docker_hub_has_its_rule(tmp_path: Path, name: str, meant: str, key: str) -> None:
    path = tmp_path / "bases.toml"
    path.write_text(HUB_TABLE)
    rest = parse(f"docker://{name}").rest
    assert rest == meant
    assert rule_for(rest, path) == (Rule(key=key) if key else None)


def test_two_rules_for_one_thing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bases.toml"
    path.write_text('[verify]\n"docker://docker.io" = {key = "a"}\n"docker://index.docker.io" = false\n')
    with pytest.raises(BadRequest, match="mean the same"):
        rule_for("docker.io/library/nginx", path)


def test_a_key_that_is_replaced_is_another_one(tmp_path: Path) -> None:
    rule = Rule(key=str(tmp_path / "team.pub"))
    absent = rule.words
    (tmp_path / "team.pub").write_text("one")
    first = rule.words
    (tmp_path / "team.pub").write_text("two")
    assert len({absent, first, rule.words}) == 3
    (tmp_path / "team.pub").write_text("one")
    assert rule.words == first
    assert Rule(key="kms://x").words == "--key=kms://x"
