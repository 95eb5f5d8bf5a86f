"""Files: safetensors by the format's own library, folders, indices, and files that are broken."""

import json

import pytest
import torch
from checkpoints import Experts, per_expert

import moe_ops
from moe_ops.loading.safetensors import SafetensorsFile

safetensors = pytest.importorskip("safetensors.torch")

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
)  # fmt: skip
E, K, H, I = 4, 2, 32, 24  # noqa: E741


def load(source, **how):
    layer = moe_ops.FusedMoE(E, K, H, I)
    moe_ops.load_checkpoint(layer, source, progress=False, **how)
    return layer


def raw_file(header, data, spaces=0):
    """A file of any header: a value for JSON, or its text."""
    text = header if isinstance(header, str) else json.dumps(header)
    text = text.encode() + b" " * spaces
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture
def source():
    return {f"mlp.{n}": x for n, x in per_expert(Experts.random(E, H, I)).items()}


@pytest.fixture
def expected(source):
    return load(source, prefix="mlp.")


def same(layer, other):
    return all(map(torch.equal, layer.parameters(), other.parameters()))


def shards(folder, source):
    """Two files and their index."""
    names = sorted(source)
    parts = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        safetensors.save_file({n: source[n] for n in part}, folder / file)
    weight_map = {n: file for file, part in parts.items() for n in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file for file in parts], index


def test_every_kind_of_source(tmp_path, source, expected):
    files, index = shards(tmp_path, source)
    one = tmp_path / "one"
    one.mkdir()
    safetensors.save_file(source, one / "model.safetensors", {"format": "pt"})
    sources = [
        tmp_path, str(index), files, iter(map(str, files)), one, one / "model.safetensors",
        source.items(), ((n, x) for n, x in source.items()),
    ]  # fmt: skip
    for given in sources:
        assert same(load(given, prefix="mlp."), expected)


def test_every_dtype(tmp_path):
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        data = torch.randint(0, 2, (3 * 5 * dtype.itemsize,), generator=g, dtype=torch.uint8)
        tensors[str(dtype)] = data.view(dtype).view(3, 5)
    tensors["empty"], tensors["scalar"] = torch.zeros(0, 4), torch.tensor(3.0)
    path = tmp_path / "x.safetensors"
    safetensors.save_file(tensors, path)
    file = SafetensorsFile(path)
    assert set(file.names()) == set(tensors)
    for name, x in tensors.items():
        read = file.tensor(name)
        assert read.dtype == x.dtype and read.shape == x.shape
        assert torch.equal(read.flatten().view(torch.uint8), x.flatten().view(torch.uint8))


def test_data_that_is_not_aligned(tmp_path):
    path, data = tmp_path / "x.safetensors", torch.tensor([1.5, -2.0])
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for spaces in range(4):
        path.write_bytes(raw_file({"x": entry}, data.numpy().tobytes(), spaces))
        read = SafetensorsFile(path).tensor("x")
        assert torch.equal(read, data) and read.data_ptr() % 4 == 0


def test_the_file_is_not_written_to(tmp_path, source):
    path = tmp_path / "x.safetensors"
    safetensors.save_file(source, path)
    before = path.read_bytes()
    layer = load(path, prefix="mlp.")
    for p in layer.parameters():
        p.data.zero_()
    assert path.read_bytes() == before


def broken(data, kind):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(n for n in header if n != "__metadata__")
    if kind == "cut in the data":
        return data[:-5]
    if kind == "cut in the header":
        return data[: 8 + length // 2]
    if kind == "empty":
        return b""
    if kind == "garbage":
        return b"\xff" * 200
    if kind == "no JSON":
        return data[:8] + b"{" * length + data[8 + length :]
    changes = {
        "no offsets": {"dtype": "F32", "shape": [1]},
        "shape and offsets disagree": {**header[name], "shape": [1, 1]},
        "past the end": {**header[name], "data_offsets": [0, 10**9]},
        "dtype": {**header[name], "dtype": "F4"},
    }
    return raw_file(header | {name: changes[kind]}, data[8 + length :])


@pytest.mark.parametrize(
    "kind",
    ["cut in the data", "cut in the header", "empty", "garbage", "no JSON", "no offsets",
     "shape and offsets disagree", "past the end", "dtype"],
)  # fmt: skip
def test_broken_files_change_nothing(kind, tmp_path, source):
    files, _ = shards(tmp_path, source)
    files[1].write_bytes(broken(files[1].read_bytes(), kind))
    layer = moe_ops.FusedMoE(E, K, H, I)
    with pytest.raises(ValueError, match=r"model-1.safetensors must be a whole safetensors file"):
        moe_ops.load_checkpoint(layer, tmp_path, prefix="mlp.", progress=False)
    assert not any(p.any() for p in layer.parameters())


def test_what_is_not_there(tmp_path, source):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="a folder with safetensors files"):
        load(tmp_path)
    files, index = shards(tmp_path, source)
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match="model-0"):
        load(index, prefix="mlp.")
    safetensors.save_file({"other": torch.ones(1)}, files[0])
    with pytest.raises(ValueError, match=r"must hold mlp.*as its index says"):
        load(index, prefix="mlp.")
    index.write_text("{}")
    with pytest.raises(ValueError, match="an index with a weight_map"):
        load(index, prefix="mlp.")


def test_only_the_shards_of_the_prefix_are_opened(tmp_path, source, expected):
    _, index = shards(tmp_path, source)
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "not-there.safetensors"
    index.write_text(json.dumps(content))
    assert same(load(index, prefix="mlp."), expected)


def test_progress(tmp_path, source, capsys):
    pytest.importorskip("tqdm")
    layer = moe_ops.FusedMoE(E, K, H, I)
    moe_ops.load_checkpoint(layer, source, prefix="mlp.")
    assert "loading" in capsys.readouterr().err
    moe_ops.load_checkpoint(layer, source, prefix="mlp.", progress=False)
    assert capsys.readouterr().err == ""
