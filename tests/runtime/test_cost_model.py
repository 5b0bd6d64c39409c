"""Tables, the iteration-time formula, and what is learnt from measured iterations."""

import json

import pytest

from neo_compile.errors import ConfigError
from neo_compile.runtime.cost_model import AnalyticCostModel, SubBatchLoad
from neo_compile.runtime.cost_tables import TableCostModel
from neo_compile.runtime.interpolation import Table1D, Table2D
from neo_compile.runtime.plan import Strategy

TABLES = {
    "linear": {"tokens": [1, 32, 64], "ms": [1.0, 1.0, 2.0]},
    "prefill_attention": {"tokens": [16, 32], "starts": [0, 16], "ms": [[1.0, 3.0], [4.0, 8.0]]},
    "device_decode": {"requests": [1, 8], "kv_tokens": [100, 200], "ms": [[1.0, 2.0], [2.0, 3.0]]},
    "host_attention": {"requests": [1, 8], "kv_tokens": [100, 200], "ms": [[4.0, 8.0], [8.0, 12.0]]},
    "swap": {"blocks": [1, 10], "ms": [0.1, 1.0]},
    "logits": {"rows": [1, 11], "ms": [0.0, 2.0]},
    "sampling": {"rows": [1, 11], "ms": [1.0, 11.0]},
    "launch_ms": 0.5,
    "overhead_ms": 3.0,
}


def simple_model(**changes) -> AnalyticCostModel:
    parameters = {
        "num_layers": 10,
        "linear_floor_ms": 1.0,
        "knee_tokens": 32,
        "linear_ms_per_token": 0.1,
        "device_tokens_per_ms": 100.0,
        "host_tokens_per_ms": 20.0,
        "swap_blocks_per_ms": 10.0,
    }
    return AnalyticCostModel(**(parameters | changes))


class TestTables:
    def test_linear_between_points_flat_below_and_last_slope_beyond(self):
        table = Table1D("t", [10, 20, 40], [1.0, 2.0, 6.0])
        assert [table(x) for x in (0, 5, 10, 15, 20, 30, 40, 50)] == [0, 1, 1, 1.5, 2, 4, 6, 8]

    def test_one_point_is_a_constant(self):
        assert Table1D("t", [8], [3.0])(100) == 3.0

    def test_bilinear(self):
        table = Table2D("t", [1, 3], [10, 20], [[1.0, 2.0], [3.0, 6.0]])
        assert table(2, 15) == pytest.approx(3.0)
        assert table(1, 10) == 1.0
        assert table(3, 30) == pytest.approx(9.0)
        assert table(0, 10) == 0.0
        assert table(1, 0) == 1.0

    def test_never_negative(self):
        assert Table1D("t", [1, 2], [2.0, 1.0])(100) == 0.0

    @pytest.mark.parametrize("points", [[], [2, 1], [1, 1], [-1, 2]])
    def test_bad_axes_are_refused_by_name(self, points):
        with pytest.raises(ConfigError, match="'linear'"):
            Table1D("linear", points, [1.0] * len(points))

    def test_bad_shapes_are_refused_by_name(self):
        with pytest.raises(ConfigError, match="2 values for 3 points"):
            Table1D("t", [1, 2, 3], [1.0, 2.0])
        with pytest.raises(ConfigError, match="2 rows of 1 values"):
            Table2D("t", [1, 2], [1], [[1.0]])


class TestTableCostModel:
    def test_parts(self):
        model = TableCostModel(TABLES, num_layers=2)
        assert model.linear_ms(48) == pytest.approx(1.5)
        assert model.prefill_attention_ms([(0, 16), (0, 32)]) == pytest.approx(5.0)
        assert model.prefill_attention_ms([(16, 16)]) == pytest.approx(3.0)  # the second half of a prompt of 32
        assert model.device_decode_ms(1, 150) == pytest.approx(1.5)
        assert model.host_attention_ms(8, 100) == pytest.approx(8.5)  # with the launch
        assert model.host_attention_ms(0, 0) == 0.0
        assert model.raw_logits_ms(6) == pytest.approx(1.0)
        assert model.raw_sampling_ms(6) == pytest.approx(6.0)

    def test_logits_and_sampling_may_be_left_out(self):
        model = TableCostModel({n: t for n, t in TABLES.items() if n not in ("logits", "sampling")}, num_layers=2)
        assert model.raw_logits_ms(64) == model.raw_sampling_ms(64) == 0.0

    def test_json_round_trip_checks_the_key(self):
        key = {"model": "tiny", "threads": (1, 1)}
        text = TableCostModel(TABLES, num_layers=2, key=key).to_json()
        again = TableCostModel.from_json(text, key=key)
        assert again.linear_ms(48) == pytest.approx(1.5)
        assert (again.num_layers, again.launch_ms, again.overhead_ms) == (2, 0.5, 3.0)
        with pytest.raises(ConfigError, match="model: 'tiny', not 'large'"):
            TableCostModel.from_json(text, key=key | {"model": "large"})

    def test_another_version_is_refused(self):
        document = json.loads(TableCostModel(TABLES, num_layers=2).to_json()) | {"version": 99}
        with pytest.raises(ConfigError, match="version 99"):
            TableCostModel.from_json(json.dumps(document))

    def test_missing_tables_are_named(self):
        with pytest.raises(ConfigError, match="lack linear, swap"):
            TableCostModel({name: TABLES[name] for name in TABLES.keys() - {"linear", "swap"}}, num_layers=1)


class TestIterationTime:
    """T = L * (max{T_l0 + T_ga1, T_ca1} + max{T_l1 + T_ga0, T_ca0}), and L * (T_l + max{T_ga, T_ca}) for one batch."""

    def test_device_only(self):
        load = SubBatchLoad(num_tokens=4, num_device_decodes=4, device_kv_tokens=200)
        assert simple_model().iteration_ms(Strategy.DEVICE_ONLY, [load]) == pytest.approx(10 * (1 + 2))

    def test_prefill_attention_is_device_attention(self):
        load = SubBatchLoad(num_tokens=42, prefill_attention_ms=3.0, num_device_decodes=10, device_kv_tokens=100)
        assert simple_model().iteration_ms(Strategy.DEVICE_ONLY, [load]) == pytest.approx(10 * (2 + 3 + 1))

    def test_unsplit_runs_both_attentions_side_by_side(self):
        load = SubBatchLoad(8, num_device_decodes=4, device_kv_tokens=200, num_host_decodes=4, host_kv_tokens=100)
        assert simple_model().iteration_ms(Strategy.UNSPLIT, [load]) == pytest.approx(10 * (1 + 5))

    @pytest.mark.parametrize(
        ("host_0", "host_1", "expected"),
        [(10, 10, 10 * (1 + (1 + 2))), (100, 10, 10 * (1 + 5)), (10, 100, 10 * (5 + 3)), (100, 100, 10 * (5 + 5))],
    )
    def test_pipelined_hides_what_fits(self, host_0, host_1, expected):
        batch_0 = SubBatchLoad(5, num_device_decodes=4, device_kv_tokens=200, num_host_decodes=1, host_kv_tokens=host_0)
        batch_1 = SubBatchLoad(4, num_host_decodes=4, host_kv_tokens=host_1)
        assert simple_model().iteration_ms(Strategy.PIPELINED, [batch_0, batch_1]) == pytest.approx(expected)

    def test_launch_belongs_to_the_host_side_and_overhead_is_per_iteration(self):
        model = simple_model(launch_ms=0.5, overhead_ms=7.0)
        load = SubBatchLoad(1, num_host_decodes=1, host_kv_tokens=20)
        assert model.iteration_ms(Strategy.UNSPLIT, [load]) == pytest.approx(10 * (1 + 0.5 + 1) + 7)

    def test_rows_are_paid_once_an_iteration_and_overhead_once_a_sub_batch(self):
        model = TableCostModel(TABLES, num_layers=10)
        one = SubBatchLoad(num_tokens=8, num_logits=6)
        assert model.iteration_ms(Strategy.DEVICE_ONLY, [one]) == pytest.approx(10 * 1 + 3 + 1 + 6)
        assert model.iteration_ms(Strategy.PIPELINED, [one, one]) == pytest.approx(10 * 2 + 2 * (3 + 1) + 12)
        parts = model.predict_parts([one, one])
        assert (parts["linear"], parts["sampling"]) == (pytest.approx(10 * 2 + 2 * (3 + 1)), pytest.approx(12))

    def test_copies_bound_the_period_from_below(self):
        model = simple_model()
        load = SubBatchLoad(num_tokens=4)
        assert model.iteration_ms(Strategy.DEVICE_ONLY, [load], 5) == pytest.approx(10 * 1)
        assert model.iteration_ms(Strategy.DEVICE_ONLY, [load], 20) == pytest.approx(10 * 2)
        both = load._replace(leaving_blocks=10)
        assert model.iteration_ms(Strategy.DEVICE_ONLY, [both], 20) == pytest.approx(10 * 3)
        assert model.iteration_ms(Strategy.UNSPLIT, [load._replace(leaving_blocks=5)]) == pytest.approx(10 * 1)
        assert model.iteration_ms(Strategy.UNSPLIT, [load._replace(leaving_blocks=40)]) == pytest.approx(10 * 4)


class TestCorrection:
    LOAD = SubBatchLoad(num_tokens=4)

    def test_predictions_approach_what_is_measured(self):
        model = simple_model()
        for _ in range(100):
            model.observe(Strategy.UNSPLIT, model.iteration_ms(Strategy.UNSPLIT, [self.LOAD]), 15.0)
        assert model.iteration_ms(Strategy.UNSPLIT, [self.LOAD]) == pytest.approx(15.0, rel=0.01)

    def test_corrections_are_bounded(self):
        model = simple_model()
        for _ in range(1000):
            model.observe(Strategy.UNSPLIT, 10.0, 1e6)
            model.observe_part("linear", 10.0, 1e-6)
        assert model.strategy_correction[Strategy.UNSPLIT] == 4.0
        assert model.part_correction["linear"] == 0.25

    def test_one_outlier_moves_little(self):
        model = simple_model()
        model.observe(Strategy.DEVICE_ONLY, 10.0, 5000.0)  # a compilation
        assert model.strategy_correction[Strategy.DEVICE_ONLY] < 1.1

    def test_other_strategies_follow_a_common_error(self):
        model = simple_model()
        for _ in range(3000):
            predicted_ms = model.iteration_ms(Strategy.DEVICE_ONLY, [self.LOAD])
            model.observe(Strategy.DEVICE_ONLY, predicted_ms, 20.0)
        assert model.strategy_correction[Strategy.PIPELINED] == pytest.approx(2.0, rel=0.05)

    def test_error_is_learnt_per_strategy(self):
        model = simple_model()
        for measured in (5.0, 15.0) * 20:
            model.observe(Strategy.PIPELINED, 10.0, measured)
        assert model.prediction_error[Strategy.PIPELINED] == pytest.approx(0.5, rel=0.05)
        assert model.prediction_error[Strategy.UNSPLIT] == 0.0

    def test_unknown_part_is_an_error(self):
        with pytest.raises(KeyError):
            simple_model().observe_part("magic", 1.0, 1.0)
