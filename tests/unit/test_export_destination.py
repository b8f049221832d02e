"""Where events may go, and what must not be said on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.errors import BadRequest, Denied
from dsec.observe.destination import ENVIRONMENT, Headers, check_secret, parse_destination, tls_context


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port"),
    [
        ("syslog://logs", "syslog", "logs", 514),
        ("syslog+tcp://10.0.0.1:1514", "syslog+tcp", "10.0.0.1", 1514),
        ("syslog+tls://[::1]", "syslog+tls", "::1", 6514),
        ("https://c.example/ingest?a=b", "https", "c.example", 443),
        ("-", "-", "", 0),
        ("/var/log/x", "file", "", 0),
    ],
)
def test_destinations(text: str, scheme: str, host: str, port: int) -> None:
    found = parse_destination(text)
    assert (found.scheme, found.host, found.port) == (scheme, host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://x",
        "syslog://",
        "syslog://h/path",
        "syslog://h:0x1",
        "syslog://h:99999",
        "http://h\n/x",
        "http:// h",
        "https://[::1",
        "http://h/#f",
        "a\0b",
    ],
)
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_destination(text)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_destination("https://me:hunter2@c.example/x")
    assert "hunter2" not in str(caught.value)


def test_headers(tmp_path: Path) -> None:
    file = tmp_path / "h"
    file.write_text("Authorization: Splunk abc\n\nX-Other:  v  \n")
    file.chmod(0o600)
    assert Headers(file, {ENVIRONMENT: "Authorization: from-env\nX-Env: 1"})() == {
        "Authorization": "Splunk abc",
        "X-Other": "v",
        "X-Env": "1",
    }
    file.chmod(0o644)
    with pytest.raises(Denied, match="others can read"):
        Headers(file, {})()


@pytest.mark.parametrize(
    "line", ["no-colon-s3cret", "Host: s3cret", "A b: s3cret", "A: s3cret\x01", "A:", "Content-Length: 5"]
)
def test_a_wrong_header_is_told_by_its_line_only(line: str) -> None:
    with pytest.raises(BadRequest, match="line 2") as caught:
        Headers(None, {ENVIRONMENT: f"X: 1\n{line}"})()
    assert "s3cret" not in str(caught.value)


def test_secrets_do_not_cross_a_network_in_the_clear() -> None:
    secret = {"Authorization": "x"}
    with pytest.raises(Denied):
        check_secret(parse_destination("http://c.example/x"), secret)
    for text in ("http://127.0.0.1:1/x", "http://[::1]/", "http://localhost/", "https://c.example/"):
        check_secret(parse_destination(text), secret)
    check_secret(parse_destination("http://c.example/x"), {})


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("nothing")
    with pytest.raises(BadRequest):
        tls_context(tmp_path / "ca", None)
    with pytest.raises(BadRequest):
        tls_context(None, tmp_path / "none")
