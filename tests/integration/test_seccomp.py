"""The system call tables: what each level may call, on both architectures by interpretation and here by calling.

A call that a table refuses is also made without the table. Where that control already fails like the refused one (a
kernel without the call, a test without root), nothing is proved and the case counts as skipped.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import shutil
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ROOT / "native" / "seccomp"
HEADER = ROOT / "native" / "spawner" / "seccomp_tables.h"
SCRIPT = ROOT / "scripts" / "seccomp_tables.py"

pytestmark = pytest.mark.timeout(120)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AUDIT_ARCH_I386, AUDIT_ARCH_ARM = 0x40000003, 0x40000028
LEVELS = ("container", "process")
MACHINES = tuple(AUDIT_ARCH)
HERE = platform.machine()

ALLOW, KILL = 0x7FFF0000, 0x80000000


def refused(number: int) -> int:
    """The verdict of a filter that lets a call fail with this errno."""
    return 0x00050000 | number


# --- the generator


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("seccomp") / "generate"
    source = POLICIES / "generate.c"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    subprocess.run(["gcc", *flags, "-o", program, source, "-lseccomp"], check=True, timeout=60)
    return program


@dataclass(frozen=True, slots=True)
class Call:
    """One name of a policy: what is decided, and its number on each architecture (negative: it has none)."""

    decision: str
    numbers: dict[str, int]


Lists = dict[str, dict[str, Call]]


@pytest.fixture(scope="module")
def lists(generator: Path) -> Lists:
    """By level and name."""
    done = subprocess.run([generator, "--lists", POLICIES], check=True, capture_output=True, text=True)
    found: Lists = {level: {} for level in LEVELS}
    for line in done.stdout.splitlines():
        level, decision, name, *numbers = line.split()
        assert name not in found[level], "a name is decided once"
        found[level][name] = Call(decision, dict(zip(MACHINES, map(int, numbers), strict=True)))
    return found


def test_header_is_what_the_policies_give() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_generation_is_repeatable(generator: Path) -> None:
    once, again = (subprocess.run([generator, POLICIES], check=True, capture_output=True) for _ in range(2))
    assert once.stdout == again.stdout == HEADER.read_bytes()


@pytest.mark.parametrize(
    ("container", "process", "complaint"),
    [
        ("allow reed", "", "unknown system call 'reed'"),
        ("allow read\ndeny read", "", "'read' is decided twice"),
        ("allow read read", "", "'read' is decided twice"),
        ("permit read", "", "expected allow, deny or absent"),
        ("allow read", "deny read", "'read' is decided twice"),
        ("allow read", "change deny write", "'write' is not in the base"),
        ("allow read", "change allow read", "'read' is changed twice, or to what it was"),
        ("allow read", "change deny read\nchange absent read", "'read' is changed twice, or to what it was"),
        ("deny socket\nrefuse socket EPERM arg0 is 1", "", "'socket' is not allowed"),
        ("allow socket\nrefuse socket EPERM arg6 is 1", "", "expected argN"),
        ("allow socket\nrefuse socket EPERM arg0 is", "", "the line ends too early"),
        ("allow socket\nrefuse socket EPERM arg0 is AF_NOPE", "", "unknown constant 'AF_NOPE'"),
        ("allow socket\nrefuse socket EPERM arg0 is 0x100000000", "", "unknown constant"),
        ("allow socket\nrefuse socket EPERM arg0 is 1 or arg1 is 1", "", "expected and"),
        ("allow " + "x" * 600, "", "line too long"),
    ],
)
def test_wrong_policy_is_refused(
    generator: Path, tmp_path: Path, container: str, process: str, complaint: str
) -> None:
    (tmp_path / "container.policy").write_text(container + "\n")
    (tmp_path / "process.policy").write_text(f"base container.policy\n{process}\n")
    done = subprocess.run([generator, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert done.stdout == ""


def test_every_call_of_linux_6_6_is_decided(lists: Lists) -> None:
    """Nothing is absent because it was forgotten. (Numbers after 453 are younger; see docs/reference/seccomp.md.)"""
    library = ctypes.CDLL("libseccomp.so.2")
    resolve = library.seccomp_syscall_resolve_num_arch
    resolve.restype, resolve.argtypes = ctypes.c_char_p, [ctypes.c_uint32, ctypes.c_int]
    names = {resolve(arch, number) for arch in AUDIT_ARCH.values() for number in range(454)} - {None}
    assert len(names) > 350
    for level in LEVELS:
        assert {name.decode() for name in names} <= set(lists[level])


# --- both architectures, interpreted


Instruction = tuple[int, int, int, int]
Tables = dict[tuple[str, str], list[Instruction]]


def read_tables(text: str) -> Tables:
    """The arrays of the header by (machine, level)."""
    tables: Tables = {}
    machine = level = ""
    for line in text.splitlines():
        if line.startswith(("#if defined(", "#elif defined(")):
            machine = line.split("__")[1]
        elif line.startswith("static const struct sock_filter DSEC_SECCOMP_"):
            level = line.split("DSEC_SECCOMP_")[1].split("[")[0].lower()
            tables[machine, level] = []
        elif line.startswith("    {"):
            words = line.replace("{", "").replace("}", "").replace(",", " ").split()
            values = [int(word, 0) for word in words]
            tables[machine, level] += zip(*(values[i::4] for i in range(4)), strict=True)
    return tables


@pytest.fixture(scope="module")
def tables() -> Tables:
    found = read_tables(HEADER.read_text())
    assert set(found) == {(machine, level) for machine in MACHINES for level in LEVELS}
    return found


def interpret(program: list[Instruction], arch: int, number: int, *args: int) -> tuple[int, int]:
    """The verdict of a filter and the instructions it took."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *args, *[0] * (6 - len(args)))
    at = steps = accumulator = 0
    while True:
        op, on_true, on_false, k = program[at]
        at, steps = at + 1, steps + 1
        match op:
            case 0x20:
                accumulator = struct.unpack_from("<I", data, k)[0]
            case 0x54:
                accumulator &= k
            case 0x05:
                at += k
            case 0x06:
                return k, steps
            case 0x15 | 0x25 | 0x35 | 0x45:
                holds = {
                    0x15: accumulator == k,
                    0x25: accumulator > k,
                    0x35: accumulator >= k,
                    0x45: bool(accumulator & k),
                }
                at += on_true if holds[op] else on_false
            case _:
                pytest.fail(f"an instruction nobody expects: {op:#x}")


VERDICTS = {"allow": ALLOW, "deny": refused(errno.EPERM), "absent": refused(errno.ENOSYS)}
# Arguments under which no refusal applies.
HARMLESS: dict[str, tuple[int, ...]] = {"socket": (1, 1), "socketpair": (1, 1)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("machine", MACHINES)
def test_table_decides_as_the_policy_says(tables: Tables, lists: Lists, machine: str, level: str) -> None:
    program, arch = tables[machine, level], AUDIT_ARCH[machine]
    expected = dict.fromkeys(range(1024), refused(errno.ENOSYS)) | {0xFFFFFFFF: refused(errno.ENOSYS)}
    args = {}
    for name, call in lists[level].items():
        if call.numbers[machine] >= 0:
            expected[call.numbers[machine]] = VERDICTS[call.decision]
            args[call.numbers[machine]] = HARMLESS.get(name, ())
    wrong = {}
    for number, verdict in expected.items():
        got, steps = interpret(program, arch, number, *args.get(number, ()))
        assert steps < 64, "the list is a tree, not a chain"
        if got != verdict:
            wrong[number] = (hex(got), hex(verdict))
    assert wrong == {}
    assert sum(verdict == ALLOW for verdict in expected.values()) > 200


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("machine", MACHINES)
def test_any_other_abi_is_death(tables: Tables, machine: str, level: str) -> None:
    program = tables[machine, level]
    foreign = [AUDIT_ARCH_I386, AUDIT_ARCH_ARM, 0, *(a for m, a in AUDIT_ARCH.items() if m != machine)]
    for number in range(512):
        for arch in foreign:
            assert interpret(program, arch, number, 1, 1)[0] == KILL
        if machine == "x86_64":
            assert interpret(program, AUDIT_ARCH[machine], 0x40000000 | number, 1, 1)[0] == KILL


NEW = {
    "ns": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
THREAD = 0x3D0F00  # what pthread_create asks for
HIGH = 1 << 32  # a bit above an int, which the kernel ignores
EPERM, EAFNOSUPPORT, EPROTO = errno.EPERM, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT

# name, arguments, errno at container, errno at process; 0: the call reaches the kernel
BY_ARGUMENT: list[tuple[str, tuple[int, ...], int, int]] = [
    *(("clone", (flag | 17,), EPERM, EPERM) for flag in NEW.values()),
    ("clone", (THREAD,), 0, 0),
    ("clone", (THREAD | NEW["user"] | HIGH,), EPERM, EPERM),
    ("clone", (0x1200011,), 0, 0),
    ("clone", (HIGH * 0x7E020000 | 17,), 0, 0),
    *(("personality", (value,), 0, 0) for value in (0, 8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)),
    *(("personality", (value,), EPERM, EPERM) for value in (0x400000, 0x100000, 4, HIGH | 0x400000)),
    *(
        ("ioctl", (0, value), EPERM, EPERM)
        for value in (0x5412, 0x541C, 0x5423, HIGH | 0x5412, HIGH * 7 | 0x541C)
    ),
    *(("ioctl", (0x5412, value), 0, 0) for value in (0x5401, 0x5413, 0x541B, 0x5421, 0x80045430, 0x15412)),
    *(("socket", (family, 1), 0, EPERM) for family in (1, 2, 10, 16, HIGH | 2)),
    *(
        ("socket", (f, 3), EAFNOSUPPORT, EPERM)
        for f in (0, 3, 4, 17, 21, 29, 30, 31, 38, 40, 41, 43, 44, HIGH | 38)
    ),
    *(("socket", (16, 3, protocol), EPROTO, EPERM) for protocol in (2, 4, 9, 12, 15, 16)),
    *(("socket", (2, 2, protocol), 0, EPERM) for protocol in (0, 1, 17)),
    *(("socket", (2, 1, protocol), EPROTO, EPERM) for protocol in (33, 132, 256, 262)),
    ("socket", (10, 0x80802, 58), 0, EPERM),
    ("socket", (10, 0x80805, 0), EPROTO, EPERM),
    ("socket", (1, 0x80805, 0), 0, EPERM),
    ("socketpair", (1, 0x80801), 0, 0),
    ("socketpair", (1, 0x80805), 0, 0),
    ("socketpair", (1, 2), 0, EPERM),
    ("socketpair", (1, 3), 0, EPERM),
    ("socketpair", (1, HIGH | 2), 0, EPERM),
    ("socketpair", (30, 1), EAFNOSUPPORT, EAFNOSUPPORT),
    ("prlimit64", (0, 7), 0, 0),
    ("prlimit64", (1, 7), 0, EPERM),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "args", "container", "process"), BY_ARGUMENT)
def test_refusals_by_argument(
    tables: Tables, lists: Lists, machine: str, name: str, args: tuple[int, ...], container: int, process: int
) -> None:
    number = lists["container"][name].numbers[machine]
    for level, wanted in (("container", container), ("process", process)):
        got, _ = interpret(tables[machine, level], AUDIT_ARCH[machine], number, *args)
        assert got == (refused(wanted) if wanted else ALLOW), level


# --- this machine, by calling


PROBE = r"""
#include <errno.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "seccomp_tables.h"

static char buffer[65536];

static void confine(const char *level) {
    struct sock_fprog c = {DSEC_SECCOMP_CONTAINER_LEN, (struct sock_filter *)DSEC_SECCOMP_CONTAINER};
    struct sock_fprog p = {DSEC_SECCOMP_PROCESS_LEN, (struct sock_filter *)DSEC_SECCOMP_PROCESS};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) exit(70);
    if (!strcmp(level, "none")) return;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, !strcmp(level, "process") ? &p : &c)) exit(71);
}

/* "NUMBER:ARG,ARG…"; `buf` is the address of a zeroed buffer, `bad` one that nothing is mapped at. */
static void call(char *text) {
    unsigned long args[6] = {0};
    long number = strtol(strsep(&text, ":"), NULL, 0);
    for (int i = 0; i < 6 && text; i++) {
        char *word = strsep(&text, ",");
        if (!strcmp(word, "buf")) args[i] = (unsigned long)buffer;
        else if (!strcmp(word, "bad")) args[i] = 1;
        else args[i] = strtoul(word, NULL, 0);
    }
    memset(buffer, 0, sizeof buffer);
    long r = syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]);
    int error = r < 0 ? errno : 0;
    if (number == SYS_clone) {
        if (r == 0) _exit(0);
        if (r > 0) waitpid((pid_t)r, NULL, 0);
    }
    printf("%d\n", error);
}

int main(int argc, char **argv) {
    confine(argv[1]);
    if (!strcmp(argv[2], "exec")) {
        execvp(argv[3], argv + 3);
        return 72;
    }
#ifdef __x86_64__
    if (!strcmp(argv[2], "int80")) {
        long r = 20; /* getpid */
        __asm__ volatile("int $0x80" : "+a"(r) : : "memory", "r8", "r9", "r10", "r11");
        printf("%ld\n", r);
        return 0;
    }
#endif
    for (int i = 2; i < argc; i++) call(argv[i]);
    return 0;
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probe")
    source, program = directory / "probe.c", directory / "probe"
    source.write_text(PROBE)
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}"]
    subprocess.run(["gcc", *flags, "-o", program, source], check=True, timeout=60)
    return program


def run(probe: Path, level: str, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [probe, level, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=options.get("cwd"),
        stdin=subprocess.DEVNULL,
    )


def errno_of(probe: Path, level: str, number: int, args: str) -> int:
    done = run(probe, level, f"{number}:{args}")
    assert done.returncode == 0, (done.returncode, done.stderr)
    return int(done.stdout)


ENOSYS = errno.ENOSYS
# name, arguments (never such that the call would succeed in doing harm), errno at container, at process; None: as without
REAL: list[tuple[str, str, int | None, int | None]] = [
    ("clone3", "bad,0", ENOSYS, ENOSYS),
    *(("clone", f"{flag | 17}", EPERM, EPERM) for flag in NEW.values()),
    ("clone", f"{17}", None, None),
    ("unshare", "0", EPERM, EPERM),
    ("setns", "-1,0", EPERM, EPERM),
    ("mount", "bad,bad,bad,0,0", EPERM, EPERM),
    ("umount2", "bad,0", EPERM, EPERM),
    ("open_tree", "-1,bad,0", EPERM, EPERM),
    ("move_mount", "-1,bad,-1,bad,0", EPERM, EPERM),
    ("fsopen", "bad,0", EPERM, EPERM),
    ("fsconfig", "-1,0,0,0,0", EPERM, EPERM),
    ("fsmount", "-1,0,0", EPERM, EPERM),
    ("mount_setattr", "-1,bad,0,bad,32", EPERM, EPERM),
    ("pivot_root", "bad,bad", EPERM, EPERM),
    ("chroot", "bad", EPERM, EPERM),
    ("bpf", "0,bad,64", EPERM, EPERM),
    ("perf_event_open", "bad,0,0,-1,0", EPERM, EPERM),
    ("userfaultfd", "0xffff", EPERM, EPERM),
    ("io_uring_setup", "1,bad", EPERM, EPERM),
    ("io_uring_enter", "-1,0,0,0,0,0", EPERM, EPERM),
    ("keyctl", "0,-3,0", EPERM, EPERM),
    ("add_key", "bad,bad,0,0,0", EPERM, EPERM),
    ("request_key", "bad,bad,0,0", EPERM, EPERM),
    ("kexec_load", "0,0,0,0xffffffff", EPERM, EPERM),
    ("finit_module", "-1,bad,0", EPERM, EPERM),
    ("init_module", "bad,0,bad", EPERM, EPERM),
    ("delete_module", "bad,0", EPERM, EPERM),
    ("reboot", "0,0,0,0", EPERM, EPERM),
    ("swapon", "bad,0", EPERM, EPERM),
    ("swapoff", "bad", EPERM, EPERM),
    ("syslog", "9,0,0", EPERM, EPERM),
    ("acct", "bad", EPERM, EPERM),
    ("clock_settime", "0,bad", EPERM, EPERM),
    ("settimeofday", "bad,0", EPERM, EPERM),
    ("adjtimex", "bad", EPERM, EPERM),
    ("quotactl", "0,bad,0,0", EPERM, EPERM),
    ("open_by_handle_at", "-1,bad,0", EPERM, EPERM),
    ("kcmp", "0,0,99,0,0", EPERM, EPERM),
    ("fanotify_init", "0xffffffff,0", EPERM, EPERM),
    ("memfd_secret", "0xffff", ENOSYS, ENOSYS),
    ("personality", "0xffffffff", None, None),
    ("personality", "0x400000", EPERM, EPERM),
    ("ioctl", "-1,0x5412,buf", EPERM, EPERM),
    ("ioctl", "-1,0x100005412,buf", EPERM, EPERM),
    ("ioctl", "-1,0x541c,buf", EPERM, EPERM),
    ("ioctl", "-1,0x5423,buf", EPERM, EPERM),
    ("ioctl", "-1,0x5401,buf", None, None),
    ("socket", "1,1,0", None, EPERM),
    ("socket", "1,2,0", None, EPERM),
    ("socket", "2,1,0", None, EPERM),
    ("socket", "2,2,0", None, EPERM),
    ("socket", "10,1,0", None, EPERM),
    ("socket", "16,3,0", None, EPERM),
    ("socket", "16,3,4", EPROTO, EPERM),
    ("socket", "16,3,15", EPROTO, EPERM),
    ("socket", "17,3,0", EAFNOSUPPORT, EPERM),
    ("socket", "38,5,0", EAFNOSUPPORT, EPERM),
    ("socket", "40,1,0", EAFNOSUPPORT, EPERM),
    ("socketpair", "1,1,0,buf", None, None),
    ("socketpair", "1,5,0,buf", None, None),
    ("socketpair", "1,2,0,buf", None, EPERM),
    ("bind", "-1,buf,2", None, EPERM),
    ("connect", "-1,buf,2", None, EPERM),
    ("listen", "-1,1", None, EPERM),
    ("accept4", "-1,0,0,0", None, None),
    ("ptrace", "0,0,0,0", None, EPERM),
    ("process_vm_readv", "0x7fffffff,buf,1,buf,1,0", None, EPERM),
    ("process_vm_writev", "0x7fffffff,buf,1,buf,1,0", None, EPERM),
    ("pidfd_getfd", "-1,0,0", None, EPERM),
    ("process_mrelease", "-1,0", None, EPERM),
    ("prlimit64", "0,7,0,buf", None, None),
    ("prlimit64", "1,7,0,buf", None, EPERM),
    ("shmctl", "-1,2,buf", None, ENOSYS),
    ("semctl", "-1,0,2,buf", None, ENOSYS),
    ("msgctl", "-1,2,buf", None, ENOSYS),
    ("mq_unlink", "bad", None, ENOSYS),
    ("landlock_create_ruleset", "0,0,1", None, None),
    ("seccomp", "2,0,buf", None, None),
    ("setfsuid", "-1", None, None),
    ("openat2", "-100,bad,buf,24", None, None),
    ("statx", "-100,bad,0,0,buf", None, None),
    ("pidfd_open", "1,0", None, None),
    ("close_range", "1000,1001,0", None, None),
    ("io_setup", "0,buf", None, None),
    ("memfd_create", "bad,0", None, None),
    ("membarrier", "0,0,0", None, None),
    ("mknodat", "-1,bad,0x1180,0", None, None),
    ("timerfd_create", "0,0", None, None),
]


@pytest.mark.parametrize(("name", "args", "container", "process"), REAL)
def test_call(
    probe: Path, lists: Lists, name: str, args: str, container: int | None, process: int | None
) -> None:
    number = lists["container"][name].numbers[HERE]
    control = errno_of(probe, "none", number, args)
    for level, wanted in (("container", container), ("process", process)):
        assert errno_of(probe, level, number, args) == (control if wanted is None else wanted), level
    if control in (container, process):
        pytest.skip(f"without a table {name} is {errno.errorcode[control]} too: nothing is proved here")


@pytest.mark.skipif(HERE != "x86_64", reason="x32 exists on x86-64 only")
@pytest.mark.parametrize("level", LEVELS)
def test_x32_call_is_death(probe: Path, level: str) -> None:
    getpid = "0x40000027:0"
    assert run(probe, "none", getpid).returncode == 0
    assert run(probe, level, getpid).returncode == -signal.SIGSYS


@pytest.mark.skipif(HERE != "x86_64", reason="int 0x80 exists on x86-64 only")
@pytest.mark.parametrize("level", LEVELS)
def test_i386_call_is_death(probe: Path, level: str) -> None:
    if run(probe, "none", "int80").returncode:
        pytest.skip("this kernel has no 32-bit calls: nothing is proved here")
    assert run(probe, level, "int80").returncode == -signal.SIGSYS


# --- programs


PYTHON = """
import asyncio, concurrent.futures, ctypes, mmap, multiprocessing, os, select, signal, sqlite3, ssl, subprocess
import tempfile, threading

def square(n):
    return n * n

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, range(2)) == [0, 1]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(square, range(100))) == 328350
    assert subprocess.run(["sh", "-c", "echo a | cat"], capture_output=True).stdout == b"a\\n"
    with tempfile.TemporaryDirectory() as d:
        database = sqlite3.connect(d + "/x.db")
        database.execute("pragma journal_mode=wal")
        database.execute("create table t (a)")
        database.commit()
        database.close()
        os.mkfifo(d + "/fifo")
        os.symlink("fifo", d + "/link")
        os.setxattr(d, "user.a", b"b") if os.environ.get("XATTR") else None
    ssl.create_default_context()
    a, b = os.openpty()
    assert os.isatty(b)
    assert os.fstat(os.memfd_create("m")).st_size == 0
    async def main():
        child = await asyncio.create_subprocess_exec("sh", "-c", "exit 3")
        assert await child.wait() == 3
    asyncio.run(main())
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    print("done")
"""

NETWORK = """
import asyncio, contextlib, socket, threading
assert socket.if_nameindex()
with contextlib.suppress(socket.gaierror):  # a small system has no /etc/hosts; it is looked up all the same
    socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
async def main():
    async def echo(reader, writer):
        writer.write(await reader.read(5))
        writer.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello")
    assert await reader.read() == b"hello"
    writer.close()
    server.close()
asyncio.run(main())
print("done")
"""

NO_NETWORK = """
import socket
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_ALG, socket.AF_VSOCK):
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except PermissionError:
        continue
    raise SystemExit(f"{family} was allowed")
a, b = socket.socketpair()
a.sendall(b"x")
assert b.recv(1) == b"x"
print("done")
"""

SHELL = """
set -eu
export HOME="$PWD" GIT_CONFIG_NOSYSTEM=1
cat <(echo process substitution) > out
tar cf - out | gzip | gzip -d | tar tf -
find . -name out -print0 | xargs -0 -n1 sha256sum > sums; sha256sum -c sums
(sleep 0.01 & wait); coproc C { cat; }; kill "$C_PID"; wait || true
git init -q repo; cd repo; echo x > x; git add x
git -c user.name=a -c user.email=a@b commit -q -m one; git gc -q; git log --oneline | wc -l
echo done
"""


def same_with_and_without(probe: Path, level: str, cwd: Path, *argv: str) -> None:
    control = run(probe, "none", "exec", *argv, cwd=str(cwd))
    assert control.stdout.splitlines()[-1:] == ["done"], control.stderr
    shutil.rmtree(cwd / "repo", ignore_errors=True)
    done = run(probe, level, "exec", *argv, cwd=str(cwd))
    assert (done.returncode, done.stdout) == (0, control.stdout), done.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_python_works(probe: Path, tmp_path: Path, level: str) -> None:
    script = tmp_path / "work.py"
    script.write_text(PYTHON)
    same_with_and_without(probe, level, tmp_path, sys.executable, str(script))


def test_network_works_in_a_container(probe: Path, tmp_path: Path) -> None:
    same_with_and_without(probe, "container", tmp_path, sys.executable, "-c", NETWORK)


def test_no_socket_at_process(probe: Path, tmp_path: Path) -> None:
    assert "was allowed" in run(probe, "none", "exec", sys.executable, "-c", NO_NETWORK).stderr
    done = run(probe, "process", "exec", sys.executable, "-c", NO_NETWORK, cwd=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_shell_and_git_work(probe: Path, tmp_path: Path, level: str) -> None:
    if shutil.which("git") is None or shutil.which("bash") is None:
        pytest.skip("needs bash and git")
    same_with_and_without(probe, level, tmp_path, "bash", "-c", SHELL)


def test_debugger_works_in_a_container_only(probe: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    trace = ("exec", "strace", "-f", "-o", "/dev/null", "true")
    if run(probe, "none", *trace).returncode:
        pytest.skip("strace does not work here at all: nothing is proved")
    assert run(probe, "container", *trace).returncode == 0
    assert run(probe, "process", *trace).returncode != 0


def test_filters_stack(probe: Path) -> None:
    """A program may restrict itself further, as browsers do."""
    done = run(probe, "container", "exec", str(probe), "process", "exec", sys.executable, "-c", NO_NETWORK)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
