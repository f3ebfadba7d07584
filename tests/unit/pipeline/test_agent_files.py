"""What an agent program leaves in its box is packed in the box: nothing about the archive is taken on trust."""

import gzip
import io
import tarfile

import pytest

from longarc.errors import ContractError
from longarc.pipeline.agent import regular_files


def archive(*members, form=tarfile.GNU_FORMAT):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
        for name, data, changes in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in changes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def test_files_are_kept_and_what_is_none_or_lies_elsewhere_is_not():
    packed = archive(
        ("./a/b.txt", b"kept", {}),
        ("a/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("a/hard", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
        ("a/pipe", b"", {"type": tarfile.FIFOTYPE}),
        ("a/disk", b"", {"type": tarfile.BLKTYPE}),
        ("/etc/x", b"no", {}),
        ("../x", b"no", {}),
        ("a/../../x", b"no", {}),
    )
    assert regular_files(packed) == {"a/b.txt": b"kept"}


def test_a_file_with_holes_that_claims_a_terabyte_is_left_out():
    holes = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "big"}
    holes |= {"GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,3"}
    packed = archive(
        ("big", b"abc", {"pax_headers": holes}), ("small", b"1", {}), form=tarfile.PAX_FORMAT
    )
    assert regular_files(packed) == {"small": b"1"}


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no archive",
        gzip.compress(archive(("a", b"1", {}))),  # a megabyte of it could be a gigabyte
        archive(("a", b"1" * 2000, {}))[:1024],
        archive(("a", b"1", {}), ("a/b", b"2", {})),
        archive((".", b"1", {})),
    ],
    ids=["empty", "other", "compressed", "torn", "file is folder", "no name"],
)
def test_what_is_no_archive_of_files_in_folders_is_refused(packed):
    with pytest.raises(ContractError, match="the box packed"):
        regular_files(packed)
