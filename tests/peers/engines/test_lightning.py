"""Lightning's Trainer and Fabric save and resume through ingot's `CheckpointIO`."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ingot
import ingot.torch
from ingot.engines.lightning import CheckpointIO
from support.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore")
# Both packages contain the same library.
LIBRARIES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=LIBRARIES)
def pl(request: pytest.FixtureRequest) -> Any:
    return import_module(request.param)


def module_of(pl: Any, **hyperparameters: Any) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, rate: float = 0.05, sizes: tuple[int, ...] = (4, 2), **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.inner = torch.nn.Linear(*sizes)
            self.norm = torch.nn.BatchNorm1d(sizes[1])

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return (self.norm(self.inner(batch[0])) - 1).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
            # The state of this class has a Counter.
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])]

    torch.manual_seed(3)
    return Module(**hyperparameters)


def batches() -> Any:
    return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4).sin()), batch_size=4)


def trainer(pl: Any, folder: Path, epochs: int, plugin: Any, **callback: Any) -> Any:
    saving = pl.callbacks.ModelCheckpoint(dirpath=folder, **callback)
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[] if plugin is None else [plugin],
        callbacks=[saving],
    )


def state_of(training: Any) -> dict[str, Any]:
    """Return everything that a trainer saves, except entries that depend on place and time."""
    state: dict[str, Any] = training._checkpoint_connector.dump_checkpoint()
    del state["callbacks"]
    return state


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
        assert_same(getattr(found, "_metadata", None), getattr(expected, "_metadata", None))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def no_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pickle was made or read")


@pytest.mark.parametrize("background", [False, True])
def test_training_resumes_from_a_checkpoint(
    pl: Any, tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(pl, tmp_path / "whole", 4, None)
    whole.fit(module_of(pl), batches())
    for module, name in ((torch, "save"), (torch, "load"), (pickle, "dump"), (pickle, "load")):
        monkeypatch.setattr(module, name, no_pickle)
    first = trainer(pl, tmp_path, 2, CheckpointIO(background=background), save_last=True)
    first.fit(module_of(pl), batches())
    second = trainer(pl, tmp_path, 4, CheckpointIO(background=background))
    second.fit(module_of(pl), batches(), ckpt_path=tmp_path / "last.ckpt")
    assert_same(state_of(second), state_of(whole))


def test_load_checkpoint_returns_what_torch_returns(pl: Any, tmp_path: Path) -> None:
    training = trainer(pl, tmp_path, 1, CheckpointIO())
    training.fit(module_of(pl), batches())
    state = training._checkpoint_connector.dump_checkpoint()
    torch.save(state, tmp_path / "pickled")
    plugin = CheckpointIO()
    plugin.save_checkpoint(state, tmp_path / "new" / "ours.ckpt")
    ours = plugin.load_checkpoint(tmp_path / "new" / "ours.ckpt", weights_only=True)
    assert_same(ours, torch.load(tmp_path / "pickled", weights_only=False))


def test_checkpoint_is_an_ordinary_file(pl: Any, tmp_path: Path) -> None:
    module = module_of(pl)
    training = trainer(pl, tmp_path, 1, CheckpointIO(), filename="one")
    training.fit(module, batches())
    path = tmp_path / "one.ckpt"
    weights = ingot.torch.load_file(path, keys="state_dict.*")
    expected = module.state_dict()
    assert sorted(weights) == sorted(f"state_dict.{name}" for name in expected)
    assert all(torch.equal(weights[f"state_dict.{name}"], expected[name]) for name in expected)
    assert "optimizer_states.0.state.0.exp_avg" in ingot.safe_open(path, "pt")


def test_load_checkpoint_keeps_shared_memory(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    plugin = CheckpointIO()
    plugin.save_checkpoint({"state_dict": {"a": tied, "b": tied, "c": tied[1:3]}}, tmp_path / "a.ckpt")
    found = plugin.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]
    found["a"][1] = 9
    assert (found["b"][1], found["c"][0]) == (9, 9)
    assert ingot.safe_open(tmp_path / "a.ckpt", "pt").keys() == ["state_dict.a"]


def test_save_rejects_what_needs_pickle(pl: Any, tmp_path: Path) -> None:
    plugin = CheckpointIO()
    training = trainer(pl, tmp_path, 1, plugin, filename="kept")
    training.fit(module_of(pl), batches())
    before = (tmp_path / "kept.ckpt").read_bytes()
    refusing = trainer(pl, tmp_path, 1, CheckpointIO(), filename="kept")
    with raises(ingot.SaveError, r"hyper_parameters.loss.*MSELoss.*ignore=\['loss'\]", code="not-plain"):
        refusing.fit(module_of(pl, loss=torch.nn.MSELoss()), batches())
    assert (tmp_path / "kept.ckpt").read_bytes() == before


def test_async_saving_of_lightning_works(pl: Any, tmp_path: Path) -> None:
    around = import_module(f"{pl.__name__}.plugins.io").AsyncCheckpointIO(CheckpointIO())
    training = trainer(pl, tmp_path, 2, around, save_last=True)
    training.fit(module_of(pl), batches())
    assert CheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["epoch"] == 1


def test_trainer_tests_and_predicts_with_weights_alone(pl: Any, tmp_path: Path) -> None:
    training = trainer(pl, tmp_path, 1, CheckpointIO(), filename="weights", save_weights_only=True)
    module = module_of(pl)
    training.fit(module, batches())
    other = module_of(pl)
    other.predict_step = lambda batch, *_: other.inner(batch[0])
    with torch.no_grad():
        expected = [module.inner(batch[0]) for batch in batches()]
    found = training.predict(other, batches(), ckpt_path=tmp_path / "weights.ckpt")
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["lightning.fabric", "lightning_fabric"])
def test_fabric_saves_and_loads(name: str, tmp_path: Path) -> None:
    fabric = import_module(name).Fabric(accelerator="cpu", devices=1, plugins=[CheckpointIO()])
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.nn.init.zeros_(model.weight)
    rest = fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
    assert rest["step"] == 3
    assert_same(dict(model.state_dict()), expected)


def test_remove_checkpoint_waits_for_the_next_checkpoint(tmp_path: Path) -> None:
    plugin = CheckpointIO(background=True)
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    plugin.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, old)
    plugin.teardown()
    # A directory has its name, so it cannot be written.
    new.mkdir()
    plugin.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, new)
    plugin.remove_checkpoint(old)
    with pytest.raises(OSError, match=r"new\.ckpt"):
        plugin.teardown()
    assert old.exists()
    new.rmdir()
    plugin.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, new)
    plugin.remove_checkpoint(old)
    plugin.teardown()
    assert plugin.load_checkpoint(new)["state_dict"]["a"].tolist() == [1, 1]
    assert not old.exists()


def test_background_save_leaves_out_later_changes(tmp_path: Path) -> None:
    plugin = CheckpointIO(background=True)
    tensor = torch.zeros(1 << 20)
    plugin.save_checkpoint({"state_dict": {"a": tensor}}, tmp_path / "a.ckpt")
    tensor.fill_(1)
    # Loading waits for it.
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["a"].sum() == 0


def test_load_checkpoint_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    plugin = CheckpointIO()
    plugin.save_checkpoint({"state_dict": {"a": torch.arange(4.0)}}, path)
    found = plugin.load_checkpoint(path)["state_dict"]["a"]
    path.write_bytes(bytes(path.stat().st_size))
    assert found.tolist() == [0, 1, 2, 3]


def test_checkpoints_are_stored_through_fsspec() -> None:
    plugin = CheckpointIO()
    path = "memory://folder/a.ckpt"
    plugin.save_checkpoint({"state_dict": {"a": torch.arange(4.0)}, "epoch": 3}, path)
    found = plugin.load_checkpoint(path)
    assert (found["state_dict"]["a"].tolist(), found["epoch"]) == ([0, 1, 2, 3], 3)
    plugin.remove_checkpoint(path)
    assert not fsspec.filesystem("memory").exists("/folder/a.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(path)


def test_load_checkpoint_rejects_files_of_other_programs(tmp_path: Path) -> None:
    plain, pickled = tmp_path / "plain.ckpt", tmp_path / "pickled.ckpt"
    ingot.torch.save_file({"a": torch.ones(1)}, plain)
    torch.save({"state_dict": {}}, pickled)
    with raises(ingot.CheckpointError, r"plain\.ckpt: expected ingot.state in the metadata", code="no-state"):
        CheckpointIO().load_checkpoint(plain)
    with pytest.raises(ingot.HeaderError, match=r"pickled\.ckpt.*a PyTorch checkpoint"):
        CheckpointIO().load_checkpoint(pickled)


def test_plugin_checks_its_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'durabel'"):
        CheckpointIO(durabel=False)  # type: ignore[call-arg]
    plugin = CheckpointIO(checksums="sha256")
    plugin.save_checkpoint({"state_dict": {"a": torch.ones(1)}}, tmp_path / "a.ckpt")
    assert ingot.torch.load_file(tmp_path / "a.ckpt", verify=True)
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "b.ckpt", storage_options={})
    with pytest.raises(TypeError, match="map_location must be a device, found dict"):
        plugin.load_checkpoint(tmp_path / "a.ckpt", map_location={"cuda:1": "cuda:0"})
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", "meta")["state_dict"]["a"].is_meta
