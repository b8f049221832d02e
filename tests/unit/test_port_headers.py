"""What goes into a sandbox with a request, and what comes out with an answer."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from dsec.control.coins import new_key, new_token
from dsec.errors import BadRequest
from dsec.model.tenants import KEY_MARKS, Coinage
from dsec.server.port_headers import inward, outward, target_of, token_of

SANDBOX = "sb-" + "a" * 26
PREFIX = f"/v1/sandboxes/{SANDBOX}/ports/8000"
KEY = b"dsec_" + b"K3y" * 14


def test_every_key_begins_with_a_mark() -> None:
    made = [*map(new_key, Coinage), new_token()]
    assert {key.partition("_")[0] for key in made} == set(KEY_MARKS)


def scope(
    path: str, query: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = (), raw: bytes = b""
) -> Any:
    return {"path": path, "raw_path": raw or path.encode(), "query_string": query, "headers": list(headers)}


def went_in(*headers: tuple[bytes, bytes], by_token: bool = False) -> list[tuple[bytes, bytes]]:
    return inward(headers, 8000, PREFIX, by_token=by_token)


def came_out(*headers: tuple[bytes, bytes], target: bytes = b"/") -> dict[bytes, bytes]:
    return dict(outward(headers, PREFIX, target))


class TestToken:
    def test_in_the_query_or_a_header(self) -> None:
        assert token_of(scope(f"{PREFIX}/x", b"a=1&dsec_token=T%2B&b=2")) == "T+"
        assert token_of(scope(f"{PREFIX}/x", b"dsec%5Ftoken=T")) == "T"
        assert token_of(scope(PREFIX, headers=((b"x-dsec-token", b"H"),))) == "H"

    def test_of_nothing_but_ports(self) -> None:
        assert token_of(scope(f"/v1/sandboxes/{SANDBOX}", b"dsec_token=T")) is None
        assert token_of(scope(f"/v1/sandboxes/{SANDBOX}/portsmouth/1", b"dsec_token=T")) is None
        assert token_of(scope(f"{PREFIX}/x", b"dsec_tokens=T")) is None


class TestTarget:
    def test_byte_for_byte_without_the_token(self) -> None:
        asked = scope(
            f"{PREFIX}/a b/\u00e9/c/d", b"x=%2B&dsec_token=T&y", raw=PREFIX.encode() + b"/a%20b/%C3%A9/c%2Fd"
        )
        assert target_of(asked) == b"/a%20b/%C3%A9/c%2Fd?x=%2B&y"

    def test_nothing_behind_the_port_is_the_root(self) -> None:
        assert target_of(scope(PREFIX)) == b"/"
        assert target_of(scope(f"{PREFIX}/", b"dsec_token=T")) == b"/"

    def test_slashes_that_hide_are_refused(self) -> None:
        with pytest.raises(BadRequest):
            target_of(scope(f"{PREFIX}/x", raw=PREFIX.replace("/ports/", "%2Fports/").encode() + b"/x"))


class TestInward:
    def test_keys_and_cookies_of_ours_stay_out(self) -> None:
        kept = went_in(
            (b"authorization", b"Bearer " + KEY),
            (b"x-api-key", KEY),
            (b"x-dsec-token", b"T"),
            (b"cookie", b"dsec_session=1; theirs=2"),
            (b"cookie", b"DSEC=3"),
            (b"accept", b"*/*"),
        )
        assert [value for name, value in kept if name == b"cookie"] == [b"theirs=2"]
        assert (b"accept", b"*/*") in kept
        assert not {b"authorization", b"x-api-key", b"x-dsec-token"} & {name for name, _ in kept}

    def test_with_a_token_keys_of_the_program_go_in(self) -> None:
        theirs = (b"authorization", b"token of-jupyter")
        assert theirs in went_in(theirs, by_token=True)
        assert theirs not in went_in(theirs)

    @pytest.mark.parametrize("key", [new_key(Coinage.DSEC), new_key(Coinage.E2B), new_token()])
    def test_a_key_of_ours_never_does(self, key: str) -> None:
        raw = key.encode()
        basic = base64.b64encode(b"user:" + raw)
        for value in (b"Bearer " + raw, b"bearer\t" + raw, raw, b"Basic " + basic, b"Basic  " + basic):
            for name in (b"authorization", b"x-api-key"):
                assert all(given != value for _, given in went_in((name, value), by_token=True)), value

    def test_what_is_of_this_hop_or_tells_where_from(self) -> None:
        kept = went_in(
            (b"host", b"dsec.example"),
            (b"connection", b"keep-alive, X-Mine"),
            (b"x-mine", b"1"),
            (b"te", b"trailers"),
            (b"transfer-encoding", b"chunked"),
            (b"content-length", b"3"),
            (b"origin", b"https://dsec.example"),
            (b"referer", b"https://dsec.example/?dsec_token=T"),
            (b"x-forwarded-for", b"10.0.0.1"),
            (b"sec-websocket-key", b"k"),
        )
        assert kept == [(b"host", b"localhost:8000"), (b"x-forwarded-prefix", PREFIX.encode())]


class TestOutward:
    def test_nothing_speaks_for_the_whole_address(self) -> None:
        hostile = (
            b"Clear-Site-Data Strict-Transport-Security Alt-Svc Service-Worker-Allowed NEL Report-To Reporting-Endpoints"
            b" WWW-Authenticate Access-Control-Allow-Credentials Connection Transfer-Encoding Upgrade Set-Login X-Dsec-Any"
        )
        kept = came_out(*((name, b"x") for name in hostile.split()), (b"Content-Type", b"text/html"))
        assert set(kept) == {
            b"content-type",
            b"content-security-policy",
            b"referrer-policy",
            b"x-content-type-options",
        }

    def test_pages_have_an_origin_of_their_own(self) -> None:
        kept = outward([(b"content-security-policy", b"default-src *")], PREFIX, b"/")
        policies = [value for name, value in kept if name == b"content-security-policy"]
        assert policies[0] == b"default-src *"
        assert policies[1].startswith(b"sandbox ")
        assert b"allow-same-origin" not in policies[1]
        assert b"allow-top-navigation" not in policies[1]

    def test_cookies_are_for_that_port_only(self) -> None:
        kept = came_out((b"set-cookie", b"a=1; Domain=example.com; path=/; HttpOnly"))
        assert kept[b"set-cookie"] == f"a=1; HttpOnly; Path={PREFIX}/".encode()
        for name in (b"dsec_session", b"__Host-a", b"__Secure-a", b""):
            assert b"set-cookie" not in came_out((b"set-cookie", name + b"=1"))

    @pytest.mark.parametrize(
        ("said", "seen"),
        [
            (b"/login?a=1#b", PREFIX.encode() + b"/login?a=1#b"),
            (b"login", PREFIX.encode() + b"/dir/login"),
            (b"http://127.0.0.1:8000/x/", PREFIX.encode() + b"/x/"),
            (b"http://localhost/x", PREFIX.encode() + b"/x"),
            (b"/../../../keys", PREFIX.encode() + b"/keys"),
            (b"../../../../../keys", PREFIX.encode() + b"/keys"),
            (b"\\..\\..\\keys", PREFIX.encode() + b"/keys"),
            (b"//example.com/x", b"//example.com/x"),
            (b"https://example.com/x", b"https://example.com/x"),
            (b"http://[", PREFIX.encode() + b"/"),
        ],
    )
    def test_locations(self, said: bytes, seen: bytes) -> None:
        assert came_out((b"location", said), target=b"/dir/page?q")[b"location"] == seen
