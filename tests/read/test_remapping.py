"""Rules of `ingot.remap`, compared with the same rules applied to a dict of numpy arrays."""

import json
import os
import re
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
from ingot import remap
from ingot.errors import IntegrityError, OptionError, RemapError
from ingot.remap import (
    Rules,
    cast,
    concat,
    drop,
    interleave,
    rename,
    select,
    split,
    stack,
    transpose,
)

# Lists of rules per run. `make nightly` sets more.
RULE_LISTS = int(os.environ.get("INGOT_RULE_LISTS", "150"))
DTYPES = {"F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def join_naively(arrays, dim, groups):
    cut = [np.split(array, groups, axis=dim) for array in arrays]
    return np.concatenate([part for turn in zip(*cut, strict=True) for part in turn], axis=dim)


def split_naively(array, sizes, dim, groups):
    parts = [[] for _ in sizes]
    ends = np.cumsum([size // groups for size in sizes])[:-1]
    for group in np.split(array, groups, axis=dim):
        for part, piece in zip(parts, np.split(group, ends, axis=dim), strict=True):
            part.append(piece)
    return [np.concatenate(pieces, axis=dim) for pieces in parts]


@st.composite
def sources(draw):
    """Tensors of a few shapes and dtypes, so that many can be stacked and joined."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtypes = draw(st.lists(st.sampled_from(["F32", "BF16", "U8"]), min_size=1, max_size=2))
    tensors = {}
    for number in range(draw(st.integers(1, 6))):
        own = shape if draw(st.integers(0, 3)) else draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = {**DTYPES, "U8": np.uint8}[draw(st.sampled_from(dtypes))]
        values = np.arange(prod(own)) % 251 + number * 7
        values = values.astype(np.uint8) if dtype != np.float32 else values / np.float32(3)
        tensors[f"t.{number}"] = values.astype(dtype).reshape(own)
    return tensors


def one_rule(draw, tensors, fresh):
    """Return a rule that fits the tensors and replace them as numpy does."""
    kind = draw(
        st.sampled_from(
            ["rename", "stack", "concat", "interleave", "split", "transpose", "cast", "select", "drop"]
        )
    )
    name = draw(st.sampled_from(sorted(tensors)))
    array = tensors[name]
    rank = array.ndim
    same = [other for other, one in tensors.items() if (one.shape, one.dtype) == (array.shape, array.dtype)]
    if kind == "rename":
        tensors[fresh] = tensors.pop(name)
        return [rename(fresh, name)]
    if kind == "stack":
        chosen = draw(st.permutations(same))[: draw(st.integers(1, len(same)))]
        dim = draw(st.integers(-rank - 1, rank))
        renamed = [rename(f"{fresh}.{number}.x", old) for number, old in enumerate(chosen)]
        tensors[fresh] = np.stack([tensors.pop(old) for old in chosen], axis=dim)
        return [*renamed, stack(fresh, f"{fresh}.{{e}}.x", dim=dim)]
    if kind in ("concat", "interleave") and rank:
        dim = draw(st.integers(-rank, rank - 1))
        chosen = draw(st.permutations(same))[: draw(st.integers(1, len(same)))]
        divisors = [n for n in range(1, array.shape[dim] + 1) if array.shape[dim] % n == 0]
        groups = draw(st.sampled_from(divisors or [1])) if kind == "interleave" else 1
        tensors[fresh] = join_naively([tensors.pop(old) for old in chosen], dim, groups)
        return [concat(fresh, chosen, dim) if kind == "concat" else interleave(fresh, chosen, groups, dim)]
    if kind == "split" and rank:
        dim = draw(st.integers(-rank, rank - 1))
        size = array.shape[dim]
        groups = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0] or [1]))
        rows = size // groups
        at = draw(st.integers(0, rows))
        sizes = [at * groups, (rows - at) * groups]
        names = [f"{fresh}.0", f"{fresh}.1"]
        tensors |= zip(names, split_naively(tensors.pop(name), sizes, dim, groups), strict=True)
        return [split(names, name, dim, sizes, groups)]
    if kind == "transpose":
        dims = draw(st.one_of(st.none(), st.permutations(range(rank))))
        tensors[name] = array.transpose(dims)
        return [transpose([name], dims)]
    if kind == "cast":
        code = draw(st.sampled_from(sorted(DTYPES)))
        if array.dtype in DTYPES.values():
            tensors[name] = array.astype(np.float32).astype(DTYPES[code])
        return [cast([name], code)]
    if kind == "drop" and len(tensors) > 1:
        del tensors[name]
        return [drop([name])]
    if kind == "select":
        chosen = {*draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1)), name}
        for other in {*tensors} - chosen:
            del tensors[other]
        return [select(chosen)]
    return []


@st.composite
def cases(draw):
    tensors = draw(sources())
    expected, rules = dict(tensors), []
    for number in range(draw(st.integers(1, 6))):
        rules += one_rule(draw, expected, f"n{number}")
    index = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(1, 3)), min_size=8))
    return tensors, [*rules, select("*")], expected, [slice(*one) for one in index]


def check(found, expected):
    assert {*found} == {*expected}
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


@settings(max_examples=RULE_LISTS, deadline=None)
@given(cases(), st.booleans())
def test_rules_equal_the_rules_applied_to_arrays(case, is_sharded):
    tensors, rules, expected, index = case
    with TemporaryDirectory() as folder:
        path = Path(folder, "source.safetensors")
        ingot.numpy.save_file(tensors, path)
        if is_sharded:
            ingot.split(path, Path(folder, "shards"), max_shard_size=1, durable=False)
            path = Path(folder, "shards")
        check(ingot.numpy.load_file(path, remap=rules), expected)
        with ingot.open(path, remap=rules) as file:
            for name, array in expected.items():
                own = tuple(index[: array.ndim])
                assert file.get_slice(name)[own].tobytes() == array[own].tobytes()
        ingot.rewrite(path, Path(folder, "new.safetensors"), remap=rules, durable=False)
        check(ingot.numpy.load_file(Path(folder, "new.safetensors")), expected)


@pytest.fixture
def experts(tmp_path):
    tensors = {
        f"layers.{layer}.experts.{e}.w": np.full((2, 3), 100 * layer + e, np.float32)
        for layer in range(2)
        for e in range(12)
    }
    tensors["norm"] = np.ones(3, np.float32)
    path = tmp_path / "experts.safetensors"
    ingot.numpy.save_file(tensors, path, checksums=True)
    return path


STACK = stack("layers.{i}.w", "layers.{i}.experts.{e}.w")


def test_stack_orders_experts_by_number(experts):
    found = ingot.numpy.load_file(experts, remap=[STACK, select("*")])
    assert {*found} == {"layers.0.w", "layers.1.w", "norm"}
    assert found["layers.1.w"][:, 0, 0].tolist() == [100.0 + e for e in range(12)]


def refused(path, *rules, strict=True):
    with pytest.raises(RemapError) as caught:
        ingot.numpy.load_file(path, remap=Rules(rules, strict))
    assert str(caught.value).startswith(str(path))
    return caught.value.code, caught.value.tensor


def test_rules_that_do_not_fit_raise_with_names(experts):
    rest = select("*")
    assert refused(experts, rename("x", "missing"), rest) == ("rule-unmatched", None)
    assert refused(experts, drop("missing.*"), rest) == ("rule-unmatched", None)
    assert refused(experts, STACK) == ("rule-untaken", "norm")
    assert refused(experts, drop("*.3.w"), STACK, rest) == ("rule-gap", "layers.0.w")
    assert refused(experts, rename("layers.{i}.experts.a.w", "layers.{i}.experts.3.w"), STACK) == (
        "rule-gap",
        "layers.0.experts.a.w",
    )
    assert refused(experts, rename("norm", "layers.0.experts.0.w"), rest) == ("rule-duplicate", "norm")
    assert refused(experts, rename("x", "layers.{i*}"), rest) == ("rule-duplicate", "x")
    assert refused(experts, rename("{j}", "norm"), rest) == ("invalid-rule", None)
    assert refused(experts, stack("w", "norm"), rest) == ("invalid-rule", None)
    pair = ["norm", "layers.0.experts.0.w"]
    assert refused(experts, concat("x", pair), rest) == ("rule-shapes", pair[1])
    assert refused(experts, concat("x.{i}", ["layers.{i}.experts.0.w", "a.{i}"]), rest)[0] == "rule-gap"
    assert refused(experts, concat("x", ["norm", "norm"]), rest)[0] == "rule-duplicate"
    assert refused(experts, split(["a", "b"], "norm"), rest) == ("rule-shapes", "norm")
    assert refused(experts, interleave("x", ["norm"], groups=2), rest) == ("rule-shapes", "norm")
    assert refused(experts, transpose("norm", [1, 0]), rest) == ("rule-shapes", "norm")


@pytest.mark.parametrize(
    "rule",
    [
        stack("{a}{b}", "{a}.{b}.{e}"),
        concat("{a}{b}", ["{a}.{b}.0", "{a}.{b}.1"]),
        interleave("{a}{b}", ["{a}.{b}.0", "{a}.{b}.1"], groups=1),
    ],
)
def test_parts_of_two_tensors_of_one_name_are_refused(tmp_path, rule):
    path = tmp_path / "parts.safetensors"
    names = ["x.yz.0", "xy.z.0", "x.yz.1", "xy.z.1"]
    ingot.numpy.save_file({name: np.full(2, n) for n, name in enumerate(names)}, path)
    assert refused(path, rule, select("*")) == ("rule-duplicate", "xyz")


def test_stack_refuses_a_number_too_long_for_python(tmp_path):
    path, name = tmp_path / "long.safetensors", "e." + "9" * 5000
    ingot.numpy.save_file({name: np.zeros(2)}, path)
    assert refused(path, stack("w", "e.{n}")) == ("rule-gap", name)


@pytest.mark.parametrize(("groups", "size"), [(8, 1), (4, 2), (2, 4)])
def test_groups_of_whole_bytes_of_a_packed_dtype_take_turns(tmp_path, groups, size):
    one, other = bytes(range(8)), bytes(range(8, 16))
    specs = {
        name: {"dtype": "F4", "shape": [16], "data": data} for name, data in {"a": one, "b": other}.items()
    }
    source, result = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    ingot.serialize_file(specs, source)
    joined = interleave("x", ["a", "b"], groups=groups)
    ingot.rewrite(source, result, remap=[joined])
    turns = (data[at : at + size] for at in range(0, 8, size) for data in (one, other))
    assert result.read_bytes().endswith(b"".join(turns))
    ingot.rewrite(result, source, remap=[split(["a", "b"], "x", groups=groups)], overwrite=True)
    assert source.read_bytes().endswith(one + other)


def test_parts_for_ranks_are_not_cut_again(experts):
    rules = [
        concat("x", ["layers.0.experts.0.w", "layers.0.experts.1.w"], shard="each"),
        split(["a", "b"], "x"),
    ]
    assert refused(experts, *rules) == ("rule-ranks", "x")


def test_plan_lists_unmatched_rules_and_untaken_tensors(experts):
    unmatched = [rename("x", "missing"), drop("missing.*")]
    rules = Rules([STACK, *unmatched], strict=False)
    plan = remap.plan(experts, rules)
    assert (plan.unmatched, plan.untaken) == (unmatched, ["norm"])
    assert {one.name: one.shape for one in plan.tensors}["layers.0.w"] == (12, 2, 3)
    assert {*ingot.numpy.load_file(experts, remap=rules)} == {"layers.0.w", "layers.1.w", "norm"}


def test_selections_see_the_new_names(experts):
    found = ingot.numpy.load_file(
        experts, remap=[STACK, select("*")], keys="layers.1.w", slices={"layers.1.w": np.s_[3:5, 1]}
    )
    assert found["layers.1.w"].tolist() == [[103.0] * 3, [104.0] * 3]


def test_callables_see_dtypes_and_shapes(experts):
    rules = [drop(lambda info: len(info.shape) == 2 and info.dtype == "F32"), select("*")]
    assert [*ingot.numpy.load_file(experts, remap=rules)] == ["norm"]


def test_verified_sources_are_compared_before_they_are_put_together(experts):
    rules = [STACK, select("*")]
    sound = ingot.numpy.load_file(experts, remap=rules, verify=True)
    check(ingot.numpy.load_file(experts, remap=rules), sound)
    with open(experts, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(IntegrityError):
        ingot.numpy.load_file(experts, remap=rules, verify=True)


def test_rewrite_drops_metadata_that_describes_old_tensors(experts, tmp_path):
    ingot.rewrite(experts, tmp_path / "new.safetensors", remap=[STACK, select("*")])
    with ingot.open(tmp_path / "new.safetensors") as file:
        assert "ingot.checksums" not in (file.metadata() or {})
    ingot.rewrite(experts, experts, remap=[STACK, select("*")], checksums=True, overwrite=True)
    assert ingot.verify(experts).ok


def test_read_returns_the_rules_of_a_file(tmp_path):
    path = tmp_path / "rules.json"
    rules = [{"stack": "w", "old": "experts.{e}.w", "dim": 1}, {"unwrap": "ddp"}, {"select": ["a", "b"]}]
    path.write_text(json.dumps(rules))
    expected = [stack("w", "experts.{e}.w", dim=1), remap.unwrap("ddp"), select(["a", "b"])]
    assert remap.read(path) == Rules(expected)
    path.write_text(json.dumps({"rules": rules[:1], "strict": False}))
    assert remap.read(path) == Rules(expected[:1], strict=False)
    wrong = ["{", "1", '{"x": 1}', '[{"join": "a"}]', '[{"rename": "a"}]', "[1]", '[{"unwrap": "x"}]']
    for text in wrong:
        path.write_text(text)
        with pytest.raises(OptionError, match=re.escape(str(path))) as caught:
            remap.read(path)
        assert caught.value.code == "invalid-rule"


def test_remap_of_another_type_is_refused(experts):
    for wrong in ("norm", 1, [1], ["norm"]):
        with pytest.raises(TypeError, match=r"load_file\(\)"):
            ingot.numpy.load_file(experts, remap=wrong)


def test_aliases_can_be_renamed(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.arange(6.0).view(2, 3)
    path = tmp_path / "tied.safetensors"
    ingot.torch.save_file({"embed": whole, "head": whole, "row": whole[1]}, path, shared="alias")
    rules = [rename("new.{name}", "{name}"), transpose("new.row")]
    found = ingot.torch.load_file(path, remap=rules)
    assert {name: one.tolist() for name, one in found.items()} == {
        "new.embed": whole.tolist(),
        "new.head": whole.tolist(),
        "new.row": whole[1].tolist(),
    }


def test_elements_that_share_bytes_are_refused_by_name(tmp_path):
    path = tmp_path / "packed.safetensors"
    values = np.arange(48).reshape(6, 8) % 16
    ingot.numpy.save_file({"a": values.astype(ml_dtypes.float4_e2m1fn), "b": np.ones(3)}, path)
    rest = select("*")
    assert refused(path, transpose("a"), rest) == ("invalid-pieces", "a")
    assert refused(path, split(["x", "y"], "a", dim=1, sizes=[3, 5]), rest) == ("invalid-pieces", "x")
    assert refused(path, cast("*", "F32")) == ("no-conversion", "a")


def test_cast_converts_powers_of_two(tmp_path):
    path = tmp_path / "scales.safetensors"
    scales = np.array([0.25, 1, 8])
    ingot.numpy.save_file({"s": scales.astype(ml_dtypes.float8_e8m0fnu)}, path)
    found = ingot.numpy.load_file(path, remap=[cast("*", "F32")])["s"]
    assert (found.dtype, found.tolist()) == (np.float32, scales.tolist())


@pytest.mark.parametrize(
    "rule",
    [
        *(rename("a", "b.{i}"), stack("a", "b.{e}", dim=1), concat("a", ["b", "c"], shard="each")),
        *(interleave("a", ["b", "c"], groups=2, dim=1), split(["a", "b"], "c", sizes=[1, 2])),
        *(transpose("*", dims=[1, 0]), cast("*", "BF16"), select(["a"]), drop("a"), remap.unwrap("ddp")),
    ],
)
def test_rules_print_as_the_call_that_returns_them(rule):
    assert eval(repr(rule), vars(remap)) == rule
