"""The comparison: means, spreads and ratios are what their names say."""

import dataclasses
import json
import statistics

import pytest

from gradcomp_jax.experiments import Listener, SettingError, UnknownNameError, compare

# One process for all of them: a step is compiled once.
pytestmark = pytest.mark.xdist_group("experiments")


@pytest.fixture(scope="module")
def result(digits_task, digits):
    settings = dataclasses.replace(digits_task.settings, epochs=1)
    return compare(digits_task.on(digits), ["dgc", "dense-bf16"], seeds=[0, 7], settings=settings)


@pytest.mark.slow
def test_every_method_has_a_run_for_every_seed(result):
    assert [method.method for method in result.methods] == ["dgc", "dense-bf16"]
    for method in result.methods:
        assert [run.seed for run in method.runs] == [0, 7]
        evaluation = [run.final_evaluation for run in method.runs]
        assert method.evaluation_mean == pytest.approx(statistics.mean(evaluation))
        assert method.evaluation_std == pytest.approx(statistics.stdev(evaluation))


@pytest.mark.slow
def test_both_baselines_are_counted_though_one_was_not_trained(result):
    assert set(result.baseline_bytes) == {"dense-bf16", "dense"}
    dgc, bf16 = result.methods
    assert bf16.wire.sent == result.baseline_bytes["dense-bf16"]
    assert bf16.ratio_bf16 == 1.0
    assert dgc.ratio_bf16 == result.baseline_bytes["dense-bf16"] / dgc.wire.sent
    assert dgc.ratio_f32 == result.baseline_bytes["dense"] / dgc.wire.sent
    assert dgc.ratio_f32 > 1


@pytest.mark.slow
def test_bfloat16_halves_the_bytes(result):
    ratio = result.baseline_bytes["dense"] / result.baseline_bytes["dense-bf16"]
    assert ratio == pytest.approx(2, rel=0.01)


@pytest.mark.slow
def test_json_holds_all_of_it(result):
    fields = json.loads(result.to_json(command="gradcomp compare"))
    assert fields["command"] == "gradcomp compare"
    assert fields["machine"]["cores"] >= 1
    assert "jax" in fields["versions"]
    assert fields["settings"]["workers"] == 2
    for method, expected in zip(fields["methods"], result.methods, strict=True):
        assert method["evaluation_mean"] == expected.evaluation_mean
        assert method["wire"]["sent"] == expected.wire.sent
        for run, original in zip(method["runs"], expected.runs, strict=True):
            assert run["loss"] == pytest.approx(original.loss, rel=1e-4)
            assert run["evaluation"] == list(original.evaluation)


def test_what_cannot_be_compared_is_refused(digits_task, digits):
    with pytest.raises(UnknownNameError, match="did you mean 'dgc'"):
        compare(digits_task.on(digits), ["dcg"], seeds=[0])
    with pytest.raises(SettingError, match="methods must not be empty"):
        compare(digits_task.on(digits), [], seeds=[0])
    with pytest.raises(SettingError, match="seeds must differ"):
        compare(digits_task.on(digits), ["dgc"], seeds=[1, 1])


@pytest.mark.slow
def test_a_comparison_that_is_asked_for_again_trains_only_what_is_missing(digits_task, digits, tmp_path):
    class Counter(Listener):
        def __init__(self):
            self.trained = []

        def stepped(self, method, seed, step, loss):
            self.trained.append((method, seed))

    def run(seeds):
        counter = Counter()
        settings = dataclasses.replace(digits_task.settings, epochs=1)
        problem = digits_task.on(digits)
        found = compare(problem, ["dense"], seeds=seeds, settings=settings, listener=counter, checkpoint=tmp_path)
        return found, set(counter.trained)

    first, trained = run([0])
    assert trained == {("dense", 0)}
    both, trained = run([0, 1])
    assert trained == {("dense", 1)}
    assert both.methods[0].runs[0] == first.methods[0].runs[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense-seed-0", "dense-seed-1"]
