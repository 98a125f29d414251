"""What the README's line runs of the tests that many methods share; the continuous build runs all of them.

Compilation is what tests cost, and a program a method adds up to half an hour. A question that is asked of every method is
asked here of a few that differ in what it is about; the other answers are marked ``slow``.
"""

FEW = ("dense_bf16", "dense-bf16", "terngrad", "dgc", "powersgd")
"""A cast, by both its names; a shared statistic; a selection with owners and momentum; a sum."""

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
)  # fmt: skip
"""A code of each kind, in one or two of its widths."""

MOST_COMPILED = 5_400
"""Programs that the README's line may compile."""

CONFORMANCE = "tests/conformance/test_"

QUICK: dict[str, tuple[str, ...]] = {
    CONFORMANCE + "composition.py::test_any_number_of_workers": ("dgc-1", "dgc-5"),
    CONFORMANCE + "composition.py::test_extra_arguments_and_scan": ("dgc", "terngrad"),
    CONFORMANCE + "composition.py::test_masked_and_partition": ("dgc", "powersgd"),
    CONFORMANCE + "composition.py::test_one_worker_needs_no_axis": FEW,
    CONFORMANCE + "disagreement.py::test_what_the_workers_share_arrives": ("dgc-noisy",),
    CONFORMANCE + "large_numbers.py::test_what_a_sum_could_not_hold_is_skipped_on_every_worker": FEW,
    CONFORMANCE + "large_numbers.py::test_whatever_is_kept_stays_finite": FEW,
    CONFORMANCE + "wire.py::test_bytes_are_the_payloads": FEW,
    CONFORMANCE + "wire.py::test_no_dense_collective_of_a_compressed_leaf": FEW,
    CONFORMANCE + "wire.py::test_one_collective_for_all_leaves": FEW,
    "tests/cli/test_app.py::test_a_method_has_one_name_however_it_is_spelled": ("topk-sgd",),
    "tests/compressors/test_every_code.py::test_a_bad_entry_is_seen_wherever_it_is": CODES,
    "tests/compressors/test_every_code.py::test_a_constant_comes_back": CODES,
    "tests/compressors/test_every_code.py::test_no_statistic_sees_the_padding": CODES,
    "tests/compressors/test_every_code.py::test_padding_decodes_to_zero_or_the_code_says_that_it_does_not": CODES,
    "tests/compressors/test_every_code.py::test_payload_leads_with_rows_and_weighs_what_it_says": CODES,
    "tests/compressors/test_every_code.py::test_reduce_is_the_sum_of_what_is_decoded": (
        "sign-l1",
        "rotated-4",
        "low-rank",
        "frequencies",
        "union",
        "l2-8",
    ),
    "tests/compressors/test_every_code.py::test_what_is_sent_and_what_is_kept_make_the_target": CODES,
    "tests/compressors/test_every_code.py::test_zeros_stay_zeros": CODES,
    "tests/compressors/test_structure.py::test_most_of_the_energy_is_sent": ("0.001",),
    "tests/compressors/test_unbiased_codes.py::test_qsgd": ("4-l2-hash", "8-max-threefry", "2-max-hash"),
    "tests/compressors/test_unbiased_codes.py::test_rotated_over_the_seeds": ("2-0.133",),
    "tests/compressors/test_unbiased_codes.py::test_rotated_small_entries_beside_large_ones": ("256-1-few0",),
    "tests/compressors/test_unbiased_codes.py::test_rotated_where_few_entries_are_all": ("few0-1", "few1-4"),
    "tests/compressors/test_unbiased_codes.py::test_rotated_with_the_least_error_has_less": ("2",),
    "tests/compressors/test_unbiased_codes.py::test_the_error_of_qsgd_does_not_grow_with_the_tensor": ("2-l2", "4-l2"),
    "tests/docs/test_adding_a_method.py::test_it_conforms": ("vmap",),
    "tests/experiments/test_run.py::test_training_learns": ("dgc",),
    "tests/kernels/test_dealing.py::test_the_largest_and_their_places": (
        "3000-256-12-10-1",
        "65536-1024-65-256-3",
        "70-16-6-7-10",
        "65536-1024-66-64-32",
    ),
    "tests/kernels/test_low_rank.py::test_independent_columns": ("64-4", "5-5"),
    "tests/kernels/test_packing.py::test_every_small_base": ("8",),
    "tests/kernels/test_ternary.py::test_packing_in_the_same_pass_gives_the_same_values": ("hash",),
    "tests/methods/test_dgc.py::test_replay_of_twenty_steps": (
        "plain",
        "collective=all_gather-dtype=float32-nesterov=True",
        "weight_decay=0.05-clip_norm=3.0-dtype=float32",
        "density=0.046875-weight_decay=0.01",
    ),
    "tests/methods/test_matrix_view.py::test_attention_kernels_are_split_between_inputs_and_outputs": ("shape0",),
    "tests/methods/test_registry.py::test_every_collective_that_is_listed_can_be_taken": FEW,
    "tests/methods/test_registry.py::test_the_table_is_what_the_compiled_program_sends": FEW,
    "tests/methods/test_registry.py::test_uplink_and_downlink_make_up_what_is_sent": SOME,
    "tests/methods/test_registry.py::test_what_is_called_unbiased_is": ("terngrad",),
    "tests/methods/test_replay_demo.py::test_unsigned": ("a chunk", "the longest line"),
    "tests/methods/test_replay_one_bit_adam.py::test_replay": ("defaults",),
    "tests/methods/test_replay_quantizers.py::test_block_quantized": ("two_phase-8", "server-2"),
    "tests/methods/test_replay_quantizers.py::test_eden_of_few_bits_loses_nothing_in_two_phases": ("1",),
    "tests/methods/test_replay_quantizers.py::test_eden_unbiased": ("2-two_phase",),
    "tests/methods/test_replay_quantizers.py::test_fp8_scaled_with_residual": ("e4m3-two_phase",),
    "tests/methods/test_replay_quantizers.py::test_fp8_without_residual": ("e4m3-True", "e5m2-False"),
    "tests/methods/test_replay_quantizers.py::test_one_bit_sgd": ("column-two_phase",),
    "tests/methods/test_replay_quantizers.py::test_qsgd": ("4-l2-two_phase",),
    "tests/methods/test_replay_quantizers.py::test_sign_sgd": ("two_phase",),
    "tests/methods/test_replay_quantizers.py::test_stochastic_rounding": ("16-12-two_phase",),
    "tests/methods/test_replay_selections.py::test_random_k": ("two_phase-bfloat16-True", "bfloat16-two_phase-True"),
    "tests/methods/test_replay_selections.py::test_sparcml_doubling": ("second-round",),
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
    "tests/planning/test_traffic.py::test_any_number_of_workers": ("dgc-24", "terngrad-1024"),
    "tests/planning/test_traffic.py::test_options_and_transformations_around": ("buckets", "warm-up"),
    "tests/planning/test_traffic.py::test_very_many_equal_tensors_are_extended": ("dgc", "terngrad"),
    "tests/replicas/test_disagreement.py::test_alone": ("sparse_loco",),
    "tests/replicas/test_disagreement.py::test_as_with_a_gather": ("delayed-topk-noisy",),
    "tests/replicas/test_environments.py::test_environments_agree": (
        "vmap-diloco",
        "vmap-delayed-int8",
        "shard_map-explicit-diloco",
    ),
    "tests/replicas/test_exactness.py::test_a_bad_gradient_stays_with_its_worker": (
        "compressed-diloco",
        "dense-diloco",
    ),
    "tests/replicas/test_exactness.py::test_checkpoint_resume_and_resize": ("delayed",),
    "tests/replicas/test_exactness.py::test_gossip_keeps_the_sum_of_the_replicas": (
        "hypercube-code1",
        "exponential-code0",
    ),
    "tests/replicas/test_overlap.py::test_a_thread_computes_what_one_program_does": ("2-3-True-dense", "4-2-True-dgc"),
    "tests/replicas/test_overlap.py::test_the_exchange_needs_nothing_of_this_steps_batch": (
        "0-dense",
        "1-dgc",
        "3-dgc",
    ),
    "tests/test_large_sizes.py::test_a_tree_of_more_than_an_int32_counts_is_exchanged": FEW,
    "tests/test_peer_faults.py::test_a_checkpoint_holds_all_there_is": ("dgc", "powersgd"),
    "tests/test_peer_faults.py::test_a_constant_gradient_gets_through": SOME,
    "tests/test_peer_faults.py::test_claimed_bits_are_payload_bits": FEW,
    "tests/test_peer_faults.py::test_nothing_comes_of_nothing": FEW,
    "tests/training/test_checkpoint.py::test_another_number_of_workers": ("dgc-2-8", "int8-2-8", "dgc-8-3"),
    "tests/training/test_checkpoint.py::test_restored_training_is_uninterrupted_training": ("dgc",),
    "tests/training/test_resize.py::test_where_no_owners_are_left_the_workers_take_over": ("dgc-2",),
    "tests/training/test_step.py::test_one_program_whatever_the_mesh": ("dgc-True-True", "terngrad-False-False"),
    "tests/transforms/test_bucketed.py::test_a_bad_entry_in_any_bucket_skips_all": ("dgc",),
    "tests/transforms/test_bucketed.py::test_the_result_is_that_of_one_bucket": ("terngrad", "powersgd"),
    "tests/transforms/test_hierarchical.py::test_a_bad_entry_skips_the_exchange_on_every_device": (
        "AxisType.Auto-False-dgc",
    ),
    "tests/transforms/test_hierarchical.py::test_a_sharded_parameter_gets_its_shard_of_the_update": ("dgc",),
    "tests/transforms/test_hierarchical.py::test_another_number_of_workers": ("topk",),
    "tests/transforms/test_hierarchical.py::test_each_shard_is_an_exchange_of_the_workers_means": ("dgc",),
    "tests/transforms/test_moving_density.py::test_the_controller_raises_the_density_where_workers_disagree": ("vmap",),
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
    "tests/transforms/test_running_sum.py::test_the_sum_is_the_mean_of_the_estimates_after_many_steps": (
        "two_phase-bfloat16",
    ),
    "tests/transforms/test_sharded_parameters.py::test_a_bad_entry_skips_all_shards": ("dgc",),
    "tests/transforms/test_sharded_parameters.py::test_a_manual_axis_gives_the_same": ("dgc",),
    "tests/transforms/test_sharded_parameters.py::test_each_shard_is_an_exchange_of_its_own": ("dgc",),
    "tests/transforms/test_sharded_parameters.py::test_it_trains_with_the_model_axis_left_to_the_compiler": ("int8",),
}
"""Of a test with parameters: the values, or the whole id, of those that are quick."""

SLOW = (
    "tests/cli/test_app.py::test_compare_writes_table_picture_and_figures",
    "tests/cli/test_app.py::test_train_goes_on_from_its_checkpoint",
    "tests/cli/test_main.py::test_workers_are_simulated_without_any_environment",
    "tests/colabs/test_notebooks.py::test_runs_from_first_cell_to_last",
    "tests/conformance/test_disagreement.py::test_memories_stay_bounded",
    "tests/conformance/test_disagreement.py::test_the_figures_can_tell",
    "tests/docs/test_adding_a_method.py::test_it_has_none_of_the_known_faults",
    "tests/docs/test_adding_a_method.py::test_it_sends_what_it_says_and_composes",
    "tests/experiments/test_compare.py::test_bfloat16_halves_the_bytes",
    "tests/experiments/test_compare.py::test_both_baselines_are_counted_though_one_was_not_trained",
    "tests/experiments/test_compare.py::test_every_method_has_a_run_for_every_seed",
    "tests/experiments/test_compare.py::test_json_holds_all_of_it",
    "tests/experiments/test_replicas.py::test_training_learns",
    "tests/experiments/test_run.py::test_a_damaged_state_is_refused_and_the_one_before_it_goes_on",
    "tests/experiments/test_run.py::test_a_run_goes_on_with_another_number_of_workers",
    "tests/experiments/test_run.py::test_same_seed_same_bits_and_another_seed_others",
    "tests/methods/test_replay_quantizers.py::test_eden_with_residual",
    "tests/methods/test_replay_quantizers.py::test_qsgd_of_four_workers_takes_two_phases_and_threefry_draws",
    "tests/methods/test_resnet50.py::test_bytes_of_the_compiled_program",
    "tests/methods/test_terngrad.py::test_tensors_and_steps_round_independently",
    "tests/network/test_distributed.py::test_processes_find_each_other_without_options",
    "tests/network/test_distributed.py::test_two_processes_are_one_process_with_two_devices",
    "tests/network/test_faults.py::test_a_killed_worker_ends_all_and_a_restart_loses_nothing",
    "tests/network/test_faults.py::test_a_process_that_never_comes_is_not_waited_for_for_ever",
    "tests/planning/test_calibrate.py::test_a_file_holds_all_of_it",
    "tests/planning/test_calibrate.py::test_a_prediction_uses_it",
    "tests/planning/test_calibrate.py::test_between_nodes_a_device_sends_its_shard",
    "tests/planning/test_calibrate.py::test_every_kind_is_measured",
    "tests/replicas/test_disagreement.py::test_gathered",
    "tests/test_errors_benchmark.py::test_as_published",
    "tests/test_errors_benchmark.py::test_gradients_of_training",
    "tests/test_errors_benchmark.py::test_more_bits_are_less_error",
    "tests/test_errors_benchmark.py::test_nothing_beats_the_bound",
    "tests/test_errors_benchmark.py::test_page_and_picture",
    "tests/test_errors_benchmark.py::test_what_the_page_says_holds",
    "tests/training/test_step.py::test_workers_on_one_device_train_as_workers_on_eight",
    "tests/transforms/test_bucketed.py::test_in_two_phases_the_workers_keep_as_much_between_them",
    "tests/transforms/test_rate_weighted.py::test_in_a_chain_with_the_optimizer_of_that_rate",
    "tests/transforms/test_running_sum.py::test_a_rule_by_dtype_holds_at_the_start_and_in_every_step",
)
"""Whole tests, of processes, notebooks and large models."""
