"""What of the host may be shown, whatever the names on the way to it are made to mean."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.errors import BadRequest, Denied
from dsec.runtimes.host_paths import HostPaths


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    for name in ("allowed/in", "secret/in", "allowed-too"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "allowed/file").write_text("x")
    return tmp_path / "allowed"


def shown(policy: HostPaths, source: Path, *, lent: bool = False) -> str:
    fd = policy.open(source, lent=lent)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_what_lies_below_is_allowed(allowed: Path) -> None:
    policy = HostPaths((allowed,))
    for source in (allowed, allowed / "in", allowed / "file", allowed / "in/../in"):
        assert shown(policy, source) == os.path.realpath(source)
        assert shown(policy, source, lent=True) == os.path.realpath(source)


def test_what_lies_elsewhere_is_denied_alike_whether_or_not_it_is_there(allowed: Path) -> None:
    policy = HostPaths((allowed,))
    top = allowed.parent
    (allowed / "out").symlink_to(top / "secret")
    (allowed / "nowhere").symlink_to(top / "absent")
    (top / "way").symlink_to("/")
    said = set()
    for source in (
        top / "secret",
        top / "absent",
        top / "allowed-too",  # its name begins alike
        allowed / "../secret",
        allowed / "out",
        allowed / "out/in",
        allowed / "nowhere",
        top,
        Path("/"),
        Path("/proc/self/root") / str(top)[1:] / "secret",
        top / "way" / str(top)[1:] / "secret",
    ):
        with pytest.raises(Denied) as caught:
            policy.open(source, lent=False)
        said.add((caught.value.message.replace(str(source), "PATH"), caught.value.hint))
    assert len(said) == 1


def test_a_link_from_elsewhere_to_what_is_allowed(allowed: Path) -> None:
    (allowed.parent / "link").symlink_to(allowed / "in")
    assert shown(HostPaths((allowed,)), allowed.parent / "link") == str(allowed / "in")


def test_what_is_allowed_may_be_a_file_or_a_link(allowed: Path) -> None:
    link = allowed.parent / "link"
    link.symlink_to(allowed)
    assert shown(HostPaths((link,)), allowed / "in") == str(allowed / "in")
    only = HostPaths((allowed / "file",))
    assert shown(only, allowed / "file") == str(allowed / "file")
    with pytest.raises(Denied):
        only.open(allowed, lent=False)


def test_what_is_allowed_is_what_it_was_when_the_engine_opened(allowed: Path) -> None:
    policy = HostPaths((allowed,))
    allowed.rename(allowed.parent / "aside")
    allowed.symlink_to(allowed.parent / "secret")
    for source in (allowed, allowed / "in", allowed.parent / "aside"):
        with pytest.raises(Denied):
            policy.open(source, lent=False)


def test_a_descriptor_of_ours_is_no_way_around(allowed: Path) -> None:
    secret = os.open(allowed.parent / "secret", os.O_PATH)
    removed = allowed / "removed"
    removed.mkdir()
    gone = os.open(removed, os.O_PATH)
    removed.rmdir()
    try:
        for fd in (secret, gone):
            with pytest.raises(Denied):
                HostPaths((allowed,)).open(Path(f"/proc/self/fd/{fd}"), lent=False)
    finally:
        os.close(secret)
        os.close(gone)


def test_nothing_is_allowed_by_an_empty_list_or_by_what_is_not_there(allowed: Path) -> None:
    for policy in (HostPaths(()), HostPaths((allowed.parent / "absent",))):
        with pytest.raises(Denied):
            policy.open(allowed, lent=False)


def test_without_a_list_the_caller_may_name_anything_and_a_template_nothing(allowed: Path) -> None:
    policy = HostPaths(None)
    assert shown(policy, allowed.parent / "secret") == str(allowed.parent / "secret")
    with pytest.raises(BadRequest, match="No such file"):
        policy.open(allowed / "absent", lent=False)
    for source in (allowed, allowed / "absent"):
        with pytest.raises(Denied, match="template"):
            policy.open(source, lent=True)


@contextmanager
def swapped(place: Path, target: Path) -> Iterator[None]:
    """Meanwhile ``place`` is now a directory, now a link to ``target``."""
    over = threading.Event()
    aside = place.with_name("aside")

    def swap() -> None:
        while not over.is_set():
            place.rename(aside)
            place.symlink_to(target)
            place.unlink()
            aside.rename(place)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_what_is_swapped_while_it_is_opened_leads_nowhere(allowed: Path) -> None:
    (allowed / "mine/in").mkdir(parents=True)
    policy = HostPaths((allowed,))
    secret = os.stat(allowed.parent / "secret/in")
    reached = denied = slipped = naive = 0
    with swapped(allowed / "mine", allowed.parent / "secret"):
        while reached < 50 or denied < 50:
            try:
                fd = policy.open(allowed / "mine/in", lent=False)
            except Denied:
                denied += 1
            else:
                reached += 1
                slipped += os.path.samestat(os.fstat(fd), secret)
                os.close(fd)
        while not naive:  # the control: who looks first and opens then is led out
            naive = _opened_after_a_look(allowed, allowed / "mine/in", secret)
    assert slipped == 0


def _opened_after_a_look(allowed: Path, source: Path, secret: os.stat_result) -> bool:
    try:
        if not Path(os.path.realpath(source)).is_relative_to(allowed):
            return False
        return os.path.samestat(source.stat(), secret)
    except OSError:
        return False


@pytest.mark.parametrize("lent", [True, False])
def test_a_refusal_names_whose_setting_it_is(lent: bool) -> None:
    """The environment of the command that asks is not that of the server which refuses."""
    with pytest.raises(Denied) as refused:
        HostPaths(None if lent else ()).open(Path("/etc"), lent=lent)
    assert "$DSEC_HOST_PATHS as it was when the server started" in refused.value.hint
