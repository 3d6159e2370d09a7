"""Changes files that exportkit wrote, and gives them digests that fit: what somebody does who wants to deceive."""

import json

from exportkit.files import digest_of, write_json_file


def change_json(file, change):
    """Changes the data of a JSON file in place, or to the whole data that ``change`` returns."""
    data = json.loads(file.read_text())
    changed = change(data)
    write_json(file, changed if isinstance(changed, dict) and "format" in changed else data)


def write_json(file, data):
    """Writes data with a digest that fits, also without a format or a version."""
    rest = {name: value for name, value in data.items() if name not in ("format", "version", "digest")}
    write_json_file(file, (data.get("format"), data.get("version")), rest)


def accept_files(folder):
    """Makes all digests in a saved folder fit its files."""
    for observed in folder.rglob("observation.json"):
        accept_tensors(observed.parent)

    def listed(data):
        for name, item in data["files"].items():
            item |= {"bytes": (folder / name).stat().st_size, "xxh3_128": digest_of(folder / name)}

    change_json(folder / "manifest.json", listed)


def accept_tensors(directory):
    """Makes the digest in an observation fit its tensors."""
    tensors = directory / "tensors.safetensors"
    if tensors.exists():
        change_json(directory / "observation.json", lambda data: data.update(tensors=digest_of(tensors)))
