"""OCI image layouts and ``docker save`` archives, read with suspicion: every blob is bounded and checked by its digest."""

from __future__ import annotations

import json
import os
import platform
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec.errors import BadRequest, NotFound, TooLarge, Unsupported
from dsec.images.archive import take_apart
from dsec.images.tree import file_digest
from dsec.images.unpack import MAX_BYTES, LayerFile
from dsec.ports.storage import ImageConfig

Find = Callable[[str], Path]
"""A file of the layout by its name in it.  Raises: BadRequest."""

MAX_LAYERS: Final = 128
_JSON_BYTES: Final = 4 * 2**20
_MANIFESTS: Final = 1000
_NESTED: Final = 3
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_LAYER_TYPES: Final = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar|docker\.image\.rootfs\.(diff|foreign\.diff)\.tar)"
    r"([.+](gzip|zstd))?"
)
_MAGIC: Final = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_TAGS: Final = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_HINT: Final = "it is damaged, or no image: make it again with skopeo copy, or docker save"


@dataclass(frozen=True, slots=True, kw_only=True)
class OciImage:
    """``source``: digest of its manifest (of a ``docker save`` archive: of its config). ``layers``: lowest first."""

    source: str
    layers: tuple[LayerFile, ...]
    config: ImageConfig


def read_image(path: Path, work: Path, *, tag: str = "", max_bytes: int = MAX_BYTES) -> OciImage:
    """The image for this machine's architecture in a layout (a directory or a tar file), or a ``docker save`` archive.

    Args:
        work: an empty directory for the parts of an archive; they are needed until the image is unpacked.
        tag: which one, when there are several.

    Raises:
        NotFound: no such path, or no such tag.
        Unsupported: none for this architecture.
        BadRequest: malformed, or a digest does not fit.
        TooLarge.
    """
    if path.is_dir():
        find = _in_directory(path)
        files: Mapping[str, Path] = {}
    elif path.is_file():
        files = take_apart(path, work, max_bytes=max_bytes)
        find = _in_archive(path, files)
        if "index.json" not in files and "manifest.json" in files:
            return _saved(find, tag, max_bytes)
    else:
        raise NotFound(
            f"there is no image at {path}",
            hint="an OCI layout (a directory or tar file), or what docker save wrote",
            path=str(path),
        )
    return _Layout(find, max_bytes).image(tag)


def has_layout(path: Path) -> bool:
    """Whether something is there that :func:`read_image` could read."""
    return path.is_file() or (path / "index.json").is_file()


def _in_directory(root: Path) -> Find:
    def find(name: str) -> Path:
        path = root / name
        try:
            kind = path.lstat().st_mode
        except OSError as error:
            raise _wrong(f"{path} is missing ({error.strerror})") from error
        if not stat.S_ISREG(kind):
            raise _wrong(f"{path} is no file")
        return path

    return find


def _in_archive(archive: Path, files: Mapping[str, Path]) -> Find:
    def find(name: str) -> Path:
        if name not in files:
            raise _wrong(f"{archive} has no {name!r}")
        return files[name]

    return find


def descriptors(manifest: Mapping[str, Any]) -> Mapping[str, int]:
    """Digest and size of the blobs that a manifest names: its config and its layers.  Raises: BadRequest, TooLarge."""
    named = [_object(manifest, "config"), *_objects(manifest, "layers", MAX_LAYERS)]
    found = {}
    for each in named:
        digest, size = each.get("digest"), each.get("size")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise _wrong(f"{digest!r:.100} is no sha256 digest")
        if not isinstance(size, int) or size < 0:
            raise _wrong(f"{size!r:.100} is no size of a blob")
        found[digest] = size
    return found


def child_for_here(index: Mapping[str, Any]) -> str | None:
    """Digest of the manifest for this machine that an index names; None: it is no index, or has none.  Raises: BadRequest, TooLarge."""
    if "manifests" not in index:
        return None
    for each in _objects(index, "manifests", _MANIFESTS):
        digest = each.get("digest")
        if _for_here(each.get("platform")) and isinstance(digest, str) and _DIGEST.fullmatch(digest):
            return digest
    return None


class _Layout:
    def __init__(self, find: Find, max_bytes: int) -> None:
        self._find, self._most, self._left = find, max_bytes, max_bytes

    def image(self, tag: str) -> OciImage:
        index = _load(self._find("index.json"))
        manifests = _objects(index, "manifests", _MANIFESTS)
        if tag:
            manifests = [each for each in manifests if _tagged(each, tag)]
            if not manifests:
                raise NotFound(
                    f"the layout has no image with the tag {tag!r}",
                    hint="look at the annotations in its index.json",
                    tag=tag,
                )
        digest, manifest = self._choose(manifests, _NESTED)
        config_path = self._blob(_object(manifest, "config"))
        config = _load(config_path)
        _fits(config)
        descriptors = _objects(manifest, "layers", MAX_LAYERS)
        diff_ids = _diff_ids(config, len(descriptors))
        layers = tuple(
            self._layer(each, diff_id) for each, diff_id in zip(descriptors, diff_ids, strict=True)
        )
        return OciImage(source=digest, layers=layers, config=_config(config))

    def _choose(self, manifests: list[Mapping[str, Any]], depth: int) -> tuple[str, Mapping[str, Any]]:
        """The manifest for this machine, with its digest; an index in an index is looked into."""
        fitting = [each for each in manifests if _for_here(each.get("platform"))]
        if not fitting:
            raise Unsupported(
                f"the image has nothing for {_here()}",
                hint="ask its maker, or use another base",
                architecture=_here(),
            )
        if len(fitting) > 1 and depth == _NESTED:
            raise BadRequest(
                f"the layout has {len(fitting)} images",
                hint="say which: oci:PATH:TAG",
                reason="several images",
            )
        descriptor = fitting[0]
        manifest = _load(self._blob(descriptor))
        if "manifests" not in manifest:
            return str(descriptor["digest"]), manifest
        if depth == 0:
            raise _wrong("indexes in indexes, too deep")
        return self._choose(_objects(manifest, "manifests", _MANIFESTS), depth - 1)

    def _blob(self, descriptor: Mapping[str, Any]) -> Path:
        """The file of a blob, once its size and digest are right."""
        digest, size = descriptor.get("digest"), descriptor.get("size")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise _wrong(f"{digest!r:.100} is no sha256 digest")
        path = self._find(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        if path.stat().st_size != size:
            raise _wrong(f"blob {digest} has {path.stat().st_size} bytes, not {size!r:.100}")
        self._left -= path.stat().st_size
        if self._left < 0:
            raise TooLarge(
                "the blobs of the image are larger than an image may be",
                hint="use a smaller image",
                limit=self._most,
            )
        found = file_digest(path)
        if found != digest:
            raise _wrong(f"blob {digest} is {found}")
        return path

    def _layer(self, descriptor: Mapping[str, Any], diff_id: str) -> LayerFile:
        kind = descriptor.get("mediaType")
        if not isinstance(kind, str) or not _LAYER_TYPES.fullmatch(kind):
            raise BadRequest(
                f"layers of type {kind!r:.200} are not known",
                hint="known are tar, tar+gzip and tar+zstd",
                kind=kind,
            )
        path = self._blob(descriptor)
        return LayerFile(path=path, compression=_compression(path), diff_id=diff_id)


def _saved(find: Find, tag: str, max_bytes: int) -> OciImage:
    """From what ``docker save`` wrote; its layers have no digest but the ``diff_id``, which unpacking checks."""
    images = _load(find("manifest.json"), list)
    chosen = [each for each in images if isinstance(each, dict) and (not tag or tag in _short_tags(each))]
    if not chosen:
        raise NotFound(
            f"the archive has no image with the tag {tag!r}", hint="docker load shows them", tag=tag
        )
    if len(chosen) > 1:
        raise BadRequest(
            f"the archive has {len(chosen)} images", hint="say which: oci:PATH:TAG", reason="several images"
        )
    name, names = chosen[0].get("Config"), chosen[0].get("Layers")
    if not isinstance(name, str) or not isinstance(names, list) or len(names) > MAX_LAYERS:
        raise _wrong("manifest.json names no config, or no layers, or too many")
    config_path = find(name)
    source = file_digest(config_path)
    named = re.search(r"[0-9a-f]{64}", name)
    if named and f"sha256:{named[0]}" != source:
        raise _wrong(f"config {name:.200} is {source}")
    config = _load(config_path)
    _fits(config)
    paths = [find(str(each)) for each in names]
    if sum(path.stat().st_size for path in paths) > max_bytes:
        raise TooLarge(
            "the layers are larger than an image may be", hint="use a smaller image", limit=max_bytes
        )
    layers = tuple(
        LayerFile(path=path, compression=_compression(path), diff_id=diff_id)
        for path, diff_id in zip(paths, _diff_ids(config, len(paths)), strict=True)
    )
    return OciImage(source=source, layers=layers, config=_config(config))


def _short_tags(image: Mapping[str, Any]) -> set[str]:
    """Its tags, in full and without the repository."""
    full = {str(tag) for tag in image.get("RepoTags") or ()}
    return full | {tag.rpartition(":")[2] for tag in full}


def _tagged(descriptor: Mapping[str, Any], tag: str) -> bool:
    annotations = descriptor.get("annotations")
    values = [annotations.get(key) for key in _TAGS] if isinstance(annotations, dict) else []
    return any(value == tag or str(value).endswith(f":{tag}") for value in values)


def _here() -> str:
    return f"linux/{_ARCHITECTURES.get(platform.machine(), platform.machine())}"


def _for_here(wanted: object) -> bool:
    """Whether a platform is this machine's; one that says nothing may be."""
    if not isinstance(wanted, dict):
        return True
    return f"{wanted.get('os')}/{wanted.get('architecture')}" == _here()


def _fits(config: Mapping[str, Any]) -> None:
    if not _for_here({"os": config.get("os", "linux"), "architecture": config.get("architecture")}):
        found = f"{config.get('os')}/{config.get('architecture')}"
        raise Unsupported(
            f"the image is for {found:.100}, this machine is {_here()}",
            hint="use an image for this machine",
            found=found,
        )


def _diff_ids(config: Mapping[str, Any], count: int) -> list[str]:
    rootfs = config.get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(_DIGEST.fullmatch(str(each)) for each in found)
    ):
        raise _wrong(f"its config does not give the digests of {count} layers")
    return [str(each) for each in found]


def _config(config: Mapping[str, Any]) -> ImageConfig:
    found = config.get("config")
    section: Mapping[str, Any] = found if isinstance(found, dict) else {}
    return ImageConfig(
        env=_strings(section, "Env"),
        working_dir=str(section.get("WorkingDir") or ""),
        user=str(section.get("User") or ""),
        entrypoint=_strings(section, "Entrypoint"),
        cmd=_strings(section, "Cmd"),
    )


def _strings(section: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = section.get(key)
    return tuple(str(each) for each in value) if isinstance(value, list) else ()


def _compression(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(4)
    return next((name for magic, name in _MAGIC if start.startswith(magic)), "")


def _object(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    if not isinstance(found, dict):
        raise _wrong(f"it has no {key!r}")
    return found


def _objects(value: Mapping[str, Any], key: str, most: int) -> list[Mapping[str, Any]]:
    found = value.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _wrong(f"it has no list of {key!r}")
    if len(found) > most:
        raise TooLarge(
            f"the image has {len(found)} {key}; {most} are allowed",
            hint="use a smaller image",
            found=len(found),
            limit=most,
        )
    return found


def read_object(path: Path) -> Mapping[str, Any]:
    """An index, a manifest or a config.  Raises: BadRequest, TooLarge."""
    found: Mapping[str, Any] = _load(path)
    return found


def _load(path: Path, kind: type = dict) -> Any:
    """Raises: BadRequest, TooLarge."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_JSON_BYTES + 1)
    if len(data) > _JSON_BYTES:
        raise TooLarge(f"{path.name} is more than {_JSON_BYTES} bytes", hint=_HINT, limit=_JSON_BYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise _wrong(f"{path.name} is no {kind.__name__}")
    return value


def _wrong(what: str) -> BadRequest:
    return BadRequest(f"this is no image: {what}", hint=_HINT, reason=what)
