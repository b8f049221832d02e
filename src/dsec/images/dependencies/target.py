"""The Python that an image has, read from its tree. Nothing of the image is run: it may be hostile, or of another machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from packaging.tags import Tag, compatible_tags, cpython_tags

from dsec.errors import BadRequest, Unsupported
from dsec.images.dependencies.inside import find, resolved
from dsec.images.dependencies.program import libc_version, read_program, search
from dsec.model.checks import check_path, shown

_PLACES: Final = ("/usr/local/bin/python3", "/usr/bin/python3")
_NAMED: Final = re.compile(r"python3\.(\d{1,3})t?")
_SOABI: Final = re.compile(rb"'SOABI':\s*'cpython-(\d+[a-z]*)[-']")
_EXTENSION: Final = re.compile(r"\.cpython-(\d+[a-z]*)-[^.]*\.so$")
# A wheel says with these names what manylinux_2_N says with its number.
_LEGACY: Final = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_OLDEST: Final = {"x86_64": 5}
_OLDEST_ELSEWHERE: Final = 17
_FORMS: Final = {
    "interpreter": r"(/[A-Za-z0-9._+-]+)+",
    "version": r"3\.\d{1,3}\.\d{1,3}((a|b|rc)\d{1,3})?",
    "abi": r"cp3\d{1,3}[a-z]{0,4}",
    "libc": r"glibc|musl",
    "libc_version": r"\d{1,3}\.\d{1,3}",
    "machine": r"[a-z0-9_]{1,20}",
    "packages": r"(/[A-Za-z0-9._+-]+)+",
    "scripts": r"(/[A-Za-z0-9._+-]+)+",
    "data": r"(/[A-Za-z0-9._+-]+)+",
    "headers": r"(/[A-Za-z0-9._+-]+)+",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTarget:
    """A CPython on Linux, and where in its image a package goes. Paths are absolute and of the image.

    Attributes:
        interpreter: the program, as a script names it. version: in full, ``3.11.2``. abi: ``cp311``.
        libc: ``glibc`` or ``musl``. libc_version: ``2.36``. machine: ``x86_64``, as the kernel names it.
        packages: what ``import`` finds. scripts: on PATH. data: prefix of other files. headers: of C headers.

    Raises:
        BadRequest: a field is not of that form.
    """

    interpreter: str
    version: str
    abi: str
    libc: str
    libc_version: str
    machine: str
    packages: str
    scripts: str
    data: str
    headers: str

    def __post_init__(self) -> None:
        for name, form in _FORMS.items():
            value: object = getattr(self, name)
            dotted = name in ("interpreter", "packages", "scripts", "data", "headers")
            if not isinstance(value, str) or not re.fullmatch(form, value, re.ASCII):
                raise BadRequest(
                    f"target {name}: {shown(value)} is not what it may be", hint=form, field=name
                )
            if dotted and {".", ".."} & set(value.split("/")):
                raise BadRequest(f"target {name}: {shown(value)} has '.' or '..' in it", field=name)

    @property
    def python(self) -> str:
        """Major and minor version, ``3.11``."""
        major, minor, _ = self.version.split(".", 2)
        return f"{major}.{minor}"

    @property
    def platforms(self) -> tuple[str, ...]:
        """Platform tags of wheels that run there, best first."""
        major, minor = (int(part) for part in self.libc_version.split("."))
        if self.libc == "musl":
            names = [f"musllinux_{major}_{number}" for number in range(minor, -1, -1)]
        else:
            names = []
            for number in range(minor, _OLDEST.get(self.machine, _OLDEST_ELSEWHERE) - 1, -1):
                names.append(f"manylinux_{major}_{number}")
                names.extend([_LEGACY[number]] if number in _LEGACY else [])
        return tuple(f"{name}_{self.machine}" for name in [*names, "linux"])

    @property
    def markers(self) -> Mapping[str, str]:
        """Values of environment markers there. Of the kernel nothing is known: release and version are empty."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.version,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.version,
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def tags(self) -> frozenset[Tag]:
        """Every tag that a wheel for this target may have."""
        version = tuple(int(part) for part in self.python.split("."))
        platforms = list(self.platforms)
        exact = cpython_tags(version, [self.abi], platforms)
        return frozenset([*exact, *compatible_tags(version, f"cp{self.python.replace('.', '')}", platforms)])

    def facts(self) -> dict[str, str]:
        """Every field by name."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


def read_target(tree: Path, *, interpreter: str = "") -> PythonTarget:
    """The Python of the image whose tree this is. Blocking, some 50 ms.

    Symbolic links are followed within the tree only, whatever they name.

    Args:
        tree: root of the image.
        interpreter: path inside, when the image has several; otherwise the first ``python3`` of the PATH.

    Raises:
        BadRequest: no path. Unsupported: no Python there, or one of another kind (the message says what was found).
        OSError.
    """
    if interpreter:
        check_path("interpreter", interpreter)
    asked = [interpreter] if interpreter else list(_PLACES)
    named = next((path for path in asked if find(tree, path) is not None), None)
    if named is None:
        raise Unsupported(
            f"the image has no Python: none of {', '.join(asked)} is there",
            hint="take a base with Python 3, or leave the dependencies out",
        )
    real = resolved(tree, named)
    program = read_program(tree / real[1:])
    prefix = str(Path(real).parent.parent)
    library = _library(tree, prefix, real)
    minor = library.rsplit(".", 1)[1].rstrip("t")
    return PythonTarget(
        interpreter=_versioned(tree, named, library),
        version=_version(tree, real, prefix, minor),
        abi=f"cp{_abi(tree, f'{prefix}/lib/{library}', minor)}",
        libc=program.libc,
        libc_version=libc_version(tree, program),
        machine=program.machine,
        **_layout(tree, prefix, library),
    )


def _library(tree: Path, prefix: str, real: str) -> str:
    """``python3.11``: the name of the directory with the standard library.  Raises: Unsupported."""
    name = Path(real).name
    if _NAMED.fullmatch(name) and find(tree, f"{prefix}/lib/{name}/os.py") is not None:
        return name
    top = find(tree, f"{prefix}/lib")
    names = [path.name for path in top.iterdir() if _NAMED.fullmatch(path.name)] if top is not None else []
    present = sorted(each for each in names if find(tree, f"{prefix}/lib/{each}/os.py") is not None)
    if len(present) != 1:
        raise Unsupported(
            f"{real} of the image: which Python it is cannot be told: in {prefix}/lib there is "
            f"{' and '.join(present) or 'no standard library of Python 3'}",
            hint="CPython in its usual layout is supported; name its versioned program",
        )
    return present[0]


def _versioned(tree: Path, named: str, library: str) -> str:
    """The program with its version in its name when that is there, so that another default breaks no script."""
    exact = f"{Path(named).parent}/{library}"
    return exact if find(tree, exact) is not None else named


def _version(tree: Path, real: str, prefix: str, minor: str) -> str:
    """In full, from the text that the program itself would print.  Raises: Unsupported."""
    pattern = re.compile(rb"(?<![\w.])(3\.%s\.\d{1,3}(?:(?:a|b|rc)\d{1,3})?)\+?\x00" % minor.encode())
    for path in _programs(tree, real, prefix, minor):
        if found := search(path, pattern):
            return found.decode()
    raise Unsupported(
        f"{real} of the image holds no version of Python 3.{minor}",
        hint="only CPython is supported",
    )


def _programs(tree: Path, real: str, prefix: str, minor: str) -> Iterator[Path]:
    """The program, and the shared libraries that may hold most of it."""
    yield tree / real[1:]
    for directory in (f"{prefix}/lib", f"{prefix}/lib64"):
        top = find(tree, directory)
        for path in sorted(top.glob(f"libpython3.{minor}*.so*")) if top is not None else ():
            inner = find(tree, f"{directory}/{path.name}")
            if inner is not None and inner.is_file():
                yield inner
        for path in sorted(top.glob(f"*-linux-*/libpython3.{minor}*.so*")) if top is not None else ():
            inner = find(tree, f"{directory}/{path.parent.name}/{path.name}")
            if inner is not None and inner.is_file():
                yield inner


def _abi(tree: Path, library: str, minor: str) -> str:
    """``311``, with ``t`` for free threading and ``d`` for a debug build."""
    top = find(tree, library)
    for path in sorted(top.glob("_sysconfigdata_*.py")) if top is not None else ():
        inner = find(tree, f"{library}/{path.name}")
        if inner is not None and inner.is_file() and (found := search(inner, _SOABI)):
            return found.decode()
    dynamic = find(tree, f"{library}/lib-dynload")
    for path in sorted(dynamic.iterdir()) if dynamic is not None else ():
        if match := _EXTENSION.search(path.name):
            return match[1]
    return f"3{minor}"


def _layout(tree: Path, prefix: str, library: str) -> dict[str, str]:
    """Where the image's Python looks for what its distribution did not bring."""
    site = find(tree, f"{prefix}/lib/{library}/site.py")
    debian = site is not None and search(site, re.compile(b"(dist-packages)")) is not None
    data = "/usr/local" if debian else prefix
    return {
        "packages": f"{data}/lib/{library}/{'dist' if debian else 'site'}-packages",
        "scripts": "/usr/local/bin" if prefix in ("/usr", "/usr/local") else f"{prefix}/bin",
        "data": data,
        "headers": f"{data}/include/{library}",
    }
