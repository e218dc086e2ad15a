"""Upstream defects that our engines work around: a test here fails when one is gone, and its workaround can go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import adapter_traps
import mesh_traps
import pytest
import torch
import upstream

from toolkit.launch.group import WorkerGroup

pytestmark = pytest.mark.upstream


def test_fsdp2_checkpointing_redraws_dropout(group: WorkerGroup) -> None:
    """Worked around in toolkit/model/checkpointing.py, which is not accelerate's."""
    loss, gradient = group.run(upstream.fsdp2_checkpointing_redraws_dropout)[0]
    assert loss == 0.0
    assert gradient > 0.1


def test_zero2_links_the_moments_of_one_group(group: WorkerGroup) -> None:
    """Worked around in ZeroTensors._link_state."""
    assert "not found in optimizer state fragment" in group.run(upstream.zero2_links_one_group)[0]


def test_fsdp1_adds_up_micro_batches_in_16_bits(group: WorkerGroup) -> None:
    """Fsdp1's check refuses `strategy.sync: last` in mixed precision for it. FSDP2 adds up in ``reduce_dtype``."""
    assert group.run(upstream.fsdp_without_sync_rounds_sums, 1)[0] > 1e-3
    assert group.run(upstream.fsdp_without_sync_rounds_sums, 2)[0] < 1e-6


def test_fsdp1_keeps_gradients_that_are_cleared(group: WorkerGroup) -> None:
    """Worked around in Fsdp1Engine.clear_gradients."""
    assert group.run(upstream.fsdp1_keeps_gradients_that_are_cleared)[0] == (True, False)


def test_fsdp2_gathers_what_no_gradient_reaches(group: WorkerGroup) -> None:
    """Worked around in engines/fsdp2.py: _prefetch_what_has_a_backward."""
    assert group.run(upstream.fsdp2_gathers_what_no_gradient_reaches, False)[0] == ["0"]
    assert group.run(upstream.fsdp2_gathers_what_no_gradient_reaches, True)[0] == ["2"]


def test_peft_wraps_the_head_of_a_token_classifier() -> None:
    """Worked around in model/adapters.py: _leave_heads."""
    assert "modules_to_save cannot be applied" in adapter_traps.all_linear_takes_the_head_of_a_token_classifier()


def test_peft_merges_no_head_of_several_layers() -> None:
    """Worked around in training/merge.py: merge_and_unload."""
    assert "has no attribute 'weight'" in adapter_traps.merging_takes_the_weight_of_a_head_of_layers()


def test_peft_keeps_projections_in_float32() -> None:
    """Worked around in model/adapters.py: _round_projections."""
    assert "same dtype" in adapter_traps.vera_multiplies_16_bits_by_32()


@pytest.mark.parametrize(
    ("kind", "lost"), [("laguna", ".mlp.shared_experts."), ("inkling2_text", "_sconv.weight_proj.")]
)
def test_peft_renames_what_is_already_renamed(kind: str, lost: str, tmp_path: Path) -> None:
    """`verify` says that the export differs, and `toolkit export` refuses it."""
    found = adapter_traps.loading_renames_an_adapter(kind, str(tmp_path))
    assert found
    assert all(lost in name for name in found)


def test_transformers_empties_the_padding_row_of_youtu(tmp_path: Path) -> None:
    """As above. Of other models it does not."""
    assert adapter_traps.loading_empties_the_padding_row("youtu", str(tmp_path / "youtu"))
    assert not adapter_traps.loading_empties_the_padding_row("llama", str(tmp_path / "llama"))


def test_peft_makes_a_key_for_every_head_of_falcon() -> None:
    """Worked around in model/adapters.py: _cache_of_one_head."""
    assert "Sizes of tensors must match" in adapter_traps.prefix_of_falcon()
    assert adapter_traps.prefix_of_falcon(token_dim=8, num_attention_heads=1) == "done"


def test_deepspeed_links_parameters_in_another_order(group: WorkerGroup) -> None:
    """Worked around in verification/scripts/zero_links.py."""
    assert group.run(upstream.zero2_links_in_another_order)[0] == [True, False, False, True]


def test_deepspeed_adds_gradients_in_the_order_in_which_they_arrive(group: WorkerGroup) -> None:
    """Refused in strategies/zero.py: check_reach, where ranks may reach different weights."""
    assert group.run(upstream.zero2_adds_what_arrives)[0] > 0.01


def test_deepspeed_keeps_buffers_in_float32(group: WorkerGroup) -> None:
    """No defect of 0.19.8: only weights are cast. Were it otherwise, rotary positions would be turned too far."""
    assert group.run(upstream.deepspeed_casts_buffers)[0] == ("torch.float32", 0.0)


def test_deepspeed_masters_are_made_of_rounded_weights(group: WorkerGroup) -> None:
    """Worked around in strategies/engines/zero.py: _lossy_copies."""
    assert group.run(upstream.deepspeed_masters_are_rounded)[0] > 1e-3


def test_accelerate_reduces_fsdp2_gradients_and_the_loss_in_bf16(group: WorkerGroup) -> None:
    """Worked around in Fsdp2Engine.plugin."""
    reduced, loss, error = group.run(upstream.fsdp2_bf16_casts_the_loss)[0]
    assert reduced == loss == "torch.bfloat16"
    assert error > 1e-3


def test_accelerate_tells_transformers_of_zero3(group: WorkerGroup) -> None:
    """Worked around in connect._forget_zero_init."""
    assert group.run(upstream.zero3_is_reported_with_the_flag_off)[0] is True


def test_fused_adamw_and_the_sharded_scaler(group: WorkerGroup) -> None:
    """Worked around in Fsdp1Engine._make_optimizer."""
    assert "broadcast shape" in group.run(upstream.fused_adamw_under_sharded_scaler)[0]


def test_deepspeed_compiles_an_op_for_inference_on_a_cpu(group: WorkerGroup) -> None:
    """Worked around in connect._without_shm_op."""
    assert group.run(upstream.shm_op_is_wanted)[0] == (True, 1)


def test_deepspeed_moves_a_model_whole_before_it_splits_it(group: WorkerGroup) -> None:
    """Worked around in strategies/engines/zero.py: _split."""
    largest, whole = group.run(upstream.zero3_moves_a_model_whole)[0]
    assert largest == whole


def test_deepspeed_never_frees_an_engine_by_itself(group: WorkerGroup) -> None:
    """Worked around in ZeroEngine.engage: it is destroyed with its session."""
    assert group.run(upstream.zero2_engine_is_never_freed, False)[0] is True
    assert group.run(upstream.zero2_engine_is_never_freed, True)[0] is False


def test_a_new_group_does_not_wait_as_long_as_the_first(group: WorkerGroup) -> None:
    """Worked around in engines/process_group.py: allow_hours."""
    assert group.run(upstream.limits_of_groups)[0] == (5.0, 0.5)


def test_marks_for_the_profiler_count_as_recomputed() -> None:
    """Worked around in toolkit/model/checkpointing.py: keep_products."""
    code = "import upstream; print(upstream.marks_count_as_recomputed())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=True
    )
    assert "not found in storage" in done.stdout


def test_reentrant_checkpoints_of_a_frozen_base_pass_no_gradient() -> None:
    """Lint rule LR801: none, but for transformers' own workaround, which it now puts in by itself."""
    found = {
        (reentrant, hooked): adapter_traps.adapters_with_a_gradient(reentrant, hooked)
        for reentrant in (True, False)
        for hooked in (True, False)
    }
    assert found == {(True, True): 8, (True, False): 0, (False, True): 8, (False, False): 8}


def test_checkpoints_of_adapters_under_zero_3(group: WorkerGroup) -> None:
    """Lint rule LR802 is a warning: a plain loop gets through with either kind."""
    assert group.run(adapter_traps.zero3_backward, False)[0] == "done"
    assert group.run(adapter_traps.zero3_backward, True)[0] == "done"


def test_fsdp1_takes_no_fp32_adapters_on_a_16_bit_base(group: WorkerGroup) -> None:
    """Lint rule FS409."""
    assert "uniform dtype" in group.run(adapter_traps.fsdp_takes_16_bit_base, 1)[0]
    assert group.run(adapter_traps.fsdp_takes_16_bit_base, 2)[0] == "done"


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the kernel for AVX-512 is at fault")
def test_bitsandbytes_misreads_rows_shorter_than_a_block() -> None:
    """Worked around in toolkit/options/nf4/pack.py: packed_nf4."""
    pytest.importorskip("bitsandbytes")
    as_it_stands, as_one_row = upstream.bitsandbytes_misreads_rows()
    assert as_it_stands > 0.3
    assert as_one_row < 0.1


def test_bitsandbytes_unpacks_to_another_shape_than_it_tells_compilers() -> None:
    """Worked around in toolkit/options/nf4/pack.py."""
    assert upstream.shapes_of_unpacked((128,)) == ((1, 128), (128,))
    assert upstream.shapes_of_unpacked((1, 128)) == ((1, 128), (1, 128))


def test_selective_checkpointing_misses_a_change_behind_a_view() -> None:
    """Worked around in toolkit/model/checkpointing.py: _KeptApart."""
    assert upstream.selective_checkpointing_misses_a_change() > 0.01


def test_zero3_adds_a_bias_in_place_of_the_kept_product(group: WorkerGroup) -> None:
    """Worked around in toolkit/model/checkpointing.py: _KeptApart. Lint note DS220 names the setting that helps."""
    assert group.run(upstream.zero3_adds_a_bias_twice)[0] > 0.01
    assert group.run(upstream.zero3_adds_a_bias_twice, False)[0] < 1e-6


def test_zero2_divides_by_three_ranks_in_16_bits() -> None:
    """Worked around in toolkit/strategies/zero.py: reduce_scatter is off for ranks that are no power of two."""
    with WorkerGroup(3) as three:
        assert three.run(upstream.zero2_divides_in_16_bits, True, timeout=120)[0] > 1e-3
        assert three.run(upstream.zero2_divides_in_16_bits, False, timeout=120)[0] < 1e-6


def test_fsdp_rounds_rotary_tables_and_frequencies(group: WorkerGroup) -> None:
    """Worked around in the plugins of Fsdp1Engine and Fsdp2Engine; lint rules FS417 and FS418."""
    assert group.run(upstream.fsdp_rounds_what_rotary_needs, 2)[0] == ("torch.bfloat16", "torch.float32", 0.0)
    given, frequencies, turned = group.run(upstream.fsdp_rounds_what_rotary_needs, 1)[0]
    assert (given, frequencies) == ("torch.float32", "torch.bfloat16")
    assert turned > 0.1  # frequencies are off by up to 2**-9 of themselves: more with longer contexts


def test_hpz_groups_outlive_their_engine(group: WorkerGroup) -> None:
    """Worked around in strategies/engines/zero.py: _forget_second_copies."""
    message, size = group.run(upstream.hpz_groups_outlive_their_engine)[0]
    assert "already initialized" in message
    assert size == 2


def test_accelerate_makes_fsdp1_without_a_mesh() -> None:
    """Worked around in strategies/engines/fsdp1.py: _on_mesh. Hybrid groups are then a node's GPUs."""
    import inspect

    from accelerate import Accelerator

    source = inspect.getsource(Accelerator.prepare_model)
    made = source[source.index('"sharding_strategy": fsdp_plugin') : source.index("FSDP(model, **kwargs)")]
    assert '"auto_wrap_policy"' in made
    assert '"device_mesh"' not in made
    assert '"process_group"' not in made


def test_zero3_rounds_a_product_before_it_adds_the_bias() -> None:
    """Worked around in strategies/engines/zero.py: _round_once, for good, hence a process of its own here."""
    code = "import upstream; print(upstream.zero3_linear_rounds_twice())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout.split()[-1]) > 0.01


def test_transformers_ignores_the_mesh_of_a_plan(group: WorkerGroup) -> None:
    """Worked around in model/tensor.py, which divides layers itself."""
    assert group.run(mesh_traps.transformers_ignores_the_mesh)[0] == (16, 1)


def test_peft_keeps_the_widths_of_whole_layers(group: WorkerGroup) -> None:
    """Worked around in model/tensor.py: adapters are made beside whole layers and divided with them."""
    assert group.run(mesh_traps.peft_keeps_whole_widths, "q_proj")[0] == ""
    assert "is invalid for input of size" in group.run(mesh_traps.peft_keeps_whole_widths, "o_proj")[0]


def test_torch_unties_weights_that_it_divides(group: WorkerGroup) -> None:
    """Worked around in model/tensor.py: embedding and head stay whole."""
    tied, share = group.run(mesh_traps.torch_unties_weights)[0]
    assert not tied
    assert share < 0.9


def test_accelerate_asks_transformers_for_what_is_gone(group: WorkerGroup) -> None:
    """Worked around in strategies/layouts/tensor.py: accelerate is given plain tensors, and divides nothing."""
    assert "ReplicateParallel" in group.run(mesh_traps.accelerate_asks_for_what_is_gone)[0]


def test_zero3_loads_one_step_and_the_settings_of_one_group(group: WorkerGroup, tmp_path: Path) -> None:
    """toolkit/checkpoint_export/universal.py writes what this makes of least harm; docs/checkpoints.md has the lines
    that mend ``step``."""
    objects, counts, decay = group.run(upstream.zero3_universal_load_shares_a_step, str(tmp_path), timeout=200)[0]
    assert objects == 1
    assert counts == [4.0, 4.0]  # two sub-groups have counted it up, once each: the right number is 3
    assert decay == [0.1, 0.1]


def test_every_group_of_gloo_has_a_thread_that_wakes_up() -> None:
    """Worked around in upstream/torch.py, with which groups share one."""
    bare = "import upstream; print(upstream.gloo_threads_of_groups(8))"
    ours = f"from toolkit.upstream.torch import use_one_gloo_thread; use_one_gloo_thread(); {bare}"
    assert [int(_alone(code).stdout) for code in (bare, ours)] == [8, 0]


def test_two_threads_of_gloo_break_the_heap() -> None:
    """Worked around in upstream/torch.py, in whose process the same lives."""
    bare = "import upstream; upstream.gloo_threads_share_a_string(60)"
    connected = (
        "import os; os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1');"
        "from toolkit.strategies.engines.process_group import connect; connect('cpu');"
        "import upstream; upstream.gloo_threads_share_a_string(5)"
    )
    died, lived = map(_alone, (bare, connected))
    assert died.returncode < 0  # of signal 6 or 11, within a second
    assert lived.returncode == 0, lived.stderr.decode()


def _alone(code: str) -> subprocess.CompletedProcess[bytes]:
    """A process of its own that runs ``code`` beside these files."""
    return subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, timeout=120)
