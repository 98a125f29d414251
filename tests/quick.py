"""What the README's line runs of the tests that many methods share; the continuous build runs all of them.

Compilation is what tests cost, and a program a method adds up to half an hour. A question that is asked of every method is
asked here of a few that differ in what it is about; the other answers are marked ``slow``.
"""

FEW = ("dense_bf16", "dense-bf16", "terngrad", "dgc", "powersgd")
"""A cast, by both its names; a shared statistic; a selection with owners and momentum; a sum."""

KEEP = ("dgc", "powersgd")
"""Of the few those that keep something."""

SOME = (*FEW, "topk_sgd", "block_quantized", "one_bit_adam", "eden")
"""One for each kind of memory and of statistic."""

VARIANTS = (
    "terngrad-sum", "dgc-whole-tree", "topk-put-back", "topk-server", "int8-gather", "random_k-sum", "demo-signed",
    "sparcml-doubling",
)  # fmt: skip
"""Of the other forms of a method those that exercise what no registered method does."""

CODES = (
    "sign-means", "sign-l1", "sign-unit", "random-k-f32", "random-k-one", "rotated-2", "rotated-4", "e4m3", "e4m3-plain",
    "fixed-8", "low-rank", "frequencies", "union", "l2-4", "ternary-own", "topk-3-f32", "int4", "int8-stochastic",
    "dense-bf16", "ternary", "levels", "topk-3-int8", "topk-packed",
)  # fmt: skip
"""A code of each kind, in one or two of its widths."""

MOST_COMPILED = 3_250
"""Programs that the README's line may compile."""

CONFORMANCE = "tests/conformance/test_"

QUICK: dict[str, tuple[str, ...]] = {
    "tests/compressors/test_laws.py::test_flags_say_what_the_code_does": (
        *("dense", "dense-bf16", "ternary", "ternary-own-bucket", "topk-1", "topk-all", "int8", "int8-stochastic"),
    ),
    "tests/compressors/test_laws.py::test_rows_are_encoded_by_themselves": (
        *("dense-bf16", "levels", "topk-3-int8", "topk-packed", "int4"),
    ),
    "tests/compressors/test_laws.py::test_ternary_rows_are_encoded_by_themselves": (
        "ternary-int8",
        "ternary-own-bucket",
    ),
    "tests/compressors/test_ternary.py::test_levels_are_exact": ("1", "7", "64", "200"),
    "tests/compressors/test_topk.py::test_rounding_and_what_is_decoded_make_the_rows": ("3-bfloat16", "5-float32"),
    "tests/compressors/test_topk.py::test_the_largest_arrive_and_nothing_else": ("3-bfloat16", "5-float32"),
    "tests/kernels/test_casting.py::test_every_pattern_comes_back": ("patterns0-bfloat16", "patterns4-float32"),
    "tests/kernels/test_float8.py::test_a_row_is_scaled_by_its_largest": ("13",),
    "tests/kernels/test_hadamard.py::test_is_the_orthonormal_transform_and_its_own_inverse": ("1", "32", "1024"),
    "tests/kernels/test_hadamard.py::test_planes_turn_and_turn_back": ("1", "64", "1024"),
    "tests/kernels/test_selection.py::test_place_and_take_undo_each_other": ("1-int32", "9-uint8"),
    "tests/kernels/test_selection.py::test_several_of_each_row": ("5-5", "65-4", "256-17"),
    "tests/kernels/test_selection.py::test_the_largest_of_each_row": ("1", "65", "1024"),
    "tests/methods/test_sufficient_factors.py::test_no_batch_or_an_empty_one": (
        "()-factors",
        "(0,)-dense",
        "(0,)-factors",
    ),
    "tests/methods/test_sufficient_factors.py::test_training_is_synchronous_sgd": ("auto-vma", "factors-no-vma"),
    "tests/replicas/test_decay_and_dtypes.py::test_a_sum_of_gradients_decays_as_often_as_its_steps": ("1-0", "3-2"),
    "tests/replicas/test_replay.py::test_delayed_average": ("1-True", "2-False", "5-True"),
    "tests/replicas/test_replay.py::test_temporally_sparse": ("0-3", "2-3", "6-2"),
    "tests/training/test_declared_replicated.py::test_what_is_whole_is_saved": ("its own specs", "a model axis"),
    "tests/audit/test_programs.py::test_bytes_follow_the_formula": (
        *("all-reduce-float32", "all-reduce-bfloat16", "all-gather-int8", "reduce-scatter-int32", "all-to-all-bool"),
        *("collective-permute-uint16", "all-gather-float8_e4m3fn", "all-gather-int4", "all-reduce-complex64"),
    ),
    "tests/kernels/test_float8.py::test_no_rows_and_vmap": ("e4m3",),
    "tests/kernels/test_codebook.py::test_no_rows_and_vmap": ("1", "3"),
    "tests/kernels/test_quantize.py::test_packed_widths_round_to_the_nearest": ("4-1", "4-67", "2-5", "2-64"),
    "tests/kernels/test_rows.py::test_padding_is_known": ("0", "4", "13"),
    "tests/replicas/test_exactness.py::test_staleness": ("delayed-sparse", "streaming", "gossip"),
    "tests/kernels/test_ternary.py::test_padding_enters_no_statistic": ("5",),
    "tests/kernels/test_casting.py::test_words_split_and_join_bit_for_bit": ("shape1-uint32-1", "shape2-uint16-2"),
    "tests/kernels/test_codebook.py::test_the_nearest_level": ("1-9", "2-64", "3-7", "4-100", "3-10"),
    "tests/kernels/test_dct.py::test_a_few_frequencies_need_no_dense_rows": ("96", "1536"),
    "tests/kernels/test_dct.py::test_is_the_orthonormal_transform_and_comes_back": ("1", "3", "128", "1009", "4096"),
    "tests/kernels/test_packing.py::test_bits": ("7-1", "9-2", "1-4", "8-8", "0-1"),
    "tests/kernels/test_packing.py::test_large_bases": ("8-255", "16-257", "32-401", "32-4294967296"),
    "tests/kernels/test_rows.py::test_round_trip": (
        "shape0-float32",
        "shape1-float32",
        "shape6-bfloat16",
        "shape9-float16",
    ),
    "tests/kernels/test_ternary.py::test_bound": ("1-0.5-True", "8-None-True", "20-0.5-False", "7-None-False"),
    "tests/kernels/test_ternary.py::test_packing_in_the_same_pass_gives_the_same_values": ("hash-5", "hash-1283"),
    "tests/methods/test_sufficient_factors.py::test_auto_is_the_cheaper_on_both_sides_of_break_even": ("3", "4"),
    "tests/methods/test_sufficient_factors.py::test_gradient_is_the_mean_on_every_worker": (
        *("vmap-factors", "vmap-dense", "shard_map-explicit-vma-factors", "shard_map-auto-dense"),
    ),
    "tests/cli/test_report.py::test_every_comparison_can_be_drawn": ("diverged", "more methods than colours"),
    "tests/collectives/test_gathering.py::test_two_steps_gather_the_same_for_as_many_bytes": (
        "4-AxisType.Explicit-True",
        "2-AxisType.Auto-False",
    ),
    "tests/collectives/test_parts.py::test_the_numbers_are_the_same": ("two_phase-bfloat16-4", "all_reduce-float32-3"),
    CONFORMANCE + "composition.py::test_any_number_of_workers": ("dgc-1", "dgc-5"),
    CONFORMANCE + "composition.py::test_extra_arguments_and_scan": ("dgc",),
    CONFORMANCE + "composition.py::test_masked_and_partition": ("dgc", "powersgd"),
    CONFORMANCE + "composition.py::test_one_worker_needs_no_axis": FEW,
    CONFORMANCE + "composition.py::test_what_the_workers_of_a_vmap_share_is_taken_as_if_each_had_its_own": ("dgc",),
    CONFORMANCE + "large_numbers.py::test_what_a_sum_could_not_hold_is_skipped_on_every_worker": FEW,
    CONFORMANCE + "large_numbers.py::test_whatever_is_kept_stays_finite": KEEP,
    CONFORMANCE + "large_numbers.py::test_training_goes_on_after_the_largest_that_is_taken": (
        *KEEP,
        "terngrad",
        "dgc-whole-tree",
    ),
    CONFORMANCE + "large_numbers.py::test_a_memory_that_is_not_finite_costs_one_step": KEEP,
    CONFORMANCE + "wire.py::test_bytes_are_the_payloads": FEW,
    CONFORMANCE + "wire.py::test_no_dense_collective_of_a_compressed_leaf": FEW,
    CONFORMANCE + "wire.py::test_one_collective_for_all_leaves": FEW,
    "tests/compressors/test_every_code.py::test_a_bad_entry_is_seen_wherever_it_is": CODES,
    "tests/compressors/test_every_code.py::test_a_constant_comes_back": CODES,
    "tests/compressors/test_every_code.py::test_no_rows_are_no_bytes": (
        "ternary-own",
        "topk-3-int8",
        "int4",
        "rotated-4",
    ),
    "tests/compressors/test_every_code.py::test_no_statistic_sees_the_padding": CODES,
    "tests/compressors/test_every_code.py::test_padding_decodes_to_zero_or_the_code_says_that_it_does_not": (
        *("sign-means", "rotated-4", "e4m3", "frequencies", "union", "l2-4"),
    ),
    "tests/compressors/test_every_code.py::test_payload_leads_with_rows_and_weighs_what_it_says": CODES,
    "tests/compressors/test_every_code.py::test_reduce_is_the_sum_of_what_is_decoded": (
        *("sign-l1", "rotated-4", "low-rank", "frequencies", "union", "l2-8"),
        *("dense-bf16", "ternary-own", "levels", "topk-3-int8", "int4"),
    ),
    "tests/compressors/test_every_code.py::test_what_is_sent_and_what_is_kept_make_the_target": (
        *("sign-means", "rotated-2", "e4m3", "low-rank", "frequencies", "union", "l2-4"),
    ),
    "tests/compressors/test_every_code.py::test_zeros_stay_zeros": CODES,
    "tests/compressors/test_structure.py::test_most_of_the_energy_is_sent": (
        "topk_sgd-hot columns-0.001-0.75",
        "topk_sgd-stride of 64-0.001-0.75",
        "topk_sgd-zipf-0.001-0.75",
        "gradient_dropping-a hot head-0.001-0.75",
        "gradient_dropping-odd sides-0.001-0.75",
    ),
    "tests/compressors/test_unbiased_codes.py::test_qsgd": ("4-l2-hash", "8-max-threefry", "2-max-hash"),
    "tests/compressors/test_unbiased_codes.py::test_rotated_where_few_entries_are_all": ("few0-1",),
    "tests/compressors/test_unbiased_codes.py::test_rotated_with_the_least_error_has_less": ("2",),
    "tests/docs/test_adding_a_method.py::test_it_conforms": ("vmap",),
    "tests/docs/test_bring_your_own_loop.py::test_all_loops_train_alike": ("plain-jit-dgc",),
    "tests/docs/test_bring_your_own_loop.py::test_the_train_steps_options": ("options",),
    "tests/docs/test_examples.py::test_the_example_runs": (
        *("topk_sgd", "dgc", "exchange", "init_state", "make_train_step", "wire_bytes", "fragments", "predict"),
    ),
    "tests/kernels/test_dealing.py::test_the_largest_and_their_places": (
        "3000-256-12-10-1",
        "65536-1024-65-256-3",
        "70-16-6-7-10",
        "65536-1024-66-64-32",
    ),
    "tests/kernels/test_low_rank.py::test_independent_columns": ("64-4", "5-5"),
    "tests/kernels/test_packing.py::test_every_small_base": ("8",),
    "tests/methods/test_clipping.py::test_before_it_is_each_worker_s_own_and_after_it_the_update_s": (
        "dense_bf16",
        "dgc",
    ),
    "tests/methods/test_dgc.py::test_replay_of_twenty_steps": (
        "plain",
        "collective=all_gather-dtype=float32-nesterov=True",
        "weight_decay=0.05-clip_norm=3.0-dtype=float32",
        "density=0.046875-weight_decay=0.01",
    ),
    "tests/methods/test_options.py::test_every_option_is_heard": ("dense_bf16",),
    "tests/methods/test_registry.py::test_every_collective_that_is_listed_can_be_taken": ("dgc", "powersgd"),
    "tests/methods/test_registry.py::test_the_table_is_what_the_compiled_program_sends": FEW,
    "tests/methods/test_registry.py::test_uplink_and_downlink_make_up_what_is_sent": SOME,
    "tests/methods/test_registry.py::test_what_is_called_unbiased_is": ("terngrad",),
    "tests/methods/test_replay_demo.py::test_unsigned": ("a chunk", "the longest line"),
    "tests/methods/test_replay_one_bit_adam.py::test_replay": ("defaults",),
    "tests/methods/test_replay_quantizers.py::test_block_quantized": ("two_phase-8", "server-2"),
    "tests/methods/test_replay_quantizers.py::test_fp8_scaled_with_residual": ("e4m3-two_phase",),
    "tests/methods/test_replay_quantizers.py::test_fp8_without_residual": ("e4m3-True", "e5m2-False"),
    "tests/methods/test_replay_selections.py::test_random_k": ("two_phase-bfloat16-True", "bfloat16-two_phase-True"),
    "tests/methods/test_replay_selections.py::test_sparcml_split": ("bfloat16-16-4-True", "float32-32-6-False"),
    "tests/methods/test_replay_selections.py::test_topk_sgd": ("two_phase-bfloat16", "all_gather-int8"),
    "tests/methods/test_terngrad.py::test_the_mean_over_keys_is_the_mean_gradient": ("{'clip': None}", "{'clip': 2.5}"),
    "tests/network/test_lab.py::test_cut_and_restore": ("1-0.005",),
    "tests/network/test_lab.py::test_rate": ("20000000.0-0.005",),
    "tests/planning/test_traffic.py::test_a_description_is_what_the_program_sends": (
        "dgc-8",
        "terngrad-8",
        "powersgd-2",
        "dense_bf16-8",
    ),
    "tests/planning/test_traffic.py::test_a_nodes_devices_send_their_shards": ("dgc", "powersgd"),
    "tests/planning/test_traffic.py::test_any_number_of_workers": ("dgc-24",),
    "tests/planning/test_traffic.py::test_options_and_transformations_around": ("buckets",),
    "tests/planning/test_traffic.py::test_very_many_equal_tensors_are_extended": ("dgc", "terngrad"),
    "tests/replicas/test_environments.py::test_environments_agree": ("shard_map-explicit-diloco",),
    "tests/replicas/test_exactness.py::test_a_bad_gradient_stays_with_its_worker": ("dense-diloco",),
    "tests/replicas/test_exactness.py::test_gossip_keeps_the_sum_of_the_replicas": ("exponential-code0",),
    "tests/replicas/test_overlap.py::test_a_thread_computes_what_one_program_does": ("2-3-True-dense",),
    "tests/replicas/test_overlap.py::test_the_exchange_needs_nothing_of_this_steps_batch": (
        "0-dense",
        "1-dgc",
        "3-dgc",
    ),
    "tests/kernels/test_elias_fano.py::test_numbers_come_back": ("41-4096", "700-4096"),
    "tests/kernels/test_fixed_point.py::test_a_value_on_the_grid_is_never_moved": ("5-hash", "126-threefry"),
    "tests/kernels/test_sampling.py::test_all_that_is_not_zero": ("1-1", "1000-30"),
    "tests/kernels/test_sampling.py::test_every_entry_is_as_likely_as_any_other": ("12-4", "7-7", "1-1"),
    "tests/kernels/test_two_levels.py::test_each_value_becomes_its_halfs_mean": ("3", "64"),
    "tests/training/test_momenta.py::test_two_momenta_warn_within_wrappers": ("accumulate", "masked", "switched"),
    "tests/training/test_momenta.py::test_a_first_moment_after_a_residual_that_is_one_warns": (
        "multi_transform",
        "switched",
    ),
    "tests/replicas/test_replay.py::test_streaming_parts_that_arrive_late_are_mixed": ("3-0.25",),
    "tests/replicas/test_recovery.py::test_one_bad_step_of_one_worker": (
        "nan-diloco-adam",
        "nan-gossip-momentum",
        "3.0-gossip-momentum",
    ),
    "tests/test_large_sizes.py::test_a_tree_of_more_than_an_int32_counts_is_exchanged": FEW,
    "tests/test_peer_faults.py::test_a_constant_gradient_gets_through": FEW,
    "tests/test_peer_faults.py::test_claimed_bits_are_payload_bits": FEW,
    "tests/test_peer_faults.py::test_padding_is_in_no_statistic": FEW,
    "tests/test_peer_faults.py::test_the_end_of_a_tensor_is_sent_too": FEW,
    "tests/training/test_checkpoint.py::test_another_number_of_workers": ("dgc-2-8", "int8-2-8", "dgc-8-3"),
    "tests/training/test_checkpoint.py::test_restored_training_is_uninterrupted_training": ("dgc",),
    "tests/training/test_loops.py::test_flax_train_state": ("batch_stats",),
    "tests/training/test_refusals.py::test_a_loss_that_is_averaged_inside": ("1-False",),
    "tests/training/test_refusals.py::test_before_an_exchange_of_sharded_parameters": ("accumulate",),
    "tests/training/test_refusals.py::test_positional_arrays_that_are_no_batch": ("outside-weights of classes",),
    "tests/training/test_resize.py::test_prng_keys_are_those_of_the_workers_in_turn": ("4-3-typed",),
    "tests/training/test_simulated.py::test_a_method_trains_alike_and_its_bytes_are_the_same": FEW,
    "tests/training/test_step.py::test_one_program_whatever_the_mesh": ("dgc-True-True", "terngrad-False-False"),
    "tests/training/test_trees.py::test_any_tree_trains_alike": ("none", "nnx", "dataclass"),
    "tests/training/test_unreduced.py::test_micro_batches_are_exchanged_once": ("typed",),
    "tests/transforms/test_bucketed.py::test_the_result_is_that_of_one_bucket": ("powersgd",),
    "tests/transforms/test_counters.py::test_a_run_that_passes_the_end_goes_on_as_one_that_does_not": (
        "delayed_average",
    ),
    "tests/transforms/test_hierarchical.py::test_a_bad_entry_skips_the_exchange_on_every_device": (
        "AxisType.Auto-False-dgc",
    ),
    "tests/transforms/test_hierarchical.py::test_another_number_of_workers": ("topk",),
    "tests/transforms/test_hierarchical.py::test_each_shard_is_an_exchange_of_the_workers_means": ("dgc",),
    "tests/transforms/test_rate_weighted.py::test_after_a_jump_of_the_rate_it_is_closer_to_dense": ("topk",),
    "tests/transforms/test_rate_weighted.py::test_at_a_constant_rate_it_is_the_method": ("ef_sign",),
    "tests/transforms/test_rate_weighted.py::test_rates_times_updates_and_what_is_kept_are_rates_times_gradients": (
        "dgc",
    ),
    "tests/transforms/test_reduce_scatter.py::test_a_bad_entry_skips_the_step_everywhere": ("dgc",),
    "tests/transforms/test_reduce_scatter.py::test_another_number_of_workers": ("4-2",),
    "tests/transforms/test_reduce_scatter.py::test_fully_sharded_training": ("dgc",),
    "tests/transforms/test_reduce_scatter.py::test_it_is_a_gather_of_which_each_worker_keeps_its_shard": (
        "int8",
        "stretches with momentum",
    ),
    "tests/transforms/test_reduce_scatter.py::test_updates_and_residuals_add_up_to_the_gradients": ("topk", "int8"),
    "tests/transforms/test_sharded_parameters.py::test_a_bad_entry_skips_all_shards": ("dgc",),
}
"""Of a test with parameters: the values, or the whole id, of those that are quick."""
