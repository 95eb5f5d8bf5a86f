"""Files: safetensors by the format's own library, folders, indices, and files that are broken."""

import json
import os
import re
import sys

import pytest
import torch
from checkpoints import Experts, per_expert

import moe_ops
from moe_ops.loading import files
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


def test_the_file_of_a_whole_model_is_read_alone(tmp_path, source, expected):
    """As transformers reads a folder: without an index that is left over, and without copies."""
    safetensors.save_file(source, tmp_path / "model.safetensors")
    safetensors.save_file(source, tmp_path / "consolidated.safetensors")
    assert same(load(tmp_path, prefix="mlp."), expected)
    stale = {"weight_map": dict.fromkeys(source, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert same(load(tmp_path, prefix="mlp."), expected)


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
    before = [p.detach().clone() for p in layer.parameters()]
    with pytest.raises(ValueError, match=r"model-1.safetensors must be a whole safetensors file"):
        moe_ops.load_checkpoint(layer, tmp_path, prefix="mlp.", progress=False)
    assert all(map(torch.equal, layer.parameters(), before))


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


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text(*pairs):
    return "{" + ", ".join(f'"{name}": {json.dumps(value)}' for name, value in pairs) + "}"


HOSTILE = {
    "overlapping tensors": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12),
    "the same data twice": ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8),
    "a hole": ({"a": entry([2], 4, 12)}, 12),
    "trailing bytes": ({"a": entry([2], 0, 8)}, 9),
    "a negative shape": ({"a": entry([-2, -1], 0, 8)}, 8),
    "a shape that overflows": ({"a": entry([2**40, 2**40], 0, 0)}, 0),
    "a size beyond int64 in an empty tensor": ({"a": entry([0, 2**63], 0, 0)}, 0),
    "sizes that overflow beside a 0": ({"a": entry([0, 2**40, 2**40], 0, 0)}, 0),
    "a size before a 0": ({"a": entry([2**62, 0], 0, 0)}, 0),
    "too many axes": ({"a": entry([1] * 65, 0, 4)}, 4),
    "a long name": ({"a" * 10**5: entry([0, 2**63], 0, 0)}, 0),
    "a shape that is null": ({"a": entry(None, 0, 8)}, 8),
    "an entry that is a list": ({"a": [2]}, 8),
    "offsets beyond int64": ({"a": entry([2], 2**63, 2**63 + 8)}, 8),
    "negative offsets": ({"a": entry([2], -8, 0)}, 8),
    "a size that is no integer": ({"a": entry([2.0], 0, 8)}, 8),
    "offsets in reverse": ({"a": entry([2], 8, 0)}, 8),
    "a name twice": (text(("a", entry([2], 0, 8)), ("a", entry([2], 0, 8))), 8),
    "a name with two dtypes": (text(("a", entry([2], 0, 8)), ("a", entry([2], 0, 8, "I32"))), 8),
    "a field twice": (text(("a", entry([2], 0, 8))).replace('"shape"', '"shape": [2], "shape"'), 8),
    "an unknown dtype": ({"a": entry([2], 0, 8, "F5")}, 8),
    "nested JSON": ('{"a":' * 100_000, 0),
    "a list": ("[]", 0),
    "text behind the header": ('{"a": ' + json.dumps(entry([2], 0, 8)) + "} x", 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(kind, tmp_path):
    header, size = HOSTILE[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_file(header, b"\0" * size))
    with pytest.raises(
        ValueError, match="x.safetensors must be a whole safetensors file, "
    ) as error:
        load(path)
    assert len(str(error.value)) < 1000


def test_headers_longer_than_their_file(tmp_path):
    path = tmp_path / "x.safetensors"
    for length in (3, 2**31, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(ValueError, match="x.safetensors must be a whole safetensors file, got"):
            load(path)


def test_shapes_that_no_parameter_has(source):
    """Shapes that decide how other tensors are read."""
    for name, x in {
        "qweight": torch.tensor(1), "qzeros": torch.tensor(1), "weight_shape": torch.ones(9, 0),
    }.items():  # fmt: skip
        layer = moe_ops.FusedMoE(E, K, 256, 128, scheme="int4_w4a16_g128")
        given = {f"experts.0.gate_proj.{name}": x}
        report = moe_ops.load_checkpoint(layer, given, strict=False, progress=False)
        assert report.mismatched or report.unexpected, name


def unreadable(folder):
    """Paths that no file can have, or that cannot be followed, and what the error says."""
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "file").write_bytes(b"")
    longer = "/".join(["c" * 200] * 40)
    return {
        "a" * 5000: "too long", f"{'a' * 5000}.safetensors": "too long", longer: "too long",
        f"{'a' * 300}.json": "too long", "x\0.safetensors": "null", "\ud800": "encode",
        "loop": "symbolic links",
    }  # fmt: skip


def test_names_that_no_file_can_have(tmp_path, source):
    """As a source, in a list, and in an index; the error is short and printable."""
    for name, why in unreadable(tmp_path).items():
        index = tmp_path / "index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(source, name)}))
        for given in (tmp_path / name, str(tmp_path / name), [tmp_path / name], index):
            rule = "inside the index's folder" if "\0" in name and given == index else why
            with pytest.raises(ValueError, match=rf"must be .*{rule}") as error:
                load(given, prefix="mlp.")
            assert len(str(error.value)) < 600 and str(error.value).isprintable()
    with pytest.raises(FileNotFoundError, match="must be a file, got none"):
        load(tmp_path / "file" / "x")


def test_files_that_vanish(tmp_path, source, monkeypatch):
    """Between the look at the folder and the first read, and before the second shard."""
    paths, index = shards(tmp_path, source)
    for given in (tmp_path, index, paths):
        for gone in paths:
            kept = gone.read_bytes()

            def vanish(path, gone=gone):
                gone.unlink(missing_ok=True)
                return SafetensorsFile(path)

            monkeypatch.setattr("moe_ops.loading.sources.SafetensorsFile", vanish)
            with pytest.raises(FileNotFoundError, match=f"{gone.name} must be a file, got none"):
                load(given, prefix="mlp.")
            gone.write_bytes(kept)
    real = type(paths[0]).open

    def vanished(path, *how, **options):
        path.unlink()
        return real(path, *how, **options)

    monkeypatch.undo()
    monkeypatch.setattr(type(paths[0]), "open", vanished)
    with pytest.raises(FileNotFoundError, match=r"model-0.safetensors must be a file, got none"):
        load(paths, prefix="mlp.")


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "a/../../secret.safetensors", "/etc/passwd", "C:\\x.safetensors",
     "..\\secret.safetensors", "", "x\0.safetensors", 3, None],
)  # fmt: skip
def test_an_index_names_files_of_its_folder(name, tmp_path, source):
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.save_file(source, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(source, name)}))
    with pytest.raises(ValueError, match=r"index.json: the file of 'mlp.* must be a name inside"):
        load(folder, prefix="mlp.")


def test_links_and_folders_below_an_index(tmp_path, source, expected):
    """A hub's cache keeps links to files elsewhere."""
    safetensors.save_file(source, tmp_path / "blob")
    folder = tmp_path / "snapshot"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "model.safetensors").symlink_to(tmp_path / "blob")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(source, "parts/model.safetensors")}))
    assert same(load(folder, prefix="mlp."), expected)


@pytest.mark.parametrize("name", ["x.safetensors", "model.safetensors.index.json", "config.json"])
def test_pipes_are_not_waited_for(name, tmp_path, source):
    os.mkfifo(tmp_path / name)
    if name == "config.json":
        safetensors.save_file(source, tmp_path / "model.safetensors")
    layer = moe_ops.FusedMoE(E, K, H, I, scheme="fp8_channel")
    with pytest.raises(ValueError, match=f"{name} must be a regular file, got a folder, a pipe"):
        moe_ops.load_checkpoint(layer, tmp_path, prefix="mlp.", progress=False)


@pytest.mark.parametrize(
    ("content", "got"),
    [('{"weight_map":' + "[" * 100_000, "nested too deeply"), ("[1]", "a JSON list"),
     ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' twice"), ("{", "no JSON"),
     ('{"weight_map": []}', "got list for it")],
)  # fmt: skip
def test_hostile_indices(content, got, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError, match=f"index.json must be an index with a weight_map.*{got}"):
        load(tmp_path)


def test_without_the_package(tmp_path, source, monkeypatch):
    safetensors.save_file(source, tmp_path / "x.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'moe_ops\[safetensors\]'"):
        load(tmp_path / "x.safetensors", prefix="mlp.")
    load(source, prefix="mlp.")  # tensors need no package


def test_other_formats_say_what_to_do(tmp_path, source, expected):
    with pytest.raises(FileNotFoundError, match=r"download it first, .*download\('org/name-7B'\)"):
        load("org/name-7B")
    path = tmp_path / "pytorch_model.bin"
    torch.save(source, path)
    for given in (path, tmp_path, [path]):
        with pytest.raises(ValueError, match=r"safetensors, got .*torch.load\('pytorch_model.bin'"):
            load(given)
    read = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    assert same(load(read, prefix="mlp."), expected)
    for name in ("model-Q4.gguf", "MODEL.GGUF"):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(ValueError, match=r"must be safetensors, .*gguf_file=.*save_pretrained"):
            load(tmp_path / name)


def test_the_largest_json(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON", 10)
    path = tmp_path / "config.json"
    path.write_text('{"a": 123}')
    assert files.read_object(path, "a configuration") == {"a": 123}
    path.write_text('{"a": 1234}')
    with pytest.raises(ValueError, match="a configuration of at most 10 bytes, got 11"):
        files.read_object(path, "a configuration")


@pytest.mark.parametrize("expert", ["\u0663", "+3", "0_3", "03", "3 ", "9" * 5000])
def test_numbers_of_experts(expert, source):
    """One way to write a number: ASCII digits."""
    source[f"mlp.experts.{expert}.gate_proj.weight"] = source.pop("mlp.experts.3.gate_proj.weight")
    with pytest.raises(ValueError, match=r"1 missing \(w13_weight\[3\].w1\); 1 unexpected"):
        load(source, prefix="mlp.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_numbers_beyond_a_parameters_dtype(dtype, source):
    """A float64 of 1e300 is no float32, and a bfloat16 of 1e6 no float16."""
    largest = 1e6 if dtype == torch.float16 else 1e300
    layer = moe_ops.FusedMoE(
        E, K, H, I, params_dtype=dtype, has_bias=True, e_score_correction_bias=torch.zeros(E)
    )
    for name, shape in (("gate_proj.weight", (I, H)), ("down_proj.bias", (H,)), (None, (E,))):
        x = torch.ones(shape, dtype=torch.float64)
        x.view(-1)[-1] = largest if name else 1e300
        name = f"experts.2.{name}" if name else "e_score_correction_bias"
        rule = rf"{name}: numbers must be finite in torch.*, got 1 that are not"
        report = moe_ops.load_checkpoint(layer, {name: x}, strict=False, progress=False)
        assert len(report.mismatched) == 1 and re.match(rule, report.mismatched[0])
