import os

import orjson
import pytest

from longarc.errors import CheckpointError, ResourceError
from longarc.runs.checkpoint import CheckpointWriter, list_checkpoints, read_manifest, verify
from longarc.runs.directory import StageDirectory
from small_disk import file_size_limit

FACTS = {
    "kind": "policy",
    "stage": "sft",
    "policy_version": 7,
    "model": {"hidden_size": 128},
    "tokenizer_sha256": "ab" * 32,
}


def fill(directory):
    (directory / "model.safetensors").write_bytes(b"w" * 1000)
    (directory / "optimizer").mkdir()
    (directory / "optimizer" / "rank0.pt").write_bytes(b"o" * 10)


@pytest.fixture
def writer(tmp_path):
    return CheckpointWriter(tmp_path / "checkpoints", keep_last=2, clock=lambda: 12.5)


def test_a_checkpoint_says_what_it_is_and_verifies(writer):
    path = writer.write(fill, step=3, info={"attention": "sparse"}, **FACTS)
    manifest = verify(path)
    assert path.name == "step-000003"
    assert manifest == read_manifest(path)
    assert (manifest.step, manifest.policy_version, manifest.created_at_s) == (3, 7, 12.5)
    assert manifest.info == {"attention": "sparse"}
    assert sorted(manifest.files) == ["model.safetensors", "optimizer/rank0.pt"]
    assert manifest.files["model.safetensors"].size_bytes == 1000


def test_a_truncated_file_is_named_with_both_sizes(writer):
    path = writer.write(fill, step=0, **FACTS)
    os.truncate(path / "model.safetensors", 400)
    with pytest.raises(CheckpointError, match=r"model.safetensors has 400 bytes, expected 1000"):
        verify(path)


def test_a_changed_byte_is_named_with_both_digests(writer):
    path = writer.write(fill, step=0, **FACTS)
    (path / "model.safetensors").write_bytes(b"x" + b"w" * 999)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors has sha256 \w{64}, expected \w{64}"
    ):
        verify(path)


def test_a_missing_file_is_named(writer):
    path = writer.write(fill, step=0, **FACTS)
    (path / "optimizer" / "rank0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer/rank0.pt is missing, expected 10 bytes"):
        verify(path)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"schema_version": 1, "kind": "policy"}'])
def test_a_damaged_manifest_is_a_checkpoint_error(writer, content):
    path = writer.write(fill, step=0, **FACTS)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest.json"):
        verify(path)


def test_a_newer_manifest_names_both_versions(writer):
    path = writer.write(fill, step=0, **FACTS)
    data = orjson.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(orjson.dumps(data | {"schema_version": 2}))
    with pytest.raises(CheckpointError, match="version 2, this LongArc reads 1"):
        verify(path)


def test_a_callback_that_fails_leaves_nothing(writer, tmp_path):
    def fail(directory):
        fill(directory)
        raise KeyError("optimizer state")

    with pytest.raises(KeyError):
        writer.write(fail, step=0, **FACTS)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_callback_that_writes_nothing_is_refused(writer):
    with pytest.raises(CheckpointError, match="nothing was written"):
        writer.write(lambda directory: None, step=0, **FACTS)


def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(writer, tmp_path):
    writer.write(fill, step=0, **FACTS)
    with file_size_limit(500), pytest.raises(ResourceError, match="Nothing was half-written"):
        writer.write(fill, step=1, **FACTS)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000000"]
    verify(writer.path(0))


def test_what_a_crash_left_half_written_is_removed_at_the_next_start(tmp_path):
    leftover = tmp_path / "checkpoints" / ".tmp-step-000004"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    CheckpointWriter(tmp_path / "checkpoints", keep_last=1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_only_the_last_ones_are_kept_in_numeric_order(writer, tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        writer.write(fill, step=step, **FACTS)
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-1000000", "step-1000001"]


def test_the_final_checkpoint_is_kept_whatever_comes_later(tmp_path):
    stage = StageDirectory(tmp_path)
    writer = stage.writer(keep_last=1)
    stage.set_final(writer.write(fill, step=0, **FACTS))
    for step in (1, 2):
        writer.write(fill, step=step, **FACTS)
    assert [path.name for path in stage.checkpoints()] == ["step-000000", "step-000002"]
    assert stage.final() == writer.path(0)


def test_a_step_is_written_once_unless_what_is_there_is_damaged(writer):
    path = writer.write(fill, step=0, **FACTS)
    with pytest.raises(CheckpointError, match="a step is written once"):
        writer.write(fill, step=0, **FACTS)
    os.truncate(path / "model.safetensors", 1)
    writer.write(fill, step=0, **FACTS)
    verify(path)


def test_the_newest_intact_checkpoint_is_where_a_stage_resumes(tmp_path):
    stage = StageDirectory(tmp_path)
    assert stage.latest() is None
    writer = stage.writer(keep_last=3)
    for step in range(3):
        writer.write(fill, step=step, **FACTS)
    os.truncate(writer.path(2) / "model.safetensors", 10)
    assert stage.latest() == writer.path(1)


def test_only_an_intact_checkpoint_of_the_stage_can_be_its_final_one(tmp_path):
    stage, other = StageDirectory(tmp_path / "a"), StageDirectory(tmp_path / "b")
    foreign = other.writer(keep_last=1).write(fill, step=0, **FACTS)
    with pytest.raises(CheckpointError, match="is not in"):
        stage.set_final(foreign)
    own = stage.writer(keep_last=1).write(fill, step=0, **FACTS)
    os.truncate(own / "model.safetensors", 10)
    with pytest.raises(CheckpointError, match="has 10 bytes"):
        stage.set_final(own)
    assert stage.final() is None


def test_a_damaged_pointer_to_the_final_checkpoint_is_a_checkpoint_error(tmp_path):
    (tmp_path / "final.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"final.json is damaged"):
        StageDirectory(tmp_path).final()


def test_keeping_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep at least 1"):
        CheckpointWriter(tmp_path, keep_last=0)


async def test_a_checkpoint_can_be_filled_across_awaits(writer):
    async def save(directory):
        fill(directory)

    with writer.open(step=5, **FACTS) as staging:
        await save(staging)
    verify(writer.path(5))
