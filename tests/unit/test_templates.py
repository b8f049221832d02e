"""Templates as values: checks, the canonical form and its digest, what floats, and what nothing enforces."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.errors import BadRequest
from dsec.model.sandbox import Level, Limits, Volume
from dsec.model.template import (
    PROFILES,
    Isolation,
    Memory,
    MemoryType,
    Network,
    Profile,
    Resources,
    Runtime,
    SharedVolumes,
    Strategy,
    Template,
    Tools,
)
from dsec.templates.document import parse, read
from dsec.templates.dump import canonical, canonical_json, digest, leaves, to_yaml
from dsec.templates.enforcement import STANDINGS, unenforced
from dsec.templates.faults import NOWHERE, Place
from dsec.templates.restore import restore
from dsec.templates.versions import floating

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "react-agent-python.yaml"
PLAIN: Final = Template(name="a", version="1")


def many(items: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(items, max_size=4).map(tuple)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
STORE = st.sampled_from(["", "redis://internal:6379/0", "postgres://user@[::1]:5432/x?y=%20#z"])
NAMES = st.from_regex(r"[a-z0-9]{1,8}([._-][a-z0-9]{1,8})?", fullmatch=True)
RUNTIMES = st.builds(
    Runtime,
    base=st.sampled_from(
        ["system", "host", "debian:bookworm", "localhost:5000/a/b:1.0", f"a@sha256:{'0' * 64}"]
    ),
    level=st.sampled_from(Level),
    dependencies=many(
        st.sampled_from(["a", "a>=1,<2", 'b[x]==1.0; sys_platform == "linux"', "c @ https://h/c"])
    ),
    packages=many(st.sampled_from(["git", "libc6=2.36-9+deb12u7"])),
    setup=many(TEXT.filter(str.strip)),
    env=st.dictionaries(TEXT.filter(lambda text: text != "" and "=" not in text), TEXT, max_size=4),
    user=st.sampled_from(["user", "root"]),
    workdir=st.sampled_from(["/", "/workspace", "/home/user/ü"]).filter(lambda path: path != "/"),
)
STRATEGIES = st.builds(
    Strategy,
    model=st.sampled_from(["", "gpt-4o-mini", "provider/model:1"]),
    max_steps=st.integers(1, 1_000_000),
    max_seconds=st.floats(min_value=0, max_value=3e8, exclude_min=True) | st.integers(1, 10**8),
    max_cost_usd=st.floats(min_value=0, max_value=1e6),
    timezone=st.sampled_from(["UTC", "Asia/Shanghai", "America/Argentina/Buenos_Aires", "Etc/GMT+5"]),
)
MEMORIES = st.just(Memory()) | st.builds(
    Memory, type=st.just(MemoryType.LAYERED), short_term=STORE, long_term=STORE
)
SHOWN = [Volume(Path("/srv") / name, f"/data/{name}", read_only=name == "a") for name in ("a", "b c", "ü")]
NAMED = [Volume.named(name, f"/named/{name}", read_only=name == "a") for name in ("a", "b-1.x")]
VOLUMES = st.lists(st.sampled_from([*SHOWN, *NAMED]), unique=True).map(tuple)
TEMPLATES = st.builds(
    Template,
    name=NAMES,
    version=st.sampled_from(["1.0", "1.10", "1e3", "0x1", "2024-01-01", "1.0.0-rc.1+b", "yes", "null"]),
    runtime=RUNTIMES,
    tools=st.builds(Tools, allowed=many(st.sampled_from(["code_executor", "no", "1.5", "mcp/file.read"]))),
    memory=MEMORIES,
    strategy=STRATEGIES,
    resources=st.builds(Resources.of, st.sampled_from(Profile), memory_mib=st.integers(8, 10**6)),
    volumes=VOLUMES,
    network=st.builds(
        Network, allow=many(st.sampled_from(["pypi.org", "*.a.b:443", "192.0.2.1", "[::1]:80"]))
    ),
    isolation=st.builds(Isolation, volumes=st.just(SharedVolumes.SHARED), scratch_exec=st.booleans()),
    skills=many(NAMES),
)


@settings(max_examples=40)
@given(TEMPLATES)
def test_a_template_survives_being_written_and_read(template: Template) -> None:
    again = parse(to_yaml(template)).template
    assert again == template
    assert digest(again) == digest(template)
    assert to_yaml(again) == to_yaml(template)


def test_volumes_have_the_form_that_they_always_had() -> None:
    """The digests of templates that were built earlier are over it."""
    template = Template(
        name="a",
        version="1",
        volumes=(Volume(Path("/srv"), "/a", read_only=True), Volume.named("data", "/b", read_only=True)),
    )
    assert canonical(template)["volumes"] == [
        {"source": "/srv", "target": "/a", "read_only": True},
        {"name": "data", "target": "/b", "read_only": True},
    ]
    only = replace(template, volumes=template.volumes[:1])
    assert digest(only) == "sha256:f4e5cb040d9c6bc564b3e0ba07cf601ceb436adb6fa9ee0f19346e12412bf02e"


@settings(max_examples=40)
@given(TEMPLATES)
def test_a_template_survives_being_kept_as_json(template: Template) -> None:
    assert restore(json.loads(canonical_json(template))) == template
    assert restore(json.loads(json.dumps(canonical(template)))) == template


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"name": "A"},
        {"unknown": 1},
        {"runtime": []},
        {"runtime": {"base": 1}},
        {"runtime": {"dependencies": "a"}},
        {"runtime": {"level": "none"}},
        {"resources": {"profile": "chat", "memory": 1}},
        {"resources": {}},
        {"volumes": [{"source": "/a"}]},
        {"volumes": [1]},
        {"isolation": {"workdir": "kept"}},
    ],
)
def test_what_is_no_canonical_form_is_not_restored(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        restore({**canonical(PLAIN), **change})
    assert caught.value.hint


def test_a_form_from_before_a_field_was_added_has_its_default() -> None:
    form = canonical(PLAIN)
    del form["skills"], form["runtime"]["packages"]
    assert restore(form) == PLAIN


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed(item) for key, item in reversed(value.items())}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=40)
@given(TEMPLATES)
def test_the_order_of_fields_and_the_spelling_do_not_count(template: Template) -> None:
    form = _reversed(canonical(template))
    other = yaml.safe_dump(form, sort_keys=False, default_flow_style=True, default_style=None)
    assert digest(parse("# a comment\n" + other).template) == digest(template)


@settings(max_examples=40)
@given(TEMPLATES, TEMPLATES)
def test_the_digest_tells_templates_apart(one: Template, other: Template) -> None:
    assert (digest(one) == digest(other)) == (one == other)


def test_the_digest_of_the_example_is_what_it_was() -> None:
    """A change here is a change of every blueprint's name: a default, a field or the form is another than before."""
    template = read(EXAMPLE).template
    assert digest(template) == f"sha256:{hashlib.sha256(canonical_json(template)).hexdigest()}"
    assert digest(template) == "sha256:8f91758b7304e4912a085cec0771f7c89c42aa4b0182dc752253183363bbbd0f"


def test_the_order_of_items_counts() -> None:
    one = parse("{name: a, version: 1, runtime: {setup: [a, b]}}").template
    assert digest(one) != digest(parse("{name: a, version: 1, runtime: {setup: [b, a]}}").template)


def test_defaults_and_state_isolation_are_written_out() -> None:
    form = canonical(PLAIN)
    assert form["isolation"] == {
        "workdir": "fresh",
        "tmp": "fresh",
        "session_id": "new",
        "volumes": "none",
        "scratch_exec": False,
    }
    assert form["runtime"]["base"] == "system"
    assert form["resources"]["memory_mib"] == Limits().memory_mib
    assert json.loads(canonical_json(PLAIN)) == form
    assert b'"max_seconds":600.0' in canonical_json(
        Template(name="a", version="1", strategy=Strategy(max_seconds=600))
    )


# Values in Python


def test_a_profile_gives_limits_and_each_can_be_overridden() -> None:
    assert Resources.of(Profile.DATA, memory_mib=8192).limits == Limits(
        cpu_millis=4000, memory_mib=8192, pids=512, disk_mib=10_240
    )
    assert Resources.of(Profile.CHAT).limits == Limits(cpu_millis=500, memory_mib=256)
    assert Resources().limits == PROFILES[Profile.DEFAULT] == Limits()
    assert 2000 <= PROFILES[Profile.CODE].cpu_millis <= 4000
    assert 1024 <= PROFILES[Profile.CODE].memory_mib <= 2048
    with pytest.raises(BadRequest, match=r"resources\.memory: there is no such limit"):
        Resources.of(Profile.CHAT, memory=1)


BASES: Final = (
    "system",
    "host",
    "debian:bookworm",
    "python:3.11-slim",
    "a/b:c",
    "h.io/a:1",
    "oci:/srv/image:1",
)
PINNED: Final = tuple(f"{name}@sha256:{'0f' * 32}" for name in (*BASES, "python", "docker://h.io:5000/a/b"))
NO_BASES: Final = (
    "",
    "python",
    "docker://h.io/a",
    "System",
    "a:",
    ":a",
    "a:b:c",
    "a b:c",
    "../a:b",
    "oci:image",
)
NO_PINS: Final = ("a@sha256:0", f"a@md5:{'0' * 64}", "-a:b", "a" * 2000 + ":b")


@pytest.mark.parametrize("base", [*BASES, *PINNED])
def test_names_of_bases(base: str) -> None:
    assert Runtime(base=base).base == base


@pytest.mark.parametrize("base", [*NO_BASES, *NO_PINS], ids=[base[:20] for base in (*NO_BASES, *NO_PINS)])
def test_what_is_no_name_of_a_base(base: str) -> None:
    with pytest.raises(BadRequest, match=r"runtime\.base: .* is not the name of a base") as caught:
        Runtime(base=base)
    assert caught.value.hint


def test_what_the_caller_keeps_does_not_change_a_template() -> None:
    env = {"A": "b"}
    runtime = Runtime(env=env)
    env["A"] = "c"
    assert runtime.env == {"A": "b"}
    with pytest.raises(TypeError):
        runtime.env["A"] = "c"  # type: ignore[index]


WRONG: Final[tuple[Any, ...]] = (
    *(None, True, -1, 10**30, 10**5000, 1.5, math.nan, math.inf, 1j, "", "\0", "\ud800", "x y", "x" * 10**5),
    *(
        b"x",
        Path("x"),
        object(),
        int,
        {1},
        [],
        [1],
        ("\ud800",),
        ("\0",),
        (1,),
        ("x y", None),
        {1: "a"},
        {"": ""},
    ),
    *({"a": "\ud800"}, {"\udc80": "a"}, {"a": 1}, ("a",) * 1001, {str(n): "" for n in range(1001)}),
    (Volume(Path("/a\udc80"), "/a", read_only=True),),
)
VALUES: Final[list[tuple[Callable[..., object], dict[str, Any]]]] = [
    *[(cls, {}) for cls in (Runtime, Tools, Memory, Strategy, Resources, Network, Isolation)],
    (Template, {"name": "a", "version": "1"}),
    (Resources.of, {"profile": Profile.CHAT}),
]


@pytest.mark.parametrize(("value", "given"), VALUES)
def test_any_value_is_taken_or_refused_by_the_name_of_its_field(
    value: Callable[..., object], given: dict[str, Any]
) -> None:
    for name in inspect.signature(value).parameters:
        for wrong in WRONG if name != "limits" or value is Resources else ():
            refused: BadRequest | None = None
            try:
                made = value(**{**given, name: wrong})
            except BadRequest as error:
                refused = error
            else:
                if isinstance(made, Template):
                    canonical_json(made)
            assert refused is None or name in str(refused.facts["field"])
            assert refused is None or len(str(refused)) < 1000


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("runtime.level: 'container' is not one of process, container", lambda: Runtime(level="container")),  # type: ignore[arg-type]
        ("runtime.dependencies: ['a'] is not a tuple", lambda: Runtime(dependencies=["a"])),  # type: ignore[arg-type]
        ("name: 'A' is not a name", lambda: Template(name="A", version="1")),
        ("runtime: {} is not of type Runtime", lambda: Template(name="a", version="1", runtime={})),  # type: ignore[arg-type]
        (
            "volumes[1]: '/d/e' and the target of volumes[0] lie in one another",
            lambda: Template(
                name="a",
                version="1",
                volumes=tuple(Volume(Path("/a"), target, read_only=True) for target in ("/d", "/d/e")),
            ),
        ),
        (
            "volumes[0]: one run finds in it what another wrote",
            lambda: Template(name="a", version="1", volumes=(Volume(Path("/a"), "/d"),)),
        ),
        ("memory.short_term: there is a store", lambda: Memory(short_term="redis://a")),
    ],
)
def test_what_is_wrong_in_python_says_what_may_be(message: str, make: Callable[[], object]) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)) as caught:
        make()
    assert caught.value.hint or "name" in message


# What floats, and what is only declared


def test_versions_that_float_are_told_with_their_lines() -> None:
    document = read(EXAMPLE)
    found = floating(document.template, document.places)
    assert [(each.field, each.requirement, each.place.line) for each in found] == [
        ("runtime.dependencies[0]", "openai>=1.0", 6),
        ("runtime.dependencies[1]", "pydantic>=2.5.0", 7),
        ("runtime.dependencies[2]", "redis>=5.0.0", 8),
    ]
    assert floating(document.template)[0].place == NOWHERE


@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        ("a==1", ""),
        ("a[x]==1.0.post1; python_version < '4'", ""),
        ("a===1.0-odd", ""),
        ("a>=1,==1.2", ""),
        ("a @ https://h/a.whl#sha256=00", ""),
        ("a", "no version is given"),
        ("a==1.*", "the version has a wildcard"),
        ("a~=1.2", "~=1.2 admits several versions"),
        ("a<2,>=1", "<2,>=1 admits several versions"),
        ("a @ git+https://h/a@main", "the URL has no #sha256="),
    ],
)
def test_what_floats(requirement: str, why: str) -> None:
    template = Template(name="a", version="1", runtime=Runtime(dependencies=(requirement,)))
    found = floating(template)
    assert [each.why for each in found] == ([] if not why else [found[0].why])
    assert not found or found[0].why.startswith(why)


def test_every_field_is_either_enforced_or_declared() -> None:
    assert list(STANDINGS) == list(leaves(PLAIN))
    assert all(standing.why for standing in STANDINGS.values())


def test_what_is_declared_is_told_and_where() -> None:
    document = read(EXAMPLE)
    found = {each.field: each for each in unenforced(document.template, document.places)}
    for field in ("tools.allowed", "memory.short_term", "strategy.model", "strategy.max_steps"):
        assert found[field].why
        assert found[field].place.line
    assert found["strategy.max_steps"].value == 20
    assert found["tools.allowed"].place == Place(10, 3)
    assert "isolation.workdir" not in found


def test_a_default_that_is_written_is_declared_too() -> None:
    document = parse("name: a\nversion: 1\nstrategy: {max_steps: 30}\n")
    assert unenforced(document.template) == ()
    assert [each.field for each in unenforced(document.template, document.places)] == ["strategy.max_steps"]


# The page


def test_the_program_of_the_reference_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "reference" / "template.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs:
        exec(program, {})
