"""The folder of a run: nothing that is not of the run is touched."""

import dataclasses
import fcntl
import pathlib

import pytest

from gradcomp_jax.experiments import Listener, SettingError, run_folder, train_with_checkpoints
from tests.experiments.descent import (
    STEPS,
    After,
    Stop,
    everything_in,
    link,
    link_to_file,
    longer,
    notes,
    stopped,
    thesis,
)

FOREIGN = [
    ("epoch-1", thesis),
    ("epoch-my_thesis", thesis),
    ("epoch-notes.txt", notes),
    ("epoch-7", link),
    ("run.json.draft", link_to_file),
    ("processes.token", link_to_file),
]


@pytest.mark.parametrize(("name", "put"), FOREIGN)
def test_a_folder_with_other_things_and_no_run_is_refused_and_left_as_it_is(descent, tmp_path, name, put) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    put(folder / name)
    before, listener = everything_in(tmp_path), After()
    with pytest.raises(
        SettingError, match=rf"holds {name} and no run: name a new or an empty folder, or add --share-f"
    ):
        train_with_checkpoints(descent, 0, folder, listener=listener)
    assert everything_in(tmp_path) == before
    assert listener.steps == 0


def test_an_empty_folder_under_the_name_of_a_deleted_state_stays(descent, whole, tmp_path) -> None:
    train_with_checkpoints(descent, 0, tmp_path)
    (tmp_path / "epoch-2").mkdir()
    assert train_with_checkpoints(descent, 0, tmp_path).loss == whole.loss
    assert (tmp_path / "epoch-2").is_dir()


@pytest.mark.parametrize("name", ["run[1]", "all*/r?n"])
def test_a_run_goes_on_in_a_folder_of_any_name(name: str, descent, whole, tmp_path) -> None:
    stopped(descent, tmp_path / name, 2)
    assert train_with_checkpoints(descent, 0, tmp_path / name).loss == whole.loss


def test_a_shared_folder_keeps_what_was_there(descent, whole, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name, put in (*FOREIGN[1:], ("epoch-0", thesis), ("epoch-01", thesis), ("epoch-5", thesis), ("plan.md", notes)):
        put(folder / name)
    before = everything_in(tmp_path)
    assert train_with_checkpoints(descent, 0, folder, share_folder=True).loss == whole.loss
    after = everything_in(tmp_path)
    assert {path: after[path] for path in before} == before
    new = {pathlib.Path(path).relative_to(folder).parts[0] for path in after.keys() - before.keys()}
    assert new == {"run.json", "run.lock", "epoch-3", "epoch-4"}


@pytest.mark.parametrize("name", ["epoch-1", "epoch-3", "epoch-3.gradcomp-new", "epoch-2.orbax-checkpoint-tmp"])
@pytest.mark.parametrize("put", [thesis, link, notes])
def test_what_is_in_the_way_of_a_state_is_told_before_anything_is_trained(descent, tmp_path, name, put) -> None:
    folder, listener = tmp_path / "run", After()
    folder.mkdir()
    put(folder / name)
    before = everything_in(tmp_path)
    with pytest.raises(SettingError, match=rf"{name} is not of the run in .* in its way: move it away"):
        train_with_checkpoints(descent, 0, folder, share_folder=True, listener=listener)
    after = everything_in(tmp_path)
    assert {path: after[path] for path in before} == before
    assert listener.steps == 0


def test_what_comes_in_the_way_while_it_trains_stays_and_the_run_goes_on_later(descent, whole, tmp_path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(SettingError, match=r"epoch-2 is not of the run in .* in its way: move it away"):
        train_with_checkpoints(descent, 0, folder, listener=After(1, lambda: thesis(folder / "epoch-2")))
    assert (folder / "epoch-2" / "chapter-1.tex").read_text() == "mine"
    (folder / "epoch-2").rename(tmp_path / "thesis")
    listener = After()
    assert train_with_checkpoints(descent, 0, folder, listener=listener).loss == whole.loss
    assert listener.steps == 3 * STEPS


def test_what_somebody_has_put_into_a_state_stays_when_the_state_goes(descent, whole, tmp_path) -> None:
    folder = tmp_path / "run"

    def put() -> None:
        (folder / "epoch-1" / "plots").mkdir()
        (folder / "epoch-1" / "plots" / "loss.png").write_text("mine")

    listener = After(2, put)
    assert train_with_checkpoints(descent, 0, folder, listener=listener).loss == whole.loss
    assert list(everything_in(folder / "epoch-1")) and (folder / "epoch-1" / "plots" / "loss.png").read_text() == "mine"
    assert [path.name for path in (folder / "epoch-1").iterdir()] == ["plots"]


def test_states_without_a_record_are_not_overwritten(descent, run) -> None:
    (run / "run.json").unlink()
    before = everything_in(run)
    with pytest.raises(SettingError, match="holds epoch-1, epoch-2 and no run"):
        train_with_checkpoints(descent, 0, run)
    with pytest.raises(SettingError, match=r"epoch-\d is not of the run"):
        train_with_checkpoints(descent, 0, run, share_folder=True)
    after = everything_in(run)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("name", ["run.json", "run.lock"])
def test_links_under_the_run_s_own_names_are_refused(descent, tmp_path, name) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    link_to_file(folder / name)
    before = everything_in(tmp_path)
    with pytest.raises(SettingError, match=rf"{name}"):
        train_with_checkpoints(descent, 0, folder, share_folder=True)
    assert everything_in(tmp_path) == before


def test_the_folder_may_be_a_link_and_is_no_file(descent, whole, tmp_path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    assert train_with_checkpoints(descent, 0, tmp_path / "run").loss == whole.loss
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/run"):
        with pytest.raises(SettingError, match="is not a folder: name one to save in"):
            train_with_checkpoints(descent, 0, tmp_path / name)
    (tmp_path / "dangling").symlink_to("nothing")
    with pytest.raises(SettingError, match="is a link to nothing"):
        train_with_checkpoints(descent, 0, tmp_path / "dangling")
    # As a command is given it, before anything is compiled.
    with pytest.raises(SettingError, match="bucket/run is a URL"):
        run_folder.check_free(pathlib.Path("gs://bucket/run"), share=True)


def swap(run: pathlib.Path, first: str, second: str) -> None:
    (run / first).rename(run / "between")
    (run / second).rename(run / first)
    (run / "between").rename(run / second)


def test_swapped_states_are_told_apart(descent, whole, run) -> None:
    swap(run, "epoch-1", "epoch-2")
    with pytest.raises(
        SettingError, match=r"epoch-2 should be the state after epoch 2 and is that of epoch 1: put the"
    ):
        train_with_checkpoints(descent, 0, run)
    # By hand, with the marks in their places.
    swap(run, "epoch-1/run.mark", "epoch-2/run.mark")
    with pytest.raises(
        SettingError, match=r"epoch-2 is a state after 2 steps, where epoch 2 ends at step 4: delete it to"
    ):
        train_with_checkpoints(descent, 0, run)
    swap(run, "epoch-1/run.mark", "epoch-2/run.mark")
    swap(run, "epoch-1", "epoch-2")
    assert train_with_checkpoints(descent, 0, run).loss == whole.loss


def test_a_state_of_another_run_is_refused_and_without_it_the_earlier_one_goes_on(
    descent, whole, run, tmp_path
) -> None:
    other = tmp_path / "other"
    with pytest.raises(Stop):
        train_with_checkpoints(descent, 1, other, listener=After(2))
    (run / "epoch-2").rename(tmp_path / "own")
    (other / "epoch-2").rename(run / "epoch-2")
    before = everything_in(run)
    with pytest.raises(
        SettingError, match=r"epoch-2 should be the state after epoch 2 and is not of this run: put the"
    ):
        train_with_checkpoints(descent, 0, run)
    assert everything_in(run) == before
    (run / "epoch-2").rename(tmp_path / "taken away")
    (run / "epoch-2").symlink_to(tmp_path / "own")
    with pytest.raises(SettingError, match=r"epoch-2 should be the state after epoch 2 and is not of this run"):
        train_with_checkpoints(descent, 0, run)
    (run / "epoch-2").unlink()
    listener = After()
    assert train_with_checkpoints(descent, 0, run, listener=listener).loss == whole.loss
    assert listener.steps == 3 * STEPS


def test_a_second_run_in_the_folder_is_refused_while_one_goes_on(descent, whole, run) -> None:
    def another() -> None:
        with pytest.raises(
            SettingError, match=r"another run is going on in .*: wait for its end, or name another folder"
        ):
            train_with_checkpoints(descent, 0, run)

    assert train_with_checkpoints(descent, 0, run, listener=After(3, another)).loss == whole.loss
    # It is over: the folder is free.
    assert train_with_checkpoints(descent, 0, run).loss == whole.loss


def test_where_there_are_no_locks_it_says_so_and_goes_on(tmp_path, monkeypatch) -> None:
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="without locks: write there one at a time"), run_folder.locked(tmp_path):
        pass


def test_where_nothing_is_saved_yet_other_settings_are_welcome(descent, tmp_path) -> None:
    class Early(Listener):
        def stepped(self, method, seed, step, loss) -> None:
            raise Stop

    for seed in (0, 1):
        with pytest.raises(Stop):
            train_with_checkpoints(descent, seed, tmp_path, listener=Early())
    stopped(descent, tmp_path, 1)
    with pytest.raises(SettingError, match="a run with seed 0, not 1"):
        train_with_checkpoints(descent, 1, tmp_path)


def test_a_learning_rate_that_has_fallen_to_zero_is_not_gone_on_with(descent, tmp_path) -> None:
    """A run at a constant rate has as many epochs as one likes; here they are part of what it is."""
    falling, more = longer(4), longer(6)
    for trainer in (falling, more):
        trainer.settings = dataclasses.replace(trainer.settings, schedule="linear")
    stopped(falling, tmp_path, 2)
    with pytest.raises(SettingError, match="a run with epochs 4, not 6"):
        train_with_checkpoints(more, 0, tmp_path)
    assert len(train_with_checkpoints(falling, 0, tmp_path).evaluation) == 4
