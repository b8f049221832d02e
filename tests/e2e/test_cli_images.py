"""`dsec image`, and what somebody sees whose stores are damaged, full of strangers, or not to be written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.testing.serving import stop_server_of

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(180)]

DSEC = str(Path(sys.executable).with_name("dsec"))
PATIENCE = 60.0
DOCUMENT = 'version: "1"\nname: plain\nruntime: {base: system}\n'


class Cli:
    """Runs `dsec` with a home of its own, whose store has the base already."""

    def __init__(self, home: Path, stored: Path) -> None:
        self.home = home
        self.store = home / "store"
        self.env = {**os.environ, "DSEC_HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        for part in ("images", "names"):
            (self.store / part).mkdir(mode=0o700, parents=True)
            for path in (stored / part).iterdir():
                if part == "images" or path.name == "system":
                    os.link(path, self.store / part / path.name)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [DSEC, *arguments], env=self.env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def ok(self, *arguments: str) -> str:
        done = self(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    def refused(self, code: int, *arguments: str) -> str:
        """What it says, with a hint and no traceback."""
        done = self(*arguments)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr
        assert "internal error" not in done.stderr
        return done.stderr

    def read_only(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """With the store mounted read-only."""
        store = shlex.quote(str(self.store))
        script = (
            f"mount --bind {store} {store} && mount -o remount,ro,bind {store} && ! touch {store}/x 2>/dev/null"
            f" && exec {shlex.join([DSEC, *arguments])}"
        )
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture
def cli(tmp_path: Path, image_store: Path) -> Cli:
    (tmp_path / "plain.yaml").write_text(DOCUMENT)
    return Cli(tmp_path / "home", image_store)


def test_images_from_first_to_last(cli: Cli, tmp_path: Path) -> None:
    digest = json.loads(cli.ok("image", "get", "system", "--json"))["digest"]
    (system,) = json.loads(cli.ok("image", "ls", "--json"))
    assert (system["digest"], system["names"], system["held_by"]) == (digest, ["system"], [])
    assert digest in cli.ok("image", "ls")
    assert cli.ok("image", "verify") == f"{digest} is sound\n"
    built = cli.ok("template", "build", str(tmp_path / "plain.yaml")).strip()
    said = cli.refused(5, "image", "rm", "system")
    assert f"template-{built.removeprefix('sha256:')}" in said
    cli.ok("image", "gc", "--budget", "0")
    assert digest in cli.ok("image", "ls")  # held
    cli.ok("template", "rm", "plain")
    cli.ok("image", "rm", digest)
    assert json.loads(cli.ok("image", "ls", "--json")) == []
    assert "image ls" in cli.refused(4, "image", "rm", digest)
    assert "--budget" in cli.refused(2, "image", "gc", "--budget", "much")


def test_a_budget_takes_what_was_not_asked_for_lately(cli: Cli) -> None:
    (erofs,) = (cli.store / "images").glob("*.erofs")
    used = erofs.with_suffix(".used")
    used.unlink()  # a link of the one that others have
    used.touch()
    assert "nothing to remove" in cli.ok("gc", "--budget", "1M")
    os.utime(used, (0, 0))
    assert str(erofs) in cli.ok("gc", "--budget", "1M")
    assert not erofs.exists()


def test_steps_are_told_when_asked_for(cli: Cli) -> None:
    told = cli("--verbose", "image", "get", "host")
    assert told.returncode == 0
    assert "dsec: making the skeleton\n" in told.stderr
    assert cli("image", "refresh", "host").stderr == ""
    assert cli("--verbose", "image", "refresh", "host", "--json").stderr == ""


def test_a_store_that_is_mounted_read_only(cli: Cli, tmp_path: Path) -> None:
    cli.ok("template", "build", str(tmp_path / "plain.yaml"))
    done = cli.read_only("run", "-t", "plain", "--", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    assert "plain" in cli.read_only("template", "ls").stdout
    assert "system" in cli.read_only("image", "ls").stdout
    stop_server_of(cli.home)  # the next one is started where the store cannot be written to
    for words in (
        ("template", "tag", "plain", "v2"),
        ("image", "get", "host"),
        ("image", "gc"),
        ("image", "rm", "system"),
    ):
        refused = cli.read_only(*words)
        assert refused.returncode in (5, 77), (words, refused.stderr)
        assert "hint: " in refused.stderr
        assert "Traceback" not in refused.stderr


def test_what_somebody_else_put_into_the_stores(cli: Cli, tmp_path: Path) -> None:
    cli.ok("template", "build", str(tmp_path / "plain.yaml"))
    tag = cli.store / "templates/tags/plain/latest"
    tag.write_bytes(b"\xff\xfe")
    for words in (("run", "-t", "plain", "--", "true"), ("template", "ls"), ("template", "show", "plain")):
        assert str(tag) in cli.refused(1, *words)
    cli.ok("template", "build", str(tmp_path / "plain.yaml"))
    assert cli.ok("run", "-t", "plain", "--", "echo", "hi") == "hi\n"  # whole again
    replaced: list[tuple[Path, tuple[str, ...]]] = [
        (cli.store / "names/system", ("run", "--", "true")),
        (cli.store / "names/system", ("image", "ls")),
        (cli.store / "lock", ("image", "gc")),
        (cli.store / "templates/lock", ("template", "tag", "plain", "v2")),
    ]
    for path, act in replaced:
        path.touch()
        aside = path.with_name(f".{path.name}.aside")
        path.rename(aside)
        path.mkdir()
        assert str(path) in cli.refused(1, *act)
        path.rmdir()
        aside.rename(path)
    assert cli.ok("run", "-t", "plain", "--", "echo", "hi") == "hi\n"


def test_doctor_tells_which_bases_there_are(cli: Cli) -> None:
    found = {each["name"]: each for each in json.loads(cli("doctor", "--json").stdout)["layers"]}
    assert {"base system", "base host", "base debian:SUITE", "base docker://", "image signatures"} <= set(
        found
    )
    table = cli.home / "config/dsec/bases.toml"
    table.parent.mkdir(parents=True)
    table.write_text('[verify]\n"*" = {key = "/etc/team.pub"}\n')
    cli.env["PATH"] = str(cli.home)  # nothing is installed there
    found = {each["name"]: each for each in json.loads(cli("doctor", "--json").stdout)["layers"]}
    asked = found["image signatures"]
    assert asked["status"] in ("active", "unavailable")  # cosign may be in a usual place
    assert str(table) in asked["detail"]
