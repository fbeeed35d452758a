"""CUDA's libraries for a machine without a GPU: stub_libraries.py FOLDER LIBRARY..., made with gcc.

Each has the symbols and versions that LIBRARY... ask of it; every function returns an error. What is imported is found;
what is called fails.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA_ERROR_UNKNOWN = 999
MOST_SECONDS = 120
STUBS = re.compile(r"lib(cuda\.so|cublas|cudnn|cufft|cuFile|cufile|cupti|curand|cusolver|cusparse|nccl|nvshmem)")
FUNCTIONS = re.compile(r"(cu[A-Z]|cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl|pnccl|nvshmem)\w*$")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=MOST_SECONDS).stdout


def main(folder: Path, libraries: list[str]) -> None:
    versions: dict[str, set[str]] = defaultdict(set)
    """Symbol versions of each stub."""
    symbols: dict[str, set[str]] = defaultdict(set)
    """Symbols of each version. Symbols without a version have the key ''."""
    for library in libraries:
        headers = output_of("objdump", "-p", library)
        for needed in re.findall(r"NEEDED\s+(\S+)", headers):
            if STUBS.match(needed):
                versions[needed] |= set()
        for name, of_it in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", headers):
            if STUBS.match(name):
                versions[name] |= set(re.findall(r"(\S+)\n", of_it))
        for line in output_of("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if FUNCTIONS.match(name) and not name.startswith("cuda"):
                symbols[version].add(name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_it in versions.items():  # what has no version may be of any of them
        make(folder, name, {version: symbols[version] for version in of_it | {""}})


def make(folder: Path, name: str, symbols: dict[str, set[str]]) -> None:
    source, script = folder / "stub.c", folder / "stub.map"
    functions = sorted(set().union(*symbols.values()))
    source.write_text(
        "".join(f"int {each}(void) {{ return {CUDA_ERROR_UNKNOWN}; }}\n" for each in functions) + "int none;\n"
    )
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    versioned = {version: names for version, names in symbols.items() if version}
    if versioned:
        script.write_text("".join(f"{version} {{ {visible(names)} }};\n" for version, names in versioned.items()))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, str(source)], check=True, timeout=MOST_SECONDS)


def visible(names: set[str]) -> str:
    return f"global: {' '.join(f'{each};' for each in sorted(names))}" if names else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
