"""From YAML to templates: what is read, what is wrong and where, and what a hostile document cannot do."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.errors import BadRequest, DsecError, NotFound, TooLarge
from dsec.model.sandbox import Level, Limits, Volume
from dsec.model.template import MemoryType, Profile, SharedVolumes, Template
from dsec.templates.document import parse, read
from dsec.templates.faults import MOST_SHOWN, Place
from dsec.templates.nodes import MAX_BYTES, MAX_DEPTH, MAX_NODES

EXAMPLE = Path(__file__).parents[2] / "examples" / "react-agent-python.yaml"
HEAD = "name: a\nversion: 1\n"


def faults(text: str | bytes) -> list[dict[str, Any]]:
    with pytest.raises(BadRequest) as caught:
        parse(text)
    assert caught.value.hint
    found = caught.value.facts["errors"]
    assert isinstance(found, list)
    assert caught.value.facts["count"] == len(found) or len(found) == MOST_SHOWN
    for fault in found[:MOST_SHOWN]:
        assert fault["message"] in caught.value.message
    return found


def test_the_example_says_what_its_author_meant() -> None:
    document = read(EXAMPLE)
    template = document.template
    assert (template.name, template.version) == ("react-agent-python", "1.0")
    assert template.runtime.base == "python:3.11-slim"
    assert template.runtime.dependencies == ("openai>=1.0", "pydantic>=2.5.0", "redis>=5.0.0")
    assert template.tools.allowed == ("code_executor", "web_search", "memory_io")
    assert template.memory.type is MemoryType.LAYERED
    assert template.memory.short_term == "redis://internal:6379/0"
    assert template.memory.long_term == "postgres://internal:5432/agent_memory"
    assert (template.strategy.model, template.strategy.max_steps) == ("gpt-4o-mini", 20)
    assert template.strategy.timezone == "Asia/Shanghai"
    assert document.places["version"] == Place(1, 1)
    assert document.places["runtime.dependencies[2]"] == Place(8, 7)


def test_everything_that_may_be_written() -> None:
    text = """
        name: everything
        version: 2024-01-02
        runtime:
          base: registry.example.com:5000/team/python@sha256:%s
          level: process
          dependencies: ['torch==2.4.1 ; python_version >= "3.11"', "a[b] @ https://example.com/a.whl#sha256=00"]
          packages: [git, "libc6=2.36-9+deb12u7"]
          setup:
            - |
              apt-get --version
              true
          env: {PORT: 8080, FLAG: yes, EMPTY: "", ÄÖ: "\\u2028"}
          user: root
          workdir: /home/user
        resources: {profile: code, memory_mib: 4096}
        volumes:
          - {source: /srv/data, target: /data, read_only: true}
          - {source: /srv/out, target: /out}
        network: {allow: [pypi.org, "*.example.com:443", 192.0.2.1, "[2001:db8::1]:8080"]}
        isolation: {workdir: fresh, tmp: fresh, session_id: new, volumes: shared, scratch_exec: true}
        strategy: {max_seconds: 1.5e2, max_cost_usd: 2}
        skills: [mail-triage]
        """ % ("0a" * 32)
    template = parse(text).template
    assert template.version == "2024-01-02"
    assert template.runtime.level is Level.PROCESS
    assert template.runtime.setup == ("apt-get --version\ntrue\n",)
    assert template.runtime.env == {"PORT": "8080", "FLAG": "yes", "EMPTY": "", "ÄÖ": "\u2028"}
    assert template.resources.profile is Profile.CODE
    assert template.resources.limits == Limits(cpu_millis=4000, memory_mib=4096, pids=512, disk_mib=4096)
    assert template.volumes == (
        Volume(Path("/srv/data"), "/data", read_only=True),
        Volume(Path("/srv/out"), "/out"),
    )
    assert template.isolation.volumes is SharedVolumes.SHARED
    assert template.isolation.scratch_exec is True
    assert (template.strategy.max_seconds, template.strategy.max_cost_usd) == (150.0, 2.0)


def test_an_alias_stands_for_what_its_anchor_says() -> None:
    text = HEAD + "runtime: {dependencies: [&a x==1, *a], env: {A: &v t, B: *v}}\n"
    template = parse(text).template
    assert template.runtime.dependencies == ("x==1", "x==1")
    assert template.runtime.env == {"A": "t", "B": "t"}


# text after HEAD, field, line, column, part of the message, part of the hint
BAD = [
    ("name: b\n", "name", 3, 1, "there twice, first in line 1", "keep one"),
    ("runtim: {}\n", "runtim", 3, 1, "no such field", "did you mean runtime?"),
    ("timezone: UTC\n", "timezone", 3, 1, "no such field", "did you mean strategy.timezone?"),
    ("runtime:\n  skills: []\n", "runtime.skills", 4, 3, "no such field", "skills, outside of runtime"),
    ("runtime:\n  xyzzy: 1\n", "runtime.xyzzy", 4, 3, "no such field", "known here: base, level"),
    ("memory: &m {}\ntools: {<<: *m}\n", "tools.<<", 4, 9, "no such field", "nothing is merged"),
    ("runtime: []\n", "runtime", 3, 10, "expected a mapping of fields, found a list", ""),
    ("tools:\n", "tools", 3, 7, "expected a mapping of fields, found nothing", "leave the field out"),
    ("skills: mail\n", "skills", 3, 9, "expected a list, found 'mail'", "begin each item"),
    ("skills: [{a: b}]\n", "skills[0]", 3, 10, "expected text, found a mapping", ""),
    ("skills: [Mail]\n", "skills[0]", 3, 10, "'Mail' is not a name", ""),
    ("skills: [a, ~]\n", "skills[1]", 3, 13, "expected text, found nothing", ""),
    ("runtime:\n  base: python\n", "runtime.base", 4, 9, "neither a tag nor a digest", "python:3.11-slim"),
    ("runtime: {base: 'a b:c'}\n", "runtime.base", 3, 17, "is not the name of a base", ""),
    ("runtime: {base: 'a@sha256:12'}\n", "runtime.base", 3, 17, "is not the name of a base", ""),
    ("runtime: {level: gvisor}\n", "runtime.level", 3, 18, "expected one of process, container", ""),
    ("runtime: {level: contaner}\n", "runtime.level", 3, 18, "expected one of", "did you mean container?"),
    (
        "runtime:\n  dependencies:\n    - ok==1\n    - '=1'\n    - -r x\n",
        "runtime.dependencies[1]",
        6,
        7,
        "not a requirement",
        "",
    ),
    (
        "runtime: {dependencies: ['a; %s']}\n" % ("(" * 900),
        "runtime.dependencies[0]",
        3,
        26,
        "32 brackets",
        "",
    ),
    ("skills: *%s\n" % ("a" * 5000), "", 3, 9, "undefined alias", ""),
    ("runtime: {packages: [Git]}\n", "runtime.packages[0]", 3, 22, "not a Debian package", ""),
    ("runtime: {setup: ['  ']}\n", "runtime.setup[0]", 3, 19, "not a command", ""),
    ('runtime: {setup: ["a\\0b"]}\n', "runtime.setup[0]", 3, 19, "not a command", ""),
    ("runtime: {env: [A]}\n", "runtime.env", 3, 16, "expected a mapping of names to text", ""),
    ("runtime: {env: {A: [b]}}\n", "runtime.env.A", 3, 20, "expected text, found a list", ""),
    ("runtime: {env: {A: }}\n", "runtime.env.A", 3, 19, "expected text, found nothing", ""),
    ("runtime: {env: {'A=B': c}}\n", "runtime.env.A=B", 3, 17, "'A=B' is not a name", ""),
    ("runtime: {env: {A: b, A: c}}\n", "runtime.env.A", 3, 23, "there twice", ""),
    ('runtime: {env: {A: "\\ud800"}}\n', "runtime.env.A", 3, 20, "", ""),
    ('runtime: {env: {A: "\\udc80"}}\n', "runtime.env.A", 3, 20, "UTF-8", ""),
    ("runtime: {env: {[a]: b}}\n", "runtime.env", 3, 17, "expected the name of a field", ""),
    ("runtime: {user: Root}\n", "runtime.user", 3, 17, "not the name of a user", ""),
    ("runtime: {workdir: /a/../b}\n", "runtime.workdir", 3, 20, "not an absolute path", ""),
    ("tools: {allowed: ['a b']}\n", "tools.allowed[0]", 3, 19, "not the name of a tool", ""),
    ("memory: {type: flat}\n", "memory.type", 3, 16, "expected one of none, layered", ""),
    ("memory: {short_term: 'redis://h'}\n", "memory.short_term", 3, 10, "memory.type is none", "layered"),
    ("memory: {type: layered, long_term: x}\n", "memory.long_term", 3, 36, "not the URL of a store", ""),
    ("memory: {type: layered, long_term: 'p://h:x'}\n", "memory.long_term", 3, 36, "not the URL", ""),
    ("strategy: {max_steps: 0}\n", "strategy.max_steps", 3, 23, "0 is not a whole number from 1", ""),
    (
        "strategy: {max_steps: '20'}\n",
        "strategy.max_steps",
        3,
        23,
        "expected a whole number",
        "without quotes",
    ),
    ("strategy: {max_steps: 0x14}\n", "strategy.max_steps", 3, 23, "expected a whole number", ""),
    ("strategy: {max_steps: 1.5}\n", "strategy.max_steps", 3, 23, "expected a whole number", ""),
    ("strategy: {max_steps: true}\n", "strategy.max_steps", 3, 23, "expected a whole number", ""),
    ("strategy: {max_steps: 1000000000000000000000}\n", "strategy.max_steps", 3, 23, "expected", ""),
    ("strategy: {max_seconds: 0}\n", "strategy.max_seconds", 3, 25, "not a positive number", ""),
    ("strategy: {max_seconds: .nan}\n", "strategy.max_seconds", 3, 25, "expected a number", ""),
    ("strategy: {max_seconds: 1e999}\n", "strategy.max_seconds", 3, 25, "not a positive number", ""),
    ("strategy: {max_cost_usd: -1}\n", "strategy.max_cost_usd", 3, 26, "not a number of US dollars", ""),
    ("strategy: {model: 'a b'}\n", "strategy.model", 3, 19, "not the name of a model", ""),
    ("strategy: {timezone: Asia/Shangai}\n", "strategy.timezone", 3, 22, "", "did you mean Asia/Shanghai?"),
    ("strategy: {timezone: America}\n", "strategy.timezone", 3, 22, "not a time zone", ""),
    ("strategy: {timezone: ../etc/passwd}\n", "strategy.timezone", 3, 22, "not a time zone", ""),
    ("strategy: {timezone: posix/UTC}\n", "strategy.timezone", 3, 22, "not a time zone", ""),
    ("strategy: {timezone: localtime}\n", "strategy.timezone", 3, 22, "not a time zone", ""),
    ("resources: {profile: code2}\n", "resources.profile", 3, 22, "expected one of", "did you mean code?"),
    ("resources: {memory_mib: 1}\n", "resources.memory_mib", 3, 25, "1 is not a whole number from 8", ""),
    ("resources: {memory: 1}\n", "resources.memory", 3, 13, "no such field", "did you mean memory_mib?"),
    ("resources: {pids: many}\n", "resources.pids", 3, 19, "expected a whole number, found 'many'", ""),
    ("volumes: [{source: a, target: /b}]\n", "volumes[0].source", 3, 20, "expected an absolute path", ""),
    ("volumes: [{source: /a, target: b}]\n", "volumes[0].target", 3, 24, "not an absolute path", ""),
    ("volumes: [{source: /a}]\n", "volumes[0].target", 3, 11, "target is missing", ""),
    (
        "volumes: [/a]\n",
        "volumes[0]",
        3,
        11,
        "expected a mapping of fields, found '/a'",
        "{name: data, target: /data}",
    ),
    (
        "volumes: [d:/d]\n",
        "volumes[0]",
        3,
        11,
        "expected a mapping of fields, found 'd:/d'",
        "{name: data, target: /data}",
    ),
    ("volumes: [{source: /a, target: /b}]\n", "volumes[0]", 3, 11, "isolation.volumes is none", "read_only"),
    (
        "volumes: [{name: Data, target: /b}]\n",
        "volumes[0].name",
        3,
        18,
        "not the name of a volume",
        "1 to 64",
    ),
    ("volumes: [{name: /a, target: /b}]\n", "volumes[0].name", 3, 18, "not the name of a volume", "a path"),
    (
        "volumes: [{name: a, source: /a, target: /b}]\n",
        "volumes[0].source",
        3,
        11,
        "there is a source too",
        "one of",
    ),
    ("volumes: [{target: /b}]\n", "volumes[0].source", 3, 11, "source is missing, or name", "one of"),
    ("volumes: [{name: a, target: /b}]\n", "volumes[0]", 3, 11, "isolation.volumes is none", "read_only"),
    ("volumes: [{name: a, target: /proc}]\n", "volumes[0].target", 3, 21, "/proc is the sandbox's own", ""),
    ("volumes: [{names: a, target: /b}]\n", "volumes[0].source", 3, 11, "source is missing", ""),
    ("network: {allow: ['http://x']}\n", "network.allow[0]", 3, 19, "not a host or host:port", ""),
    ("network: {allow: ['x:99999']}\n", "network.allow[0]", 3, 19, "not a host or host:port", ""),
    ("network: {allow: [300.1.1.1]}\n", "network.allow[0]", 3, 19, "not a host or host:port", ""),
    ("isolation: {workdir: kept}\n", "isolation.workdir", 3, 22, "expected 'fresh', found 'kept'", ""),
    ("isolation: {scratch_exec: yes}\n", "isolation.scratch_exec", 3, 27, "expected true or false", ""),
    ("isolation: {volumes: some}\n", "isolation.volumes", 3, 22, "expected one of none, shared", ""),
    ("skills: !!python/object:os.system [a]\n", "skills", 3, 9, "the tag", "leave the tag out"),
    ("skills: [!mine a]\n", "skills[0]", 3, 10, "the tag '!mine' is not taken", ""),
    ("skills: [a\n", "", 4, 1, "expected ',' or ']'", ""),
    ("skills: *nobody\n", "", 3, 9, "undefined alias", ""),
    ("\tskills: []\n", "", 3, 1, "cannot start any token", ""),
    ("--- \nname: b\n", "", 3, 1, "expected a single document", ""),
    ("skills: [\x01]\n", "", 3, 10, "has no place in YAML", ""),
]


@pytest.mark.parametrize(
    ("text", "field", "line", "column", "message", "hint"), BAD, ids=[b[0][:40] for b in BAD]
)
def test_what_is_wrong_is_told_with_its_place(
    text: str, field: str, line: int, column: int, message: str, hint: str
) -> None:
    found = faults(HEAD + text)[0]
    assert len(found["message"]) < 500
    assert (found["field"], found["line"], found["column"]) == (field, line, column)
    assert message in found["message"]
    assert hint in found["hint"]


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("", "", "it is empty"),
        ("# only a comment\n", "", "it is empty"),
        ("- a\n", "", "expected a mapping of fields, found a list"),
        ("name: a\n", "version", "version is missing"),
        ("name: A\nversion: 1\n", "name", "'A' is not a name"),
        ("name: a:b\nversion: 1\n", "name", "'a:b' is not a name"),
        ("name: a\nversion: 'a b'\n", "version", "'a b' is not a version"),
        ('name: "\\U00110000"\nversion: 1\n', "", "is no character"),
        (b"name: \xff\n", "", "it is not UTF-8"),
    ],
)
def test_what_is_no_template(text: str | bytes, field: str, message: str) -> None:
    found = faults(text)[0]
    assert found["field"] == field
    assert message in found["message"]


def test_all_that_is_wrong_is_told_at_once_in_order() -> None:
    text = (
        "volumes:\n  - {source: /a, target: /d}\n  - {source: b, target: /x}\n  - {source: /c, target: /d/e}\n"
        "name: A\nruntime: {base: x, dependencies: [a b, c d]}\nstrategy: {max_steps: x}\nunknown: 1\n"
    )
    found = faults(text)
    assert [(fault["line"], fault["field"]) for fault in found] == [
        (1, "version"),
        (2, "volumes[0]"),
        (3, "volumes[1].source"),
        (4, "volumes[2]"),
        (4, "volumes[2]"),
        (5, "name"),
        (6, "runtime.base"),
        (6, "runtime.dependencies[0]"),
        (6, "runtime.dependencies[1]"),
        (7, "strategy.max_steps"),
        (8, "unknown"),
    ]


def test_one_fault_reads_as_one_line() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(HEAD + "runtime: {base: python}\n", source="a.yaml")
    assert caught.value.message.startswith("a.yaml: line 3, column 17: runtime.base: 'python' is not ")
    assert "\n" not in caught.value.message


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(HEAD + "memory: {type: layered, short_term: 'redis://user:hunter2@h/0'}\n")
    assert "a template holds no password" in caught.value.message
    assert "hunter2" not in str(caught.value) + str(caught.value.facts)


def test_names_are_shown_short_and_on_one_line() -> None:
    for name in ("x" * 1000, "a\\nb"):
        found = faults(HEAD + f'"{name}": 1\n"runtime": {{env: {{"{name}": []}}}}\n')
        assert [fault["message"][:10] for fault in found] == ["there is n", "expected t"]
        assert all(len(fault["field"]) < 200 and "\n" not in fault["field"] for fault in found)


def test_a_tag_of_the_whole_is_refused() -> None:
    assert "the tag '!mine' is not taken" in faults("!mine {name: a, version: 1}")[0]["message"]


def test_a_mark_of_byte_order_is_no_part_of_the_text() -> None:
    assert parse(("\ufeff" + HEAD).encode()).template == parse("\ufeff" + HEAD).template


class TestBombs:
    def test_a_document_of_many_bytes(self) -> None:
        with pytest.raises(TooLarge) as caught:
            parse(HEAD + "#" + "é" * (MAX_BYTES // 2))
        assert caught.value.facts["limit"] == MAX_BYTES

    @pytest.mark.parametrize("text", ["[" * 500_000, "- " * 500_000, "{a: " * 200_000, "? " * 500_000])
    def test_depth(self, text: str) -> None:
        assert f"more than {MAX_DEPTH} levels" in faults(text)[0]["message"]

    def test_many_values(self) -> None:
        found = faults("x:\n" + "- a\n" * 250_000)[0]
        assert f"more than {MAX_NODES} values" in found["message"]
        assert found["line"] > MAX_NODES - 10

    def test_laughs(self) -> None:
        names = "abcdefgh"
        lines = [f"a: &a [{', '.join(['lol'] * 9)}]"]
        for before, name in pairwise(names):
            lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
        for text in (HEAD + "\n".join(lines) + "\nskills: *h\n", HEAD + "\n".join(lines) + "\nruntime: *h\n"):
            assert faults(text)

    def test_one_long_text_many_times(self) -> None:
        text = HEAD + f"runtime: {{setup: [&a {'x' * 60_000}{', *a' * 500}]}}\n"
        assert "aliases make more of it" in faults(text)[0]["message"]

    def test_a_list_many_times(self) -> None:
        env = ", ".join(f"A{n}: &v{n} x" for n in range(900))
        text = (
            HEAD
            + "volumes: ["
            + ", ".join(["&a {source: /a, target: /b, read_only: true}"] + ["*a"] * 999)
            + "]"
        )
        assert faults(text)
        assert parse(HEAD + f"runtime: {{env: {{{env}}}}}\n").template.runtime.env["A1"] == "x"

    def test_what_holds_itself(self) -> None:
        assert faults(HEAD + "runtime: &a {env: *a, setup: &b [*b]}\n")
        assert faults("&a [*a]")

    def test_more_items_than_may_be(self) -> None:
        assert "1001 items are more than 1000" in faults(HEAD + f"skills: [{'a, ' * 1001}]\n")[0]["message"]

    def test_many_faults_are_counted_and_the_first_are_shown(self) -> None:
        with pytest.raises(BadRequest) as caught:
            parse(HEAD + "".join(f"x{n}: 1\n" for n in range(5000)))
        assert caught.value.facts["count"] == 5000
        assert "and 4900 more" in caught.value.message


PIECES = st.sampled_from(
    [
        *("name", "version", "runtime", "volumes", "env", "base", "resources", "memory", "profile", "skills"),
        *(
            ": ",
            "\n",
            "\n  ",
            "- ",
            "{",
            "}",
            "[",
            "]",
            ", ",
            "'",
            '"',
            "&a ",
            "*a",
            "!!str ",
            "!x ",
            "| \n",
            "? ",
        ),
        *(
            "~",
            "1",
            "1.0",
            "true",
            "# ",
            "---\n",
            "%YAML 1.1\n",
            "\\x",
            "\t",
            "<<",
            "é",
            "\u2028",
            "=",
            "\x85",
        ),
    ]
)


@given(
    st.one_of(st.text(), st.binary(), st.lists(PIECES, max_size=40).map(lambda parts: HEAD + "".join(parts)))
)
def test_any_text_is_a_template_or_an_error_of_ours(text: str | bytes) -> None:
    try:
        assert isinstance(parse(text).template, Template)
    except DsecError as error:
        assert error.hint  # noqa: PT017 - either outcome is right


def test_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        read(tmp_path / "none.yaml")
    with pytest.raises(BadRequest, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(BadRequest, match="template: None is not a path"):
        read(None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="template: 5 is neither str nor bytes"):
        parse(5)  # type: ignore[arg-type]
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(TooLarge):
        read(large)
