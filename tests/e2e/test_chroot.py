"""Level `container` for an engine that lives in a plain chroot, where `/` is no mount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]

ENTER = """
set -e
root=$1
shift
mount --make-rprivate /
for each in /*; do
  if [ -L "$each" ]; then ln -s "$(readlink "$each")" "$root$each"
  elif [ -d "$each" ]; then mkdir -p "$root$each"; mount --rbind "$each" "$root$each"
  fi
done
exec chroot "$root" "$@"
"""

ENGINE = """
import json, os, sys
from pathlib import Path
from dsec import Dsec, Settings

def mounts(text):
    return [line.split()[4] for line in text.splitlines()]

def spawners():
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"/spawner\\0--level\\0container\\0" in line and os.fsencode(sys.argv[2]) in line:
            yield (entry / "mountinfo").read_text()

with Dsec(settings=Settings(images=Path(sys.argv[1]), pool=0)) as engine:
    with engine.sandboxes.create(level="container") as sandbox:
        inside = sandbox.exec("cat /proc/self/mountinfo").stdout.decode()
        found = {
            "ours": mounts(Path("/proc/self/mountinfo").read_text()),
            "spawner": [mounts(text) for text in spawners()],
            "sandbox": mounts(inside),
            "above": sandbox.exec(["sh", "-c", "cd /..; ls -d usr work* tmp; ls /../../marker"]).stdout.decode(),
            "written": sandbox.exec("echo hello > /tmp/f; cat /tmp/f").stdout.decode(),
        }
print(json.dumps(found))
"""


def test_a_plain_chroot_is_root_enough(image_store: Path, tmp_path: Path) -> None:
    root, temporary = tmp_path / "root", os.environ["TMPDIR"]
    root.mkdir()
    (tmp_path / "marker").touch()  # beside the chroot: what is above it must not be reached
    command = ["unshare", "-m", "bash", "-c", ENTER, "-", str(root), sys.executable, "-c", ENGINE]
    done = subprocess.run(
        [*command, str(image_store), temporary], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "/" not in found["ours"], "this is no plain chroot: it proves nothing"
    assert "/usr" in found["ours"]
    assert found["spawner"], "its mounts were not seen"
    for mounts in found["spawner"]:
        assert mounts[0] == "/"
        assert all(mount == "/" or mount.startswith("/l/") for mount in mounts), (
            "something of the host is left"
        )
    assert "/" in found["sandbox"]
    assert not [mount for mount in found["sandbox"] if str(root) in mount or mount == "/usr"]
    assert "marker" not in found["above"]
    assert found["written"] == "hello\n"
