"""Manifests: names, sizes and checksums of the files in a folder, to detect missing and damaged ones.

The checksum is CRC-32: it detects any flipped bit, and takes 0.2 s for 500 MB, half the time of SHA-256. It does not
protect against deliberate changes.
"""

import json
import zlib
from pathlib import Path

from hf_sphere.utils.files import write_json

MANIFEST_FILE = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` for all files below a folder. It is written last, so it marks a complete folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_FILE)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": _checksum(path)} for path in paths
    }
    write_json(folder / MANIFEST_FILE, {"files": files}, strict=True)


def find_damage(folder: Path) -> str | None:
    """Compare the files of a folder with its manifest; files that the manifest does not list are ignored.

    Returns:
        A description of the first file that is missing or has changed, or None.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = {name: (int(values["size"]), str(values["crc32"])) for name, values in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except OSError as error:
        return f"{MANIFEST_FILE} cannot be read: {error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST_FILE} is damaged"
    for name, (size, checksum) in files.items():
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"{name} is damaged: it has {path.stat().st_size:,} bytes instead of {size:,}"
            if _checksum(path) != checksum:
                return f"{name} is damaged: it does not match its checksum in {MANIFEST_FILE}"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"
