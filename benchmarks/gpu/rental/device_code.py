# SPDX-License-Identifier: Apache-2.0
"""Reduce a shared library's device code to one compute capability.

nvcc puts the device code of all kernels into the section `.nv_fatbin`: a row of containers, one for
each source file, at multiples of 8 bytes. All numbers are little-endian. A container is

    u32 magic 0xba55ed50, u16 version, u16 header bytes, u64 bytes after the header

followed by entries, one for each architecture and kind. An entry is

    u16 kind (1: PTX, 2: machine code), u16 version, u32 header bytes, u64 payload bytes,
    u32 compressed bytes, u32 offset of options, u16 minor, u16 major, u32 architecture, ...

and then its payload. CUDA's runtime reads the headers, selects one entry and reads the payload of
that one alone. So the payloads of all others can be zeros: no size, offset or symbol changes, and
an archive stores the zeros in almost no bytes. PTX is removed too, since machine code of the
device's own capability is preferred to it.
"""

import mmap
import struct
from pathlib import Path

SECTION = b".nv_fatbin"
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
MACHINE_CODE = 2


def keep_device_code(library: Path, architecture: int) -> tuple[int, int]:
    """Zero the device code of all other architectures in place; return bytes kept and zeroed.

    `architecture` is ten times the compute capability: 90 for 9.0. Raises ValueError if the file
    has no device code, or a container without machine code of `architecture`, whose kernels could
    not run; the file is then unchanged.
    """
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        payloads = [
            p for start, size in _sections(library, data) for p in _payloads(data, start, size)
        ]
        containers = {container for container, _, _, _ in payloads}
        complete = {container for container, arch, _, _ in payloads if arch == architecture}
        if containers - complete or not containers:
            raise ValueError(
                f"{library} has no machine code for sm_{architecture} in "
                f"{len(containers - complete)} of its {len(containers)} containers of device code"
            )
        kept = zeroed = 0
        for _, arch, start, size in payloads:
            if arch == architecture:
                kept += size
            else:
                zeroed += size
                data[start : start + size] = bytes(size)
    return kept, zeroed


def _sections(library: Path, data: mmap.mmap) -> list[tuple[int, int]]:
    """Return offset and size of the sections of device code of a 64-bit ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [SECTION_HEADER.unpack_from(data, table + i * size) for i in range(count)]
    found = []
    for header in headers:
        name = headers[names][4] + header[0]
        if data[name : data.find(b"\0", name)] == SECTION:
            found.append((header[4], header[5]))
    if not found:
        raise ValueError(f"{library} has no section {SECTION.decode()}: it holds no device code")
    return found


def _payloads(data: mmap.mmap, start: int, size: int) -> list[tuple[int, int, int, int]]:
    """Return container, architecture (0 for PTX), offset and size of each entry's payload."""
    found = []
    at, end = start, start + size
    while (container := data.find(MAGIC, at, end)) >= 0:
        _, _, header, length = CONTAINER.unpack_from(data, container)
        entry = container + header
        at = entry + length
        while entry < at:
            kind, _, head, payload, _, _, _, _, arch = ENTRY.unpack_from(data, entry)
            found.append((container, arch if kind == MACHINE_CODE else 0, entry + head, payload))
            entry += head + payload
    return found
