"""A patch changes live tensors as loading the new version would.

``INGOT_DELTA_TARGETS=2000`` sets the number of random targets, ``INGOT_DELTA_SEED`` the seed.
"""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ingot  # noqa: E402
from ingot import remap  # noqa: E402
from ingot.torch import load_file, load_into, save_file  # noqa: E402
from support.errors import raises  # noqa: E402

TARGETS = int(os.environ.get("INGOT_DELTA_TARGETS", "30"))
SEED = int(os.environ.get("INGOT_DELTA_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu,
    torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64, torch.complex64, torch.float4_e2m1fn_x2,
]  # fmt: skip
SHAPES = [(), (0,), (0, 3), (1,), (7,), (33, 5), (3, 4, 6), (70_000,), (300, 500)]

RULES = [
    [remap.rename("new.{n}", "experts.{n}.w"), remap.select("*")],
    [remap.stack("experts", "experts.{n}.w"), remap.select("*")],
    [
        remap.stack("experts", "experts.{n}.w", dim=1),
        remap.transpose("experts", (2, 0, 1)),
        remap.select("*"),
    ],
    [remap.concat("qkv", ["q", "k", "v"]), remap.select("*")],
    [remap.interleave("qk", ["q", "k"], groups=4), remap.select("*")],
    [remap.split(["a", "b"], "q"), remap.transpose("k"), remap.select("*")],
    [remap.concat("kv", ["k", "v"], dim=1), remap.split(["x", "y", "z"], "kv", dim=1), remap.select("*")],
    [remap.cast("*", "F32"), remap.concat("all", ["q", "k"], dim=0), remap.select("*")],
]
PARTS = {**{f"experts.{n}.w": (4, 6) for n in range(4)}, "q": (16, 6), "k": (8, 6), "v": (8, 6)}


def filled(dice: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bytes: every bit pattern is a value to be kept."""
    empty = torch.empty(shape or ((1,) if dtype is torch.float4_e2m1fn_x2 else ()), dtype=dtype)
    data = bytearray(dice.randbytes(empty.nbytes))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(empty.shape) if data else empty


def changed(dice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel() or dice.random() < 0.2:
        return tensor
    if dice.random() < 0.2:
        return filled(dice, tensor.dtype, tuple(tensor.shape))
    new = raw(tensor.clone())
    begin = dice.randrange(len(new))
    step = dice.choice([1, 3, 50, 5_000])
    bit = 1 if tensor.dtype is torch.bool else dice.choice([1, 0x80])
    new[begin : dice.randint(begin, len(new)) + 1 : step] ^= bit
    return new.view(tensor.dtype).view(tensor.shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    # A single element counts as contiguous with any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(raw(found[name]), raw(tensor)) for name, tensor in expected.items()
    )


def alike(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether all bits are equal; after a conversion, NaNs may have other bits."""
    if found.dtype == dtype or found.dtype not in DTYPES[:4]:
        return torch.equal(raw(found), raw(expected))
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.detach()[~found.isnan()], expected.detach()[~expected.isnan()]
    )


def laid_out(dice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of this shape with a random layout, and often another float dtype."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype in DTYPES[:4] and dice.random() < 0.2:
        dtype = dice.choice(DTYPES[:4])
    kind = dice.choice(["plain", "plain", "transposed", "strided", "view", "parameter"])
    new = torch.empty(shape, dtype=dtype)
    if dtype is torch.float4_e2m1fn_x2 or not new.numel():
        return new
    if kind == "transposed" and len(shape) > 1:
        return torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if kind == "strided" and shape:
        return torch.empty((*shape[:-1], 3 * shape[-1]), dtype=dtype)[..., 1::3]
    if kind == "view":
        return torch.empty(new.numel() + 5, dtype=dtype)[3:-2].view(shape)
    if kind == "parameter":
        return torch.nn.Parameter(new, requires_grad=dtype.is_floating_point)
    return new


def twin(dice: random.Random, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return two equal targets for these tensors."""
    state, targets = dice.getstate(), []
    for _ in range(2):
        dice.setstate(state)
        targets.append({name: laid_out(dice, tensor) for name, tensor in tensors.items()})
    return targets


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_versions(*versions: dict[str, torch.Tensor], checksums: Any = "xxh3") -> None:
    """Write ``0.st`` and so on, and the patches ``0-1.st`` and so on."""
    for number, tensors in enumerate(versions):
        save_file(tensors, f"{number}.st", checksums=checksums, durable=False)
        if number:
            patch = f"{number - 1}-{number}.st"
            ingot.delta.diff(f"{number - 1}.st", f"{number}.st", patch, overwrite=True, durable=False)


def test_a_patch_has_the_effect_of_loading_the_new_version(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(SEED)
    for number in range(TARGETS):
        if number % 2:
            rules, dtype = dice.choice(RULES), dice.choice(DTYPES[:4])
            old = {name: filled(dice, dtype, shape) for name, shape in PARTS.items()}
        else:
            rules = None
            old = {f"t{n}": filled(dice, dice.choice(DTYPES), dice.choice(SHAPES)) for n in range(6)}
        save_versions(old, {name: changed(dice, tensor) for name, tensor in old.items()})
        made = load_file("0.st", remap=rules)
        target, expected = twin(dice, made)
        options: Any = {"remap": rules}
        is_packed = any(tensor.dtype is torch.float4_e2m1fn_x2 for tensor in old.values())
        if dice.random() < 0.1 and rules is None and not is_packed:
            options["dtype"] = "F16"
        version = load_into(target, "0.st", **options).version
        found = load_into(target, version, patch="0-1.st", threads=dice.choice([None, 1]), **options)
        load_into(expected, "1.st", **options)
        converts = options.get("dtype") is not None or rules is RULES[-1]
        stored = dict.fromkeys(target) if converts else {name: one.dtype for name, one in made.items()}
        for _ in range(2):
            for name, one in expected.items():
                assert alike(target[name], one, stored[name]), (SEED, number, name)
            # The same patch again, as after a failure.
            load_into(target, version, patch="0-1.st", **options)
        assert found.version == ingot.delta.info("0-1.st").result
    with capsys.disabled():
        print(f"\nINGOT_DELTA_SEED={SEED}: {TARGETS} targets", end=" ")


def weights() -> list[dict[str, torch.Tensor]]:
    """Return three versions with large and small changes."""
    found = [{"w": torch.arange(50_000, dtype=torch.int32), "b": torch.zeros(9)}]
    for step in (1, 2):
        new = {name: tensor.clone() for name, tensor in found[-1].items()}
        new["w"][step :: 40 + step] += 1
        new["b"][:] = step
        found.append(new)
    return found


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_load_into_returns_the_version_for_the_next_patch(folder: Path) -> None:
    versions = weights()
    save_versions(*versions)
    target = copied(versions[0])
    loaded = load_into(target, "0.st")
    for step in (1, 2):
        loaded = load_into(target, loaded.version, patch=f"{step - 1}-{step}.st")
        assert loaded == ([], [])
        assert same(target, versions[step])
    assert loaded.version == load_into(copied(target), "2.st").version
    assert pickle.loads(pickle.dumps(loaded)).version == loaded.version
    # The result itself is no error.
    assert load_into(target, loaded.version, patch="1-2.st").version == loaded.version


def test_load_into_returns_no_version_without_checksums(folder: Path) -> None:
    versions = weights()
    save_versions(*versions, checksums=None)
    target = copied(versions[1])
    assert load_into(target, "0.st").version is None
    loaded = load_into(target, patch="0-1.st")
    loaded = load_into(target, loaded.version, patch="1-2.st")
    assert same(target, versions[2])


@pytest.mark.parametrize("fault", ["order", "version", "data", "verify", "truncated", "digest", "no patch"])
def test_load_into_refuses_a_patch_before_an_element_changes(folder: Path, fault: str) -> None:
    versions = weights()
    save_versions(*versions)
    target = copied(versions[0])
    version = load_into(target, "0.st").version
    patch, options, expected = Path("0-1.st"), {}, (ingot.IntegrityError, "wrong-base")
    if fault == "order":
        patch = Path("1-2.st")
    elif fault == "version":
        version = "0" * 64
    elif fault in ("data", "verify"):
        target["w"][-1] ^= 1
        version = None if fault == "data" else version
        options = {"verify": True} if fault == "verify" else {}
    elif fault == "truncated":
        patch.write_bytes(patch.read_bytes()[:-3])
        expected = (ingot.HeaderError, "truncated")
    elif fault == "digest":
        data = bytearray(patch.read_bytes())
        data[-5] ^= 1
        patch.write_bytes(data)
        expected = (ingot.IntegrityError, "digest-mismatch")
    else:
        patch = Path("1.st")
        expected = (ingot.IntegrityError, "invalid-patch")
    before, counters = copied(target), [tensor._version for tensor in target.values()]
    with raises(expected[0], code=expected[1]):
        load_into(target, version, patch=patch, **options)
    assert same(target, before)
    assert [tensor._version for tensor in target.values()] == counters


def test_load_into_takes_versions_and_no_paths_with_patch(folder: Path) -> None:
    versions = weights()
    save_versions(*versions)
    target = copied(versions[0])
    with raises(ingot.OptionError, code="not-a-version", match="call load_into twice"):
        load_into(target, "0.st", patch="0-1.st")
    for option in ({"dequantize": True}, {"expected_sha256": "0" * 64}, {"read_once": False}):
        with raises(ingot.OptionError, code="not-with-patch"):
            load_into(target, patch="0-1.st", **option)
    with pytest.raises(TypeError, match=r"source: .*found NoneType"):
        load_into(target)
    assert same(target, versions[0])


def test_load_into_without_a_version_needs_whole_tensors_of_the_base(folder: Path) -> None:
    versions = weights()
    save_versions(*versions)
    target: dict[str, torch.Tensor] = {**copied(versions[0]), "b": torch.zeros(9, dtype=torch.float64)}
    with raises(ingot.OptionError, code="no-version", tensor="b"):
        load_into(target, patch="0-1.st")
    loaded = load_into(target, load_into(target, "0.st").version, patch="0-1.st")
    assert target["b"].tolist() == [1] * 9
    assert loaded.version is not None


def test_load_into_names_tensors_that_a_patch_adds_and_removes(folder: Path) -> None:
    old = {"stays": torch.zeros(100), "goes": torch.zeros(3)}
    save_versions(old, {"stays": torch.ones(100), "comes": torch.ones(4)})
    target = copied(old)
    version = load_into(target, "0.st").version
    with pytest.raises(
        RuntimeError, match=r'(?s)missing in the file: "goes".*unexpected in the file: "comes"'
    ):
        load_into(target, version, patch="0-1.st")
    assert same(target, old)
    loaded = load_into(target, version, patch="0-1.st", strict=False)
    assert loaded == (["goes"], ["comes"])
    assert target["stays"].sum() == 100
    loaded = load_into(target, version, patch="0-1.st", strict=False, keys="stays")
    assert loaded == (["goes"], [])


def test_load_into_refuses_a_tensor_that_a_patch_reshapes(folder: Path) -> None:
    old = {"w": torch.zeros(100), "v": torch.zeros(3)}
    save_versions(old, {"w": torch.ones(100), "v": torch.ones(4)})
    target = copied(old)
    version = load_into(target, "0.st").version
    for strict in (True, False):
        with raises(ingot.DestinationError, code="destination-shape", tensor="v"):
            load_into(target, version, patch="0-1.st", strict=strict)
    assert same(target, old)


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (lambda: torch.zeros(100, device="meta"), "destination"),
        (lambda: torch.zeros(1).expand(100), "destination-overlap"),
        (lambda: torch.zeros(2, 50), "destination-shape"),
    ],
)
def test_load_into_refuses_tensors_that_a_patch_cannot_change(folder: Path, target: Any, code: str) -> None:
    old = {"a": torch.zeros(100), "w": torch.zeros(100)}
    save_versions(old, {"a": torch.ones(100), "w": torch.ones(100)})
    first = torch.zeros(100)
    with raises(ingot.DestinationError, code=code, tensor="w"):
        load_into({"a": first, "w": target()}, ingot.delta.info("0-1.st").base, patch="0-1.st")
    assert not first.any()


def test_load_into_refuses_destinations_that_share_memory(folder: Path) -> None:
    old = {"a": torch.zeros(100), "w": torch.zeros(100)}
    save_versions(old, {"a": torch.ones(100), "w": torch.ones(100)})
    memory = torch.zeros(150)
    with raises(ingot.DestinationError, code="destination-overlap"):
        load_into({"a": memory[:100], "w": memory[50:]}, ingot.delta.info("0-1.st").base, patch="0-1.st")
    assert not memory.any()


def test_load_into_changes_tied_parameters_once(folder: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    ingot.torch.save_model(model, "0.st", checksums="xxh3")
    with torch.no_grad():
        other.embed.weight.copy_(model.embed.weight)
        other.embed.weight[3, 1] = 7
    ingot.torch.save_model(other, "1.st", checksums="xxh3")
    ingot.delta.diff("0.st", "1.st", "0-1.st")
    counter = model.embed.weight._version
    load_into(model, patch="0-1.st")
    assert torch.equal(model.head.weight, other.head.weight)
    assert model.embed.weight._version == counter + 1
    assert model.embed.weight.grad_fn is None
    assert model.embed.weight.requires_grad


def test_load_into_counts_a_write_of_changed_tensors_only(folder: Path) -> None:
    old = {"a": torch.zeros(100), "w": torch.zeros(100)}
    save_versions(old, {"a": torch.zeros(100), "w": torch.ones(100)})
    target = {name: torch.nn.Parameter(tensor) for name, tensor in old.items()}
    product = (target["a"] * target["w"]).sum()
    load_into(target, ingot.delta.info("0-1.st").base, patch="0-1.st")
    assert target["a"]._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_load_into_patches_aliases_of_parts(folder: Path) -> None:
    for number, step in ((0, 60), (1, 7)):
        memory = torch.arange(60.0)
        memory[15::step] = -1
        views = {"all": memory, "rows": memory[20:].view(10, 4), "turned": memory[:40].view(4, 10).t()}
        save_file(views, f"{number}.st", shared="alias", checksums="xxh3")
    ingot.delta.diff("0.st", "1.st", "0-1.st")
    target = {"all": torch.zeros(60), "rows": torch.zeros(10, 4), "turned": torch.zeros(10, 4)}
    load_into(target, load_into(target, "0.st").version, patch="0-1.st")
    assert same(target, load_file("1.st"))


def test_load_into_patches_shards(folder: Path) -> None:
    versions = weights()
    save_versions(*versions[:2])
    for number in range(2):
        ingot.split(f"{number}.st", str(number), max_shard_size=1000, checksums="xxh3")
    ingot.delta.diff("0", "1", "shards.st")
    target = copied(versions[0])
    load_into(target, load_into(target, "0").version, patch="shards.st")
    assert same(target, versions[1])


def test_load_into_reports_the_progress_of_a_patch(folder: Path) -> None:
    versions = weights()
    save_versions(*versions[:2])
    target, told = copied(versions[0]), []
    target["b"] = target["b"].double()
    load_into(
        target, load_into(target, "0.st").version, patch="0-1.st", progress=lambda *now: told.append(now)
    )
    assert told[-1] == (sum(tensor.nbytes for tensor in target.values()),) * 2
