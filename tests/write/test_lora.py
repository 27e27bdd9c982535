"""`ingot.lora` against NumPy: every kind of adapter, in every format of names, into bases of every float."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
import ingot.lora
import ingot.numpy
from ingot.lora import _merge
from ingot.lora._adapter import _Patterns
from support.servers import Handler, Request, serving

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
GENERATED = int(os.environ.get("INGOT_LORA_CASES", "40"))


def saved(folder: Path, name: str, tensors: Tensors, config: Any = None, **options: Any) -> Path:
    path = folder / name
    ingot.numpy.save_file(tensors, path, overwrite=True, **options)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    numbers = np.random.default_rng(0)
    tensors = {
        "model.layers.0.q_proj.weight": numbers.normal(size=(6, 4)).astype("float32"),
        "model.layers.0.q_proj.bias": numbers.normal(size=6).astype("float32"),
        "model.layers.1.q_proj.weight": numbers.normal(size=(6, 4)).astype("float16"),
        "conv.weight": numbers.normal(size=(4, 3, 2, 2)).astype("float32"),
        "steps": np.arange(3),
    }
    return saved(tmp_path, "base.safetensors", tensors, metadata={"format": "pt", "author": "me"})


def pair(out: int = 6, inputs: int = 4, rank: int = 2, seed: int = 1) -> tuple[Array, Array]:
    numbers = np.random.default_rng(seed)
    up, down = numbers.normal(size=(out, rank)), numbers.normal(size=(rank, inputs))
    return up.astype("float32"), down.astype("float32")


def kohya(name: str = "lora_unet_layers_0_q_proj", alpha: float | None = 4.0) -> Tensors:
    up, down = pair()
    found = {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down}
    return found if alpha is None else {**found, f"{name}.alpha": np.float32(alpha).reshape(())}


def merged(base: Path, adapter: Any, **options: Any) -> Tensors:
    destination = base.with_name("merged.safetensors")
    ingot.lora.merge(base, adapter, destination, overwrite=True, **options)
    return ingot.numpy.load_file(destination)


def failure(base: Path, adapter: Any, **options: Any) -> ingot.AdapterError:
    destination = base.with_name("refused.safetensors")
    with pytest.raises(ingot.AdapterError) as caught:
        ingot.lora.merge(base, adapter, destination, **options)
    assert not destination.exists()
    return caught.value


# Generated adapters.


def low_rank(draw: Any, shape: tuple[int, ...], array: Any) -> tuple[Tensors, Array]:
    rank = draw(st.integers(1, 4))
    out, inputs, *kernel = shape
    up, down = array((out, rank)), array((rank, inputs, *kernel))
    delta = up @ down.reshape(rank, -1)
    if kernel and draw(st.booleans()):
        mid, down = array((rank, rank, *kernel)), array((rank, inputs))
        delta = np.einsum("pi,ijkl,jq->pqkl", up, mid, down)
        ones = (1,) * len(kernel)
        tensors = {"lora_mid.weight": mid, "lora_down.weight": down.reshape(rank, inputs, *ones)}
        return {**tensors, "lora_up.weight": up.reshape(out, rank, *ones)}, delta
    return {"lora_up.weight": up, "lora_down.weight": down}, delta


def hadamard(draw: Any, shape: tuple[int, ...], array: Any) -> tuple[Tensors, Array]:
    rank, inner = draw(st.integers(1, 4)), int(np.prod(shape[1:]))
    factors = {
        f"hada_w{number}_{part}": array((shape[0], rank) if part == "a" else (rank, inner))
        for number in (1, 2)
        for part in "ab"
    }
    one, two = (factors[f"hada_w{n}_a"] @ factors[f"hada_w{n}_b"] for n in (1, 2))
    return factors, one * two


def kronecker(draw: Any, shape: tuple[int, ...], array: Any) -> tuple[Tensors, Array]:
    out = draw(st.sampled_from([one for one in range(1, shape[0] + 1) if shape[0] % one == 0]))
    inputs = draw(st.sampled_from([one for one in range(1, shape[1] + 1) if shape[1] % one == 0]))
    rank = draw(st.integers(1, 3))
    kernel = shape[2:]
    first, height, width = array((out, inputs)), shape[0] // out, shape[1] // inputs
    whole = np.expand_dims(first, tuple(range(2, len(shape))))
    if draw(st.booleans()):
        second = array((height, width, *kernel))
        # Without a rank there is no alpha.
        a, b = array((out, rank)), array((rank, inputs))
        if draw(st.booleans()):
            whole = np.expand_dims(a @ b, tuple(range(2, len(shape))))
            return {"lokr_w1_a": a, "lokr_w1_b": b, "lokr_w2": second}, np.kron(whole, second)
        return {"lokr_w1": first, "lokr_w2": second}, np.kron(whole, second)
    a, b = array((height, rank)), array((rank, width * int(np.prod(kernel))))
    second = (a @ b).reshape(height, width, *kernel)
    return {"lokr_w1": first, "lokr_w2_a": a, "lokr_w2_b": b}, np.kron(whole, second)


def difference(draw: Any, shape: tuple[int, ...], array: Any) -> tuple[Tensors, Array]:
    delta = array(shape)
    return {"diff": delta}, delta


KINDS: list[Callable[..., tuple[Tensors, Array]]] = [low_rank, hadamard, kronecker, difference]
RANKS = {"lora_down.weight": 0, "hada_w1_b": 0, "lokr_w1_b": 0, "lokr_w2_b": 0}


@settings(max_examples=GENERATED, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_merge_equals_numpy(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = data.draw
    # A row at a time, or a few.
    monkeypatch.setattr(_merge, "_BLOCK_NBYTES", draw(st.sampled_from([1, 256, 1 << 20])))
    numbers = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def array(shape: tuple[int, ...]) -> Array:
        return numbers.normal(size=shape).astype(draw(st.sampled_from(["float32", "float16"])))

    shape = (draw(st.integers(1, 8)), draw(st.integers(1, 8)), *draw(st.sampled_from([(), (3, 2), (1, 1)])))
    dtype = draw(st.sampled_from(["F32", "F64", "F16", "BF16"]))
    weight = numbers.normal(size=shape)
    whole = saved(tmp_path, "whole.safetensors", {"block.0.to_q.weight": weight, "other": weight})
    base = tmp_path / "base.safetensors"
    ingot.cast(whole, base, dtype, overwrite=True)
    exact = ingot.numpy.load_file(base, dtype="F64")["block.0.to_q.weight"]
    adapters: list[tuple[Path, float]] = []
    for number in range(draw(st.integers(1, 2))):
        scale = draw(st.sampled_from([1.0, 0.5, -1.25]))
        parts, delta = draw(st.sampled_from(KINDS))(draw, shape, lambda shape: array(shape).astype("float64"))
        rank = next((parts[name].shape[0] for name in RANKS if name in parts), None)
        alpha = draw(st.sampled_from([None, 1.0, 6.0]))
        tensors = {f"lora_unet_block_0_to_q.{name}": part for name, part in parts.items()}
        if alpha is not None:
            tensors["lora_unet_block_0_to_q.alpha"] = np.float64(alpha).reshape(())
        adapters.append((saved(tmp_path, f"adapter{number}.safetensors", tensors), scale))
        scaling = alpha / rank if alpha is not None and rank is not None else 1.0
        exact = exact + scale * scaling * delta.reshape(shape)
    ingot.lora.merge(base, adapters, tmp_path / "merged.safetensors", overwrite=True)
    found = ingot.numpy.load_file(tmp_path / "merged.safetensors", dtype="F64")
    nearest = np.spacing(np.abs(exact).astype("float32")).astype("float64")
    bits = {"F64": 0, "F32": 0, "F16": 13, "BF16": 16}[dtype]
    # Half a unit in the last place, and the error of the computation.
    limit = (
        1e-12 * (1 + np.abs(exact))
        if dtype == "F64"
        else nearest * 2.0**bits * 0.5 + 2e-5 * 2.0 ** (bits - 16)
    )
    assert (np.abs(found["block.0.to_q.weight"] - exact) <= limit * 1.01).all()
    assert np.array_equal(found["other"], ingot.numpy.load_file(base, dtype="F64")["other"])


# Formats of names.


def peft(config: Any = None) -> tuple[Tensors, dict[str, Any]]:
    up, down = pair()
    start = "base_model.model.model.layers.0.q_proj"
    tensors = {f"{start}.lora_A.weight": down, f"{start}.lora_B.weight": up}
    return tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **(config or {})}


def test_merge_reads_the_names_of_each_format(base: Path, tmp_path: Path) -> None:
    up, down = pair()
    before = ingot.numpy.load_file(base)
    expected = (before["model.layers.0.q_proj.weight"] + 2.0 * (up.astype("f8") @ down)).astype("f4")
    tensors, config = peft()
    unscaled = {"lora_up.weight": up * 2, "lora_down.weight": down}
    adapters = [
        saved(tmp_path, "kohya.safetensors", kohya()),
        saved(tmp_path, "peft.safetensors", tensors, config),
    ]
    assert np.array_equal(merged(base, adapters[1])["model.layers.0.q_proj.weight"], expected)
    (tmp_path / "adapter_config.json").unlink()
    for start, ends in {
        "transformer.layers.0.q_proj": ("lora_A.weight", "lora_B.weight"),
        "unet.layers.0.q_proj": ("lora.down.weight", "lora.up.weight"),
        "layers.0.q_proj": ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
        "diffusion_model.layers.0.q_proj": ("lora_down.weight", "lora_up.weight"),
    }.items():
        found = {
            f"{start}.{ends[0]}": unscaled["lora_down.weight"],
            f"{start}.{ends[1]}": unscaled["lora_up.weight"],
        }
        adapters.append(saved(tmp_path, f"{len(adapters)}.safetensors", found))
    for adapter in (adapters[0], *adapters[2:]):
        found = merged(base, adapter)
        assert np.array_equal(found["model.layers.0.q_proj.weight"], expected), adapter
        assert all(
            np.array_equal(found[name], before[name]) for name in before if "0.q_proj.weight" not in name
        )


def test_merge_reads_the_configuration_beside_a_url(base: Path, tmp_path: Path) -> None:
    tensors, config = peft()
    adapter = saved(tmp_path, "adapter_model.safetensors", tensors, config)

    def answer(handler: Handler, request: Request) -> None:
        file = tmp_path / request.path.rpartition("/")[2]
        if file.is_file():
            handler.part(file.read_bytes(), request, ETag=f'"{file.name}"')
        else:
            handler.head(404, Content_Length=0)

    with serving(answer) as server:
        urls = [server.url(f"/{name}") for name in ("base.safetensors", "adapter_model.safetensors")]
        ingot.lora.merge(*urls, tmp_path / "remote.safetensors")
        (tmp_path / "kohya.safetensors").write_bytes(ingot.numpy.save(kohya()))
        (tmp_path / "adapter_config.json").unlink()
        ingot.lora.info(server.url("/kohya.safetensors"))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    expected = merged(base, adapter)
    found = ingot.numpy.load_file(tmp_path / "remote.safetensors")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_merge_reads_settings_in_the_metadata(base: Path, tmp_path: Path) -> None:
    up, down = pair()
    tensors = {"unet.layers.0.q_proj.lora_A.weight": down, "unet.layers.0.q_proj.lora_B.weight": up}
    text = json.dumps({"unet.r": 2, "unet.lora_alpha": 8})
    adapter = saved(tmp_path, "a.safetensors", tensors, metadata={"lora_adapter_metadata": text})
    before = ingot.numpy.load_file(base)["model.layers.0.q_proj.weight"]
    found = merged(base, adapter)["model.layers.0.q_proj.weight"]
    assert np.array_equal(found, (before + 4.0 * (up.astype("f8") @ down)).astype("f4"))


@pytest.mark.parametrize("name", ["target_parameters", "init_lora_weights"])
def test_merge_checks_settings_in_the_metadata(name: str, base: Path, tmp_path: Path) -> None:
    up, down = pair()
    tensors = {"unet.layers.0.q_proj.lora_A.weight": down, "unet.layers.0.q_proj.lora_B.weight": up}
    value: Any = ["experts.w1"] if name == "target_parameters" else "pissa"
    text = json.dumps({"unet.r": 2, "unet.lora_alpha": 8, f"unet.{name}": value})
    adapter = saved(tmp_path, "a.safetensors", tensors, metadata={"lora_adapter_metadata": text})
    error = failure(base, adapter)
    assert error.code == "unsupported-adapter"
    assert name in str(error)


def by_peft(pattern: str, path: str) -> bool:
    """Return what `peft.utils.other.get_pattern_key` decides."""
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


PATHS = (
    *(
        "q_proj",
        "model.layers.0.q_proj",
        "model.layers.10.q_proj",
        "layers.0.k_proj",
        "model.layers.0.xq_proj",
    ),
    *("model.decoder.layers.1.self_attn.q_proj", "text-model.a.1", "a.b", "aXb", "x.aXb", "", ".", "a..b"),
)
PATTERNS = (
    *("q_proj", "layers.0.q_proj", r"layers\.0\.q_proj", "^model.layers.0.q_proj", "model.layers.0.q_proj$"),
    *(r".*\.[qk]_proj", r"model\.layers\.\d+\.q_proj", r"(.*\.)?(q|k)_proj", r".*layers.(0|1)\..*", "a.b"),
    *(
        r"layers.[0-9]{1,2}.\w+",
        r".*",
        r".+?_proj",
        "a)|(b",
        "x|a.b",
        r"[^.]+",
        r"\bq_proj",
        "",
        r"(?i:Q)_proj",
    ),
    *(
        r"(?P<n>q)_proj",
        r"[]a]",
        r"[a\]]",
        r"[a-]b",
        r"\.",
        r"q\_proj",
        r"q_pro[j]",
        "(?:a|a)*.b",
        "a{2}|b{0,1}",
    ),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_in_peft(pattern: str) -> None:
    patterns = _Patterns({pattern: True})
    assert [patterns.value(path, False) for path in PATHS] == [by_peft(pattern, path) for path in PATHS]


AMBIGUOUS = (
    "a*+a",
    "a++a",
    "a?+a",
    "a{1,2}+a",
    r"\<a",
    r"\b{start}a",
    "(?x:[ a])",
    "(?i:\u212a)",
    r"[\]&&q]",
    "[[a]",
)


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_patterns_that_libraries_read_differently_are_rejected(pattern: str) -> None:
    with pytest.raises(ValueError, match="which is not supported"):
        _Patterns({pattern: True})


@settings(max_examples=GENERATED * 5, deadline=None)
@given(pattern=st.text("ab.*+?()|[]^$\\dw{1,}-&~<x:i", max_size=8), path=st.text("ab.1-&", max_size=5))
def test_generated_patterns_match_as_in_peft_or_are_rejected(pattern: str, path: str) -> None:
    try:
        found = _Patterns({pattern: True}).value(path, False)
    except ValueError:
        return
    assert found == by_peft(pattern, path)


def test_the_first_pattern_that_matches_decides(base: Path, tmp_path: Path) -> None:
    tensors, config = peft({"alpha_pattern": {"v_proj": 1, r"layers\.\d+\.q_proj": 6, "q_proj": 8}})
    found = merged(base, saved(tmp_path, "a.safetensors", tensors, config))
    expected = merged(base, saved(tmp_path, "b.safetensors", *peft({"lora_alpha": 6})))
    assert all(np.array_equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize(
    "pattern", [r"(\w+\.?)+!", "(a|a|.)*!", "((.*)*)*!", r"(.*\.)*(.*\.)*(.*\.)*(.*\.)*!"]
)
def test_merge_takes_linear_time_for_every_pattern(pattern: str, tmp_path: Path) -> None:
    module = ".".join(["layers"] * 30)
    base = saved(tmp_path, "long.safetensors", {f"{module}.weight": np.zeros((6, 4), "f4")})
    up, down = pair()
    start = f"base_model.model.{module}"
    tensors = {f"{start}.lora_A.weight": down, f"{start}.lora_B.weight": up}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {pattern: 9}}
    found = merged(base, saved(tmp_path, "a.safetensors", tensors, config))
    assert np.array_equal(found[f"{module}.weight"], (2.0 * (up.astype("f8") @ down)).astype("f4"))


def test_merge_reads_original_names_of_unet(tmp_path: Path) -> None:
    name = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    base = saved(tmp_path, "sd.safetensors", {name: np.zeros((6, 4), "float32")})
    path = "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    adapter = saved(tmp_path, "a.safetensors", kohya(f"lora_unet_{path}"))
    assert merged(base, adapter)[name].any()


def test_scale_is_a_share_of_the_change(base: Path, tmp_path: Path) -> None:
    tensors, config = peft({"use_dora": True})
    start = "base_model.model.model.layers.0.q_proj"
    tensors[f"{start}.lora_magnitude_vector"] = np.full(6, 3, "float32")
    adapter = saved(tmp_path, "a.safetensors", tensors, config)
    name = "model.layers.0.q_proj.weight"
    before = ingot.numpy.load_file(base)[name]
    whole = merged(base, adapter)[name]
    assert np.allclose(np.linalg.norm(whole, axis=1), 3)
    assert np.array_equal(merged(base, adapter, scale=0)[name], before)
    assert np.allclose(merged(base, adapter, scale=0.25)[name], before + 0.25 * (whole - before), atol=1e-6)
    both = [(adapter, 0.5), (adapter, 0.5)]
    assert np.allclose(merged(base, both)[name], whole, atol=1e-6)


def test_magnitudes_of_inputs_scale_columns(base: Path, tmp_path: Path) -> None:
    tensors = kohya()
    tensors["lora_unet_layers_0_q_proj.dora_scale"] = np.full((1, 4), 2, "float32")
    found = merged(base, saved(tmp_path, "a.safetensors", tensors))["model.layers.0.q_proj.weight"]
    assert np.allclose(np.linalg.norm(found, axis=0), 2)


def test_whole_tensors_replace_resize_and_add(base: Path, tmp_path: Path) -> None:
    tensors, config = peft()
    start = "base_model.model"
    tensors[f"{start}.model.layers.1.q_proj.weight"] = np.ones((6, 4), "float32")
    tensors[f"{start}.conv.weight"] = np.ones((5, 3, 2, 2), "float32")
    tensors[f"{start}.score.modules_to_save.weight"] = np.ones((2, 4), "float32")
    adapter = saved(tmp_path, "a.safetensors", tensors, config)
    found = merged(base, adapter)
    assert found["model.layers.1.q_proj.weight"].dtype == "float16"
    assert found["model.layers.1.q_proj.weight"].all()
    assert found["conv.weight"].shape == (5, 3, 2, 2)
    assert found["score.weight"].shape == (2, 4)
    assert failure(base, adapter, scale=0.5).code == "shape-mismatch"


def test_bias_changes(base: Path, tmp_path: Path) -> None:
    tensors = kohya()
    tensors["lora_unet_layers_0_q_proj.diff_b"] = np.ones(6, "float32")
    found = merged(base, saved(tmp_path, "a.safetensors", tensors))
    before = ingot.numpy.load_file(base)
    name = "model.layers.0.q_proj.bias"
    assert np.array_equal(found[name], (before[name].astype("f8") + 1).astype("f4"))


# The new file.


def test_result_lists_changes_and_keeps_metadata(base: Path, tmp_path: Path) -> None:
    adapter = saved(tmp_path, "a.safetensors", kohya())
    report = ingot.lora.merge(base, adapter, tmp_path / "new.safetensors")
    assert report.changed == ("model.layers.0.q_proj.weight",)
    assert (report.unused, report.tensors) == ((), 5)
    with ingot.open(tmp_path / "new.safetensors") as file:
        assert file.metadata() == {"format": "pt", "author": "me"}
    assert report.nbytes == sum(tensor.nbytes for tensor in ingot.numpy.load_file(base).values())
    again = tmp_path / "again.safetensors"
    ingot.lora.merge(base, adapter, again)
    assert again.read_bytes() == (tmp_path / "new.safetensors").read_bytes()


def test_digests_of_changed_values_are_removed(base: Path, tmp_path: Path) -> None:
    hashed = tmp_path / "hashed.safetensors"
    ingot.numpy.save_file(ingot.numpy.load_file(base), hashed, checksums=["sha256", "modelspec"])
    found = tmp_path / "new.safetensors"
    ingot.lora.merge(hashed, saved(tmp_path, "a.safetensors", kohya()), found)
    assert not {"ingot.checksums", "modelspec.hash_sha256"} & {*(ingot.open(found).metadata() or {})}


def test_folder_has_the_files_of_the_base(base: Path, tmp_path: Path) -> None:
    ingot.split(base, tmp_path / "shards", 200)
    adapter = saved(tmp_path, "a.safetensors", kohya())
    report = ingot.lora.merge(tmp_path / "shards", adapter, tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == sorted(os.listdir(tmp_path / "shards"))
    one, other = (ingot.open(tmp_path / name) for name in ("shards", "new"))
    with one, other:
        assert [sorted(ingot.open(file).keys()) for file in other.shards] == [
            sorted(ingot.open(file).keys()) for file in one.shards
        ]
    found = ingot.numpy.load_file(tmp_path / "new")
    assert {name: tensor.tobytes() for name, tensor in found.items()} == {
        name: tensor.tobytes() for name, tensor in merged(base, adapter).items()
    }
    assert report.tensors == 5
    with pytest.raises(FileExistsError):
        ingot.lora.merge(tmp_path / "shards", adapter, tmp_path / "new")
    ingot.lora.merge(tmp_path / "shards", adapter, tmp_path / "one.safetensors")
    assert len(ingot.open(tmp_path / "one.safetensors")) == 5


def test_progress_reaches_the_total(base: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    adapter = saved(tmp_path, "a.safetensors", kohya())
    report = merged_report(base, adapter, lambda done, total: told.append((done, total)))
    assert told[-1] == (report.nbytes, report.nbytes)


def merged_report(base: Path, adapter: Path, tell: Any) -> ingot.lora.Merged:
    return ingot.lora.merge(base, adapter, base.with_name("new.safetensors"), progress=tell)


# Faults.


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in kohya().items() if not key.endswith(name)}


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def ones(*shape: int) -> Array:
    return np.ones(shape, "f4")


def of_module(**parts: Array) -> Tensors:
    return {f"lora_unet_layers_0_q_proj.{part}": tensor for part, tensor in parts.items()}


def loha(*shapes: tuple[int, ...]) -> Tensors:
    parts = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return of_module(**{part: ones(*shape) for part, shape in zip(parts, shapes, strict=True)})


def with_whole(*names: str, shape: tuple[int, ...] = (6, 4), value: float = 1) -> Any:
    tensors, config = peft()
    return {**tensors, **{f"base_model.model.{name}": value * ones(*shape) for name in names}}, config


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a module that the base lacks": (lambda: kohya("lora_unet_layers_9_q_proj"), "unused-tensors"),
    "a half of a pair": (lambda: without("lora_up.weight"), "incomplete-module"),
    "another rank in the other factor": (
        lambda: {**kohya(), "lora_unet_layers_0_q_proj.lora_up.weight": np.ones((6, 3), "f4")},
        "shape-mismatch",
    ),
    "another shape": (
        lambda: {**kohya(), "lora_unet_layers_0_q_proj.lora_down.weight": np.ones((2, 5), "f4")},
        "shape-mismatch",
    ),
    "no adapter": (lambda: {"a.weight": np.ones(3, "f4")}, "no-adapter"),
    "an unknown tensor": (lambda: {**kohya(), "emb_params": np.ones(3, "f4")}, "unused-tensors"),
    "no configuration": (lambda: peft()[0], "unknown-alpha"),
    "another kind of PEFT": (lambda: (peft()[0], {"peft_type": "IA3"}), "unsupported-adapter"),
    "parameters of experts": (lambda: peft({"target_parameters": ["w"]}), "unsupported-adapter"),
    "another base": (lambda: peft({"init_lora_weights": "pissa"}), "unsupported-adapter"),
    "another rank": (lambda: peft({"r": 3}), "rank-mismatch"),
    "an alpha that is text": (lambda: peft({"lora_alpha": "x"}), "invalid-adapter-config"),
    "a configuration that is a list": (lambda: (peft()[0], []), "invalid-adapter-config"),
    "a pattern that is no expression": (lambda: peft({"rank_pattern": {"(": 2}}), "invalid-adapter-config"),
    "a pattern with look-ahead": (
        lambda: peft({"rank_pattern": {"(?!v_proj).*": 2}}),
        "invalid-adapter-config",
    ),
    "a pattern with a reference": (
        lambda: peft({"rank_pattern": {r"(\w)\1_proj": 2}}),
        "invalid-adapter-config",
    ),
    "a pattern with a set in a set": (
        lambda: peft({"rank_pattern": {"[[a-z]_]+": 2}}),
        "invalid-adapter-config",
    ),
    "a pattern of many states": (
        lambda: peft({"rank_pattern": {"(a{1000}){1000}": 2}}),
        "invalid-adapter-config",
    ),
    "a long pattern": (lambda: peft({"rank_pattern": {"q" * 1001: 2}}), "invalid-adapter-config"),
    "many patterns": (
        lambda: peft({"rank_pattern": {f"q{n}": 2 for n in range(10_001)}}),
        "invalid-adapter-config",
    ),
    "KaSA": (lambda: peft({"kasa_config": {"beta": 1e-4}}), "unsupported-adapter"),
    "patterns that are text": (lambda: peft({"alpha_pattern": "x"}), "invalid-adapter-config"),
    "an alpha beyond floats": (lambda: peft({"lora_alpha": 10**400}), "invalid-adapter-config"),
    "an alpha that is NaN": (lambda: peft({"lora_alpha": float("nan")}), "invalid-adapter-config"),
    "an alpha that is true": (lambda: peft({"lora_alpha": True}), "invalid-adapter-config"),
    "a switch that is text": (lambda: peft({"use_rslora": "false"}), "invalid-adapter-config"),
    "DoRA without magnitudes": (lambda: peft({"use_dora": True}), "incomplete-module"),
    "an alpha without elements": (lambda: {**kohya(), **of_module(alpha=ones(0))}, "shape-mismatch"),
    "an alpha of NaN": (lambda: kohya(alpha=float("nan")), "unknown-alpha"),
    "factors of integers": (
        lambda: {**kohya(), **of_module(**{"lora_up.weight": np.ones((6, 2), "i1")})},
        "unsupported-adapter",
    ),
    "complex factors": (
        lambda: {**kohya(), **of_module(**{"lora_up.weight": np.ones((6, 2), "c8")})},
        "unsupported-adapter",
    ),
    "a factor of no dimension": (
        lambda: {**kohya(), **of_module(**{"lora_up.weight": ones()})},
        "shape-mismatch",
    ),
    "LoRA and a difference": (lambda: {**kohya(), **of_module(diff=ones(6, 4))}, "ambiguous-module"),
    "LoRA and LoKr": (
        lambda: {**kohya(), **of_module(lokr_w1=ones(2, 2), lokr_w2=ones(3, 2))},
        "ambiguous-module",
    ),
    "LoKr of no dimension": (lambda: of_module(lokr_w1=ones(2, 2), lokr_w2=ones()), "shape-mismatch"),
    "LoHa of vectors": (lambda: loha((6,), (4,), (6,), (4,)), "shape-mismatch"),
    "LoHa of two widths": (lambda: loha((6, 2), (2, 4), (6, 2), (2, 5)), "shape-mismatch"),
    "LoHa that broadcasts": (lambda: loha((6, 2), (2, 4), (1, 2), (2, 4)), "shape-mismatch"),
    "factors of NaN": (
        lambda: {**kohya(), **of_module(**{"lora_up.weight": ones(6, 2) * np.nan})},
        "not-finite",
    ),
    "factors beyond float32": (lambda: peft({"lora_alpha": 1e300}), "not-finite"),
    "magnitudes of a matrix": (lambda: {**kohya(), **of_module(dora_scale=ones(3, 2))}, "shape-mismatch"),
    "a module that is changed and replaced": (
        lambda: with_whole("model.layers.0.q_proj.modules_to_save.weight"),
        "ambiguous-module",
    ),
    "two replacements of a tensor": (
        lambda: with_whole("conv.weight", "conv.modules_to_save.weight", shape=(4, 3, 2, 2)),
        "ambiguous-module",
    ),
    "a replacement beyond float16": (
        lambda: with_whole("model.layers.1.q_proj.weight", value=1e5),
        "not-finite",
    ),
    "a longer bias": (lambda: of_module(diff_b=ones(7)), "shape-mismatch"),
    "a shorter bias": (lambda: of_module(diff_b=ones(5)), "shape-mismatch"),
    "a kernel of another order": (lambda: {"lora_unet_conv.diff": ones(4, 2, 2, 3)}, "shape-mismatch"),
    "LoCon of another kernel": (
        lambda: {
            "lora_unet_conv.lora_up.weight": ones(4, 2, 1, 1),
            "lora_unet_conv.lora_down.weight": ones(2, 2, 3, 2),
        },
        "shape-mismatch",
    ),
    "two names of a module": (
        lambda: {**kohya(), **renamed(kohya(), "lora_unet_", "lora_te_")},
        "ambiguous-module",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_merge_rejects(fault: str, base: Path, tmp_path: Path) -> None:
    make, code = FAULTS[fault]
    found = make()
    tensors, config = found if isinstance(found, tuple) else (found, None)
    adapter = saved(tmp_path, "adapter.safetensors", tensors, config)
    error = failure(base, adapter)
    assert error.code == code
    assert str(error).startswith(str(tmp_path / "adapter"))


def test_module_of_two_names_is_rejected(base: Path, tmp_path: Path) -> None:
    weights = {f"{part}.layers.0.q_proj.weight": np.ones((6, 4), "f4") for part in ("text", "vision")}
    both = saved(tmp_path, "both.safetensors", weights)
    assert failure(both, saved(tmp_path, "a.safetensors", kohya())).code == "ambiguous-module"


def test_scale_beyond_the_dtype_is_rejected(base: Path, tmp_path: Path) -> None:
    error = failure(base, saved(tmp_path, "a.safetensors", kohya()), scale=1e308)
    assert (error.code, error.tensor) == ("not-finite", "model.layers.0.q_proj.weight")


def test_infinities_of_the_base_stay(tmp_path: Path) -> None:
    values = np.ones((6, 4), "f4")
    values[0, 0], values[1, 1] = -np.inf, np.nan
    base = saved(tmp_path, "base.safetensors", {"layers.0.q_proj.weight": values})
    found = merged(base, saved(tmp_path, "a.safetensors", kohya()))["layers.0.q_proj.weight"]
    assert np.array_equal(np.isfinite(found), np.isfinite(values))


def test_replacements_are_exact(tmp_path: Path) -> None:
    before = np.array([[1e4, np.inf], [np.nan, 0]], "f4").astype("f2")
    base = saved(tmp_path, "base.safetensors", {"head.weight": before})
    new = np.array([[1e-5, 2], [3, 6e-8]], "f4")
    tensors = {"base_model.model.head.modules_to_save.weight": new}
    adapter = saved(tmp_path, "a.safetensors", tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    assert np.array_equal(merged(base, adapter)["head.weight"], new.astype("f2"))


def test_unused_tensors_are_listed(base: Path, tmp_path: Path) -> None:
    others = kohya("lora_te_layers_9_q_proj")
    adapter = saved(tmp_path, "a.safetensors", {**kohya(), **others})
    error = failure(base, adapter)
    assert sorted(error.found) == sorted(others)
    report = ingot.lora.merge(base, adapter, tmp_path / "new.safetensors", strict=False)
    assert sorted(report.unused) == sorted(others)
    merged(base, adapter, drop="lora_te_*")
    merged(base, adapter, keys="lora_unet_*")
    with pytest.raises(ingot.TensorNotFoundError):
        merged(base, adapter, drop="missing")


def test_quantised_base_is_rejected(tmp_path: Path) -> None:
    adapter = saved(tmp_path, "a.safetensors", kohya())
    integers = saved(tmp_path, "i8.safetensors", {"layers.0.q_proj.weight": np.ones((6, 4), "int8")})
    assert failure(integers, adapter).code == "quantised-base"
    start = "layers.0.q_proj"
    gptq = {
        f"{start}.qweight": np.ones((8, 8), "int32"),
        f"{start}.qzeros": np.ones((1, 1), "int32"),
        f"{start}.scales": np.ones((1, 8), "float16"),
        f"{start}.g_idx": np.zeros(64, "int32"),
    }
    error = failure(saved(tmp_path, "gptq.safetensors", gptq), adapter)
    assert error.code == "quantised-base"
    assert "GPTQ" in str(error)


def test_tied_tensors_are_rejected(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import ingot.torch

    shared = torch.ones(6, 4)
    path = tmp_path / "tied.safetensors"
    ingot.torch.save_file({"embed.weight": shared, "lm_head.weight": shared}, path, shared="alias")
    for name in ("embed", "lm_head"):
        adapter = saved(tmp_path, "a.safetensors", kohya(f"lora_te_{name}"))
        error = failure(path, adapter)
        assert error.code == "tied-target"
        assert "embed.weight" in str(error)
        assert "lm_head.weight" in str(error)


def test_base_is_left_if_merging_onto_it_fails(base: Path, tmp_path: Path) -> None:
    before = base.read_bytes()
    adapter = saved(tmp_path, "a.safetensors", kohya("lora_unet_none"))
    with pytest.raises(ingot.AdapterError):
        ingot.lora.merge(base, adapter, base, overwrite=True)
    assert base.read_bytes() == before
    ingot.lora.merge(base, saved(tmp_path, "a.safetensors", kohya()), base, overwrite=True)
    assert base.read_bytes() != before


def test_merge_of_files_names_the_adapter(base: Path, tmp_path: Path) -> None:
    adapter = saved(tmp_path, "a.safetensors", kohya())
    with pytest.raises(ingot.AdapterError, match=r"ingot\.lora\.merge") as caught:
        ingot.merge([base, adapter], tmp_path / "new.safetensors")
    assert caught.value.code == "adapter"
    assert caught.value.path == str(adapter)
    # Two adapters may be put into one file.
    other = saved(tmp_path, "b.safetensors", kohya("lora_te_layers_0_q_proj"))
    ingot.merge([adapter, other], tmp_path / "both.safetensors")


@pytest.mark.parametrize("adapter", [[], ["a.safetensors"], [("a.safetensors",)], [("a.safetensors", "1")]])
def test_adapter_is_a_source_or_pairs(adapter: Any, base: Path, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ingot.OptionError), match="adapter"):
        ingot.lora.merge(base, adapter, tmp_path / "new.safetensors")


@pytest.mark.parametrize("scale", ["1", True, float("nan"), float("inf")])
def test_scale_is_a_finite_number(scale: Any, base: Path, tmp_path: Path) -> None:
    adapter = saved(tmp_path, "a.safetensors", kohya())
    with pytest.raises((TypeError, ingot.OptionError), match="scale"):
        ingot.lora.merge(base, adapter, tmp_path / "new.safetensors", scale=scale)


# Descriptions and names.


def test_info_describes_an_adapter(tmp_path: Path) -> None:
    tensors, config = peft({"base_model_name_or_path": "me/model"})
    saved(tmp_path, "adapter_model.safetensors", tensors, config)
    found = ingot.lora.info(tmp_path)
    assert (found.kind, found.format, found.ranks, found.alphas) == ("LoRA", "peft", (2,), (4.0,))
    assert (found.base, found.modules, found.parameters) == ("me/model", ("model.layers.0.q_proj",), 20)


def test_info_counts_every_element(tmp_path: Path) -> None:
    adapter = saved(tmp_path, "a.safetensors", kohya())
    assert ingot.lora.info(adapter).parameters == ingot.inspect(adapter, count="stored").parameter_total == 21


def test_convert_bakes_alpha_in_for_diffusers(tmp_path: Path) -> None:
    name = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    path = saved(
        tmp_path, "k.safetensors", {**kohya(name), **kohya("lora_te2_text_model_encoder_layers_0_mlp_fc1")}
    )
    ingot.lora.convert(path, tmp_path / "d.safetensors", "diffusers")
    found = ingot.numpy.load_file(tmp_path / "d.safetensors")
    up, _ = pair()
    start = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    assert np.array_equal(found[f"{start}.lora_B.weight"], up * 2)
    assert "text_encoder_2.text_model.encoder.layers.0.mlp.fc1.lora_A.weight" in found
    ingot.lora.convert(tmp_path / "d.safetensors", tmp_path / "k2.safetensors", "kohya")
    again = ingot.numpy.load_file(tmp_path / "k2.safetensors")
    assert again.keys() == kohya(name).keys() | kohya("lora_te2_text_model_encoder_layers_0_mlp_fc1").keys()
    assert again[f"{name}.alpha"] == 2


def test_convert_writes_the_configuration_of_peft(tmp_path: Path) -> None:
    start = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1"
    other = {
        f"{start}_to_k.lora_up.weight": np.ones((6, 3), "f4"),
        f"{start}_to_k.lora_down.weight": np.ones((3, 4), "f4"),
        f"{start}_to_k.alpha": np.float32(6).reshape(()),
    }
    path = saved(tmp_path, "k.safetensors", {**kohya(f"{start}_to_q"), **kohya(f"{start}_to_v"), **other})
    found = ingot.lora.convert(path, tmp_path / "peft", "peft")
    assert sorted(os.listdir(tmp_path / "peft")) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (2, 4, 3)
    assert [*config["rank_pattern"].values()] == [3]
    assert [*config["alpha_pattern"].values()] == [6]
    assert found.ranks == (2, 3)
    ingot.lora.convert(tmp_path / "peft", tmp_path / "k2.safetensors", "kohya")
    difference = ingot.diff(path, tmp_path / "k2.safetensors")
    assert not difference.tensors
    with pytest.raises(FileExistsError):
        ingot.lora.convert(path, tmp_path / "peft", "peft")


@pytest.mark.parametrize(
    ("make", "to", "code"),
    [
        (lambda: kohya("lora_unet_blocks_0_attn_qkv"), "peft", "unknown-module"),
        (
            lambda: {**kohya("lora_te_text_model_encoder_layers_0_mlp_fc1"), **kohya("lora_unet_conv_in")},
            "peft",
            "several-components",
        ),
        (lambda: {"lora_unet_conv_in.diff": np.ones((2, 2), "f4")}, "diffusers", "no-name"),
        (lambda: {**kohya("lora_unet_conv_in"), "emb": np.ones(2, "f4")}, "diffusers", "unused-tensors"),
        (lambda: peft({"fan_in_fan_out": True}), "kohya", "no-name"),
        (lambda: peft(), "kohya", "unknown-module"),
    ],
)
def test_convert_rejects(make: Callable[[], Any], to: Any, code: str, tmp_path: Path) -> None:
    found = make()
    tensors, config = found if isinstance(found, tuple) else (found, None)
    path = saved(tmp_path, "a.safetensors", tensors, config)
    with pytest.raises(ingot.AdapterError) as caught:
        ingot.lora.convert(path, tmp_path / "new", to)
    assert caught.value.code == code
    assert not (tmp_path / "new").exists()
