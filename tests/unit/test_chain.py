"""Chaining, and the audit over it: any sequence verifies, any change is found and named."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.errors import BadRequest, DsecError, StoreDamaged, TooLarge
from dsec.model.ids import new_sandbox_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import Flag, Level, Limits, SandboxInfo, SandboxSpec, State, Volume
from dsec.stores.chain import GENESIS, MAX_PAYLOAD, decode, encode, link, link_fields, prepare
from dsec.stores.journal import SqliteStore
from dsec.stores.parts import verify_directory
from dsec.stores.sandbox_codec import from_row, spec_from_json, spec_to_json, to_row

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
BYTES_AS_TEXT = st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
JSON: st.SearchStrategy[Json] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | BYTES_AS_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(BYTES_AS_TEXT, inner, max_size=3),
    max_leaves=6,
)
DRAFTS = st.builds(
    Draft,
    chain=st.sampled_from(["a", "b", "engine"]),
    act=WORDS,
    phase=st.sampled_from(Phase),
    ref=WORDS,
    actor=WORDS,
    payload=st.dictionaries(BYTES_AS_TEXT, JSON, max_size=3),
)


@given(st.dictionaries(BYTES_AS_TEXT, JSON, max_size=5))
def test_payloads_make_the_round_trip_and_order_does_not_count(payload: dict[str, Json]) -> None:
    assert decode(encode(payload)) == payload
    assert encode(dict(reversed(payload.items()))) == encode(payload)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"raw", object(), {1, 2}])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(BadRequest):
        encode({"value": value})  # type: ignore[dict-item]


def test_a_payload_nested_without_end_is_refused() -> None:
    payload: dict[str, Json] = {}
    payload["again"] = payload
    with pytest.raises(BadRequest):
        encode(payload)


def test_the_bound_of_a_payload_is_exact() -> None:
    assert len(encode({"a": "x" * (MAX_PAYLOAD - 8)})) == MAX_PAYLOAD
    with pytest.raises(TooLarge):
        encode({"a": "x" * (MAX_PAYLOAD - 7)})


def test_the_digest_of_a_known_record_never_changes() -> None:
    draft = Draft(chain="engine", act="a.b", phase=Phase.NOTE, ref="r", actor="local", payload={"n": 1})
    digest = link(prepare(draft), seq=1, at=1_000_000, previous=GENESIS)
    assert digest.hex() == "422d04feb48db0309ab7a6f058823dc6315562cf6d609d948f43e6a391bb818e"


@given(st.data())
def test_every_field_counts(data: st.DataObject) -> None:
    fields = ("chain", 1, 2, "act", "note", "ref", "actor")
    place = data.draw(st.integers(0, 6))
    other = data.draw(WORDS if isinstance(fields[place], str) else st.integers())
    changed = (*fields[:place], other, *fields[place + 1 :])
    one = link_fields(fields, payload_digest=GENESIS, previous=GENESIS)
    two = link_fields(changed, payload_digest=GENESIS, previous=GENESIS)  # type: ignore[arg-type]
    assert (one == two) == (other == fields[place])


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=4, max_size=4))
def test_fields_do_not_run_into_one_another(one: list[str], two: list[str]) -> None:
    digests = [
        link_fields(("c", 1, 1, w[0], w[1], w[2], w[3]), payload_digest=GENESIS, previous=GENESIS)
        for w in (one, two)
    ]
    assert (digests[0] == digests[1]) == (one == two)


def _made(home: Path, drafts: list[Draft]) -> sqlite3.Connection:
    async def make() -> None:
        store = await SqliteStore.open(home / "s", key=home / "key", engine_id="en-test")
        for draft in drafts:
            await store.append(draft)
        await store.close()

    asyncio.run(make())
    return sqlite3.connect(home / "s" / "journal.db", isolation_level=None)


def _found(home: Path) -> list[tuple[str, int]]:
    return [(found.chain, found.seq) for found in verify_directory(home / "s", key=home / "key")]


def _mutate(value: object, data: st.DataObject) -> object:
    """Another value of the same or of another type."""
    if isinstance(value, bytes) and value:
        place = data.draw(st.integers(0, len(value) - 1))
        flip = data.draw(st.integers(1, 255))
        return value[:place] + bytes([value[place] ^ flip]) + value[place + 1 :]
    if isinstance(value, int):
        return value + data.draw(st.integers(1, 1000))
    return str(value) + data.draw(st.text(st.characters(codec="ascii"), min_size=1, max_size=3))


FIELDS = ("at", "act", "phase", "ref", "actor", "payload", "payload_digest", "digest")


@SLOW
@given(st.lists(DRAFTS, min_size=1, max_size=12), st.data())
def test_a_changed_field_is_found_and_named(drafts: list[Draft], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with closing(_made(home, drafts)) as db:
            assert _found(home) == []
            rows = db.execute(
                "SELECT c.name, r.chain, r.seq FROM record r JOIN chain c ON c.number = r.chain"
            ).fetchall()
            chain, number, seq = data.draw(st.sampled_from(rows))
            field = data.draw(st.sampled_from(FIELDS))
            where = f"WHERE chain = {number} AND seq = {seq}"
            old = db.execute(f"SELECT {field} FROM record {where}").fetchone()[0]
            db.execute(f"UPDATE record SET {field} = ? {where}", (_mutate(old, data),))
        assert _found(home) == [(chain, seq)]


@SLOW
@given(st.lists(DRAFTS, min_size=2, max_size=12), st.data())
def test_deleted_swapped_and_cut_records_are_found_and_named(
    drafts: list[Draft], data: st.DataObject
) -> None:
    drafts = [replace(draft, chain="a") for draft in drafts]
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with closing(_made(home, drafts)) as db:
            one, two = sorted(data.draw(st.permutations(range(1, len(drafts) + 1)))[:2])
            change = data.draw(st.sampled_from(["delete", "swap", "cut", "renumber"]))
            if change == "delete":
                db.execute("DELETE FROM record WHERE seq = ?", (one,))
            elif change == "cut":
                db.execute("DELETE FROM record WHERE seq >= ?", (one,))
            elif change == "renumber":
                db.execute("UPDATE record SET id = id + 1000 WHERE seq >= ?", (one,))
            else:
                for old, new in ((one, 1000), (two, one), (1000, two)):
                    db.execute("UPDATE record SET id = id + ? WHERE seq = ?", (new - old, old))
        assert _found(home) == [("a", one)]


@SLOW
@given(st.lists(DRAFTS, min_size=2, max_size=8), st.data())
def test_a_chain_made_again_without_the_key_is_found(drafts: list[Draft], data: st.DataObject) -> None:
    """Positive control of the signatures: the digests alone are all right."""
    drafts = [replace(draft, chain="a") for draft in drafts]
    with tempfile.TemporaryDirectory() as name:
        home, forged = Path(name) / "true", Path(name) / "forged"
        _made(home, drafts).close()
        place = data.draw(st.integers(0, len(drafts) - 1))
        changed = [replace(d, act="forged") if n == place else d for n, d in enumerate(drafts)]
        _made(forged, changed).close()
        assert _found(forged) == []
        with closing(sqlite3.connect(home / "s" / "journal.db")) as db:
            mark = db.execute("SELECT * FROM mark").fetchall()
        with closing(sqlite3.connect(forged / "s" / "journal.db", isolation_level=None)) as db:
            db.execute("DELETE FROM mark")
            db.executemany("INSERT INTO mark VALUES (?, ?, ?)", mark)
        (forged / "s" / "journal.db").replace(home / "s" / "journal.db")
        assert _found(home) == [("a", len(drafts))]


SECONDS = st.floats(0, 10 * 365 * 86400) | st.integers(0, 1000)
# Bytes that are no UTF-8 stand as lone surrogates of one range; no others are names or values.
UNDECODABLE = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="=\0") | UNDECODABLE, min_size=1, max_size=8)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0") | UNDECODABLE, max_size=8)
NAMED = st.builds(Volume.named, st.sampled_from(["a", "data-1"]), st.just("/named"), read_only=st.booleans())
VOLUMES = NAMED | st.builds(
    Volume,
    source=BYTES_AS_TEXT.map(lambda text: Path("/" + text.replace("\0", "x"))),
    target=VALUES.map(lambda text: str(PurePosixPath("/t" + text.replace("..", "")))).filter(
        lambda t: "/.." not in t
    ),
    read_only=st.booleans(),
)
SPECS = st.builds(
    SandboxSpec,
    level=st.sampled_from(Level),
    base=VALUES,
    limits=st.builds(Limits, cpu_millis=st.integers(10, 1_024_000), pids=st.integers(4, 4_000_000)),
    ttl=SECONDS,
    idle=SECONDS,
    read_only=st.booleans(),
    env=st.dictionaries(NAMES, VALUES, max_size=4).map(MappingProxyType),
    volumes=st.lists(VOLUMES, max_size=3).map(tuple),
    labels=st.dictionaries(NAMES, VALUES, max_size=4).map(MappingProxyType),
    project=st.sampled_from(["default", "other"]),
    lent=st.lists(st.sampled_from(["/a", "/b"]), unique=True).map(tuple),
)


def test_specifications_of_before_there_were_projects() -> None:
    spec = SandboxSpec(volumes=(Volume(Path("/srv"), "/data"),))
    stored = json.loads(spec_to_json(spec))
    for name in ("project", "lent"):
        del stored[name]
    assert spec_from_json(json.dumps(stored)) == spec


@given(SPECS)
def test_specifications_make_the_round_trip(spec: SandboxSpec) -> None:
    text = spec_to_json(spec)
    assert text.isascii()
    assert spec_from_json(text) == spec


@given(SPECS, st.sampled_from(State), st.frozensets(st.sampled_from(Flag)), st.floats(0, 1e12), BYTES_AS_TEXT)
def test_sandboxes_make_the_round_trip(
    spec: SandboxSpec, state: State, flags: frozenset[Flag], at: float, workdir: str
) -> None:
    info = SandboxInfo(
        id=new_sandbox_id(), state=state, spec=spec, flags=flags, created_at=at, reason="é", workdir=workdir
    )
    assert from_row(to_row(info)) == info


@given(JSON)
def test_what_is_no_specification_is_damage(value: Json) -> None:
    text = encode({"value": value}).decode()
    for bad in (text, text[1:], "[]", "null"):
        with pytest.raises(StoreDamaged):
            spec_from_json(bad)


def test_every_field_of_a_specification_is_stored() -> None:
    """A field that is added to the model and forgotten here would be lost at the next start."""
    assert set(decode(spec_to_json(SandboxSpec()).encode())) == set(SandboxSpec.__dataclass_fields__)


def test_a_specification_has_a_bound() -> None:
    try:
        spec = SandboxSpec(env={"A": "x" * 2**20})
    except DsecError:
        return  # the model bounds it already
    with pytest.raises(TooLarge):
        spec_to_json(spec)
